"""A norm made again and cast with scales shared over rows, in Triton: kernels and their launcher.

``language`` and ``codes`` have the names that kernels use. Codes are written as [N, M]: side by side in memory lie the
rows of one column.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...spec import NormSpec
from ..plans import next_power_of_2
from ..triton.devices import device_facts
from ..triton.language import load_gamma, load_tile, normalised, round_to, rows_of
from ..triton.launch import launch
from ..triton.memory import INT32_LIMIT, contiguous, norm_dtype, same_rows
from .cast import cast, empty_swizzled
from .codes import codes_of, in_bytes, magnitude_bits, rule_of, scale_of, store_scales
from .forward_kernels import TRITON_DTYPES
from .recipe import FP8Recipe


@triton.jit(do_not_specialize=["M"])
def _columns_kernel(
    x_ptr,  # [M, N]
    w_ptr,  # [N] or None
    rstd_ptr,  # [M] fp32
    amax_ptr,  # [N] int32 where a column has one scale: the bits of its largest magnitude, or None
    q_ptr,  # [N, M]; None while those are being found
    scale_ptr,  # [1, N], [ceil(M / group), N] or swizzled; None with q
    M,
    x_stride, q_stride,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, LONG: tl.constexpr,
    Y: tl.constexpr, SPEC: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """The codes of one tile of a norm that is made again; BLOCKS tiles, a program each, make up the same rows."""
    tile = tl.program_id(0) // BLOCKS
    row = rows_of(tile, ROWS, LONG)
    col = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    in_row = col < N
    live = (row < M)[:, None] & in_row[None, :]
    rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
    y = normalised(load_tile((x_ptr, x_stride), row, col, live), rstd, w_ptr, x_ptr.dtype.element_ty, SPEC)
    if w_ptr is not None:
        y = y * load_gamma(w_ptr, col, in_row, SPEC)
    y = round_to(y, Y)
    if q_ptr is None:
        largest = tl.max(magnitude_bits(y), axis=0)
        tl.atomic_max(amax_ptr + col, largest, mask=in_row, sem="relaxed")
    else:
        if RULE.group:
            GROUPS: tl.constexpr = ROWS // RULE.group
            amax = tl.max(tl.reshape(magnitude_bits(y), [GROUPS, RULE.group, BLOCK]), axis=1)
            scale, factor = scale_of(tl.where(in_row[None, :], amax, 0), RULE)
            group = tile * GROUPS + tl.arange(0, GROUPS)
            groups = tl.cdiv(M, RULE.group)
            if RULE.swizzled:
                store_scales((scale_ptr, 0, 0), col, group, tl.trans(scale), N, groups, RULE)
            else:
                store_scales((scale_ptr, N, 1), group, col, scale, groups, N, RULE)
            y = tl.reshape(y, [GROUPS, RULE.group, BLOCK])
            codes = tl.reshape(codes_of(y, factor[:, None, :], q_ptr.dtype.element_ty, RULE), [ROWS, BLOCK])
        else:
            scale, factor = scale_of(tl.load(amax_ptr + col, mask=in_row, other=0), RULE)
            if tile == 0:
                tl.store(scale_ptr + col, scale, mask=in_row)
            codes = codes_of(y, factor[None, :], q_ptr.dtype.element_ty, RULE)
        if LONG:
            col = col.to(tl.int64)
        # The stride is M, of which the compiler knows whether 16 divides it: masks and stores may then be as wide.
        inside = in_row[:, None] & (row < q_stride)[None, :]
        tl.store(q_ptr + col[:, None] * q_stride + row[None, :], tl.trans(codes), mask=inside)


_TILE_ROWS, _TILE_COLUMNS = 128, 64
"""32 elements a lane in 8 warps: 128 bytes of bf16 that follow each other are read, and as many codes written."""


def empty_columns_fp8(x: Tensor, recipe: FP8Recipe) -> tuple[Tensor, Tensor]:
    """Codes [N, M] and scales, not yet written."""
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    q = x.new_empty((width, rows), dtype=recipe.dtype)
    groups = -(-rows // recipe.group) if recipe.group else 1
    if recipe.layout == "swizzled":
        return q, empty_swizzled(x, width, groups)
    return q, x.new_empty((groups, width), dtype=torch.float32)


def launch_columns_fp8(
    spec: NormSpec, x: Tensor, weight: Tensor | None, rstd: Tensor, recipe: FP8Recipe, q: Tensor, scale: Tensor
) -> None:
    """Write what ``empty_columns_fp8`` makes, from the rstd that a forward has kept."""
    width, rows = q.shape
    if q.numel() == 0:
        scale.copy_(cast(q.new_zeros((rows, width), dtype=torch.float32), recipe)[1])
        return
    (rstd, x), (_, x_stride) = same_rows(rstd, x)  # type: ignore[assignment]
    weight = contiguous(weight)
    y_dtype = norm_dtype(spec, x.dtype, weight)
    long = max(rows * x_stride, q.numel()) >= INT32_LIMIT
    swizzled = recipe.layout == "swizzled"
    tile = max(_TILE_ROWS, 4 * recipe.group if swizzled else recipe.group)
    block = min(_TILE_COLUMNS, next_power_of_2(width))
    blocks = -(-(-(-width // 128) * 128 if swizzled else width) // block)
    constants = {
        "N": width, "ROWS": tile, "BLOCK": block, "BLOCKS": blocks, "LONG": long, "Y": TRITON_DTYPES[y_dtype],
        "SPEC": spec.without_eps(), "RULE": rule_of(recipe, y_dtype),
    }  # fmt: skip
    grid, numbers, warps = (-(-rows // tile) * blocks, 1), (rows, x_stride, rows), device_facts(x.device).warps(8)
    amax = None
    if recipe.granularity == "row":
        amax = x.new_zeros((width,), dtype=torch.int32)
        launch(_columns_kernel, grid, (x, weight, rstd, amax, None, None), numbers, constants, warps=warps)
    launch(_columns_kernel, grid, (x, weight, rstd, amax, q, in_bytes(scale)), numbers, constants, warps=warps)
