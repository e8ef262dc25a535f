"""norm_add_norm and norm_add under test, by the rule of ``numerics``: nearly as near to float64 as the stock code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fused_norm.kernels import norm_add, norm_add_norm

from .numerics import (
    FP32,
    ROUND_RSTD,
    STOCK,
    Norm,
    Scales,
    Tensors,
    assert_near,
    assert_same_rounding,
    drawn,
    none_rounded_once,
    run,
    run_true,
)


@dataclass(frozen=True)
class Sandwich:
    """Dtypes and spec of both norms. If not ``closed``, it is norm_add, which has no second norm, y or dy."""

    casting: str = "llama"
    zero_centered: bool = False
    x: torch.dtype = FP32
    r: torch.dtype = FP32
    inner: torch.dtype | None = FP32
    w: torch.dtype | None = FP32
    eps: float = 1e-6
    closed: bool = True

    def __str__(self) -> str:
        gamma = "centered" if self.zero_centered else "plain"
        dtypes = [self.x, self.r, self.inner, *([self.w] if self.closed else [])]
        return "-".join([self.casting, gamma, *(str(dtype).removeprefix("torch.") for dtype in dtypes)])

    @property
    def opened(self) -> Sandwich:
        """The norm_add with the same spec."""
        return replace(self, closed=False, w=None)

    @property
    def inner_norm(self) -> Norm:
        return Norm(self.casting, self.zero_centered, self.x, self.inner, eps=self.eps)

    @property
    def outer_norm(self) -> Norm:
        return Norm(self.casting, self.zero_centered, self.s, self.w, eps=self.eps)

    @property
    def s(self) -> torch.dtype:
        return torch.promote_types(self.r, self.inner_norm.y_dtype)

    @property
    def y(self) -> torch.dtype:
        return self.outer_norm.y_dtype

    def inputs(self, shape: tuple[int, ...], device: str) -> Tensors:
        """Draw arguments and incoming gradients; weights lie far from one and from zero, on both sides."""
        return drawn(
            device,
            x=(shape, self.x, 3.0),
            r=(shape, self.r, 2.0),
            inner=(shape[-1:], self.inner, 1.5),
            w=(shape[-1:], self.w, 1.5),
            dy=(shape, self.y if self.closed else None, 1.0),
            ds=(shape, self.s, 1.0),
        )

    def fused(self, x: Tensor, r: Tensor, inner: Tensor | None, w: Tensor | None) -> tuple[Tensor, ...]:
        """Return ``(y, s)``, or ``(s,)``."""
        semantics = {"casting": self.casting, "zero_centered": self.zero_centered}
        if self.closed:
            return norm_add_norm(x, r, inner, w, self.eps, **semantics)
        return (norm_add(x, r, inner, self.eps, **semantics),)

    def stock(self, x: Tensor, r: Tensor, inner: Tensor | None, w: Tensor | None) -> tuple[Tensor, ...]:
        norm = STOCK[self.casting]
        s = r + norm(x, inner, self.eps, self.zero_centered)
        return (norm(s, w, self.eps, self.zero_centered), s) if self.closed else (s,)

    def true(self, x: Tensor, r: Tensor, inner: Tensor | None, w: Tensor | None) -> tuple[Tensor, ...]:
        branch, _ = self.inner_norm.true(x, None, inner)
        s = r + branch
        return (self.outer_norm.true(s, None, w)[0], s) if self.closed else (s,)

    def assert_right(self, inputs: Tensors, frozen: Sequence[str] = ()) -> Tensors:
        """Run the kernels and the stock code, assert the rule for every result, and return the kernels' results."""
        ours, stock = (run(function, inputs, frozen) for function in (self.fused, self.stock))
        # A row's rstd that is rounded too may differ from the stock code's by one unit.
        rounded_before = self.x if self.casting in ROUND_RSTD else None
        assert_near(ours, stock, run_true(self, inputs, frozen), scales(self, inputs), rounded_before)
        assert_rounded_as_stock(self, inputs, ours)
        return ours


def scales(sandwich: Sandwich, inputs: Tensors) -> Scales:
    """Return the units of errors: a row's largest value, or the largest of the terms of a gradient."""
    wide = inputs.mapped(Tensor.double)
    x, ds = wide.x, wide.ds
    offset = 1.0 if sandwich.zero_centered else 0.0
    rstd = (x.square().mean(-1, keepdim=True) + sandwich.eps).rsqrt()
    x_hat = (x * rstd).abs()
    inner_gamma = torch.ones_like(x) if wide.inner is None else (wide.inner + offset).abs()
    s = sandwich.true(x, wide.r, wide.inner, wide.w)[-1]
    units = {"s": torch.maximum(s.abs(), x_hat * inner_gamma)}
    terms = ds.abs()
    if sandwich.closed:
        outer_rstd = (s.square().mean(-1, keepdim=True) + sandwich.eps).rsqrt()
        gamma = torch.ones_like(s) if wide.w is None else (wide.w + offset).abs()
        s_hat = (s * outer_rstd).abs()
        g = wide.dy.abs() * gamma
        units["dw"] = wide.dy.abs() * s_hat
        terms = terms + outer_rstd * (g + s_hat * (g * s_hat).mean(-1, keepdim=True))
    units |= {"dr": terms, "dx": terms * inner_gamma * rstd, "dinner": terms * x_hat}
    rows = tuple(range(x.dim() - 1))
    return {
        name: value.sum(rows) if name in ("dw", "dinner") else value.amax(-1, keepdim=True)
        for name, value in units.items()
    }


def assert_rounded_as_stock(sandwich: Sandwich, inputs: Tensors, ours: Tensors) -> None:
    """Assert that both norms and the sum are rounded at stock's rounding points, each given its own input.

    As in ``numerics.assert_same_rounding``; if the branch moves by a unit of its own, so does the sum.
    """
    branch = _rounded_once(sandwich.inner_norm, inputs.x, inputs.inner)
    expected = (inputs.r + branch).double()
    distance = (ours.s.double() - expected).abs()
    noise = 8 * torch.finfo(FP32).eps * (branch.double().abs() + expected.abs())
    share = (distance > noise).double().mean().item()
    allowed = 0.01 + 1 / distance.numel()
    grains = 2
    if sandwich.casting in ROUND_RSTD:
        allowed += 2 / (distance.numel() // distance.shape[-1])
        grains = 4
    assert share <= allowed, f"{share:.2%} of the sums were rounded elsewhere than in the stock code"
    grain = max(torch.finfo(dtype).eps for dtype in (sandwich.x, branch.dtype)) * branch.double().abs()
    grain = grain + torch.finfo(sandwich.s).eps * expected.abs()
    assert (distance <= grains * grain + noise).all()
    if sandwich.closed:
        assert_same_rounding(sandwich.outer_norm, ours.y, _rounded_once(sandwich.outer_norm, ours.s, inputs.w))


def _rounded_once(norm: Norm, x: Tensor, w: Tensor | None) -> Tensor:
    function = none_rounded_once if norm.casting == "none" else STOCK[norm.casting]
    return function(x, w, norm.eps, norm.zero_centered)
