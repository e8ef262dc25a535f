"""The forward of norms that give FP8, in Triton: kernels and their launchers.

Where a row or a group shares a scale, one kernel reads a row, normalises it and writes its codes. With one scale for
the tensor that kernel only looks for the largest magnitude of all, and another one makes y again and writes the codes.
``language`` and ``codes`` have the names that kernels use.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...spec import NormSpec
from ..plans import forward_plan, next_power_of_2
from ..triton.devices import device_facts
from ..triton.language import columns_of, load_gamma, load_tile, normalised, round_to, rows_of, rstd_of, store_tile
from ..triton.launch import launch
from ..triton.memory import INT32_LIMIT, contiguous, norm_dtype, promoted, same_rows
from ..triton.norm_forward import add_rounded
from .cast import cast, empty_columns, empty_swizzled
from .codes import codes_of, in_bytes, load_input, magnitude_bits, rule_of, scale_of, store_scales
from .recipe import FP8Recipe

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit(do_not_specialize=["M"])
def _rows_kernel(
    x_ptr,  # [M, N]: x, or its codes
    x_scale_ptr,  # [M, N / 16] or None
    r_ptr,  # [M, N] or None
    w_ptr,  # [N] or None
    s_ptr,  # [M, N] where there is a residual
    rstd_ptr,  # [M] fp32
    used_ptr,  # [M] fp32 where the norm uses another rstd and the tensor has one scale, or None
    amax_ptr,  # [1] int32 where the tensor has one scale: the bits of the largest magnitude, 0 so far
    q_ptr,  # [M, N] where it has not
    scale_ptr,  # as the recipe has them, where it has not
    carrier_ptr,  # [1]
    M,
    x_stride, x_scale_stride, r_stride, s_stride, q_stride, scale_row_stride, scale_group_stride,
    eps, scale,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG: tl.constexpr, S: tl.constexpr, Y: tl.constexpr,
    SPEC: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """A norm of whole rows, and its codes or, where the tensor has one scale, the largest magnitude of all.

    S and Y are the dtypes of s and y.
    """
    row = rows_of(tl.program_id(0), ROWS, LONG)
    col = columns_of(BLOCK, S)
    in_row = col < N
    live = (row < M)[:, None] & in_row[None, :]
    total = load_input((x_ptr, x_stride), (x_scale_ptr, x_scale_stride), row, col, 0, M, N, ROWS, BLOCK)
    if r_ptr is not None:
        total = add_rounded(total, load_tile((r_ptr, r_stride), row, col, live), scale, x_ptr.dtype.element_ty, S)
        store_tile((s_ptr, s_stride), row, col, live, total)
    rstd = rstd_of(total, rstd_ptr, row, M, eps, S, N, SPEC)
    if used_ptr is not None:
        tl.store(used_ptr + row[:, None], rstd, mask=(row < M)[:, None])
    y = normalised(total, rstd, w_ptr, S, SPEC)
    if w_ptr is not None:
        y = y * load_gamma(w_ptr, col, in_row, SPEC)
    y = round_to(y, Y)
    bits = magnitude_bits(y)
    if q_ptr is None:
        # A look at what is there spares most programs the wait for each other.
        largest = tl.max(tl.where(row < M, tl.max(bits, axis=1), 0), axis=0)
        tl.atomic_max(amax_ptr, largest, mask=largest > tl.load(amax_ptr), sem="relaxed")
    elif RULE.group:
        GROUPS: tl.constexpr = BLOCK // RULE.group
        group = tl.arange(0, GROUPS)
        amax = tl.max(tl.reshape(bits, [ROWS, GROUPS, RULE.group]), axis=2)
        amax = tl.where((row < M)[:, None] & (group < N // RULE.group)[None, :], amax, 0)
        scales, factor = scale_of(amax, RULE)
        scale = (scale_ptr, scale_row_stride, scale_group_stride)
        store_scales(scale, row, group, scales, M, N // RULE.group, RULE)
        grouped = codes_of(tl.reshape(y, [ROWS, GROUPS, RULE.group]), factor[:, :, None], q_ptr.dtype.element_ty, RULE)
        tl.store(q_ptr + row[:, None] * q_stride + col[None, :], tl.reshape(grouped, [ROWS, BLOCK]), mask=live)
    else:
        scales, factor = scale_of(tl.max(bits, axis=1), RULE)
        tl.store(scale_ptr + row, scales, mask=row < M)
        codes = codes_of(y, factor[:, None], q_ptr.dtype.element_ty, RULE)
        tl.store(q_ptr + row[:, None] * q_stride + col[None, :], codes, mask=live)
    if tl.program_id(0) == 0:
        tl.store(carrier_ptr + tl.arange(0, 1), tl.full([1], float("nan"), tl.float32).to(Y))


@triton.jit(do_not_specialize=["M"])
def _tiles_kernel(
    s_ptr,  # [M, N]: the sum, x, or its codes
    s_scale_ptr,  # [M, N / 16] or None
    w_ptr,  # [N] or None
    rstd_ptr,  # [M] fp32, as the norm uses it
    amax_ptr,  # [1] int32
    q_ptr,  # [M, N]
    transposed_ptr,  # [N, M] or None
    scale_ptr,  # [1]
    M,
    s_stride, s_scale_stride, q_stride, transposed_stride,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG: tl.constexpr, S: tl.constexpr, Y: tl.constexpr,
    SPEC: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """The codes of a tensor with one scale, once its largest magnitude is known."""
    BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    # The rows that were read last come first: they are still in cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row = rows_of(program // BLOCKS, ROWS, LONG)
    col = program % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    in_row = col < N
    live = (row < M)[:, None] & in_row[None, :]
    s = load_input((s_ptr, s_stride), (s_scale_ptr, s_scale_stride), row, col, program % BLOCKS, M, N, ROWS, BLOCK)
    rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
    y = normalised(s, rstd, w_ptr, S, SPEC)
    if w_ptr is not None:
        y = y * load_gamma(w_ptr, col, in_row, SPEC)
    scale, factor = scale_of(tl.load(amax_ptr + tl.arange(0, 1)), RULE)
    codes = codes_of(round_to(y, Y), factor[:, None], q_ptr.dtype.element_ty, RULE)
    tl.store(q_ptr + row[:, None] * q_stride + col[None, :], codes, mask=live)
    if transposed_ptr is not None:
        if LONG:
            col = col.to(tl.int64)
        turned = transposed_ptr + col[:, None] * transposed_stride + row[None, :]
        # That stride is M, of which the compiler knows whether 16 divides it: masks and stores may then be as wide.
        tl.store(turned, tl.trans(codes), mask=in_row[:, None] & (row < transposed_stride)[None, :])
    if program == 0:
        tl.store(scale_ptr + tl.arange(0, 1), scale)


class FP8Outputs(NamedTuple):
    """The tensors that a forward of a norm in FP8 writes, in the order in which the operators return them.

    Attributes:
        q: the codes, in x's shape.
        scale: their scales, laid out as the recipe says.
        transposed: the codes as [N, M], None unless asked for.
        carrier: the result's place in autograd's graph, one NaN in x's shape (see ``Quantized``).
        s: the sum of x and the residual, None without a residual.
        rstd: fp32 [..., 1], for the backward.
    """

    q: Tensor
    scale: Tensor
    transposed: Tensor | None
    carrier: Tensor
    s: Tensor | None
    rstd: Tensor


def empty_fp8_norm(
    spec: NormSpec, x: Tensor, residual: Tensor | None, weight: Tensor | None, recipe: FP8Recipe, transposed: bool,
    stands_for: torch.dtype | None = None,
) -> FP8Outputs:  # fmt: skip
    """The outputs, not yet written; rows are counted, and lie, in the order of x's dimensions.

    ``stands_for``: the dtype of what x has the codes of.
    """
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    s = None if residual is None else x.new_empty(x.shape, dtype=promoted(x.dtype, residual.dtype))
    dtype = norm_dtype(spec, stands_for or (x.dtype if s is None else s.dtype), weight)
    return FP8Outputs(
        x.new_empty(x.shape, dtype=recipe.dtype),
        _empty_scale(x, rows, width, recipe),
        x.new_empty((width, rows), dtype=recipe.dtype) if transposed else None,
        x.new_empty((), dtype=dtype).expand(x.shape),
        s,
        x.new_empty((*x.shape[:-1], 1), dtype=torch.float32),
    )


def _empty_scale(x: Tensor, rows: int, width: int, recipe: FP8Recipe) -> Tensor:
    if recipe.granularity == "tensor":
        return x.new_empty((), dtype=torch.float32)
    if recipe.granularity == "row":
        return x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    if recipe.layout == "columns":
        return empty_columns(x, rows, width // recipe.group, recipe.aligned)
    if recipe.layout == "swizzled":
        # The tile of a row shorter than a block of four groups is as short.
        return empty_swizzled(x, rows, width // recipe.group, zeros=width < 4 * recipe.group)
    return x.new_empty((*x.shape[:-1], width // recipe.group), dtype=torch.float32)


_TILE_ELEMENTS = 2048
"""Elements of a tile where no row is summed: 16 a lane."""

_TURNED_ROWS, _TURNED_COLUMNS = 128, 64
"""A tile that is written transposed as well: 64 bytes and more that follow each other, both ways."""


def launch_fp8_norm(
    spec: NormSpec,
    x: Tensor,
    x_scale: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    recipe: FP8Recipe,
    outputs: FP8Outputs,
    scale: float = 1.0,
    stands_for: torch.dtype | None = None,
) -> None:
    """Write the ``outputs`` of ``empty_fp8_norm``, for rows of up to ``plans.WIDEST_FORWARD`` elements.

    ``x_scale``: [..., N / 16] where x are codes, which ``stands_for`` has the dtype of.
    """
    q, scales, transposed, carrier, s, rstd = outputs
    if q.numel() == 0:
        scales.copy_(cast(q.new_zeros(q.shape, dtype=torch.float32), recipe)[1])
        return
    rows, width = rstd.numel(), q.shape[-1]
    whole = recipe.granularity == "tensor"
    dtypes = stands_for or (x.dtype if s is None else s.dtype), carrier.dtype
    (_, x, x_scale, residual, s, rstd), spacing = same_rows(q, x, x_scale, residual, s, rstd)  # type: ignore[assignment]
    strides = spacing[1:5]
    weight = contiguous(weight)
    long = max(rows, 128) * max(spacing) >= INT32_LIMIT
    # The plan of the 16-bit norm, whose rows are summed in the same order.
    plan = forward_plan(width, device_facts(q.device), "multi_wave_cached")
    constants = {"N": width, "ROWS": plan.rows, "BLOCK": plan.block, **_constants(spec, recipe, dtypes, long)}
    amax = x.new_zeros((1,), dtype=torch.int32) if whole else None
    used = torch.empty_like(rstd) if whole and spec.casting == "none" else None
    written = (None, None) if whole else (q, in_bytes(scales))
    padded = -(-rows // 128) * 128 if recipe.layout == "swizzled" else rows
    launch(
        _rows_kernel,
        (-(-padded // plan.rows), 1),
        (x, x_scale, residual, weight, s, rstd, used, amax, *written, carrier),
        (rows, *strides, width, *_scale_strides(scales, recipe), spec.eps, None if scale == 1.0 else float(scale)),
        constants,
        warps=plan.warps,
        fuse=dtypes[0] != torch.float32,  # as in the 16-bit norm
    )
    if amax is not None:
        total, stride = (x, strides[0]) if s is None else (s, strides[3])
        read = (total, x_scale, weight, rstd if used is None else used, amax)
        _launch_tiles(spec, read, (q, transposed, scales), (stride, strides[1]), recipe, dtypes, long)


def _launch_tiles(
    spec: NormSpec,
    read: tuple[Tensor | None, ...],
    written: tuple[Tensor, Tensor | None, Tensor],
    strides: tuple[int, int],
    recipe: FP8Recipe,
    dtypes: tuple[torch.dtype, torch.dtype],
    long: bool,
) -> None:
    """Launch the second kernel of a tensor with one scale; the tensors are in its order, the strides those of s."""
    q, transposed, _ = written
    width = q.shape[-1]
    rows = q.numel() // width
    long = long or (transposed is not None and q.numel() >= INT32_LIMIT)
    whole = min(next_power_of_2(width), _TILE_ELEMENTS)
    tile, block = (
        (_TILE_ELEMENTS // whole, whole) if transposed is None else (_TURNED_ROWS, min(_TURNED_COLUMNS, whole))
    )
    constants = {"N": width, "ROWS": tile, "BLOCK": block, **_constants(spec, recipe, dtypes, long)}
    warps = device_facts(q.device).warps(4 if transposed is None else 8)
    grid, numbers = (-(-rows // tile) * -(-width // block), 1), (rows, *strides, width, rows)
    launch(_tiles_kernel, grid, (*read, *written), numbers, constants, warps=warps)


def _constants(
    spec: NormSpec, recipe: FP8Recipe, dtypes: tuple[torch.dtype, torch.dtype], long: bool
) -> dict[str, Any]:
    """The compile-time constants that both kernels share; ``dtypes`` are those of s and y."""
    s_dtype, y_dtype = (TRITON_DTYPES[dtype] for dtype in dtypes)
    return {"LONG": long, "S": s_dtype, "Y": y_dtype, "SPEC": spec.without_eps(), "RULE": rule_of(recipe, dtypes[1])}


def _scale_strides(scales: Tensor, recipe: FP8Recipe) -> tuple[int, int]:
    """Elements from one row's scales to the next row's, and from one group's to the next."""
    if recipe.granularity != "group" or recipe.layout == "swizzled":
        return 0, 0
    return (1, scales.stride(1)) if recipe.layout == "columns" else (scales.shape[-1], 1)
