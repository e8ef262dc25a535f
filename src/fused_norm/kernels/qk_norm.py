"""The norm of q's and k's heads in one launch, with or without RoPE: operator, autograd, public functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import reference
from .arguments import check_heads, check_rope
from .library import define, direct_apply, given, is_direct, once_differentiable
from .native import Operation
from .qk_kernels import empty_gradients, empty_outputs, heads_dim_of, launch_backward, launch_forward
from .triton_utils import runs_kernels_on


def _forward_fake(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    casting: str,
    zero_centered: bool,
    unsqueeze_dim: int,
) -> tuple[Tensor, Tensor]:
    return empty_outputs(q, k, q_weight, k_weight, cos, casting)


def _backward(dq_out: Tensor | None, dk_out: Tensor | None, q: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    grads = launch_backward(dq_out, dk_out, q, *arguments[:-4], needed=arguments[-4:])
    return tuple(given(gradient, q) for gradient in grads)


def _backward_fake(
    dq_out: Tensor | None,
    dk_out: Tensor | None,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    *arguments: Any,
) -> tuple[Tensor, ...]:
    return tuple(given(gradient, q) for gradient in empty_gradients(q, k, q_weight, k_weight, arguments[-4:]))


_forward_op = define(
    "qk_norm_forward(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor? cos, Tensor? sin, float eps,"
    " str casting, bool zero_centered, int unsqueeze_dim) -> (Tensor q_out, Tensor k_out)",
    launch_forward,
    _forward_fake,
)
_backward_op = define(
    "qk_norm_backward(Tensor? dq_out, Tensor? dk_out, Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight,"
    " Tensor? cos, Tensor? sin, float eps, str casting, bool zero_centered, int unsqueeze_dim, bool need_dq,"
    " bool need_dk, bool need_dq_weight, bool need_dk_weight)"
    " -> (Tensor dq, Tensor dk, Tensor dq_weight, Tensor dk_weight)",
    _backward,
    _backward_fake,
)


class _QKNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        eps: float,
        casting: str,
        zero_centered: bool,
        unsqueeze_dim: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin)
        ctx.set_materialize_grads(False)
        ctx.semantics = eps, casting, zero_centered, unsqueeze_dim
        run: Callable[..., Any] = launch_forward if is_direct(q) else _forward_op
        return run(q, k, q_weight, k_weight, cos, sin, eps, casting, zero_centered, unsqueeze_dim)

    @staticmethod
    def backward(ctx: Any, dq_out: Tensor | None, dk_out: Tensor | None) -> tuple[Tensor | None, ...]:
        return _gradients_once(ctx, dq_out, dk_out) if torch.is_grad_enabled() else _gradients(ctx, dq_out, dk_out)


def _gradients(ctx: Any, dq_out: Tensor | None, dk_out: Tensor | None) -> tuple[Tensor | None, ...]:
    need_dq, need_dk, need_dq_weight, need_dk_weight, *_ = ctx.needs_input_grad
    # A side that is unused, or that needs nothing, gets no work; nor does autograd then want a zero for it.
    if dq_out is None or not (need_dq or need_dq_weight):
        dq_out, need_dq, need_dq_weight = None, False, False
    if dk_out is None or not (need_dk or need_dk_weight):
        dk_out, need_dk, need_dk_weight = None, False, False
    present = dk_out if dq_out is None else dq_out
    if present is None:
        return (None,) * 10
    needed = need_dq, need_dk, need_dq_weight, need_dk_weight
    if is_direct(present):
        grads = launch_backward(dq_out, dk_out, *ctx.saved_tensors, *ctx.semantics, needed=needed)
    else:
        grads = _backward_op(dq_out, dk_out, *ctx.saved_tensors, *ctx.semantics, *needed)
        grads = tuple(gradient if need else None for gradient, need in zip(grads, needed, strict=True))
    return *grads, None, None, None, None, None, None


_gradients_once = once_differentiable(_gradients)
_direct = direct_apply(_QKNorm)
_native = Operation(_QKNorm, launch_forward, tensors=6, values=4)


def qk_norm_unchecked(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    casting: str,
    zero_centered: bool,
) -> tuple[Tensor, Tensor]:
    """``qk_norm`` for arguments known to be good and tensors that kernels take."""
    return qk_norm_rope_unchecked(q, k, q_weight, k_weight, None, None, eps, casting, zero_centered, 1)


def qk_norm_rope_unchecked(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    casting: str,
    zero_centered: bool,
    unsqueeze_dim: int,
) -> tuple[Tensor, Tensor]:
    """``qk_norm_rope`` for arguments known to be good, tensors that kernels take, and angles the same for all heads.

    Without cos and sin it is ``qk_norm``.
    """
    if not torch.compiler.is_compiling():
        outputs = _native.call(q, k, q_weight, k_weight, cos, sin, eps, casting, zero_centered, unsqueeze_dim)
        if outputs is not NotImplemented:
            return outputs
    direct = is_direct(q)
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or (q_weight is not None and q_weight.requires_grad)
        or (k_weight is not None and k_weight.requires_grad)
    ):
        run = _direct if direct else _QKNorm.apply
    else:
        run = launch_forward if direct else _forward_op
    return run(q, k, q_weight, k_weight, cos, sin, eps, casting, zero_centered, unsqueeze_dim)


def qk_norm(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float = 1e-6,
    *,
    casting: str = "llama",
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of every head of q and of k, each with its weight, in one launch: ``rms_norm`` of both.

    Args:
        q: [..., D], any leading dimensions; dtypes as in ``rms_norm``. Read where it is if three strides lead to its
            rows, as in heads that are transposed or a slice of a fused projection; copied first if not.
        k: [..., D], its leading dimensions, strides and dtype its own.
        q_weight: [D], or None.
        k_weight: [D], or None if and only if q_weight is.
        eps: added to the mean of squares of each head; for both, as are the next two.
        casting: ``llama``, ``gemma`` or ``none``: the rounding points and the outputs' dtype, see ``NormSpec``.
        zero_centered: gamma is ``1 + weight``; rounded to the weight's dtype except under ``gemma``.

    Returns:
        q and k normalised, each of its own shape and memory order.

    Raises:
        TypeError: for a dtype that is not floating point.
        ValueError: for heads of two sizes, one weight without the other, and where ``rms_norm`` raises it.
        RuntimeError: from a second differentiation of the kernels' gradient (``create_graph=True``).
    """
    if not torch.compiler.is_compiling():
        outputs = _native.known(q, k, q_weight, k_weight, None, None, eps, casting, zero_centered, 1)
        if outputs is not NotImplemented:
            return outputs
    check_heads("qk_norm", q, k, q_weight, k_weight, casting, zero_centered)
    if not runs_kernels_on(q, k, q_weight, k_weight):
        return reference.qk_norm(q, k, q_weight, k_weight, eps, casting, zero_centered)
    return qk_norm_unchecked(q, k, q_weight, k_weight, eps, casting, zero_centered)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    *,
    casting: str = "llama",
    zero_centered: bool = False,
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of every head of q and of k, then the rotary position embedding (Su et al. 2021, arXiv 2104.09864).

    With n the normalised head in its dtype, ``n * cos + rotate_half(n) * sin``, ``rotate_half(n)`` being its halves
    swapped and the new first one negated. Products and sum are rounded to the dtype that n and cos promote to.

    Args:
        q: [B, H, S, D], or [B, S, H, D] with unsqueeze_dim=2; dtypes and strides as in ``qk_norm``.
        k: the same with its own number of heads, strides and dtype.
        q_weight: [D], or None.
        k_weight: [D], or None if and only if q_weight is.
        cos: [B or 1, S, R] or [S, R], the same for all heads, or what broadcasts against [B, H, S, R]; bfloat16,
            float16 or float32. R is even; of a head's D elements the first R are rotated and the others only
            normalised. One that needs a gradient, or varies from head to head, is computed by the PyTorch reference.
        sin: cos's shape and dtype.
        eps: as in ``qk_norm``; so are the next two.
        casting: rounding points and output dtype of the norm.
        zero_centered: gamma is ``1 + weight``.
        unsqueeze_dim: the dimension of the heads, 1 or 2, where a cos with less than 4 dimensions gets one more.

    Returns:
        q and k normalised and rotated, of the dtype that n and cos promote to and of their own shape. Their memory
        order is that of q and k if R is D; otherwise they are contiguous, as in stock code.

    Raises:
        TypeError: for a dtype that is not floating point.
        ValueError: for cos and sin that do not fit q and k, and where ``qk_norm`` raises it.
        RuntimeError: from a second differentiation of the kernels' gradient (``create_graph=True``).
    """
    if not torch.compiler.is_compiling():
        outputs = _native.known(q, k, q_weight, k_weight, cos, sin, eps, casting, zero_centered, unsqueeze_dim)
        if outputs is not NotImplemented:
            return outputs
    check_heads("qk_norm_rope", q, k, q_weight, k_weight, casting, zero_centered)
    check_rope("qk_norm_rope", q, k, cos, sin, unsqueeze_dim)
    learned = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    if learned or heads_dim_of(cos, unsqueeze_dim) is None or not runs_kernels_on(q, k, q_weight, k_weight, cos, sin):
        return reference.qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, casting, zero_centered, unsqueeze_dim)
    return qk_norm_rope_unchecked(q, k, q_weight, k_weight, cos, sin, eps, casting, zero_centered, unsqueeze_dim)
