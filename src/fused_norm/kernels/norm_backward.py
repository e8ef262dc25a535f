"""The backward of RMSNorm in Triton, with or without the residual add in front of it, and its launcher.

Names are those of ``norm_forward``; ``dy`` is the gradient of the norm, ``ds`` what else flows into the sum, ``dx``,
``dr`` and ``dw`` are the gradients of branch, residual and weight, ``pull`` what the normalisation takes off each row,
``_tail`` a row's second piece, where the first alone does not hold it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import INT32_LIMIT, Launch
from .native.recording import constant
from .norm_backward_cluster import plan_clusters
from .norm_forward import load_gamma
from .plans import BackwardPlan, backward_plan, next_power_of_2
from .triton_utils import await_previous, empty, facts_of, let_next_begin, round_to, rows_of, same_rows

_GRID_LIMIT = 65_535
"""Programs along the second axis of a CUDA grid."""

SHARE_COLUMNS = 16
"""Columns of dw that one program of the last launch sums, over all shares at once."""

SMALL = 2**20
"""Elements up to which a backward is over before the host can launch another kernel: it sums dw's shares itself."""

SMALL_SHARES = 2**16
"""Numbers in the shares of a small backward: one program reads them all."""


@triton.jit
def _load(ptr, row, stride, col, live):
    """The tile of rows ``row`` [ROWS, 1] and columns ``col`` [columns] as fp32."""
    return tl.load(ptr + row * stride + col[None, :], mask=live, other=0.0).to(tl.float32)


@triton.jit
def _store_input_grads(
    ds_ptr, dx_ptr, dr_ptr, g, s, pull, rstd, scale, row, col, live, ds_stride, dx_stride, dr_stride
):
    """Writes the sum's gradient to the branch, the residual, or both: two tensors, since gradients never alias."""
    grad = rstd * (g - s * pull)
    if ds_ptr is not None:
        grad += _load(ds_ptr, row, ds_stride, col, live)
    if dx_ptr is not None:
        dx = grad if scale is None else grad * scale
        tl.store(dx_ptr + row * dx_stride + col[None, :], round_to(dx, dx_ptr.dtype.element_ty), mask=live)
    if dr_ptr is not None:
        dr = round_to(grad, dr_ptr.dtype.element_ty)
        tl.store(dr_ptr + row * dr_stride + col[None, :], dr, mask=live)


@triton.jit
def _store_share(shares_ptr, program, dw, col, N: tl.constexpr):
    """Writes columns ``col`` of the program's share of dw, its sum over the rows of a tile."""
    tl.store(shares_ptr + program.to(tl.int64) * N + col, tl.sum(dw, axis=0), mask=col < N)


@triton.jit
def sum_of_shares(shares_ptr, P, col, N: tl.constexpr, ROWS: tl.constexpr):
    """The P shares of columns ``col`` summed in a fixed order, whichever program does it."""
    total = tl.zeros([ROWS, col.shape[0]], tl.float32)
    for start in range(0, P, ROWS):
        share = start + tl.arange(0, ROWS)
        live = (share < P)[:, None] & (col < N)[None, :]
        total += tl.load(shares_ptr + share[:, None] * N + col[None, :], mask=live, other=0.0, cache_modifier=".cg")
    return tl.sum(total, axis=0)


@triton.jit
def _store_sum(dw_ptr, shares_ptr, P, col, N: tl.constexpr, ROWS: tl.constexpr):
    """Writes columns ``col`` of dw."""
    total = sum_of_shares(shares_ptr, P, col, N, ROWS)
    tl.store(dw_ptr + col, round_to(total, dw_ptr.dtype.element_ty), mask=col < N)


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
    scale,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    TAIL: tl.constexpr,
    RELOAD: tl.constexpr,
    SHARE_ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
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
        gamma = load_gamma(w_ptr, col, in_row, CASTING, ZERO_CENTERED)
    if TAIL:
        col_tail = BLOCK + tl.arange(0, TAIL)
        in_tail = col_tail < N
        dw_tail = tl.zeros([ROWS, TAIL], tl.float32)
        gamma_tail = tl.full([1, TAIL], 1.0, tl.float32)
        if w_ptr is not None and not RELOAD:
            gamma_tail = load_gamma(w_ptr, col_tail, in_tail, CASTING, ZERO_CENTERED)
    for tile in tl.range(program, tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = rows_of(tile, ROWS, LONG)
        live = (row < M)[:, None] & in_row[None, :]
        row_in = row[:, None]
        s = _load(s_ptr, row_in, s_stride, col, live)
        dy = _load(dy_ptr, row_in, dy_stride, col, live)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
        if dw_ptr is not None:
            dw += dy * (s * rstd)
        if TAIL:
            live_tail = (row < M)[:, None] & in_tail[None, :]
            s_tail = _load(s_ptr, row_in, s_stride, col_tail, live_tail)
            dy_tail = _load(dy_ptr, row_in, dy_stride, col_tail, live_tail)
            if dw_ptr is not None:
                dw_tail += dy_tail * (s_tail * rstd)
        if dx_ptr is not None or dr_ptr is not None:
            if w_ptr is not None and RELOAD:
                gamma = load_gamma(w_ptr, col, in_row, CASTING, ZERO_CENTERED)
                if TAIL:
                    gamma_tail = load_gamma(w_ptr, col_tail, in_tail, CASTING, ZERO_CENTERED)
            g = dy * gamma
            products = g * s
            if TAIL:
                g_tail = dy_tail * gamma_tail
                products = tl.sum(tl.reshape(products, [ROWS, BLOCK // TAIL, TAIL]), axis=1) + g_tail * s_tail
            pull = tl.sum(products, axis=1)[:, None] * (rstd * rstd) * (1.0 / N)
            _store_input_grads(
                ds_ptr, dx_ptr, dr_ptr, g, s, pull, rstd, scale, row_in, col, live, ds_stride, dx_stride, dr_stride
            )
            if TAIL:
                _store_input_grads(
                    ds_ptr, dx_ptr, dr_ptr, g_tail, s_tail, pull, rstd, scale, row_in, col_tail, live_tail,
                    ds_stride, dx_stride, dr_stride,
                )  # fmt: skip
    let_next_begin(OVERLAPS)
    if dw_ptr is not None:
        _store_share(dw_ptr, program, dw, col, N)
        if TAIL:
            _store_share(dw_ptr, program, dw_tail, col_tail, N)
        if arrived_ptr is not None:
            tl.debug_barrier()  # all of this program's share is stored before it counts as arrived
            if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
                _store_sum(total_ptr, dw_ptr, tl.num_programs(0), col, N, SHARE_ROWS)
                if TAIL:
                    _store_sum(total_ptr, dw_ptr, tl.num_programs(0), col_tail, N, SHARE_ROWS)
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
            g = g * load_gamma(w_ptr, col, col < N, CASTING, ZERO_CENTERED)
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
    scale,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
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
        gamma = load_gamma(w_ptr, col, in_row, CASTING, ZERO_CENTERED)
    for tile in tl.range(program, tl.cdiv(M, ROWS), tl.num_programs(1), num_stages=STAGES):
        row = rows_of(tile, ROWS, LONG)
        live = (row < M)[:, None] & in_row[None, :]
        row_in = row[:, None]
        s = _load(s_ptr, row_in, s_stride, col, live)
        dy = _load(dy_ptr, row_in, dy_stride, col, live)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
        if dw_ptr is not None:
            dw += dy * (s * rstd)
        if dx_ptr is not None or dr_ptr is not None:
            pull = tl.load(pull_ptr + row, mask=row < M, other=0.0)[:, None]
            _store_input_grads(
                ds_ptr, dx_ptr, dr_ptr, dy * gamma, s, pull, rstd, scale, row_in, col, live,
                ds_stride, dx_stride, dr_stride,
            )  # fmt: skip
    let_next_begin(OVERLAPS)
    if dw_ptr is not None:
        _store_share(dw_ptr, program, dw, col, N)


@triton.jit(do_not_specialize=["P"])
def _sum_shares_kernel(
    shares_ptr, dw_ptr, P, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):
    """dw from the programs' shares, [P, N] to [N]: one tile of all P, in a fixed order, rounded once."""
    await_previous(OVERLAPS)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    program = tl.arange(0, ROWS)
    live = (program < P)[:, None] & (col < N)[None, :]
    shares = tl.load(shares_ptr + program.to(tl.int64)[:, None] * N + col[None, :], mask=live, other=0.0)
    dw = round_to(tl.sum(shares, axis=0), dw_ptr.dtype.element_ty)
    tl.store(dw_ptr + col, dw, mask=col < N)


_backwards: dict[Any, tuple[BackwardPlan, Launch, Launch | None, Launch | None]] = {}
_arrival_counters: dict[Any, Tensor] = {}


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
    scale: float = 1.0,
    *,
    plan: BackwardPlan | None = None,
) -> None:
    """Writes the gradients asked for: ``dx`` and ``dr`` from ``empty_rows_like(total)``, ``dw`` [N] contiguous.

    ``scale`` is what the branch was multiplied by. ``plan`` overrules the one that the shape would get.
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
    long = rows * longest >= INT32_LIMIT
    small = size <= SMALL and dw is not None and not (dw.is_cuda and torch.cuda.is_current_stream_capturing())
    tensors = (total, dy, ds, weight, dx, dr, dw)
    dtypes = tuple([None if tensor is None else tensor.dtype for tensor in tensors])
    factor = None if scale == 1.0 else float(scale)
    key = (total.device, dtypes, width, casting, zero_centered, factor is None, long, small, plan)
    planned = _backwards.get(key)
    if planned is None:
        planned = _plan_backward(tensors, width, casting, zero_centered, factor, long, small, plan)
        _backwards[key] = planned
    plan, launch, pulling, summing = planned
    tiles = -(-rows // plan.rows)
    blocks = -(-width // plan.columns)
    programs = tiles
    if plan.ctas > 1:
        programs = min(tiles, plan.programs)
    elif dw is not None or plan.chunked:
        programs = min(tiles, _GRID_LIMIT if dw is None else -(-plan.programs // blocks))
    arrived = out = None
    if small and summing is None:
        programs = min(programs, max(1, SMALL_SHARES // width))
        arrived, out = arrivals(total), dw
    shares = None if dw is None else empty((programs, width), dw, torch.float32)
    if plan.ctas > 1:
        launch((programs, 1), (dy, ds, total, weight, rstd, dx, dr, shares), rows, strides, (factor,))
    elif pulling is None:
        launch((programs, 1), (dy, ds, total, weight, rstd, dx, dr, shares, arrived, out), rows, strides, (factor,))
    else:
        pull = empty((rows,), total, torch.float32)
        if dx is not None or dr is not None:
            pulling((rows, 1), (dy, total, weight, rstd, pull), rows, (strides[0], strides[2]))
        launch((blocks, programs), (dy, ds, total, weight, rstd, pull, dx, dr, shares), rows, strides, (factor,))
    if summing is not None:
        assert dw is not None
        summing((-(-width // SHARE_COLUMNS), 1), (shares, dw), programs)


def arrivals(like: Tensor) -> Tensor:
    """The counter that a small backward leaves as it found it, zero: one for each stream, whose kernels take turns."""
    stream = torch._C._cuda_getCurrentRawStream(like.get_device()) if like.is_cuda else 0
    counter = _arrival_counters.get((like.device, stream))
    if counter is None:
        counter = torch.zeros(1, dtype=torch.int32, device=like.device)
        _arrival_counters[like.device, stream] = counter
    return constant(counter)


def _plan_backward(
    tensors: tuple[Tensor | None, ...],
    width: int,
    casting: str,
    zero_centered: bool,
    factor: float | None,
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
    summed = dw is not None and (plan.chunked or plan.ctas > 1 or not small)
    overlaps = summed and device.overlaps
    rest: dict[str, Any] = {"OVERLAPS": overlaps, "LONG": long, **semantics}
    launch = None
    if plan.ctas > 1:
        dtypes = tuple([None if tensor is None else tensor.dtype for tensor in tensors])
        clusters = plan_clusters(plan, total.device, dtypes, width, factor, rest)
        if clusters is None:
            plan = backward_plan(width, column_bytes, replace(device, clusters=False), summed=ds is not None)
        else:
            plan, launch = clusters
    summing = None
    if summed:
        shares = next_power_of_2(-(-plan.programs // -(-width // plan.columns)))
        warps = device.warps(max(1, min(16, shares // 64)))
        shape = {"N": width, "ROWS": shares, "BLOCK": SHARE_COLUMNS, "OVERLAPS": overlaps}
        summing = Launch(_sum_shares_kernel, warps, shape, overlaps=overlaps)
    if launch is not None:
        return plan, launch, None, summing
    constants: dict[str, Any] = {"N": width, "ROWS": plan.rows, "BLOCK": plan.block, "STAGES": plan.stages}
    if not plan.chunked:
        constants |= {"TAIL": plan.tail, "RELOAD": plan.reload, "SHARE_ROWS": max(1, 8192 // plan.block), **rest}
        return plan, Launch(_backward_kernel, plan.warps, constants, lazy=2), None, summing
    pulling = Launch(_backward_pull_kernel, plan.warps, {"N": width, "BLOCK": 4 * plan.block, **semantics}, lazy=1)
    constants |= rest
    return plan, Launch(_backward_columns_kernel, plan.warps, constants, lazy=2), pulling, summing
