"""The norm of a branch and the residual add behind it in one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from ..spec import Casting, NormSpec
from . import reference
from .operator import Operator, norm_spec
from .rms_norm import NormOperator


class NormAdd(NormOperator):
    """``norm_add`` as an operator, the backward of which is that of ``rms_norm``."""

    name = "norm_add"
    inner = True
    tensors = "Tensor x, Tensor residual, Tensor? weight"
    outputs = ("s",)
    kept = ("inner_rstd",)
    saved = "Tensor x, Tensor? weight, Tensor inner_rstd"
    facts = "ScalarType residual_dtype"
    gradients = ("dx", "dr", "dw")
    copies: ClassVar[Mapping[str, Sequence[str]]] = {"weight": ("x",)}

    backward, reference_backward = Operator.backward, Operator.reference_backward

    def reference(self, spec: NormSpec, *arguments: Any) -> Tensor:
        return reference.norm_add(spec, *arguments)


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
        TypeError: where ``rms_norm`` raises it.
        ValueError: for a residual of another shape or device, and where ``rms_norm`` raises it.
    """
    return NORM_ADD.checked(norm_spec(casting, zero_centered, eps), x, residual, weight)
