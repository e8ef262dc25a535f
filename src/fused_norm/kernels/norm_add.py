"""The norm of a branch and the residual add behind it in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..spec import Casting, NormSpec
from . import reference
from .arguments import other_order
from .operator import BackwardCall, Facts, Operator, Route, Tensors, norm_spec
from .rms_norm import RMS_NORM
from .triton.norm_forward import NormInputs, empty_norm, launch_norm_forward


class NormAdd(Operator):
    """``norm_add`` as an operator."""

    name = "norm_add"
    tensors = "Tensor x, Tensor residual, Tensor? weight"
    outputs = ("s",)
    same_shape = ("residual",)
    kept = ("rstd",)
    saved = "Tensor x, Tensor? weight, Tensor rstd"
    facts = "ScalarType residual_dtype"
    gradients = ("dx", "dr", "dw")

    def unlike_stock(self, spec: NormSpec, *arguments: Any) -> str | None:
        return other_order(*arguments[:2])

    def reference(self, spec: NormSpec, *arguments: Any) -> Tensor:
        return reference.norm_add(spec, *arguments)

    def forward(self, spec: NormSpec, *arguments: Any, training: bool, launch: bool = True) -> tuple[Any, ...]:
        x, residual, weight = arguments
        inputs = NormInputs(x, None, residual, inner=True, inner_weight=weight, normed=False)
        outputs = empty_norm(spec, inputs, training)
        if launch:
            launch_norm_forward(spec, inputs, outputs)
        return outputs.s, outputs.inner_rstd

    def save(self, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[Tensors, Facts]:
        x, residual, weight = arguments
        return (x, weight, results[1]), (residual.dtype,)

    def gradients_by(self, route: Route, spec: NormSpec, call: BackwardCall) -> tuple[Tensor | None, ...]:
        (ds,), (residual_dtype,) = call.incoming, call.facts
        need_dx, need_dr, need_dw = call.needed
        dx = dw = None
        if need_dx or need_dw:
            norm_call = call._replace(facts=(), needed=(need_dx, need_dw))
            dx, dw = RMS_NORM.gradients_by(route, spec, norm_call)
        # As an add passes it on: what arrives, unless it must be converted.
        return dx, ds.to(residual_dtype) if need_dr and ds is not None else None, dw


NORM_ADD = NormAdd()


def norm_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    casting: Casting = "llama",
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
    """
    return NORM_ADD.checked(norm_spec(casting, zero_centered, eps), x, residual, weight)
