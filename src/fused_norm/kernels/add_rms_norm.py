"""Residual add and RMSNorm in one pass: operator, autograd, public function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import reference
from .arguments import check_norm, check_residual, check_scale
from .library import define, direct_apply, given, is_direct, once_differentiable
from .native import Operation
from .native.recording import lazy_clone
from .norm_backward import launch_backward
from .norm_forward import empty_outputs, launch_forward
from .triton_utils import empty, empty_rows_like, runs_kernels_on


def _forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    casting: str,
    zero_centered: bool,
    save_rstd: bool,
    mode: str | None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    y, s, rstd = launch_forward(x, residual, weight, eps, casting, zero_centered, save_rstd, mode, scale)
    return y, s, given(rstd, x)


def _forward_fake(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    casting: str,
    zero_centered: bool,
    save_rstd: bool,
    mode: str | None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    y, s, rstd = empty_outputs(x, residual, weight, casting, save_rstd)
    return y, s, given(rstd, x)


def _gradients_of(
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    casting: str,
    zero_centered: bool,
    dx_dtype: torch.dtype | None,
    dr_dtype: torch.dtype | None,
    need_dw: bool,
    scale: float = 1.0,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``(dx, dr, dw)``, each None where it is not needed; a dtype that is None says so of dx and dr."""
    dx, dr, dw = _empty_gradients(s, weight, dx_dtype, dr_dtype, need_dw)
    launch_backward(dy, ds, s, weight, rstd, casting, zero_centered, dx, dr, dw, scale)
    return dx, dr, dw


def _empty_gradients(
    s: Tensor, weight: Tensor | None, dx_dtype: torch.dtype | None, dr_dtype: torch.dtype | None, need_dw: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dx = None if dx_dtype is None else empty_rows_like(s, dx_dtype)
    dr = None if dr_dtype is None else empty_rows_like(s, dr_dtype)
    return dx, dr, empty(weight.shape, weight) if need_dw and weight is not None else None


def _backward(dy: Tensor, ds: Tensor | None, s: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(given(gradient, s) for gradient in _gradients_of(dy, ds, s, *arguments))


def _backward_fake(
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    casting: str,
    zero_centered: bool,
    dx_dtype: torch.dtype | None,
    dr_dtype: torch.dtype | None,
    need_dw: bool,
    scale: float = 1.0,
) -> tuple[Tensor, ...]:
    return tuple(given(gradient, s) for gradient in _empty_gradients(s, weight, dx_dtype, dr_dtype, need_dw))


_forward_op = define(
    "add_rms_norm_forward(Tensor x, Tensor residual, Tensor? weight, float eps, str casting, bool zero_centered,"
    " bool save_rstd, str? mode, float scale=1.0) -> (Tensor y, Tensor s, Tensor rstd)",
    _forward,
    _forward_fake,
)
_backward_op = define(
    "add_rms_norm_backward(Tensor dy, Tensor? ds, Tensor s, Tensor? weight, Tensor rstd, str casting,"
    " bool zero_centered, ScalarType? dx_dtype, ScalarType? dr_dtype, bool need_dw,"
    " float scale=1.0) -> (Tensor dx, Tensor dr, Tensor dw)",
    _backward,
    _backward_fake,
)


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        eps: float,
        casting: str,
        zero_centered: bool,
        mode: str | None,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        run = launch_forward if is_direct(x) else _forward_op
        y, s, rstd = run(x, residual, weight, eps, casting, zero_centered, True, mode, scale)
        ctx.save_for_backward(s, weight, rstd)
        ctx.set_materialize_grads(False)
        ctx.semantics = casting, zero_centered
        ctx.dtypes = x.dtype, residual.dtype
        ctx.scale = scale
        return y, s

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, ds: Tensor | None) -> tuple[Tensor | None, ...]:
        return _gradients_once(ctx, dy, ds) if torch.is_grad_enabled() else _gradients(ctx, dy, ds)


def _gradients(ctx: Any, dy: Tensor | None, ds: Tensor | None) -> tuple[Tensor | None, ...]:
    need_dx, need_dr, need_dw, *_ = ctx.needs_input_grad
    x_dtype, residual_dtype = ctx.dtypes
    scale = ctx.scale
    if dy is None:  # only the sum was used: its gradient goes to both, as copies
        dx = (ds.clone() if scale == 1.0 else ds * scale).to(x_dtype) if need_dx and ds is not None else None
        dr = ds.to(residual_dtype, copy=True) if need_dr and ds is not None else None
        return dx, dr, None, None, None, None, None, None
    s, weight, rstd = ctx.saved_tensors
    direct = is_direct(dy)
    # Unscaled, both gradients are the sum's. They must not share memory that either owner may write to, and a second
    # store costs a quarter of the kernel's time: a lazy clone is a copy of its own the moment that anyone writes to it.
    lazy = need_dx and need_dr and direct and x_dtype == residual_dtype and scale == 1.0
    run: Callable[..., Any] = _gradients_of if direct else _backward_op
    dx, dr, dw = run(
        dy,
        ds,
        s,
        weight,
        rstd,
        *ctx.semantics,
        x_dtype if need_dx else None,
        residual_dtype if need_dr and not lazy else None,
        need_dw,
        scale,
    )
    if lazy:
        dr = lazy_clone(dx)
    return dx if need_dx else None, dr if need_dr else None, dw if need_dw else None, None, None, None, None, None


_gradients_once = once_differentiable(_gradients)
_direct = direct_apply(_AddRMSNorm)


def _plain(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    casting: str,
    zero_centered: bool,
    mode: str | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    y, s, _ = launch_forward(x, residual, weight, eps, casting, zero_centered, False, mode, scale)
    return y, s


_native = Operation(_AddRMSNorm, _plain, tensors=3, values=5)


def add_rms_norm_unchecked(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    casting: str,
    zero_centered: bool,
    mode: str | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """``add_rms_norm`` for arguments known to be good and tensors that kernels take."""
    if not torch.compiler.is_compiling():
        outputs = _native.call(x, residual, weight, eps, casting, zero_centered, mode, scale)
        if outputs is not NotImplemented:
            return outputs
    direct = is_direct(x)
    differentiable = x.requires_grad or residual.requires_grad or (weight is not None and weight.requires_grad)
    if torch.is_grad_enabled() and differentiable:
        apply = _direct if direct else _AddRMSNorm.apply
        return apply(x, residual, weight, eps, casting, zero_centered, mode, scale)
    if direct:
        return _plain(x, residual, weight, eps, casting, zero_centered, mode, scale)
    y, s, _ = _forward_op(x, residual, weight, eps, casting, zero_centered, False, mode, scale)
    return y, s


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    casting: str = "llama",
    zero_centered: bool = False,
    mode: str | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The residual add and the RMSNorm of its sum, the sum read and written once.

    ``s = residual + x * scale``, the product rounded to x's dtype and the sum to its own;
    ``y = s * rsqrt(mean(s^2) + eps) * gamma`` of that rounded sum.

    Args:
        x: [..., N], the branch; dtypes and strides as in ``rms_norm``.
        residual: x's shape and device; its dtype may differ.
        weight: [N], or None.
        eps: as in ``rms_norm``, for the norm of the sum; so are the next two.
        casting: rounding points and output dtype.
        zero_centered: gamma is ``1 + weight``.
        mode: as in ``rms_norm``.
        scale: a Python number that the branch is multiplied by, such as Granite's ``residual_multiplier``.

    Returns:
        ``(y, s)``: the norm and the new residual. s has the dtype that x and residual promote to; y follows from it.
        Both have x's shape and memory order. Their gradients with respect to x and residual never share storage.

    Raises:
        TypeError: for a dtype that is not floating point, and for a scale that is not a Python number.
        ValueError: for a residual of another shape or device, and where ``rms_norm`` raises it.
        RuntimeError: from a second differentiation of the kernels' gradient (``create_graph=True``).
    """
    if not torch.compiler.is_compiling():
        outputs = _native.known(x, residual, weight, eps, casting, zero_centered, mode, scale)
        if outputs is not NotImplemented:
            return outputs
    check_norm("add_rms_norm", x, weight, casting, zero_centered, mode)
    check_residual("add_rms_norm", x, residual)
    check_scale("add_rms_norm", scale)
    if not runs_kernels_on(x, residual, weight):
        return reference.add_rms_norm(x, residual, weight, eps, casting, zero_centered, scale)
    return add_rms_norm_unchecked(x, residual, weight, eps, casting, zero_centered, mode, scale)
