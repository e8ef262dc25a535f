"""Residual add and RMSNorm in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..spec import Casting, NormSpec
from . import reference
from .arguments import Refusal, other_order, wrong_mode, wrong_scale
from .operator import BackwardCall, Facts, Operator, Recompute, Route, Tensors, norm_spec
from .recomputed_norm import norm_recompute
from .triton.memory import empty_rows_like, empty_weight_grad
from .triton.norm_backward import NormGradients, NormSaved, launch_norm_backward
from .triton.norm_forward import NormInputs, empty_norm, launch_norm_forward


class AddRMSNorm(Operator):
    """``add_rms_norm`` as an operator."""

    name = "add_rms_norm"
    tensors = "Tensor x, Tensor residual, Tensor? weight"
    options = "str? mode, float scale"
    outputs = ("y", "s")
    same_shape = ("residual",)
    kept = ("rstd",)
    saved = "Tensor s, Tensor? weight, Tensor rstd"
    facts = "ScalarType x_dtype, ScalarType residual_dtype, float scale"
    gradients = ("dx", "dr", "dw")

    def wrong(self, spec: NormSpec, *arguments: Any) -> Refusal | None:
        x, *_, mode, scale = arguments
        return wrong_mode(x, mode) or wrong_scale(scale)

    def unlike_stock(self, spec: NormSpec, *arguments: Any) -> str | None:
        return other_order(*arguments[:2])

    def reference(self, spec: NormSpec, *arguments: Any) -> tuple[Tensor, Tensor]:
        x, residual, weight, _, scale = arguments
        return reference.add_rms_norm(spec, x, residual, weight, scale)

    def forward(self, spec: NormSpec, *arguments: Any, training: bool, launch: bool = True) -> tuple[Any, ...]:
        x, residual, weight, mode, scale = arguments
        inputs = NormInputs(x, weight, residual, scale)
        outputs = empty_norm(spec, inputs, training)
        if launch:
            launch_norm_forward(spec, inputs, outputs, mode)
        return outputs.y, outputs.s, outputs.rstd

    def save(self, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[Tensors, Facts]:
        x, residual, weight, _, scale = arguments
        _, s, rstd = results
        return (s, weight, rstd), (x.dtype, residual.dtype, scale)

    def recompute(self, spec: NormSpec, arguments: Sequence[Any], results: Sequence[Any]) -> Recompute | None:
        _, s, rstd = results
        return norm_recompute(spec, s, arguments[2], rstd)

    def gradients_by(self, route: Route, spec: NormSpec, call: BackwardCall) -> tuple[Tensor | None, ...]:
        dy, ds = call.incoming
        x_dtype, residual_dtype, scale = call.facts
        need_dx, need_dr, need_dw = call.needed
        if dy is None and ds is not None:  # only the sum was used
            dx = (ds if scale == 1.0 else ds * scale).to(x_dtype) if need_dx else None
            return dx, ds.to(residual_dtype) if need_dr else None, None
        # As PyTorch's own add, one gradient for both where they are alike: a second store costs a quarter of the time.
        alike = need_dx and need_dr and x_dtype == residual_dtype and scale == 1.0
        call = call._replace(needed=(need_dx, need_dr and not alike, need_dw))
        dx, dr, dw = super().gradients_by(route, spec, call)
        return dx, dx if alike else dr, dw

    def backward(self, spec: NormSpec, call: BackwardCall, *, launch: bool = True) -> tuple[Tensor | None, ...]:
        (dy, ds), (s, weight, rstd) = call.incoming, call.saved
        x_dtype, residual_dtype, scale = call.facts
        need_dx, need_dr, need_dw = call.needed
        dx = empty_rows_like(s, x_dtype) if need_dx else None
        dr = empty_rows_like(s, residual_dtype) if need_dr else None
        dw = empty_weight_grad(weight, need_dw)
        if launch:
            saved = NormSaved(dy, ds, s, weight, rstd, scale=scale)
            launch_norm_backward(spec, saved, NormGradients(dx, dr, dw))
        return dx, dr, dw

    def reference_backward(self, spec: NormSpec, call: BackwardCall) -> tuple[Tensor | None, ...]:
        (dy, ds), (s, weight, _) = call.incoming, call.saved
        x_dtype, residual_dtype, scale = call.facts
        g, dw = reference.rms_norm_backward(spec, dy, s, weight, ds)
        return (g * scale).to(x_dtype), g.to(residual_dtype), dw


ADD_RMS_NORM = AddRMSNorm()


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    casting: Casting = "llama",
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
        Both have x's shape and memory order. The gradients with respect to x and residual may be one tensor, as those
        of PyTorch's add are.

    Raises:
        TypeError: for a dtype that is not floating point, and for a scale that is not a Python number.
        ValueError: for a residual of another shape or device, and where ``rms_norm`` raises it.
    """
    return ADD_RMS_NORM.checked(norm_spec(casting, zero_centered, eps), x, residual, weight, mode, scale)
