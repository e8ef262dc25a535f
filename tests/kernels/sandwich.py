"""norm_add_norm and norm_add under test, by the rule of ``numerics``: nearly as near to float64 as the stock code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fused_norm.kernels import norm_add, norm_add_norm

from .numerics import _STOCK, FP32, ROUND_RSTD, Norm, assert_same_rounding, floor, none_rounded_once

Tensors = dict[str, Tensor]
Function = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Sandwich:
    """Dtypes and meaning of both norms; not ``closed``, it is norm_add, which has no second norm, y or dy."""

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
        """norm_add of the same meaning."""
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

    def fused(self, x: Tensor, r: Tensor, inner: Tensor | None, w: Tensor | None = None) -> tuple[Tensor, ...]:
        """``(y, s)``, or ``(s,)``."""
        semantics = {"casting": self.casting, "zero_centered": self.zero_centered}
        if self.closed:
            return norm_add_norm(x, r, inner, w, self.eps, **semantics)
        return (norm_add(x, r, inner, self.eps, **semantics),)

    def stock(self, x: Tensor, r: Tensor, inner: Tensor | None, w: Tensor | None = None) -> tuple[Tensor, ...]:
        norm = _STOCK[self.casting]
        s = r + norm(x, inner, self.eps, self.zero_centered)
        return (norm(s, w, self.eps, self.zero_centered), s) if self.closed else (s,)

    def true(self, x: Tensor, r: Tensor, inner: Tensor | None, w: Tensor | None = None) -> tuple[Tensor, ...]:
        branch, _ = self.inner_norm.true(x, None, inner)
        s = r + branch
        return (self.outer_norm.true(s, None, w)[0], s) if self.closed else (s,)


def make_inputs(sandwich: Sandwich, shape: tuple[int, ...], device: str, seed: int = 0) -> Tensors:
    """Arguments and the gradients that flow in; weights lie far from one and from zero, on both sides."""
    generator = torch.Generator().manual_seed(seed)
    dtypes = {"x": sandwich.x, "r": sandwich.r, "inner": sandwich.inner, "ds": sandwich.s}
    if sandwich.closed:
        dtypes |= {"w": sandwich.w, "dy": sandwich.y}
    spread = {"x": 3.0, "r": 2.0, "inner": 1.5, "w": 1.5, "dy": 1.0, "ds": 1.0}
    return {
        name: (spread[name] * torch.randn(shape[-1:] if name in ("inner", "w") else shape, generator=generator)).to(
            device, dtype
        )
        for name, dtype in dtypes.items()
        if dtype is not None
    }


def run(function: Function, inputs: Tensors, frozen: tuple[str, ...] = (), used: str = "ys") -> Tensors:
    """Outputs and gradients by name; arguments in ``frozen`` take none, and only outputs in ``used`` flow back."""
    leaves = {name: inputs[name].detach() for name in ("x", "r", "inner", "w") if name in inputs}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name not in frozen)
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    arguments = [leaves.get(name) for name in ("x", "r", "inner", "w")]
    outputs = function(*arguments)
    outputs = dict(zip(("y", "s")[-len(outputs) :], outputs, strict=True))
    flowing = [name for name in outputs if name in used and outputs[name].requires_grad]
    gradients = torch.autograd.grad(
        [outputs[name] for name in flowing],
        tuple(wanted.values()),
        [inputs[f"d{name}"] for name in flowing],
        allow_unused=used != "ys",
    )
    results = {name: output.detach() for name, output in outputs.items()}
    return results | {
        f"d{name}": gradient for name, gradient in zip(wanted, gradients, strict=True) if gradient is not None
    }


def scales(sandwich: Sandwich, inputs: Tensors) -> Tensors:
    """What errors are relative to: a row's largest value, or for a gradient the largest of the terms it is made of."""
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    x, r, ds = wide["x"], wide["r"], wide["ds"]
    one = 1.0 if sandwich.zero_centered else 0.0
    rstd = (x.square().mean(-1, keepdim=True) + sandwich.eps).rsqrt()
    x_hat = (x * rstd).abs()
    inner_gamma = (wide["inner"] + one).abs() if "inner" in wide else torch.ones_like(x[..., :])
    outputs = sandwich.true(x, r, wide.get("inner"), wide.get("w"))
    s = outputs[-1]
    found = {"s": torch.maximum(s.abs(), x_hat * inner_gamma)}
    terms = ds.abs()
    if sandwich.closed:
        outer_rstd = (s.square().mean(-1, keepdim=True) + sandwich.eps).rsqrt()
        gamma = (wide["w"] + one).abs() if "w" in wide else torch.ones_like(s)
        found["y"] = outputs[0].abs()
        s_hat = (s * outer_rstd).abs()
        g = wide["dy"].abs() * gamma
        found["dw"] = wide["dy"].abs() * s_hat
        terms = terms + outer_rstd * (g + s_hat * (g * s_hat).mean(-1, keepdim=True))
    found |= {"dr": terms, "dx": terms * inner_gamma * rstd, "dinner": terms * x_hat}
    rows = tuple(range(x.dim() - 1))
    return {
        name: value.sum(rows) if name in ("dw", "dinner") else value.amax(-1, keepdim=True)
        for name, value in found.items()
    }


def assert_within_budget(
    sandwich: Sandwich, inputs: Tensors, frozen: tuple[str, ...] = (), used: str = "ys"
) -> Tensors:
    """Runs the kernels and the stock code, asserts the rule for every result, and returns the kernels' results."""
    ours, stock = (run(function, inputs, frozen, used) for function in (sandwich.fused, sandwich.stock))
    truth = run(sandwich.true, {name: tensor.double() for name, tensor in inputs.items()}, frozen, used)
    assert ours.keys() == stock.keys()
    unit = scales(sandwich, inputs)
    for name, value in ours.items():
        assert value.dtype == stock[name].dtype, f"{name} is {value.dtype}, stock's is {stock[name].dtype}"
        assert value.shape == stock[name].shape, name
        smallest = unit[name].clamp_min(torch.finfo(torch.float64).tiny)
        error, allowed = (
            (result.double() - truth[name]).abs().div(smallest).amax().item() for result in (value, stock[name])
        )
        # A row's rstd that is rounded too may be the neighbour of the stock code's.
        rounding = sandwich.x if sandwich.casting in ROUND_RSTD else value.dtype
        allowed += max(floor(rounding), floor(value.dtype))
        assert error <= allowed, f"{name}: error {error:.3g}, allowed by the stock code's is {allowed:.3g}"
    assert_rounded_as_stock(sandwich, inputs, ours)
    return ours


def assert_rounded_as_stock(sandwich: Sandwich, inputs: Tensors, ours: Tensors) -> None:
    """Asserts that both norms and the sum were rounded where stock rounds them, each given what came before it.

    As in ``numerics.assert_same_rounding``; the sum of a branch that moved by units of its own moves as far.
    """
    branch = _rounded_once(sandwich.inner_norm, inputs["x"], inputs.get("inner"))
    expected = (inputs["r"] + branch).double()
    distance = (ours["s"].double() - expected).abs()
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
        assert_same_rounding(
            sandwich.outer_norm, ours["y"], _rounded_once(sandwich.outer_norm, ours["s"], inputs.get("w"))
        )


def _rounded_once(norm: Norm, x: Tensor, w: Tensor | None) -> Tensor:
    function = none_rounded_once if norm.casting == "none" else _STOCK[norm.casting]
    return function(x, w, norm.eps, norm.zero_centered)
