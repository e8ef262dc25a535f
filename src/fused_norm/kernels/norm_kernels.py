"""The Triton kernels of RMSNorm, with or without the residual add in front of it, and their launchers.

Names in the kernels: M rows of N columns; ``row`` and ``col`` index them, ``live`` masks what is inside. ``x`` is the
branch, ``r`` the residual, ``s`` their sum (or x itself where there is no residual), ``w`` the weight, ``gamma`` what a
row is multiplied by, ``x_hat`` the normalised row, ``rstd`` = 1/sqrt(mean(s^2) + eps). Arithmetic is fp32 throughout.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch
from .plans import BackwardPlan, ForwardPlan, backward_plan, forward_plan, next_power_of_2
from .triton_utils import empty_rows_like, facts_of, round_to, same_rows

_GRID_LIMIT = 65_535
"""Programs along the second axis of a CUDA grid."""


@triton.jit
def _gamma(w, W_DTYPE: tl.constexpr, CASTING: tl.constexpr, ZERO_CENTERED: tl.constexpr):
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
def _square(s, dtype: tl.constexpr, CASTING: tl.constexpr):
    if CASTING == "none":
        return _round_in_range(s * s, dtype)
    return s * s


@triton.jit
def _rstd_from(sum_of_squares, eps, dtype: tl.constexpr, N: tl.constexpr, CASTING: tl.constexpr):
    """The factor the forward uses: rounded at each step where the casting says so."""
    mean = sum_of_squares * (1.0 / N)
    if CASTING == "none":
        return round_to(tl.rsqrt(_round_in_range(_round_in_range(mean, dtype) + eps, dtype)), dtype)
    return tl.rsqrt(mean + eps)


@triton.jit
def _load_gamma(w_ptr, col, in_row, CASTING: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    w = tl.load(w_ptr + col, mask=in_row, other=0.0, eviction_policy="evict_last").to(tl.float32)
    return _gamma(w, w_ptr.dtype.element_ty, CASTING, ZERO_CENTERED)[None, :]


@triton.jit
def _rows_of(tile, ROWS: tl.constexpr, LONG: tl.constexpr):
    """The row numbers of a tile; 64-bit where an offset made from them could pass 2^31."""
    row = tile * ROWS + tl.arange(0, ROWS)
    return row.to(tl.int64) if LONG else row


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
        s = round_to(r + s, s_dtype)
        tl.store(s_ptr + row[:, None] * s_stride + col[None, :], s, mask=live)
    rstd = _rstd_from(tl.sum(_square(s, s_dtype, CASTING), axis=1), eps, s_dtype, N, CASTING)
    if rstd_ptr is not None:
        if CASTING == "none":
            tl.store(rstd_ptr + row, tl.rsqrt(tl.sum(s * s, axis=1) * (1.0 / N) + eps), mask=row < M)
        else:
            tl.store(rstd_ptr + row, rstd, mask=row < M)
    y = _x_hat(s, rstd[:, None], s_dtype, CASTING)
    if w_ptr is not None:
        if not HELD:
            gamma = _load_gamma(w_ptr, col, in_row, CASTING, ZERO_CENTERED)
        y = y * gamma
    tl.store(y_ptr + row[:, None] * y_stride + col[None, :], round_to(y, y_ptr.dtype.element_ty), mask=live)


@triton.jit
def _x_hat(s, rstd, dtype: tl.constexpr, CASTING: tl.constexpr):
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
            gamma = _load_gamma(w_ptr, col, col < N, CASTING, ZERO_CENTERED)
        for tile in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0)):
            _forward_tile(
                x_ptr, r_ptr, w_ptr, y_ptr, s_ptr, rstd_ptr, _rows_of(tile, ROWS, LONG), col, gamma, M,
                x_stride, r_stride, y_stride, s_stride, eps, N, CASTING, ZERO_CENTERED, True,
            )  # fmt: skip
    else:
        _forward_tile(
            x_ptr, r_ptr, w_ptr, y_ptr, s_ptr, rstd_ptr, _rows_of(tl.program_id(0), ROWS, LONG), col, gamma, M,
            x_stride, r_stride, y_stride, s_stride, eps, N, CASTING, ZERO_CENTERED, False,
        )  # fmt: skip


@triton.jit
def _load_sum(x_ptr, r_ptr, s_ptr, row, col, x_stride, r_stride, s_stride, N: tl.constexpr):
    """Columns ``col`` of x, or of its sum with the residual, which is stored on the way."""
    live = (col < N)[None, :]
    s = tl.load(x_ptr + row * x_stride + col[None, :], mask=live, other=0.0, eviction_policy="evict_last")
    s = s.to(tl.float32)
    if r_ptr is not None:
        r = tl.load(r_ptr + row * r_stride + col[None, :], mask=live, other=0.0, eviction_policy="evict_first")
        s = round_to(r.to(tl.float32) + s, s_ptr.dtype.element_ty)
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
    y = _x_hat(s, rstd[:, None], s_dtype, CASTING)
    if w_ptr is not None:
        y = y * _load_gamma(w_ptr, col, col < N, CASTING, ZERO_CENTERED)
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
        s = _load_sum(x_ptr, r_ptr, s_ptr, row, col, x_stride, r_stride, s_stride, N)
        squares += tl.sum(_square(s, s_dtype, CASTING), axis=1)
        if CASTING == "none":
            exact_squares += tl.sum(s * s, axis=1)
    # The last chunk stays in registers; the others are read again, backwards, those still in cache first.
    col = (CHUNKS - 1) * BLOCK + tl.arange(0, BLOCK)
    s = _load_sum(x_ptr, r_ptr, s_ptr, row, col, x_stride, r_stride, s_stride, N)
    rstd = _rstd_from(squares + tl.sum(_square(s, s_dtype, CASTING), axis=1), eps, s_dtype, N, CASTING)
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


@triton.jit
def _store_input_grads(dx_ptr, dr_ptr, ds, row, dx_stride, dr_stride, col, live):
    """Writes the sum's gradient to the branch, the residual, or both: two tensors, since gradients never alias."""
    if dx_ptr is not None:
        dx = round_to(ds, dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + row * dx_stride + col, dx, mask=live)
    if dr_ptr is not None:
        dr = round_to(ds, dr_ptr.dtype.element_ty)
        tl.store(dr_ptr + row * dr_stride + col, dr, mask=live)


@triton.jit
def _sum_of_shares(shares_ptr, P, col, N: tl.constexpr, ROWS: tl.constexpr):
    """The P shares of columns ``col`` summed in a fixed order, whichever program does it."""
    total = tl.zeros([ROWS, col.shape[0]], tl.float32)
    for start in range(0, P, ROWS):
        share = start + tl.arange(0, ROWS)
        live = (share < P)[:, None] & (col < N)[None, :]
        total += tl.load(shares_ptr + share[:, None] * N + col[None, :], mask=live, other=0.0, cache_modifier=".cg")
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["M"])
def _backward_kernel(
    dy_ptr,  # [M, N]
    ds_ptr,  # [M, N] or None: what else flows into the sum
    s_ptr,  # [M, N]
    w_ptr,  # [N] or None
    rstd_ptr,  # [M] fp32
    dx_ptr,  # [M, N] or None
    dr_ptr,  # [M, N] or None
    dw_ptr,  # [programs, N] fp32 or None: each program's share
    arrived_ptr,  # [1] int32, zero before and after, or None: how many programs have stored their share
    total_ptr,  # [N] or None: the sum of the shares, written by the program that arrives last
    M,
    dy_stride,
    ds_stride,
    s_stride,
    dx_stride,
    dr_stride,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    RELOAD: tl.constexpr,
    SHARE_ROWS: tl.constexpr,
    LONG: tl.constexpr,
    CASTING: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    in_row = col < N
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    gamma = tl.full([1, BLOCK], 1.0, tl.float32)
    if w_ptr is not None and not RELOAD:
        gamma = _load_gamma(w_ptr, col, in_row, CASTING, ZERO_CENTERED)
    for tile in tl.range(program, tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = _rows_of(tile, ROWS, LONG)
        live = (row < M)[:, None] & in_row[None, :]
        row_in = row[:, None]
        s = tl.load(s_ptr + row_in * s_stride + col[None, :], mask=live, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row_in * dy_stride + col[None, :], mask=live, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
        if dw_ptr is not None:
            dw += dy * (s * rstd)
        if dx_ptr is not None or dr_ptr is not None:
            if w_ptr is not None and RELOAD:
                gamma = _load_gamma(w_ptr, col, in_row, CASTING, ZERO_CENTERED)
            g = dy * gamma
            pull = tl.sum(g * s, axis=1)[:, None] * (rstd * rstd) * (1.0 / N)
            grad = rstd * (g - s * pull)
            if ds_ptr is not None:
                grad += tl.load(ds_ptr + row_in * ds_stride + col[None, :], mask=live, other=0.0).to(tl.float32)
            _store_input_grads(dx_ptr, dr_ptr, grad, row_in, dx_stride, dr_stride, col[None, :], live)
    if dw_ptr is not None:
        tl.store(dw_ptr + program.to(tl.int64) * N + col, tl.sum(dw, axis=0), mask=in_row)
        if arrived_ptr is not None:
            tl.debug_barrier()  # all of this program's share is stored before it counts as arrived
            if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
                total = _sum_of_shares(dw_ptr, tl.num_programs(0), col, N, SHARE_ROWS)
                tl.store(total_ptr + col, round_to(total, total_ptr.dtype.element_ty), mask=in_row)
                tl.store(arrived_ptr, 0)


@triton.jit(do_not_specialize=["M"])
def _backward_pull_kernel(
    dy_ptr,  # [M, N]
    s_ptr,  # [M, N]
    w_ptr,  # [N] or None
    rstd_ptr,  # [M] fp32
    pull_ptr,  # [M] fp32
    M,
    dy_stride,
    s_stride,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    CASTING: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    """For rows too wide to hold: ``rstd^2 * mean(dy * gamma * s)``, which every element of dx needs."""
    row = tl.program_id(0).to(tl.int64)
    products = tl.zeros([1, BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        col = start + tl.arange(0, BLOCK)
        in_row = (col < N)[None, :]
        s = tl.load(s_ptr + row * s_stride + col[None, :], mask=in_row, other=0.0).to(tl.float32)
        g = tl.load(dy_ptr + row * dy_stride + col[None, :], mask=in_row, other=0.0).to(tl.float32)
        if w_ptr is not None:
            g = g * _load_gamma(w_ptr, col, col < N, CASTING, ZERO_CENTERED)
        products += g * s
    rstd = tl.load(rstd_ptr + row)
    tl.store(pull_ptr + row + tl.arange(0, 1), tl.sum(products, axis=1) * (rstd * rstd) * (1.0 / N))


@triton.jit(do_not_specialize=["M"])
def _backward_columns_kernel(
    dy_ptr,  # [M, N]
    ds_ptr,  # [M, N] or None
    s_ptr,  # [M, N]
    w_ptr,  # [N] or None
    rstd_ptr,  # [M] fp32
    pull_ptr,  # [M] fp32
    dx_ptr,  # [M, N] or None
    dr_ptr,  # [M, N] or None
    dw_ptr,  # [programs along rows, N] fp32 or None
    M,
    dy_stride,
    ds_stride,
    s_stride,
    dx_stride,
    dr_stride,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    LONG: tl.constexpr,
    CASTING: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    """The second half for wide rows: a block of columns of every row, given each row's pull."""
    program = tl.program_id(1)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_row = col < N
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    gamma = tl.full([1, BLOCK], 1.0, tl.float32)
    if w_ptr is not None:
        gamma = _load_gamma(w_ptr, col, in_row, CASTING, ZERO_CENTERED)
    for tile in tl.range(program, tl.cdiv(M, ROWS), tl.num_programs(1), num_stages=STAGES):
        row = _rows_of(tile, ROWS, LONG)
        live = (row < M)[:, None] & in_row[None, :]
        row_in = row[:, None]
        s = tl.load(s_ptr + row_in * s_stride + col[None, :], mask=live, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row_in * dy_stride + col[None, :], mask=live, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
        if dw_ptr is not None:
            dw += dy * (s * rstd)
        if dx_ptr is not None or dr_ptr is not None:
            pull = tl.load(pull_ptr + row, mask=row < M, other=0.0)[:, None]
            grad = rstd * (dy * gamma - s * pull)
            if ds_ptr is not None:
                grad += tl.load(ds_ptr + row_in * ds_stride + col[None, :], mask=live, other=0.0).to(tl.float32)
            _store_input_grads(dx_ptr, dr_ptr, grad, row_in, dx_stride, dr_stride, col[None, :], live)
    if dw_ptr is not None:
        tl.store(dw_ptr + program.to(tl.int64) * N + col, tl.sum(dw, axis=0), mask=in_row)


@triton.jit(do_not_specialize=["P"])
def _sum_shares_kernel(shares_ptr, dw_ptr, P, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """dw from the programs' shares, [P, N] to [N]: one tile of all P, in a fixed order, rounded once."""
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    program = tl.arange(0, ROWS)
    live = (program < P)[:, None] & (col < N)[None, :]
    shares = tl.load(shares_ptr + program.to(tl.int64)[:, None] * N + col[None, :], mask=live, other=0.0)
    dw = round_to(tl.sum(shares, axis=0), dw_ptr.dtype.element_ty)
    tl.store(dw_ptr + col, dw, mask=col < N)


_SHARE_COLUMNS = 16

_SMALL = 2**20
"""Elements up to which a backward is over before the host can launch another kernel: it sums dw's shares itself."""

_SMALL_SHARES = 2**16
"""Numbers in the shares of a small backward: one program reads them all."""

_INT32_LIMIT = 2**31

_forwards: dict[Any, tuple[ForwardPlan, Launch]] = {}
_backwards: dict[Any, tuple[BackwardPlan, Launch, Launch | None, Launch | None]] = {}


def launch_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    casting: str,
    zero_centered: bool,
    save_rstd: bool,
    mode: str | None = None,
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
    long = rows * longest >= _INT32_LIMIT
    if weight is not None and not weight.is_contiguous():
        weight = weight.contiguous()
    r_dtype = None if residual is None else residual.dtype
    w_dtype = None if weight is None else weight.dtype
    key = (x.device, x.dtype, r_dtype, w_dtype, width, casting, zero_centered, save_rstd, mode, long, plan)
    planned = _forwards.get(key)
    if planned is None:
        plan = plan or forward_plan(width, facts_of(x.device), mode, summed=residual is not None)
        planned = _forwards[key] = plan, _launch_of(plan, width, casting, zero_centered, long)
    plan, launch = planned
    if plan.mode == "multi_wave_reload":
        if residual is None:
            sums, strides = x, (*strides[:3], strides[0])
        launch((rows, 1), (x, residual, weight, out, sums, rstd), rows, strides, (float(eps),))
        return y, total, rstd
    tiles = -(-rows // plan.rows)
    grid = min(tiles, plan.programs) if plan.mode == "static_persistent" else tiles
    launch((grid, 1), (x, residual, weight, out, sums, rstd), rows, strides, (float(eps),))
    return y, total, rstd


def _launch_of(plan: ForwardPlan, width: int, casting: str, zero_centered: bool, long: bool) -> Launch:
    semantics: dict[str, Any] = {"CASTING": casting, "ZERO_CENTERED": zero_centered}
    if plan.mode == "multi_wave_reload":
        return Launch(_forward_chunked_kernel, plan.warps, {"N": width, "BLOCK": plan.block, **semantics})
    persistent = plan.mode == "static_persistent"
    constants = {"N": width, "ROWS": plan.rows, "BLOCK": plan.block, "PERSISTENT": persistent, "LONG": long}
    return Launch(_forward_kernel, plan.warps, constants | semantics)


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


def given(tensor: Tensor | None, like: Tensor) -> Tensor:
    """``tensor``, or the empty one that an operator returns where there is none: a schema has no optional results."""
    return like.new_empty(0, dtype=torch.float32) if tensor is None else tensor


def launch_backward(
    dy: Tensor,
    ds: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    casting: str,
    zero_centered: bool,
    dx: Tensor | None,
    dr: Tensor | None,
    dw: Tensor | None,
    *,
    plan: BackwardPlan | None = None,
) -> None:
    """Writes the gradients asked for: ``dx`` and ``dr`` from ``empty_rows_like(total)``, ``dw`` [N] contiguous.

    ``plan`` overrules the one that the shape would get.
    """
    size, width = total.numel(), total.shape[-1]
    if size == 0:
        if dw is not None:
            dw.zero_()
        return
    rows = size // width
    if total.is_contiguous() and dy.is_contiguous() and rstd.is_contiguous() and (ds is None or ds.is_contiguous()):
        strides, longest = (width, width, width, width, width), width
    else:
        (total, dy, ds, dx, dr, rstd), spacing = same_rows(total, dy, ds, dx, dr, rstd)  # type: ignore[assignment]
        strides, longest = (*spacing[1:3], spacing[0], *spacing[3:5]), max(spacing)  # type: ignore[assignment]
    if weight is not None and not weight.is_contiguous():
        weight = weight.contiguous()
    long = rows * longest >= _INT32_LIMIT
    small = size <= _SMALL and dw is not None and not (dw.is_cuda and torch.cuda.is_current_stream_capturing())
    tensors = (total, dy, ds, weight, dx, dr, dw)
    dtypes = tuple([None if tensor is None else tensor.dtype for tensor in tensors])
    key = (total.device, dtypes, width, casting, zero_centered, long, small, plan)
    planned = _backwards.get(key)
    if planned is None:
        planned = _backwards[key] = _plan_backward(tensors, width, casting, zero_centered, long, small, plan)
    plan, launch, pulling, summing = planned
    tiles = -(-rows // plan.rows)
    blocks = -(-width // plan.block)
    programs = tiles
    if dw is not None or plan.chunked:
        programs = min(tiles, _GRID_LIMIT if dw is None else -(-plan.programs // blocks))
    arrived = out = None
    if small and summing is None:
        programs = min(programs, max(1, _SMALL_SHARES // width))
        arrived, out = _arrivals(total), dw
    shares = None if dw is None else dw.new_empty((programs, width), dtype=torch.float32)
    if pulling is None:
        launch((programs, 1), (dy, ds, total, weight, rstd, dx, dr, shares, arrived, out), rows, strides)
    else:
        pull = total.new_empty(rows, dtype=torch.float32)
        if dx is not None or dr is not None:
            pulling((rows, 1), (dy, total, weight, rstd, pull), rows, (strides[0], strides[2]))
        launch((blocks, programs), (dy, ds, total, weight, rstd, pull, dx, dr, shares), rows, strides)
    if summing is not None:
        assert dw is not None
        summing((-(-width // _SHARE_COLUMNS), 1), (shares, dw), programs)


_arrival_counters: dict[Any, Tensor] = {}


def _arrivals(like: Tensor) -> Tensor:
    """The counter that a small backward leaves as it found it, zero: one for each stream, whose kernels take turns."""
    stream = torch._C._cuda_getCurrentRawStream(like.get_device()) if like.is_cuda else 0
    counter = _arrival_counters.get((like.device, stream))
    if counter is None:
        counter = torch.zeros(1, dtype=torch.int32, device=like.device)
        _arrival_counters[like.device, stream] = counter
    return counter


def _plan_backward(
    tensors: tuple[Tensor | None, ...],
    width: int,
    casting: str,
    zero_centered: bool,
    long: bool,
    small: bool,
    plan: BackwardPlan | None,
) -> tuple[BackwardPlan, Launch, Launch | None, Launch | None]:
    """The plan, its launch, and for some the launch before it (sums of wide rows) and after it (of dw's shares)."""
    total, dy, ds, weight, _, _, dw = tensors
    assert total is not None
    device = facts_of(total.device)
    column_bytes = sum(tensor.element_size() for tensor in (total, dy, ds, weight) if tensor is not None)
    plan = plan or backward_plan(width, column_bytes, device, summed=ds is not None)
    semantics: dict[str, Any] = {"CASTING": casting, "ZERO_CENTERED": zero_centered}
    constants: dict[str, Any] = {"N": width, "ROWS": plan.rows, "BLOCK": plan.block, "STAGES": plan.stages}
    summing = None
    if dw is not None and (plan.chunked or not small):
        shares = next_power_of_2(-(-plan.programs // -(-width // plan.block)))
        warps = device.warps(max(1, min(16, shares // 64)))
        summing = Launch(_sum_shares_kernel, warps, {"N": width, "ROWS": shares, "BLOCK": _SHARE_COLUMNS})
    if not plan.chunked:
        constants |= {"RELOAD": plan.reload, "SHARE_ROWS": max(1, 8192 // plan.block), "LONG": long, **semantics}
        return plan, Launch(_backward_kernel, plan.warps, constants, lazy=2), None, summing
    pulling = Launch(_backward_pull_kernel, plan.warps, {"N": width, "BLOCK": 4 * plan.block, **semantics}, lazy=1)
    constants |= {"LONG": long, **semantics}
    return plan, Launch(_backward_columns_kernel, plan.warps, constants, lazy=2), pulling, summing
