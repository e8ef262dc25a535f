"""gated_rms_norm: outputs, gradients and strides, held against the stock code and float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_norm.kernels import gated_rms_norm

from ..conftest import slow
from .numerics import ACTIVATIONS, BF16, FP16, FP32, Scales, Tensors, assert_near, drawn, run


@dataclass(frozen=True)
class Gated:
    """One gated norm under test: its options and the dtypes of its arguments."""

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

    def inputs(self, device: str, *shape: int) -> Tensors:
        """Draw arguments and the incoming gradient; weights lie far from one and from zero, on both sides."""
        y_dtype = self.x
        if self.w is not None and self.casting == "llama" and not self.norm_before_gate:
            y_dtype = torch.promote_types(self.x, self.w)
        return drawn(
            device,
            x=(shape, self.x, 1.5),
            gate=(shape, self.gate, 2.0),
            w=(shape[-1:], self.w, 1.5),
            dy=(shape, y_dtype, 1.0),
        )

    def fused(self, x: Tensor, gate: Tensor, w: Tensor | None) -> Tensor:
        """Run the kernels."""
        meaning = {name: value for name, value in vars(self).items() if name not in ("x", "gate", "w")}
        return gated_rms_norm(x, gate, w, **meaning)

    def stock(self, x: Tensor, gate: Tensor, w: Tensor | None) -> Tensor:
        """Compute the output as modelling code does; for float64 arguments this is the definition."""
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


def scales(norm: Gated, inputs: Tensors, float64: Tensors) -> Scales:
    """Return the units of errors: a row's largest value, or the largest of the terms of a gradient."""
    exact = inputs.mapped(Tensor.double)
    gamma = torch.ones_like(exact.x[..., :1]) if exact.w is None else exact.w + norm.zero_centered
    act = ACTIVATIONS[norm.activation](exact.gate)
    rows = exact.x if norm.norm_before_gate else exact.x * act
    parts = rows.view(*rows.shape[:-1], norm.groups, -1)
    rstd = (parts.square().mean(-1, keepdim=True) + norm.eps).rsqrt().expand_as(parts).reshape(rows.shape)
    normed = exact.dy * act if norm.norm_before_gate else exact.dy
    terms = (normed * gamma * rstd).abs()
    units = {
        "dx": (terms if norm.norm_before_gate else terms * act.abs()).amax(-1, keepdim=True),
        "dgate": float64.dgate.abs().amax(-1, keepdim=True),
        "dw": (normed * rows * rstd).abs().flatten(0, -2).sum(0),
    }
    if not norm.norm_before_gate:
        units["dgate"] = torch.maximum(units["dgate"], (terms * exact.x.abs()).amax(-1, keepdim=True))
    return units


def assert_right(norm: Gated, inputs: Tensors) -> Tensors:
    """Assert errors at most stock's plus rounding, and that y is rounded at stock's rounding points."""
    ours, stock = run(norm.fused, inputs), run(norm.stock, inputs)
    float64 = run(norm.stock, inputs.mapped(Tensor.double))
    assert_near(ours, stock, float64, scales(norm, inputs, float64))
    distance = (ours.y.double() - stock.y.double()).abs()
    near = 16 * torch.finfo(FP32).eps * stock.y.double().abs()
    assert (distance > near).double().mean().item() <= 0.01 + 1 / distance.numel(), "rounded elsewhere than in stock"
    grain = torch.finfo(norm.x).eps * stock.y.double().abs()
    assert (distance <= 3 * grain + near).all()
    return ours


QWEN, MAMBA = Gated(), Gated(norm_before_gate=False, groups=2)
NORMS = [
    QWEN,
    MAMBA,
    Gated("gemma", activation="sigmoid", w=FP32),
    Gated("gemma", norm_before_gate=False, groups=4, x=FP16, gate=FP32, w=FP16),
    *slow(
        replace(QWEN, x=FP16, w=BF16, zero_centered=True),
        replace(QWEN, x=FP32, gate=FP32, w=FP32, groups=2),
        replace(MAMBA, w=None, gate=FP16),
        replace(MAMBA, activation="sigmoid", zero_centered=True, w=FP32),
        Gated("gemma", norm_before_gate=False, activation="sigmoid", w=None),
    ),
]
ORDERS = pytest.mark.parametrize("norm", [QWEN, MAMBA], ids=str)


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_as_accurate_as_the_stock_code_and_rounded_where_it_rounds(norm: Gated, device: str) -> None:
    assert_right(norm, norm.inputs(device, 5, 3, 136))


@ORDERS
def test_where_the_stock_code_rounds_is_told_from_one_rounding(norm: Gated, device: str) -> None:
    inputs = norm.inputs(device, 20, 512)
    differs = run(norm.fused, inputs).y != run(replace(norm, casting="gemma").stock, inputs).y
    assert differs.double().mean() > 0.05


@ORDERS
@pytest.mark.parametrize("width", [1, 3, 65, *slow(513, 4097)])
def test_every_width_of_a_group(width: int, norm: Gated, device: str) -> None:
    assert_right(norm, norm.inputs(device, 3, width * norm.groups))
    if width < 1000:
        assert_right(replace(norm, groups=3), norm.inputs(device, 2, width * 3))


@ORDERS
def test_what_is_not_finite_stays_in_its_group(norm: Gated, device: str) -> None:
    norm = replace(norm, groups=2)
    inputs = norm.inputs(device, 4, 16)
    inputs.x[1, 2], inputs.gate[2, 9], inputs.gate[3, 0] = float("nan"), float("nan"), float("inf")
    ours, stock = run(norm.fused, inputs), run(norm.stock, inputs)
    for name in ("y", "dx", "dgate"):
        assert torch.equal(getattr(ours, name).isnan(), getattr(stock, name).isnan()), name


def test_a_closed_gate_passes_nothing_on(device: str) -> None:
    for norm in (QWEN, MAMBA, replace(QWEN, activation="sigmoid")):
        inputs = norm.inputs(device, 2, 16)
        inputs.gate.fill_(-1e30)
        for name, value in run(norm.fused, inputs).present().items():
            assert torch.equal(value, torch.zeros_like(value)), name


def test_groups_too_wide_for_a_program_take_the_reference(launches: list[Any], device: str) -> None:
    for norm in (QWEN, MAMBA):
        assert_right(norm, norm.inputs(device, 2, norm.groups * 8193))
    assert not launches
