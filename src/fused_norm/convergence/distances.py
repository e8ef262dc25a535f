"""Measures of how far one tensor is from another, each a plain function of two tensors that returns a number.

``one`` is the tensor that is judged and ``other`` the one that is right. There are the share of numbers that differ,
the share that is far off in the worst row, the relative distance, and the error of the slope, which shows whether
differences all go in one direction.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FAR = 1 / 64
"""A number is far off that is off by more than this share of the largest number in its row.

Roundings, with that of the row's rstd, make less of a difference; a row that lies in another's place makes more.
"""


TURNED_ROWS = 1 / 16
"""The share of the rows of a LoRA layer in which a number between its two products may be rounded the other way.

Sums in another order turn fewer than two roundings in a thousand, which with a rank of 8 is one row in 60; a call has
20 rows or more. Each of them turns others of a whole row of outputs.
"""


def share_apart(one: Tensor, other: Tensor, *, rows_left_out: float = 0.0) -> float:
    """The share of the numbers that differ, 1 where shapes or dtypes do.

    In fp32 a number counts only if it is off by more than two roundings of the largest in its row. ``rows_left_out``:
    the share of the rows, those in which most numbers differ, that do not count.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return 1.0
    roundings = 2 * torch.finfo(other.dtype).eps if other.dtype == torch.float32 else 0.0
    apart = _apart(one, other, roundings)
    if rows_left_out and apart.numel():
        by_row = apart.double().mean(-1).flatten().sort().values
        return by_row[: len(by_row) - math.ceil(rows_left_out * len(by_row))].sum().item() / len(by_row)
    return _share(apart)


def share_far_in_worst_row(one: Tensor, other: Tensor) -> float:
    """The share of the numbers in a row that are off by more than ``FAR`` of the largest, in the worst row."""
    if one.shape != other.shape or (one.isnan() != other.isnan()).any():
        return 1.0
    apart = _apart(one, other, FAR)
    return apart.double().mean(-1).max().item() if apart.numel() else 0.0


def _apart(one: Tensor, other: Tensor, share: float) -> Tensor:
    """A mask of the numbers that are further apart than a share of the largest in their row."""
    same = (one == other) | (one.isnan() & other.isnan())
    if not share or not other.numel():
        return ~same
    one, other = one.float(), other.float()
    largest = other.abs().nan_to_num(0.0, 0.0, 0.0).amax(-1, keepdim=True)
    return ~same & ~((one - other).abs() <= share * largest)


def _share(apart: Tensor) -> float:
    return apart.double().mean().item() if apart.numel() else 0.0


def share_different(one: Tensor, other: Tensor) -> float:
    """The share of the numbers that differ."""
    return _share((one != other) & ~(one.isnan() & other.isnan()))


def distance(one: Tensor, other: Tensor) -> float:
    """``|one - other| / |other|``; ``|one|`` where ``other`` is zero, infinite where something is not finite."""
    apart, size = (one.double() - other.double()).norm().item(), other.double().norm().item()
    found = apart / size if size else apart
    return found if math.isfinite(found) else math.inf


def slope_error(one: Tensor, other: Tensor) -> float:
    """``|<one, other> / <other, other> - 1|``; 0 where ``other`` is zero, infinite where something is not finite."""
    square = other.double().square().sum().item()
    error = abs((one.double() * other.double()).sum().item() / square - 1) if square else 0.0
    return error if math.isfinite(error) else math.inf
