"""RMSNorm, with an optional add before it and an optional norm before the add: kernels, plan rules and launchers.

The operators are in ``norm``. A gated norm and norms that write FP8 have kernels of their own, and plan by functions of
this file.

Names besides those in ``triton.language``: ``inner`` marks what belongs to the norm before the add; ``ds`` is the
gradient that reaches the sum past the norm; ``dy1`` to ``dy5`` are the gradients of further consumers of y; ``_tail``
marks the second piece of a row that the first alone does not hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..spec import NormSpec
from .plans import ANY_WIDTH, RULES, Device, Rule, next_power_of_2, tile_plan
from .triton.call import Call
from .triton.devices import device_props
from .triton.language import (
    TRITON_DTYPES,
    columns_of,
    copy_weight,
    input_grad,
    let_next_begin,
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
from .triton.memory import INT32_LIMIT, bytes_of, norm_dtype, out_dtype, promoted
from .triton.torch_calls import Sum
from .triton.weight_grad import empty_partials, reduce_partials


@triton.jit
def add_rounded(x, r, scale, x_dtype: tl.constexpr, s_dtype: tl.constexpr):
    """The sum of residual and scaled branch; product and sum are rounded separately, as two operators round them."""
    if scale is not None:
        x = round_to(x * scale, x_dtype)
    return round_to(r + x, s_dtype)


@triton.jit
def _branch_norm(x, rstd_ptr, w_ptr, row, col, M, eps, dtype: tl.constexpr, N: tl.constexpr, SPEC: tl.constexpr):
    """The norm of a branch before it is added to the residual, rounded to its own dtype; ``dtype`` is that of x."""
    y = normalised(x, rstd_of(x, rstd_ptr, row, M, eps, dtype, N, SPEC), w_ptr, dtype, SPEC)
    if w_ptr is None:
        y = round_to(y, dtype)
    else:
        y = y * load_gamma(w_ptr, col, col < N, SPEC)
        # Two dtypes that differ promote to fp32, but for gemmas, which keep x's, and weight_dtype, which takes that.
        if SPEC.casting == "weight_dtype":
            y = round_to(y, w_ptr.dtype.element_ty)
        elif SPEC.casting == "gemma" or SPEC.casting == "rounded_gamma" or w_ptr.dtype.element_ty == dtype:
            y = round_to(y, dtype)
    return y


@triton.jit
def _forward_tile(
    x, r, w_ptr, y, narrow, s, rstd_ptr, inner_ptr, inner_rstd_ptr, row, col, gamma, M, eps, scale,
    s_dtype: tl.constexpr, N: tl.constexpr, SPEC: tl.constexpr, INNER: tl.constexpr, GAMMA_IN_REGISTERS: tl.constexpr,
):  # fmt: skip
    """Normalise whole rows. ``GAMMA_IN_REGISTERS``: gamma is already in registers."""
    in_row = col < N
    live = (row < M)[:, None] & in_row[None, :]
    x_dtype: tl.constexpr = x[0].dtype.element_ty
    total = load_tile(x, row, col, live)
    if r[0] is not None:
        residual = load_tile(r, row, col, live)
        if INNER:
            total = _branch_norm(total, inner_rstd_ptr, inner_ptr, row, col, M, eps, x_dtype, N, SPEC)
        total = add_rounded(total, residual, scale, x_dtype, s_dtype)
        store_tile(s, row, col, live, total)
    if y[0] is not None:
        out = normalised(total, rstd_of(total, rstd_ptr, row, M, eps, s_dtype, N, SPEC), w_ptr, s_dtype, SPEC)
        if w_ptr is not None:
            if not GAMMA_IN_REGISTERS:
                gamma = load_gamma(w_ptr, col, in_row, SPEC)
            out = out * gamma
        store_tile(y, row, col, live, out)
        if narrow[0] is not None:
            store_tile(narrow, row, col, live, out)


@triton.jit(do_not_specialize=["M"])
def _forward_kernel(
    x_ptr,  # [M, N]
    r_ptr,  # [M, N] or None
    inner_ptr,  # [N] or None: the weight of a norm of x before the add
    w_ptr,  # [N] or None
    y_ptr,  # [M, N], or None if only the sum is computed
    narrow_ptr,  # [M, N], spaced as y: y in 16 bits as well; or None
    s_ptr,  # [M, N] if there is a residual
    inner_rstd_ptr,  # [M] fp32 or None
    rstd_ptr,  # [M] fp32 or None
    inner_copy_ptr,  # [N] or None: a copy of the inner weight
    w_copy_ptr,  # [N] or None: a copy of the weight
    M,
    x_stride, r_stride, y_stride, s_stride,
    eps, scale,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PERSISTENT: tl.constexpr, INT64: tl.constexpr,
    SPEC: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Normalise tiles of rows, after an optional add of a residual and an optional norm of x before the add (INNER)."""
    x, r, y, s = (x_ptr, x_stride), (r_ptr, r_stride), (y_ptr, y_stride), (s_ptr, s_stride)
    narrow = (narrow_ptr, y_stride)
    s_dtype: tl.constexpr = x_ptr.dtype.element_ty if r_ptr is None else s_ptr.dtype.element_ty
    col = tl.arange(0, BLOCK) if INNER else columns_of(BLOCK, s_dtype)
    gamma = tl.full([1, BLOCK], 1.0, tl.float32)
    if PERSISTENT:
        if w_ptr is not None:
            gamma = load_gamma(w_ptr, col, col < N, SPEC)
        for tile in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0)):
            row = rows_of(tile, ROWS, INT64)
            _forward_tile(
                x, r, w_ptr, y, narrow, s, rstd_ptr, inner_ptr, inner_rstd_ptr, row, col, gamma, M, eps, scale, s_dtype,
                N, SPEC, INNER, True,
            )  # fmt: skip
    else:
        row = rows_of(tl.program_id(0), ROWS, INT64)
        _forward_tile(
            x, r, w_ptr, y, narrow, s, rstd_ptr, inner_ptr, inner_rstd_ptr, row, col, gamma, M, eps, scale, s_dtype, N,
            SPEC, INNER, False,
        )  # fmt: skip
    copy_weight(inner_ptr, inner_copy_ptr, N, BLOCK)
    copy_weight(w_ptr, w_copy_ptr, N, BLOCK)


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
def _store_chunk(s, rstd, w_ptr, y, narrow_ptr, row, col, N: tl.constexpr, s_dtype: tl.constexpr, SPEC: tl.constexpr):
    """Write columns ``col`` of y."""
    y_ptr, y_stride = y
    out = normalised(s, rstd[:, None], w_ptr, s_dtype, SPEC)
    if w_ptr is not None:
        out = out * load_gamma(w_ptr, col, col < N, SPEC)
    tl.store(y_ptr + row * y_stride + col[None, :], round_to(out, y_ptr.dtype.element_ty), mask=(col < N)[None, :])
    if narrow_ptr is not None:
        narrow = round_to(out, narrow_ptr.dtype.element_ty)
        tl.store(narrow_ptr + row * y_stride + col[None, :], narrow, mask=(col < N)[None, :])


@triton.jit(do_not_specialize=["M"])
def _forward_chunked_kernel(
    x_ptr,  # [M, N]
    r_ptr,  # [M, N] or None
    w_ptr,  # [N] or None
    y_ptr,  # [M, N]
    narrow_ptr,  # [M, N], spaced as y: y in 16 bits as well; or None
    s_ptr,  # [M, N]: the sum to write if there is a residual, x itself if not
    rstd_ptr,  # [M] fp32 or None
    w_copy_ptr,  # [N] or None: a copy of the weight
    M,
    x_stride, r_stride, y_stride, s_stride,
    eps, scale,
    N: tl.constexpr, BLOCK: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Normalise one row a program, after an optional add of a residual, in two passes over chunks of columns."""
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
    # The last chunk stays in registers; the others are read again from the last to the first: the last are in cache.
    col = (CHUNKS - 1) * BLOCK + columns_of(BLOCK, s_dtype)
    total = _load_sum(x, r, s, row, col, scale, N)
    rstd = rstd_from(squares + tl.sum(square(total, s_dtype, SPEC), axis=1), eps, s_dtype, N, SPEC)
    if rstd_ptr is not None:
        exact = rstd
        if SPEC.casting == "none":
            exact = tl.rsqrt((exact_squares + tl.sum(total * total, axis=1)) * (1.0 / N) + eps)
        tl.store(rstd_ptr + row + tl.arange(0, 1), exact)
    _store_chunk(total, rstd, w_ptr, y, narrow_ptr, row, col, N, s_dtype, SPEC)
    tl.debug_barrier()  # the sums stored above are read again below, possibly by other threads of the program
    for step in range(CHUNKS - 1):
        col = (CHUNKS - 2 - step) * BLOCK + columns_of(BLOCK, s_dtype)
        total = tl.load(s_ptr + row * s_stride + col[None, :], mask=(col < N)[None, :], other=0.0).to(tl.float32)
        _store_chunk(total, rstd, w_ptr, y, narrow_ptr, row, col, N, s_dtype, SPEC)
    copy_weight(w_ptr, w_copy_ptr, N, BLOCK)


@triton.jit(do_not_specialize=["M"])
def _from_rstd_kernel(
    x_ptr,  # [M, N]
    w_ptr,  # [N] or None
    rstd_ptr,  # [M] fp32
    y_ptr,  # [M, N]
    M,
    x_stride, y_stride,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, INT64: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Compute y from x and the saved rstd: a program takes a tile of rows (axis 0) and a block of columns (axis 1)."""
    row = rows_of(tl.program_id(0), ROWS, INT64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = col < N
    live = (row < M)[:, None] & in_row[None, :]
    rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
    out = normalised(load_tile((x_ptr, x_stride), row, col, live), rstd, w_ptr, x_ptr.dtype.element_ty, SPEC)
    if w_ptr is not None:
        out = out * load_gamma(w_ptr, col, in_row, SPEC)
    store_tile((y_ptr, y_stride), row, col, live, out)


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
    """Compute dx, dr and partial dw of a norm and, if there is an ``x_ptr``, of the norm before its add."""
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
    """For rows too wide to hold: compute dx, dr and partial dw in a block of columns, given each row's correction."""
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


Mode = Literal["static_persistent", "multi_wave_cached", "multi_wave_reload"]
"""The ways in which a forward goes through its rows. ``static_persistent``: as many programs as run at once stride over
all tiles. ``multi_wave_cached``: each program takes one tile and keeps it in registers. ``multi_wave_reload``: each
program takes one row and reads it twice, in chunks of columns."""

MODES: tuple[Mode, ...] = get_args(Mode)

WIDEST_FORWARD = 32768
"""Elements of a row that a program of the forward can hold: beyond, the registers spill."""

WIDEST_BACKWARD = 16384
"""Elements of a row that a program of the backward can hold; wider rows are read twice."""

WIDEST_SANDWICH_FORWARD = 16384
"""Elements of a row that the forward of a norm, an add and a norm can hold; fp32 rows of 32768 spill 80 bytes."""

WIDEST_SANDWICH_BACKWARD = 8192
"""Elements of a row that the backward of these can hold; rows of 16384 spill 200 bytes and more in 16 and 32 warps."""

RULES["forward"] = (
    Rule(512, 2048, 4, why="16 elements a lane, reductions inside a warp; 4096 elements are 1 to 3 % slower"),
    Rule(1024, 2048, 2),
    Rule(5120, 2048, 4, why="8 warps at 2560 and 5120 wide: up to 3 % slower, of results in bytes 15 % and more"),
    Rule(8192, 2048, 8, why="16 warps are within 1 %, and 15 % slower if bytes are written"),
    Rule(16384, 2048, 16),
    Rule(WIDEST_FORWARD, 2048, 32),
)
RULES["chunked_forward"] = (
    Rule(8192, 16384, 8),
    Rule(32768, 16384, 16),
    Rule(ANY_WIDTH, 32768, 32, why="reads less twice: at 65536 wide 12 % faster than 16384, and that 9 % than 8192"),
)
RULES["sandwich_forward"] = (
    Rule(512, 2048, 4),
    Rule(1024, 2048, 2),
    Rule(2048, 2048, 2, why="32 elements a lane: .95 of a copy's bandwidth at 1152 wide, with half as many .94"),
    Rule(4096, 2048, 4, why="32 elements a lane: .91 at 2560 and .93 at 3840 wide, with half as many .89 and .94"),
    Rule(8192, 2048, 8, why="32 elements a lane: .94 at 5376 wide"),
    Rule(WIDEST_SANDWICH_FORWARD, 2048, 16),
)
RULES["norm_backward"] = (
    Rule(512, 4096, 4, 2, why="32 elements a lane, as many for dw; 4 % faster than 16 at 128 wide, 13 % at 256"),
    Rule(1024, 4096, 4, 2),
    Rule(2048, 4096, 4, 2, why="two rows a tile hide the reduction's latency"),
    Rule(3072, 4096, 4, 3, why="at 2560 a third program makes up for the unused lanes: 8 % faster than two"),
    Rule(4096, 4096, 4, 2, reload=True, why="5 % faster than weights in registers at 32768x4096"),
    Rule(5120, 4096, 4, 2, reload=True, tail=1024, why="two pieces leave room for a second program: 8 % faster"),
    Rule(6144, 4096, 8, 2, reload=True, tail=2048, why="two pieces: 7 % faster at 5376, as fast at 6144"),
    Rule(8192, 4096, 8, 1, why="one program fills a processor with the weight in registers"),
    Rule(12288, 4096, 16, 1, why="unused lanes leave room for more rows in flight: 6 % faster at 4096x12288"),
    Rule(WIDEST_BACKWARD, 4096, 16, 1, stages=1, reload=True),
    Rule(ANY_WIDTH, 4096, 4, 4, stages=2, why="in chunks of two rows: x and dy are read twice, dw stays in registers"),
)
RULES["add_backward"] = (
    Rule(512, 4096, 4, 2),
    Rule(1024, 4096, 4, 2),
    Rule(2048, 2048, 4, 2, why="reading the residual's gradient hides as much latency as a second row: within 1 %"),
    Rule(4096, 4096, 4, 2),
    Rule(8192, 4096, 8, 1, why="with a residual's gradient enough is in flight without a second piece"),
    Rule(WIDEST_BACKWARD, 4096, 32, 1, stages=1, reload=True),
    Rule(ANY_WIDTH, 4096, 4, 4, stages=2, why="as without a residual"),
)
RULES["sandwich_backward"] = (
    # Rows of 1024 and less were not measured; compiled for sm_90 and sm_120 they spill up to 56 bytes.
    Rule(2048, 4096, 4, 2, reload=True, why=".94 of a copy's bandwidth at 1152 wide, half a tile: .75 to .91"),
    Rule(3072, 4096, 4, 2, reload=True, why="two accumulators, 32 elements a lane, 250 registers: .88 at 2560"),
    # From 3840 wide on one program keeps enough in flight.
    Rule(4096, 4096, 4, 1, why="it has room for the weights in registers: .94; two programs of eight warps: .84"),
    Rule(WIDEST_SANDWICH_BACKWARD, 4096, 16, 1, reload=True, why="16 elements a lane, 128 registers: .94 at 5376"),
)
RULES["fp32_sandwich_backward"] = (
    Rule(1024, 2048, 4, 2, reload=True, why="not measured; twice as many elements spill 152 bytes on sm_100"),
    Rule(2048, 4096, 4, 2, reload=True),
    Rule(4096, 4096, 8, 2, reload=True, why="16 elements a lane, 128 registers"),
    Rule(WIDEST_SANDWICH_BACKWARD, 4096, 16, 1, reload=True),
)

FROM_RSTD_TILE = 2048, 2048
"""A tile of a norm from its rstd, which sums no row: 16 elements a lane."""


@dataclass(frozen=True)
class ForwardPlan:
    """One launch of the forward of a norm."""

    mode: Mode
    rows: int  # in a tile
    block: int  # columns in a tile: all of a row, or a chunk of it under ``multi_wave_reload``
    warps: int  # of a program
    programs: int = 0  # at most, under ``static_persistent``; otherwise there is one for each tile


@lru_cache(maxsize=1024)
def forward_plan(width: int, device: Device, mode: Mode | None = None, section: str = "forward") -> ForwardPlan:
    """The forward's launch for rows of ``width`` elements, in ``mode`` or the best one.

    Args:
        width: of a row or, in a gated norm, of a group.
        device: the properties of its device.
        mode: None is the best one.
        section: ``forward`` for a norm with or without a residual, so that both add up a row in the same order;
            ``sandwich_forward`` for two norms with an add between them, of rows up to ``WIDEST_SANDWICH_FORWARD``;
            ``gated_forward`` for a gated norm, up to ``gated_rms_norm.WIDEST_GATED``. The last two have one mode.

    Raises:
        ValueError: for an unknown mode, or one that cannot hold a row this wide.
    """
    block = next_power_of_2(width)
    if mode is None:
        # At 32768 wide a norm is 3 % faster in two halves, and 4 % slower so with a residual.
        mode = "multi_wave_cached" if block <= WIDEST_FORWARD else "multi_wave_reload"
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)} or None, not {mode!r}")
    if mode == "multi_wave_reload":
        rule = device.rule("chunked_forward", block)
        return ForwardPlan(mode, rows=1, block=min(block, rule.elements), warps=device.warps(rule.warps))
    if block > WIDEST_FORWARD:
        raise ValueError(
            f"mode {mode!r} holds rows of up to {WIDEST_FORWARD} elements, not {width}; use multi_wave_reload"
        )
    rule = device.rule(section, width)
    programs = (8 if block <= 4096 else 4) * device.processors if mode == "static_persistent" else 0
    return ForwardPlan(mode, max(1, rule.elements // max(block, 32)), block, device.warps(rule.warps), programs)


@dataclass(frozen=True)
class BackwardPlan:
    """One launch of the backward: a persistent grid that strides over tiles of rows.

    ``tail``: columns in a second piece of each tile, if ``block`` alone does not hold a row: a power of two, so that
    5120 = 4096 + 1024 leaves no lane idle. 0 is none.
    """

    rows: int  # in a tile
    block: int  # columns in a tile
    warps: int  # of a program
    stages: int  # tiles in flight, including the current one
    programs: int  # at most; each sums its partial dw in registers. A frozen weight gets one for each tile
    reload: bool = False  # read the weight again for every tile instead of keeping it in registers
    chunked: bool = False  # a row is too wide to hold: one launch sums over it, another goes by blocks of columns
    tail: int = 0

    @property
    def columns(self) -> int:
        """All columns in a tile."""
        return self.block + self.tail


@lru_cache(maxsize=1024)
def backward_plan(width: int, column_bytes: int, device: Device, section: str = "norm_backward") -> BackwardPlan:
    """The backward's launch for rows of ``width`` elements.

    Args:
        width: of a row or, in a gated norm, of a group.
        column_bytes: what the loop reads for one element of a row, over all tensors. Every stage beyond the first holds
            a tile of each in shared memory; if they do not fit, fewer are in flight.
        device: the properties of its device.
        section: ``norm_backward``; ``add_backward`` if the gradient of a residual sum is read and added as well;
            ``sandwich_backward`` for two norms, of rows up to ``WIDEST_SANDWICH_BACKWARD``; or ``gated_backward``, up
            to ``gated_rms_norm.WIDEST_GATED``, whose programs are those of all groups together.
    """
    if section == "sandwich_backward" and column_bytes > 12:
        section = "fp32_sandwich_backward"
    rule, chunked = device.rule(section, width), width > WIDEST_BACKWARD
    columns = rule.elements // 2 if chunked else next_power_of_2(width)
    rows = max(1, rule.elements // max(columns, 64))
    block = columns // 2 if rule.tail else columns
    stages = device.stages(rule.stages, rows * (block + rule.tail) * column_bytes)
    programs = rule.programs * device.processors
    return BackwardPlan(rows, block, device.warps(rule.warps), stages, programs, rule.reload, chunked, rule.tail)


class NormInputs(NamedTuple):
    """The arguments of a forward: ``y = norm(s)`` of ``s = residual + branch``, the branch being x or its norm."""

    x: Tensor  # [..., N]
    weight: Tensor | None  # [N]
    residual: Tensor | None = None  # x's shape; without it s is x
    scale: float = 1.0  # what x is multiplied by before it is added
    inner: bool = False  # x is normalised before the add
    inner_weight: Tensor | None = None  # [N], of that norm
    normed: bool = True  # y is computed, not s alone
    dtype: torch.dtype | None = None  # of y, in place of float32
    narrow_dtype: torch.dtype | None = None  # y is written in this as well


class NormOutputs(NamedTuple):
    """The tensors that a forward writes, in x's memory order; None for those that it does not have."""

    y: Tensor | None  # x's shape
    s: Tensor | None  # x's shape
    inner_rstd: Tensor | None  # [..., 1] fp32
    rstd: Tensor | None  # [..., 1] fp32
    inner_weight_copy: Tensor | None = None  # [N]
    weight_copy: Tensor | None = None  # [N]
    narrow: Tensor | None = None  # x's shape: y in narrow_dtype


def empty_norm(
    call: Call, spec: NormSpec, inputs: NormInputs, training: bool, copied: Sequence[str] = ()
) -> NormOutputs:
    """Allocate the outputs of a forward; those that only a backward reads are None unless ``training``.

    ``copied``: the weights, ``inner_weight`` and ``weight``, that are to be copied for the backward.
    """
    x, residual = inputs.x, inputs.residual
    branch_dtype = norm_dtype(spec, x.dtype, inputs.inner_weight) if inputs.inner else x.dtype
    s = None if residual is None else call.empty_rows_like(x, promoted(residual.dtype, branch_dtype))
    needed = training and inputs.inner, training and inputs.normed
    rstds = [call.empty_rows_like(x, torch.float32, width=1) if is_needed else None for is_needed in needed]
    y_dtype = out_dtype(norm_dtype(spec, branch_dtype if s is None else s.dtype, inputs.weight), inputs.dtype)
    copies = [call.empty_weight_like(getattr(inputs, name), name in copied) for name in ("inner_weight", "weight")]
    y = call.empty_rows_like(x, y_dtype) if inputs.normed else None
    narrow = None if inputs.narrow_dtype is None else call.empty_rows_like(x, inputs.narrow_dtype)
    return NormOutputs(y, s, *rstds, *copies)._replace(narrow=narrow)


def launch_norm_forward(
    call: Call, spec: NormSpec, inputs: NormInputs, outputs: NormOutputs, mode: Mode | None = None
) -> None:
    """Write ``outputs``, which ``empty_norm`` allocated; ``mode`` is for one norm alone, and None is the best one."""
    x, weight, residual, scale, inner, inner_weight, *_ = inputs
    size, width = x.numel(), x.shape[-1]
    if size == 0:
        return
    if inner and width > WIDEST_SANDWICH_FORWARD:
        _launch_each_forward(call, spec, inputs, outputs)
        return
    rows = size // width
    arranged, strides = call.as_strided_rows(x, residual, outputs.y, outputs.s, outputs.narrow)
    x, residual, y, s, narrow = arranged  # type: ignore[assignment]
    strides = strides[:-1]  # the last is that of y
    long = rows * max(strides) >= INT32_LIMIT
    device = device_props(x.device)
    plan = forward_plan(width, device, mode, "sandwich_forward" if inner else "forward")
    constants: dict[str, Any] = {"N": width, "BLOCK": plan.block, "SPEC": spec.without_eps()}
    numbers = rows, *strides, spec.eps, None if scale == 1.0 else float(scale)
    # Products of fp32 numbers, squares and scaled ones, are rounded before they are added: which of two the compiler
    # would fuse with their sum differs from kernel to kernel. Squares of 16-bit numbers are exact.
    fuse = not inner and (x if s is None else s).dtype != torch.float32
    if plan.mode == "multi_wave_reload":
        if s is None:
            s, numbers = x, (*numbers[:4], strides[0], *numbers[5:])
        read = x, residual, call.contiguous(weight), y, narrow, s, outputs.rstd, outputs.weight_copy
        call.launch(_forward_chunked_kernel, (rows, 1), read, numbers, constants, warps=plan.warps, fuse=fuse)
        return
    persistent = plan.mode == "static_persistent"
    constants |= {"ROWS": plan.rows, "PERSISTENT": persistent, "INT64": long, "INNER": inner}
    tiles = -(-rows // plan.rows)
    grid = min(tiles, plan.programs) if persistent else tiles, 1
    weights, rstds = (call.contiguous(inner_weight), call.contiguous(weight)), (outputs.inner_rstd, outputs.rstd)
    tensors = x, residual, *weights, y, narrow, s, *rstds, outputs.inner_weight_copy, outputs.weight_copy
    call.launch(_forward_kernel, grid, tensors, numbers, constants, warps=plan.warps, fuse=fuse)


def _launch_each_forward(call: Call, spec: NormSpec, inputs: NormInputs, outputs: NormOutputs) -> None:
    """A norm, an add and a norm of rows that are too wide for one kernel."""
    first = NormInputs(inputs.x, inputs.inner_weight)
    branch = empty_norm(call, spec, first, False).y
    assert branch is not None
    assert inputs.residual is not None
    first_outputs = NormOutputs(branch, None, None, outputs.inner_rstd, weight_copy=outputs.inner_weight_copy)
    launch_norm_forward(call, spec, first, first_outputs)
    if inputs.normed:
        second = NormInputs(branch, inputs.weight, inputs.residual, narrow_dtype=inputs.narrow_dtype)
        launch_norm_forward(call, spec, second, outputs._replace(inner_rstd=None, inner_weight_copy=None))
    else:
        assert inputs.residual is not None
        assert outputs.s is not None
        call.perform(Sum(inputs.residual, branch, outputs.s))


def launch_norm_from_rstd(
    call: Call, spec: NormSpec, x: Tensor, weight: Tensor | None, rstd: Tensor, y: Tensor
) -> None:
    """Write the norm of x to ``y``, from the rstd that its forward saved: no row is summed.

    The formula is the forward's, element for element, so the bits do not depend on how a launch divides the work.
    """
    size, width = y.numel(), x.shape[-1]
    if size == 0:
        return
    rows = size // width
    (x, rstd, y), (x_stride, _, y_stride) = call.as_strided_rows(x, rstd, y)  # type: ignore[assignment]
    weight = call.contiguous(weight)
    long = rows * max(x_stride, y_stride) >= INT32_LIMIT
    plan = tile_plan(FROM_RSTD_TILE, width, device_props(x.device))
    grid, numbers = (-(-rows // plan.rows), -(-width // plan.block)), (rows, x_stride, y_stride)
    constants = {"N": width, "ROWS": plan.rows, "BLOCK": plan.block, "INT64": long, "SPEC": spec.without_eps()}
    call.launch(_from_rstd_kernel, grid, (x, weight, rstd, y), numbers, constants, warps=plan.warps)


MOST_CONSUMERS = 6
"""The most gradients of consumers of y that a kernel sums."""

_GRID_LIMIT = 65_535
"""Programs along the second axis of a CUDA grid."""


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
        _launch_each_backward(call, spec, saved, gradients)
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


def _launch_each_backward(call: Call, spec: NormSpec, saved: NormSaved, gradients: NormGradients) -> None:
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
