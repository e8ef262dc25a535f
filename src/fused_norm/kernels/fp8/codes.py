"""FP8 codes and their scales in Triton: what all FP8 kernels share.

To the alphabet of ``triton.language`` come ``q`` (codes), ``bits`` (the bits of an fp32 magnitude: as integers they are
ordered as the magnitudes are, and a NaN is above all of them), ``factor`` (what values are multiplied by to become
codes) and RULE, a ``ScaleRule``.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton.devices import runs_kernels_on
from ..triton.language import interpreted
from .cast import INPUT_GROUP
from .recipe import FP8Recipe

CODES_OF_KERNELS = (torch.float8_e4m3fn, torch.float8_e5m2)
"""The dtypes of codes that kernels read and write."""

logger = logging.getLogger("fused_norm")

_input_group = tl.constexpr(INPUT_GROUP)


@dataclass(frozen=True)
class ScaleRule:
    """The part of a recipe that kernels are compiled for.

    Attributes:
        formula: as in ``FP8Recipe``.
        group: as there: elements of a group, 0 where scales are of rows or of the tensor.
        top: the largest number that is a code.
        top_exponent: the exponent of the largest power of two not above ``top``.
        floor: the fp32 number that amax is compared with, or that is added to it.
        most: the multiplier of an amax below the floor.
        power_of_2: as in ``FP8Recipe``.
        by_logarithm: powers of two come from fp32 logarithms, as in PyTorch: next to a power these round to it. Where
            what is rounded comes from a 16-bit amax, it is a power or not so near to one.
    """

    formula: str
    group: int
    top: float
    top_exponent: int
    floor: float
    most: float
    power_of_2: bool
    by_logarithm: bool

    @property
    def swizzled(self) -> bool:
        """Whether scales are E8M0 bytes in the order that scaled products of sm_100 read: see ``FP8Recipe.layout``."""
        return self.formula in ("floor", "rceil")


@lru_cache(maxsize=256)
def rule_of(recipe: FP8Recipe, dtype: torch.dtype) -> ScaleRule:
    """The rule of a recipe for values of ``dtype``."""
    top = torch.finfo(recipe.dtype).max
    floor, most = np.float32(recipe.floor), 0.0
    if recipe.formula == "multiplier":
        # In fp32 as in PyTorch's fp64, in which a floor need not be an fp32 number.
        most = float(np.float32(top / recipe.floor))
        floor = floor if floor >= recipe.floor else np.nextafter(floor, np.float32(1))
    return ScaleRule(
        recipe.formula, recipe.group, top, int(math.log2(top)), float(floor), most, recipe.power_of_2,
        dtype == torch.float32 or recipe.formula == "quotient",
    )  # fmt: skip


def runs_fp8_kernels_on(recipe: FP8Recipe, *tensors: Tensor | None) -> bool:
    """Return whether kernels take these tensors and write the recipe's codes; the PyTorch reference takes all others.

    Triton casts to E4M3 on NVIDIA's GPUs from compute capability 8.9 on, and elsewhere is not known to.
    """
    if not runs_kernels_on(*tensors) or recipe.dtype not in CODES_OF_KERNELS:
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
def _power_of(exponent):
    """2^exponent, for normal fp32 numbers."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _power_below(value, RULE: tl.constexpr):
    """The largest power of two not above a value; 0, inf and NaN as they are."""
    ordinary = (value > 0.0) & (value < float("inf"))
    if RULE.by_logarithm:
        power = _power_of(tl.floor(tl.log2(tl.where(ordinary, value, 1.0))).to(tl.int32))
    else:
        power = (value.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(ordinary, power, value)


@triton.jit
def _power_above(value, RULE: tl.constexpr):
    """The smallest power of two not below a value; 0, inf and NaN as they are."""
    ordinary = (value > 0.0) & (value < float("inf"))
    if RULE.by_logarithm:
        power = _power_of(tl.ceil(tl.log2(tl.where(ordinary, value, 1.0))).to(tl.int32))
    else:
        power = ((value.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(ordinary, power, value)


@triton.jit
def _floor_scale(bits, RULE: tl.constexpr):
    """The scale under formula ``floor``, as the biased exponent that E8M0 stores, and the factor."""
    exponent = tl.maximum((bits >> 23) - RULE.top_exponent, 0)
    # The smallest scale is a subnormal; its factor is that of the next.
    factor = ((254 - tl.maximum(exponent, 1)) << 23).to(tl.float32, bitcast=True)
    nan = bits > 0x7F800000
    return tl.where(nan, 255, exponent), tl.where(nan, 0.0, factor)


@triton.jit
def _rceil_scale(amax, RULE: tl.constexpr):
    """The scale under formula ``rceil``, as the biased exponent that E8M0 stores, and the factor."""
    scale = tl.div_rn(amax, tl.zeros_like(amax) + RULE.top)
    if RULE.by_logarithm:
        ordinary = (scale > 0.0) & (scale < float("inf"))
        exponent = tl.ceil(tl.log2(tl.where(ordinary, scale, 1.0)))
        exponent = tl.minimum(tl.maximum(exponent, -127.0), 127.0).to(tl.int32) + 127
        exponent = tl.where(scale > 0.0, tl.where(ordinary, exponent, 254), 0)
    else:
        bits = scale.to(tl.int32, bitcast=True)
        subnormal = tl.where(bits > 0x400000, 1, 0)
        exponent = tl.minimum(tl.where(bits < 0x800000, subnormal, (bits + 0x7FFFFF) >> 23), 254)
    factor = tl.where(exponent == 254, 0x400000, (254 - exponent) << 23).to(tl.float32, bitcast=True)
    factor = tl.where(exponent == 0, 1.0, factor)
    return tl.where(amax == amax, exponent, 255), tl.where(amax == amax, factor, amax)


@triton.jit
def scale_of(bits, RULE: tl.constexpr):
    """The scale of what has the largest magnitude ``bits``, and the factor or, under ``quotient``, the scale again."""
    amax = bits.to(tl.float32, bitcast=True)
    if RULE.formula == "multiplier":
        small = amax < RULE.floor
        factor = tl.div_rn(tl.zeros_like(amax) + RULE.top, tl.where(small, 1.0, amax))
        factor = tl.where(small, RULE.most, factor)
        if RULE.power_of_2:
            factor = _power_below(factor, RULE)
        scale = tl.div_rn(tl.zeros_like(factor) + 1.0, factor)
    elif RULE.formula == "floor":
        scale, factor = _floor_scale(bits, RULE)
    elif RULE.formula == "rceil":
        scale, factor = _rceil_scale(amax, RULE)
    else:
        amax = tl.where(amax < RULE.floor, RULE.floor, amax) if RULE.formula == "reciprocal" else amax + RULE.floor
        scale = tl.div_rn(amax, tl.zeros_like(amax) + RULE.top)
        if RULE.power_of_2:
            scale = _power_above(scale, RULE)
        factor = tl.div_rn(tl.zeros_like(scale) + 1.0, scale) if RULE.formula == "reciprocal" else scale
    return scale, factor


@triton.jit
def codes_of(values, factor, dtype: tl.constexpr, RULE: tl.constexpr):
    """The codes of values, saturated; a NaN stays one. ``factor`` is ``scale_of``'s and broadcasts."""
    scaled = tl.div_rn(values, factor + tl.zeros_like(values)) if RULE.formula == "quotient" else values * factor
    return _rounded_by_hand(scaled, dtype, RULE.top) if interpreted else _rounded_by_instruction(scaled, dtype)


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
def store_scales(memory, row, group, scale, rows, groups, RULE: tl.constexpr):
    """Write scales of rows ``row`` [R] and groups ``group`` [G], of which there are ``rows`` and ``groups`` in all.

    Swizzled ones are written with their padding, for which the scale must be there, and 0.
    """
    ptr, row_stride, group_stride = memory
    if RULE.swizzled:
        blocks = tl.cdiv(groups, 4)
        block = (row // 128)[:, None] * blocks + (group // 4)[None, :]
        within = (row % 32)[:, None] * 16 + (row % 128 // 32)[:, None] * 4 + (group % 4)[None, :]
        inside = (row < tl.cdiv(rows, 128) * 128)[:, None] & (group < blocks * 4)[None, :]
        tl.store(ptr + block * 512 + within, scale.to(tl.uint8), mask=inside)
    else:
        inside = (row < rows)[:, None] & (group < groups)[None, :]
        tl.store(ptr + row[:, None] * row_stride + group[None, :] * group_stride, scale, mask=inside)
