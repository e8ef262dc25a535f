"""The forward of norms that write FP8, in Triton: two kernels and their launcher.

The first kernel reads whole rows, normalises them and writes their codes. If the tensor has one scale, it can only look
for the largest magnitude of all: the second kernel then computes tiles of the norm once more, from the rstd of its
rows, and casts these.

To the alphabet of ``triton.language`` come ``q`` (codes), ``bits`` (the bits of an fp32 magnitude: as integers they are
ordered as the magnitudes are, and a NaN is above all of them), ``factor`` (what values are multiplied by to become
codes), FORMAT, an ``FP8Format``, and Y, the dtype of the values that are cast.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...spec import NormSpec
from ..plans import forward_plan, tile_plan
from ..triton.call import Call
from ..triton.devices import device_props, runs_kernels_on
from ..triton.language import (
    TRITON_DTYPES,
    columns_of,
    interpreted,
    load_gamma,
    load_input,
    load_tile,
    normalised,
    round_to,
    rows_of,
    rstd_of,
    store_tile,
)
from ..triton.memory import INT32_LIMIT, norm_dtype, promoted
from ..triton.norm_forward import add_rounded
from ..triton.torch_calls import Copy
from .formats import FP8_DTYPE, FP8Format, cast, empty_scale

CODES_OF_KERNELS = (FP8_DTYPE, torch.float8_e5m2)
"""The dtypes of codes that kernels read."""

logger = logging.getLogger("fused_norm")


def runs_fp8_kernels_on(*tensors: Tensor | None) -> bool:
    """Return whether kernels take these tensors and write codes there; the PyTorch reference takes all others.

    Triton casts to E4M3 on NVIDIA's GPUs from compute capability 8.9 on, and is not known to elsewhere.
    """
    if not runs_kernels_on(*tensors):
        return False
    assert tensors[0] is not None
    return tensors[0].device.type in ("cpu", "meta") or _casts_to_fp8(tensors[0].device)


@lru_cache(maxsize=64)
def _casts_to_fp8(device: torch.device) -> bool:
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9):
        return True
    if not torch.compiler.is_compiling():
        logger.warning("norms give FP8 by PyTorch's operators on %s, where Triton is not known to cast to it", device)
    return False


@triton.jit
def magnitude_bits(values):
    """The bits of magnitudes."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _power_not_above(value, Y: tl.constexpr):
    """The largest power of two not above a value; 0, inf and NaN as they are.

    Powers come from fp32 logarithms, as in PyTorch: next to a power these round to it. If the value comes from a 16-bit
    amax, it is a power or not so near to one, and its bits say which is next.
    """
    if Y.primitive_bitwidth == 32:
        ordinary = (value > 0.0) & (value < float("inf"))
        exponent = tl.floor(tl.log2(tl.where(ordinary, value, 1.0)))
        power = ((exponent.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
        return tl.where(ordinary, power, value)
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(value == value, (bits & 0x7F800000).to(tl.float32, bitcast=True), value)


@triton.jit
def scale_of(bits, FORMAT: tl.constexpr, Y: tl.constexpr):
    """The scale of what has the largest magnitude ``bits``, and the factor or, under ``quotient``, the scale again.

    An E8M0 scale is the biased exponent that is stored of it.
    """
    amax = bits.to(tl.float32, bitcast=True)
    top = tl.zeros_like(amax) + FORMAT.top
    if FORMAT.formula == "multiplier":
        small = amax < FORMAT.fp32_floor
        factor = tl.where(small, FORMAT.top / FORMAT.floor, tl.div_rn(top, tl.where(small, 1.0, amax)))
        if FORMAT.power_of_2:
            factor = _power_not_above(factor, Y)
        scale = tl.div_rn(tl.zeros_like(factor) + 1.0, factor)
    elif FORMAT.formula == "floor":
        scale = tl.maximum((bits >> 23) - FORMAT.top_exponent, 0)
        # The smallest scale is a subnormal; its factor is that of the next.
        factor = ((254 - tl.maximum(scale, 1)) << 23).to(tl.float32, bitcast=True)
        nan = bits > 0x7F800000
        scale = tl.where(nan, 255, scale)
        factor = tl.where(nan, 0.0, factor)
    else:
        scale = tl.div_rn(amax + FORMAT.fp32_floor, top)
        factor = scale
    return scale, factor


@triton.jit
def codes_of(values, factor, FORMAT: tl.constexpr):
    """The codes of values, saturated; a NaN stays one. ``factor`` is ``scale_of``'s and broadcasts."""
    scaled = tl.div_rn(values, factor + tl.zeros_like(values)) if FORMAT.formula == "quotient" else values * factor
    return _rounded_by_hand(scaled, FORMAT.top) if interpreted else _rounded_by_instruction(scaled)


@triton.jit
def _rounded_by_instruction(values):
    """The nearest codes, saturated by the instruction itself, in words of four."""
    words = tl.inline_asm_elementwise(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
        "mov.b32 $0, {low, high}; }",
        "=r,r,r,r,r",
        [values],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )
    return words.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _rounded_by_hand(values, TOP: tl.constexpr):
    """The nearest codes, of two equally near ones the even one, by a sum whose last place counts steps between codes.

    For Triton's interpreter, whose own cast to FP8 rounds wrongly.
    """
    MANTISSA: tl.constexpr = tl.float8e4nv.fp_mantissa_width
    SUBNORMAL: tl.constexpr = 128 - tl.float8e4nv.exponent_bias
    magnitude = tl.minimum(tl.abs(values), TOP)
    exponent = tl.maximum(magnitude.to(tl.int32, bitcast=True) >> 23, SUBNORMAL)
    anchor = (exponent + (23 - MANTISSA)) << 23
    steps = (magnitude + anchor.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - anchor
    code = tl.where(values == values, steps + ((exponent - SUBNORMAL) << MANTISSA), 0x7F)
    code = code | ((values.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def store_scales(memory, row, group, scale, rows, groups, FORMAT: tl.constexpr):
    """Write scales of rows ``row`` [R] and groups ``group`` [G], of which there are ``rows`` and ``groups`` in all.

    Swizzled ones are written with their padding, whose scales must be 0.
    """
    ptr, row_stride, group_stride = memory
    if FORMAT.swizzled:
        blocks = tl.cdiv(groups, 4)
        block = (row // 128)[:, None] * blocks + (group // 4)[None, :]
        within = (row % 32)[:, None] * 16 + (row % 128 // 32)[:, None] * 4 + (group % 4)[None, :]
        inside = (row < tl.cdiv(rows, 128) * 128)[:, None] & (group < blocks * 4)[None, :]
        tl.store(ptr + block * 512 + within, scale.to(tl.uint8), mask=inside)
    else:
        inside = (row < rows)[:, None] & (group < groups)[None, :]
        tl.store(ptr + row[:, None] * row_stride + group[None, :] * group_stride, scale, mask=inside)


@triton.jit(do_not_specialize=["M"])
def _rows_kernel(
    x_ptr,  # [M, N]: x, or its codes
    x_scale_ptr,  # [M, N / 16] or None
    r_ptr,  # [M, N] or None
    w_ptr,  # [N] or None
    s_ptr,  # [M, N] if there is a residual
    rstd_ptr,  # [M] fp32
    used_ptr,  # [M] fp32 if the norm uses another rstd and the tensor has one scale, or None
    amax_ptr,  # [1] int32 if the tensor has one scale: the bits of the largest magnitude, 0 so far
    q_ptr,  # [M, N], None if the tensor has one scale
    scale_ptr,  # as the format has them, None if the tensor has one scale
    placeholder_ptr,  # [1]
    M,
    x_stride, x_scale_stride, r_stride, s_stride, q_stride, scale_row_stride, scale_group_stride,
    eps, scale,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, INT64: tl.constexpr, S: tl.constexpr, Y: tl.constexpr,
    SPEC: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """A norm of whole rows, and its codes or, if the tensor has one scale, the largest magnitude of all.

    S and Y are the dtypes of s and y.
    """
    row = rows_of(tl.program_id(0), ROWS, INT64)
    col = columns_of(BLOCK, S)
    in_row = col < N
    live = (row < M)[:, None] & in_row[None, :]
    total = load_input((x_ptr, x_stride), (x_scale_ptr, x_scale_stride), row, col, live, 0, M, N)
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
    else:
        GROUP: tl.constexpr = BLOCK if FORMAT.group == 0 else FORMAT.group
        GROUPS: tl.constexpr = BLOCK // GROUP
        groups: tl.constexpr = N // GROUP if FORMAT.group else 1
        group = tl.arange(0, GROUPS)
        amax = tl.max(tl.reshape(bits, [ROWS, GROUPS, GROUP]), axis=2)
        amax = tl.where((row < M)[:, None] & (group < groups)[None, :], amax, 0)
        scales, factor = scale_of(amax, FORMAT, Y)
        store_scales((scale_ptr, scale_row_stride, scale_group_stride), row, group, scales, M, groups, FORMAT)
        grouped = tl.reshape(y, [ROWS, GROUPS, GROUP])
        codes = tl.reshape(codes_of(grouped, factor[:, :, None], FORMAT), [ROWS, BLOCK])
        tl.store(q_ptr + row[:, None] * q_stride + col[None, :], codes, mask=live)
    if tl.program_id(0) == 0:
        tl.store(placeholder_ptr + tl.arange(0, 1), tl.full([1], float("nan"), tl.float32).to(Y))


@triton.jit(do_not_specialize=["M"])
def _cast_kernel(
    s_ptr,  # [M, N]: the sum, x, or its codes
    s_scale_ptr,  # [M, N / 16] or None
    w_ptr,  # [N] or None
    rstd_ptr,  # [M] fp32, as the norm uses it
    amax_ptr,  # [1] int32: the bits of the largest magnitude of the tensor
    q_ptr,  # [M, N]
    scale_ptr,  # [1]
    M,
    s_stride, s_scale_stride, q_stride,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, INT64: tl.constexpr,
    S: tl.constexpr, Y: tl.constexpr, SPEC: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """The codes of one tile of a norm whose tensor has one scale; BLOCKS tiles, a program each, make up a row's."""
    # The rows that were read last come first: they are still in cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row = rows_of(program // BLOCKS, ROWS, INT64)
    col = program % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    in_row = col < N
    live = (row < M)[:, None] & in_row[None, :]
    s = load_input((s_ptr, s_stride), (s_scale_ptr, s_scale_stride), row, col, live, program % BLOCKS, M, N)
    rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
    y = normalised(s, rstd, w_ptr, S, SPEC)
    if w_ptr is not None:
        y = y * load_gamma(w_ptr, col, in_row, SPEC)
    first = tl.arange(0, 1)
    scale, factor = scale_of(tl.load(amax_ptr + first), FORMAT, Y)
    codes = codes_of(round_to(y, Y), factor[None, :], FORMAT)
    tl.store(q_ptr + row[:, None] * q_stride + col[None, :], codes, mask=live)
    if program == 0:
        tl.store(scale_ptr + first, scale)


def empty_norm_fp8(
    call: Call, spec: NormSpec, x: Tensor, residual: Tensor | None, weight: Tensor | None, fp8_format: FP8Format
) -> tuple[Any, ...]:
    """The operator's outputs, not yet written; rows are counted, and lie, in the order of x's dimensions.

    Codes in x's shape, their scales, the placeholder, the sum or None, rstd fp32 [..., 1].
    """
    *leading, width = x.shape
    s = None if residual is None else call.empty(x, x.shape, dtype=promoted(x.dtype, residual.dtype))
    return (
        call.empty(x, x.shape, dtype=FP8_DTYPE),
        empty_scale(x, leading, width, fp8_format),
        call.empty(x, (), dtype=norm_dtype(spec, (x if s is None else s).dtype, weight)).expand(x.shape),
        s,
        call.empty(x, (*leading, 1), dtype=torch.float32),
    )


def launch_norm_fp8(
    call: Call,
    spec: NormSpec,
    tensors: tuple[Tensor | None, ...],
    fp8_format: FP8Format,
    outputs: tuple[Any, ...],
    scale: float = 1.0,
) -> None:
    """Write the ``outputs`` of ``empty_norm_fp8``, for rows of up to ``plans.WIDEST_FORWARD`` elements.

    ``tensors``: x, residual, weight, codes and their scales, as the operator has them.
    """
    q, scales, placeholder, s, rstd = outputs
    x, residual, weight, codes, codes_scale = tensors
    assert x is not None
    if q.numel() == 0:
        call.perform(Copy(cast(q.new_zeros(q.shape, dtype=torch.float32), fp8_format)[1], scales))
        return
    rows, width = rstd.numel(), q.shape[-1]
    dtypes = (x if s is None else s).dtype, placeholder.dtype
    # What a placeholder stands for is in its codes.
    arranged, spacing = call.as_strided_rows(q, x if codes is None else codes, codes_scale, residual, s, rstd)
    _, x, codes_scale, residual, s, rstd = arranged
    weight = call.contiguous(weight)
    # The plan of the 16-bit norm, whose rows are summed in the same order.
    plan = forward_plan(width, device_props(q.device), "multi_wave_cached")
    constants: dict[str, Any] = {"N": width, "SPEC": spec.without_eps(), "FORMAT": fp8_format}
    constants |= {"S": TRITON_DTYPES[dtypes[0]], "Y": TRITON_DTYPES[dtypes[1]]}
    whole_rows = {"ROWS": plan.rows, "BLOCK": plan.block, "INT64": max(rows, 128) * max(spacing) >= INT32_LIMIT}
    amax = call.empty(q, (1,), torch.int32) if fp8_format.whole else None
    if amax is not None:
        call.zero(amax)
    used = call.empty(q, (rows,), dtype=torch.float32) if fp8_format.whole and spec.casting == "none" else None
    in_bytes = scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales
    codes_out = (None, None) if fp8_format.whole else (q, in_bytes)
    scale_strides = scales.stride()[-2:] if scales.dim() > 1 else (1, 1)
    padded = 128 * -(-rows // 128) if fp8_format.swizzled else rows
    # As in the 16-bit norm, fp32 squares are rounded before they are added.
    call.launch(
        _rows_kernel,
        (-(-padded // plan.rows), 1),
        (x, codes_scale, residual, weight, s, rstd, used, amax, *codes_out, placeholder),
        (rows, *spacing[1:5], width, *scale_strides, spec.eps, float(scale) if scale != 1.0 else None),
        constants | whole_rows,
        warps=plan.warps,
        fuse=dtypes[0] != torch.float32,
    )
    if fp8_format.whole:
        total, stride = (x, spacing[1]) if s is None else (s, spacing[4])
        read = total, codes_scale, weight, rstd if used is None else used, amax
        tile = tile_plan("fp8_cast", width, device_props(q.device))
        blocks = -(-width // tile.block)
        tiles = {"ROWS": tile.rows, "BLOCK": tile.block, "BLOCKS": blocks}
        tiles["INT64"] = rows * max(stride, spacing[2], width) >= INT32_LIMIT
        grid, numbers = (-(-rows // tile.rows) * blocks, 1), (rows, stride, spacing[2], width)
        call.launch(_cast_kernel, grid, (*read, q, scales), numbers, constants | tiles, warps=tile.warps)
