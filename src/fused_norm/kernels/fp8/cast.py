"""The casts to FP8 and back in plain PyTorch: the truth in tests, and the path of tensors that no kernel runs on.

``lines`` are what scales are shared along, [L, K]: the rows of a tensor, its columns, or all of it as one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .formats import INPUT_GROUP, FP8Format, check_format, empty_scale, format_of
from .quantized import Quantized, placeholder_of

_BIAS = 127
"""Of the exponents of fp32 and E8M0."""


def quantize(y: Tensor, fp8_format: str | FP8Format, transposed: bool = False) -> Quantized:
    """Cast to FP8 by PyTorch's own operators, on any device.

    Values beyond the largest code become it. A NaN takes with it what shares its scale, as the casts that the formats
    are named for do; zeros stay zeros.

    Args:
        y: [..., N], of any floating dtype.
        fp8_format: a format or its name, see ``FORMATS``.
        transposed: y's codes transposed as well, for formats with one scale a tensor.

    Returns:
        Codes and scales; its placeholder hands gradients straight to y.

    Raises:
        TypeError: for a dtype that is not floating point, and for a ``transposed`` that is no bool.
        ValueError: for an unknown format, for groups that do not divide a row, and for the transpose of codes that
            share their scale along a row.
    """
    fp8_format = format_of(fp8_format)
    if not y.is_floating_point() or y.dim() == 0:
        raise TypeError(f"quantize: y must be floating point of one dimension and more, not {y.dtype} {tuple(y.shape)}")
    check_format("quantize", fp8_format, y.shape[-1], transposed)
    with torch.no_grad():
        q, scale, turned = cast(y.detach(), fp8_format, transposed)
    return Quantized(q, scale, fp8_format, placeholder_of(y), turned)


def dequantize(codes: Quantized) -> Tensor:
    """The numbers that codes and scales stand for: fp32, contiguous, in the shape of ``codes.q``; no gradient."""
    fp8_format, q = codes.fp8_format, codes.q.detach()
    values = q.to(torch.float32)
    if fp8_format.whole:
        return (values * codes.scale).contiguous()
    lines = values.t() if fp8_format.over_rows else values.reshape(math.prod(q.shape[:-1]), q.shape[-1])
    group = fp8_format.group or lines.shape[1]
    groups = -(-lines.shape[1] // group) if fp8_format.group else 1
    if fp8_format.swizzled:
        scale = _unswizzled(codes.scale, lines.shape[0], groups).to(torch.float32)
    else:
        scale = codes.scale.t() if fp8_format.over_rows else codes.scale.reshape(lines.shape[0], groups)
    lines = lines * scale.repeat_interleave(group, dim=1)[:, : lines.shape[1]]
    return lines.t().contiguous() if fp8_format.over_rows else lines.reshape(q.shape)


def numbers_of(codes: Tensor, scale: Tensor) -> Tensor:
    """The products of codes [..., N] and their scales [..., N / 16], in fp32."""
    grouped = codes.detach().to(torch.float32).unflatten(-1, (-1, INPUT_GROUP))
    return (grouped * scale.detach().to(torch.float32).unsqueeze(-1)).flatten(-2)


def cast(y: Tensor, fp8_format: FP8Format, transposed: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scales and, if asked for, transposed codes of good arguments."""
    rows, width = math.prod(y.shape[:-1]), y.shape[-1]
    lines = y.reshape(rows, width)
    if fp8_format.over_rows:
        lines = lines.t()
    elif fp8_format.whole:
        lines = y.reshape(1, -1)
    count, length = lines.shape
    group = fp8_format.group or length
    groups = -(-length // group) if fp8_format.group else 1
    padded = torch.nn.functional.pad(lines, (0, groups * group - length))
    grouped = padded.reshape(count, groups, group)
    # The largest magnitudes; 0 of nothing, NaN where there is one.
    amax = grouped.abs().amax(-1, keepdim=True) if group else grouped.new_zeros(count, groups, 1)
    q, scales = cast_groups(grouped, amax, fp8_format)
    q, scales = q.reshape(count, groups * group)[:, :length].contiguous(), scales.squeeze(-1)
    scale = empty_scale(y, y.shape[:-1], width, fp8_format)
    if fp8_format.swizzled:
        scale = swizzled(scales)
    else:
        scale.copy_(scales.t() if fp8_format.over_rows else scales.reshape(scale.shape))
    q = q.t() if fp8_format.over_rows else q.reshape(y.shape)
    return q, scale, q.reshape(rows, width).t().contiguous() if transposed else None


def swizzled(scale: Tensor) -> Tensor:
    """E8M0 scales [L, G] in blocks of 32 by 16, see ``FP8Format``."""
    lines, groups = scale.shape
    blocks = -(-lines // 128), -(-groups // 4)
    padded = torch.zeros(128 * blocks[0], 4 * blocks[1], dtype=torch.uint8, device=scale.device)
    padded[:lines, :groups] = scale.view(torch.uint8)
    tiles = padded.reshape(blocks[0], 4, 32, blocks[1], 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(32 * blocks[0], 16 * blocks[1]).view(torch.float8_e8m0fnu)


def _unswizzled(scale: Tensor, lines: int, groups: int) -> Tensor:
    blocks = -(-lines // 128), -(-groups // 4)
    tiles = scale.view(torch.uint8).reshape(blocks[0], blocks[1], 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(128 * blocks[0], 4 * blocks[1])[:lines, :groups].contiguous().view(torch.float8_e8m0fnu)


def cast_groups(values: Tensor, amax: Tensor, fp8_format: FP8Format) -> tuple[Tensor, Tensor]:
    """The codes of values and their scales, given the magnitudes that scales are for, which broadcast against them."""
    top, formula = fp8_format.top, fp8_format.formula
    values, amax = values.to(torch.float32), amax.to(torch.float32)
    if formula == "multiplier":
        multiplier = (top / amax.to(torch.float64).clamp(min=fp8_format.floor)).to(torch.float32)
        if fp8_format.power_of_2:
            multiplier = torch.exp2(torch.floor(torch.log2(multiplier)))
        scaled, scale = values * multiplier, 1.0 / multiplier
    elif formula in ("reciprocal", "quotient"):
        scale = _quotient(amax.clamp(min=fp8_format.floor) if formula == "reciprocal" else amax + fp8_format.floor, top)
        if fp8_format.power_of_2:
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        scaled = values * (1.0 / scale) if formula == "reciprocal" else values / scale
    else:
        exponent, factor = _power_of_2(amax, fp8_format)
        scaled, scale = values * factor, exponent.to(torch.uint8).view(torch.float8_e8m0fnu)
    # A cast by itself saturates in some releases of PyTorch, and makes NaN in others.
    return scaled.clamp(-top, top).to(fp8_format.dtype), scale


def _power_of_2(amax: Tensor, fp8_format: FP8Format) -> tuple[Tensor, Tensor]:
    """The biased exponents of E8M0 scales, 255 for NaN, and what values are multiplied by."""
    if fp8_format.formula == "floor":
        exponent = ((amax.view(torch.int32) >> 23) - fp8_format.top_exponent).clamp(min=0)
        # The factor of the smallest scale, a subnormal, is that of the next; zeros alone have it, and less than top.
        factor = torch.exp2(_BIAS - exponent.clamp(min=1).to(torch.float32))
        exponent = torch.where(amax.isnan(), 255, exponent)
        return exponent, torch.where(amax.isnan(), 0.0, factor)
    scale = _quotient(amax, fp8_format.top)
    exponent = torch.ceil(torch.log2(scale)).clamp(-_BIAS, _BIAS) + _BIAS
    exponent = torch.where(amax.isnan(), 255.0, torch.where(scale.isinf(), 254.0, exponent))
    factor = torch.where(exponent == 0, 1.0, torch.exp2(_BIAS - exponent))
    return exponent, torch.where(amax.isnan(), amax, factor)


def _quotient(values: Tensor, divisor: float) -> Tensor:
    """A division that is rounded once: on CUDA PyTorch's own, by a number, multiplies by the reciprocal of it."""
    return values / torch.full((), divisor, dtype=values.dtype, device=values.device)
