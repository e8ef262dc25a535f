"""A norm, the residual add behind it and, in a sandwich, the norm of the sum: Triton kernels and their launchers.

Names are those of ``norm_forward`` and ``norm_backward``; what belongs to the norm of the branch is called ``inner``.
``branch`` is that norm's output, ``s`` the residual plus it, ``g`` the gradient of s, ``dinner`` the inner weight's.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import INT32_LIMIT, Launch
from .norm_backward import SHARE_COLUMNS, SMALL, SMALL_SHARES, arrivals, launch_backward, sum_of_shares
from .norm_forward import launch_forward, load_gamma, normalised, rstd_from, square
from .plans import (
    WIDEST_SANDWICH_BACKWARD,
    WIDEST_SANDWICH_FORWARD,
    BackwardPlan,
    ForwardPlan,
    next_power_of_2,
    sandwich_backward_plan,
    sandwich_forward_plan,
)
from .triton_utils import await_previous, empty, empty_rows_like, facts_of, let_next_begin, round_to, rows_of, same_rows


@triton.jit
def _rstd_of(s, rstd_ptr, row, M, eps, s_dtype: tl.constexpr, N: tl.constexpr, CASTING: tl.constexpr):
    """The forward's rstd for each row of ``s``; the exact one is stored for the backward."""
    rstd = rstd_from(tl.sum(square(s, s_dtype, CASTING), axis=1), eps, s_dtype, N, CASTING)
    if rstd_ptr is not None:
        exact = rstd
        if CASTING == "none":
            exact = tl.rsqrt(tl.sum(s * s, axis=1) * (1.0 / N) + eps)
        tl.store(rstd_ptr + row, exact, mask=row < M)
    return rstd[:, None]


@triton.jit(do_not_specialize=["M"])
def _sandwich_forward_kernel(
    x_ptr,  # [M, N]
    r_ptr,  # [M, N]
    inner_ptr,  # [N] or None
    w_ptr,  # [N] or None
    s_ptr,  # [M, N]
    y_ptr,  # [M, N] or None: nothing but the sum is wanted
    inner_rstd_ptr,  # [M] fp32 or None
    rstd_ptr,  # [M] fp32 or None
    M,
    x_stride,
    r_stride,
    s_stride,
    y_stride,
    eps,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LONG: tl.constexpr,
    CASTING: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    row = rows_of(tl.program_id(0), ROWS, LONG)
    col = tl.arange(0, BLOCK)
    in_row = col < N
    live = (row < M)[:, None] & in_row[None, :]
    row_in = row[:, None]
    x_dtype: tl.constexpr = x_ptr.dtype.element_ty
    s_dtype: tl.constexpr = s_ptr.dtype.element_ty
    x = tl.load(x_ptr + row_in * x_stride + col[None, :], mask=live, other=0.0).to(tl.float32)
    r = tl.load(r_ptr + row_in * r_stride + col[None, :], mask=live, other=0.0)
    branch = normalised(x, _rstd_of(x, inner_rstd_ptr, row, M, eps, x_dtype, N, CASTING), x_dtype, CASTING)
    if inner_ptr is None:
        branch = round_to(branch, x_dtype)
    else:
        branch = branch * load_gamma(inner_ptr, col, in_row, CASTING, ZERO_CENTERED)
        # Two dtypes that differ promote to fp32, but for gemma's, which keeps x's.
        if CASTING == "gemma" or inner_ptr.dtype.element_ty == x_dtype:
            branch = round_to(branch, x_dtype)
    s = round_to(r.to(tl.float32) + branch, s_dtype)
    tl.store(s_ptr + row_in * s_stride + col[None, :], s, mask=live)
    if y_ptr is not None:
        y = normalised(s, _rstd_of(s, rstd_ptr, row, M, eps, s_dtype, N, CASTING), s_dtype, CASTING)
        if w_ptr is not None:
            y = y * load_gamma(w_ptr, col, in_row, CASTING, ZERO_CENTERED)
        tl.store(y_ptr + row_in * y_stride + col[None, :], round_to(y, y_ptr.dtype.element_ty), mask=live)


@triton.jit
def _live(row, in_row, M, ROWS: tl.constexpr):
    """The mask of a tile. A row by itself is always inside; not asking frees a fifth of the backward's registers."""
    if ROWS == 1:
        return in_row[None, :]
    return (row < M)[:, None] & in_row[None, :]


@triton.jit
def _load_rstd(rstd_ptr, row, M, ROWS: tl.constexpr):
    if ROWS == 1:
        return tl.load(rstd_ptr + row)[:, None]
    return tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]


@triton.jit
def _input_grad(dy, s, rstd, N: tl.constexpr):
    """The gradient of a norm's input from the one of its normalised row."""
    pull = tl.sum(dy * s, axis=1)[:, None] * (rstd * rstd) * (1.0 / N)
    return rstd * (dy - s * pull)


@triton.jit(do_not_specialize=["M"])
def _sandwich_backward_kernel(
    dy_ptr,  # [M, N]
    ds_ptr,  # [M, N] or None: what else flows into the sum
    s_ptr,  # [M, N]
    x_ptr,  # [M, N]
    inner_ptr,  # [N] or None
    w_ptr,  # [N] or None
    inner_rstd_ptr,  # [M] fp32
    rstd_ptr,  # [M] fp32
    dx_ptr,  # [M, N] or None
    dr_ptr,  # [M, N] or None
    dinner_ptr,  # [N] or None
    dw_ptr,  # [N] or None
    shares_ptr,  # [gradients of weights, programs, N] fp32: each program's share of dinner, then of dw
    arrived_ptr,  # [1] int32, zero before and after, or None: how many programs have stored their shares
    M,
    dy_stride,
    ds_stride,
    s_stride,
    x_stride,
    dx_stride,
    dr_stride,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    RELOAD: tl.constexpr,
    SHARE_ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
    LONG: tl.constexpr,
    CASTING: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    col = tl.arange(0, BLOCK)
    in_row = col < N
    dinner = tl.zeros([ROWS, BLOCK], tl.float32)
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    inner_gamma = tl.full([1, BLOCK], 1.0, tl.float32)
    gamma = tl.full([1, BLOCK], 1.0, tl.float32)
    if not RELOAD:
        if inner_ptr is not None:
            inner_gamma = load_gamma(inner_ptr, col, in_row, CASTING, ZERO_CENTERED)
        if w_ptr is not None:
            gamma = load_gamma(w_ptr, col, in_row, CASTING, ZERO_CENTERED)
    for tile in tl.range(program, tl.cdiv(M, ROWS), programs, num_stages=STAGES):
        row = rows_of(tile, ROWS, LONG)
        live = _live(row, in_row, M, ROWS)
        row_in = row[:, None]
        s = tl.load(s_ptr + row_in * s_stride + col[None, :], mask=live, other=0.0).to(tl.float32)
        g = tl.load(dy_ptr + row_in * dy_stride + col[None, :], mask=live, other=0.0).to(tl.float32)
        rstd = _load_rstd(rstd_ptr, row, M, ROWS)
        if dw_ptr is not None:
            dw += g * (s * rstd)
        if dx_ptr is not None or dr_ptr is not None or dinner_ptr is not None:
            if w_ptr is not None:
                if RELOAD:
                    gamma = load_gamma(w_ptr, col, in_row, CASTING, ZERO_CENTERED)
                g = g * gamma
            g = _input_grad(g, s, rstd, N)
            if ds_ptr is not None:
                g += tl.load(ds_ptr + row_in * ds_stride + col[None, :], mask=live, other=0.0).to(tl.float32)
            if dr_ptr is not None:
                dr = round_to(g, dr_ptr.dtype.element_ty)
                tl.store(dr_ptr + row_in * dr_stride + col[None, :], dr, mask=live)
        if dx_ptr is not None or dinner_ptr is not None:
            x = tl.load(x_ptr + row_in * x_stride + col[None, :], mask=live, other=0.0).to(tl.float32)
            inner_rstd = _load_rstd(inner_rstd_ptr, row, M, ROWS)
            if dinner_ptr is not None:
                dinner += g * (x * inner_rstd)
            if dx_ptr is not None:
                if inner_ptr is not None:
                    if RELOAD:
                        inner_gamma = load_gamma(inner_ptr, col, in_row, CASTING, ZERO_CENTERED)
                    g = g * inner_gamma
                dx = round_to(_input_grad(g, x, inner_rstd, N), dx_ptr.dtype.element_ty)
                tl.store(dx_ptr + row_in * dx_stride + col[None, :], dx, mask=live)
    let_next_begin(OVERLAPS)
    share_ptr = shares_ptr
    if dinner_ptr is not None:
        tl.store(share_ptr + program * N + col, tl.sum(dinner, axis=0), mask=in_row)
        share_ptr += programs * N
    if dw_ptr is not None:
        tl.store(share_ptr + program * N + col, tl.sum(dw, axis=0), mask=in_row)
    if arrived_ptr is not None:
        tl.debug_barrier()  # all of this program's shares are stored before it counts as arrived
        if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == programs - 1:
            share_ptr = shares_ptr
            if dinner_ptr is not None:
                total = sum_of_shares(share_ptr, programs, col, N, SHARE_ROWS)
                tl.store(dinner_ptr + col, round_to(total, dinner_ptr.dtype.element_ty), mask=in_row)
                share_ptr += programs * N
            if dw_ptr is not None:
                total = sum_of_shares(share_ptr, programs, col, N, SHARE_ROWS)
                tl.store(dw_ptr + col, round_to(total, dw_ptr.dtype.element_ty), mask=in_row)
            tl.store(arrived_ptr, 0)


@triton.jit(do_not_specialize=["P"])
def _sum_both_shares_kernel(
    shares_ptr,  # [gradients, P, N] fp32
    first_ptr,  # [N]
    second_ptr,  # [N] or None
    P,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One or two weights' gradients from the programs' shares, as ``norm_backward`` sums those of one."""
    await_previous(OVERLAPS)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    program = tl.arange(0, ROWS)
    live = (program < P)[:, None] & (col < N)[None, :]
    offset = tl.program_id(1) * P * N + program[:, None] * N + col[None, :]
    total = tl.sum(tl.load(shares_ptr + offset, mask=live, other=0.0), axis=0)
    if tl.program_id(1) == 0:
        tl.store(first_ptr + col, round_to(total, first_ptr.dtype.element_ty), mask=col < N)
    elif second_ptr is not None:
        tl.store(second_ptr + col, round_to(total, second_ptr.dtype.element_ty), mask=col < N)


_forwards: dict[Any, tuple[ForwardPlan, Launch]] = {}
_backwards: dict[Any, tuple[BackwardPlan, Launch, Launch | None]] = {}


def launch_norm_add_forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    casting: str,
    zero_centered: bool,
    save_rstd: bool,
    *,
    plan: ForwardPlan | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``(s, rstd)`` for validated tensors; rstd as in ``launch_forward``.

    Rows too wide to be held take two launches. ``plan`` overrules the one that the shape would get.
    """
    if plan is None and x.shape[-1] > WIDEST_SANDWICH_FORWARD:
        branch, _, rstd = launch_forward(x, None, weight, eps, casting, zero_centered, save_rstd)
        total = empty_rows_like(x, torch.promote_types(residual.dtype, branch.dtype))
        return torch.add(residual, branch, out=total), rstd
    _, total, rstd, _ = empty_sandwich(x, residual, weight, None, casting, save_rstd, closed=False)
    _launch_forward(x, residual, weight, None, total, None, rstd, None, eps, casting, zero_centered, plan)
    return total, rstd


def launch_norm_add_norm_forward(
    x: Tensor,
    residual: Tensor,
    inner_weight: Tensor | None,
    weight: Tensor | None,
    eps: float,
    casting: str,
    zero_centered: bool,
    save_rstd: bool,
    *,
    plan: ForwardPlan | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """``(y, s, inner_rstd, rstd)``; otherwise as ``launch_norm_add_forward``."""
    if plan is None and x.shape[-1] > WIDEST_SANDWICH_FORWARD:
        branch, _, inner_rstd = launch_forward(x, None, inner_weight, eps, casting, zero_centered, save_rstd)
        y, total, rstd = launch_forward(branch, residual, weight, eps, casting, zero_centered, save_rstd)
        return y, total, inner_rstd, rstd
    y, total, inner_rstd, rstd = empty_sandwich(x, residual, inner_weight, weight, casting, save_rstd)
    _launch_forward(x, residual, inner_weight, weight, total, y, inner_rstd, rstd, eps, casting, zero_centered, plan)
    return y, total, inner_rstd, rstd


def empty_sandwich(
    x: Tensor,
    residual: Tensor,
    inner_weight: Tensor | None,
    weight: Tensor | None,
    casting: str,
    save_rstd: bool,
    *,
    closed: bool = True,
) -> tuple[Any, Tensor, Tensor | None, Tensor | None]:
    """The forward's outputs ``(y, s, inner_rstd, rstd)``, not yet written; not ``closed``, there is no y nor rstd."""
    s_dtype = _promoted(residual.dtype, _norm_dtype(x.dtype, inner_weight, casting))
    y = empty_rows_like(x, _norm_dtype(s_dtype, weight, casting)) if closed else None
    inner_rstd = empty_rows_like(x, torch.float32, width=1) if save_rstd else None
    rstd = empty_rows_like(x, torch.float32, width=1) if save_rstd and closed else None
    return y, empty_rows_like(x, s_dtype), inner_rstd, rstd


def _norm_dtype(dtype: torch.dtype, weight: Tensor | None, casting: str) -> torch.dtype:
    return dtype if weight is None or casting == "gemma" else _promoted(dtype, weight.dtype)


def _promoted(dtype: torch.dtype, other: torch.dtype) -> torch.dtype:
    return dtype if dtype == other else torch.promote_types(dtype, other)


def _launch_forward(
    x: Tensor,
    residual: Tensor,
    inner_weight: Tensor | None,
    weight: Tensor | None,
    total: Tensor,
    y: Tensor | None,
    inner_rstd: Tensor | None,
    rstd: Tensor | None,
    eps: float,
    casting: str,
    zero_centered: bool,
    plan: ForwardPlan | None,
) -> None:
    size, width = x.numel(), x.shape[-1]
    if size == 0:
        return
    if x.is_contiguous() and residual.is_contiguous():
        strides, longest = (width, width, width, width), width
    else:
        (x, residual, total, y), spacing = same_rows(x, residual, total, y)  # type: ignore[assignment]
        strides, longest = tuple(spacing), max(spacing)  # type: ignore[assignment]
    rows = size // width
    long = rows * longest >= INT32_LIMIT
    if inner_weight is not None and not inner_weight.is_contiguous():
        inner_weight = inner_weight.contiguous()
    if weight is not None and not weight.is_contiguous():
        weight = weight.contiguous()
    tensors = (x, residual, inner_weight, weight, total, y, inner_rstd, rstd)
    dtypes = tuple([None if tensor is None else tensor.dtype for tensor in tensors[:4]])
    key = (x.device, dtypes, width, casting, zero_centered, y is None, inner_rstd is None, long, plan)
    planned = _forwards.get(key)
    if planned is None:
        plan = plan or sandwich_forward_plan(width, facts_of(x.device))
        constants: dict[str, Any] = {"N": width, "ROWS": plan.rows, "BLOCK": plan.block, "LONG": long}
        constants |= {"CASTING": casting, "ZERO_CENTERED": zero_centered}
        planned = _forwards[key] = plan, Launch(_sandwich_forward_kernel, plan.warps, constants, fuse=False)
    plan, launch = planned
    launch((-(-rows // plan.rows), 1), tensors, rows, strides, (float(eps),))


def launch_norm_add_norm_backward(
    dy: Tensor,
    ds: Tensor | None,
    total: Tensor,
    x: Tensor,
    inner_weight: Tensor | None,
    weight: Tensor | None,
    inner_rstd: Tensor,
    rstd: Tensor,
    casting: str,
    zero_centered: bool,
    dx: Tensor | None,
    dr: Tensor | None,
    dinner: Tensor | None,
    dw: Tensor | None,
    *,
    plan: BackwardPlan | None = None,
) -> None:
    """Writes the gradients asked for: ``dx`` and ``dr`` from ``empty_rows_like(total)``, the weights' [N] contiguous.

    Rows too wide to be held take a backward for each norm. ``plan`` overrules the one that the shape would get.
    """
    size, width = total.numel(), total.shape[-1]
    if plan is None and width > WIDEST_SANDWICH_BACKWARD:
        inner = dx is not None or dinner is not None
        g = dr if dr is not None and dr.dtype == total.dtype else empty_rows_like(total) if inner else None
        launch_backward(dy, ds, total, weight, rstd, casting, zero_centered, None if g is dr else g, dr, dw)
        if inner and g is not None:
            launch_backward(g, None, x, inner_weight, inner_rstd, casting, zero_centered, dx, None, dinner)
        return
    if size == 0:
        for gradient in (dinner, dw):
            if gradient is not None:
                gradient.zero_()
        return
    rows = size // width
    dense = total.is_contiguous() and x.is_contiguous() and inner_rstd.is_contiguous() and rstd.is_contiguous()
    if dense and dy.is_contiguous() and (ds is None or ds.is_contiguous()):
        strides, longest = (width, width, width, width, width, width), width
    else:
        arranged, spacing = same_rows(total, dy, ds, x, dx, dr, inner_rstd, rstd)
        total, dy, ds, x, dx, dr, inner_rstd, rstd = arranged  # type: ignore[assignment]
        strides, longest = (*spacing[1:3], spacing[0], *spacing[3:6]), max(spacing)  # type: ignore[assignment]
    if inner_weight is not None and not inner_weight.is_contiguous():
        inner_weight = inner_weight.contiguous()
    if weight is not None and not weight.is_contiguous():
        weight = weight.contiguous()
    long = rows * longest >= INT32_LIMIT
    wanted = [gradient for gradient in (dinner, dw) if gradient is not None]
    small = size <= SMALL and bool(wanted) and not (dy.is_cuda and torch.cuda.is_current_stream_capturing())
    tensors = (dy, ds, total, x, inner_weight, weight, inner_rstd, rstd, dx, dr, dinner, dw)
    dtypes = tuple([None if tensor is None else tensor.dtype for tensor in tensors])
    key = (dy.device, dtypes, width, casting, zero_centered, long, small, plan)
    planned = _backwards.get(key)
    if planned is None:
        planned = _backwards[key] = _plan_backward(tensors, len(wanted), casting, zero_centered, long, small, plan)
    plan, launch, summing = planned
    programs = -(-rows // plan.rows)
    shares = arrived = None
    if wanted:
        programs = min(programs, plan.programs)
        if small:
            programs = min(programs, max(1, SMALL_SHARES // width))
            arrived = arrivals(dy)
        shares = empty((len(wanted), programs, width), dy, torch.float32)
    launch((programs, 1), (*tensors, shares, arrived), rows, strides)
    if summing is not None:
        summing((-(-width // SHARE_COLUMNS), len(wanted)), (shares, *wanted, *(None,) * (2 - len(wanted))), programs)


def _plan_backward(
    tensors: tuple[Tensor | None, ...],
    wanted: int,
    casting: str,
    zero_centered: bool,
    long: bool,
    small: bool,
    plan: BackwardPlan | None,
) -> tuple[BackwardPlan, Launch, Launch | None]:
    """The plan, its launch, and the launch after it that sums the shares of the weights' gradients."""
    dy = tensors[0]
    assert dy is not None
    width, device = dy.shape[-1], facts_of(dy.device)
    column_bytes = sum(tensor.element_size() for tensor in tensors[:6] if tensor is not None)
    plan = plan or sandwich_backward_plan(width, column_bytes, device)
    summing = None
    if wanted and not small:
        shares = next_power_of_2(plan.programs)
        warps = device.warps(max(1, min(16, shares // 64)))
        shape = {"N": width, "ROWS": shares, "BLOCK": SHARE_COLUMNS, "OVERLAPS": device.overlaps}
        summing = Launch(_sum_both_shares_kernel, warps, shape, overlaps=device.overlaps)
    constants: dict[str, Any] = {"N": width, "ROWS": plan.rows, "BLOCK": plan.block, "STAGES": plan.stages}
    constants |= {"RELOAD": plan.reload, "SHARE_ROWS": max(1, 8192 // plan.block)}
    constants |= {"OVERLAPS": summing is not None and device.overlaps, "LONG": long}
    constants |= {"CASTING": casting, "ZERO_CENTERED": zero_centered}
    return plan, Launch(_sandwich_backward_kernel, plan.warps, constants, lazy=2), summing
