"""RMSNorm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..spec import Casting, NormSpec
from . import reference
from .arguments import Refusal, wrong_mode
from .operator import BackwardCall, Facts, Operator, Recompute, Tensors, norm_spec
from .recomputed_norm import norm_recompute
from .triton.memory import empty_rows_like, empty_weight_grad
from .triton.norm_backward import NormGradients, NormSaved, launch_norm_backward
from .triton.norm_forward import NormInputs, empty_norm, launch_norm_forward


class RMSNorm(Operator):
    """``rms_norm`` as an operator."""

    name = "rms_norm"
    tensors = "Tensor x, Tensor? weight"
    options = "str? mode"
    outputs = ("y",)
    kept = ("rstd",)
    saved = "Tensor x, Tensor? weight, Tensor rstd"
    gradients = ("dx", "dw")

    def wrong(self, spec: NormSpec, *arguments: Any) -> Refusal | None:
        x, _, mode = arguments
        return wrong_mode(x, mode)

    def reference(self, spec: NormSpec, *arguments: Any) -> Tensor:
        x, weight, _ = arguments
        return reference.rms_norm(spec, x, weight)

    def forward(self, spec: NormSpec, *arguments: Any, training: bool, launch: bool = True) -> tuple[Any, ...]:
        x, weight, mode = arguments
        inputs = NormInputs(x, weight)
        outputs = empty_norm(spec, inputs, training)
        if launch:
            launch_norm_forward(spec, inputs, outputs, mode)
        return outputs.y, outputs.rstd

    def save(self, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[Tensors, Facts]:
        x, weight, _ = arguments
        return (x, weight, results[1]), ()

    def recompute(self, spec: NormSpec, arguments: Sequence[Any], results: Sequence[Any]) -> Recompute | None:
        x, weight, _ = arguments
        return norm_recompute(spec, x, weight, results[1])

    def backward(self, spec: NormSpec, call: BackwardCall, *, launch: bool = True) -> tuple[Tensor | None, ...]:
        (dy,), (x, weight, rstd) = call.incoming, call.saved
        need_dx, need_dw = call.needed
        dx = empty_rows_like(x) if need_dx else None
        dw = empty_weight_grad(weight, need_dw)
        if launch:
            launch_norm_backward(spec, NormSaved(dy, None, x, weight, rstd), NormGradients(dx, None, dw))
        return dx, dw

    def reference_backward(self, spec: NormSpec, call: BackwardCall) -> tuple[Tensor | None, ...]:
        (dy,), (x, weight, _) = call.incoming, call.saved
        dx, dw = reference.rms_norm_backward(spec, dy, x, weight)
        return dx.to(x.dtype), dw


RMS_NORM = RMSNorm()


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    casting: Casting = "llama",
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
        casting: the rounding points and the output's dtype: one of ``fused_norm.spec.CASTINGS``, see ``NormSpec``.
        zero_centered: gamma is ``1 + weight``; rounded to the weight's dtype except under ``gemma``.
        mode: how the forward kernel goes through the rows, one of ``kernels.MODES``; None takes the fastest known.

    Returns:
        y, of x's shape and memory order. Its dtype is x's under ``gemma`` and ``rounded_gamma``, the weight's under
        ``weight_dtype``, else what x and weight promote to.

    Raises:
        TypeError: for a dtype that is not floating point.
        ValueError: for a weight of another width or device, an unknown casting, or a mode that cannot hold a row this
            wide.
    """
    return RMS_NORM.checked(norm_spec(casting, zero_centered, eps), x, weight, mode)
