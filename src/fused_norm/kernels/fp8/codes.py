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
from .formats import FP8_DTYPE

CODES_OF_KERNELS = (FP8_DTYPE, torch.float8_e5m2)
"""The dtypes of codes that kernels read."""

logger = logging.getLogger("fused_norm")


def runs_fp8_kernels_on(*tensors: Tensor | None) -> bool:
    """Return whether kernels take these tensors and write codes there; the PyTorch reference takes all others.

    Triton casts to E4M3 on NVIDIA's GPUs from compute capability 8.9 on, and elsewhere is not known to.
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
