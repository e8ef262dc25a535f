"""The rotary position embedding of q and k by itself, in one launch each way."""

from __future__ import annotations

from functools import partial
from typing import Any, overload

from torch import Tensor

from . import reference
from .arguments import Refusal, wrong_angles, wrong_flag, wrong_pair
from .heads_operator import HeadsOperator
from .operator import BackwardCall, Spec
from .triton.memory import empty_in_order
from .triton.qk_launch import empty_heads, launch_qk_forward


class Rope(HeadsOperator):
    """``rope`` as an operator, which has no norm.

    The backward turns the other way: of q and k it knows the dtypes and the order in memory alone. ``dtype``: as in
    ``QKNorm``.
    """

    name = "rope"
    has_norm = False
    tensors = "Tensor q, Tensor? k, Tensor cos, Tensor sin"
    options = "int unsqueeze_dim, bool single_rounding, ScalarType? dtype"
    outputs = ("q_out", "k_out")
    saved = "Tensor cos, Tensor sin"
    facts = "int unsqueeze_dim, ScalarType q_dtype, ScalarType? k_dtype, int[] q_order, int[] k_order"
    gradients = ("dq", "dk")

    def wrong(self, spec: Spec, *arguments: Any) -> Refusal | None:
        q, k, *angles, single_rounding, _ = arguments
        sides = [(name, x) for name, x in (("q", q), ("k", k)) if x is not None]
        pair = None if k is None else wrong_pair(q, k, self.name)
        return wrong_angles(sides, *angles) or pair or wrong_flag("single_rounding", single_rounding)

    def reference(self, spec: Spec, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        q, k, cos, sin, unsqueeze_dim, single_rounding, dtype = arguments
        cos, sin = (reference.against_heads(angles, unsqueeze_dim) for angles in (cos, sin))
        q_out = reference.written(reference.rope(q, cos, sin, single_rounding), dtype)
        return q_out, None if k is None else reference.written(reference.rope(k, cos, sin, single_rounding), dtype)

    def run(self, spec: Spec, *arguments: Any, training: bool) -> tuple[Any, ...]:
        q_out, k_out = super().run(spec, *arguments, training=training)
        return q_out, None if arguments[1] is None else k_out

    def forward(self, spec: Spec, *arguments: Any, training: bool, launch: bool = True) -> tuple[Any, ...]:
        q, k, cos, sin, unsqueeze_dim, single_rounding, dtype = arguments
        empty = partial(empty_heads, cos=cos, wanted=dtype, single_rounding=single_rounding)
        outputs = empty(q, q.dtype), None if k is None else empty(k, k.dtype)
        if launch:
            inputs = q, k, None, None, cos, sin
            launch_qk_forward(None, inputs, outputs, unsqueeze_dim, single_rounding=single_rounding)
        return outputs

    def backward(self, spec: Spec, call: BackwardCall, *, launch: bool = True) -> tuple[Tensor | None, ...]:
        (cos, sin), (unsqueeze_dim, *facts) = call.saved, call.facts
        dx = [
            empty_in_order(order, d.shape, dtype, d.device) if need and d is not None else None
            for need, d, dtype, order in zip(call.needed, call.incoming, facts[:2], facts[2:], strict=True)
        ]
        if launch:
            # The first of two sides is there in every launch.
            (d, one), *others = [(d, one) for d, one in zip(call.incoming, dx, strict=True) if one is not None]
            other_d, other = others[0] if others else (None, None)
            inputs = d, other_d, None, None, cos, sin
            launch_qk_forward(None, inputs, (one, other), unsqueeze_dim, inverse=True)
        return tuple(dx)

    def reference_backward(self, spec: Spec, call: BackwardCall) -> tuple[Tensor | None, ...]:
        unsqueeze_dim, *dtypes = call.facts[:3]
        cos, sin = (reference.against_heads(angles, unsqueeze_dim) for angles in call.saved)
        return tuple(
            None if d is None else reference.rope_backward(d, cos, sin).to(dtype)
            for d, dtype in zip(call.incoming, dtypes, strict=True)
        )


ROPE = Rope()


@overload
def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, unsqueeze_dim: int = 1, single_rounding: bool = False
) -> tuple[Tensor, Tensor]: ...
@overload
def rope(
    q: Tensor, k: None, cos: Tensor, sin: Tensor, *, unsqueeze_dim: int = 1, single_rounding: bool = False
) -> tuple[Tensor, None]: ...
def rope(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, unsqueeze_dim: int = 1, single_rounding: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The rotary position embedding (Su et al. 2021, arXiv 2104.09864) of q and k in one launch.

    ``x * cos + rotate_half(x) * sin``, ``rotate_half(x)`` being x's halves swapped and the new first one negated.
    Products and sum are rounded to the dtype that x and cos promote to; with ``single_rounding`` they are computed in
    fp32, and the result is rounded to x's dtype. The backward keeps cos and sin alone.

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

    Returns:
        q and k rotated (None without a k), of the dtype that each promotes to with cos, or with ``single_rounding``
        of their own, and of their own shape. Their memory order is that of q and k if R is D; otherwise they are
        contiguous, as in stock code.

    Raises:
        TypeError: for anything but a dense tensor of floating point, and a single_rounding that is no truth value.
        ValueError: for cos and sin that do not fit q and k, heads of two sizes, and tensors on two devices.
    """
    return ROPE.checked(None, q, k, cos, sin, unsqueeze_dim, single_rounding, None)
