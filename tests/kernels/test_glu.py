"""glu: outputs, gradients and strides, held against the stock code and float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.activations import NewGELUActivation

from fused_norm.kernels import glu
from fused_norm.kernels.arguments import GLU_ACTIVATIONS
from fused_norm.kernels.glu import GLU, GLU_FOR_CONSUMERS

from .numerics import BF16, DTYPES, FP16, FP32, Tensors, assert_near, drawn, run, slow

STOCK: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_new": NewGELUActivation(),
}


EVERY = pytest.mark.parametrize("activation", GLU_ACTIVATIONS)


def stock(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return STOCK[activation](gate) * up


def inputs(device: str, *shape: int, gate: torch.dtype = BF16, up: torch.dtype | None = BF16) -> Tensors:
    """gate and up, and the gradient of the product; without up a gate of twice the width."""
    wide = (*shape[:-1], shape[-1] * (1 if up else 2))
    y_dtype = torch.promote_types(gate, up) if up else gate
    return drawn(device, gate=(wide, gate, 2.0), up=(shape, up, 1.0), dy=(shape, y_dtype, 1.0))


def by(function: Callable[..., Tensor], activation: str) -> Callable[[Tensor, Tensor | None], Tensor]:
    """``glu`` or ``stock`` of one activation."""
    return lambda gate, up: function(gate, up, activation)


def assert_right(given: Tensors, activation: str) -> None:
    """No further from float64 than stock code is, and one rounding; units are the largest of a row."""
    ours, theirs = run(by(glu, activation), given), run(by(stock, activation), given)
    assert_near(ours, theirs, run(by(stock, activation), given.mapped(Tensor.double)), {})


@EVERY
@pytest.mark.parametrize("up", [BF16, None, *slow(FP32)], ids=str)
@pytest.mark.parametrize("gate", DTYPES, ids=str)
def test_every_dtype_is_as_accurate_as_the_stock_code(
    gate: torch.dtype, up: torch.dtype | None, activation: str, device: str
) -> None:
    assert_right(inputs(device, 5, 3, 40, gate=gate, up=up), activation)


def _rounded(x: Tensor, activation: str) -> Tensor:
    """The activation, computed in fp32 and rounded.

    On a CPU the erf of torch's gelu is off by 18 roundings, and the last bit of fp32's erf depends on the processor.
    """
    if activation == "gelu":
        wide = x.float()
        erf = torch.erf((wide * 0.5**0.5).double()).float()
        return (wide * (0.5 * (1 + erf))).to(x.dtype)
    if activation == "gelu_new" and not x.is_cuda:  # pow of fp16 is rounded once there
        return 0.5 * x * (1.0 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * (x * x * x))))
    return STOCK[activation](x)


@EVERY
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_the_activation_is_rounded_before_the_product(dtype: torch.dtype, activation: str, device: str) -> None:
    given = inputs(device, 20, 1024, gate=dtype, up=dtype)
    gate, up = given.gate, given.up
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
    given = Tensors(gate=x, up=ones, dy=ones)
    exact = run(by(stock, activation), given.mapped(Tensor.double)).present()
    for name, value in run(by(glu, activation), given).present().items():
        # Where the factor is small PyTorch adds one to what is rounded next to -1.
        truth = exact[name]
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


@pytest.mark.parametrize("width", [1, 17, 2049, *slow(2, 3, 7, 16, 40, 130, 1023, 5000)])
def test_every_width(width: int, device: str) -> None:
    assert_right(inputs(device, 3, width), "silu")
    assert_right(inputs(device, 3, width, up=None), "gelu_tanh")


@pytest.mark.parametrize("rows", [1, 33, *slow(3, 700)])
def test_any_number_of_rows(rows: int, device: str) -> None:
    """One row after the other they are cut anywhere, halves of rows into tiles."""
    for width in (6, 40):
        assert_right(inputs(device, rows, width), "silu")
        assert_right(inputs(device, rows, width, up=None), "silu")


def test_one_row_for_all(device: str) -> None:
    given = inputs(device, 4, 16)
    one = given.up[:1].expand(4, 16)
    found, expected = (run(by(glu, "gelu"), given.but(up=up)).present() for up in (one, one.contiguous()))
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def gradients_of_two_consumers(
    given: Tensors, activation: str, dtype: torch.dtype, used: str, *, fused: bool
) -> list[Tensor]:
    """What two consumers in 16 bits read of the product, and the gradients of gate and up in turn.

    ``used``: the consumers that anything depends on, by their numbers.
    """
    gate, up = (one.clone().requires_grad_() for one in (given.gate, given.up))
    if fused:
        ys = GLU_FOR_CONSUMERS(gate, up, None, None, activation, 2, dtype, 0)
    else:
        y = GLU(gate, up, activation)
        ys = y.to(dtype), y.to(dtype)
    dys = given.dy.to(dtype), (given.dy * 3).sin().to(dtype)
    outputs, incoming = zip(*[(ys[int(place)], dys[int(place)]) for place in used], strict=True)
    return [*ys, *torch.autograd.grad(outputs, (gate, up), incoming)]


@EVERY
@pytest.mark.parametrize("used", ["01", "1"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_for_consumers_it_has_the_bits_of_their_casts(
    dtype: torch.dtype, used: str, activation: str, device: str
) -> None:
    for width in (40, 7):
        given = inputs(device, 2, 5, width, gate=FP32, up=FP32)
        expected = gradients_of_two_consumers(given, activation, dtype, used, fused=False)
        for _ in range(2):  # recorded, and repeated
            computed = gradients_of_two_consumers(given, activation, dtype, used, fused=True)
            assert [one.dtype for one in computed] == [dtype, dtype, FP32, FP32]
            assert computed[0].data_ptr() == computed[1].data_ptr()
            assert all(torch.equal(one, other) for one, other in zip(computed, expected, strict=True))


def test_for_consumers_its_gradients_are_differentiated_again(device: str) -> None:
    given = inputs(device, 3, 8, gate=FP32, up=FP32).mapped(lambda one: one.double().to(FP32))
    seconds = []
    for fused in (True, False):
        gate, up = (one.clone().requires_grad_() for one in (given.gate, given.up))
        if fused:
            y, other = GLU_FOR_CONSUMERS(gate, up, None, None, "silu", 2, BF16, 0)
        else:
            y, other = (GLU(gate, up, "silu").to(BF16) for _ in range(2))
        (dgate,) = torch.autograd.grad((y.float() * other.float()).sum(), gate, create_graph=True)
        seconds += torch.autograd.grad(dgate.square().sum(), up)
    assert (seconds[0] - seconds[1]).norm() < 1e-2 * seconds[1].norm()


def test_without_a_gradient_one_output_serves_all_consumers(device: str) -> None:
    given = inputs(device, 3, 8, gate=FP32, up=FP32)
    y = GLU_FOR_CONSUMERS(given.gate, given.up, None, None, "silu", 2, BF16, 0)
    assert torch.equal(y, glu(given.gate, given.up, "silu").to(BF16))


@EVERY
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_gate_and_up_in_16_bits_have_the_bits_of_their_casts(dtype: torch.dtype, activation: str, device: str) -> None:
    for width in (40, 7):
        given = drawn(device, **dict.fromkeys(("gate", "up", "dy"), ((2, 5, width), dtype, 1.0)))
        dys = given.dy, (given.dy * 3).sin()
        results = []
        for wide in (False, True):
            leaves = [one.clone().requires_grad_() for one in (given.gate, given.up)]
            gate, up = (one.float() for one in leaves) if wide else leaves
            ys = GLU_FOR_CONSUMERS(gate, up, None, None, activation, 2, dtype, 0)
            results.append([*ys, *torch.autograd.grad(ys, leaves, dys)])
        for one, other in zip(*results, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


@EVERY
@pytest.mark.parametrize("wide", [1, 2, 3])
@pytest.mark.parametrize("summed", [False, True])
def test_some_consumers_read_float32(summed: bool, wide: int, activation: str, device: str) -> None:
    for width in (40, 7):
        given = drawn(device, **dict.fromkeys(("a", "b", "c", "d", "dy"), ((2, 5, width), BF16, 1.0)))
        leaves = [one.clone().requires_grad_() for one in (given.a, given.b, given.c, given.d)[: 4 if summed else 2]]
        factors = leaves if summed else [*leaves, None, None]
        of_one = [bool(wide >> place & 1) for place in range(2)]
        dys = [given.dy.float() * (1 + place) if is_wide else given.dy for place, is_wide in enumerate(of_one)]
        (y,) = GLU_FOR_CONSUMERS(*factors, activation, 1, FP32, 0)
        cast = [y if is_wide else y.to(BF16) for is_wide in of_one]
        expected = [*cast, *torch.autograd.grad(cast, leaves, dys)]
        for _ in range(2):  # recorded, and repeated
            ys = GLU_FOR_CONSUMERS(*factors, activation, 2, BF16, wide)
            for one, other in zip([*ys, *torch.autograd.grad(ys, leaves, dys)], expected, strict=True):
                assert one.dtype == other.dtype
                assert torch.equal(one, other)
        with torch.no_grad():
            assert len(GLU_FOR_CONSUMERS(*factors, activation, 2, BF16, wide)) == 2


def test_two_dtypes_are_left_to_glu(device: str) -> None:
    given = inputs(device, 3, 8)
    reason = GLU_FOR_CONSUMERS.differs_from_eager(
        given.gate.bfloat16(), given.up.float(), None, None, "silu", 2, BF16, 0
    )
    assert reason is not None


@EVERY
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_gate_and_up_as_summands_have_the_bits_of_their_sums(dtype: torch.dtype, activation: str, device: str) -> None:
    for width in (40, 7):
        given = drawn(device, **dict.fromkeys(("a", "b", "c", "d", "dy"), ((2, 5, width), dtype, 1.0)))
        leaves = [one.clone().requires_grad_() for one in (given.a, given.b, given.c, given.d)]
        dys = given.dy, (given.dy * 3).sin()
        gate, up = (one.float() + other for one, other in (leaves[::2], leaves[1::2]))
        y = GLU(gate, up, activation)
        expected = torch.autograd.grad((y.to(dtype), y.to(dtype)), leaves, dys)
        for _ in range(2):  # recorded, and repeated
            outputs = GLU_FOR_CONSUMERS(*leaves, activation, 2, dtype, 0)
            assert torch.equal(outputs[0], y.to(dtype))
            for one, other in zip(torch.autograd.grad(outputs, leaves, dys), expected, strict=True):
                assert one.dtype == dtype
                assert torch.equal(one, other)
        by_formula = torch.autograd.grad(
            GLU_FOR_CONSUMERS(*leaves, activation, 2, dtype, 0), leaves, dys, create_graph=True
        )
        for one, other in zip(by_formula, expected, strict=True):
            assert (one - other).norm() < 1e-2 * other.norm()
