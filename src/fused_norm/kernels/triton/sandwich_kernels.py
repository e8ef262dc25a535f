"""A norm, the residual add behind it and, in a sandwich, the norm of the sum: Triton kernels and their launchers.

``language`` has the names that kernels use; what belongs to the norm of the branch is called ``inner``, ``branch`` is
that norm's output, ``s`` the residual plus it, and ``g`` in the backward the gradient of s.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...spec import NormSpec
from ..plans import BackwardPlan, ForwardPlan, sandwich_backward_plan, sandwich_forward_plan
from .devices import device_facts
from .language import (
    input_grad,
    let_next_begin,
    load_gamma,
    load_tile,
    normalised,
    round_to,
    rows_of,
    rstd_of,
    store_tile,
)
from .launch import launch
from .memory import INT32_LIMIT, contiguous, empty_rows_like, norm_dtype, promoted, same_rows
from .weight_grad import sum_shares


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
    x_stride, r_stride, s_stride, y_stride,
    eps,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    row = rows_of(tl.program_id(0), ROWS, LONG)
    col = tl.arange(0, BLOCK)
    in_row = col < N
    live = (row < M)[:, None] & in_row[None, :]
    x_dtype: tl.constexpr = x_ptr.dtype.element_ty
    s_dtype: tl.constexpr = s_ptr.dtype.element_ty
    x = load_tile((x_ptr, x_stride), row, col, live)
    r = load_tile((r_ptr, r_stride), row, col, live)
    branch = normalised(x, rstd_of(x, inner_rstd_ptr, row, M, eps, x_dtype, N, SPEC), inner_ptr, x_dtype, SPEC)
    if inner_ptr is None:
        branch = round_to(branch, x_dtype)
    else:
        branch = branch * load_gamma(inner_ptr, col, in_row, SPEC)
        # Two dtypes that differ promote to fp32, but for gemmas, which keep x's, and weight_dtype, which takes that.
        if SPEC.casting == "weight_dtype":
            branch = round_to(branch, inner_ptr.dtype.element_ty)
        elif SPEC.casting == "gemma" or SPEC.casting == "rounded_gamma" or inner_ptr.dtype.element_ty == x_dtype:
            branch = round_to(branch, x_dtype)
    s = round_to(r + branch, s_dtype)
    store_tile((s_ptr, s_stride), row, col, live, s)
    if y_ptr is not None:
        y = normalised(s, rstd_of(s, rstd_ptr, row, M, eps, s_dtype, N, SPEC), w_ptr, s_dtype, SPEC)
        if w_ptr is not None:
            y = y * load_gamma(w_ptr, col, in_row, SPEC)
        store_tile((y_ptr, y_stride), row, col, live, y)


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
    shares_ptr,  # [1 or 2 times programs, N] fp32 or None: each program's share of dinner, then of dw
    M,
    dy_stride, ds_stride, s_stride, x_stride, dx_stride, dr_stride,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, RELOAD: tl.constexpr,
    HAS_DINNER: tl.constexpr, HAS_DW: tl.constexpr, OVERLAPS: tl.constexpr, LONG: tl.constexpr,
    SPEC: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    in_row = col < N
    dinner = tl.zeros([ROWS, BLOCK], tl.float32)
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    inner_gamma = tl.full([1, BLOCK], 1.0, tl.float32)
    gamma = tl.full([1, BLOCK], 1.0, tl.float32)
    if not RELOAD:
        if inner_ptr is not None:
            inner_gamma = load_gamma(inner_ptr, col, in_row, SPEC)
        if w_ptr is not None:
            gamma = load_gamma(w_ptr, col, in_row, SPEC)
    for tile in tl.range(program, tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = rows_of(tile, ROWS, LONG)
        live = _live(row, in_row, M, ROWS)
        s = load_tile((s_ptr, s_stride), row, col, live)
        g = load_tile((dy_ptr, dy_stride), row, col, live)
        rstd = _load_rstd(rstd_ptr, row, M, ROWS)
        if HAS_DW:
            dw += g * (s * rstd)
        if dx_ptr is not None or dr_ptr is not None or HAS_DINNER:
            if w_ptr is not None:
                if RELOAD:
                    gamma = load_gamma(w_ptr, col, in_row, SPEC)
                g = g * gamma
            g = input_grad(g, s, rstd, N)
            if ds_ptr is not None:
                g += load_tile((ds_ptr, ds_stride), row, col, live)
            if dr_ptr is not None:
                store_tile((dr_ptr, dr_stride), row, col, live, g)
        if dx_ptr is not None or HAS_DINNER:
            x = load_tile((x_ptr, x_stride), row, col, live)
            inner_rstd = _load_rstd(inner_rstd_ptr, row, M, ROWS)
            if HAS_DINNER:
                dinner += g * (x * inner_rstd)
            if dx_ptr is not None:
                if inner_ptr is not None:
                    if RELOAD:
                        inner_gamma = load_gamma(inner_ptr, col, in_row, SPEC)
                    g = g * inner_gamma
                store_tile((dx_ptr, dx_stride), row, col, live, input_grad(g, x, inner_rstd, N))
    let_next_begin(OVERLAPS)
    share_ptr = shares_ptr
    if HAS_DINNER:
        tl.store(share_ptr + program * N + col, tl.sum(dinner, axis=0), mask=in_row)
        share_ptr += tl.num_programs(0) * N
    if HAS_DW:
        tl.store(share_ptr + program * N + col, tl.sum(dw, axis=0), mask=in_row)


def empty_sandwich(
    spec: NormSpec, x: Tensor, residual: Tensor, inner_weight: Tensor | None, weight: Tensor | None, training: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """A sandwich's outputs ``(y, s, inner_rstd, rstd)``, not yet written; the last two as in ``empty_norm``."""
    s, inner_rstd = empty_norm_add(spec, x, residual, inner_weight, training)
    rstd = empty_rows_like(x, torch.float32, width=1) if training else None
    return empty_rows_like(x, norm_dtype(spec, s.dtype, weight)), s, inner_rstd, rstd


def empty_norm_add(
    spec: NormSpec, x: Tensor, residual: Tensor, weight: Tensor | None, training: bool
) -> tuple[Tensor, Tensor | None]:
    """The outputs ``(s, rstd)`` of a norm and an add, not yet written; rstd as in ``empty_norm``."""
    rstd = empty_rows_like(x, torch.float32, width=1) if training else None
    return empty_rows_like(x, promoted(residual.dtype, norm_dtype(spec, x.dtype, weight))), rstd


def launch_sandwich_forward(
    spec: NormSpec,
    x: Tensor,
    residual: Tensor,
    inner_weight: Tensor | None,
    weight: Tensor | None,
    outputs: tuple[Tensor | None, Tensor, Tensor | None, Tensor | None],
    *,
    plan: ForwardPlan | None = None,
) -> None:
    """Write the ``outputs`` (y, s, inner_rstd, rstd); without a y there is no second norm.

    For rows up to ``WIDEST_SANDWICH_FORWARD``. ``plan`` overrules the one that the shape would get.
    """
    y, total, inner_rstd, rstd = outputs
    size, width = x.numel(), x.shape[-1]
    if size == 0:
        return
    (x, residual, total, y), strides = same_rows(x, residual, total, y)  # type: ignore[assignment]
    rows = size // width
    long = rows * max(strides) >= INT32_LIMIT
    tensors = (x, residual, contiguous(inner_weight), contiguous(weight), total, y, inner_rstd, rstd)
    plan = plan or sandwich_forward_plan(width, device_facts(x.device))
    constants = {"N": width, "ROWS": plan.rows, "BLOCK": plan.block, "LONG": long, "SPEC": spec.without_eps()}
    grid, numbers = (-(-rows // plan.rows), 1), (rows, *strides, spec.eps)
    launch(_sandwich_forward_kernel, grid, tensors, numbers, constants, warps=plan.warps, fuse=False)


def launch_sandwich_backward(
    spec: NormSpec,
    dy: Tensor,
    ds: Tensor | None,
    total: Tensor,
    x: Tensor,
    weights: tuple[Tensor | None, Tensor | None],
    rstds: tuple[Tensor, Tensor],
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    *,
    plan: BackwardPlan | None = None,
) -> None:
    """Write the ``gradients`` (dx, dr, dinner, dw) that are there, the first two from ``empty_rows_like(total)``.

    For rows up to ``WIDEST_SANDWICH_BACKWARD``. ``weights`` and ``rstds``: the inner norm's, then the other's.
    ``plan`` overrules the one that the shape would get.
    """
    dx, dr, dinner, dw = gradients
    size, width = total.numel(), total.shape[-1]
    if size == 0:
        for gradient in (dinner, dw):
            if gradient is not None:
                gradient.zero_()
        return
    rows = size // width
    arranged, spacing = same_rows(total, dy, ds, x, dx, dr, *rstds)
    total, dy, ds, x, dx, dr, inner_rstd, rstd = arranged  # type: ignore[assignment]
    strides = (*spacing[1:3], spacing[0], *spacing[3:6])
    long = rows * max(spacing) >= INT32_LIMIT
    tensors = (dy, ds, total, x, *map(contiguous, weights), inner_rstd, rstd, dx, dr)
    device = device_facts(dy.device)
    column_bytes = sum(tensor.element_size() for tensor in tensors[:6] if tensor is not None)
    plan = plan or sandwich_backward_plan(width, column_bytes, device)
    wanted = [gradient is not None for gradient in (dinner, dw)]
    constants: dict[str, Any] = {"N": width, "ROWS": plan.rows, "BLOCK": plan.block, "STAGES": plan.stages}
    constants |= {"RELOAD": plan.reload, "HAS_DINNER": wanted[0], "HAS_DW": wanted[1]}
    constants |= {"OVERLAPS": any(wanted) and device.overlaps, "LONG": long, "SPEC": spec.without_eps()}
    programs = -(-rows // plan.rows)
    first, second = (dinner, dw) if dinner is not None else (dw, None)
    shares = None
    if first is not None:
        programs = min(programs, plan.programs)
        shares = dy.new_empty((programs * (1 if second is None else 2), width), dtype=torch.float32)
    numbers = rows, *strides
    launch(_sandwich_backward_kernel, (programs, 1), (*tensors, shares), numbers, constants, warps=plan.warps)
    if shares is not None:
        sum_shares(shares, first, second, programs, plan.programs, device)
