"""The operators on q and k: the norm of their heads, with or without RoPE, and RoPE alone, in one launch each way.

Kernels, plan rules and launchers have a file of their own, ``qk_kernels``: with them this one would be too long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ..spec import ROTARY_LAYOUTS, Casting, RotaryLayout
from .arguments import Unsupported, check_angles, check_choice, check_flag, check_pair, why_other_dtype
from .backward import BackwardArguments, BackwardImpl
from .norm_spec import norm_spec
from .operator import Operator, Results
from .qk_kernels import empty_heads, launch_qk_backward, launch_qk_forward
from .reference import cast_output, gradients_of, rms_norm, split_pairs, wide_dtype
from .sharded import are_angles_of
from .triton.call import Call
from .triton.memory import heads_dim_of, norm_dtype


class HeadsOperator(Operator):
    """An operator on q and k, whose outputs and ``gradients`` are those of q and of k by turns.

    Kernels take angles that are the same for all heads and want no gradient. A side that is unused, or that needs no
    gradient, gets no work in the backward.
    """

    def why_reference_only(self, *arguments: Any) -> Unsupported | None:
        args = self.by_name(arguments)
        cos, sin = args["cos"], args["sin"]
        if cos is None:
            return None
        heads_dim = heads_dim_of(cos, args["unsqueeze_dim"])
        if heads_dim is None:
            return Unsupported("cos varies from head to head")
        if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
            return Unsupported("cos or sin wants a gradient")
        if not are_angles_of(args["q"], (cos, sin), heads_dim):
            return Unsupported("not every device has cos and sin for all its tokens")
        return None

    def why_unlike_eager(self, *arguments: Any) -> str | None:
        return why_other_dtype("q", "k", *arguments[:2])

    def without_gradient(self, needed: Sequence[bool]) -> tuple[int, ...]:
        return tuple(side for side in (0, 1) if not any(needed[side::2]))

    def compute_grads(self, impl: BackwardImpl, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        idle = [side for side, d in enumerate(given.incoming) if d is None or not any(given.needed[side::2])]
        incoming = [None if side in idle else d for side, d in enumerate(given.incoming)]
        needed = [need and place % 2 not in idle for place, need in enumerate(given.needed)]
        return super().compute_grads(impl, given._replace(incoming=incoming, needed=needed))


class QKNorm(HeadsOperator):
    """``qk_norm_rope`` as an operator; without cos and sin it is ``qk_norm``.

    ``dtype``: if set, outputs that would be float32 are written in this dtype.
    """

    name = "qk_norm"
    tensors = "Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor? cos, Tensor? sin"
    options = "NormSpec spec, int unsqueeze_dim, ScalarType? dtype"
    outputs = ("q_out", "k_out")
    saved = tensors
    saved_scalars = "NormSpec spec, int unsqueeze_dim"
    gradients = ("dq", "dk", "dq_weight", "dk_weight")
    recomputed_by_itself = True
    copies: ClassVar[Mapping[str, Sequence[str]]] = {"q_weight": ("q",), "k_weight": ("k",)}

    def public_name(self, *arguments: Any) -> str:
        return "qk_norm" if arguments[4] is arguments[5] is None else "qk_norm_rope"

    def check_options(self, *arguments: Any) -> Unsupported | None:
        q, k, *weights, cos, sin, _, unsqueeze_dim, _ = arguments
        for names, pair in ((("q_weight", "k_weight"), weights), (("cos", "sin"), (cos, sin))):
            if (pair[0] is None) != (pair[1] is None):
                missing, present = names if pair[0] is None else names[::-1]
                return Unsupported(f"{missing} is None and {present} is not; pass both or neither", ValueError)
        refusal = check_pair(q, k, "rms_norm")
        return refusal or (None if cos is None else check_angles((("q", q), ("k", k)), cos, sin, unsqueeze_dim))

    def reference(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        q, k, q_weight, k_weight, cos, sin, spec, unsqueeze_dim, dtype = arguments
        q, k = rms_norm(spec, q, q_weight), rms_norm(spec, k, k_weight)
        if cos is not None:
            cos, sin = (_broadcast_angles(angles, unsqueeze_dim) for angles in (cos, sin))
            q, k = rotate_by_angles(q, cos, sin), rotate_by_angles(k, cos, sin)
        return cast_output(q, dtype), cast_output(k, dtype)

    def forward(self, call: Call, *arguments: Any, training: bool, copied: Sequence[str] = ()) -> Results:
        *inputs, spec, unsqueeze_dim, dtype = arguments
        q, k, q_weight, k_weight, cos, _ = inputs
        normed = norm_dtype(spec, q.dtype, q_weight), norm_dtype(spec, k.dtype, k_weight)
        outputs = empty_heads(call, q, normed[0], cos, dtype), empty_heads(call, k, normed[1], cos, dtype)
        weights = ("q_weight", q_weight), ("k_weight", k_weight)
        copies = tuple([call.empty_weight_like(weight, name in copied) for name, weight in weights])
        call.then(launch_qk_forward, spec, tuple(inputs), outputs, unsqueeze_dim, copies=copies)
        return *outputs, *copies

    def backward(self, call: Call, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (q, k, q_weight, k_weight, *_), (spec, unsqueeze_dim) = given.saved, given.saved_scalars
        need_dq, need_dk, need_dq_weight, need_dk_weight = given.needed
        dx = call.empty_rows_like(q) if need_dq else None, call.empty_rows_like(k) if need_dk else None
        dw = call.empty_weight_like(q_weight, need_dq_weight), call.empty_weight_like(k_weight, need_dk_weight)
        dq_out, dk_out = given.incoming
        call.then(launch_qk_backward, spec, tuple(given.saved), (dq_out, dk_out), dx, dw, unsqueeze_dim)
        return *dx, *dw


class Rope(HeadsOperator):
    """``rope`` as an operator.

    The backward turns the other way: of q and k it knows the dtypes and the order in memory alone. ``dtype``: as in
    ``QKNorm``.
    """

    name = "rope"
    tensors = "Tensor q, Tensor? k, Tensor cos, Tensor sin"
    options = "int unsqueeze_dim, bool single_rounding, str layout, bool angles_by_pair, ScalarType? dtype"
    outputs = ("q_out", "k_out")
    saved = "Tensor cos, Tensor sin"
    saved_scalars = (
        "int unsqueeze_dim, str layout, bool angles_by_pair,"
        " ScalarType q_dtype, ScalarType? k_dtype, int[] q_order, int[] k_order"
    )
    gradients = ("dq", "dk")

    def check_options(self, *arguments: Any) -> Unsupported | None:
        q, k, cos, sin, unsqueeze_dim, single_rounding, layout, angles_by_pair, _ = arguments
        sides = [(name, x) for name, x in (("q", q), ("k", k)) if x is not None]
        reason = check_angles(sides, cos, sin, unsqueeze_dim) or (None if k is None else check_pair(q, k, self.name))
        for name, flag in (("single_rounding", single_rounding), ("angles_by_pair", angles_by_pair)):
            reason = reason or check_flag(name, flag)
        reason = reason or check_choice("layout", layout, ROTARY_LAYOUTS)
        if reason is None and layout == "deinterleaved" and cos.shape[-1] != q.shape[-1]:
            reason = Unsupported(
                f"cos must be as wide as q, {q.shape[-1]}, in a deinterleaved layout, not {cos.shape[-1]}", ValueError
            )
        return reason

    def reference(self, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        q, k, cos, sin, unsqueeze_dim, *how, dtype = arguments
        cos, sin = (_broadcast_angles(angles, unsqueeze_dim) for angles in (cos, sin))
        q_out = cast_output(rotate_by_angles(q, cos, sin, *how), dtype)
        return q_out, None if k is None else cast_output(rotate_by_angles(k, cos, sin, *how), dtype)

    def run(self, *arguments: Any, training: bool) -> tuple[Any, ...]:
        q_out, k_out = super().run(*arguments, training=training)
        return q_out, None if arguments[1] is None else k_out

    def forward(self, call: Call, *arguments: Any, training: bool) -> Results:
        q, k, cos, sin, unsqueeze_dim, single_rounding, layout, angles_by_pair, dtype = arguments
        empty = partial(empty_heads, call, cos=cos, narrow_dtype=dtype, single_rounding=single_rounding, layout=layout)
        outputs = empty(q, q.dtype), None if k is None else empty(k, k.dtype)
        inputs, how = (q, k, None, None, cos, sin), (unsqueeze_dim, layout, angles_by_pair)
        call.then(launch_qk_forward, None, inputs, outputs, *how, single_rounding=single_rounding)
        return outputs

    def backward(self, call: Call, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        cos, sin = given.saved
        unsqueeze_dim, layout, angles_by_pair, *dtypes, q_order, k_order = given.saved_scalars
        dx = [
            call.empty_in_order(order, d.shape, dtype, d.device) if need and d is not None else None
            for need, d, dtype, order in zip(given.needed, given.incoming, dtypes, (q_order, k_order), strict=True)
        ]
        # The first of two sides is there in every launch.
        (d, grad), *others = [(d, grad) for d, grad in zip(given.incoming, dx, strict=True) if grad is not None]
        other_d, other_grad = others[0] if others else (None, None)
        inputs, outputs = (d, other_d, None, None, cos, sin), (grad, other_grad)
        call.then(launch_qk_forward, None, inputs, outputs, unsqueeze_dim, layout, angles_by_pair, inverse=True)
        return tuple(dx)

    def reference_backward(self, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        unsqueeze_dim, layout, angles_by_pair, *_ = given.saved_scalars
        cos, sin = (_broadcast_angles(angles, unsqueeze_dim) for angles in given.saved)
        how = {"cos": cos, "sin": sin, "layout": layout, "angles_by_pair": angles_by_pair}
        formula = partial(rotate_by_angles, single_rounding=True, **how)
        grads: list[Tensor | None] = []
        for d in given.incoming:
            # A rotation is linear: its gradient does not depend on what is rotated.
            zeros = None if d is None else (torch.zeros(d.shape, dtype=torch.float32, device=d.device),)
            grads += [None] if zeros is None else gradients_of(formula, zeros, (d,), (True,))
        return tuple(grads)


QK_NORM, ROPE = QKNorm(), Rope()


def rotate_by_angles(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    single_rounding: bool = False,
    layout: RotaryLayout = "half",
    angles_by_pair: bool = False,
) -> Tensor:
    """The rotation of the first ``cos.shape[-1]`` elements; each product and their sum are rounded.

    ``single_rounding``: computed in fp32, and nothing but the result is rounded, to x's dtype.
    """
    rotary, dtype, side_by_side = cos.shape[-1], x.dtype, layout == "interleaved"
    if angles_by_pair:
        firsts = [angles[..., : rotary // 2] for angles in (cos, sin)]
        cos, sin = (_join_pairs(first, first, side_by_side=side_by_side) for first in firsts)
    if single_rounding:
        wide = wide_dtype(dtype)
        x, cos, sin = x.to(wide), cos.to(wide), sin.to(wide)
    front = x[..., :rotary]
    a, b = split_pairs(front, side_by_side=layout != "half")
    if layout == "deinterleaved":
        front = torch.cat((a, b), dim=-1)
    rotated = front * cos + _join_pairs(-b, a, side_by_side=side_by_side) * sin
    y = rotated if rotary == x.shape[-1] else torch.cat((rotated, x[..., rotary:]), dim=-1)
    return y.to(dtype) if single_rounding else y


def _join_pairs(a: Tensor, b: Tensor, *, side_by_side: bool) -> Tensor:
    """The tensor whose ``split_pairs`` are a and b."""
    if side_by_side:
        # Not by `flatten`, which gradients in batches do not know.
        return torch.stack((a, b), dim=-1).reshape(*a.shape[:-1], 2 * a.shape[-1])
    return torch.cat((a, b), dim=-1)


def _broadcast_angles(angles: Tensor, unsqueeze_dim: int) -> Tensor:
    """Four-dimensional cos or sin, which broadcast against q and k."""
    angles = angles[None] if angles.dim() == 2 else angles
    return angles.unsqueeze(unsqueeze_dim) if angles.dim() == 3 else angles


TensorOrNone = TypeVar("TensorOrNone", Tensor, None, Tensor | None)


def qk_norm(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float = 1e-6,
    *,
    casting: Casting = "llama",
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
        casting: the rounding points and the outputs' dtype: one of ``fused_norm.spec.CASTINGS``, see ``NormSpec``.
        zero_centered: gamma is ``1 + weight``; rounded to the weight's dtype except under ``gemma``.

    Returns:
        q and k normalised, each of its own shape and memory order.

    Raises:
        TypeError: as ``rms_norm`` does.
        ValueError: for heads of two sizes, one weight without the other, and as ``rms_norm`` does.
    """
    return QK_NORM.checked(q, k, q_weight, k_weight, None, None, norm_spec(casting, zero_centered, eps), 1, None)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    *,
    casting: Casting = "llama",
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
        TypeError: for cos and sin that are None, and as ``rms_norm`` does.
        ValueError: for cos and sin that do not fit q and k, and as ``qk_norm`` does.
    """
    if cos is None and sin is None:
        raise TypeError("qk_norm_rope: cos and sin must be tensors, not None; qk_norm goes without them")
    spec = norm_spec(casting, zero_centered, eps)
    return QK_NORM.checked(q, k, q_weight, k_weight, cos, sin, spec, unsqueeze_dim, None)


def rope(
    q: Tensor,
    k: TensorOrNone,
    cos: Tensor,
    sin: Tensor,
    *,
    unsqueeze_dim: int = 1,
    single_rounding: bool = False,
    layout: RotaryLayout = "half",
    angles_by_pair: bool = False,
) -> tuple[Tensor, TensorOrNone]:
    """The rotary position embedding (Su et al. 2021, arXiv 2104.09864) of q and k in one launch.

    ``x * cos + rotate_half(x) * sin``, ``rotate_half(x)`` being x's halves swapped and the new first one negated, or
    with another ``layout`` the two elements of each pair of neighbours. Products and sum are rounded to the dtype that
    x and cos promote to; with ``single_rounding`` they are computed in fp32, and the result is rounded to x's dtype.
    The backward keeps cos and sin alone.

    Args:
        q: [B, H, S, D], or [B, S, H, D] with unsqueeze_dim=2; float32, bfloat16 or float16, float64 is computed by the
            PyTorch reference. Read where it is if its rows are contiguous, copied first if not.
        k: the same with its own number of heads, strides and dtype; None rotates q alone.
        cos: [B or 1, S, R] or [S, R], the same for all heads, or what broadcasts against [B, H, S, R]; any of these
            dtypes. R is even; of a head's D elements the first R are rotated and the others stay what they are. One
            that needs a gradient, or varies from head to head, is computed by the PyTorch reference.
        sin: cos's shape and dtype.
        unsqueeze_dim: the dimension of the heads, 1 or 2, where a cos with less than 4 dimensions gets one more.
        single_rounding: nothing but the result is rounded, as in the vision towers of Qwen2-VL.
        layout: which elements are turned together. ``half``: each with the one R / 2 after it, as in Llama.
            ``interleaved``: neighbours, the first with the second one, as in GLM-4 and Cohere. ``deinterleaved``:
            neighbours of q and k, whose results lie R / 2 apart, as in DeepSeek-V3; R is D.
        angles_by_pair: the first R / 2 elements of cos and sin are the angles of the pairs, and the others are not
            read; without it each element of the result has the angle at its own place.

    Returns:
        q and k rotated (None without a k), of the dtype that each promotes to with cos, or with ``single_rounding``
        of their own, and of their own shape. Their memory order is that of q and k if R is D and the layout is not
        ``deinterleaved``; otherwise they are contiguous, as in stock code.

    Raises:
        TypeError: for anything but a dense tensor of floating point, and a flag that is no truth value.
        ValueError: for cos and sin that do not fit q and k, heads of two sizes, tensors on two devices, and a layout
            that is none of these.
    """
    return ROPE.checked(q, k, cos, sin, unsqueeze_dim, single_rounding, layout, angles_by_pair, None)
