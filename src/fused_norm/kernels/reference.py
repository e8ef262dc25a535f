"""Formulas in plain PyTorch that several operators share: RMSNorm, activations, gradients by autograd.

A reference, the method of an ``Operator``, is the truth in tests, and the path of tensors that no kernel runs on. Given
float64 tensors it computes in float64 throughout, which is what tests hold everything else against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..spec import NormSpec
from .autocast import set_autocast
from .triton.memory import out_dtype


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def widened(x: Tensor | None) -> Any:
    """Numbers of 16 bits in float32; any other tensor as it is."""
    return x.to(wide_dtype(x.dtype)) if x is not None and x.is_floating_point() else x


def silu(x: Tensor) -> Tensor:
    """SiLU in two steps, because the gradient of PyTorch's own has no forward-mode derivative."""
    return x * torch.sigmoid(x)


def _gelu_new(x: Tensor) -> Tensor:
    """GELU by tanh in single operations, each rounded to the dtype of x."""
    return 0.5 * x * (1.0 + torch.tanh((2.0 / torch.pi) ** 0.5 * (x + 0.044715 * torch.pow(x, 3.0))))


ActivationName = Literal["silu", "gelu", "gelu_tanh", "gelu_new"]
"""The activation of an MLP's gate: x times the logistic function of x, times the normal distribution's (by erf), times
the approximation of the latter by tanh (Hendrycks and Gimpel 2016, arXiv 1606.08415), and that in rounded steps."""

ACTIVATIONS: Mapping[ActivationName, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": torch.ops.aten.silu.default,
        "gelu": torch.ops.aten.gelu.default,
        "gelu_tanh": partial(torch.ops.aten.gelu.default, approximate="tanh"),
        "gelu_new": _gelu_new,
    }
)
"""The activations of an MLP's gate as stock code computes them, by PyTorch's operators: ``F.silu`` may have been
replaced. A module or a function of a model is recognised as one of these."""


class NormFunctions(NamedTuple):
    """The functions that compute the steps of a norm; another function for a step changes the last place of an fp32."""

    root: Callable[[Tensor], Tensor] = torch.rsqrt  # ``v ** -0.5``, or ``v ** 0.5`` if x is divided by it
    apply_root: Callable[[Tensor, Tensor], Tensor] = torch.mul  # computes the normalised row from x and the root
    silu: Callable[[Tensor], Tensor] = silu  # the activation of a gate


_DEFAULTS = NormFunctions()


def rms_norm(
    spec: NormSpec,
    x: Tensor,
    weight: Tensor | None,
    *,
    functions: NormFunctions = _DEFAULTS,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """RMSNorm of the last dimension, with the rounding points of its casting (see ``NormSpec``).

    ``dtype`` is what the castings but ``none`` round to instead of x's own.
    """
    root, apply_root, _ = functions
    if spec.casting == "none":
        return _uncast(spec, x, weight, root)
    dtype = dtype or x.dtype
    wide = wide_dtype(x.dtype)
    x_wide = x.to(wide)
    rstd = root(x_wide.pow(2).mean(-1, keepdim=True) + spec.eps)
    x_hat = x_wide * rstd.to(dtype).to(wide) if spec.casting == "rounded_rstd" else apply_root(x_wide, rstd)
    if weight is None:
        return x_hat.to(dtype)
    if spec.casting == "gemma":
        return (x_hat * gamma(weight.to(wide), spec.zero_centered)).to(dtype)
    if spec.casting == "rounded_gamma":
        return (x_hat * gamma(weight, spec.zero_centered).to(wide)).to(dtype)
    if spec.casting != "weight_dtype":
        x_hat = x_hat.to(dtype)
    elif weight.dtype.itemsize == 2:
        x_hat = x_hat.to(weight.dtype)
    return gamma(weight, spec.zero_centered) * x_hat


def split_pairs(x: Tensor, *, side_by_side: bool) -> tuple[Tensor, Tensor]:
    """The first and the second elements of pairs, which lie side by side, or in the two halves of x."""
    if side_by_side:
        return x[..., ::2], x[..., 1::2]
    a, b = x.chunk(2, dim=-1)
    return a, b


def cast_output(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Cast a result to the dtype that an operator writes: ``dtype``, if given, in place of float32."""
    return x.to(out_dtype(x.dtype, dtype))


def gradients_of(
    function: Callable[..., Any],
    tensors: Sequence[Tensor | None],
    incoming: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of a function's first tensors by PyTorch's autograd, which can be differentiated again.

    Args:
        function: takes ``tensors``, and returns a tensor or several.
        tensors: None for absent ones.
        incoming: the gradients of what the function returns, None for those that nothing depends on.
        needed: for each of the first tensors, whether to compute its gradient, which is None otherwise.
    """
    again, device = torch.is_grad_enabled(), next(d.device.type for d in incoming if d is not None)
    with torch.enable_grad(), set_autocast(device, None):
        # Other tensors, because x may depend on the weight: a tied one is that of the embedding. The product requires a
        # gradient; ``requires_grad_`` is refused inside of ``torch.func.vmap``.
        one = torch.ones((), device="cpu", requires_grad=True)
        leaves = [
            (t.view_as(t) if t.requires_grad else t * one) if need and t is not None else t
            for t, need in zip(tensors, needed, strict=False)
        ]
        outputs = function(*leaves, *tensors[len(leaves) :])
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [(y, d.to(y.dtype)) for y, d in zip(outputs, incoming, strict=True) if d is not None]
        ys, dys = zip(*pairs, strict=True)
        differentiated = [leaf for leaf, need in zip(leaves, needed, strict=True) if need and leaf is not None]
        grads = iter(torch.autograd.grad(ys, differentiated, dys, create_graph=again))
    return tuple(next(grads) if need else None for need in needed)


class _WithGradientTo(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, source: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.dtype = output.dtype

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, grads[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[1].to(ctx.dtype)


with_gradient_to: Any = _WithGradientTo.apply
"""``with_gradient_to(values, source)``: the values of one tensor whose gradient goes to another one."""


def gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    """The factor that the normalised row is multiplied by, in the weight's dtype."""
    return 1.0 + weight if zero_centered else weight


def _uncast(spec: NormSpec, x: Tensor, weight: Tensor | None, inverse_root: Callable[[Tensor], Tensor]) -> Tensor:
    """RMSNorm with every step rounded to x's dtype, but for fp16 squares that would overflow: those stay in fp32."""
    wide = wide_dtype(x.dtype)
    x_wide = x.to(wide)
    mean = _round_in_range(_round_in_range(x_wide * x_wide, x.dtype).mean(-1, keepdim=True), x.dtype)
    shifted = _round_in_range(mean + spec.eps, x.dtype)
    narrow = shifted.to(x.dtype)
    rstd = torch.where(narrow.isinf(), inverse_root(shifted), inverse_root(narrow)).to(x.dtype)
    x_hat = x * rstd
    return x_hat if weight is None else gamma(weight, spec.zero_centered) * x_hat


def _round_in_range(value: Tensor, dtype: torch.dtype) -> Tensor:
    rounded = value.to(dtype).to(value.dtype)
    return torch.where(rounded.isinf(), value, rounded)
