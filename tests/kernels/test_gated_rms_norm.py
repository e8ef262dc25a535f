"""gated_rms_norm: outputs, gradients and strides, held against the stock code and float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fused_norm.kernels import gated_rms_norm
from fused_norm.kernels.plans import WIDEST_GATED, backward_plan
from fused_norm.kernels.triton import gated_kernels, weight_grad
from fused_norm.kernels.triton.launch import Launch

from .numerics import BF16, FP16, FP32, floor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": functional.silu, "sigmoid": torch.sigmoid}


@dataclass(frozen=True)
class Gated:
    """One gated norm under test: what it means, and the dtypes of its arguments."""

    casting: str = "llama"
    norm_before_gate: bool = True
    activation: str = "silu"
    groups: int = 1
    x: torch.dtype = BF16
    gate: torch.dtype = BF16
    w: torch.dtype | None = BF16
    zero_centered: bool = False
    eps: float = 1e-5

    def __str__(self) -> str:
        order = "norm first" if self.norm_before_gate else "gate first"
        dtypes = [str(dtype).removeprefix("torch.") for dtype in (self.x, self.gate, self.w)]
        centered = ["centered"] if self.zero_centered else []
        return "-".join([self.casting, order, self.activation, f"{self.groups}", *dtypes, *centered])

    def fused(self, x: Tensor, gate: Tensor, w: Tensor | None) -> Tensor:
        """The kernels' output."""
        meaning = {name: value for name, value in vars(self).items() if name not in ("x", "gate", "w")}
        return gated_rms_norm(x, gate, w, **meaning)

    def stock(self, x: Tensor, gate: Tensor, w: Tensor | None) -> Tensor:
        """The output as modelling code computes it; of float64 arguments, the definition."""
        wide = torch.promote_types(x.dtype, FP32)
        rows = x.to(wide)
        act = ACTIVATIONS[self.activation](gate.to(wide))
        if not self.norm_before_gate:
            rows = rows * act
        parts = rows.view(*rows.shape[:-1], self.groups, -1)
        rows = (parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + self.eps)).view(rows.shape)
        if self.casting == "llama":
            rows = rows.to(x.dtype)
        if w is not None:
            gamma = w if self.casting == "llama" else w.to(wide)
            rows = (1 + gamma if self.zero_centered else gamma) * rows
        if self.norm_before_gate:
            rows = rows * act
        return rows.to(x.dtype) if self.norm_before_gate or self.casting == "gemma" else rows


@dataclass
class Inputs:
    """Arguments and the gradient that flows into the output."""

    x: Tensor
    gate: Tensor
    w: Tensor | None
    dy: Tensor

    def double(self) -> Inputs:
        """The same in float64."""
        return Inputs(*(None if one is None else one.double() for one in vars(self).values()))  # type: ignore[arg-type]


def make_inputs(norm: Gated, device: str, *shape: int) -> Inputs:
    """Normally distributed values; weights lie far from one and from zero, on both sides."""
    y_dtype = norm.x
    if norm.w is not None and norm.casting == "llama" and not norm.norm_before_gate:
        y_dtype = torch.promote_types(norm.x, norm.w)
    return Inputs(
        (1.5 * torch.randn(shape, device=device)).to(norm.x),
        (2 * torch.randn(shape, device=device)).to(norm.gate),
        None if norm.w is None else (1.5 * torch.randn(shape[-1:], device=device)).to(norm.w),
        torch.randn(shape, device=device).to(y_dtype),
    )


def run(function: Callable[..., Tensor], given: Inputs, frozen: str = "") -> dict[str, Tensor]:
    """Output and gradients, but for those of arguments in ``frozen``."""
    leaves = {name: None if one is None else one.detach() for name, one in vars(given).items() if name != "dy"}
    wanted = {name: one.requires_grad_() for name, one in leaves.items() if one is not None and name not in frozen}
    y = function(*leaves.values())
    gradients = torch.autograd.grad(y, tuple(wanted.values()), given.dy)
    return {"y": y.detach(), **dict(zip(("d" + name for name in wanted), gradients, strict=True))}


def scales(norm: Gated, given: Inputs, truth: dict[str, Tensor]) -> dict[str, Tensor]:
    """What errors are relative to: a row's largest value, or for a gradient the largest of the terms it is made of."""
    exact = given.double()
    gamma = torch.ones_like(exact.x[..., :1]) if exact.w is None else exact.w + norm.zero_centered
    act = ACTIVATIONS[norm.activation](exact.gate)
    rows = exact.x if norm.norm_before_gate else exact.x * act
    parts = rows.view(*rows.shape[:-1], norm.groups, -1)
    rstd = (parts.square().mean(-1, keepdim=True) + norm.eps).rsqrt().expand_as(parts).reshape(rows.shape)
    normed = exact.dy * act if norm.norm_before_gate else exact.dy
    terms = (normed * gamma * rstd).abs()
    found = {
        "y": truth["y"].abs().amax(-1, keepdim=True),
        "dx": (terms if norm.norm_before_gate else terms * act.abs()).amax(-1, keepdim=True),
        "dgate": truth["dgate"].abs().amax(-1, keepdim=True),
        "dw": (normed * rows * rstd).abs().flatten(0, -2).sum(0),
    }
    if not norm.norm_before_gate:
        found["dgate"] = torch.maximum(found["dgate"], (terms * exact.x.abs()).amax(-1, keepdim=True))
    return found


def assert_right(norm: Gated, given: Inputs) -> dict[str, Tensor]:
    """No further from float64 than stock code is, but for rounding; and y is rounded where stock rounds it."""
    ours, stock, truth = run(norm.fused, given), run(norm.stock, given), run(norm.stock, given.double())
    unit = scales(norm, given, truth)
    for name, value in ours.items():
        expected, exact = stock[name], truth[name]
        assert (value.dtype, value.shape) == (expected.dtype, expected.shape), name
        scale = unit[name].clamp_min(1e-30)
        error, allowed = ((one.double() - exact).abs().div(scale).amax().item() for one in (value, expected))
        assert error <= allowed + floor(value.dtype), f"{name}: error {error:.3g}, the stock code's is {allowed:.3g}"
    distance = (ours["y"].double() - stock["y"].double()).abs()
    near = 16 * torch.finfo(FP32).eps * stock["y"].double().abs()
    assert (distance > near).double().mean().item() <= 0.01 + 1 / distance.numel(), "rounded elsewhere than in stock"
    grain = torch.finfo(norm.x).eps * stock["y"].double().abs()
    assert (distance <= 3 * grain + near).all()
    return ours


def _slow(*values: object) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.slow, id=str(value)) for value in values]


QWEN, MAMBA = Gated(), Gated(norm_before_gate=False, groups=2)
NORMS = [
    QWEN,
    MAMBA,
    Gated("gemma", activation="sigmoid", w=FP32),
    Gated("gemma", norm_before_gate=False, groups=4, x=FP16, gate=FP32, w=FP16),
    *_slow(
        replace(QWEN, w=FP32),
        replace(QWEN, x=FP16, w=BF16, zero_centered=True),
        replace(QWEN, x=FP32, gate=FP32, w=FP32, groups=2),
        replace(QWEN, w=None, activation="sigmoid"),
        replace(MAMBA, w=FP32),
        replace(MAMBA, x=FP32, gate=BF16, w=BF16, groups=1),
        replace(MAMBA, w=None, gate=FP16),
        replace(MAMBA, activation="sigmoid", zero_centered=True),
        Gated("gemma", zero_centered=True, x=FP16, gate=FP16, w=FP16),
        Gated("gemma", norm_before_gate=False, activation="sigmoid", w=None),
    ),
]
ORDERS = pytest.mark.parametrize("norm", [QWEN, MAMBA], ids=str)


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_as_accurate_as_the_stock_code_and_rounded_where_it_rounds(norm: Gated, device: str) -> None:
    assert_right(norm, make_inputs(norm, device, 5, 3, 136))


@ORDERS
def test_where_the_stock_code_rounds_is_told_from_one_rounding(norm: Gated, device: str) -> None:
    given = make_inputs(norm, device, 20, 512)
    apart = run(norm.fused, given)["y"] != run(replace(norm, casting="gemma").stock, given)["y"]
    assert apart.double().mean() > 0.05


@ORDERS
@pytest.mark.parametrize("width", [1, 3, 65, *_slow(2, 7, 123, 513, 1025, 2049, 4097)])
def test_every_width_of_a_group(width: int, norm: Gated, device: str) -> None:
    assert_right(norm, make_inputs(norm, device, 3, width * norm.groups))
    if width < 1000:
        assert_right(replace(norm, groups=3), make_inputs(norm, device, 2, width * 3))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 700])
def test_any_number_of_rows(rows: int, device: str) -> None:
    """More than one tile for every program of the interpreter's grid, and fewer."""
    assert_right(MAMBA, make_inputs(MAMBA, device, rows, 2 * 64))


@ORDERS
def test_one_launch_each_way_that_keeps_x_gate_and_a_number_for_each_group(
    norm: Gated, launched: Callable[[], list[str]], device: str
) -> None:
    given = make_inputs(norm, device, 6, 32)
    leaves = [one.requires_grad_() for one in (given.x, given.gate, given.w)]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = norm.fused(*leaves)
    assert launched() == ["_gated_forward_kernel"]
    assert [t.data_ptr() for t in kept[:3]] == [leaf.data_ptr() for leaf in leaves]
    assert [t.shape for t in kept[3:]] == [(6, norm.groups)]
    torch.autograd.grad(y, leaves, given.dy)
    assert launched() == ["_gated_backward_kernel", "_sum_shares_kernel"]


@ORDERS
@pytest.mark.parametrize("frozen", [("w",), ("gate",), ("x",), ("x", "gate"), ("gate", "w")])
def test_what_is_frozen_gets_no_gradient(
    frozen: tuple[str, ...], norm: Gated, launches: list[Launch], device: str
) -> None:
    given = make_inputs(norm, device, 6, 32)
    everything = run(norm.fused, given)
    launches.clear()
    found = run(norm.fused, given, frozen)
    assert found.keys() == everything.keys() - {"d" + name for name in frozen}
    assert all(torch.equal(value, everything[name]) for name, value in found.items())
    assert sum(t is None for t in launches[1].tensors) == len(frozen)
    assert len(launches) == (2 if "w" in frozen else 3)


@ORDERS
def test_what_is_not_finite_stays_in_its_group(norm: Gated, device: str) -> None:
    norm = replace(norm, groups=2)
    given = make_inputs(norm, device, 4, 16)
    given.x[1, 2], given.gate[2, 9], given.gate[3, 0] = float("nan"), float("nan"), float("inf")
    ours, stock = run(norm.fused, given), run(norm.stock, given)
    for name in ("y", "dx", "dgate"):
        assert torch.equal(ours[name].isnan(), stock[name].isnan()), name


def test_a_closed_gate_passes_nothing_on(device: str) -> None:
    for norm in (QWEN, MAMBA, replace(QWEN, activation="sigmoid")):
        given = make_inputs(norm, device, 2, 16)
        given.gate.fill_(-1e30)
        for name, value in run(norm.fused, given).items():
            assert torch.equal(value, torch.zeros_like(value)), name


def test_float64_and_groups_too_wide_for_a_program_take_the_reference(launches: list[Launch], device: str) -> None:
    for norm in (QWEN, MAMBA):
        given = make_inputs(norm, device, 3, 8).double()
        ours, expected = run(norm.fused, given), run(norm.stock, given)
        assert all(torch.allclose(value, expected[name]) for name, value in ours.items())
        assert_right(norm, make_inputs(norm, device, 2, norm.groups * (WIDEST_GATED + 1)))
    assert not launches


@pytest.mark.slow
def test_the_weights_gradient_has_the_same_bits_every_time(device: str) -> None:
    given = make_inputs(MAMBA, device, 3 * backward_plan(64, section="gated_backward").programs, 128)
    first, second = run(MAMBA.fused, given), run(MAMBA.fused, given)
    assert torch.equal(first["dw"], second["dw"])


@pytest.mark.gpu
def test_another_number_of_rows_compiles_no_kernel_again(device: str) -> None:
    def compiled() -> int:
        kernels = gated_kernels._gated_forward_kernel, gated_kernels._gated_backward_kernel
        caches = (cache for one in (*kernels, weight_grad._sum_shares_kernel) for cache in one.device_caches.values())
        return sum(len(cache[0]) for cache in caches)

    run(MAMBA.fused, make_inputs(MAMBA, device, 64, 96))
    before = compiled()
    for rows in (1, 5, 16, 1000, 4096):
        run(MAMBA.fused, make_inputs(MAMBA, device, rows, 96))
    assert compiled() == before
