"""The forward of RMSNorm in Triton, with or without the residual add in front of it, and its launchers.

``language`` has the names that kernels use.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...spec import NormSpec
from ..plans import ForwardPlan, forward_plan, next_power_of_2
from .devices import device_facts
from .language import (
    columns_of,
    load_gamma,
    load_tile,
    normalised,
    round_to,
    rows_of,
    rstd_from,
    rstd_of,
    square,
    store_tile,
)
from .launch import launch
from .memory import INT32_LIMIT, contiguous, empty_rows_like, norm_dtype, promoted, same_rows


@triton.jit
def add_rounded(x, r, scale, x_dtype: tl.constexpr, s_dtype: tl.constexpr):
    """The sum of residual and scaled branch; product and sum are rounded by themselves, as two operators round them."""
    if scale is not None:
        x = round_to(x * scale, x_dtype)
    return round_to(r + x, s_dtype)


@triton.jit
def _forward_tile(
    x, r, w_ptr, y, s, rstd_ptr, row, col, gamma, M, eps, scale, s_dtype: tl.constexpr, N: tl.constexpr,
    SPEC: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Normalise rows held whole. ``HELD``: gamma is there already, in registers."""
    in_row = col < N
    live = (row < M)[:, None] & in_row[None, :]
    total = load_tile(x, row, col, live)
    if r[0] is not None:
        total = add_rounded(total, load_tile(r, row, col, live), scale, x[0].dtype.element_ty, s_dtype)
        store_tile(s, row, col, live, total)
    rstd = rstd_of(total, rstd_ptr, row, M, eps, s_dtype, N, SPEC)
    out = normalised(total, rstd, w_ptr, s_dtype, SPEC)
    if w_ptr is not None:
        if not HELD:
            gamma = load_gamma(w_ptr, col, in_row, SPEC)
        out = out * gamma
    store_tile(y, row, col, live, out)


@triton.jit(do_not_specialize=["M"])
def _forward_kernel(
    x_ptr,  # [M, N]
    r_ptr,  # [M, N] or None
    w_ptr,  # [N] or None
    y_ptr,  # [M, N]
    s_ptr,  # [M, N] where there is a residual
    rstd_ptr,  # [M] fp32 or None
    M,
    x_stride, r_stride, y_stride, s_stride,
    eps, scale,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PERSISTENT: tl.constexpr, LONG: tl.constexpr,
    SPEC: tl.constexpr,
):  # fmt: skip
    x, r, y, s = (x_ptr, x_stride), (r_ptr, r_stride), (y_ptr, y_stride), (s_ptr, s_stride)
    s_dtype: tl.constexpr = x_ptr.dtype.element_ty if r_ptr is None else s_ptr.dtype.element_ty
    col = columns_of(BLOCK, s_dtype)
    gamma = tl.full([1, BLOCK], 1.0, tl.float32)
    if PERSISTENT:
        if w_ptr is not None:
            gamma = load_gamma(w_ptr, col, col < N, SPEC)
        for tile in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0)):
            row = rows_of(tile, ROWS, LONG)
            _forward_tile(x, r, w_ptr, y, s, rstd_ptr, row, col, gamma, M, eps, scale, s_dtype, N, SPEC, True)
    else:
        row = rows_of(tl.program_id(0), ROWS, LONG)
        _forward_tile(x, r, w_ptr, y, s, rstd_ptr, row, col, gamma, M, eps, scale, s_dtype, N, SPEC, False)


@triton.jit
def _load_sum(x, r, s, row, col, scale, N: tl.constexpr):
    """Columns ``col`` of x, or of the sum with the residual, which is stored on the way."""
    x_ptr, x_stride = x
    r_ptr, r_stride = r
    s_ptr, s_stride = s
    live = (col < N)[None, :]
    total = tl.load(x_ptr + row * x_stride + col[None, :], mask=live, other=0.0, eviction_policy="evict_last")
    total = total.to(tl.float32)
    if r_ptr is not None:
        res = tl.load(r_ptr + row * r_stride + col[None, :], mask=live, other=0.0, eviction_policy="evict_first")
        total = add_rounded(total, res.to(tl.float32), scale, x_ptr.dtype.element_ty, s_ptr.dtype.element_ty)
        tl.store(s_ptr + row * s_stride + col[None, :], total, mask=live)
    return total


@triton.jit
def _store_chunk(s, rstd, w_ptr, y, row, col, N: tl.constexpr, s_dtype: tl.constexpr, SPEC: tl.constexpr):
    """Write columns ``col`` of y."""
    y_ptr, y_stride = y
    out = normalised(s, rstd[:, None], w_ptr, s_dtype, SPEC)
    if w_ptr is not None:
        out = out * load_gamma(w_ptr, col, col < N, SPEC)
    tl.store(y_ptr + row * y_stride + col[None, :], round_to(out, y_ptr.dtype.element_ty), mask=(col < N)[None, :])


@triton.jit(do_not_specialize=["M"])
def _forward_chunked_kernel(
    x_ptr,  # [M, N]
    r_ptr,  # [M, N] or None
    w_ptr,  # [N] or None
    y_ptr,  # [M, N]
    s_ptr,  # [M, N]: the sum to write where there is a residual, x itself where there is none
    rstd_ptr,  # [M] fp32 or None
    M,
    x_stride, r_stride, y_stride, s_stride,
    eps, scale,
    N: tl.constexpr, BLOCK: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    x, r, y, s = (x_ptr, x_stride), (r_ptr, r_stride), (y_ptr, y_stride), (s_ptr, s_stride)
    row = tl.program_id(0).to(tl.int64)
    CHUNKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    s_dtype: tl.constexpr = s_ptr.dtype.element_ty
    squares = tl.zeros([1], tl.float32)
    exact_squares = tl.zeros([1], tl.float32)
    for chunk in range(CHUNKS - 1):
        col = chunk * BLOCK + columns_of(BLOCK, s_dtype)
        total = _load_sum(x, r, s, row, col, scale, N)
        squares += tl.sum(square(total, s_dtype, SPEC), axis=1)
        if SPEC.casting == "none":
            exact_squares += tl.sum(total * total, axis=1)
    # The last chunk stays in registers; the others are read again, backwards, those still in cache first.
    col = (CHUNKS - 1) * BLOCK + columns_of(BLOCK, s_dtype)
    total = _load_sum(x, r, s, row, col, scale, N)
    rstd = rstd_from(squares + tl.sum(square(total, s_dtype, SPEC), axis=1), eps, s_dtype, N, SPEC)
    if rstd_ptr is not None:
        exact = rstd
        if SPEC.casting == "none":
            exact = tl.rsqrt((exact_squares + tl.sum(total * total, axis=1)) * (1.0 / N) + eps)
        tl.store(rstd_ptr + row + tl.arange(0, 1), exact)
    _store_chunk(total, rstd, w_ptr, y, row, col, N, s_dtype, SPEC)
    tl.debug_barrier()  # the sums stored above are read again below, possibly by other threads of the program
    for step in range(CHUNKS - 1):
        col = (CHUNKS - 2 - step) * BLOCK + columns_of(BLOCK, s_dtype)
        total = tl.load(s_ptr + row * s_stride + col[None, :], mask=(col < N)[None, :], other=0.0).to(tl.float32)
        _store_chunk(total, rstd, w_ptr, y, row, col, N, s_dtype, SPEC)


@triton.jit(do_not_specialize=["M"])
def _from_rstd_kernel(
    x_ptr,  # [M, N]
    w_ptr,  # [N] or None
    rstd_ptr,  # [M] fp32
    y_ptr,  # [M, N]
    M,
    x_stride, y_stride,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Programs are tiles of rows along the first axis of the grid, blocks of columns along the second."""
    row = rows_of(tl.program_id(0), ROWS, LONG)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = col < N
    live = (row < M)[:, None] & in_row[None, :]
    rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
    out = normalised(load_tile((x_ptr, x_stride), row, col, live), rstd, w_ptr, x_ptr.dtype.element_ty, SPEC)
    if w_ptr is not None:
        out = out * load_gamma(w_ptr, col, in_row, SPEC)
    store_tile((y_ptr, y_stride), row, col, live, out)


def empty_norm(
    spec: NormSpec, x: Tensor, residual: Tensor | None, weight: Tensor | None, training: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The forward's outputs ``(y, s, rstd)``, not yet written; s is x itself where there is no residual.

    rstd is fp32, x's shape with a last dimension of 1, and in x's memory order; None unless ``training``.
    """
    total = x if residual is None else empty_rows_like(x, promoted(x.dtype, residual.dtype))
    rstd = empty_rows_like(x, torch.float32, width=1) if training else None
    return empty_rows_like(x, norm_dtype(spec, total.dtype, weight)), total, rstd


_FROM_RSTD_ELEMENTS = 2048
"""Elements of a tile where no row is summed: 16 a lane."""


def launch_norm_forward(
    spec: NormSpec,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    outputs: tuple[Tensor, Tensor, Tensor | None],
    mode: str | None = None,
    scale: float = 1.0,
    *,
    plan: ForwardPlan | None = None,
) -> None:
    """Write the ``outputs`` of ``empty_norm``. ``plan`` overrules the one that the shape would get."""
    y, total, rstd = outputs
    size, width = y.numel(), x.shape[-1]
    if size == 0:
        return
    rows = size // width
    arranged, strides = same_rows(x, residual, y, None if residual is None else total)
    x, residual, y, sums = arranged  # type: ignore[assignment]
    weight = contiguous(weight)
    long = rows * max(strides) >= INT32_LIMIT
    plan = plan or forward_plan(width, device_facts(x.device), mode)
    # Products of fp32 numbers, squares and scaled ones, are rounded before they are added: which of two the
    # compiler would fuse with their sum differs from kernel to kernel. Squares of 16-bit numbers are exact.
    fuse = (x if sums is None else sums).dtype != torch.float32
    tiles = -(-rows // plan.rows)
    constants: dict[str, Any] = {"N": width, "BLOCK": plan.block, "SPEC": spec.without_eps()}
    if plan.mode == "multi_wave_reload":
        kernel = _forward_chunked_kernel
        if sums is None:
            sums, strides = x, (*strides[:3], strides[0])
    else:
        kernel, persistent = _forward_kernel, plan.mode == "static_persistent"
        constants |= {"ROWS": plan.rows, "PERSISTENT": persistent, "LONG": long}
        tiles = min(tiles, plan.programs) if persistent else tiles
    tensors = x, residual, weight, y, sums, rstd
    numbers = rows, *strides, spec.eps, None if scale == 1.0 else float(scale)
    launch(kernel, (tiles, 1), tensors, numbers, constants, warps=plan.warps, fuse=fuse)


def launch_norm_from_rstd(spec: NormSpec, x: Tensor, weight: Tensor | None, rstd: Tensor, y: Tensor) -> None:
    """Write the norm of x to ``y``, from the rstd that its forward has kept: no row is summed.

    The formula is the forward's, element for element, so the bits do not depend on how a launch divides the work.
    """
    size, width = y.numel(), x.shape[-1]
    if size == 0:
        return
    rows = size // width
    (x, rstd, y), (x_stride, _, y_stride) = same_rows(x, rstd, y)  # type: ignore[assignment]
    weight = contiguous(weight)
    long = rows * max(x_stride, y_stride) >= INT32_LIMIT
    block = min(next_power_of_2(width), _FROM_RSTD_ELEMENTS)
    tile = _FROM_RSTD_ELEMENTS // block
    grid = -(-rows // tile), -(-width // block)
    constants = {"N": width, "ROWS": tile, "BLOCK": block, "LONG": long, "SPEC": spec.without_eps()}
    numbers, warps = (rows, x_stride, y_stride), device_facts(x.device).warps(4)
    launch(_from_rstd_kernel, grid, (x, weight, rstd, y), numbers, constants, warps=warps)
