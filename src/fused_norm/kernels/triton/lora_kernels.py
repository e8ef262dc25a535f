"""A LoRA adapter in Triton, forward and backward: kernels and their launchers.

An adapter takes rows of K elements to rows of r, ``h = x @ a^T``, and those to rows of N, ``h @ b^T``. Products are of
numbers in h's dtype, to which wider ones are rounded first, and are summed in fp32 and rounded to it. All that is
written is contiguous. ``dy``, ``dx``, ``dh``, ``da`` and ``db`` are gradients. R is r, or the next size above it that
tiles can have.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plans import TilePlan, lora_plan, padded_rank
from .call import Call
from .devices import device_props
from .language import interpreted, round_to, rows_of
from .memory import is_long

HIGHEST_RANK = 256
"""The rank up to which tiles fit into registers and shared memory."""

_MAX_PARTIALS = 16
"""Parts at most that rows are cut into for the gradients of weights: a partial is as large as the gradient."""

_COPIED = 1024
"""Elements of a factor that a program copies at a time."""

_SUMMED = 256
"""Elements of those that one program sums over all parts."""

Strides = tuple[int, ...]


@triton.jit
def _load(memory, row, col, live, scale, dtype: tl.constexpr):
    """A tile rounded to ``dtype``, then times the scale and rounded again, to be multiplied with another tile."""
    ptr, row_stride, col_stride = memory
    value = tl.load(ptr + row[:, None] * row_stride + col[None, :] * col_stride, mask=live, other=0.0)
    value = _operand(value, dtype)
    if scale is not None:
        value = _operand(value.to(tl.float32) * scale, dtype)
    return value


@triton.jit
def _load_dropped(x_ptr, x_stride, mask_ptr, row, col, live, scale, N, dtype: tl.constexpr):
    """A tile of x times the scale and the mask [M, N], rounded once; a number that is not finite gives NaN."""
    if mask_ptr is None:
        value = _load((x_ptr, x_stride, 1), row, col, live, scale, dtype)
    else:
        value = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=live, other=0.0).to(tl.float32)
        value *= tl.load(mask_ptr + row[:, None] * N + col[None, :], mask=live, other=0).to(tl.float32)
        if scale is not None:
            value *= scale
        value = _operand(value, dtype)
    return value


@triton.jit
def _operand(value, dtype: tl.constexpr):
    """Values rounded to ``dtype`` as ``tl.dot`` takes them; Triton's interpreter multiplies no bf16."""
    if interpreted:
        return round_to(value.to(tl.float32), dtype)
    return value.to(dtype)


@triton.jit
def _copy_rounded(w_ptr, w_row_stride, w_col_stride, copy_ptr, K, r, SIZE: tl.constexpr, dtype: tl.constexpr):
    """Write a factor [K, r] to [r, K], rounded to ``dtype``; each program of the grid's first axis copies a part.

    K is the factor's first dimension and r its second, whatever they mean.
    """
    for start in range(tl.program_id(0) * SIZE, K * r, tl.num_programs(0) * SIZE):
        at = start + tl.arange(0, SIZE)
        value = tl.load(w_ptr + at % K * w_row_stride + at // K * w_col_stride, mask=at < K * r, other=0.0)
        tl.store(copy_ptr + at, _operand(value, dtype), mask=at < K * r)


@triton.jit(do_not_specialize=["M"])
def _narrow_kernel(
    x_ptr,  # [M, K]
    w_ptr,  # [K, r], by its strides
    h_ptr,  # [M, r]
    copy_ptr,  # [r, K] or None: w, rounded to h's dtype
    mask_ptr,  # [M, K] bool, or None
    kept_ptr,  # [M, K] or None: x times the mask and the scale, in h's dtype
    M,
    K, r, x_stride, w_row_stride, w_col_stride,
    scale,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, INT64: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """``h = round(x * mask * scale) @ w``."""
    dtype: tl.constexpr = h_ptr.dtype.element_ty
    row = rows_of(tl.program_id(0), ROWS, INT64)
    rank = tl.arange(0, R)
    h = tl.zeros([ROWS, R], tl.float32)
    for start in range(0, K, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x_live = (row < M)[:, None] & (col < K)[None, :]
        x = _load_dropped(x_ptr, x_stride, mask_ptr, row, col, x_live, scale, K, dtype)
        if kept_ptr is not None:
            tl.store(kept_ptr + row[:, None] * K + col[None, :], x, mask=x_live)
        live = (col < K)[:, None] & (rank < r)[None, :]
        h = tl.dot(x, _load((w_ptr, w_row_stride, w_col_stride), col, rank, live, None, dtype), h)
    tl.store(
        h_ptr + row[:, None] * r + rank[None, :], round_to(h, dtype), mask=(row < M)[:, None] & (rank < r)[None, :]
    )
    if copy_ptr is not None:
        _copy_rounded(w_ptr, w_row_stride, w_col_stride, copy_ptr, K, r, COPIED, dtype)


@triton.jit(do_not_specialize=["M"])
def _widen_kernel(
    h_ptr,  # [M, r]
    w_ptr,  # [r, N], by its strides
    base_ptr,  # [M, N] or None
    y_ptr,  # [M, N]
    copy_ptr,  # [N, r] or None: w, rounded to h's dtype
    mask_ptr,  # [M, N] bool, or None
    M,
    N, r, w_row_stride, w_col_stride, base_stride,
    scale,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, INT64: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """``y = base + (h @ w) * scale * mask``, the product rounded, and what follows too: with a mask, to y's dtype."""
    dtype: tl.constexpr = h_ptr.dtype.element_ty
    row = rows_of(tl.program_id(0), ROWS, INT64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rank = tl.arange(0, R)
    live = (row < M)[:, None] & (col < N)[None, :]
    h = _load((h_ptr, r, 1), row, rank, (row < M)[:, None] & (rank < r)[None, :], None, dtype)
    w = _load((w_ptr, w_row_stride, w_col_stride), rank, col, (rank < r)[:, None] & (col < N)[None, :], None, dtype)
    y = round_to(tl.dot(h, w), dtype)
    if mask_ptr is not None:
        y *= tl.load(mask_ptr + row[:, None] * N + col[None, :], mask=live, other=0).to(tl.float32)
        if scale is not None:
            y *= scale
        y = round_to(y, y_ptr.dtype.element_ty)
    elif scale is not None:
        y = round_to(y * scale, dtype)
    if base_ptr is not None:
        y += tl.load(base_ptr + row[:, None] * base_stride + col[None, :], mask=live, other=0.0).to(tl.float32)
    tl.store(y_ptr + row[:, None] * N + col[None, :], round_to(y, y_ptr.dtype.element_ty), mask=live)
    if copy_ptr is not None:
        block = tl.program_id(1)
        if block == 0:
            _copy_rounded(w_ptr, w_row_stride, w_col_stride, copy_ptr, r, N, COPIED, dtype)


@triton.jit(do_not_specialize=["M", "share"])
def _partials_kernel(
    h_ptr,  # [M, r]
    dy_ptr,  # [M, N] or None
    db_ptr,  # [programs, N, r] fp32: partials; None if dy is None, and N is 0 then
    dh_ptr,  # [M, r] or None
    x_ptr,  # [M, K] or None, as dh
    da_ptr,  # [programs, K, r] fp32: partials; None if x is None, and K is 0 then
    mask_ptr,  # [M, K] bool, or None
    M, share,
    N, K, r, dy_stride, x_stride,
    scale, x_scale,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """Partials of ``db = round(dy * scale)^T @ h`` and ``da^T = round(x * mask * x_scale)^T @ dh``, each of ``share``
    rows."""
    start = tl.program_id(0) * share
    block, blocks = tl.program_id(1), tl.cdiv(N, BLOCK)
    if block < blocks:
        if db_ptr is not None:
            _share(dy_ptr, None, h_ptr, db_ptr, start, share, block, M, N, r, dy_stride, scale, ROWS, BLOCK, R, INT64)
    else:
        if da_ptr is not None:
            _share(
                x_ptr, mask_ptr, dh_ptr, da_ptr, start, share, block - blocks, M, K, r, x_stride, x_scale,
                ROWS, BLOCK, R, INT64,
            )  # fmt: skip


@triton.jit
def _share(
    wide_ptr, mask_ptr, narrow_ptr, share_ptr, start, share, block, M, N, r, stride, scale,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = narrow_ptr.dtype.element_ty
    col = block * BLOCK + tl.arange(0, BLOCK)
    rank = tl.arange(0, R)
    total = tl.zeros([BLOCK, R], tl.float32)
    for first in range(start, tl.minimum(start + share, M), ROWS):
        row = rows_of(first // ROWS, ROWS, INT64)
        live = (row < M)[:, None] & (col < N)[None, :]
        wide = _load_dropped(wide_ptr, stride, mask_ptr, row, col, live, scale, N, dtype)
        narrow = _load((narrow_ptr, r, 1), row, rank, (row < M)[:, None] & (rank < r)[None, :], None, dtype)
        total = tl.dot(tl.trans(wide), narrow, total)
    at = share_ptr + tl.program_id(0) * N * r + col[:, None] * r + rank[None, :]
    tl.store(at, total, mask=(col < N)[:, None] & (rank < r)[None, :])


@triton.jit(do_not_specialize=["programs"])
def _sum_kernel(
    h_ptr,  # of the dtype that products are rounded to
    db_partials_ptr,  # [programs, N, r] fp32, or None
    db_ptr,  # [N, r], or None
    da_partials_ptr,  # [programs, K, r] fp32, or None
    da_ptr,  # [r, K], or None
    programs,
    N, K, r,
    BLOCK: tl.constexpr,
):  # fmt: skip
    block, blocks = tl.program_id(0), tl.cdiv(N * r, BLOCK)
    dtype: tl.constexpr = h_ptr.dtype.element_ty
    if block < blocks:
        if db_ptr is not None:
            at = block * BLOCK + tl.arange(0, BLOCK)
            total = _sum(db_partials_ptr, at, N * r, programs, BLOCK)
            tl.store(db_ptr + at, round_to(round_to(total, dtype), db_ptr.dtype.element_ty), mask=at < N * r)
    else:
        if da_ptr is not None:
            at = (block - blocks) * BLOCK + tl.arange(0, BLOCK)
            total = _sum(da_partials_ptr, at, K * r, programs, BLOCK)
            place = at % r * K + at // r
            tl.store(da_ptr + place, round_to(round_to(total, dtype), da_ptr.dtype.element_ty), mask=at < K * r)


@triton.jit
def _sum(partials_ptr, at, size, programs, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for program in range(programs):
        total += tl.load(partials_ptr + program * size + at, mask=at < size, other=0.0)
    return total


def launch_narrow(
    call: Call,
    x: Tensor,
    w: Tensor,
    strides: Strides,
    h: Tensor,
    scale: float = 1,
    copy: Tensor | None = None,
    mask: Tensor | None = None,
    kept: Tensor | None = None,
) -> None:
    """Write ``h`` [..., r]: ``x`` [..., K] times the scale and the mask, and that times ``w`` [K, r] of these strides.

    ``copy`` [r, K] gets w, rounded to h's dtype. ``mask``: of x's shape, bool, contiguous. ``kept`` [..., K] gets x
    times the scale and the mask, in h's dtype.
    """
    (_, arranged), (_, stride) = call.as_strided_rows(h, x)
    rows, rank, width = h.shape[:-1].numel(), h.shape[-1], x.shape[-1]
    plan = lora_plan("narrow", rows, rank, h.element_size(), x.element_size(), device_props(h.device))
    tile = _tile(plan, rank, arranged, h) | {"COPIED": _COPIED}
    numbers = rows, width, rank, stride, *strides, _factor(scale)
    call.launch(
        _narrow_kernel, (-(-rows // plan.rows), 1), (arranged, w, h, copy, mask, kept), numbers, tile, warps=plan.warps
    )


def launch_widen(
    call: Call,
    h: Tensor,
    w: Tensor,
    strides: Strides,
    base: Tensor | None,
    y: Tensor,
    scale: float = 1,
    copy: Tensor | None = None,
    mask: Tensor | None = None,
) -> None:
    """Write ``y`` [..., N]: ``h`` [..., r] times ``w`` [r, N] of these strides, the scale and the mask, and ``base``.

    ``copy`` [N, r] gets w, rounded to h's dtype. ``mask``: of y's shape, bool, contiguous.
    """
    (_, arranged), (_, base_stride) = call.as_strided_rows(h, base)
    rows, rank, width = h.shape[:-1].numel(), h.shape[-1], y.shape[-1]
    plan = lora_plan("widen", rows, rank, h.element_size(), device=device_props(h.device))
    tile = _tile(plan, rank, arranged, y, h) | {"COPIED": _COPIED}
    numbers = rows, width, rank, *strides, base_stride, _factor(scale)
    grid = -(-rows // plan.rows), -(-width // plan.block)
    call.launch(_widen_kernel, grid, (h, w, arranged, y, copy, mask), numbers, tile, warps=plan.warps)


def launch_weights(
    call: Call,
    h: Tensor,
    of_b: tuple[Tensor, Tensor | None],
    of_a: tuple[Tensor, Tensor | None, Tensor | None],
    scale: float,
    x_scale: float = 1,
    mask: Tensor | None = None,
) -> None:
    """Write the gradients of one weight or both, which are contiguous; h is [..., r].

    ``of_b``: dy [..., N], and db [N, r], of it times the scale and h, or None. ``of_a``: x [..., K], and dh [..., r]
    and da [r, K], of both, or None for these. ``x_scale``: that of x. ``mask``: of x's shape, bool, contiguous; x is
    multiplied by it.
    """
    (dy, db), (x, dh, da) = of_b, of_a
    arranged, (_, dy_stride, x_stride) = call.as_strided_rows(h, None if db is None else dy, None if da is None else x)
    _, dy_rows, x_rows = arranged
    rows, rank = h.shape[:-1].numel(), h.shape[-1]
    width, inputs = 0 if db is None else len(db), 0 if da is None else da.shape[1]
    plan = lora_plan("gradients", rows, rank, h.element_size(), device=device_props(h.device))
    blocks = -(-width // plan.block) + -(-inputs // plan.block)
    parts = max(1, min(_MAX_PARTIALS, plan.programs // blocks))
    share = plan.rows * -(-rows // (parts * plan.rows))
    programs = -(-rows // share)
    db_partials, da_partials = (
        None if dw is None else call.empty(h, (programs, dw.numel()), dtype=torch.float32) for dw in (db, da)
    )
    numbers = rows, share, width, inputs, rank, dy_stride, x_stride, _factor(scale), _factor(x_scale)
    read = h, dy_rows, db_partials, None if da is None else dh, x_rows, da_partials, None if da is None else mask
    tile = _tile(plan, rank, dy_rows, x_rows, h)
    call.launch(_partials_kernel, (programs, blocks), read, numbers, tile, warps=plan.warps)
    grid = -(-width * rank // _SUMMED) + -(-inputs * rank // _SUMMED), 1
    tensors, sizes = (h, db_partials, db, da_partials, da), (programs, width, inputs, rank)
    call.launch(_sum_kernel, grid, tensors, sizes, {"BLOCK": _SUMMED}, warps=4)


def _tile(plan: TilePlan, rank: int, *tensors: Tensor | None) -> dict[str, int]:
    """The constants of a kernel's tiles."""
    is_far = is_long([t for t in tensors if t is not None])
    return {"R": padded_rank(rank), "ROWS": plan.rows, "BLOCK": plan.block, "INT64": is_far}


def _factor(scale: float) -> float | None:
    return None if scale == 1 else float(scale)
