"""The gate of an MLP: the activation of one projection times another projection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import reference
from .arguments import Unsupported, check_choice
from .operator import BackwardArguments, BackwardImpl, Operator, Recompute, Results, for_each_consumer, joined_grads
from .reference import ActivationName
from .triton.call import Call
from .triton.glu_kernels import launch_glu
from .triton.memory import promoted


class Glu(Operator):
    """``glu`` as an operator."""

    name = "glu"
    tensors = "Tensor gate, Tensor? up"
    options = "str activation"
    outputs = ("y",)
    same_shape: ClassVar[tuple[str, ...]] = ("up",)
    saved = tensors
    saved_scalars = "str activation"
    gradients: ClassVar[tuple[str, ...]] = ("dgate", "dup")
    recomputed_by_itself = True

    def check_options(self, *arguments: Any) -> Unsupported | None:
        args = self.by_name(arguments)
        gate = args["gate"]
        if args["up"] is None and gate.shape[-1] % 2:
            return Unsupported(
                "without up, gate must have an even last dimension, whose halves are gate and up, not shape"
                f" {tuple(gate.shape)}",
                ValueError,
            )
        return check_choice("activation", args["activation"], tuple(reference.ACTIVATIONS))

    def is_elementwise(self, *tensors: Any) -> bool:
        return tensors[1] is not None

    def forward(self, call: Call, *arguments: Any, training: bool) -> Results:
        gate, up, activation = arguments
        if up is None:
            y = call.empty_rows_like(gate, width=gate.shape[-1] // 2)
        else:
            y = call.empty_rows_like(gate, promoted(gate.dtype, up.dtype))
        call.then(launch_glu, (gate, up, y, None, None, None), activation)
        return (y,)

    def backward(self, call: Call, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        """Only gate and up have gradients of their own; ``dy`` may be a pair of gradients."""
        (dy,), (gate, up, *added), (need_dgate, need_dup, *_) = given.incoming, given.saved, given.needed
        dgate = call.empty_rows_like(gate) if need_dgate else None
        dup = call.empty_rows_like(gate, up.dtype) if need_dup else None
        dys, wide = dy if type(dy) is tuple else (dy, None), bool(added)
        tensors = gate, up, *dys, *(added or (None, None)), dgate, dup
        call.then(launch_glu, tensors, given.saved_scalars[0], wide=wide, backward=True)
        return dgate, dup, *(None for _ in added)


class GluForConsumers(Glu):
    """``glu`` in float32, written in ``dtype``, to which its consumers, one or two, cast it; an alias for each.

    ``wide``: bit i says that consumer i reads float32 all the same. A call that is trained or has wide consumers
    returns as many tensors as there are consumers; any other, one. The backward adds up the consumers' gradients in
    float32, as autograd adds up those of casts.

    Gate and up are float32; or they are in 16 bits, and cast to float32 first; or each is the sum in float32 of two
    tensors in 16 bits, which have one gradient, in these.
    """

    name = "glu_for_consumers"
    plain_name = "glu"
    tensors = "Tensor gate, Tensor up, Tensor? gate_added, Tensor? up_added"
    options = "str activation, int consumers, ScalarType dtype, int wide"
    further_results = ("narrow",)
    same_shape: ClassVar[tuple[str, ...]] = ("up", "gate_added", "up_added")
    saved = tensors
    gradients: ClassVar[tuple[str, ...]] = ("dgate", "dup", "dgate_added", "dup_added")

    def why_unlike_eager(self, *arguments: Any) -> str | None:
        gate, up, *added, _, _, _, _ = arguments
        share_dtype = all(tensor is None or tensor.dtype == gate.dtype for tensor in (gate, up, *added))
        # The reason is not worth a log: ``glu`` may take the call.
        return None if share_dtype and gate.dtype.itemsize <= (4 if added[0] is None else 2) else ""

    def reference(self, *arguments: Any) -> Any:
        *summands, activation, _, dtype, wide = arguments
        gate, up, gate_added, up_added = map(reference.widened, summands)
        gate, up = (gate, up) if gate_added is None else (gate + gate_added, up + up_added)
        return reference.cast_output(reference.glu(gate, up, activation), None if wide else dtype)

    def forward(self, call: Call, *arguments: Any, training: bool) -> Results:
        gate, up, *added, activation, _, dtype, wide = arguments
        y = call.empty_rows_like(gate, torch.float32 if wide else dtype)
        narrow = call.empty_rows_like(gate, dtype) if wide else None
        call.then(launch_glu, (gate, up, y, *added, narrow), activation, wide=True)
        return y, narrow

    def recompute(self, arguments: Sequence[Any], results: Sequence[Any]) -> Recompute | None:
        return None if arguments[-1] else super().recompute(arguments, results)

    def pack_outputs(self, arguments: Sequence[Any], results: Sequence[Any], *, trained: bool) -> Any:
        (y, narrow), (*_, consumers, _, wide) = results, arguments
        if wide:
            return for_each_consumer(consumers, wide, y, narrow)
        return (y,) * consumers if trained else y

    def group_outputs(self, outputs: Any) -> list[tuple[Tensor, ...]]:
        return [outputs if isinstance(outputs, tuple) else (outputs,)]

    def compute_grads(self, impl: BackwardImpl, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        dy = joined_grads(impl, given.incoming, torch.float32)
        need_dgate, need_dup, *need_added = given.needed
        needed = need_dgate or need_added[0], need_dup or need_added[1], False, False
        dgate, dup, *_ = super().compute_grads(impl, given._replace(incoming=(dy,), needed=needed))
        added_grads = [d if is_needed else None for d, is_needed in zip((dgate, dup), need_added, strict=True)]
        return dgate if need_dgate else None, dup if need_dup else None, *added_grads


GLU, GLU_FOR_CONSUMERS = Glu(), GluForConsumers()


def glu(gate: Tensor, up: Tensor | None = None, activation: ActivationName = "silu") -> Tensor:
    """A gated linear unit (Shazeer 2020, arXiv 2002.05202), its activation's result never written.

    ``y = act(gate) * up``, the activation computed in fp32 and rounded to gate's dtype first. The backward keeps gate
    and up alone.

    Args:
        gate: [..., I], float32, bfloat16 or float16; float64 is computed by the PyTorch reference. Any strides; evenly
            spaced rows are read where they are, others are copied first. Without up [..., 2 I]: the first half of each
            row is the gate, the second what it is multiplied by, and both have one gradient.
        up: gate's shape and device; its dtype may differ.
        activation: ``silu``, ``gelu`` (by erf), ``gelu_tanh``, PyTorch's ``gelu(approximate="tanh")``, or ``gelu_new``,
            the same with each operation rounded to gate's dtype, as transformers' ``NewGELUActivation`` computes it.

    Returns:
        y, [..., I] in gate's memory order, of the dtype that gate and up promote to.

    Raises:
        TypeError: for anything but a dense tensor of floating point.
        ValueError: for another activation, an up of another shape or device, or without up rows of an odd length.
    """
    return GLU.checked(gate, up, activation)
