"""RMSNorm with a gate: of the norm's output, or of its input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..spec import Casting
from . import reference
from .arguments import GATES, Unsupported, check_choice, check_flag
from .operator import BackwardArguments, Operator, Results, norm_spec
from .plans import WIDEST_GATED
from .triton.call import Call
from .triton.gated_kernels import Gating, launch_gated_backward, launch_gated_forward
from .triton.memory import norm_dtype

GateActivation = Literal["silu", "sigmoid"]
"""The activation of a norm's gate, one of ``arguments.GATES``."""


class GatedRMSNorm(Operator):
    """``gated_rms_norm`` as an operator."""

    name = "gated_rms_norm"
    tensors = "Tensor x, Tensor gate, Tensor? weight"
    options = "NormSpec spec, str activation, bool norm_before_gate, int groups"
    outputs = ("y",)
    same_shape = ("gate",)
    extra_saved = ("rstd",)
    saved = "Tensor x, Tensor gate, Tensor? weight, Tensor rstd"
    saved_scalars = options
    gradients = ("dx", "dgate", "dw")
    copies: ClassVar[Mapping[str, Sequence[str]]] = {"weight": ("x", "gate")}

    def check_options(self, *arguments: Any) -> Unsupported | None:
        x, _, _, spec, activation, norm_before_gate, groups = arguments
        if spec.casting not in ("llama", "gemma"):
            return Unsupported(
                f"casting must be llama or gemma, not {spec.casting!r}, which has no rounding points for a gate",
                ValueError,
            )
        if isinstance(groups, bool) or not isinstance(groups, int):
            return Unsupported(f"groups must be an int, not {type(groups).__name__}", TypeError)
        if groups < 1 or x.shape[-1] % groups:
            return Unsupported(
                f"groups must divide x's last dimension, {x.shape[-1]}, into equal parts; {groups} does not", ValueError
            )
        return check_choice("activation", activation, GATES) or check_flag("norm_before_gate", norm_before_gate)

    def why_reference_only(self, *arguments: Any) -> Unsupported | None:
        width, groups = arguments[0].shape[-1], arguments[-1]
        if width // groups <= WIDEST_GATED:
            return None
        return Unsupported(f"rows of {width} in {groups} groups are more than a kernel holds")

    def reference(self, *arguments: Any) -> Tensor:
        x, gate, weight, spec, *how = arguments
        return reference.gated_rms_norm(spec, x, gate, weight, *how)

    def forward(self, call: Call, *arguments: Any, training: bool, copied: Sequence[str] = ()) -> Results:
        x, gate, weight, spec, *how = arguments
        gating = Gating(*how)
        y = call.empty_rows_like(x, x.dtype if gating.norm_first else norm_dtype(spec, x.dtype, weight))
        rstd = call.empty_rows_like(x, torch.float32, width=gating.groups) if training else None
        outputs = y, rstd, call.empty_weight_like(weight, "weight" in copied)
        call.then(launch_gated_forward, spec, x, gate, weight, outputs, gating)
        return outputs

    def backward(self, call: Call, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (dy,), (x, gate, weight, rstd), (spec, *how) = given.incoming, given.saved, given.saved_scalars
        need_dx, need_dgate, need_dw = given.needed
        dx = call.empty_rows_like(x) if need_dx else None
        dgate = call.empty_rows_like(x, gate.dtype) if need_dgate else None
        dw = call.empty_weight_like(weight, need_dw)
        call.then(launch_gated_backward, spec, dy, x, gate, weight, rstd, (dx, dgate, dw), Gating(*how))
        return dx, dgate, dw


GATED_RMS_NORM = GatedRMSNorm()


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    casting: Casting = "llama",
    zero_centered: bool = False,
    norm_before_gate: bool = True,
    activation: GateActivation = "silu",
    groups: int = 1,
) -> Tensor:
    """RMSNorm over the last dimension with a gate, as linear attentions and Mamba 2 end with.

    ``y = norm(x) * act(gate)``, or without ``norm_before_gate`` ``y = norm(x * act(gate))``; the norm is that of
    ``rms_norm``, of each group of columns separately. The activation, and its product with x, are computed in fp32 and
    not rounded. The backward keeps x, gate and a number for each group.

    Args:
        x: [..., N], float32, bfloat16 or float16; float64 is computed by the PyTorch reference, and so are groups of
            more than 8192 columns. Any strides; evenly spaced rows are read where they are, others are copied first.
        gate: x's shape and device; its dtype may differ.
        weight: [N], or None.
        eps: added to the mean of squares of a group.
        casting: ``llama``: the normalised row is rounded to x's dtype before gamma, and what gamma makes of it to what
            x and weight promote to. ``gemma``: nothing is rounded but the result. There are no others.
        zero_centered: gamma is ``1 + weight``, as in ``rms_norm``.
        norm_before_gate: the norm comes first (Qwen3-Next), or the gate does (Mamba 2).
        activation: ``silu`` or ``sigmoid``.
        groups: equal parts of a row, each normalised by its own mean of squares.

    Returns:
        y, of x's shape and memory order. Its dtype is x's if the norm comes first and under ``gemma``, else what x
        and weight promote to.

    Raises:
        TypeError: for groups that are not an int, a norm_before_gate that is not a bool, and as ``rms_norm`` does.
        ValueError: for a gate of another shape or device, groups that do not divide a row, an unknown activation, a
            other casting, and as ``rms_norm`` does.
    """
    spec = norm_spec(casting, zero_centered, eps)
    return GATED_RMS_NORM.checked(x, gate, weight, spec, activation, norm_before_gate, groups)
