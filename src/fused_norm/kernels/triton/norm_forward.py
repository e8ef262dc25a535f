"""The forward of RMSNorm in Triton, alone, with the add before it, or with the add and the norm before that.

``language`` has the names that kernels use; what belongs to the norm before the add is called ``inner``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...spec import NormSpec
from ..plans import WIDEST_SANDWICH_FORWARD, Mode, forward_plan, tile_plan
from .call import Call
from .devices import device_props
from .language import (
    columns_of,
    copy_weight,
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
from .memory import INT32_LIMIT, norm_dtype, out_dtype, promoted
from .torch_calls import Sum

FROM_RSTD_TILE = 2048, 2048
"""A tile of a norm from its rstd, which sums no row: 16 elements a lane."""


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
    """A norm, perhaps with an add before it, and with a norm before that (INNER)."""
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
    """Programs are tiles of rows along the first axis of the grid, blocks of columns along the second."""
    row = rows_of(tl.program_id(0), ROWS, INT64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = col < N
    live = (row < M)[:, None] & in_row[None, :]
    rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
    out = normalised(load_tile((x_ptr, x_stride), row, col, live), rstd, w_ptr, x_ptr.dtype.element_ty, SPEC)
    if w_ptr is not None:
        out = out * load_gamma(w_ptr, col, in_row, SPEC)
    store_tile((y_ptr, y_stride), row, col, live, out)


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
    """The outputs of a forward, not yet written; those that only a backward reads are there if ``training``.

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
    """Write the ``outputs`` of ``empty_norm``, in the best mode or, of one norm, in ``mode``."""
    x, weight, residual, scale, inner, inner_weight, *_ = inputs
    size, width = x.numel(), x.shape[-1]
    if size == 0:
        return
    if inner and width > WIDEST_SANDWICH_FORWARD:
        _launch_one_norm_at_a_time(call, spec, inputs, outputs)
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


def _launch_one_norm_at_a_time(call: Call, spec: NormSpec, inputs: NormInputs, outputs: NormOutputs) -> None:
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
