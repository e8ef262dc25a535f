"""FP8 formats as data: what shares a scale, how the scale is computed, and how scales lie in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..arguments import Unsupported
from ..triton.language import codes_group

Formula = Literal["multiplier", "quotient", "floor"]
ScaleLayout = Literal["rows", "columns", "swizzled"]

FP8_DTYPE = torch.float8_e4m3fn
"""The dtype of all codes that are written."""

FP8_MAX = torch.finfo(FP8_DTYPE).max
"""The largest number that is a code."""

INPUT_GROUP: int = codes_group.value
"""Columns that share a scale if a norm reads codes."""


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
    formula: Formula = "multiplier"
    power_of_2: bool = False
    floor: float = 1e-12
    scale_layout: ScaleLayout = "rows"

    @property
    def whole(self) -> bool:
        """The tensor has one scale."""
        return self.group is None

    @property
    def swizzled(self) -> bool:
        """Scales are E8M0 bytes in the order that scaled products of sm_100 read."""
        return self.scale_layout == "swizzled"

    @property
    def top(self) -> float:
        """The largest number that is a code."""
        return FP8_MAX

    @property
    def top_exponent(self) -> int:
        """The exponent of the largest power of two not above ``top``."""
        return int(math.log2(self.top))

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
    """The name of a format, which may be given by that name too.

    Raises:
        ValueError: for what is no format of ``FORMATS``.
    """
    if isinstance(fp8_format, FP8Format):
        fp8_format = next((name for name, known in FORMATS.items() if known == fp8_format), fp8_format)
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
