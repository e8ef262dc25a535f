"""The casts to FP8 and back in plain PyTorch: the truth in tests, and the path of tensors that no kernel runs on.

``grouped`` are a tensor's numbers [L, G, K]: its rows, its columns, or all of it as one line, and of each line groups
of K that share a scale, the last of them filled up with zeros.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..arguments import wrong_rows, wrong_tensor
from .formats import FORMATS, FP8Format, empty_scale, format_of, wrong_format
from .quantized import Quantized, placeholder_of


def quantize(y: Tensor, fp8_format: str | FP8Format, transposed: bool = False) -> Quantized:
    """Cast to FP8 by PyTorch's own operators, on any device.

    Values beyond the largest code become it. A NaN takes with it what shares its scale, as the casts that the formats
    are named for do; zeros stay zeros.

    Args:
        y: [..., N], float32, bfloat16, float16 or float64.
        fp8_format: a format or its name, see ``FORMATS``.
        transposed: y's codes transposed as well, for formats with one scale a tensor.

    Returns:
        Codes and scales; its placeholder hands gradients straight to y.

    Raises:
        TypeError: for what is no dense tensor of these dtypes, and for a ``transposed`` that is no bool.
        ValueError: for an unknown format, for a tensor without dimensions, for groups that do not divide a row, and for
            the transpose of codes that share their scale along a row.
    """
    fp8_format = format_of(fp8_format)
    refusal = wrong_tensor("y", y) or wrong_rows("y", y) or wrong_format(fp8_format, y.shape[-1], transposed)
    if refusal is not None and refusal.error is not None:
        raise refusal.error(f"quantize: {refusal.reason}")
    with torch.no_grad():
        q, scale, turned = cast(y.detach(), fp8_format, transposed)
    return Quantized(q, scale, fp8_format, placeholder_of(y), turned)


def dequantize(codes: Quantized) -> Tensor:
    """The numbers that codes and scales stand for: fp32, contiguous, in the shape of ``codes.q``; no gradient.

    Raises:
        TypeError: for what is not ``Quantized``.
    """
    if not isinstance(codes, Quantized):
        raise TypeError(f"dequantize: codes must be Quantized, not {type(codes).__name__}")
    fp8_format, scale = codes.fp8_format, codes.scale.detach()
    grouped = _grouped(codes.q.detach().to(torch.float32), fp8_format)
    lines, groups, _ = grouped.shape
    if fp8_format.swizzled:
        scale = _unswizzled(scale, lines, groups)
    scale = scale.t() if fp8_format.over_rows and not fp8_format.swizzled else scale.reshape(lines, groups)
    return _ungrouped(grouped * scale.to(torch.float32)[..., None], codes.q.shape, fp8_format).contiguous()


def numbers_of(codes: Tensor, scale: Tensor) -> Tensor:
    """The products of a norm's input codes [..., N] and their scales [..., N / 16], in fp32."""
    return dequantize(Quantized(codes, scale, FORMATS["coat_input"]))


def cast(y: Tensor, fp8_format: FP8Format, transposed: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scales and, if asked for, transposed codes of good arguments."""
    grouped = _grouped(y, fp8_format)
    # The largest magnitudes; 0 of nothing, NaN where there is one.
    amax = grouped.abs().amax(-1, keepdim=True) if grouped.shape[-1] else grouped.new_zeros(*grouped.shape[:-1], 1)
    grouped, scales = cast_groups(grouped, amax, fp8_format)
    scales = scales.squeeze(-1)
    if fp8_format.swizzled:
        scale = swizzled(scales)
    else:
        scale = empty_scale(y, y.shape[:-1], y.shape[-1], fp8_format)
        scale.copy_(scales.t() if fp8_format.over_rows else scales.reshape(scale.shape))
    q = _ungrouped(grouped, y.shape, fp8_format)
    return q, scale, _matrix(q).t().contiguous() if transposed else None


def _grouped(values: Tensor, fp8_format: FP8Format) -> Tensor:
    lines = values.reshape(1, -1) if fp8_format.whole else _matrix(values)
    if fp8_format.over_rows:
        lines = lines.t()
    count, length = lines.shape
    group = fp8_format.group or length
    groups = -(-length // group) if fp8_format.group else 1
    return torch.nn.functional.pad(lines, (0, groups * group - length)).reshape(count, groups, group)


def _ungrouped(grouped: Tensor, shape: torch.Size, fp8_format: FP8Format) -> Tensor:
    """The tensor of this shape that ``_grouped`` has cut up: [M, N] where scales are shared over rows."""
    lines = grouped.flatten(1)
    if fp8_format.over_rows:
        return lines[:, : math.prod(shape[:-1])].contiguous().t()
    return lines.reshape(shape)


def _matrix(values: Tensor) -> Tensor:
    return values.reshape(math.prod(values.shape[:-1]), values.shape[-1])


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
        if formula == "floor":
            exponent = ((amax.view(torch.int32) >> 23) - fp8_format.top_exponent).clamp(min=0).to(torch.float32)
            smallest, nan = 2.0**126, 0.0
        else:
            scale = _quotient(amax, top)
            exponent = torch.where(scale.isinf(), 127.0, torch.ceil(torch.log2(scale)).clamp(-127, 127)) + 127
            smallest, nan = 1.0, math.nan
        factor = torch.where(exponent == 0, smallest, torch.exp2(127 - exponent))
        scaled = values * torch.where(amax.isnan(), nan, factor)
        scale = torch.where(amax.isnan(), 255.0, exponent).to(torch.uint8).view(torch.float8_e8m0fnu)
    # A cast by itself saturates in some releases of PyTorch, and makes NaN in others.
    return scaled.clamp(-top, top).to(fp8_format.dtype), scale


def _quotient(values: Tensor, divisor: float) -> Tensor:
    """A division that is rounded once: on CUDA PyTorch's own, by a number, multiplies by the reciprocal of it."""
    return values / torch.full((), divisor, dtype=values.dtype, device=values.device)
