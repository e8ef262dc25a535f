"""FP8 codes and their scales in Triton: what all FP8 kernels share.

To the alphabet of ``triton.language`` come ``q`` (codes), ``bits`` (the bits of an fp32 magnitude: as integers they are
ordered as the magnitudes are, and a NaN is above all of them), ``factor`` (what values are multiplied by to become
codes), FORMAT, an ``FP8Format``, and Y, the dtype of the values that are cast.
"""

from __future__ import annotations

import logging
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton.devices import runs_kernels_on
from ..triton.language import interpreted
from .formats import INPUT_GROUP, FP8Format

CODES_OF_KERNELS = (torch.float8_e4m3fn, torch.float8_e5m2)
"""The dtypes of codes that kernels read and write."""

logger = logging.getLogger("fused_norm")

_input_group = tl.constexpr(INPUT_GROUP)


def runs_fp8_kernels_on(fp8_format: FP8Format, *tensors: Tensor | None) -> bool:
    """Return whether kernels take these tensors and write the format's codes; the PyTorch reference takes all others.

    Triton casts to E4M3 on NVIDIA's GPUs from compute capability 8.9 on, and elsewhere is not known to.
    """
    if not runs_kernels_on(*tensors) or fp8_format.dtype not in CODES_OF_KERNELS:
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


def in_bytes(scales: Tensor) -> Tensor:
    """E8M0 scales as the bytes that kernels write."""
    return scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales


@triton.jit
def magnitude_bits(values):
    """The bits of magnitudes."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _power_beside(value, UP: tl.constexpr, FORMAT: tl.constexpr, Y: tl.constexpr):
    """The smallest power of two not below a value or, without UP, the largest not above; 0, inf and NaN as they are.

    Powers come from fp32 logarithms, as in PyTorch: next to a power these round to it. Where the value comes from a
    16-bit amax, it is a power or not so near to one, and its bits say which is next.
    """
    if FORMAT.formula == "quotient" or Y.primitive_bitwidth == 32:
        ordinary = (value > 0.0) & (value < float("inf"))
        exponent = tl.log2(tl.where(ordinary, value, 1.0))
        exponent = tl.ceil(exponent) if UP else tl.floor(exponent)
        power = ((exponent.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
        return tl.where(ordinary, power, value)
    bits = value.to(tl.int32, bitcast=True)
    if UP:
        bits = bits + 0x7FFFFF
    return tl.where(value == value, (bits & 0x7F800000).to(tl.float32, bitcast=True), value)


@triton.jit
def _floor_scale(bits, FORMAT: tl.constexpr):
    """The scale under formula ``floor``, as the biased exponent that E8M0 stores, and the factor."""
    exponent = tl.maximum((bits >> 23) - FORMAT.top_exponent, 0)
    # The smallest scale is a subnormal; its factor is that of the next.
    factor = ((254 - tl.maximum(exponent, 1)) << 23).to(tl.float32, bitcast=True)
    nan = bits > 0x7F800000
    return tl.where(nan, 255, exponent), tl.where(nan, 0.0, factor)


@triton.jit
def _rceil_scale(amax, FORMAT: tl.constexpr, Y: tl.constexpr):
    """The scale under formula ``rceil``, as the biased exponent that E8M0 stores, and the factor."""
    scale = tl.div_rn(amax, tl.zeros_like(amax) + FORMAT.top)
    exponent = tl.minimum(_power_beside(scale, True, FORMAT, Y).to(tl.int32, bitcast=True) >> 23, 254)
    # The smallest scale, 2^-127, is a subnormal number in fp32.
    exponent = tl.where(scale.to(tl.int32, bitcast=True) > 0x400000, exponent, 0)
    factor = tl.where(exponent == 254, 0x400000, (254 - exponent) << 23).to(tl.float32, bitcast=True)
    factor = tl.where(exponent == 0, 1.0, factor)
    return tl.where(amax == amax, exponent, 255), tl.where(amax == amax, factor, amax)


@triton.jit
def scale_of(bits, FORMAT: tl.constexpr, Y: tl.constexpr):
    """The scale of what has the largest magnitude ``bits``, and the factor or, under ``quotient``, the scale again."""
    amax = bits.to(tl.float32, bitcast=True)
    if FORMAT.formula == "multiplier":
        small = amax < FORMAT.fp32_floor
        factor = tl.div_rn(tl.zeros_like(amax) + FORMAT.top, tl.where(small, 1.0, amax))
        factor = tl.where(small, FORMAT.largest_multiplier, factor)
        if FORMAT.power_of_2:
            factor = _power_beside(factor, False, FORMAT, Y)
        scale = tl.div_rn(tl.zeros_like(factor) + 1.0, factor)
    elif FORMAT.formula == "floor":
        scale, factor = _floor_scale(bits, FORMAT)
    elif FORMAT.formula == "rceil":
        scale, factor = _rceil_scale(amax, FORMAT, Y)
    else:
        floor: tl.constexpr = FORMAT.fp32_floor
        amax = tl.where(amax < floor, floor, amax) if FORMAT.formula == "reciprocal" else amax + floor
        scale = tl.div_rn(amax, tl.zeros_like(amax) + FORMAT.top)
        if FORMAT.power_of_2:
            scale = _power_beside(scale, True, FORMAT, Y)
        factor = tl.div_rn(tl.zeros_like(scale) + 1.0, scale) if FORMAT.formula == "reciprocal" else scale
    return scale, factor


@triton.jit
def codes_of(values, factor, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """The codes of values, saturated; a NaN stays one. ``factor`` is ``scale_of``'s and broadcasts."""
    scaled = tl.div_rn(values, factor + tl.zeros_like(values)) if FORMAT.formula == "quotient" else values * factor
    return _rounded_by_hand(scaled, dtype, FORMAT.top) if interpreted else _rounded_by_instruction(scaled, dtype)


@triton.jit
def _rounded_by_instruction(values, dtype: tl.constexpr):
    """The nearest codes, saturated by the instruction itself, in words of four.

    What Triton itself makes of a cast, ptxas 12.9 miscompiles where the same codes are stored as they are and
    transposed: https://github.com/triton-lang/triton/issues/11111
    """
    PAIR: tl.constexpr = "cvt.rn.satfinite.e4m3x2.f32" if dtype == tl.float8e4nv else "cvt.rn.satfinite.e5m2x2.f32"
    words = tl.inline_asm_elementwise(
        "{ .reg .b16 low, high; " + PAIR + " low, $2, $1; " + PAIR + " high, $4, $3; mov.b32 $0, {low, high}; }",
        "=r,r,r,r,r",
        [values],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )
    return words.to(dtype, bitcast=True)


@triton.jit
def _rounded_by_hand(values, dtype: tl.constexpr, TOP: tl.constexpr):
    """Values rounded to codes by integer arithmetic, for Triton's interpreter, whose own cast to FP8 rounds wrongly.

    To the nearest code, of two equally near ones to the even one; beyond TOP, the largest code, to that.
    """
    values = tl.where(values > TOP, TOP, tl.where(values < -TOP, -TOP, values))
    MANTISSA: tl.constexpr = dtype.fp_mantissa_width
    BIAS: tl.constexpr = dtype.exponent_bias
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    SHIFT: tl.constexpr = 23 - MANTISSA
    rounded = (magnitude + ((1 << (SHIFT - 1)) - 1) + ((magnitude >> SHIFT) & 1)) >> SHIFT
    normal = rounded - ((127 - BIAS) << MANTISSA)
    # A subnormal code counts steps of one size: an fp32 sum with that size in its last place rounds to them.
    ANCHOR: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    anchor = (tl.zeros_like(bits) + ANCHOR).to(tl.float32, bitcast=True)
    subnormal = (tl.abs(values) + anchor).to(tl.int32, bitcast=True) - ANCHOR
    code = tl.where(magnitude < (128 - BIAS) << 23, subnormal, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8).to(dtype, bitcast=True)


@triton.jit
def values_of(codes, dtype: tl.constexpr):
    """The fp32 numbers that codes stand for."""
    return _decoded_by_hand(codes, dtype) if interpreted else codes.to(tl.float32)


@triton.jit
def _decoded_by_hand(codes, dtype: tl.constexpr):
    """The fp32 numbers of codes by integer arithmetic, for Triton's interpreter.

    Its own cast from FP8 knows no subnormal codes and no NaN.
    """
    MANTISSA: tl.constexpr = dtype.fp_mantissa_width
    BIAS: tl.constexpr = dtype.exponent_bias
    code = codes.to(tl.uint8, bitcast=True).to(tl.int32)
    magnitude = code & 0x7F
    normal = ((magnitude << (23 - MANTISSA)) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
    STEP: tl.constexpr = 2.0 ** (1 - BIAS - MANTISSA)
    value = tl.where(magnitude < 1 << MANTISSA, magnitude.to(tl.float32) * STEP, normal)
    if MANTISSA == 3:
        value = tl.where(magnitude == 0x7F, float("nan"), value)
    else:
        value = tl.where(magnitude > 0x7C, float("nan"), tl.where(magnitude == 0x7C, float("inf"), value))
    return (value.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def load_input(memory, scales, row, col, block, M, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of a norm's input as fp32: of x itself or, where there are ``scales``, of codes times scales.

    ``block``: the number of the tile among those of its rows, from the left.
    """
    live = (row < M)[:, None] & (col < N)[None, :]
    ptr, stride = memory
    scale_ptr, scale_stride = scales
    x = tl.load(ptr + row[:, None] * stride + col[None, :], mask=live, other=0.0)
    if scale_ptr is None:
        values = x.to(tl.float32)
    else:
        GROUPS: tl.constexpr = BLOCK // _input_group
        group = block * GROUPS + tl.arange(0, GROUPS)
        inside = (row < M)[:, None] & (group < N // _input_group)[None, :]
        scale = tl.load(scale_ptr + row[:, None] * scale_stride + group[None, :], mask=inside, other=0.0)
        grouped = tl.reshape(values_of(x, ptr.dtype.element_ty), [ROWS, GROUPS, _input_group])
        values = tl.reshape(grouped * scale.to(tl.float32)[:, :, None], [ROWS, BLOCK])
    return values


@triton.jit
def store_scales(memory, row, group, scale, rows, groups, FORMAT: tl.constexpr):
    """Write scales of rows ``row`` [R] and groups ``group`` [G], of which there are ``rows`` and ``groups`` in all.

    Swizzled ones are written with their padding, for which the scale must be there, and 0.
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
