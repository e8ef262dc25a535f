"""The norm of a branch, the residual add and the norm of the sum in one pass: operator, autograd, public function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import reference
from .arguments import check_norm, check_residual
from .library import define, direct_apply, given, is_direct, once_differentiable
from .native import Operation
from .rms_norm import norm_gradients
from .sandwich_kernels import empty_sandwich, launch_norm_add_norm_backward, launch_norm_add_norm_forward
from .triton_utils import empty, empty_rows_like, runs_kernels_on


def _forward(
    x: Tensor,
    residual: Tensor,
    inner_weight: Tensor | None,
    weight: Tensor | None,
    eps: float,
    casting: str,
    zero_centered: bool,
    save_rstd: bool,
) -> tuple[Tensor, ...]:
    y, s, inner_rstd, rstd = launch_norm_add_norm_forward(
        x, residual, inner_weight, weight, eps, casting, zero_centered, save_rstd
    )
    return y, s, given(inner_rstd, x), given(rstd, x)


def _forward_fake(
    x: Tensor,
    residual: Tensor,
    inner_weight: Tensor | None,
    weight: Tensor | None,
    eps: float,
    casting: str,
    zero_centered: bool,
    save_rstd: bool,
) -> tuple[Tensor, ...]:
    y, s, inner_rstd, rstd = empty_sandwich(x, residual, inner_weight, weight, casting, save_rstd)
    return y, s, given(inner_rstd, x), given(rstd, x)


def _gradients_of(
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    x: Tensor,
    inner_weight: Tensor | None,
    weight: Tensor | None,
    inner_rstd: Tensor,
    rstd: Tensor,
    casting: str,
    zero_centered: bool,
    need_dx: bool,
    dr_dtype: torch.dtype | None,
    need_dinner: bool,
    need_dw: bool,
) -> tuple[Tensor | None, ...]:
    """``(dx, dr, dinner, dw)``, each None where it is not needed; a dtype that is None says so of dr."""
    gradients = _empty_gradients(s, x, inner_weight, weight, need_dx, dr_dtype, need_dinner, need_dw)
    launch_norm_add_norm_backward(
        dy, ds, s, x, inner_weight, weight, inner_rstd, rstd, casting, zero_centered, *gradients
    )
    return gradients


def _empty_gradients(
    s: Tensor,
    x: Tensor,
    inner_weight: Tensor | None,
    weight: Tensor | None,
    need_dx: bool,
    dr_dtype: torch.dtype | None,
    need_dinner: bool,
    need_dw: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    return (
        empty_rows_like(s, x.dtype) if need_dx else None,
        None if dr_dtype is None else empty_rows_like(s, dr_dtype),
        empty(inner_weight.shape, inner_weight) if need_dinner and inner_weight is not None else None,
        empty(weight.shape, weight) if need_dw and weight is not None else None,
    )


def _backward(dy: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(given(gradient, dy) for gradient in _gradients_of(dy, *arguments))


def _backward_fake(
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    x: Tensor,
    inner_weight: Tensor | None,
    weight: Tensor | None,
    inner_rstd: Tensor,
    rstd: Tensor,
    casting: str,
    zero_centered: bool,
    *wanted: Any,
) -> tuple[Tensor, ...]:
    return tuple(given(gradient, dy) for gradient in _empty_gradients(s, x, inner_weight, weight, *wanted))


_forward_op = define(
    "norm_add_norm_forward(Tensor x, Tensor residual, Tensor? inner_weight, Tensor? weight, float eps, str casting,"
    " bool zero_centered, bool save_rstd) -> (Tensor y, Tensor s, Tensor inner_rstd, Tensor rstd)",
    _forward,
    _forward_fake,
)
_backward_op = define(
    "norm_add_norm_backward(Tensor dy, Tensor? ds, Tensor s, Tensor x, Tensor? inner_weight, Tensor? weight,"
    " Tensor inner_rstd, Tensor rstd, str casting, bool zero_centered, bool need_dx, ScalarType? dr_dtype,"
    " bool need_dinner, bool need_dw) -> (Tensor dx, Tensor dr, Tensor dinner, Tensor dw)",
    _backward,
    _backward_fake,
)


class _NormAddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        inner_weight: Tensor | None,
        weight: Tensor | None,
        eps: float,
        casting: str,
        zero_centered: bool,
    ) -> tuple[Tensor, Tensor]:
        run = launch_norm_add_norm_forward if is_direct(x) else _forward_op
        y, s, inner_rstd, rstd = run(x, residual, inner_weight, weight, eps, casting, zero_centered, True)
        ctx.save_for_backward(s, x, inner_weight, weight, inner_rstd, rstd)
        ctx.set_materialize_grads(False)
        ctx.semantics = casting, zero_centered
        ctx.residual_dtype = residual.dtype
        return y, s

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, ds: Tensor | None) -> tuple[Tensor | None, ...]:
        return _gradients_once(ctx, dy, ds) if torch.is_grad_enabled() else _gradients(ctx, dy, ds)


def _gradients(ctx: Any, dy: Tensor | None, ds: Tensor | None) -> tuple[Tensor | None, ...]:
    need_dx, need_dr, need_dinner, need_dw, *_ = ctx.needs_input_grad
    s, x, inner_weight, weight, inner_rstd, rstd = ctx.saved_tensors
    if dy is None:  # only the sum was used
        dx = dr = dinner = None
        if ds is not None and (need_dx or need_dinner):
            dx, dinner = norm_gradients(ds, x, inner_weight, inner_rstd, ctx.semantics, need_dx, need_dinner)
        if ds is not None and need_dr:
            dr = ds.to(ctx.residual_dtype, copy=True)
        return dx, dr, dinner, None, None, None, None
    run: Callable[..., Any] = _gradients_of if is_direct(dy) else _backward_op
    dr_dtype = ctx.residual_dtype if need_dr else None
    wanted = need_dx, dr_dtype, need_dinner, need_dw
    gradients = run(dy, ds, s, x, inner_weight, weight, inner_rstd, rstd, *ctx.semantics, *wanted)
    return (
        *(g if needed else None for g, needed in zip(gradients, ctx.needs_input_grad, strict=False)),
        None,
        None,
        None,
    )


_gradients_once = once_differentiable(_gradients)
_direct = direct_apply(_NormAddNorm)


def _plain(
    x: Tensor,
    residual: Tensor,
    inner_weight: Tensor | None,
    weight: Tensor | None,
    eps: float,
    casting: str,
    zero_centered: bool,
) -> tuple[Tensor, Tensor]:
    y, s, *_ = launch_norm_add_norm_forward(x, residual, inner_weight, weight, eps, casting, zero_centered, False)
    return y, s


_native = Operation(_NormAddNorm, _plain, tensors=4, values=3)


def norm_add_norm_unchecked(
    x: Tensor,
    residual: Tensor,
    inner_weight: Tensor | None,
    weight: Tensor | None,
    eps: float,
    casting: str,
    zero_centered: bool,
) -> tuple[Tensor, Tensor]:
    """``norm_add_norm`` for arguments known to be good and tensors that kernels take."""
    if not torch.compiler.is_compiling():
        outputs = _native.call(x, residual, inner_weight, weight, eps, casting, zero_centered)
        if outputs is not NotImplemented:
            return outputs
    direct = is_direct(x)
    differentiable = (
        x.requires_grad
        or residual.requires_grad
        or (inner_weight is not None and inner_weight.requires_grad)
        or (weight is not None and weight.requires_grad)
    )
    if torch.is_grad_enabled() and differentiable:
        apply = _direct if direct else _NormAddNorm.apply
        return apply(x, residual, inner_weight, weight, eps, casting, zero_centered)
    if direct:
        return _plain(x, residual, inner_weight, weight, eps, casting, zero_centered)
    y, s, *_ = _forward_op(x, residual, inner_weight, weight, eps, casting, zero_centered, False)
    return y, s


def norm_add_norm(
    x: Tensor,
    residual: Tensor,
    inner_weight: Tensor | None,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    casting: str = "llama",
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """A residual plus the RMSNorm of its branch, and the RMSNorm of that sum, in one pass (Gemma 2's sandwich).

    ``s = residual + norm(x; inner_weight)``, the norm rounded to its own dtype first and the sum to its dtype after
    it; ``y = norm(s; weight)`` of that rounded sum.

    Args:
        x: [..., N], the branch; dtypes and strides as in ``rms_norm``.
        residual: x's shape and device; its dtype may differ.
        inner_weight: [N], or None: the norm of the branch's.
        weight: [N], or None: the norm of the sum's.
        eps: as in ``rms_norm``, for both norms; so are the next two.
        casting: rounding points and the dtype of each norm.
        zero_centered: gamma is ``1 + weight``.

    Returns:
        ``(y, s)``: the norm and the new residual. s has the dtype that the branch's norm and residual promote to; y
        follows from it. Both have x's shape and memory order. No two gradients share storage.

    Raises:
        TypeError: for a dtype that is not floating point.
        ValueError: for a residual of another shape or device, and where ``rms_norm`` raises it.
        RuntimeError: from a second differentiation of the kernels' gradient (``create_graph=True``).
    """
    if not torch.compiler.is_compiling():
        outputs = _native.known(x, residual, inner_weight, weight, eps, casting, zero_centered)
        if outputs is not NotImplemented:
            return outputs
    check_norm("norm_add_norm", x, inner_weight, casting, zero_centered, weight_name="inner_weight")
    check_norm("norm_add_norm", x, weight, casting, zero_centered)
    check_residual("norm_add_norm", x, residual)
    if not runs_kernels_on(x, residual, inner_weight, weight):
        return reference.norm_add_norm(x, residual, inner_weight, weight, eps, casting, zero_centered)
    return norm_add_norm_unchecked(x, residual, inner_weight, weight, eps, casting, zero_centered)
