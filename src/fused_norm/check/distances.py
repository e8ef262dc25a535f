"""Measures of how far one tensor is from another, for ``check`` and ``convergence``.

``tensor`` is judged and ``right`` is what it should be. There are the share of numbers that differ,
the share that is far off in the worst row, the relative distance, and the error of the slope, which shows whether
differences all go in one direction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

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

ZERO_SHARE = 1e-3
"""The least size of a tensor in a relative distance, as a share of the rms of all tensors of its kind: one that is zero
in exact arithmetic, such as the gradient of a bias on the keys, has no relative distance of its own."""

TRIMMED = 3
"""The least number of elements that a trimmed distance leaves out: one or two of a norm's few weights are enough to
make a distance."""


FEW = 8
"""A slope is of more numbers than these: among a few, such as the decays of a delta net's heads, one has most of the
size, and its rounding is a slope. Their distance shows as much."""


def share_apart(tensor: Tensor, right: Tensor, *, rows_left_out: float = 0.0) -> float:
    """The share of the numbers that differ, 1 if shapes or dtypes do.

    In fp32 a number counts only if it is off by more than two roundings of the largest in its row. ``rows_left_out``:
    the share of the rows, those in which most numbers differ, that do not count.
    """
    if tensor.shape != right.shape or tensor.dtype != right.dtype:
        return 1.0
    apart = apart_by_roundings(tensor, right)
    if rows_left_out and apart.numel():
        by_row = apart.double().mean(-1).flatten().sort().values
        return by_row[: len(by_row) - math.ceil(rows_left_out * len(by_row))].sum().item() / len(by_row)
    return _share(apart)


def share_far_in_worst_row(tensor: Tensor, right: Tensor) -> float:
    """The share of the numbers in a row that are off by more than ``FAR`` of the largest, in the worst row."""
    if tensor.shape != right.shape or (tensor.isnan() != right.isnan()).any():
        return 1.0
    apart = _apart(tensor, right, FAR)
    return apart.double().mean(-1).max().item() if apart.numel() else 0.0


def apart_by_roundings(tensor: Tensor, right: Tensor) -> Tensor:
    """A mask of the numbers that differ, in fp32 by more than two roundings of the largest in their row."""
    return _apart(tensor, right, 2 * torch.finfo(right.dtype).eps if right.dtype == torch.float32 else 0.0)


def _apart(tensor: Tensor, right: Tensor, share: float) -> Tensor:
    """A mask of the numbers that are further apart than a share of the largest in their row."""
    same = (tensor == right) | (tensor.isnan() & right.isnan())
    if not share or not right.numel():
        return ~same
    tensor, right = tensor.float(), right.float()
    largest = right.abs().nan_to_num(0.0, 0.0, 0.0).amax(-1, keepdim=True)
    return ~same & ~((tensor - right).abs() <= share * largest)


def _share(apart: Tensor) -> float:
    return apart.double().mean().item() if apart.numel() else 0.0


def share_different(tensor: Tensor, right: Tensor) -> float:
    """The share of the numbers that differ."""
    return _share(_apart(tensor, right, 0.0))


def distance(tensor: Tensor, right: Tensor) -> float:
    """``|tensor - right| / |right|``; ``|tensor|`` if ``right`` is zero, infinite if something is not finite."""
    apart, size = (tensor.double() - right.double()).norm().item(), right.double().norm().item()
    return _finite(apart / size if size else apart)


def slope_error(tensor: Tensor, right: Tensor) -> float:
    """``|<tensor, right> / <right, right> - 1|``; 0 if ``right`` is zero, infinite if something is not finite."""
    square = right.double().square().sum().item()
    return _finite(abs((tensor.double() * right.double()).sum().item() / square - 1) if square else 0.0)


def distances(tensors: Mapping[str, Tensor], right: Mapping[str, Tensor], *, trim: float = 0.0) -> dict[str, float]:
    """The relative distance of each tensor: the norm of the difference over that of the right one.

    The latter counts as at least ``ZERO_SHARE`` of the rms of all of them. Infinite if a tensor is not finite, or is
    missing on one side.

    Args:
        tensors: by name.
        right: those they are compared with.
        trim: share of the elements that are left out of a difference, the largest of it; ``TRIMMED`` at least.
    """
    squares = sum(value.double().square().sum().item() for value in right.values())
    rms = math.sqrt(squares / max(1, sum(value.numel() for value in right.values())))
    errors = {}
    for name, truth in right.items():
        if name not in tensors:
            errors[name] = math.inf
            continue
        apart = tensors[name].double() - truth.double()
        if trim and apart.isfinite().all():
            apart = apart.abs().flatten().sort().values
            apart = apart[: max(0, apart.numel() - max(TRIMMED, math.ceil(trim * apart.numel())))]
        scale = max(truth.double().norm().item(), ZERO_SHARE * rms * truth.numel() ** 0.5)
        errors[name] = ratio(apart.norm().item(), scale)
    return errors


def slope_errors(tensors: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, float]:
    """``slope_error`` of each tensor but those that are all but zero or of a few numbers, which have no slope."""
    squares = {name: value.double().square().mean().item() for name, value in right.items()}
    least = ZERO_SHARE**2 * max(squares.values(), default=0.0)
    return {
        name: slope_error(tensors[name], truth) if name in tensors else math.inf
        for name, truth in right.items()
        if squares[name] > least and truth.numel() > FEW
    }


def ratio(gap: float, scale: float) -> float:
    """``gap / scale``: infinite if one of them is not finite or the scale is 0, but 0 if both are 0."""
    return gap / scale if math.isfinite(gap) and 0 < scale < math.inf else 0.0 if gap == scale == 0 else math.inf


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf
