"""Norms that write FP8, for linears that read it, and norms that read FP8: the only file that knows of it.

From top to bottom: formats as data, the casts in plain PyTorch, Triton kernels and their launchers, the operator, and
the public functions. A format says what shares a scale, how the scale is computed, and how scales lie in memory. The
casts are the truth in tests, and the path of tensors that no kernel runs on.

The first kernel reads whole rows, normalises them and writes their codes. If the tensor has one scale, it can only look
for the largest magnitude of all: the second kernel then computes tiles of the norm once more, from the rstd of its
rows, and casts these. Norms of codes keep the codes, which their backward reads; rows that are too wide for its kernel
become numbers first, whose backward is that of other norms.

To the alphabet of ``triton.language`` come ``q`` (codes), ``bits`` (the bits of an fp32 magnitude: as integers they are
ordered as the magnitudes are, and a NaN is above all of them), ``factor`` (what values are multiplied by to become
codes), FORMAT, an ``FP8Format``, and Y, the dtype of the values that are cast.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..spec import Casting, NormSpec
from . import reference
from .arguments import KERNEL_DTYPES, Unsupported, check_rows, check_scale, check_tensor
from .backward import BackwardArguments, BackwardImpl, Grads, KernelBackward, Scalars, Tensors
from .norm import ADD_RMS_NORM
from .norm_kernels import FROM_RSTD_TILE, WIDEST_BACKWARD, WIDEST_FORWARD, add_rounded, backward_plan, forward_plan
from .norm_spec import norm_spec
from .operator import Operator, Results
from .plans import next_power_of_2, tile_plan
from .triton.call import Call
from .triton.devices import device_props, is_transformed
from .triton.language import (
    TRITON_DTYPES,
    columns_of,
    input_grad,
    interpreted,
    let_next_begin,
    load_gamma,
    load_tile,
    normalised,
    round_to,
    rows_of,
    rstd_of,
    store_tile,
)
from .triton.memory import INT32_LIMIT, bytes_of, norm_dtype, promoted
from .triton.weight_grad import empty_partials, reduce_partials

__all__ = ["FORMATS", "FP8Format", "Quantized", "add_rms_norm_fp8", "dequantize", "quantize", "rms_norm_fp8"]

logger = logging.getLogger("fused_norm")

FP8_DTYPE = torch.float8_e4m3fn
"""The dtype of all codes that are written."""

input_group = tl.constexpr(16)
"""Columns that share a scale, if a norm reads codes."""


@dataclass(frozen=True)
class FP8Format:
    """A way to make e4m3 codes of a tensor y [M, N], and scales that turn the codes into numbers again.

    Attributes:
        group: neighbours in a row that share a scale; 0 is a whole row, None the whole tensor.
        formula: how the scale comes from the largest magnitude ``amax``; ``top`` is the largest number that is a code:

            - ``multiplier``: codes are of ``y * m`` with ``m = top / max(amax, floor)``, rounded once from its exact
              value; the scale is ``1 / m``, fp32 (torchao);
            - ``quotient``: the scale is ``(amax + floor) / top``, fp32, and codes are of ``y / scale`` (COAT);
            - ``floor``: the scale is the largest power of two not above amax, divided by the one not above top, as
              E8M0 (Open Compute's MX formats, 6.3).
        power_of_2: the multiplier is rounded down to a power of two.
        floor: what amax is at least, or what is added to it.
        scale_layout: how the scales of groups lie in memory. ``rows``: [..., N / group], as y itself. ``columns``:
            [M, N / group] with neighbours in a column beside each other. ``swizzled``, of E8M0 scales: for each 128
            rows and 4 groups a block of 32 by 16, in which row r and group g are at ``(r % 32, r // 32 * 4 + g)``;
            padded with zeros, in the order that scaled products of sm_100 read.
    """

    group: int | None
    formula: Literal["multiplier", "quotient", "floor"] = "multiplier"
    power_of_2: bool = False
    floor: float = 1e-12
    scale_layout: Literal["rows", "columns", "swizzled"] = "rows"
    top: ClassVar[float] = torch.finfo(FP8_DTYPE).max
    """The largest number that is a code."""
    top_exponent: ClassVar[int] = int(math.log2(top))
    """The exponent of the largest power of two not above ``top``."""

    @property
    def swizzled(self) -> bool:
        """Scales are E8M0 bytes in the order that scaled products of sm_100 read."""
        return self.scale_layout == "swizzled"

    @property
    def fp32_floor(self) -> float:
        """The smallest fp32 amax that ``floor`` does not raise; what is added to amax under ``quotient``."""
        floor = np.float32(self.floor)
        if self.formula == "multiplier" and float(floor) < self.floor:  # which PyTorch compares in fp64
            floor = np.nextafter(floor, np.float32(1))
        return float(floor)


FORMATS: dict[str, FP8Format] = {
    # torchao's and torch's scaled products'
    "tensorwise": FP8Format(None),
    "rowwise": FP8Format(0, power_of_2=True),
    "block128": FP8Format(128, scale_layout="columns"),
    "mxfp8": FP8Format(32, formula="floor", floor=0.0, scale_layout="swizzled"),
    # COAT's: what linears read, and what norms read and keep
    "coat": FP8Format(None, formula="quotient", floor=1e-10),
    "coat_input": FP8Format(input_group.value, formula="quotient", floor=1e-10),
}
"""The formats by name."""


@dataclass(frozen=True)
class Quantized:
    """A tensor y [..., N] as FP8 codes and scales; M is the number of its rows, over all leading dimensions.

    Attributes:
        q: the codes, contiguous in y's shape.
        scale: the multiplier that turns codes into numbers again. fp32: [] of a tensor, [..., 1] of rows, and of groups
            as the format lays them out: [..., N / group], or [M, N / group] with strides (1, M). E8M0 and swizzled:
            [32 * ceil(M / 128), 16 * ceil(N / group / 4)].
        fp8_format: the format of both.
        placeholder: a tensor of y's shape and dtype without storage of its own, one NaN expanded. It is y's place in
            autograd's graph: code that reads the codes gives it the gradient of y, because codes can carry none. Under
            transforms of ``torch.func`` it is y. None if nothing can be differentiated.
        rstd: fp32 [..., 1] if y is the output of a norm, which can be computed again from it.
    """

    q: Tensor
    scale: Tensor
    fp8_format: FP8Format
    placeholder: Tensor | None = None
    rstd: Tensor | None = None


def name_of_format(fp8_format: str | FP8Format) -> str:
    """The name of a format or of its name.

    Raises:
        ValueError: for anything that is not in ``FORMATS``.
    """
    for name, known in FORMATS.items():
        if fp8_format == (known if isinstance(fp8_format, FP8Format) else name):
            return name
    raise ValueError(f"fp8_format must be one of {', '.join(FORMATS)}, not {fp8_format!r}")


def check_width(fp8_format: FP8Format, width: int) -> Unsupported | None:
    """Refuse a format whose groups do not divide rows of ``width`` elements."""
    if not fp8_format.group or width % fp8_format.group == 0:
        return None
    return Unsupported(
        f"rows of {width} elements cannot be divided into groups of {fp8_format.group}; take a format with a scale for"
        " each row or for the tensor",
        ValueError,
    )


def empty_scale(like: Tensor, leading: Sequence[int], width: int, fp8_format: FP8Format) -> Tensor:
    """The scales of codes [*leading, width] on the device of ``like``, not yet written.

    Padding that kernels do not write is zero.
    """
    if fp8_format.group is None:
        return like.new_empty((), dtype=torch.float32)
    rows, groups = math.prod(leading), width // fp8_format.group if fp8_format.group else 1
    if fp8_format.swizzled:
        # The tile of a row shorter than a block of four groups is as short.
        new: Any = like.new_zeros if groups < 4 else like.new_empty
        scale: Tensor = new((32 * -(-rows // 128), 16 * -(-groups // 4)), dtype=torch.uint8)
        return scale.view(torch.float8_e8m0fnu)
    if fp8_format.scale_layout == "columns":
        return like.new_empty((groups, rows), dtype=torch.float32).t()
    return like.new_empty((*leading, groups), dtype=torch.float32)


def _placeholder_of(y: Tensor) -> Tensor:
    """A placeholder that hands its gradient to y; under transforms, which look at its numbers, y itself."""
    return y if is_transformed() else reference.with_gradient_to(y.new_full((), float("nan")).expand(y.shape), y)


def numbers_of(codes: Tensor, scale: Tensor) -> Tensor:
    """The products of a norm's input codes [..., N] and their scales [..., N / 16], in fp32."""
    return dequantize(Quantized(codes, scale, FORMATS["coat_input"]))


def cast(y: Tensor, fp8_format: FP8Format) -> tuple[Tensor, Tensor]:
    """Codes and scales by PyTorch's operators, for arguments that were checked."""
    top, formula, scale = fp8_format.top, fp8_format.formula, empty_scale(y, y.shape[:-1], y.shape[-1], fp8_format)
    values = _grouped(y.to(torch.float32), fp8_format)
    lines, groups, size = values.shape
    # The largest magnitudes; 0 of nothing, NaN if there is one.
    amax = values.abs().amax(-1, keepdim=True) if size else values.new_zeros(lines, groups, 1)
    if formula == "multiplier":
        multiplier = (top / amax.to(torch.float64).clamp(min=fp8_format.floor)).to(torch.float32)
        if fp8_format.power_of_2:
            multiplier = torch.exp2(torch.floor(torch.log2(multiplier)))
        scaled, scales = values * multiplier, 1.0 / multiplier
    elif formula == "quotient":
        # A division that is rounded once: on CUDA PyTorch's own, by a number, multiplies by the reciprocal of it.
        scales = (amax + fp8_format.floor) / torch.full((), top, dtype=amax.dtype, device=amax.device)
        scaled = values / scales
    else:
        exponent = ((amax.view(torch.int32) >> 23) - fp8_format.top_exponent).clamp(min=0).to(torch.float32)
        factor = torch.where(exponent == 0, 2.0**126, torch.exp2(127 - exponent))
        scaled = values * torch.where(amax.isnan(), 0.0, factor)
        scales = torch.where(amax.isnan(), 255.0, exponent).to(torch.uint8)
    if fp8_format.swizzled:
        padded = scales.new_zeros(-(-lines // 128) * 128, -(-groups // 4) * 4)
        padded[:lines, :groups] = scales[..., 0]
        tiles = _in_tiles(scale)
        tiles.copy_(padded.view(tiles.shape))
    else:
        scale.copy_(scales.view(scale.shape))
    # A plain cast saturates in some releases of PyTorch, and makes NaN in others.
    return scaled.clamp(-top, top).to(FP8_DTYPE).view(y.shape), scale


def _grouped(values: Tensor, fp8_format: FP8Format) -> Tensor:
    """A tensor's numbers [L, G, K]: its rows, or all of it as one row, each in groups of K that share a scale."""
    rows, width = math.prod(values.shape[:-1]), values.shape[-1]
    if fp8_format.group is None:
        return values.reshape(1, 1, rows * width)
    return values.reshape(rows, width // fp8_format.group if fp8_format.group else 1, fp8_format.group or width)


def _in_tiles(scale: Tensor) -> Tensor:
    """Swizzled scales as bytes [row blocks, 4, 32, blocks of groups, 4], which is their order in rows of groups."""
    rows, groups = scale.shape
    return scale.view(torch.uint8).reshape(rows // 32, groups // 16, 32, 4, 4).permute(0, 3, 2, 1, 4)


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


@triton.jit
def values_of(codes, dtype: tl.constexpr):
    """The fp32 numbers of FP8 codes; Triton's interpreter, whose own cast knows no subnormal codes, sees fp16 ones."""
    if interpreted:
        code = codes.to(tl.uint8, bitcast=True).to(tl.int32)
        bits = ((code & 0x80) << 8) | ((code & 0x7F) << (10 - dtype.fp_mantissa_width))
        values = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 2.0 ** (15 - dtype.exponent_bias)
        values = tl.where((code & 0x7F) == 0x7F, float("nan"), values)
    else:
        values = codes.to(tl.float32)
    return values


@triton.jit
def load_input(memory, scales, row, col, live, block, M, N: tl.constexpr):
    """A tile as ``load_tile`` gives it or, if there are ``scales``, of FP8 codes times scales.

    ``block``: the number of the tile among those of its rows, from the left.
    """
    ptr, stride = memory
    scale_ptr, scale_stride = scales
    values = tl.load(ptr + row[:, None] * stride + col[None, :], mask=live, other=0.0)
    if scale_ptr is None:
        values = values.to(tl.float32)
    else:
        GROUPS: tl.constexpr = values.shape[1] // input_group
        group = block * GROUPS + tl.arange(0, GROUPS)
        inside = (row < M)[:, None] & (group < N // input_group)[None, :]
        scale = tl.load(scale_ptr + row[:, None] * scale_stride + group[None, :], mask=inside, other=0.0)
        grouped = tl.reshape(values_of(values, ptr.dtype.element_ty), [values.shape[0], GROUPS, input_group])
        values = tl.reshape(grouped * scale.to(tl.float32)[:, :, None], values.shape)
    return values


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


@triton.jit(do_not_specialize=["M"])
def _dequantize_kernel(
    codes_ptr,  # [M, N]
    scale_ptr,  # [M, N / 16]
    numbers_ptr,  # [M, N] fp32
    M,
    codes_stride, scale_stride, numbers_stride,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """Codes times scales; programs are tiles of rows along the grid's first axis, blocks of columns along the other."""
    row, block = rows_of(tl.program_id(0), ROWS, INT64), tl.program_id(1)
    col = block * BLOCK + tl.arange(0, BLOCK)
    live = (row < M)[:, None] & (col < N)[None, :]
    numbers = load_input((codes_ptr, codes_stride), (scale_ptr, scale_stride), row, col, live, block, M, N)
    store_tile((numbers_ptr, numbers_stride), row, col, live, numbers)


def launch_dequantize(call: Call, codes: Tensor, scale: Tensor, numbers: Tensor) -> None:
    """Write the products of a norm's input codes [..., N] and their scales [..., N / 16] to ``numbers``, fp32."""
    rows, width = math.prod(codes.shape[:-1]), codes.shape[-1]
    if codes.numel() == 0:
        return
    tensors, strides = call.as_strided_rows(codes, scale, numbers)
    plan = tile_plan(FROM_RSTD_TILE, width, device_props(codes.device))
    constants = {"N": width, "ROWS": plan.rows, "BLOCK": plan.block, "INT64": rows * max(strides) >= INT32_LIMIT}
    grid = -(-rows // plan.rows), -(-width // plan.block)
    call.launch(_dequantize_kernel, grid, tuple(tensors), (rows, *strides), constants, warps=plan.warps)


def launch_norm_fp8(call: Call, arguments: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Write the ``outputs`` of the operator, for its ``arguments``: rows of up to ``WIDEST_FORWARD`` elements."""
    x, residual, weight, codes, codes_scale, spec, scale, name = arguments
    q, scales, placeholder, s, rstd = outputs
    fp8_format, rows, width, device = FORMATS[name], rstd.numel(), q.shape[-1], device_props(q.device)
    dtypes = (x if s is None else s).dtype, placeholder.dtype
    # What a placeholder stands for is in its codes.
    arranged, spacing = call.as_strided_rows(q, x if codes is None else codes, codes_scale, residual, s, rstd)
    _, x, codes_scale, residual, s, rstd = arranged
    weight = call.contiguous(weight)
    constants: dict[str, Any] = {"N": width, "SPEC": spec.without_eps(), "FORMAT": fp8_format}
    constants |= {"S": TRITON_DTYPES[dtypes[0]], "Y": TRITON_DTYPES[dtypes[1]]}
    amax = used = None
    if fp8_format.group is None:
        amax = call.empty(q, (1,), torch.int32)
        call.zero(amax)
        used = call.empty(q, (rows,), dtype=torch.float32) if spec.casting == "none" else None
    # The plan of the 16-bit norm, whose rows are summed in the same order.
    plan = forward_plan(width, device, "multi_wave_cached")
    in_bytes = scales.view(torch.uint8) if fp8_format.swizzled else scales
    codes_out = (q, in_bytes) if amax is None else (None, None)
    scale_strides = scales.stride()[-2:] if scales.dim() > 1 else (1, 1)
    padded = 128 * -(-rows // 128) if fp8_format.swizzled else rows
    whole_rows = {"ROWS": plan.rows, "BLOCK": plan.block, "INT64": max(rows, 128) * max(spacing) >= INT32_LIMIT}
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
    if amax is not None:
        total, stride = (x, spacing[1]) if s is None else (s, spacing[4])
        tensors = total, codes_scale, weight, rstd if used is None else used, amax, q, scales
        tile = tile_plan(FROM_RSTD_TILE, width, device)
        blocks = -(-width // tile.block)
        tiles = {"ROWS": tile.rows, "BLOCK": tile.block, "BLOCKS": blocks}
        tiles["INT64"] = rows * max(stride, spacing[2], width) >= INT32_LIMIT
        grid, numbers = (-(-rows // tile.rows) * blocks, 1), (rows, stride, spacing[2], width)
        call.launch(_cast_kernel, grid, tensors, numbers, constants | tiles, warps=tile.warps)


@triton.jit(do_not_specialize=["M"])
def _codes_backward_kernel(
    dy_ptr,  # [M, N]
    codes_ptr,  # [M, N]
    scale_ptr,  # [M, N / 16]
    w_ptr,  # [N] or None
    rstd_ptr,  # [M] fp32
    dx_ptr,  # [M, N] or None
    partials_ptr,  # [programs, N] fp32 or None: each program's partial dw
    M,
    dy_stride, dx_stride, codes_stride, scale_stride,  # in another order 16384 columns spill more
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
    INT64: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """The backward of a norm of codes: that of a norm of their numbers, which are not in memory."""
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    in_row = col < N
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(program, tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = rows_of(tile, ROWS, INT64)
        live = (row < M)[:, None] & in_row[None, :]
        s = load_input((codes_ptr, codes_stride), (scale_ptr, scale_stride), row, col, live, 0, M, N)
        dy = load_tile((dy_ptr, dy_stride), row, col, live)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
        if partials_ptr is not None:
            dw += dy * (s * rstd)
        if dx_ptr is not None:
            g = dy
            if w_ptr is not None:
                g = dy * load_gamma(w_ptr, col, in_row, SPEC)
            store_tile((dx_ptr, dx_stride), row, col, live, input_grad(g, s, rstd, N))
    let_next_begin(OVERLAPS)
    if partials_ptr is not None:
        tl.store(partials_ptr + program.to(tl.int64) * N + col, tl.sum(dw, axis=0), mask=in_row)


def launch_codes_backward(
    call: Call, spec: NormSpec, saved: Sequence[Any], dy: Tensor, dx: Tensor | None, dw: Tensor | None
) -> None:
    """Write dx and dw, if they are not None, for rows of up to ``WIDEST_BACKWARD`` elements.

    ``saved``: codes, their scales, the weight or None, and rstd, as the operator saves them.
    """
    codes, codes_scale, weight, rstd = saved
    rows, width, device = rstd.numel(), codes.shape[-1], device_props(codes.device)
    arranged, spacing = call.as_strided_rows(codes, dy, codes_scale, rstd, dx)
    codes, in_dy, codes_scale, rstd, dx = arranged
    weight = call.contiguous(weight)
    # Scales are one more tensor in flight, as the gradient of a residual is.
    plan = backward_plan(width, bytes_of(codes, in_dy, weight), device, "add_backward")
    programs = -(-rows // plan.rows)
    programs = programs if dw is None else min(programs, plan.programs)
    partials = empty_partials(call, programs, dw)
    constants: dict[str, Any] = {"N": width, "ROWS": plan.rows, "STAGES": plan.stages}
    constants["BLOCK"] = next_power_of_2(width)  # one piece, also if the plan has two
    constants |= {"OVERLAPS": partials is not None and device.overlaps, "INT64": rows * max(spacing) >= INT32_LIMIT}
    constants["SPEC"] = spec.without_eps()
    tensors = in_dy, codes, codes_scale, weight, rstd, dx, partials
    numbers = rows, spacing[1], spacing[4], spacing[0], spacing[2]
    call.launch(_codes_backward_kernel, (programs, 1), tensors, numbers, constants, warps=plan.warps)
    if partials is not None:
        reduce_partials(call, partials, dw, None, programs, plan.programs, device)


@lru_cache(maxsize=64)
def _casts_to_fp8(device: torch.device) -> bool:
    """Return whether Triton casts to E4M3: on NVIDIA's GPUs from capability 8.9 on; it is not known to elsewhere."""
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9):
        return True
    if not torch.compiler.is_compiling():
        logger.warning("norms give FP8 by PyTorch's operators on %s, where Triton is not known to cast to it", device)
    return False


class NormFP8(Operator):
    """``rms_norm_fp8`` and ``add_rms_norm_fp8`` as an operator; if there are codes, x is their placeholder.

    Its last option is the name of the format.
    """

    name = "norm_fp8"
    tensors = "Tensor x, Tensor? residual, Tensor? weight, Tensor? codes, Tensor? codes_scale"
    options = "NormSpec spec, float scale, str fp8_format"
    outputs = ("q", "scale", "placeholder", "s", "rstd")
    not_differentiable = ("q", "scale", "rstd")
    same_shape = ("residual",)
    other_rules = ("codes", "codes_scale")
    saved = "Tensor s, Tensor? codes_scale, Tensor? weight, Tensor rstd"
    saved_scalars = f"{ADD_RMS_NORM.saved_scalars}, bool added"
    gradients = ("dx", "dr", "dw")

    def public_name(self, *arguments: Any) -> str:
        return "rms_norm_fp8" if arguments[1] is None else "add_rms_norm_fp8"

    def check_options(self, *arguments: Any) -> Unsupported | None:
        x, _, _, codes, codes_scale, spec, scale, name = arguments
        refusal = None if codes is None else _check_codes(spec, x, codes, codes_scale)
        return refusal or check_width(FORMATS[name], x.shape[-1]) or check_scale(scale)

    def why_reference_only(self, *arguments: Any) -> Unsupported | None:
        x, codes = arguments[0], arguments[3]
        if codes is not None and codes.dtype not in (FP8_DTYPE, torch.float8_e5m2):
            return Unsupported(f"the codes of x are {codes.dtype}")
        casts = x.device.type in ("cpu", "meta") or _casts_to_fp8(x.device)
        fits = casts and x.numel() > 0 and x.shape[-1] <= WIDEST_FORWARD
        return None if fits else Unsupported("its rows are none of kernels")

    def reference(self, *arguments: Any) -> tuple[Any, ...]:
        x, residual, weight, codes, codes_scale, spec, scale, name = arguments
        if residual is None:
            total = x if codes is None else reference.with_gradient_to(numbers_of(codes, codes_scale), x)
            y, s = reference.rms_norm(spec, total, weight, dtype=x.dtype), None
        else:
            y, total = ADD_RMS_NORM.reference(x, residual, weight, spec, None, scale)
            s = total.contiguous()
        with torch.no_grad():
            q, scales = cast(y.detach(), FORMATS[name])
            wide = reference.widened(total.detach())
            rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + spec.eps).to(torch.float32)
        return q, scales, _placeholder_of(y), s, rstd

    def forward(self, call: Call, *arguments: Any, training: bool) -> Results:
        """Rows are counted, and lie, in the order of x's dimensions."""
        x, residual, weight, _, _, spec, _, name = arguments
        *leading, width = x.shape
        s = None if residual is None else call.empty(x, x.shape, dtype=promoted(x.dtype, residual.dtype))
        dtype = norm_dtype(spec, (x if s is None else s).dtype, weight)
        outputs = (
            call.empty(x, x.shape, dtype=FP8_DTYPE),
            empty_scale(x, leading, width, FORMATS[name]),
            call.empty(x, (), dtype=dtype).expand(x.shape),
            s,
            call.empty(x, (*leading, 1), dtype=torch.float32),
        )
        call.then(launch_norm_fp8, arguments, outputs)
        return outputs

    def save(self, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[Tensors, Scalars]:
        x, residual, weight, codes, codes_scale, spec, scale, _ = arguments
        s, rstd = results[3:]
        added = residual is not None
        if not added:
            s, residual = x if codes is None else codes, x
        return (s, codes_scale, weight, rstd), (spec, x.dtype, residual.dtype, scale, added)

    def saves_input(self, name: str, tensors: Tensors) -> bool:
        _, residual, _, codes, _ = tensors
        s = "s" if residual is not None else "x" if codes is None else "codes"
        return name == s or super().saves_input(name, tensors)

    def compute_grads(self, impl: BackwardImpl, given: BackwardArguments) -> Grads:
        """The gradients of ``add_rms_norm``; of codes, those at their numbers."""
        (s, codes_scale, weight, rstd), (*scalars, added) = given.saved, given.saved_scalars
        if codes_scale is not None and isinstance(impl, KernelBackward):
            if s.shape[-1] <= WIDEST_BACKWARD:
                return _codes_backward(impl.call, given)
            codes, s = s, impl.call.empty_rows_like(s, torch.float32)
            impl.call.then(launch_dequantize, codes, codes_scale, s)
        elif codes_scale is not None:
            s = numbers_of(s, codes_scale)
        # Without a residual there is no sum, and compiled graphs give even its empty tensor a gradient.
        incoming = given.incoming[2], given.incoming[3] if added else None
        given = given._replace(incoming=incoming, saved=(s, weight, rstd), saved_scalars=tuple(scalars))
        return ADD_RMS_NORM.compute_grads(impl, given)


def _codes_backward(call: Call, given: BackwardArguments) -> Grads:
    """Allocate the gradients of a norm of codes that are needed; ``call`` launches what writes them."""
    spec, x_dtype, *_ = given.saved_scalars
    need_dx, _, need_dw = given.needed
    dx = call.empty_rows_like(given.saved[0], x_dtype) if need_dx else None
    dw = call.empty_weight_like(given.saved[2], need_dw)
    call.then(launch_codes_backward, spec, given.saved, given.incoming[2], dx, dw)
    return dx, None, dw


def _check_codes(spec: NormSpec, x: Tensor, codes: Tensor, scale: Tensor) -> Unsupported | None:
    """Refuse codes, scales and a placeholder x that no norm can read."""
    if not codes.is_floating_point() or codes.dtype.itemsize != 1:
        return Unsupported(f"the codes of x must be FP8, not {codes.dtype}", TypeError)
    group = input_group.value
    if codes.dim() == 0 or codes.shape[-1] % group:
        reason = f"the codes of x must have groups of {group}, not shape {tuple(codes.shape)}"
    elif scale.shape != (*codes.shape[:-1], codes.shape[-1] // group) or scale.dtype not in KERNEL_DTYPES:
        reason = (
            f"the scales of x must be a number for each {group} columns of its codes, whose shape is"
            f" {tuple(codes.shape)}, not {tuple(scale.shape)} of {scale.dtype}"
        )
    elif x.shape != codes.shape or x.device != codes.device or scale.device != codes.device:
        reason = "placeholder and scales of x must go with its codes, in shape and device"
    elif spec.casting == "none":
        reason = "casting 'none' rounds all it computes to x's dtype, which codes have not"
    else:
        return None
    return Unsupported(reason, ValueError)


NORM_FP8 = NormFP8()


def quantize(y: Tensor, fp8_format: str | FP8Format) -> Quantized:
    """Cast to FP8 by PyTorch's own operators, on any device.

    Values beyond the largest code become it. A NaN makes NaN of all that shares its scale, as in the casts that the
    formats are named for; zeros stay zeros.

    Args:
        y: [..., N], float32, bfloat16, float16 or float64.
        fp8_format: a format of ``FORMATS`` or its name.

    Returns:
        Codes and scales; its placeholder hands gradients straight to y.

    Raises:
        TypeError: for anything but a dense tensor of these dtypes.
        ValueError: for an unknown format, for a tensor without dimensions, and for groups that do not divide a row.
    """
    fp8_format = FORMATS[name_of_format(fp8_format)]
    refusal = check_tensor("y", y) or check_rows("y", y) or check_width(fp8_format, y.shape[-1])
    if refusal is not None and refusal.error is not None:
        raise refusal.error(f"quantize: {refusal.reason}")
    with torch.no_grad():
        q, scale = cast(y.detach(), fp8_format)
    return Quantized(q, scale, fp8_format, _placeholder_of(y))


def dequantize(codes: Quantized) -> Tensor:
    """The numbers that codes and scales stand for: fp32, contiguous, in the shape of ``codes.q``; no gradient.

    Raises:
        TypeError: for anything but ``Quantized``.
    """
    if not isinstance(codes, Quantized):
        raise TypeError(f"dequantize: codes must be Quantized, not {type(codes).__name__}")
    scale, values = codes.scale.detach(), _grouped(codes.q.detach().to(torch.float32), codes.fp8_format)
    lines, groups, _ = values.shape
    if codes.fp8_format.swizzled:
        rows = _in_tiles(scale).flatten(0, 2).flatten(1)[:lines, :groups]
        scale = rows.contiguous().view(torch.float8_e8m0fnu)
    return (values * scale.to(torch.float32).reshape(lines, groups, 1)).reshape(codes.q.shape)


def rms_norm_fp8(
    x: Tensor | Quantized,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    fp8_format: str | FP8Format,
    casting: Casting = "llama",
    zero_centered: bool = False,
) -> Quantized:
    """RMSNorm whose result is written in FP8 alone.

    The norm is computed and rounded as ``rms_norm`` does it, and then cast: codes and scales are bit for bit those of
    ``quantize(rms_norm(x, weight, ...), fp8_format)``. The gradient goes straight through the cast. In a compiled graph
    that leaves a small call to the compiler, y is as precise as the compiler keeps it.

    Args:
        x: [..., N], dtypes and strides as in ``rms_norm``; or codes with scales in groups of 16, as ``quantize(x,
            "coat_input")`` makes them. Products of codes and scales are taken as they are, in fp32; what a casting
            rounds to x's dtype is rounded to that of x's placeholder, which gets the gradient: bfloat16 if there is
            none. COAT's norm is that with casting ``gemma``.
        weight: [N], or None.
        eps: as in ``rms_norm``; so are casting and zero_centered.
        fp8_format: a format of ``FORMATS`` or its name.
        casting: rounding points and the dtype of y.
        zero_centered: gamma is ``1 + weight``.

    Returns:
        Codes and scales of y, whose place in autograd's graph is ``placeholder``.

    Raises:
        TypeError: for a dtype that is not floating point.
        ValueError: for an unknown format or casting, for groups that do not divide a row, and as ``rms_norm`` does.
    """
    name, spec = name_of_format(fp8_format), norm_spec(casting, zero_centered, eps)
    tensors: tuple[Any, ...] = x, None, weight, None, None
    if isinstance(x, Quantized):
        for part, tensor in (("codes", x.q), ("scales", x.scale)):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"rms_norm_fp8: the {part} of x must be a tensor, not {type(tensor).__name__}")
        placeholder = (
            x.q.new_empty((), dtype=torch.bfloat16).expand(x.q.shape) if x.placeholder is None else x.placeholder
        )
        tensors = placeholder, None, weight, x.q, x.scale
    q, scales, y, _, rstd = NORM_FP8.checked(*tensors, spec, 1.0, name)
    return Quantized(q, scales, FORMATS[name], y, rstd)


def add_rms_norm_fp8(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    fp8_format: str | FP8Format,
    casting: Casting = "llama",
    zero_centered: bool = False,
    scale: float = 1.0,
) -> tuple[Quantized, Tensor]:
    """The residual add and the RMSNorm of its sum, whose result is written in FP8 alone.

    ``s = residual + x * scale`` as in ``add_rms_norm``, and the norm of that sum as in ``rms_norm_fp8``.

    Args:
        x: [..., N], the branch; dtypes and strides as in ``rms_norm``.
        residual: x's shape and device; its dtype may differ.
        weight: [N], or None.
        eps: as in ``rms_norm``, for the norm of the sum; so are casting and zero_centered.
        fp8_format: as in ``rms_norm_fp8``.
        casting: rounding points and the dtype of y.
        zero_centered: gamma is ``1 + weight``.
        scale: a Python number that the branch is multiplied by.

    Returns:
        ``(quantized, s)``: the norm and the new residual, contiguous, of the dtype that x and residual promote to.

    Raises:
        TypeError: for a dtype that is not floating point, and for a scale that is not a Python number.
        ValueError: for a residual of another shape or device, and as ``rms_norm_fp8`` does.
    """
    name, spec = name_of_format(fp8_format), norm_spec(casting, zero_centered, eps)
    if residual is None:
        raise TypeError("add_rms_norm_fp8: residual must be a tensor, not NoneType; rms_norm_fp8 takes none")
    q, scales, placeholder, s, rstd = NORM_FP8.checked(x, residual, weight, None, None, spec, scale, name)
    return Quantized(q, scales, FORMATS[name], placeholder, rstd), s
