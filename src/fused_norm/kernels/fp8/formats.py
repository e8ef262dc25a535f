"""FP8 formats as data, and the casts to FP8 and back in plain PyTorch.

A format says what shares a scale, how the scale is computed, and how scales lie in memory. The casts are the truth in
tests, and the path of tensors that no kernel runs on. ``grouped`` are a tensor's numbers [L, G, K]: its rows, or all of
it as one row, each in groups of K that share a scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from .. import reference
from ..arguments import Unsupported, check_rows, check_tensor
from ..triton.devices import is_transformed
from ..triton.language import codes_group

FP8_DTYPE = torch.float8_e4m3fn
"""The dtype of all codes that are written."""

INPUT_GROUP: int = codes_group.value
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
    def whole(self) -> bool:
        """The whole tensor has one scale."""
        return self.group is None

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
    "coat_input": FP8Format(INPUT_GROUP, formula="quotient", floor=1e-10),
}
"""The formats by name."""


def name_of_format(fp8_format: str | FP8Format) -> str:
    """The name of a format or of its name.

    Raises:
        ValueError: for anything that is not in ``FORMATS``.
    """
    if isinstance(fp8_format, FP8Format):
        fp8_format = next((name for name, other in FORMATS.items() if other == fp8_format), fp8_format)
    if isinstance(fp8_format, str) and fp8_format in FORMATS:
        return fp8_format
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


def placeholder_of(y: Tensor) -> Tensor:
    """A placeholder that hands its gradient to y; under transforms, which look at its numbers, y itself."""
    return y if is_transformed() else reference.with_gradient_to(y.new_full((), float("nan")).expand(y.shape), y)


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
    return Quantized(q, scale, fp8_format, placeholder_of(y))


def dequantize(codes: Quantized) -> Tensor:
    """The numbers that codes and scales stand for: fp32, contiguous, in the shape of ``codes.q``; no gradient.

    Raises:
        TypeError: for anything but ``Quantized``.
    """
    if not isinstance(codes, Quantized):
        raise TypeError(f"dequantize: codes must be Quantized, not {type(codes).__name__}")
    fp8_format, scale = codes.fp8_format, codes.scale.detach()
    grouped = _grouped(codes.q.detach().to(torch.float32), fp8_format)
    lines, groups, _ = grouped.shape
    if fp8_format.swizzled:
        blocks = -(-lines // 128), -(-groups // 4)
        tiles = scale.view(torch.uint8).reshape(blocks[0], blocks[1], 32, 4, 4).permute(0, 3, 2, 1, 4)
        scale = tiles.reshape(128 * blocks[0], 4 * blocks[1])[:lines, :groups].contiguous().view(torch.float8_e8m0fnu)
    scale = scale.reshape(lines, groups).to(torch.float32)
    return (grouped * scale[..., None]).reshape(codes.q.shape)


def numbers_of(codes: Tensor, scale: Tensor) -> Tensor:
    """The products of a norm's input codes [..., N] and their scales [..., N / 16], in fp32."""
    return dequantize(Quantized(codes, scale, FORMATS["coat_input"]))


def cast(y: Tensor, fp8_format: FP8Format) -> tuple[Tensor, Tensor]:
    """Codes and scales, for arguments that were checked."""
    grouped = _grouped(y, fp8_format)
    # The largest magnitudes; 0 of nothing, NaN if there is one.
    amax = grouped.abs().amax(-1, keepdim=True) if grouped.shape[-1] else grouped.new_zeros(*grouped.shape[:-1], 1)
    q, scales = cast_groups(grouped, amax, fp8_format)
    scales = scales.squeeze(-1)
    if not fp8_format.swizzled:
        scale = empty_scale(y, y.shape[:-1], y.shape[-1], fp8_format)
        return q.reshape(y.shape), scale.copy_(scales.reshape(scale.shape))
    lines, groups = scales.shape
    blocks = -(-lines // 128), -(-groups // 4)
    padded = torch.zeros(128 * blocks[0], 4 * blocks[1], dtype=torch.uint8, device=scales.device)
    padded[:lines, :groups] = scales.view(torch.uint8)
    tiles = padded.reshape(blocks[0], 4, 32, blocks[1], 4).permute(0, 3, 2, 1, 4)
    return q.reshape(y.shape), tiles.reshape(32 * blocks[0], 16 * blocks[1]).view(torch.float8_e8m0fnu)


def _grouped(values: Tensor, fp8_format: FP8Format) -> Tensor:
    rows, width = math.prod(values.shape[:-1]), values.shape[-1]
    if fp8_format.group is None:
        return values.reshape(1, 1, rows * width)
    if fp8_format.group == 0:
        return values.reshape(rows, 1, width)
    return values.reshape(rows, width // fp8_format.group, fp8_format.group)


def cast_groups(values: Tensor, amax: Tensor, fp8_format: FP8Format) -> tuple[Tensor, Tensor]:
    """The codes of values and their scales, given the largest magnitude for each scale (broadcast)."""
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
    # A plain cast saturates in some releases of PyTorch, and makes NaN in others.
    return scaled.clamp(-top, top).to(FP8_DTYPE), scale
