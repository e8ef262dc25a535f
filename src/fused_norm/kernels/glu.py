"""The gate of an MLP: the activation of one projection times another projection.

Rows that follow each other in all tensors are one long row, which tiles cut anywhere: M counts its grains of GRAIN
elements, so that the compiler knows how wide a load may be. Otherwise GRAIN is 0, and tiles are ROWS by BLOCK columns.

To the alphabet of ``triton.language`` come ``share``, the factor that makes an activation of its argument,
``act(x) = x * share``, and the gradients ``dy``, ``dgate`` and ``dup``. Without a pointer to up it follows gate in the
same row, as dup then follows dgate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference
from .arguments import Unsupported, check_choice
from .backward import BackwardArguments, BackwardImpl
from .operator import Operator, Recompute, Results
from .outputs_per_consumer import for_each_consumer, joined_grads
from .plans import ANY_WIDTH, RULES, Device, Rule, TilePlan, next_power_of_2
from .reference import ActivationName
from .triton.call import Call
from .triton.devices import device_props
from .triton.language import round_to, store_tile
from .triton.memory import INT32_LIMIT, promoted


@triton.jit
def _tile(M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr, GRAIN: tl.constexpr, INT64: tl.constexpr):
    """This program's rows [ROWS] and columns [BLOCK], and which of their elements the tensor has."""
    program = tl.program_id(0)
    if INT64:
        program, M = program.to(tl.int64), M.to(tl.int64)
    if GRAIN:
        row = tl.zeros([1], tl.int32)
        col = program * BLOCK + tl.arange(0, BLOCK)
        live = (col < M * GRAIN)[None, :]
    else:
        blocks = tl.cdiv(N, BLOCK)
        row = program // blocks * ROWS + tl.arange(0, ROWS)
        col = program % blocks * BLOCK + tl.arange(0, BLOCK)
        live = (row < M)[:, None] & (col < N)[None, :]
    return row, col, live


@triton.jit
def _load(memory, row, col, live):
    ptr, stride = memory
    return tl.load(ptr + (row[:, None] * stride + col[None, :]), mask=live, other=0.0).to(tl.float32)


@triton.jit
def _tanh_argument(x):
    return 0.7978845608028654 * (x + 0.044715 * (x * x * x))


@triton.jit
def _share(x, ACTIVATION: tl.constexpr):
    """``share`` with the rounding that it has in PyTorch, which adds one to what may be nearly -1."""
    if ACTIVATION == "silu":
        return 1.0 / (1.0 + tl.exp(-x))
    if ACTIVATION == "gelu":
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    return 0.5 * (1.0 + _tanh(_tanh_argument(x)))


@triton.jit
def _tanh(u):
    """tanh by exp of what is not negative; near 0, where that cancels, one is added to it."""
    tanh = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * tl.abs(u)))
    return tl.where(u < 0.0, -tanh, tanh)


@triton.jit
def _gelu_new(x, dtype: tl.constexpr):
    """GELU by tanh as eager operations compute it: each is rounded to ``dtype``, but for the last one."""
    cube = round_to(round_to(x * x, dtype) * x, dtype)
    inner = round_to(x + round_to(0.044715 * cube, dtype), dtype)
    tanh = round_to(_tanh(round_to(0.7978845608028654 * inner, dtype)), dtype)
    return round_to(0.5 * x, dtype) * round_to(1.0 + tanh, dtype)


@triton.jit
def _activated(x, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """The activation of x, before it is rounded: the forward needs it, and the backward for the gradient of up."""
    if ACTIVATION == "gelu_new":
        return _gelu_new(x, dtype)
    return x * _share(x, ACTIVATION)


@triton.jit
def _slope(x, ACTIVATION: tl.constexpr):
    """The derivative of the activation."""
    if ACTIVATION == "gelu":
        return _share(x, ACTIVATION) + x * (0.3989422804014327 * tl.exp(-0.5 * x * x))
    # The share is the logistic function of z. Of the two parts of one the smaller comes first, not from a difference.
    z = x
    change = 1.0
    if ACTIVATION != "silu":
        z = 2.0 * _tanh_argument(x)
        change = 1.5957691216057308 * (1.0 + 0.134145 * (x * x))
    power = tl.exp(-tl.abs(z))
    less = power / (1.0 + power)
    more = 1.0 - less
    return tl.where(z < 0.0, less, more) + x * (less * more) * change


@triton.jit(do_not_specialize=["M"])
def _glu_forward_kernel(
    gate_ptr,  # [M, N]
    up_ptr,  # [M, N] or None: it follows gate
    y_ptr,  # [M, N]
    gate_added_ptr,  # [M, N] or None: what gate is without
    up_added_ptr,  # [M, N], as gate_added
    narrow_ptr,  # [M, N] or None: y in 16 bits as well
    M,
    N, gate_stride, up_stride, y_stride, gate_added_stride, up_added_stride, narrow_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, GRAIN: tl.constexpr, INT64: tl.constexpr, ACTIVATION: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    row, col, live = _tile(M, N, ROWS, BLOCK, GRAIN, INT64)
    up = (gate_ptr + N, gate_stride)
    if up_ptr is not None:
        up = (up_ptr, up_stride)
    gate = _load((gate_ptr, gate_stride), row, col, live)
    up = _load(up, row, col, live)
    if gate_added_ptr is not None:
        gate += _load((gate_added_ptr, gate_added_stride), row, col, live)
        up += _load((up_added_ptr, up_added_stride), row, col, live)
    activated = _activated(gate, tl.float32 if WIDE else gate_ptr.dtype.element_ty, ACTIVATION)
    if not WIDE:
        activated = round_to(activated, gate_ptr.dtype.element_ty)
    store_tile((y_ptr, y_stride), row, col, live, activated * up)
    if narrow_ptr is not None:
        store_tile((narrow_ptr, narrow_stride), row, col, live, activated * up)


@triton.jit(do_not_specialize=["M"])
def _glu_backward_kernel(
    gate_ptr,  # [M, N]
    up_ptr,  # [M, N] or None: it follows gate
    dy_ptr,  # [M, N]
    other_dy_ptr,  # [M, N] or None: what another consumer of y adds to dy
    gate_added_ptr,  # [M, N] or None: what gate is without
    up_added_ptr,  # [M, N], as gate_added
    dgate_ptr,  # [M, N] or None
    dup_ptr,  # [M, N] or None; it follows dgate if up follows gate
    M,
    N, gate_stride, up_stride, dy_stride, other_dy_stride, gate_added_stride, up_added_stride, dgate_stride, dup_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, GRAIN: tl.constexpr, INT64: tl.constexpr, ACTIVATION: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    row, col, live = _tile(M, N, ROWS, BLOCK, GRAIN, INT64)
    dy = _load((dy_ptr, dy_stride), row, col, live)
    if other_dy_ptr is not None:
        dy += _load((other_dy_ptr, other_dy_stride), row, col, live)
    gate = _load((gate_ptr, gate_stride), row, col, live)
    if gate_added_ptr is not None:
        gate += _load((gate_added_ptr, gate_added_stride), row, col, live)
    if up_ptr is None or dup_ptr is not None:
        activated = _activated(gate, tl.float32 if WIDE else gate_ptr.dtype.element_ty, ACTIVATION)
        if not WIDE:
            activated = round_to(activated, gate_ptr.dtype.element_ty)
        if up_ptr is None:
            store_tile((dgate_ptr + N, dgate_stride), row, col, live, dy * activated)
        else:
            store_tile((dup_ptr, dup_stride), row, col, live, dy * activated)
    if dgate_ptr is not None:
        if up_ptr is None:
            up = _load((gate_ptr + N, gate_stride), row, col, live)
        else:
            up = _load((up_ptr, up_stride), row, col, live)
            if up_added_ptr is not None:
                up += _load((up_added_ptr, up_added_stride), row, col, live)
        store_tile((dgate_ptr, dgate_stride), row, col, live, dy * up * _slope(gate, ACTIVATION))


# 8 elements a lane and tensor are one load of 16 bytes in bf16; the forward takes two. Both directions reach .97 to
# 1.02 of a copy's bandwidth if all rows follow each other; otherwise they were not measured.
RULES["glu_forward"] = (Rule(ANY_WIDTH, 2048, 4),)
RULES["glu_backward"] = (Rule(ANY_WIDTH, 1024, 4),)


@lru_cache(maxsize=1024)
def glu_plan(width: int | None, backward: bool, device: Device) -> TilePlan:
    """The launch for rows of ``width`` elements; ``width`` is None if all rows follow each other in memory."""
    rule = device.rule("glu_backward" if backward else "glu_forward", 0)
    block = rule.elements if width is None else min(rule.elements, next_power_of_2(width))
    return TilePlan(rule.elements // block, block, device.warps(rule.warps))


def launch_glu(
    call: Call,
    tensors: tuple[Tensor, Tensor | None, Tensor, *tuple[Tensor | None, ...]],
    activation: str,
    *,
    wide: bool = False,
    backward: bool = False,
) -> None:
    """Launch the forward or the backward on rows in the order of gate, as many and as wide as those of y or dy.

    ``tensors``: as the kernel has them; without an up gate has both. What is written is from ``empty_rows_like(gate)``,
    y perhaps half as wide; what is read is copied if it does not lie in gate's order. ``wide``: gate and up are of
    fp32, or cast to it first, so that the activation is not rounded.
    """
    size, width = tensors[2].numel(), tensors[2].shape[-1]
    if size == 0:
        return
    kernel: Any = _glu_backward_kernel if backward else _glu_forward_kernel
    arranged, spacing = call.as_strided_rows(*tensors)
    rows, grain = size // width, 0
    if all(t is None or step == t.shape[-1] == width for t, step in zip(arranged, spacing, strict=True)):
        grain = math.gcd(width, 16)
    long = max(size, rows * max(spacing)) >= INT32_LIMIT
    plan = glu_plan(None if grain else width, backward, device_props(tensors[0].device))
    constants = {"ROWS": plan.rows, "BLOCK": plan.block, "GRAIN": grain, "INT64": long, "ACTIVATION": activation}
    constants["WIDE"] = wide
    if grain:
        tiles, numbers = -(-size // plan.block), (size // grain, *(0,) * (1 + len(spacing)))
    else:
        tiles, numbers = -(-rows // plan.rows) * -(-width // plan.block), (rows, width, *spacing)
    call.launch(kernel, (tiles, 1), tuple(arranged), numbers, constants, warps=plan.warps, fuse=False)


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

    def reference(self, *arguments: Any) -> Tensor:
        """``act(gate) * up``, the activation rounded first."""
        gate, up, activation = arguments
        gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
        if activation == "silu":
            return reference.silu(gate.to(reference.wide_dtype(gate.dtype))).to(gate.dtype) * up
        return reference.ACTIVATIONS[activation](gate) * up

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
        return reference.cast_output(super().reference(gate, up, activation), None if wide else dtype)

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
