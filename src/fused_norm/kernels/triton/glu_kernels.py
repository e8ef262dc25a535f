"""The gate of an MLP in Triton, ``act(gate) * up``, forward and backward: kernels and their launchers.

``share`` is the factor that makes an activation of its argument, ``act(x) = x * share``; ``dy``, ``dgate`` and ``dup``
are gradients. Without a pointer to up it follows gate in the same row, as dup then follows dgate.

Rows that follow each other in all tensors are one long row, which tiles cut anywhere: M counts its grains of GRAIN
elements, so that the compiler knows how wide a load may be. Otherwise GRAIN is 0, and tiles are ROWS by BLOCK columns.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..plans import glu_plan
from .call import Call
from .devices import device_props
from .language import round_to, store_tile
from .memory import INT32_LIMIT


@triton.jit
def _tile(M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr, GRAIN: tl.constexpr, INT64: tl.constexpr):
    """This program's rows [ROWS] and columns [BLOCK], and what of them there is."""
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
