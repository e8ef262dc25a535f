"""The steps of a mixture of experts around its products in Triton, forward and backward: kernels and their launchers.

A token goes to K experts. ``position`` [M, K] has, for each token and each of its experts, the row of the tensor in
which the rows of one expert follow each other. ``absent`` marks the rows of that tensor whose expert is on another
device: memory of these rows holds anything, and is read as zeros. A row of 2 N numbers has the gate and what it is
multiplied by, up, as halves or, INTERLEAVED, in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plans import TilePlan, tile_plan
from .call import Call
from .devices import device_props
from ..glu import _share, _slope
from .language import TRITON_DTYPES, as_mask, load_tile, round_to, rows_of, store_tile
from .memory import INT32_LIMIT


@triton.jit
def _tile(M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr, INT64: tl.constexpr):
    """This program's rows [ROWS], its block of columns, and the columns [BLOCK]."""
    blocks = tl.cdiv(N, BLOCK)
    row = rows_of(tl.program_id(0) // blocks, ROWS, INT64)
    block = tl.program_id(0) % blocks
    return row, block, block * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _is_present(absent_ptr, row, live):
    """Which of the ``live`` rows have their expert on this device."""
    present = live
    if absent_ptr is not None:
        present = live & (tl.load(absent_ptr + row, mask=live, other=0) == 0)
    return present


@triton.jit
def _load_pair(x, row, present, block, N, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The gate and up of a tile, zero if not ``present``."""
    if INTERLEAVED:
        col = block * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        both = load_tile(x, row, col, present[:, None] & (col < 2 * N)[None, :])
        gate, up = tl.split(tl.reshape(both, [both.shape[0], BLOCK, 2]))
    else:
        ptr, stride = x
        col = block * BLOCK + tl.arange(0, BLOCK)
        live = present[:, None] & (col < N)[None, :]
        gate = load_tile(x, row, col, live)
        up = load_tile((ptr + N, stride), row, col, live)
    return gate, up


@triton.jit
def _store_pair(x, row, live, block, N, gate, up, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        col = block * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        both = tl.reshape(tl.join(gate, up), [gate.shape[0], 2 * BLOCK])
        store_tile(x, row, col, live[:, None] & (col < 2 * N)[None, :], both)
    else:
        ptr, stride = x
        col = block * BLOCK + tl.arange(0, BLOCK)
        inside = live[:, None] & (col < N)[None, :]
        store_tile(x, row, col, inside, gate)
        store_tile((ptr + N, stride), row, col, inside, up)


@triton.jit
def _clamped(gate, up, limit, dtype: tl.constexpr):
    """The gate up to the limit, and up within it on both sides; a NaN stays one."""
    if limit is not None:
        gate = round_to(tl.where(gate > limit, limit, gate), dtype)
        up = round_to(tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)), dtype)
    return gate, up


@triton.jit
def _activated(gate, alpha, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """The activation of a gate, rounded as stock code rounds it: with ``alpha`` it consists of operations."""
    if alpha is None:
        share = _share(gate, ACTIVATION)
    else:
        share = round_to(_share(round_to(gate * alpha, dtype), ACTIVATION), dtype)
    return round_to(gate * share, dtype)


@triton.jit(do_not_specialize=["M"])
def _expert_gate_forward_kernel(
    x_ptr,  # [M, 2 N]
    absent_ptr,  # [M] or None
    y_ptr,  # [M, N]
    M,
    N, x_stride, y_stride, limit, alpha,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, INT64: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    row, block, col = _tile(M, N, ROWS, BLOCK, INT64)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    present = _is_present(absent_ptr, row, row < M)
    gate, up = _load_pair((x_ptr, x_stride), row, present, block, N, BLOCK, INTERLEAVED)
    gate, up = _clamped(gate, up, limit, dtype)
    if alpha is not None:
        up = round_to(up + 1.0, dtype)
    activated = _activated(gate, alpha, dtype, ACTIVATION)
    store_tile((y_ptr, y_stride), row, col, (row < M)[:, None] & (col < N)[None, :], activated * up)


@triton.jit(do_not_specialize=["M"])
def _expert_gate_backward_kernel(
    x_ptr,  # [M, 2 N]
    absent_ptr,  # [M] or None
    dy_ptr,  # [M, N]
    dx_ptr,  # [M, 2 N]
    M,
    N, x_stride, dy_stride, dx_stride, limit, alpha,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, INT64: tl.constexpr, ACTIVATION: tl.constexpr,
    AT_LIMIT: tl.constexpr,
):  # fmt: skip
    """AT_LIMIT: a number that is the limit itself has a gradient."""
    row, block, col = _tile(M, N, ROWS, BLOCK, INT64)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    present = _is_present(absent_ptr, row, row < M)
    dy = load_tile((dy_ptr, dy_stride), row, col, present[:, None] & (col < N)[None, :])
    given_gate, given_up = _load_pair((x_ptr, x_stride), row, present, block, N, BLOCK, INTERLEAVED)
    gate, up = _clamped(given_gate, given_up, limit, dtype)
    if alpha is None:
        slope = _slope(gate, ACTIVATION)
    else:
        slope = _slope(gate * alpha, ACTIVATION)
        up = up + 1.0
    dgate = dy * up * slope
    dup = dy * _activated(gate, alpha, dtype, ACTIVATION)
    if limit is not None:
        if AT_LIMIT:
            dgate = tl.where(given_gate <= limit, dgate, 0.0)
            dup = tl.where((given_up <= limit) & (given_up >= -limit), dup, 0.0)
        else:
            dgate = tl.where(given_gate < limit, dgate, 0.0)
            dup = tl.where((given_up < limit) & (given_up > -limit), dup, 0.0)
    _store_pair((dx_ptr, dx_stride), row, row < M, block, N, dgate, dup, BLOCK, INTERLEAVED)


@triton.jit(do_not_specialize=["M"])
def _expert_permute_forward_kernel(
    x_ptr,  # [M, N]
    position_ptr,  # [M, K]
    absent_ptr,  # [M K] or None
    y_ptr,  # [M K, N]
    M,
    N, x_stride, y_stride,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    row, _, col = _tile(M, N, ROWS, BLOCK, INT64)
    inside = (row < M)[:, None] & (col < N)[None, :]
    x = load_tile((x_ptr, x_stride), row, col, inside)
    for k in tl.static_range(K):
        place = tl.load(position_ptr + row * K + k, mask=row < M, other=0)
        present = _is_present(absent_ptr, place, row < M)
        store_tile((y_ptr, y_stride), place, col, inside, tl.where(present[:, None], x, 0.0))


@triton.jit(do_not_specialize=["M"])
def _expert_sum_kernel(
    x_ptr,  # [M K, N]
    weights_ptr,  # [M, K] or None
    position_ptr,  # [M, K]
    absent_ptr,  # [M K] or None
    y_ptr,  # [M, N]
    M,
    N, x_stride, y_stride,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, INT64: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Sum each token's rows in fp32, in the order of its experts; weighted rows and the sum are rounded to DTYPE."""
    row, _, col = _tile(M, N, ROWS, BLOCK, INT64)
    inside = (row < M)[:, None] & (col < N)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for k in tl.static_range(K):
        place = tl.load(position_ptr + row * K + k, mask=row < M, other=0)
        present = _is_present(absent_ptr, place, row < M)
        value = load_tile((x_ptr, x_stride), place, col, inside & present[:, None])
        if weights_ptr is not None:
            weight = tl.load(weights_ptr + row * K + k, mask=row < M, other=0.0).to(tl.float32)
            value = round_to(value * weight[:, None], DTYPE)
        total += value
    store_tile((y_ptr, y_stride), row, col, inside, round_to(total, DTYPE))


@triton.jit
def _expert_unpermute_backward_kernel(
    dy_ptr,  # [M, N]
    x_ptr,  # [M K, N]
    weights_ptr,  # [M, K]
    position_ptr,  # [M, K]
    absent_ptr,  # [M K] or None
    dx_ptr,  # [M K, N] or None
    dweights_ptr,  # [M, K] or None
    dy_stride, x_stride, dx_stride,
    N: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """One program for each token."""
    row = tl.program_id(0)
    if INT64:
        row = row.to(tl.int64)
    for k in tl.static_range(K):
        place = tl.load(position_ptr + row * K + k)
        weight = tl.load(weights_ptr + row * K + k).to(tl.float32)
        is_present = True
        if absent_ptr is not None:
            is_present = tl.load(absent_ptr + place) == 0
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, N, BLOCK):
            col = start + tl.arange(0, BLOCK)
            live = as_mask((col < N) & is_present)
            dy = tl.load(dy_ptr + row * dy_stride + col, mask=live, other=0.0).to(tl.float32)
            if dx_ptr is not None:
                dx = round_to(dy * weight, dx_ptr.dtype.element_ty)
                tl.store(dx_ptr + place * dx_stride + col, tl.where(live, dx, 0.0), mask=col < N)
            if dweights_ptr is not None:
                x = tl.load(x_ptr + place * x_stride + col, mask=live, other=0.0).to(tl.float32)
                total += dy * x
        if dweights_ptr is not None:
            dweight = tl.sum(total, axis=0)
            tl.store(dweights_ptr + row * K + k, round_to(dweight, dweights_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["M"])
def _expert_bias_forward_kernel(
    bias_ptr,  # [E, N]
    expert_ptr,  # [M]
    ends_ptr,  # [E]
    y_ptr,  # [M, N]
    M,
    E, N, bias_stride, y_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    row, _, col = _tile(M, N, ROWS, BLOCK, INT64)
    present, inside = row < tl.load(ends_ptr + E - 1), col < N
    expert = tl.load(expert_ptr + row, mask=present, other=0)
    bias = load_tile((bias_ptr, bias_stride), expert, col, present[:, None] & inside[None, :])
    store_tile((y_ptr, y_stride), row, col, (row < M)[:, None] & inside[None, :], bias)


@triton.jit
def _expert_bias_backward_kernel(
    dy_ptr,  # [M, N]
    ends_ptr,  # [E]
    dbias_ptr,  # [E, N]
    N, dy_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """One program for an expert and a block of columns."""
    expert = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        live = (row < end)[:, None] & (col < N)[None, :]
        if INT64:
            row = row.to(tl.int64)
        total += load_tile((dy_ptr, dy_stride), row, col, live)
    dtype: tl.constexpr = dbias_ptr.dtype.element_ty
    tl.store(dbias_ptr + expert * N + col, round_to(tl.sum(total, axis=0), dtype), mask=col < N)


def launch_expert_gate(
    call: Call,
    x: Tensor,
    absent: Tensor | None,
    gate: Sequence[Any],
    written: Tensor,
    dy: Tensor | None = None,
    *,
    at_limit: bool = False,
) -> None:
    """Write the output for x [..., 2 N] or, given the gradient of the output, that of x, from ``empty_rows_like(x)``.

    ``gate``: the options of ``expert_gate``. ``at_limit``: in a backward, a number that is the limit itself has a
    gradient.
    """
    if x.numel() == 0:
        return
    activation, interleaved, limit, alpha = gate
    (lead, *others), spacing = call.as_strided_rows(x, *(() if dy is None else (dy,)), written)
    width = x.shape[-1] // 2
    rows = x.numel() // (2 * width)
    kernel, constants = _expert_gate_forward_kernel, {"INTERLEAVED": interleaved, "ACTIVATION": activation}
    if dy is not None:
        kernel, constants = _expert_gate_backward_kernel, constants | {"AT_LIMIT": at_limit}
    tensors, numbers = (lead, call.contiguous(absent), *others), (rows, width, *spacing, limit, alpha)
    plan = tile_plan("expert_gate", width, device_props(x.device))
    _launch_tiles(call, kernel, tensors, numbers, (rows, width), plan, rows * max(spacing), constants)


def _launch_tiles(
    call: Call,
    kernel: Any,
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[float | None, ...],
    shape: Sequence[int],
    plan: TilePlan,
    extent: int,
    constants: dict[str, Any],
) -> None:
    """Launch a kernel on tiles of a matrix of this shape; ``extent``: elements up to the end of the largest tensor."""
    (rows, width), tile = shape, {"ROWS": plan.rows, "BLOCK": plan.block, "INT64": extent >= INT32_LIMIT}
    grid = -(-rows // plan.rows) * -(-width // plan.block), 1
    call.launch(kernel, grid, tensors, numbers, {**tile, **constants}, warps=plan.warps, fuse=False)


def launch_expert_permute(call: Call, x: Tensor, position: Tensor, absent: Tensor | None, y: Tensor) -> None:
    """Write ``y`` [M K, N], the rows of ``x`` [M, N] in the order of experts."""
    if y.numel() == 0:
        return
    (x_rows, x_stride), (y_rows, y_stride) = _rows_of(call, x), _rows_of(call, y)
    plan, extent = tile_plan("expert_rows", x.shape[1], device_props(x.device)), y.shape[0] * max(x_stride, y_stride)
    tensors, numbers = (
        (x_rows, call.contiguous(position), call.contiguous(absent), y_rows),
        (*x.shape, x_stride, y_stride),
    )
    constants = {"K": position.shape[1]}
    _launch_tiles(call, _expert_permute_forward_kernel, tensors, numbers, x.shape, plan, extent, constants)


def launch_expert_sum(
    call: Call,
    x: Tensor,
    weights: Tensor | None,
    position: Tensor,
    absent: Tensor | None,
    y: Tensor,
    dtype: torch.dtype,
) -> None:
    """Write ``y`` [M, N], for each token the sum of its rows in ``x`` [M K, N], times ``weights`` if given.

    ``dtype``: each weighted row and the sum are rounded to it.
    """
    if y.numel() == 0:
        return
    (x_rows, x_stride), (y_rows, y_stride) = _rows_of(call, x), _rows_of(call, y)
    plan, extent = tile_plan("expert_rows", y.shape[1], device_props(x.device)), x.shape[0] * max(x_stride, y_stride)
    tensors = x_rows, call.contiguous(weights), call.contiguous(position), call.contiguous(absent), y_rows
    constants = {"K": position.shape[1], "DTYPE": TRITON_DTYPES[dtype]}
    _launch_tiles(call, _expert_sum_kernel, tensors, (*y.shape, x_stride, y_stride), y.shape, plan, extent, constants)


def launch_expert_unpermute_backward(
    call: Call,
    dy: Tensor,
    x: Tensor,
    weights: Tensor,
    position: Tensor,
    absent: Tensor | None,
    dx: Tensor | None,
    dweights: Tensor | None,
) -> None:
    """Write the gradients that are there: ``dx`` [M K, N] and ``dweights`` [M, K], both contiguous; one of them is."""
    if x.numel() == 0:
        return
    tokens, width = dy.shape
    (dy_rows, dy_stride), (x_rows, x_stride) = _rows_of(call, dy), _rows_of(call, x)
    plan = tile_plan("expert_products", width, device_props(dy.device))
    is_long = x.shape[0] * max(dy_stride, x_stride) >= INT32_LIMIT
    constants = {"N": width, "K": position.shape[1], "BLOCK": plan.block, "INT64": is_long}
    routing = call.contiguous(weights), call.contiguous(position), call.contiguous(absent)
    read = dy_rows, None if dweights is None else x_rows, *routing
    tensors, numbers, kernel = (*read, dx, dweights), (dy_stride, x_stride, width), _expert_unpermute_backward_kernel
    call.launch(kernel, (tokens, 1), tensors, numbers, constants, warps=plan.warps, fuse=False)


def launch_expert_bias_forward(call: Call, bias: Tensor, expert: Tensor, ends: Tensor, y: Tensor) -> None:
    """Write ``y`` [M, N]: rows of ``bias`` [E, N] by ``expert`` [M], and zeros from the last of ``ends`` [E] on."""
    if y.numel() == 0:
        return
    rows, width = y.shape
    (bias_rows, bias_stride), (y_rows, y_stride) = _rows_of(call, bias), _rows_of(call, y)
    plan = tile_plan("expert_rows", width, device_props(y.device))
    extent = max(rows * y_stride, bias.shape[0] * bias_stride)
    tensors = bias_rows, call.contiguous(expert), call.contiguous(ends), y_rows
    numbers = rows, len(ends), width, bias_stride, y_stride
    _launch_tiles(call, _expert_bias_forward_kernel, tensors, numbers, y.shape, plan, extent, {})


def launch_expert_bias_backward(call: Call, dy: Tensor, ends: Tensor, dbias: Tensor) -> None:
    """Write ``dbias`` [E, N], contiguous: the sums over the rows of ``dy`` [M, N] up to each of ``ends`` [E]."""
    if dbias.numel() == 0:
        return
    dy_rows, dy_stride = _rows_of(call, dy)
    constants = {"ROWS": 32, "BLOCK": 128, "INT64": dy.shape[0] * dy_stride >= INT32_LIMIT}
    grid = dbias.shape[0], -(-dbias.shape[1] // constants["BLOCK"])
    tensors, numbers = (dy_rows, call.contiguous(ends), dbias), (dbias.shape[1], dy_stride)
    call.launch(_expert_bias_backward_kernel, grid, tensors, numbers, constants, warps=4, fuse=False)


def _rows_of(call: Call, x: Tensor) -> tuple[Tensor, int]:
    """A matrix whose rows are contiguous, and its row stride."""
    (rows,), (stride,) = call.as_strided_rows(x)
    assert rows is not None
    return rows, stride
