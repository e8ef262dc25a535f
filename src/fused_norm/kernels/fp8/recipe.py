"""How values become FP8 codes and scales, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, get_args

import torch

Granularity = Literal["tensor", "row", "group"]
Formula = Literal["multiplier", "reciprocal", "quotient", "floor", "rceil"]
ScaleLayout = Literal["rows", "columns", "swizzled"]

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@dataclass(frozen=True)
class FP8Recipe:
    """How a tensor y [M, N] becomes FP8 codes, and with them scales that turn codes into numbers again.

    Attributes:
        granularity: what shares a scale: the whole ``tensor``, a ``row``, or a ``group`` of neighbours in a row.
        group: elements of a group; 0 for the other granularities.
        dtype: of the codes. What its largest number is, ``torch.finfo`` says.
        formula: how the scale comes from the largest magnitude ``amax``. All but the last two are fp32 and of the
            largest code ``top``:

            - ``multiplier``: codes are of ``y * m`` with ``m = top / max(amax, floor)``, rounded once from its exact
              value; the scale is ``1 / m`` (torchao);
            - ``reciprocal``: the scale is ``max(amax, floor) / top``, and codes are of ``y * (1 / scale)`` (DeepGEMM);
            - ``quotient``: the scale is ``(amax + floor) / top``, and codes are of ``y / scale`` (COAT);
            - ``floor``: the scale is the largest power of two not above amax, divided by the one not above top, as
              E8M0 (Open Compute's MX formats, 6.3);
            - ``rceil``: it is the smallest power of two not below ``amax / top`` (NVIDIA's).
        power_of_2: the multiplier is rounded down to a power of two, or the scale up to one.
        floor: what amax is at least, or what is added to it.
        layout: how the scales of groups lie in memory. ``rows``: [..., N / group], as y itself. ``columns``:
            [M, N / group] with neighbours in a column beside each other. ``swizzled``: for each 128 rows and 4 groups a
            block of 32 by 16, in which row r and group g are at ``(r % 32, r // 32 * 4 + g)``; padded with zeros.
        aligned: under ``columns``, each begins at a multiple of that many elements.
        axis: along which scales are shared: -1 is along a row. 0 is along a column, for what is multiplied over rows:
            then codes, [M, N], lie column by column, scales of columns are [1, N], those of groups
            [ceil(M / group), N], and swizzled ones those of y's transpose.
    """

    granularity: Granularity
    group: int = 0
    dtype: torch.dtype = torch.float8_e4m3fn
    formula: Formula = "multiplier"
    power_of_2: bool = False
    floor: float = 1e-12
    layout: ScaleLayout = "rows"
    aligned: int = 1
    axis: int = -1

    def __post_init__(self) -> None:
        for name, value, known in (
            ("granularity", self.granularity, get_args(Granularity)),
            ("formula", self.formula, get_args(Formula)),
            ("layout", self.layout, get_args(ScaleLayout)),
            ("axis", self.axis, (-1, 0)),
            ("dtype", self.dtype, FP8_DTYPES),
        ):
            if value not in known:
                raise ValueError(f"an FP8 recipe's {name} must be one of {', '.join(map(str, known))}, not {value!r}")
        grouped = self.granularity == "group"
        if grouped != (self.group > 0) or self.group & (self.group - 1):
            raise ValueError(f"a group must be a power of two under granularity 'group', else 0, not {self.group!r}")
        if (self.formula in ("floor", "rceil")) != (self.layout == "swizzled") or (
            self.layout != "rows" and not grouped
        ):
            raise ValueError(
                f"layout {self.layout!r} does not go with formula {self.formula!r} and granularity"
                f" {self.granularity!r}: scales of groups have layouts, and E8M0 ones are swizzled"
            )
        if self.layout != "swizzled" and not 1e-30 <= self.floor < float("inf"):
            raise ValueError(f"floor must be 1e-30 or more, so that zeros have an fp32 scale, not {self.floor!r}")
        if self.aligned < 1:
            raise ValueError(f"aligned must be 1 or more, not {self.aligned!r}")

    @property
    def options(self) -> tuple[Any, ...]:
        """What ``recipe_from`` makes the recipe of again, as operators take it: see ``RECIPE_OPTIONS``."""
        return (
            self.granularity, self.group, self.dtype, self.formula, self.power_of_2, self.floor, self.layout,
            self.aligned, self.axis,
        )  # fmt: skip

    def along_rows(self) -> FP8Recipe:
        """The same recipe with scales shared along columns, over rows."""
        return replace(self, axis=0)


RECIPE_OPTIONS = (
    "str granularity, int group, ScalarType dtype, str formula, bool power_of_2, float floor, str layout,"
    " int aligned, int axis"
)
"""The schema of a recipe among an operator's options."""

RECIPES: dict[str, FP8Recipe] = {
    # torchao's and torch's scaled products'
    "tensorwise": FP8Recipe("tensor"),
    "rowwise": FP8Recipe("row", power_of_2=True),
    "block128": FP8Recipe("group", 128, layout="columns"),
    "mxfp8": FP8Recipe("group", 32, formula="floor", floor=0.0, layout="swizzled"),
    "deepgemm": FP8Recipe("group", 128, formula="reciprocal", floor=1e-4, layout="columns", aligned=4),
    # COAT's: what linears read, and what norms read and keep
    "coat": FP8Recipe("tensor", formula="quotient", floor=1e-10),
    "coat_input": FP8Recipe("group", 16, formula="quotient", floor=1e-10),
}
"""The recipes that have a name; ``dataclasses.replace`` makes others of them, such as one with another dtype."""


def recipe_from(options: Sequence[Any]) -> FP8Recipe:
    """The recipe with these ``options``; equal ones give the same object."""
    return FP8Recipe(*options) if torch.compiler.is_compiling() else _kept_recipe(*options)


@lru_cache(maxsize=256)
def _kept_recipe(*options: Any) -> FP8Recipe:
    return FP8Recipe(*options)


def recipe_of(recipe: str | FP8Recipe) -> FP8Recipe:
    """The recipe of a name, or the recipe itself.

    Raises:
        ValueError: for a name that is none.
    """
    if isinstance(recipe, FP8Recipe):
        return recipe
    if recipe not in RECIPES:
        raise ValueError(f"recipe must be an FP8Recipe or one of {', '.join(RECIPES)}, not {recipe!r}")
    return RECIPES[recipe]
