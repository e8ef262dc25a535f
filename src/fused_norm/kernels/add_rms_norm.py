"""Residual add and RMSNorm in one pass."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..spec import Casting, NormSpec
from . import reference
from .operator import norm_spec
from .rms_norm import NormOperator


class AddRMSNorm(NormOperator):
    """``add_rms_norm`` as an operator."""

    name = "add_rms_norm"
    tensors = "Tensor x, Tensor residual, Tensor? weight"
    options = "str? mode, float scale"
    outputs = ("y", "s")
    kept = ("rstd",)
    saved = "Tensor s, Tensor? weight, Tensor rstd"
    facts = "ScalarType x_dtype, ScalarType residual_dtype, float scale"
    gradients = ("dx", "dr", "dw")

    def reference(self, spec: NormSpec, *arguments: Any) -> tuple[Tensor, Tensor]:
        x, residual, weight, _, scale = arguments
        return reference.add_rms_norm(spec, x, residual, weight, scale)


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
        TypeError: for a scale that is not a Python number, and where ``rms_norm`` raises it.
        ValueError: for a residual of another shape or device, and where ``rms_norm`` raises it.
    """
    return ADD_RMS_NORM.checked(norm_spec(casting, zero_centered, eps), x, residual, weight, mode, scale)
