"""The gate of an MLP in Triton, ``act(gate) * up``, forward and backward: kernels and their launchers.

``share`` is the factor of every activation here: ``act(gate) = gate * share``. Tensors whose rows follow each other are
one long row (FLAT), tiles of which are cut without regard to rows; elsewhere a tile is ROWS by BLOCK columns of rows at
one stride each. PACKED: up lies behind gate in the same row, and so do their gradients. ``dy``, ``dgate`` and ``dup``
are gradients.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..plans import GluPlan, glu_plan
from .devices import facts_of
from .language import round_to, store_tile
from .launch import Launch
from .memory import INT32_LIMIT, dtypes_of, empty_rows_like, promoted, same_rows


@triton.jit
def _tile(M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr, LONG: tl.constexpr):
    """This program's rows [ROWS] and columns [BLOCK], and what of them there is; M counts elements if FLAT."""
    program = tl.program_id(0)
    if LONG:
        program = program.to(tl.int64)
    if FLAT:
        row = tl.zeros([1], tl.int32)
        col = program * BLOCK + tl.arange(0, BLOCK)
        live = (col < M)[None, :]
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
    """What x is multiplied by."""
    if ACTIVATION == "silu":
        return 1.0 / (1.0 + tl.exp(-x))
    if ACTIVATION == "gelu":
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    # tanh by exp of what is not negative; near 0, where that cancels, one is added to it.
    u = _tanh_argument(x)
    tanh = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * tl.abs(u)))
    return 0.5 * (1.0 + tl.where(u < 0.0, -tanh, tanh))


@triton.jit
def _slope(x, share, ACTIVATION: tl.constexpr):
    """The derivative of the activation."""
    if ACTIVATION == "silu":
        return share * (1.0 + x * (1.0 - share))
    if ACTIVATION == "gelu":
        return share + x * (0.3989422804014327 * tl.exp(-0.5 * x * x))
    inner = 2.0 * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * (x * x))
    return share * (1.0 + x * (1.0 - share) * inner)


@triton.jit(do_not_specialize=["M"])
def _glu_forward_kernel(
    gate_ptr,  # [M, N]
    up_ptr,  # [M, N] or None: behind gate
    y_ptr,  # [M, N]
    M,
    N, gate_stride, up_stride, y_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr, LONG: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    row, col, live = _tile(M, N, ROWS, BLOCK, FLAT, LONG)
    up = (gate_ptr + N, gate_stride)
    if up_ptr is not None:
        up = (up_ptr, up_stride)
    gate = _load((gate_ptr, gate_stride), row, col, live)
    up = _load(up, row, col, live)
    activated = round_to(gate * _share(gate, ACTIVATION), gate_ptr.dtype.element_ty)
    store_tile((y_ptr, y_stride), row, col, live, activated * up)


@triton.jit(do_not_specialize=["M"])
def _glu_backward_kernel(
    dy_ptr,  # [M, N]
    gate_ptr,  # [M, N]
    up_ptr,  # [M, N] or None: behind gate
    dgate_ptr,  # [M, N] or None
    dup_ptr,  # [M, N] or None; behind dgate where up is behind gate
    M,
    N, dy_stride, gate_stride, up_stride, dgate_stride, dup_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr, LONG: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    row, col, live = _tile(M, N, ROWS, BLOCK, FLAT, LONG)
    dy = _load((dy_ptr, dy_stride), row, col, live)
    gate = _load((gate_ptr, gate_stride), row, col, live)
    share = _share(gate, ACTIVATION)
    if up_ptr is None or dup_ptr is not None:
        activated = round_to(gate * share, gate_ptr.dtype.element_ty)
        if up_ptr is None:
            store_tile((dgate_ptr + N, dgate_stride), row, col, live, dy * activated)
        else:
            store_tile((dup_ptr, dup_stride), row, col, live, dy * activated)
    if dgate_ptr is not None:
        if up_ptr is None:
            up = _load((gate_ptr + N, gate_stride), row, col, live)
        else:
            up = _load((up_ptr, up_stride), row, col, live)
        store_tile((dgate_ptr, dgate_stride), row, col, live, dy * up * _slope(gate, share, ACTIVATION))


def empty_product(gate: Tensor, up: Tensor | None) -> Tensor:
    """The forward's output, not yet written."""
    if up is None:
        return empty_rows_like(gate, width=gate.shape[-1] // 2)
    return empty_rows_like(gate, promoted(gate.dtype, up.dtype))


_planned: dict[Any, tuple[GluPlan, Launch]] = {}


def launch_glu_forward(gate: Tensor, up: Tensor | None, y: Tensor, activation: str) -> None:
    """Write ``y``, from ``empty_product``; without ``up`` gate has both."""
    _launch(_glu_forward_kernel, (gate, up, y), activation, y)


def launch_glu_backward(
    dy: Tensor, gate: Tensor, up: Tensor | None, dgate: Tensor | None, dup: Tensor | None, activation: str
) -> None:
    """Write the gradients that are there, from ``empty_rows_like`` of gate and up; one of them is."""
    _launch(_glu_backward_kernel, (dy, gate, up, dgate, dup), activation, dy)


def _launch(kernel: Any, tensors: tuple[Tensor | None, ...], activation: str, like: Tensor) -> None:
    """Launch a kernel on rows that are as many and, but for packed ones, as wide as those of ``like``."""
    size, width = like.numel(), like.shape[-1]
    if size == 0:
        return
    lead, *others = tensors
    assert lead is not None
    arranged, spacing = same_rows(lead, *others)
    rows = size // width
    flat = all(t is None or step == t.shape[-1] == width for t, step in zip(arranged, spacing, strict=True))
    long = max(size, rows * max(spacing)) >= INT32_LIMIT
    block_width = None if flat else width
    key = kernel, like.device, dtypes_of(*arranged), activation, block_width, long
    planned = _planned.get(key)
    if planned is None:
        plan = glu_plan(block_width, kernel is _glu_backward_kernel, facts_of(like.device))
        constants = {"ROWS": plan.rows, "BLOCK": plan.block, "FLAT": flat, "LONG": long, "ACTIVATION": activation}
        planned = _planned[key] = plan, Launch(kernel, plan.warps, constants, fuse=False)
    plan, launch = planned
    if flat:
        launch((-(-size // plan.block), 1), tuple(arranged), (size,), (0,) * (1 + len(spacing)))
    else:
        tiles = -(-rows // plan.rows) * -(-width // plan.block)
        launch((tiles, 1), tuple(arranged), (rows,), (width, *spacing))
