"""FP8 formats as data: what shares a scale, how the scale is computed, and how scales lie in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from ..arguments import Refusal, wrong_flag
from ..triton.language import codes_group

Formula = Literal["multiplier", "reciprocal", "quotient", "floor", "rceil"]
ScaleLayout = Literal["rows", "columns", "deepgemm", "swizzled"]

INPUT_GROUP: int = codes_group.value
"""Columns that share a scale where a norm reads codes."""

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@dataclass(frozen=True)
class FP8Format:
    """A way to make FP8 codes of a tensor y [M, N], and scales that turn the codes into numbers again.

    Attributes:
        group_rows: neighbours in a column that share a scale; 0 is all of them.
        group_columns: neighbours in a row that share it; 0 is all. The tensor has one scale with (0, 0), each row with
            (1, 0), each column with (0, 1). Of a group of several elements, a power of two, the other number is 1.
            Scales shared over rows are for a product that sums over rows: then codes [M, N] lie column by column.
        dtype: of the codes.
        formula: how the scale comes from the largest magnitude ``amax``. All but the last two are fp32; ``top`` is the
            largest number that is a code:

            - ``multiplier``: codes are of ``y * m`` with ``m = top / max(amax, floor)``, rounded once from its exact
              value; the scale is ``1 / m`` (torchao);
            - ``reciprocal``: the scale is ``max(amax, floor) / top``, and codes are of ``y * (1 / scale)`` (DeepGEMM);
            - ``quotient``: the scale is ``(amax + floor) / top``, and codes are of ``y / scale`` (COAT);
            - ``floor``: the scale is the largest power of two not above amax, divided by the one not above top, as
              E8M0 (Open Compute's MX formats, 6.3);
            - ``rceil``: it is the smallest power of two not below ``amax / top`` (NVIDIA's).
        power_of_2: the multiplier is rounded down to a power of two, or the scale up to one.
        floor: what amax is at least, or what is added to it.
        scale_layout: how the scales of groups along a row lie in memory. ``rows``: [..., N / group], as y itself.
            ``columns``: [M, N / group] with neighbours in a column beside each other; ``deepgemm``: each column of
            these begins at a multiple of four elements. ``swizzled``, of all groups: for each 128 rows and 4 groups a
            block of 32 by 16, in which row r and group g are at ``(r % 32, r // 32 * 4 + g)``; padded with zeros.
    """

    group_rows: int
    group_columns: int
    dtype: torch.dtype = torch.float8_e4m3fn
    formula: Formula = "multiplier"
    power_of_2: bool = False
    floor: float = 1e-12
    scale_layout: ScaleLayout = "rows"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("formula", self.formula, get_args(Formula)),
            ("scale_layout", self.scale_layout, get_args(ScaleLayout)),
            ("dtype", self.dtype, FP8_DTYPES),
        ):
            if value not in known:
                raise ValueError(f"an FP8 format's {name} must be one of {', '.join(map(str, known))}, not {value!r}")
        shape = self.group_rows, self.group_columns
        if any(type(one) is not int for one in shape) or not isinstance(self.power_of_2, bool):
            raise TypeError(f"groups must be ints, and power_of_2 a bool, not {shape} and {self.power_of_2!r}")
        if shape != (0, 0) and (1 not in shape or shape == (1, 1) or self.group < 0 or self.group & (self.group - 1)):
            raise ValueError(f"a group must be (0, 0), or a power of two or 0 (all) beside a 1, not {shape}")
        if (self.formula in ("floor", "rceil")) != self.swizzled or (self.scale_layout != "rows" and not self.group):
            raise ValueError(
                f"scale_layout {self.scale_layout!r} does not go with formula {self.formula!r} and groups {shape}:"
                " scales of groups have layouts, and E8M0 ones are swizzled"
            )
        if not self.swizzled and not 1e-30 <= self.floor < float("inf"):
            raise ValueError(f"floor must be 1e-30 or more, so that zeros have an fp32 scale, not {self.floor!r}")

    @property
    def whole(self) -> bool:
        """The tensor has one scale."""
        return self.group_rows == self.group_columns == 0

    @property
    def over_rows(self) -> bool:
        """Scales are shared over rows, along a column."""
        return self.group_columns == 1

    @property
    def group(self) -> int:
        """Elements of a group; 0 where a whole row, column or tensor is one."""
        return self.group_rows if self.over_rows else self.group_columns

    @property
    def swizzled(self) -> bool:
        """Scales are E8M0 bytes in the order that scaled products of sm_100 read."""
        return self.scale_layout == "swizzled"

    @property
    def top(self) -> float:
        """The largest number that is a code."""
        return torch.finfo(self.dtype).max

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

    @property
    def options(self) -> tuple[Any, ...]:
        """The format as an operator's options, see ``FORMAT_OPTIONS``; ``format_from`` is the way back."""
        return (
            self.group_rows, self.group_columns, self.dtype, self.formula, self.power_of_2, self.floor,
            self.scale_layout,
        )  # fmt: skip

    def along_rows(self) -> FP8Format:
        """This format with scales shared over rows, along columns."""
        return replace(self, group_rows=self.group_columns, group_columns=self.group_rows)

    def for_deepgemm(self) -> FP8Format:
        """``block128`` with the scales that DeepGEMM computes, laid out as its products on sm_90 read them."""
        return replace(self, formula="reciprocal", floor=1e-4, scale_layout="deepgemm")


FORMAT_OPTIONS = (
    "int group_rows, int group_columns, ScalarType dtype, str formula, bool power_of_2, float floor, str scale_layout"
)
"""The schema of a format among an operator's options."""

FORMATS: dict[str, FP8Format] = {
    # torchao's and torch's scaled products'
    "tensorwise": FP8Format(0, 0),
    "rowwise": FP8Format(1, 0, power_of_2=True),
    "block128": FP8Format(1, 128, scale_layout="columns"),
    "mxfp8": FP8Format(1, 32, formula="floor", floor=0.0, scale_layout="swizzled"),
    # COAT's: what linears read, and what norms read and keep
    "coat": FP8Format(0, 0, formula="quotient", floor=1e-10),
    "coat_input": FP8Format(1, INPUT_GROUP, formula="quotient", floor=1e-10),
}
"""The formats that have a name; ``dataclasses.replace`` makes others of them, such as one with another dtype."""

_kept_format = lru_cache(maxsize=256)(FP8Format)


def format_from(options: Sequence[Any]) -> FP8Format:
    """The format with these ``options``; equal ones give the same object."""
    return FP8Format(*options) if torch.compiler.is_compiling() else _kept_format(*options)


def format_of(fp8_format: str | FP8Format) -> FP8Format:
    """The format of a name, or the format itself.

    Raises:
        ValueError: for a name that is none.
    """
    if isinstance(fp8_format, FP8Format):
        return fp8_format
    if not isinstance(fp8_format, str) or fp8_format not in FORMATS:
        raise ValueError(f"fp8_format must be an FP8Format or one of {', '.join(FORMATS)}, not {fp8_format!r}")
    return FORMATS[fp8_format]


def wrong_format(fp8_format: FP8Format, width: int, transposed: object = False) -> Refusal | None:
    """Refuse a format that rows of ``width`` elements cannot have, and transposed codes where nobody can use them."""
    if fp8_format.group_columns > 1 and width % fp8_format.group_columns:
        return Refusal(
            f"rows of {width} elements cannot be divided into groups of {fp8_format.group_columns}; take a format with"
            " a scale for each row or for the tensor",
            ValueError,
        )
    if transposed is True and not fp8_format.whole:
        return Refusal(
            "codes that share their scale along a row are of no use transposed; take rms_norm_columns_fp8 or a format"
            " with one scale for the tensor",
            ValueError,
        )
    return wrong_flag("transposed", transposed)


def empty_scale(like: Tensor, leading: Sequence[int], width: int, fp8_format: FP8Format) -> Tensor:
    """The scales of codes [*leading, width] on the device of ``like``, not yet written.

    Where padding is not written by kernels it is there, as zeros.
    """
    rows, group = math.prod(leading), fp8_format.group
    groups = 1 if group == 0 else -(-(rows if fp8_format.over_rows else width) // group)
    if fp8_format.swizzled:
        lines = width if fp8_format.over_rows else rows
        shape = 32 * -(-lines // 128), 16 * -(-groups // 4)
        # The tile of a row shorter than a block of four groups is as short.
        new = like.new_zeros if groups < 4 and not fp8_format.over_rows else like.new_empty
        return new(shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    if fp8_format.whole:
        return like.new_empty((), dtype=torch.float32)
    if fp8_format.over_rows:
        return like.new_empty((groups, width), dtype=torch.float32)
    if fp8_format.scale_layout == "rows":
        return like.new_empty((*leading, groups), dtype=torch.float32)
    step = rows if fp8_format.scale_layout == "columns" else -(-rows // 4) * 4
    return like.new_empty((groups, step), dtype=torch.float32)[:, :rows].t()
