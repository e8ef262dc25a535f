"""glu: outputs, gradients and strides, held against the stock code and float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fused_norm.kernels import glu
from fused_norm.kernels.arguments import ACTIVATIONS
from fused_norm.kernels.triton import glu_kernels
from fused_norm.kernels.triton.launch import Launch

from .numerics import BF16, DTYPES, FP16, FP32, floor

STOCK: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def _slow(*values: object) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


EVERY = pytest.mark.parametrize("activation", ACTIVATIONS)


def stock(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return STOCK[activation](gate) * up


def inputs(
    device: str, *shape: int, gate: torch.dtype = BF16, up: torch.dtype | None = BF16
) -> tuple[Tensor, Tensor | None, Tensor]:
    """gate and up, and the gradient of the product; without up a gate of twice the width."""
    wide = (*shape[:-1], shape[-1] * (1 if up else 2))
    y_dtype = torch.promote_types(gate, up) if up else gate
    return (
        (2 * torch.randn(wide, device=device)).to(gate),
        torch.randn(shape, device=device).to(up) if up else None,
        torch.randn(shape, device=device).to(y_dtype),
    )


def run(function: Callable[..., Tensor], gate: Tensor, up: Tensor | None, dy: Tensor, *how: Any) -> list[Tensor]:
    """The product and the gradients of gate and up."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in (gate, up)]
    y = function(*leaves, *how)
    return [y.detach(), *torch.autograd.grad(y, [leaf for leaf in leaves if leaf is not None], dy)]


def assert_right(gate: Tensor, up: Tensor | None, dy: Tensor, activation: str) -> list[Tensor]:
    """No further from float64 than stock code is, and one rounding; units are the largest of a row."""
    ours, theirs = run(glu, gate, up, dy, activation), run(stock, gate, up, dy, activation)
    truth = run(stock, *(None if x is None else x.double() for x in (gate, up)), dy.double(), activation)
    for value, expected, exact, name in zip(ours, theirs, truth, ("y", "dgate", "dup"), strict=False):
        assert (value.dtype, value.shape) == (expected.dtype, expected.shape), name
        unit = exact.abs().amax(-1, keepdim=True).clamp_min(1e-30)
        error, allowed = ((x.double() - exact).abs().div(unit).amax().item() for x in (value, expected))
        assert error <= allowed + floor(value.dtype), f"{name}: error {error:.3g}, the stock code's is {allowed:.3g}"
    return ours


@EVERY
@pytest.mark.parametrize("up", [BF16, None, *_slow(FP32)], ids=str)
@pytest.mark.parametrize("gate", DTYPES, ids=str)
def test_every_dtype_is_as_accurate_as_the_stock_code(
    gate: torch.dtype, up: torch.dtype | None, activation: str, device: str
) -> None:
    assert_right(*inputs(device, 5, 3, 40, gate=gate, up=up), activation)


def _rounded(x: Tensor, activation: str) -> Tensor:
    """The activation, computed in fp32 and rounded. On a CPU the erf of torch's gelu is off by 18 roundings."""
    if activation == "gelu":
        wide = x.float()
        return (wide * (0.5 * (1 + torch.erf(wide * 0.5**0.5)))).to(x.dtype)
    return STOCK[activation](x)


@EVERY
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_the_activation_is_rounded_before_the_product(dtype: torch.dtype, activation: str, device: str) -> None:
    gate, up, _ = inputs(device, 20, 1024, gate=dtype, up=dtype)
    assert up is not None
    apart = glu(gate, up, activation) != _rounded(gate, activation) * up
    # The last bit of erf is CUDA's or Triton's, and near -1 one is added to it.
    assert apart.double().mean() < (2e-2 if (activation, device) == ("gelu", "cuda") else 1e-3)
    unrounded = (STOCK[activation](gate.float()) * up.float()).to(dtype)
    assert (glu(gate, up, activation) != unrounded).double().mean() > 0.05, "one rounding is told from two"


@EVERY
def test_activations_agree_with_torch_in_fp32_over_their_whole_range(activation: str, device: str) -> None:
    near = torch.logspace(-30, 2.5, 400, device=device)
    x = torch.cat((near, -near, torch.linspace(-12, 12, 1001, device=device), torch.zeros(3, device=device)))
    ones = torch.ones_like(x)
    ours = run(glu, x, ones, ones, activation)
    exact = run(stock, x.double(), ones.double(), ones.double(), activation)
    for value, truth in zip(ours, exact, strict=True):
        # Where the factor is small PyTorch adds one to what is rounded next to -1.
        assert ((value - truth).abs() <= 4e-7 * truth.abs() + 2e-7 * x.abs().clamp(max=10)).all()
    small = near[near < 1e-4]
    found = glu(small, torch.ones_like(small), activation)
    torch.testing.assert_close(found, STOCK[activation](small), rtol=3e-7, atol=0)


@EVERY
def test_what_is_not_finite_stays_what_it_is_in_torch(activation: str, device: str) -> None:
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 1e38, -1e38, 200.0, -200.0], device=device)
    ones = torch.ones_like(x)
    torch.testing.assert_close(glu(x, ones, activation), _rounded(x, activation), equal_nan=True)
    one = torch.tensor([2.0], device=device)
    assert glu(one, one * float("nan"), activation).isnan()


@pytest.mark.parametrize("width", [1, 17, 2049, *_slow(2, 3, 7, 16, 40, 130, 1023, 5000)])
def test_every_width(width: int, device: str) -> None:
    assert_right(*inputs(device, 3, width), "silu")
    assert_right(*inputs(device, 3, width, up=None), "gelu_tanh")


@pytest.mark.parametrize("rows", [1, 33, *_slow(3, 700)])
def test_any_number_of_rows(rows: int, device: str) -> None:
    """One row after the other they are cut anywhere, halves of rows into tiles."""
    for width in (6, 40):
        assert_right(*inputs(device, rows, width), "silu")
        assert_right(*inputs(device, rows, width, up=None), "silu")


def test_outputs_and_gradients_lie_in_the_order_of_the_gate(device: str) -> None:
    gate, up, dy = (x.transpose(1, 2) if i == 0 else x for i, x in enumerate(inputs(device, 2, 4, 4, 16)))
    for value in run(glu, gate, up, dy, "silu"):
        assert value.stride() == gate.stride()
    assert all(value.is_contiguous() for value in run(glu, up, gate, dy, "silu"))


def test_one_row_for_all(device: str) -> None:
    gate, up, dy = inputs(device, 4, 16)
    one = up[:1].expand(4, 16)
    expected = run(glu, gate, one.contiguous(), dy, "gelu")
    assert all(map(torch.equal, run(glu, gate, one, dy, "gelu"), expected))


@pytest.mark.parametrize("packed", [False, True])
def test_one_launch_each_way_that_keeps_gate_and_up_alone(packed: bool, launches: list[Launch], device: str) -> None:
    gate, up, dy = inputs(device, 6, 32, up=None if packed else BF16)
    leaves = [x.requires_grad_() for x in (gate, up) if x is not None]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = glu(gate, up)
    assert [t.data_ptr() for t in kept] == [leaf.data_ptr() for leaf in leaves]
    torch.autograd.grad(y, leaves, dy)
    assert len(launches) == 2


@pytest.mark.parametrize("frozen", ["gate", "up"])
def test_what_is_frozen_gets_no_gradient(frozen: str, launches: list[Launch], device: str) -> None:
    gate, up, dy = inputs(device, 6, 32)
    both = run(glu, gate, up, dy, "silu")
    launches.clear()
    (gate if frozen == "up" else up).requires_grad_()
    y = glu(gate, up)
    y.backward(dy)
    assert torch.equal(y, both[0])
    assert torch.equal((gate if frozen == "up" else up).grad, both[1 if frozen == "up" else 2])
    assert sum(t is None for t in launches[1].tensors) == 1


def test_float64_takes_the_formula(launches: list[Launch], device: str) -> None:
    gate, up, dy = (None if x is None else x.double() for x in inputs(device, 3, 8))
    for activation in ACTIVATIONS:
        assert all(map(torch.allclose, run(glu, gate, up, dy, activation), run(stock, gate, up, dy, activation)))
    assert not launches


@pytest.mark.gpu
def test_another_number_of_rows_compiles_no_kernel_again(device: str) -> None:
    def compiled() -> int:
        kernels = (glu_kernels._glu_forward_kernel, glu_kernels._glu_backward_kernel)
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    for up in (BF16, None):
        run(glu, *inputs(device, 64, 96, up=up), "silu")
        before = compiled()
        for rows in (1, 5, 16, 1000, 4096):
            run(glu, *inputs(device, rows, 96, up=up), "silu")
        assert compiled() == before
