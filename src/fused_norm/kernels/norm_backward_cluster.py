"""The backward of RMSNorm for rows too wide for one program: the blocks of a thread-block cluster hold one together.

Names are those of ``norm_backward``. A row is a tile of [CTAS, WIDTH] columns, a line of it in the registers of each
block; the one sum over all of its columns goes through ``clusters``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from .clusters import exchange, open_boxes, opening, prefetch_row, resident_clusters, sum_over_blocks
from .launch import Launch, on
from .norm_forward import gamma_of
from .plans import CLUSTER_REGISTERS, BackwardPlan
from .triton_utils import let_next_begin, round_to


@triton.jit
def _load(ptr, row, stride, col, N: tl.constexpr):
    """Columns ``col`` [CTAS, WIDTH] of a row as fp32."""
    return tl.load(ptr + row * stride + col, mask=col < N, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["M"])
def _backward_cluster_kernel(
    dy_ptr,  # [M, N]
    ds_ptr,  # [M, N] or None: what else flows into the sum
    s_ptr,  # [M, N]
    w_ptr,  # [N] or None
    rstd_ptr,  # [M] fp32
    dx_ptr,  # [M, N] or None
    dr_ptr,  # [M, N] or None
    dw_ptr,  # [programs, N] fp32 or None: each program's share
    M,
    dy_stride,
    ds_stride,
    s_stride,
    dx_stride,
    dr_stride,
    scale,
    N: tl.constexpr,
    CTAS: tl.constexpr,
    WIDTH: tl.constexpr,
    AHEAD: tl.constexpr,
    OPENING: tl.constexpr,
    EXCHANGE: tl.constexpr,
    OVERLAPS: tl.constexpr,
    LONG: tl.constexpr,
    CASTING: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    program = tl.program_id(0)
    col = tl.arange(0, CTAS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    in_row = col < N
    dw = tl.zeros([CTAS, WIDTH], tl.float32)
    boxes = open_boxes(OPENING)
    turn = 0
    for tile in tl.range(program, M, tl.num_programs(0), num_stages=1):
        row = tl.cast(tile, tl.int64) if LONG else tile
        s = _load(s_ptr, row, s_stride, col, N)
        dy = _load(dy_ptr, row, dy_stride, col, N)
        rstd = tl.load(rstd_ptr + row)
        if AHEAD:
            following = row + tl.num_programs(0)
            prefetch_row(s_ptr, following, s_stride, M, CTAS, WIDTH, N)
            prefetch_row(dy_ptr, following, dy_stride, M, CTAS, WIDTH, N)
            if ds_ptr is not None:
                prefetch_row(ds_ptr, following, ds_stride, M, CTAS, WIDTH, N)
        if dw_ptr is not None:
            dw += dy * (s * rstd)
        if dx_ptr is not None or dr_ptr is not None:
            g = dy
            if w_ptr is not None:
                # Read for every row: it stays in cache, and in registers it would leave no room for a second program.
                w = tl.load(w_ptr + col, mask=in_row, other=0.0, eviction_policy="evict_last").to(tl.float32)
                g = dy * gamma_of(w, w_ptr.dtype.element_ty, CASTING, ZERO_CENTERED)
            products = sum_over_blocks(tl.sum(g * s, axis=1), boxes, turn, CTAS, EXCHANGE)
            turn += 1
            grad = rstd * (g - s * (products[:, None] * (rstd * rstd) * (1.0 / N)))
            if ds_ptr is not None:
                grad += _load(ds_ptr, row, ds_stride, col, N)
            if dx_ptr is not None:
                dx = grad if scale is None else grad * scale
                tl.store(dx_ptr + row * dx_stride + col, round_to(dx, dx_ptr.dtype.element_ty), mask=in_row)
            if dr_ptr is not None:
                tl.store(dr_ptr + row * dr_stride + col, round_to(grad, dr_ptr.dtype.element_ty), mask=in_row)
    let_next_begin(OVERLAPS)
    if dw_ptr is not None:
        tl.store(dw_ptr + program.to(tl.int64) * N + col, dw, mask=in_row)


def plan_clusters(
    plan: BackwardPlan,
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],
    width: int,
    factor: float | None,
    constants: dict[str, Any],
) -> tuple[BackwardPlan, Launch] | None:
    """The plan with no more clusters than the device runs at once, as one more takes a wave, and their launch.

    None where it runs none, as in a small part of a GPU. ``dtypes`` are those of total, dy, ds, weight, dx, dr and dw,
    ``constants`` OVERLAPS and what follows it.
    """
    constants = {
        "N": width, "CTAS": plan.ctas, "WIDTH": plan.block, "AHEAD": plan.ahead, "OPENING": opening(plan.ctas),
        "EXCHANGE": exchange(plan.ctas), **constants,
    }  # fmt: skip
    launch = Launch(
        _backward_cluster_kernel, plan.warps, constants, lazy=2, num_ctas=plan.ctas, maxnreg=CLUSTER_REGISTERS
    )
    if device.type == "cpu":
        return plan, launch
    total, dy, ds, weight, dx, dr, dw = dtypes
    shares = None if dw is None else torch.float32
    compiled = launch.compiled(device, (dy, ds, total, weight, torch.float32, dx, dr, shares), (width,) * 5, (factor,))
    with on(device):
        resident = resident_clusters(compiled)
    if resident == 0:
        return None
    # Where the driver does not say: an H200 runs .91 and more of what its processors have room for.
    most = plan.programs * 7 // 8 if resident is None else min(plan.programs, resident)
    return replace(plan, programs=max(1, most)), launch
