"""The gate of an MLP: the activation of one projection times another projection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from . import reference
from .arguments import ACTIVATIONS, Unsupported, check_choice, other_dtype
from .operator import BackwardCall, Operator, Recompute, Spec
from .triton.glu_kernels import empty_product, launch_glu_backward, launch_glu_forward
from .triton.memory import empty_rows_like

Activation = Literal["silu", "gelu", "gelu_tanh"]
"""The activation of an MLP's gate, one of ``arguments.ACTIVATIONS``."""


class Glu(Operator):
    """``glu`` as an operator, which has no norm."""

    name = "glu"
    has_norm = False
    tensors = "Tensor gate, Tensor? up"
    options = "str activation"
    outputs = ("y",)
    same_shape = ("up",)
    saved = tensors
    saved_scalars = options
    gradients = ("dgate", "dup")

    def check_options(self, spec: Spec, *arguments: Any) -> Unsupported | None:
        gate, up, activation = arguments
        if up is None and gate.shape[-1] % 2:
            return Unsupported(
                "without up, gate must have an even last dimension, whose halves are gate and up, not shape"
                f" {tuple(gate.shape)}",
                ValueError,
            )
        return check_choice("activation", activation, ACTIVATIONS)

    def differs_from_eager(self, spec: Spec, *arguments: Any) -> str | None:
        return other_dtype("gate", "up", *arguments[:2])

    def is_elementwise(self, *tensors: Any) -> bool:
        return tensors[1] is not None

    def forward(self, spec: Spec, *arguments: Any, training: bool, launch: bool = True) -> tuple[Any, ...]:
        gate, up, activation = arguments
        y = empty_product(gate, up)
        if launch:
            launch_glu_forward(gate, up, y, activation)
        return (y,)

    def recompute(self, spec: Spec, arguments: Sequence[Any], results: Sequence[Any]) -> Recompute | None:
        return Recompute(self, spec, arguments)

    def backward(self, spec: Spec, call: BackwardCall, *, launch: bool = True) -> tuple[Tensor | None, ...]:
        (dy,), (gate, up), (need_dgate, need_dup) = call.incoming, call.saved, call.needed
        dgate = empty_rows_like(gate) if need_dgate else None
        dup = empty_rows_like(gate, up.dtype) if need_dup else None
        if launch:
            launch_glu_backward(gate, up, dy, dgate, dup, call.saved_scalars[0])
        return dgate, dup

    def reference_backward(self, spec: Spec, call: BackwardCall) -> tuple[Tensor | None, ...]:
        (dy,), (gate, up) = call.incoming, call.saved
        return reference.glu_backward(dy, gate, up, call.saved_scalars[0])


GLU = Glu()


def glu(gate: Tensor, up: Tensor | None = None, activation: Activation = "silu") -> Tensor:
    """A gated linear unit (Shazeer 2020, arXiv 2002.05202), its activation's result never written.

    ``y = act(gate) * up``, the activation computed in fp32 and rounded to gate's dtype first. The backward keeps gate
    and up alone.

    Args:
        gate: [..., I], float32, bfloat16 or float16; float64 is computed by the PyTorch reference. Any strides; evenly
            spaced rows are read where they are, others are copied first. Without up [..., 2 I]: the first half of each
            row is the gate, the second what it is multiplied by, and both have one gradient.
        up: gate's shape and device; its dtype may differ.
        activation: ``silu``, ``gelu`` (by erf), or ``gelu_tanh``, PyTorch's ``gelu(approximate="tanh")``.

    Returns:
        y, [..., I] in gate's memory order, of the dtype that gate and up promote to.

    Raises:
        TypeError: for anything but a dense tensor of floating point.
        ValueError: for another activation, an up of another shape or device, or without up rows of an odd length.
    """
    return GLU.checked(None, gate, up, activation)
