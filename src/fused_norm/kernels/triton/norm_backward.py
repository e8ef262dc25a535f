"""The backward of RMSNorm in Triton, alone, with the add before it, or with the add and the norm before that.

``language`` has the names that kernels use; ``ds`` is what flows into the sum besides the norm's own part, ``dy1`` and
on are the gradients of further consumers of y, ``_tail`` is a row's second piece, if the first alone does not hold it,
and ``inner`` belongs to the norm before the add.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...spec import NormSpec
from ..plans import WIDEST_SANDWICH_BACKWARD, backward_plan
from .call import Call
from .devices import device_props
from .language import (
    TRITON_DTYPES,
    input_grad,
    let_next_begin,
    load_gamma,
    load_tile,
    round_to,
    rows_of,
    store_tile,
)
from .memory import INT32_LIMIT, bytes_of, norm_dtype
from .weight_grad import empty_partials, reduce_partials

MOST_CONSUMERS = 6
"""The most gradients of consumers of y that a kernel sums."""

_GRID_LIMIT = 65_535
"""Programs along the second axis of a CUDA grid."""


@triton.jit
def _load_dy(dys, stride, row, col, live, DTYPE: tl.constexpr):
    """The gradient of y: the sum of its consumers' gradients, rounded after each addition, as by autograd."""
    dy = load_tile((dys[0], stride), row, col, live)
    if dys[1] is not None:
        dy = round_to(dy + load_tile((dys[1], stride), row, col, live), DTYPE)
    if dys[2] is not None:
        dy = round_to(dy + load_tile((dys[2], stride), row, col, live), DTYPE)
    if dys[3] is not None:
        dy = round_to(dy + load_tile((dys[3], stride), row, col, live), DTYPE)
    if dys[4] is not None:
        dy = round_to(dy + load_tile((dys[4], stride), row, col, live), DTYPE)
    if dys[5] is not None:
        dy = round_to(dy + load_tile((dys[5], stride), row, col, live), DTYPE)
    return dy


@triton.jit
def _sum_grad(ds, g, s, correction, rstd, row, col, live, ROUND_BEFORE_ADD: tl.constexpr):
    """The gradient of the sum that is normalised: through the norm, and what else flows into it.

    ROUND_BEFORE_ADD is the dtype of the norm's part in stock code, a gradient of its own; None if it is not rounded.
    """
    grad = rstd * (g - s * correction)
    if ds[0] is not None:
        if ROUND_BEFORE_ADD is not None:
            grad = round_to(grad, ROUND_BEFORE_ADD)
        grad += load_tile(ds, row, col, live)
    return grad


@triton.jit
def _store_input_grads(dx, dr, grad, scale, row, col, live):
    """Write the sum's gradient to the branch, the residual, or both."""
    if dx[0] is not None:
        store_tile(dx, row, col, live, grad if scale is None else grad * scale)
    if dr[0] is not None:
        store_tile(dr, row, col, live, grad)


@triton.jit
def _load_rstd(rstd_ptr, row, M, ONE_ROW: tl.constexpr):
    if ONE_ROW:
        return tl.load(rstd_ptr + row)[:, None]
    return tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]


@triton.jit
def _store_partial(partials_ptr, program, dw, col, N: tl.constexpr):
    """Write columns ``col`` of the program's partial dw, the sum over the rows of a tile."""
    tl.store(partials_ptr + program.to(tl.int64) * N + col, tl.sum(dw, axis=0), mask=col < N)


@triton.jit(do_not_specialize=["M"])
def _backward_kernel(
    dy_ptr,  # [M, N]
    dy1_ptr, dy2_ptr, dy3_ptr, dy4_ptr, dy5_ptr,  # [M, N] or None, all spaced as dy
    ds_ptr,  # [M, N] or None: what else flows into the sum
    s_ptr,  # [M, N]
    x_ptr,  # [M, N] if a norm comes before the add
    inner_ptr,  # [N] or None
    w_ptr,  # [N] or None
    inner_rstd_ptr,  # [M] fp32 if there is an x
    rstd_ptr,  # [M] fp32
    dx_ptr,  # [M, N] or None
    dr_ptr,  # [M, N] or None
    partials_ptr,  # [1 or 2 times programs, N] fp32 or None: each program's partial dw_inner, then of dw
    M,
    dy_stride, ds_stride, s_stride, x_stride, dx_stride, dr_stride,
    scale,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, TAIL: tl.constexpr,
    RELOAD: tl.constexpr, HAS_DW_INNER: tl.constexpr, HAS_DW: tl.constexpr, OVERLAPS: tl.constexpr, INT64: tl.constexpr,
    SPEC: tl.constexpr, DY_DTYPE: tl.constexpr, ROUND_BEFORE_ADD: tl.constexpr,
):  # fmt: skip
    dys = (dy_ptr, dy1_ptr, dy2_ptr, dy3_ptr, dy4_ptr, dy5_ptr)
    ds, dx, dr = (ds_ptr, ds_stride), (dx_ptr, dx_stride), (dr_ptr, dr_stride)
    # A tile of one row needs no mask for rows; without it a fifth of the registers is free if there are two norms.
    ONE_ROW: tl.constexpr = ROWS == 1 and x_ptr is not None
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    in_row = col < N
    dw_inner = tl.zeros([ROWS, BLOCK], tl.float32)
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    inner_gamma = tl.full([1, BLOCK], 1.0, tl.float32)
    gamma = tl.full([1, BLOCK], 1.0, tl.float32)
    if not RELOAD:
        if inner_ptr is not None:
            inner_gamma = load_gamma(inner_ptr, col, in_row, SPEC)
        if w_ptr is not None:
            gamma = load_gamma(w_ptr, col, in_row, SPEC)
    if TAIL:
        col_tail = BLOCK + tl.arange(0, TAIL)
        in_tail = col_tail < N
        dw_tail = tl.zeros([ROWS, TAIL], tl.float32)
        gamma_tail = tl.full([1, TAIL], 1.0, tl.float32)
        if w_ptr is not None and not RELOAD:
            gamma_tail = load_gamma(w_ptr, col_tail, in_tail, SPEC)
    for tile in tl.range(program, tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = rows_of(tile, ROWS, INT64)
        live = in_row[None, :] if ONE_ROW else (row < M)[:, None] & in_row[None, :]
        s = load_tile((s_ptr, s_stride), row, col, live)
        dy = _load_dy(dys, dy_stride, row, col, live, DY_DTYPE)
        rstd = _load_rstd(rstd_ptr, row, M, ONE_ROW)
        if HAS_DW:
            dw += dy * (s * rstd)
        if TAIL:
            live_tail = (row < M)[:, None] & in_tail[None, :]
            s_tail = load_tile((s_ptr, s_stride), row, col_tail, live_tail)
            dy_tail = _load_dy(dys, dy_stride, row, col_tail, live_tail, DY_DTYPE)
            if HAS_DW:
                dw_tail += dy_tail * (s_tail * rstd)
        if dx_ptr is not None or dr_ptr is not None or HAS_DW_INNER:
            if w_ptr is not None and RELOAD:
                gamma = load_gamma(w_ptr, col, in_row, SPEC)
                if TAIL:
                    gamma_tail = load_gamma(w_ptr, col_tail, in_tail, SPEC)
            g = dy * gamma
            products = g * s
            if TAIL:
                g_tail = dy_tail * gamma_tail
                products = tl.sum(tl.reshape(products, [ROWS, BLOCK // TAIL, TAIL]), axis=1) + g_tail * s_tail
            correction = tl.sum(products, axis=1)[:, None] * (rstd * rstd) * (1.0 / N)
            grad = _sum_grad(ds, g, s, correction, rstd, row, col, live, ROUND_BEFORE_ADD)
            if x_ptr is None:
                _store_input_grads(dx, dr, grad, scale, row, col, live)
            elif dr_ptr is not None:
                store_tile(dr, row, col, live, grad)
            if TAIL:
                grad_tail = _sum_grad(ds, g_tail, s_tail, correction, rstd, row, col_tail, live_tail, ROUND_BEFORE_ADD)
                _store_input_grads(dx, dr, grad_tail, scale, row, col_tail, live_tail)
        if x_ptr is not None and (dx_ptr is not None or HAS_DW_INNER):
            x = load_tile((x_ptr, x_stride), row, col, live)
            inner_rstd = _load_rstd(inner_rstd_ptr, row, M, ONE_ROW)
            if HAS_DW_INNER:
                dw_inner += grad * (x * inner_rstd)
            if dx_ptr is not None:
                if inner_ptr is not None:
                    if RELOAD:
                        inner_gamma = load_gamma(inner_ptr, col, in_row, SPEC)
                    grad = grad * inner_gamma
                store_tile(dx, row, col, live, input_grad(grad, x, inner_rstd, N))
    let_next_begin(OVERLAPS)
    if HAS_DW_INNER:
        _store_partial(partials_ptr, program, dw_inner, col, N)
        program += tl.num_programs(0)
    if HAS_DW:
        _store_partial(partials_ptr, program, dw, col, N)
        if TAIL:
            _store_partial(partials_ptr, program, dw_tail, col_tail, N)


@triton.jit(do_not_specialize=["M"])
def _backward_correction_kernel(
    dy_ptr,  # [M, N]
    dy1_ptr, dy2_ptr, dy3_ptr, dy4_ptr, dy5_ptr,  # [M, N] or None
    s_ptr,  # [M, N]
    w_ptr,  # [N] or None
    rstd_ptr,  # [M] fp32
    correction_ptr,  # [M] fp32
    M,
    dy_stride, s_stride,
    N: tl.constexpr, BLOCK: tl.constexpr, SPEC: tl.constexpr, DY_DTYPE: tl.constexpr,
):  # fmt: skip
    """For rows too wide to hold: ``rstd^2 * mean(dy * gamma * s)``, which every element of dx needs."""
    dys = (dy_ptr, dy1_ptr, dy2_ptr, dy3_ptr, dy4_ptr, dy5_ptr)
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    products = tl.zeros([1, BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        col = start + tl.arange(0, BLOCK)
        in_row = (col < N)[None, :]
        s = load_tile((s_ptr, s_stride), row, col, in_row)
        g = _load_dy(dys, dy_stride, row, col, in_row, DY_DTYPE)
        if w_ptr is not None:
            g = g * load_gamma(w_ptr, col, col < N, SPEC)
        products += g * s
    rstd = tl.load(rstd_ptr + row)
    tl.store(correction_ptr + row, tl.sum(products, axis=1) * (rstd * rstd) * (1.0 / N))


@triton.jit(do_not_specialize=["M"])
def _backward_columns_kernel(
    dy_ptr,  # [M, N]
    dy1_ptr, dy2_ptr, dy3_ptr, dy4_ptr, dy5_ptr,  # [M, N] or None
    ds_ptr,  # [M, N] or None
    s_ptr,  # [M, N]
    w_ptr,  # [N] or None
    rstd_ptr,  # [M] fp32
    correction_ptr,  # [M] fp32
    dx_ptr,  # [M, N] or None
    dr_ptr,  # [M, N] or None
    partials_ptr,  # [programs along rows, N] fp32 or None
    M,
    dy_stride, ds_stride, s_stride, dx_stride, dr_stride,
    scale,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
    INT64: tl.constexpr, SPEC: tl.constexpr, DY_DTYPE: tl.constexpr, ROUND_BEFORE_ADD: tl.constexpr,
):  # fmt: skip
    """The second half for wide rows: a block of columns of every row, given each row's correction."""
    dys = (dy_ptr, dy1_ptr, dy2_ptr, dy3_ptr, dy4_ptr, dy5_ptr)
    ds, dx, dr = (ds_ptr, ds_stride), (dx_ptr, dx_stride), (dr_ptr, dr_stride)
    program = tl.program_id(1)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_row = col < N
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    gamma = tl.full([1, BLOCK], 1.0, tl.float32)
    if w_ptr is not None:
        gamma = load_gamma(w_ptr, col, in_row, SPEC)
    for tile in tl.range(program, tl.cdiv(M, ROWS), tl.num_programs(1), num_stages=STAGES):
        row = rows_of(tile, ROWS, INT64)
        live = (row < M)[:, None] & in_row[None, :]
        s = load_tile((s_ptr, s_stride), row, col, live)
        dy = _load_dy(dys, dy_stride, row, col, live, DY_DTYPE)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
        if partials_ptr is not None:
            dw += dy * (s * rstd)
        if dx_ptr is not None or dr_ptr is not None:
            correction = tl.load(correction_ptr + row, mask=row < M, other=0.0)[:, None]
            grad = _sum_grad(ds, dy * gamma, s, correction, rstd, row, col, live, ROUND_BEFORE_ADD)
            _store_input_grads(dx, dr, grad, scale, row, col, live)
    let_next_begin(OVERLAPS)
    if partials_ptr is not None:
        _store_partial(partials_ptr, program, dw, col, N)


class NormSaved(NamedTuple):
    """The tensors that a backward reads: of a norm of s and, if x is given, of the norm of x before the add."""

    dy: Tensor | tuple[Tensor, ...]  # [..., N]; or those of up to MOST_CONSUMERS consumers, in the order of their sum
    ds: Tensor | None  # [..., N], what else flows into s
    s: Tensor  # [..., N], the input of the norm
    weight: Tensor | None  # [N]
    rstd: Tensor  # [..., 1] fp32
    x: Tensor | None = None  # [..., N], the input of the norm before the add
    inner_weight: Tensor | None = None  # [N], of that norm
    inner_rstd: Tensor | None = None  # [..., 1] fp32, of that norm
    scale: float = 1.0  # what the branch was multiplied by
    round_before_add: bool = False  # round the norm's part of the gradient of s before ds is added: s is no new sum


class NormGradients(NamedTuple):
    """The tensors that a backward writes; None for those that are not needed."""

    dx: Tensor | None  # from empty_rows_like(s)
    dr: Tensor | None  # from empty_rows_like(s)
    dw: Tensor | None  # [N], contiguous
    dw_inner: Tensor | None = None  # [N], contiguous


def launch_norm_backward(call: Call, spec: NormSpec, saved: NormSaved, gradients: NormGradients) -> None:
    """Write the ``gradients`` that are not None."""
    dx, dr, dw, dw_inner = gradients
    size, width, inner = saved.s.numel(), saved.s.shape[-1], saved.x is not None
    if size == 0:
        for gradient in (dw_inner, dw):
            if gradient is not None:
                call.zero(gradient)
        return
    if inner and width > WIDEST_SANDWICH_BACKWARD:
        _launch_one_norm_at_a_time(call, spec, saved, gradients)
        return
    rows, device = size // width, device_props(saved.s.device)
    dy, *more = saved.dy if isinstance(saved.dy, tuple) else (saved.dy,)
    if more and not all(t.is_contiguous() for t in (saved.s, dy, *more)):  # the kernel has one row stride for all of dy
        dy, *more = [call.copied_like(saved.s, t) for t in (dy, *more)]
    arranged, spacing = call.as_strided_rows(saved.s, dy, saved.ds, saved.x, dx, dr, saved.rstd, saved.inner_rstd)
    s, dy, ds, x, dx, dr, rstd, inner_rstd = arranged  # type: ignore[assignment]
    dys = dy, *more, *[None] * (MOST_CONSUMERS - 1 - len(more))
    weight, inner_weight = call.contiguous(saved.weight), call.contiguous(saved.inner_weight)
    read = *dys, ds, s, x, inner_weight, weight
    section = "norm_backward" if ds is None else "add_backward"
    plan = backward_plan(width, bytes_of(*read), device, "sandwich_backward" if inner else section)
    blocks = -(-width // plan.columns) if plan.chunked else 1
    programs, most = -(-rows // plan.rows), -(-plan.programs // blocks)
    first, second = (dw, None) if dw_inner is None else (dw_inner, dw)
    programs = programs if first is None else min(programs, most)
    partials = empty_partials(call, programs, first, second)
    constants: dict[str, Any] = {"N": width, "ROWS": plan.rows, "BLOCK": plan.block, "STAGES": plan.stages}
    constants |= {"OVERLAPS": partials is not None and device.overlaps, "INT64": rows * max(spacing) >= INT32_LIMIT}
    constants["SPEC"] = spec.without_eps()
    constants["DY_DTYPE"] = TRITON_DTYPES[norm_dtype(spec, saved.s.dtype, weight)] if more else None
    constants["ROUND_BEFORE_ADD"] = TRITON_DTYPES[saved.s.dtype] if saved.round_before_add and ds is not None else None
    strides = *spacing[1:3], spacing[0], spacing[3] if inner else None, *spacing[4:6]
    scale = None if saved.scale == 1.0 else float(saved.scale)
    tensors: tuple[Tensor | None, ...]
    numbers: tuple[float | None, ...]
    if plan.chunked:
        correction = call.empty(saved.s, (rows,), dtype=torch.float32)
        if dx is not None or dr is not None:
            tensors, numbers = (*dys, s, weight, rstd, correction), (rows, strides[0], strides[2])
            # With gradients in two dtypes the larger block spills.
            block = (4 if len({grad.dtype for grad in (dy, *more)}) == 1 else 2) * plan.block
            wider = {name: constants[name] for name in ("N", "SPEC", "DY_DTYPE")} | {"BLOCK": block}
            call.launch(_backward_correction_kernel, (rows, 1), tensors, numbers, wider, warps=plan.warps)
        tensors = *dys, ds, s, weight, rstd, correction, dx, dr, partials
        numbers = rows, *strides[:3], *strides[4:], scale
        grid = blocks, min(programs, _GRID_LIMIT)
        call.launch(_backward_columns_kernel, grid, tensors, numbers, constants, warps=plan.warps)
    else:
        constants |= {"TAIL": plan.tail, "RELOAD": plan.reload}
        constants |= {"HAS_DW_INNER": dw_inner is not None, "HAS_DW": dw is not None}
        tensors = *dys, ds, s, x, inner_weight, weight, inner_rstd, rstd, dx, dr, partials
        call.launch(_backward_kernel, (programs, 1), tensors, (rows, *strides, scale), constants, warps=plan.warps)
    if partials is not None:
        reduce_partials(call, partials, first, second, programs, most, device)


def _launch_one_norm_at_a_time(call: Call, spec: NormSpec, saved: NormSaved, gradients: NormGradients) -> None:
    """The backward of a norm, an add and a norm whose rows are too wide to be held; ``g`` is the gradient of s."""
    dx, dr, dw, dw_inner = gradients
    g = None
    if dx is not None or dw_inner is not None:
        g = dr if dr is not None and dr.dtype == saved.s.dtype else call.empty_rows_like(saved.s)
    second = NormSaved(saved.dy, saved.ds, saved.s, saved.weight, saved.rstd)
    launch_norm_backward(call, spec, second, NormGradients(None if g is dr else g, dr, dw))
    if g is not None:
        assert saved.x is not None
        assert saved.inner_rstd is not None
        first = NormSaved(g, None, saved.x, saved.inner_weight, saved.inner_rstd)
        launch_norm_backward(call, spec, first, NormGradients(dx, None, dw_inner))
