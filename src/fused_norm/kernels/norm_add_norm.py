"""The norm of a branch, the residual add and the norm of the sum in one pass."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..spec import Casting, NormSpec
from . import reference
from .operator import norm_spec
from .rms_norm import NormOperator


class NormAddNorm(NormOperator):
    """``norm_add_norm`` as an operator."""

    name = "norm_add_norm"
    inner = True
    tensors = "Tensor x, Tensor residual, Tensor? inner_weight, Tensor? weight"
    outputs = ("y", "s")
    kept = ("inner_rstd", "rstd")
    saved = "Tensor s, Tensor x, Tensor? inner_weight, Tensor? weight, Tensor inner_rstd, Tensor rstd"
    facts = "ScalarType residual_dtype"
    gradients = ("dx", "dr", "dinner", "dw")

    def reference(self, spec: NormSpec, *arguments: Any) -> tuple[Tensor, Tensor]:
        return reference.norm_add_norm(spec, *arguments)


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
        TypeError: where ``rms_norm`` raises it.
        ValueError: for a residual of another shape or device, and where ``rms_norm`` raises it.
    """
    return NORM_ADD_NORM.checked(norm_spec(casting, zero_centered, eps), x, residual, inner_weight, weight)
