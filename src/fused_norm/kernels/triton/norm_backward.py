"""The backward of RMSNorm in Triton, with or without the residual add in front of it, and its launcher.

``language`` has the names that kernels use; ``ds`` is what flows into the sum besides the norm's own part, and
``_tail`` a row's second piece, where the first alone does not hold it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...spec import NormSpec
from ..plans import BackwardPlan, backward_plan
from .devices import device_facts
from .language import let_next_begin, load_gamma, load_tile, rows_of, store_tile
from .launch import launch
from .memory import INT32_LIMIT, contiguous, same_rows
from .weight_grad import sum_shares

_GRID_LIMIT = 65_535
"""Programs along the second axis of a CUDA grid."""


@triton.jit
def _store_input_grads(ds, dx, dr, g, s, pull, rstd, scale, row, col, live):
    """Write the sum's gradient to the branch, the residual, or both."""
    grad = rstd * (g - s * pull)
    if ds[0] is not None:
        grad += load_tile(ds, row, col, live)
    if dx[0] is not None:
        store_tile(dx, row, col, live, grad if scale is None else grad * scale)
    if dr[0] is not None:
        store_tile(dr, row, col, live, grad)


@triton.jit
def _store_share(shares_ptr, program, dw, col, N: tl.constexpr):
    """Write columns ``col`` of the program's share of dw, its sum over the rows of a tile."""
    tl.store(shares_ptr + program.to(tl.int64) * N + col, tl.sum(dw, axis=0), mask=col < N)


@triton.jit(do_not_specialize=["M"])
def _backward_kernel(
    dy_ptr,  # [M, N]
    ds_ptr,  # [M, N] or None
    s_ptr,  # [M, N]
    w_ptr,  # [N] or None
    rstd_ptr,  # [M] fp32
    dx_ptr,  # [M, N] or None
    dr_ptr,  # [M, N] or None
    shares_ptr,  # [programs, N] fp32 or None: each program's share of dw
    M,
    dy_stride, ds_stride, s_stride, dx_stride, dr_stride,
    scale,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, TAIL: tl.constexpr,
    RELOAD: tl.constexpr, OVERLAPS: tl.constexpr, LONG: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    ds, dx, dr = (ds_ptr, ds_stride), (dx_ptr, dx_stride), (dr_ptr, dr_stride)
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    in_row = col < N
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    gamma = tl.full([1, BLOCK], 1.0, tl.float32)
    if w_ptr is not None and not RELOAD:
        gamma = load_gamma(w_ptr, col, in_row, SPEC)
    if TAIL:
        col_tail = BLOCK + tl.arange(0, TAIL)
        in_tail = col_tail < N
        dw_tail = tl.zeros([ROWS, TAIL], tl.float32)
        gamma_tail = tl.full([1, TAIL], 1.0, tl.float32)
        if w_ptr is not None and not RELOAD:
            gamma_tail = load_gamma(w_ptr, col_tail, in_tail, SPEC)
    for tile in tl.range(program, tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = rows_of(tile, ROWS, LONG)
        live = (row < M)[:, None] & in_row[None, :]
        s = load_tile((s_ptr, s_stride), row, col, live)
        dy = load_tile((dy_ptr, dy_stride), row, col, live)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
        if shares_ptr is not None:
            dw += dy * (s * rstd)
        if TAIL:
            live_tail = (row < M)[:, None] & in_tail[None, :]
            s_tail = load_tile((s_ptr, s_stride), row, col_tail, live_tail)
            dy_tail = load_tile((dy_ptr, dy_stride), row, col_tail, live_tail)
            if shares_ptr is not None:
                dw_tail += dy_tail * (s_tail * rstd)
        if dx_ptr is not None or dr_ptr is not None:
            if w_ptr is not None and RELOAD:
                gamma = load_gamma(w_ptr, col, in_row, SPEC)
                if TAIL:
                    gamma_tail = load_gamma(w_ptr, col_tail, in_tail, SPEC)
            g = dy * gamma
            products = g * s
            if TAIL:
                g_tail = dy_tail * gamma_tail
                products = tl.sum(tl.reshape(products, [ROWS, BLOCK // TAIL, TAIL]), axis=1) + g_tail * s_tail
            pull = tl.sum(products, axis=1)[:, None] * (rstd * rstd) * (1.0 / N)
            _store_input_grads(ds, dx, dr, g, s, pull, rstd, scale, row, col, live)
            if TAIL:
                _store_input_grads(ds, dx, dr, g_tail, s_tail, pull, rstd, scale, row, col_tail, live_tail)
    let_next_begin(OVERLAPS)
    if shares_ptr is not None:
        _store_share(shares_ptr, program, dw, col, N)
        if TAIL:
            _store_share(shares_ptr, program, dw_tail, col_tail, N)


@triton.jit(do_not_specialize=["M"])
def _backward_pull_kernel(
    dy_ptr,  # [M, N]
    s_ptr,  # [M, N]
    w_ptr,  # [N] or None
    rstd_ptr,  # [M] fp32
    pull_ptr,  # [M] fp32
    M,
    dy_stride, s_stride,
    N: tl.constexpr, BLOCK: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """For rows too wide to hold: ``rstd^2 * mean(dy * gamma * s)``, which every element of dx needs."""
    row = tl.program_id(0).to(tl.int64)
    products = tl.zeros([1, BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        col = start + tl.arange(0, BLOCK)
        in_row = (col < N)[None, :]
        s = tl.load(s_ptr + row * s_stride + col[None, :], mask=in_row, other=0.0).to(tl.float32)
        g = tl.load(dy_ptr + row * dy_stride + col[None, :], mask=in_row, other=0.0).to(tl.float32)
        if w_ptr is not None:
            g = g * load_gamma(w_ptr, col, col < N, SPEC)
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
    shares_ptr,  # [programs along rows, N] fp32 or None
    M,
    dy_stride, ds_stride, s_stride, dx_stride, dr_stride,
    scale,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
    LONG: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """The second half for wide rows: a block of columns of every row, given each row's pull."""
    ds, dx, dr = (ds_ptr, ds_stride), (dx_ptr, dx_stride), (dr_ptr, dr_stride)
    program = tl.program_id(1)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_row = col < N
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    gamma = tl.full([1, BLOCK], 1.0, tl.float32)
    if w_ptr is not None:
        gamma = load_gamma(w_ptr, col, in_row, SPEC)
    for tile in tl.range(program, tl.cdiv(M, ROWS), tl.num_programs(1), num_stages=STAGES):
        row = rows_of(tile, ROWS, LONG)
        live = (row < M)[:, None] & in_row[None, :]
        s = load_tile((s_ptr, s_stride), row, col, live)
        dy = load_tile((dy_ptr, dy_stride), row, col, live)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
        if shares_ptr is not None:
            dw += dy * (s * rstd)
        if dx_ptr is not None or dr_ptr is not None:
            pull = tl.load(pull_ptr + row, mask=row < M, other=0.0)[:, None]
            _store_input_grads(ds, dx, dr, dy * gamma, s, pull, rstd, scale, row, col, live)
    let_next_begin(OVERLAPS)
    if shares_ptr is not None:
        _store_share(shares_ptr, program, dw, col, N)


def launch_norm_backward(
    spec: NormSpec,
    dy: Tensor,
    ds: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dx: Tensor | None,
    dr: Tensor | None,
    dw: Tensor | None,
    scale: float = 1.0,
    *,
    plan: BackwardPlan | None = None,
) -> None:
    """Write the gradients asked for: ``dx`` and ``dr`` from ``empty_rows_like(total)``, ``dw`` [N] contiguous.

    ``scale`` is what the branch was multiplied by. ``plan`` overrules the one that the shape would get.
    """
    size, width = total.numel(), total.shape[-1]
    if size == 0:
        if dw is not None:
            dw.zero_()
        return
    rows = size // width
    (total, dy, ds, dx, dr, rstd), spacing = same_rows(total, dy, ds, dx, dr, rstd)  # type: ignore[assignment]
    strides = (*spacing[1:3], spacing[0], *spacing[3:5])
    weight = contiguous(weight)
    long = rows * max(spacing) >= INT32_LIMIT
    factor = None if scale == 1.0 else float(scale)
    device = device_facts(total.device)
    column_bytes = sum(tensor.element_size() for tensor in (total, dy, ds, weight) if tensor is not None)
    plan = plan or backward_plan(width, column_bytes, device, summed=ds is not None)
    blocks = -(-width // plan.columns)
    programs = -(-rows // plan.rows)
    if dw is not None or plan.chunked:
        programs = min(programs, _GRID_LIMIT if dw is None else -(-plan.programs // blocks))
    shares = None if dw is None else dw.new_empty((programs, width), dtype=torch.float32)
    read: tuple[Tensor | None, ...] = (dy, ds, total, weight, rstd)
    kernel, grid = _backward_kernel, (programs, 1)
    short = spec.without_eps()
    constants: dict[str, Any] = {"N": width, "ROWS": plan.rows, "BLOCK": plan.block, "STAGES": plan.stages}
    if plan.chunked:
        pull = total.new_empty((rows,), dtype=torch.float32)
        if dx is not None or dr is not None:
            tensors, numbers = (dy, total, weight, rstd, pull), (rows, strides[0], strides[2])
            pulling = {"N": width, "BLOCK": 4 * plan.block, "SPEC": short}
            launch(_backward_pull_kernel, (rows, 1), tensors, numbers, pulling, warps=plan.warps)
        kernel, read, grid = _backward_columns_kernel, (*read, pull), (blocks, programs)
    else:
        constants |= {"TAIL": plan.tail, "RELOAD": plan.reload}
    constants |= {"OVERLAPS": dw is not None and device.overlaps, "LONG": long, "SPEC": short}
    launch(kernel, grid, (*read, dx, dr, shares), (rows, *strides, factor), constants, warps=plan.warps)
    if shares is not None:
        sum_shares(shares, dw, None, programs, -(-plan.programs // blocks), device)
