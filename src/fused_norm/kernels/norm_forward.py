"""The forward of RMSNorm in Triton, with or without the residual add in front of it, and its launcher.

Names in the kernels: M rows of N columns; ``row`` and ``col`` index them, ``live`` masks what is inside. ``x`` is the
branch, ``scale`` what it is multiplied by (None is one), ``r`` the residual, ``s`` their sum (or x itself where there
is no residual), ``w`` the weight, ``gamma`` what a row is multiplied by, ``x_hat`` the normalised row, ``rstd`` =
1/sqrt(mean(s^2) + eps). Arithmetic is fp32 throughout.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import INT32_LIMIT, Launch
from .plans import ForwardPlan, forward_plan
from .triton_utils import empty_rows_like, facts_of, round_to, rows_of, same_rows


@triton.jit
def gamma_of(w, W_DTYPE: tl.constexpr, CASTING: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """What a row is multiplied by, from the weight as fp32; only gemma adds the one without rounding it."""
    if ZERO_CENTERED:
        w = w + 1.0
        if CASTING != "gemma":
            w = round_to(w, W_DTYPE)
    return w


@triton.jit
def _round_in_range(value, dtype: tl.constexpr):
    """Rounded to ``dtype`` unless that overflows: fp16 squares go on in fp32 instead of as inf."""
    rounded = round_to(value, dtype)
    return tl.where(tl.abs(rounded) == float("inf"), value, rounded)


@triton.jit
def square(s, dtype: tl.constexpr, CASTING: tl.constexpr):
    """s^2, rounded only where the casting says so."""
    if CASTING == "none":
        return _round_in_range(s * s, dtype)
    return s * s


@triton.jit
def rstd_from(sum_of_squares, eps, dtype: tl.constexpr, N: tl.constexpr, CASTING: tl.constexpr):
    """The factor the forward uses: rounded at each step where the casting says so."""
    mean = sum_of_squares * (1.0 / N)
    if CASTING == "none":
        return round_to(tl.rsqrt(_round_in_range(_round_in_range(mean, dtype) + eps, dtype)), dtype)
    return tl.rsqrt(mean + eps)


@triton.jit
def load_gamma(w_ptr, col, in_row, CASTING: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """gamma for columns ``col``, [1, columns] fp32, from the weight."""
    w = tl.load(w_ptr + col, mask=in_row, other=0.0, eviction_policy="evict_last").to(tl.float32)
    return gamma_of(w, w_ptr.dtype.element_ty, CASTING, ZERO_CENTERED)[None, :]


@triton.jit
def _add(x, r, scale, x_dtype: tl.constexpr, s_dtype: tl.constexpr):
    """The sum of residual and scaled branch; product and sum are rounded by themselves, as two operators round them."""
    if scale is not None:
        x = round_to(x * scale, x_dtype)
    return round_to(r + x, s_dtype)


@triton.jit
def _forward_tile(
    x_ptr,
    r_ptr,
    w_ptr,
    y_ptr,
    s_ptr,
    rstd_ptr,
    row,
    col,
    gamma,
    M,
    x_stride,
    r_stride,
    y_stride,
    s_stride,
    eps,
    scale,
    N: tl.constexpr,
    CASTING: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    HELD: tl.constexpr,
):
    """Rows held whole. ``HELD``: gamma is there already, in registers."""
    in_row = col < N
    live = (row < M)[:, None] & in_row[None, :]
    s = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=live, other=0.0).to(tl.float32)
    s_dtype: tl.constexpr = x_ptr.dtype.element_ty if r_ptr is None else s_ptr.dtype.element_ty
    if r_ptr is not None:
        r = tl.load(r_ptr + row[:, None] * r_stride + col[None, :], mask=live, other=0.0).to(tl.float32)
        s = _add(s, r, scale, x_ptr.dtype.element_ty, s_dtype)
        tl.store(s_ptr + row[:, None] * s_stride + col[None, :], s, mask=live)
    rstd = rstd_from(tl.sum(square(s, s_dtype, CASTING), axis=1), eps, s_dtype, N, CASTING)
    if rstd_ptr is not None:
        if CASTING == "none":
            tl.store(rstd_ptr + row, tl.rsqrt(tl.sum(s * s, axis=1) * (1.0 / N) + eps), mask=row < M)
        else:
            tl.store(rstd_ptr + row, rstd, mask=row < M)
    y = normalised(s, rstd[:, None], s_dtype, CASTING)
    if w_ptr is not None:
        if not HELD:
            gamma = load_gamma(w_ptr, col, in_row, CASTING, ZERO_CENTERED)
        y = y * gamma
    tl.store(y_ptr + row[:, None] * y_stride + col[None, :], round_to(y, y_ptr.dtype.element_ty), mask=live)


@triton.jit
def normalised(s, rstd, dtype: tl.constexpr, CASTING: tl.constexpr):
    """x_hat, which only gemma leaves unrounded."""
    x_hat = s * rstd
    if CASTING != "gemma":
        x_hat = round_to(x_hat, dtype)
    return x_hat


@triton.jit(do_not_specialize=["M"])
def _forward_kernel(
    x_ptr,  # [M, N]
    r_ptr,  # [M, N] or None
    w_ptr,  # [N] or None
    y_ptr,  # [M, N]
    s_ptr,  # [M, N] where there is a residual
    rstd_ptr,  # [M] fp32 or None
    M,
    x_stride,
    r_stride,
    y_stride,
    s_stride,
    eps,
    scale,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PERSISTENT: tl.constexpr,
    LONG: tl.constexpr,
    CASTING: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    col = tl.arange(0, BLOCK)
    gamma = tl.full([1, BLOCK], 1.0, tl.float32)
    if PERSISTENT:
        if w_ptr is not None:
            gamma = load_gamma(w_ptr, col, col < N, CASTING, ZERO_CENTERED)
        for tile in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0)):
            _forward_tile(
                x_ptr, r_ptr, w_ptr, y_ptr, s_ptr, rstd_ptr, rows_of(tile, ROWS, LONG), col, gamma, M,
                x_stride, r_stride, y_stride, s_stride, eps, scale, N, CASTING, ZERO_CENTERED, True,
            )  # fmt: skip
    else:
        _forward_tile(
            x_ptr, r_ptr, w_ptr, y_ptr, s_ptr, rstd_ptr, rows_of(tl.program_id(0), ROWS, LONG), col, gamma, M,
            x_stride, r_stride, y_stride, s_stride, eps, scale, N, CASTING, ZERO_CENTERED, False,
        )  # fmt: skip


@triton.jit
def _load_sum(x_ptr, r_ptr, s_ptr, row, col, x_stride, r_stride, s_stride, scale, N: tl.constexpr):
    """Columns ``col`` of x, or of the sum with the residual, which is stored on the way."""
    live = (col < N)[None, :]
    s = tl.load(x_ptr + row * x_stride + col[None, :], mask=live, other=0.0, eviction_policy="evict_last")
    s = s.to(tl.float32)
    if r_ptr is not None:
        r = tl.load(r_ptr + row * r_stride + col[None, :], mask=live, other=0.0, eviction_policy="evict_first")
        s = _add(s, r.to(tl.float32), scale, x_ptr.dtype.element_ty, s_ptr.dtype.element_ty)
        tl.store(s_ptr + row * s_stride + col[None, :], s, mask=live)
    return s


@triton.jit
def _store_chunk(
    s,
    rstd,
    w_ptr,
    y_ptr,
    row,
    col,
    y_stride,
    N: tl.constexpr,
    s_dtype: tl.constexpr,
    CASTING: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    """Columns ``col`` of y."""
    y = normalised(s, rstd[:, None], s_dtype, CASTING)
    if w_ptr is not None:
        y = y * load_gamma(w_ptr, col, col < N, CASTING, ZERO_CENTERED)
    tl.store(y_ptr + row * y_stride + col[None, :], round_to(y, y_ptr.dtype.element_ty), mask=(col < N)[None, :])


@triton.jit(do_not_specialize=["M"])
def _forward_chunked_kernel(
    x_ptr,  # [M, N]
    r_ptr,  # [M, N] or None
    w_ptr,  # [N] or None
    y_ptr,  # [M, N]
    s_ptr,  # [M, N]: the sum to write where there is a residual, x itself where there is none
    rstd_ptr,  # [M] fp32 or None
    M,
    x_stride,
    r_stride,
    y_stride,
    s_stride,
    eps,
    scale,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    CASTING: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    CHUNKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    s_dtype: tl.constexpr = s_ptr.dtype.element_ty
    squares = tl.zeros([1], tl.float32)
    exact_squares = tl.zeros([1], tl.float32)
    for chunk in range(CHUNKS - 1):
        col = chunk * BLOCK + tl.arange(0, BLOCK)
        s = _load_sum(x_ptr, r_ptr, s_ptr, row, col, x_stride, r_stride, s_stride, scale, N)
        squares += tl.sum(square(s, s_dtype, CASTING), axis=1)
        if CASTING == "none":
            exact_squares += tl.sum(s * s, axis=1)
    # The last chunk stays in registers; the others are read again, backwards, those still in cache first.
    col = (CHUNKS - 1) * BLOCK + tl.arange(0, BLOCK)
    s = _load_sum(x_ptr, r_ptr, s_ptr, row, col, x_stride, r_stride, s_stride, scale, N)
    rstd = rstd_from(squares + tl.sum(square(s, s_dtype, CASTING), axis=1), eps, s_dtype, N, CASTING)
    if rstd_ptr is not None:
        exact = rstd
        if CASTING == "none":
            exact = tl.rsqrt((exact_squares + tl.sum(s * s, axis=1)) * (1.0 / N) + eps)
        tl.store(rstd_ptr + row + tl.arange(0, 1), exact)
    _store_chunk(s, rstd, w_ptr, y_ptr, row, col, y_stride, N, s_dtype, CASTING, ZERO_CENTERED)
    tl.debug_barrier()  # the sums stored above are read again below, possibly by other threads of the program
    for step in range(CHUNKS - 1):
        col = (CHUNKS - 2 - step) * BLOCK + tl.arange(0, BLOCK)
        s = tl.load(s_ptr + row * s_stride + col[None, :], mask=(col < N)[None, :], other=0.0).to(tl.float32)
        _store_chunk(s, rstd, w_ptr, y_ptr, row, col, y_stride, N, s_dtype, CASTING, ZERO_CENTERED)


_forwards: dict[Any, tuple[ForwardPlan, Launch]] = {}


def launch_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    casting: str,
    zero_centered: bool,
    save_rstd: bool,
    mode: str | None = None,
    scale: float = 1.0,
    *,
    plan: ForwardPlan | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Launches the forward for validated tensors: ``(y, s, rstd)``; s is x where there is no residual.

    rstd is fp32, x's shape with a last dimension of 1, and in x's memory order; None unless ``save_rstd``. ``plan``
    overrules the one that the shape would get.
    """
    y, total, rstd = empty_outputs(x, residual, weight, casting, save_rstd)
    size, width = y.numel(), x.shape[-1]
    if size == 0:
        return y, total, rstd
    out, sums = y, None if residual is None else total
    if x.is_contiguous() and (residual is None or residual.is_contiguous()):
        strides, longest = (width, width, width, width), width
    else:
        (x, residual, out, sums), spacing = same_rows(x, residual, y, sums)  # type: ignore[assignment]
        strides, longest = tuple(spacing), max(spacing)  # type: ignore[assignment]
    rows = size // width
    long = rows * longest >= INT32_LIMIT
    if weight is not None and not weight.is_contiguous():
        weight = weight.contiguous()
    r_dtype = None if residual is None else residual.dtype
    w_dtype = None if weight is None else weight.dtype
    scaled = scale != 1.0
    key = (x.device, x.dtype, r_dtype, w_dtype, width, casting, zero_centered, save_rstd, mode, scaled, long, plan)
    planned = _forwards.get(key)
    if planned is None:
        plan = plan or forward_plan(width, facts_of(x.device), mode, summed=residual is not None)
        rounds_product = scaled and x.dtype == torch.float32
        planned = _forwards[key] = plan, _launch_of(plan, width, casting, zero_centered, long, rounds_product)
    plan, launch = planned
    floats = float(eps), float(scale) if scaled else None
    if plan.mode == "multi_wave_reload":
        if residual is None:
            sums, strides = x, (*strides[:3], strides[0])
        launch((rows, 1), (x, residual, weight, out, sums, rstd), rows, strides, floats)
        return y, total, rstd
    tiles = -(-rows // plan.rows)
    grid = min(tiles, plan.programs) if plan.mode == "static_persistent" else tiles
    launch((grid, 1), (x, residual, weight, out, sums, rstd), rows, strides, floats)
    return y, total, rstd


def _launch_of(
    plan: ForwardPlan, width: int, casting: str, zero_centered: bool, long: bool, rounds_product: bool
) -> Launch:
    """``rounds_product``: an fp32 product is added to, which must not become one fused multiply-add."""
    semantics: dict[str, Any] = {"CASTING": casting, "ZERO_CENTERED": zero_centered}
    if plan.mode == "multi_wave_reload":
        constants = {"N": width, "BLOCK": plan.block, **semantics}
        return Launch(_forward_chunked_kernel, plan.warps, constants, fuse=not rounds_product)
    persistent = plan.mode == "static_persistent"
    constants = {"N": width, "ROWS": plan.rows, "BLOCK": plan.block, "PERSISTENT": persistent, "LONG": long}
    return Launch(_forward_kernel, plan.warps, constants | semantics, fuse=not rounds_product)


def empty_outputs(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, casting: str, save_rstd: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The forward's outputs ``(y, s, rstd)``, not yet written; s is x itself where there is no residual."""
    total, dtype = x, x.dtype
    if residual is not None:
        if residual.dtype != dtype:
            dtype = torch.promote_types(dtype, residual.dtype)
        total = empty_rows_like(x, dtype)
    if weight is not None and casting != "gemma" and weight.dtype != dtype:
        dtype = torch.promote_types(dtype, weight.dtype)
    rstd = empty_rows_like(x, torch.float32, width=1) if save_rstd else None
    return empty_rows_like(x, dtype), total, rstd
