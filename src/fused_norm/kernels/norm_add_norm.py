"""The norm of a branch, the residual add and the norm of the sum in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..spec import Casting, NormSpec
from . import reference
from .arguments import other_order
from .operator import BackwardCall, Facts, Operator, Recompute, Route, Tensors, norm_spec
from .recomputed_norm import norm_recompute
from .rms_norm import RMS_NORM
from .triton.memory import empty_rows_like, empty_weight_grad
from .triton.norm_backward import NormGradients, NormSaved, launch_norm_backward
from .triton.norm_forward import NormInputs, empty_norm, launch_norm_forward


class NormAddNorm(Operator):
    """``norm_add_norm`` as an operator."""

    name = "norm_add_norm"
    tensors = "Tensor x, Tensor residual, Tensor? inner_weight, Tensor? weight"
    outputs = ("y", "s")
    same_shape = ("residual",)
    kept = ("inner_rstd", "rstd")
    saved = "Tensor s, Tensor x, Tensor? inner_weight, Tensor? weight, Tensor inner_rstd, Tensor rstd"
    facts = "ScalarType residual_dtype"
    gradients = ("dx", "dr", "dinner", "dw")

    def unlike_stock(self, spec: NormSpec, *arguments: Any) -> str | None:
        return other_order(*arguments[:2])

    def reference(self, spec: NormSpec, *arguments: Any) -> tuple[Tensor, Tensor]:
        return reference.norm_add_norm(spec, *arguments)

    def forward(self, spec: NormSpec, *arguments: Any, training: bool, launch: bool = True) -> tuple[Any, ...]:
        x, residual, inner_weight, weight = arguments
        inputs = NormInputs(x, weight, residual, inner=True, inner_weight=inner_weight)
        outputs = empty_norm(spec, inputs, training)
        if launch:
            launch_norm_forward(spec, inputs, outputs)
        return outputs

    def save(self, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[Tensors, Facts]:
        x, residual, inner_weight, weight = arguments
        _, s, inner_rstd, rstd = results
        return (s, x, inner_weight, weight, inner_rstd, rstd), (residual.dtype,)

    def recompute(self, spec: NormSpec, arguments: Sequence[Any], results: Sequence[Any]) -> Recompute | None:
        _, s, _, rstd = results
        return norm_recompute(spec, s, arguments[3], rstd)

    def gradients_by(self, route: Route, spec: NormSpec, call: BackwardCall) -> tuple[Tensor | None, ...]:
        dy, ds = call.incoming
        if dy is not None or ds is None:
            return super().gradients_by(route, spec, call)
        # Only the sum was used.
        _, x, inner_weight, _, inner_rstd, _ = call.saved
        need_dx, need_dr, need_dinner, _ = call.needed
        dx = dinner = None
        if need_dx or need_dinner:
            norm_call = BackwardCall((ds,), (x, inner_weight, inner_rstd), (), (need_dx, need_dinner))
            dx, dinner = RMS_NORM.gradients_by(route, spec, norm_call)
        return dx, ds.to(call.facts[0]) if need_dr else None, dinner, None

    def backward(self, spec: NormSpec, call: BackwardCall, *, launch: bool = True) -> tuple[Tensor | None, ...]:
        dy, ds = call.incoming
        s, x, inner_weight, weight, inner_rstd, rstd = call.saved
        need_dx, need_dr, need_dinner, need_dw = call.needed
        dx = empty_rows_like(s, x.dtype) if need_dx else None
        dr = empty_rows_like(s, call.facts[0]) if need_dr else None
        dinner = empty_weight_grad(inner_weight, need_dinner)
        dw = empty_weight_grad(weight, need_dw)
        if launch:
            saved = NormSaved(dy, ds, s, weight, rstd, x, inner_weight, inner_rstd)
            launch_norm_backward(spec, saved, NormGradients(dx, dr, dw, dinner))
        return dx, dr, dinner, dw

    def reference_backward(self, spec: NormSpec, call: BackwardCall) -> tuple[Tensor | None, ...]:
        (dy, ds), (s, x, inner_weight, weight, *_) = call.incoming, call.saved
        g, dw = reference.rms_norm_backward(spec, dy, s, weight, ds)
        dx, dinner = reference.rms_norm_backward(spec, g, x, inner_weight)
        return dx.to(x.dtype), g.to(call.facts[0]), dinner, dw


NORM_ADD_NORM = NormAddNorm()


def norm_add_norm(
    x: Tensor,
    residual: Tensor,
    inner_weight: Tensor | None,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    casting: Casting = "llama",
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
        follows from it. Both have x's shape and memory order.

    Raises:
        TypeError: for a dtype that is not floating point.
        ValueError: for a residual of another shape or device, and where ``rms_norm`` raises it.
    """
    return NORM_ADD_NORM.checked(norm_spec(casting, zero_centered, eps), x, residual, inner_weight, weight)
