"""The norm of a branch and the residual add behind it in one pass: operator, autograd, public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import reference
from .arguments import check_norm, check_residual
from .library import define, direct_apply, given, is_direct, once_differentiable
from .native import Operation
from .rms_norm import norm_gradients
from .sandwich_kernels import empty_sandwich, launch_norm_add_forward
from .triton_utils import runs_kernels_on


def _forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    casting: str,
    zero_centered: bool,
    save_rstd: bool,
) -> tuple[Tensor, Tensor]:
    s, rstd = launch_norm_add_forward(x, residual, weight, eps, casting, zero_centered, save_rstd)
    return s, given(rstd, x)


def _forward_fake(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    casting: str,
    zero_centered: bool,
    save_rstd: bool,
) -> tuple[Tensor, Tensor]:
    _, s, rstd, _ = empty_sandwich(x, residual, weight, None, casting, save_rstd, closed=False)
    return s, given(rstd, x)


_forward_op = define(
    "norm_add_forward(Tensor x, Tensor residual, Tensor? weight, float eps, str casting, bool zero_centered,"
    " bool save_rstd) -> (Tensor s, Tensor rstd)",
    _forward,
    _forward_fake,
)


class _NormAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, casting: str, zero_centered: bool
    ) -> Tensor:
        run = launch_norm_add_forward if is_direct(x) else _forward_op
        s, rstd = run(x, residual, weight, eps, casting, zero_centered, True)
        ctx.save_for_backward(x, weight, rstd)
        ctx.semantics = casting, zero_centered
        ctx.residual_dtype = residual.dtype
        return s

    @staticmethod
    def backward(ctx: Any, ds: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients_once(ctx, ds) if torch.is_grad_enabled() else _gradients(ctx, ds)


def _gradients(ctx: Any, ds: Tensor) -> tuple[Tensor | None, ...]:
    need_dx, need_dr, need_dw, *_ = ctx.needs_input_grad
    dx = dw = None
    if need_dx or need_dw:
        x, weight, rstd = ctx.saved_tensors
        dx, dw = norm_gradients(ds, x, weight, rstd, ctx.semantics, need_dx, need_dw)
    # As an add passes it on: what arrives, unless it must be converted.
    return dx, ds.to(ctx.residual_dtype) if need_dr else None, dw, None, None, None


_gradients_once = once_differentiable(_gradients)
_direct = direct_apply(_NormAdd)


def _plain(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, casting: str, zero_centered: bool) -> Tensor:
    return launch_norm_add_forward(x, residual, weight, eps, casting, zero_centered, False)[0]


_native = Operation(_NormAdd, _plain, tensors=3, values=3)


def norm_add_unchecked(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, casting: str, zero_centered: bool
) -> Tensor:
    """``norm_add`` for arguments known to be good and tensors that kernels take."""
    if not torch.compiler.is_compiling():
        s = _native.call(x, residual, weight, eps, casting, zero_centered)
        if s is not NotImplemented:
            return s
    direct = is_direct(x)
    differentiable = x.requires_grad or residual.requires_grad or (weight is not None and weight.requires_grad)
    if torch.is_grad_enabled() and differentiable:
        apply = _direct if direct else _NormAdd.apply
        return apply(x, residual, weight, eps, casting, zero_centered)
    if direct:
        return _plain(x, residual, weight, eps, casting, zero_centered)
    return _forward_op(x, residual, weight, eps, casting, zero_centered, False)[0]


def norm_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    casting: str = "llama",
    zero_centered: bool = False,
) -> Tensor:
    """A residual plus the RMSNorm of its branch, what the norm returns never written.

    ``s = residual + norm(x)``, the norm rounded to its own dtype first and the sum to its dtype after it.

    Args:
        x: [..., N], the branch; dtypes and strides as in ``rms_norm``.
        residual: x's shape and device; its dtype may differ.
        weight: [N], or None.
        eps: as in ``rms_norm``; so are the next two.
        casting: rounding points and the dtype of the norm.
        zero_centered: gamma is ``1 + weight``.

    Returns:
        s, the new residual, of x's shape and memory order and the dtype that the norm and residual promote to. The
        residual's gradient is the one that arrives.

    Raises:
        TypeError: for a dtype that is not floating point.
        ValueError: for a residual of another shape or device, and where ``rms_norm`` raises it.
        RuntimeError: from a second differentiation of the kernels' gradient (``create_graph=True``).
    """
    if not torch.compiler.is_compiling():
        s = _native.known(x, residual, weight, eps, casting, zero_centered)
        if s is not NotImplemented:
            return s
    check_norm("norm_add", x, weight, casting, zero_centered)
    check_residual("norm_add", x, residual)
    if not runs_kernels_on(x, residual, weight):
        return reference.norm_add(x, residual, weight, eps, casting, zero_centered)
    return norm_add_unchecked(x, residual, weight, eps, casting, zero_centered)
