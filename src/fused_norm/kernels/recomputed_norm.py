"""RMSNorm of the same x a second time, from the rstd that the first has kept."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ..spec import NormSpec
from . import reference
from .arguments import Refusal
from .operator import Operator, Recompute
from .triton.memory import empty_rows_like, norm_dtype, written_dtype
from .triton.norm_forward import launch_norm_from_rstd


class RecomputedNorm(Operator):
    """The output of a norm made a second time, bit for bit, from the rstd of the first; it has no gradients."""

    name = "recomputed_norm"
    tensors = "Tensor x, Tensor? weight, Tensor rstd"
    options = "ScalarType? dtype"
    outputs: ClassVar[tuple[str, ...]] = ("y",)
    saved = ""
    gradients = ()

    def wrong(self, spec: NormSpec, *arguments: Any) -> Refusal | None:
        x, _, rstd, *_ = arguments
        if rstd.shape != (*x.shape[:-1], 1):
            return Refusal(f"rstd has shape {tuple(rstd.shape)}, and x {tuple(x.shape)}", ValueError)
        if rstd.dtype != torch.float32:
            return Refusal(f"rstd must be float32, not {rstd.dtype}", TypeError)
        if spec.casting == "none":
            return Refusal("under casting 'none' the forward uses another rstd than it keeps", ValueError)
        return None

    def reference(self, spec: NormSpec, *arguments: Any) -> Any:
        x, weight, _, dtype = arguments
        y = reference.rms_norm(spec, x, weight)
        return y.to(written_dtype(y.dtype, dtype))

    def forward(self, spec: NormSpec, *arguments: Any, training: bool, launch: bool = True) -> tuple[Any, ...]:
        x, weight, rstd, dtype = arguments
        y = empty_rows_like(x, written_dtype(norm_dtype(spec, x.dtype, weight), dtype))
        if launch:
            launch_norm_from_rstd(spec, x, weight, rstd, y)
        return (y,)


RECOMPUTED_NORM = RecomputedNorm()


def norm_recompute(
    spec: NormSpec, x: Tensor, weight: Tensor | None, rstd: Tensor, dtype: torch.dtype | None = None
) -> Recompute | None:
    """Return the call that recomputes a norm of x from its rstd; None under casting ``none``, which keeps another one.

    ``dtype``: that of the output, where its own would be float32.
    """
    return None if spec.casting == "none" else Recompute(RECOMPUTED_NORM, spec, (x, weight, rstd, dtype))
