"""RMSNorm: operator, autograd, public function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import reference
from .arguments import check_norm
from .library import define, direct_apply, given, is_direct, once_differentiable
from .native import Operation
from .norm_backward import launch_backward
from .norm_forward import empty_outputs, launch_forward
from .triton_utils import empty, empty_rows_like, runs_kernels_on


def _forward(
    x: Tensor, weight: Tensor | None, eps: float, casting: str, zero_centered: bool, save_rstd: bool, mode: str | None
) -> tuple[Tensor, Tensor]:
    y, _, rstd = launch_forward(x, None, weight, eps, casting, zero_centered, save_rstd, mode)
    return y, given(rstd, x)


def _forward_fake(
    x: Tensor, weight: Tensor | None, eps: float, casting: str, zero_centered: bool, save_rstd: bool, mode: str | None
) -> tuple[Tensor, Tensor]:
    y, _, rstd = empty_outputs(x, None, weight, casting, save_rstd)
    return y, given(rstd, x)


def _gradients_of(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    casting: str,
    zero_centered: bool,
    need_dx: bool,
    need_dw: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """``(dx, dw)``, each None where it is not needed."""
    dx, dw = _empty_gradients(x, weight, need_dx, need_dw)
    launch_backward(dy, None, x, weight, rstd, casting, zero_centered, dx, None, dw)
    return dx, dw


def _empty_gradients(
    x: Tensor, weight: Tensor | None, need_dx: bool, need_dw: bool
) -> tuple[Tensor | None, Tensor | None]:
    dx = empty_rows_like(x) if need_dx else None
    return dx, empty(weight.shape, weight) if need_dw and weight is not None else None


def _backward(dy: Tensor, x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(given(gradient, x) for gradient in _gradients_of(dy, x, *arguments))


def _backward_fake(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    casting: str,
    zero_centered: bool,
    need_dx: bool,
    need_dw: bool,
) -> tuple[Tensor, ...]:
    return tuple(given(gradient, x) for gradient in _empty_gradients(x, weight, need_dx, need_dw))


_forward_op = define(
    "rms_norm_forward(Tensor x, Tensor? weight, float eps, str casting, bool zero_centered, bool save_rstd, str? mode)"
    " -> (Tensor y, Tensor rstd)",
    _forward,
    _forward_fake,
)
_backward_op = define(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, str casting, bool zero_centered,"
    " bool need_dx, bool need_dw) -> (Tensor dx, Tensor dw)",
    _backward,
    _backward_fake,
)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, eps: float, casting: str, zero_centered: bool, mode: str | None
    ) -> Tensor:
        if is_direct(x):
            y, _, rstd = launch_forward(x, None, weight, eps, casting, zero_centered, True, mode)
        else:
            y, rstd = _forward_op(x, weight, eps, casting, zero_centered, True, mode)
        ctx.save_for_backward(x, weight, rstd)
        ctx.semantics = casting, zero_centered
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients_once(ctx, dy) if torch.is_grad_enabled() else _gradients(ctx, dy)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    need_dx, need_dw, *_ = ctx.needs_input_grad
    x, weight, rstd = ctx.saved_tensors
    dx, dw = norm_gradients(dy, x, weight, rstd, ctx.semantics, need_dx, need_dw)
    return dx, dw, None, None, None, None


def norm_gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    semantics: tuple[str, bool],
    need_dx: bool,
    need_dw: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """``(dx, dw)`` from a norm's gradient, each None where it is not needed; semantics: casting and centering."""
    run: Callable[..., Any] = _gradients_of if is_direct(dy) else _backward_op
    dx, dw = run(dy, x, weight, rstd, *semantics, need_dx, need_dw)
    return dx if need_dx else None, dw if need_dw else None


_gradients_once = once_differentiable(_gradients)
_direct = direct_apply(_RMSNorm)


def _plain(x: Tensor, weight: Tensor | None, eps: float, casting: str, zero_centered: bool, mode: str | None) -> Tensor:
    return launch_forward(x, None, weight, eps, casting, zero_centered, False, mode)[0]


_native = Operation(_RMSNorm, _plain, tensors=2, values=4)


def rms_norm_unchecked(
    x: Tensor, weight: Tensor | None, eps: float, casting: str, zero_centered: bool, mode: str | None = None
) -> Tensor:
    """``rms_norm`` for arguments known to be good and tensors that kernels take."""
    if not torch.compiler.is_compiling():
        y = _native.call(x, weight, eps, casting, zero_centered, mode)
        if y is not NotImplemented:
            return y
    direct = is_direct(x)
    if torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)):
        apply = _direct if direct else _RMSNorm.apply
        return apply(x, weight, eps, casting, zero_centered, mode)
    if direct:
        return _plain(x, weight, eps, casting, zero_centered, mode)
    return _forward_op(x, weight, eps, casting, zero_centered, False, mode)[0]


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    casting: str = "llama",
    zero_centered: bool = False,
    mode: str | None = None,
) -> Tensor:
    """RMSNorm over the last dimension (Zhang and Sennrich 2019, arXiv 1910.07467).

    ``y = x * rsqrt(mean(x^2) + eps) * gamma``, gamma being ``weight`` or, zero-centered, ``1 + weight``.

    Args:
        x: [..., N], float32, bfloat16 or float16; float64 is computed by the PyTorch reference. Any strides; evenly
            spaced rows are read where they are, others are copied first.
        weight: [N] of any of these dtypes, or None.
        eps: added to the mean of squares.
        casting: ``llama``, ``gemma`` or ``none``: the rounding points and the output's dtype, see ``NormSpec``.
        zero_centered: gamma is ``1 + weight``; rounded to the weight's dtype except under ``gemma``.
        mode: how the forward kernel goes through the rows, one of ``kernels.MODES``; None takes the fastest known.

    Returns:
        y, of x's shape and memory order. Its dtype is x's under ``gemma``, else what x and weight promote to.

    Raises:
        TypeError: for a dtype that is not floating point.
        ValueError: for a weight of another width or device, an unknown casting, a zero-centered norm without weight, or
            a mode that cannot hold a row this wide.
        RuntimeError: from a second differentiation of the kernels' gradient (``create_graph=True``).
    """
    if not torch.compiler.is_compiling():
        y = _native.known(x, weight, eps, casting, zero_centered, mode)
        if y is not NotImplemented:
            return y
    check_norm("rms_norm", x, weight, casting, zero_centered, mode)
    if not runs_kernels_on(x, weight):
        return reference.rms_norm(x, weight, eps, casting, zero_centered)
    return rms_norm_unchecked(x, weight, eps, casting, zero_centered, mode)
