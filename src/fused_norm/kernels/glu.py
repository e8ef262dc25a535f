"""The gate of an MLP: the activation of one projection times another projection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from . import reference
from .arguments import ACTIVATIONS, Unsupported, other_dtype, wrong_choice
from .operator import BackwardCall, Operator, Recompute, Route, Spec, by_kernels
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
    facts = "str activation"
    gradients = ("dgate", "dup")

    def wrong(self, spec: Spec, *arguments: Any) -> Unsupported | None:
        gate, up, activation, *_ = arguments
        if up is None and gate.shape[-1] % 2:
            return Unsupported(
                "without up, gate must have an even last dimension, whose halves are gate and up, not shape"
                f" {tuple(gate.shape)}",
                ValueError,
            )
        return wrong_choice("activation", activation, ACTIVATIONS)

    def differs_from_eager(self, spec: Spec, *arguments: Any) -> str | None:
        return other_dtype("gate", "up", *arguments[:2])

    def is_elementwise(self, *tensors: Any) -> bool:
        return tensors[1] is not None

    def reference(self, spec: Spec, *arguments: Any) -> Tensor:
        return reference.glu(*arguments)

    def forward(self, spec: Spec, *arguments: Any, training: bool, launch: bool = True) -> tuple[Any, ...]:
        gate, up, activation, *written = arguments
        y = empty_product(gate, up, *written[1:])
        if launch:
            launch_glu_forward(gate, up, y, activation)
        return (y,)

    def recompute(self, spec: Spec, arguments: Sequence[Any], results: Sequence[Any]) -> Recompute | None:
        return Recompute(self, spec, arguments)

    def gradients_by(self, route: Route, spec: Spec, call: BackwardCall) -> tuple[Tensor | None, ...]:
        return super().gradients_by(route, spec, call) if any(call.needed) else (None, None)

    def backward(self, spec: Spec, call: BackwardCall, *, launch: bool = True) -> tuple[Tensor | None, ...]:
        (dy,), (gate, up), (need_dgate, need_dup) = call.incoming, call.saved, call.needed
        dgate = empty_rows_like(gate) if need_dgate else None
        dup = empty_rows_like(gate, up.dtype) if need_dup else None
        if launch:
            dys = dy if type(dy) is tuple else (dy, None)
            launch_glu_backward(gate, up, dys, dgate, dup, call.facts[0])
        return dgate, dup

    def reference_backward(self, spec: Spec, call: BackwardCall) -> tuple[Tensor | None, ...]:
        (dy,), (gate, up) = call.incoming, call.saved
        return reference.glu_backward(dy, gate, up, call.facts[0])


class GluForConsumers(Glu):
    """``glu`` with one or two consumers that cast its output to 16 bits: it is written in those, an alias for each.

    A call that is trained returns as many tensors as there are consumers; one that is not, one. The backward adds up
    the consumers' gradients in float32, as autograd adds up those of casts.
    """

    name = "glu_for_consumers"
    plain_name = "glu"
    options = "str activation, int consumers, ScalarType dtype"

    def wrong(self, spec: Spec, *arguments: Any) -> Unsupported | None:
        *_, consumers, _ = arguments
        if consumers not in (1, 2):
            return Unsupported(f"consumers must be 1 or 2, not {consumers!r}", ValueError)
        return super().wrong(spec, *arguments)

    def differs_from_eager(self, spec: Spec, *arguments: Any) -> str | None:
        gate, *_ = arguments
        if gate.dtype != torch.float32:  # of which the sum of gradients is rounded to 16 bits in stock
            return f"gate is {gate.dtype}, and no consumer casts the product"
        return super().differs_from_eager(spec, *arguments)

    def reference(self, spec: Spec, *arguments: Any) -> Any:
        *given, _, dtype = arguments
        return reference.written(reference.glu(*given), dtype)

    def pack_outputs(self, arguments: Sequence[Any], results: Sequence[Any], *, trained: bool) -> Any:
        (y,), (*_, consumers, _) = results, arguments
        return (y, *(y.detach() for _ in range(consumers - 1))) if trained else y

    def group_outputs(self, found: Any) -> list[tuple[Tensor, ...]]:
        return [found if isinstance(found, tuple) else (found,)]

    def gradients_by(self, route: Route, spec: Spec, call: BackwardCall) -> tuple[Tensor | None, ...]:
        present = tuple(dy for dy in call.incoming if dy is not None)
        dy: Any = present
        if len(present) < 2:
            dy = present[0] if present else None
        elif route is not by_kernels:
            dy = present[0].float() + present[1]
        return super().gradients_by(route, spec, call._replace(incoming=(dy,)))


GLU, GLU_FOR_CONSUMERS = Glu(), GluForConsumers()


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
