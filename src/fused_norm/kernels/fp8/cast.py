"""The casts to FP8 and back in plain PyTorch: the truth in tests, and the path of tensors that no kernel runs on.

``grouped`` are a tensor's numbers [L, G, K]: its rows, or all of it as one row, each in groups of K that share a scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..arguments import check_rows, check_tensor
from ..triton.devices import is_transformed
from .formats import FORMATS, FP8_DTYPE, FP8Format, check_width, empty_scale, name_of_format


@dataclass(frozen=True)
class Quantized:
    """A tensor y [..., N] as FP8 codes and scales; M is the number of its rows, over all leading dimensions.

    Attributes:
        q: the codes, contiguous in y's shape.
        scale: the multiplier that turns codes into numbers again. fp32: [] of a tensor, [..., 1] of rows, and of groups
            as the format lays them out: [..., N / group], or [M, N / group] with strides (1, M). E8M0 and swizzled:
            [32 * ceil(M / 128), 16 * ceil(N / group / 4)].
        fp8_format: how they were made.
        placeholder: a tensor of y's shape and dtype without storage of its own, one NaN expanded. It is y's place in
            autograd's graph: code that reads the codes gives it the gradient of y, because codes can carry none. Under
            transforms of ``torch.func`` it is y. None if nothing can be differentiated.
        rstd: fp32 [..., 1] if a norm has made y, which can be computed again from it.
    """

    q: Tensor
    scale: Tensor
    fp8_format: FP8Format
    placeholder: Tensor | None = None
    rstd: Tensor | None = None


class _WithGradientTo(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, source: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, grads[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[1].to(torch.float32)


def with_gradient_to(values: Tensor, source: Tensor) -> Tensor:
    """The values of one tensor with the history of ``source``: their gradient goes to the source."""
    return _WithGradientTo.apply(values, source)


def placeholder_of(y: Tensor) -> Tensor:
    """A placeholder that hands its gradient to y; under transforms, which look at its numbers, y itself."""
    return y if is_transformed() else with_gradient_to(y.new_full((), float("nan")).expand(y.shape), y)


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
        TypeError: for what is no dense tensor of these dtypes.
        ValueError: for an unknown format, for a tensor without dimensions, and for groups that do not divide a row.
    """
    known = FORMATS[name_of_format(fp8_format)]
    refusal = check_tensor("y", y) or check_rows("y", y) or check_width(known, y.shape[-1])
    if refusal is not None and refusal.error is not None:
        raise refusal.error(f"quantize: {refusal.reason}")
    with torch.no_grad():
        q, scale = cast(y.detach(), known)
    return Quantized(q, scale, known, placeholder_of(y))


def dequantize(codes: Quantized) -> Tensor:
    """The numbers that codes and scales stand for: fp32, contiguous, in the shape of ``codes.q``; no gradient.

    Raises:
        TypeError: for what is not ``Quantized``.
    """
    if not isinstance(codes, Quantized):
        raise TypeError(f"dequantize: codes must be Quantized, not {type(codes).__name__}")
    fp8_format, scale = codes.fp8_format, codes.scale.detach()
    grouped = _grouped(codes.q.detach().to(torch.float32), fp8_format)
    rows, groups, _ = grouped.shape
    scale = _unswizzled(scale, rows, groups) if fp8_format.swizzled else scale.reshape(rows, groups)
    return (grouped * scale.to(torch.float32)[..., None]).reshape(codes.q.shape)


def numbers_of(codes: Tensor, scale: Tensor) -> Tensor:
    """The products of a norm's input codes [..., N] and their scales [..., N / 16], in fp32."""
    return dequantize(Quantized(codes, scale, FORMATS["coat_input"]))


def cast(y: Tensor, fp8_format: FP8Format) -> tuple[Tensor, Tensor]:
    """Codes and scales of good arguments."""
    grouped = _grouped(y, fp8_format)
    # The largest magnitudes; 0 of nothing, NaN if there is one.
    amax = grouped.abs().amax(-1, keepdim=True) if grouped.shape[-1] else grouped.new_zeros(*grouped.shape[:-1], 1)
    q, scales = cast_groups(grouped, amax, fp8_format)
    scales = scales.squeeze(-1)
    if fp8_format.swizzled:
        return q.reshape(y.shape), swizzled(scales)
    scale = empty_scale(y, y.shape[:-1], y.shape[-1], fp8_format)
    return q.reshape(y.shape), scale.copy_(scales.reshape(scale.shape))


def _grouped(values: Tensor, fp8_format: FP8Format) -> Tensor:
    rows, width = math.prod(values.shape[:-1]), values.shape[-1]
    if fp8_format.group is None:
        return values.reshape(1, 1, rows * width)
    if fp8_format.group == 0:
        return values.reshape(rows, 1, width)
    return values.reshape(rows, width // fp8_format.group, fp8_format.group)


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
    elif formula == "quotient":
        # A division that is rounded once: on CUDA PyTorch's own, by a number, multiplies by the reciprocal of it.
        scale = (amax + fp8_format.floor) / torch.full((), top, dtype=amax.dtype, device=amax.device)
        scaled = values / scale
    else:
        exponent = ((amax.view(torch.int32) >> 23) - fp8_format.top_exponent).clamp(min=0).to(torch.float32)
        factor = torch.where(exponent == 0, 2.0**126, torch.exp2(127 - exponent))
        scaled = values * torch.where(amax.isnan(), 0.0, factor)
        scale = torch.where(amax.isnan(), 255.0, exponent).to(torch.uint8).view(torch.float8_e8m0fnu)
    # A cast by itself saturates in some releases of PyTorch, and makes NaN in others.
    return scaled.clamp(-top, top).to(FP8_DTYPE), scale
