"""How tensors lie in memory, as rows and as heads, and the dtypes of results."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...spec import NormSpec

INT32_LIMIT = 2**31


def bytes_of(*tensors: Tensor | None) -> int:
    """The bytes of one element of every tensor together."""
    return sum(tensor.element_size() for tensor in tensors if tensor is not None)


def norm_dtype(spec: NormSpec, dtype: torch.dtype, weight: Tensor | None) -> torch.dtype:
    """The dtype of a norm's output for an input of ``dtype``."""
    if weight is None or spec.casting in ("gemma", "rounded_gamma"):
        return dtype
    return weight.dtype if spec.casting == "weight_dtype" else promoted(dtype, weight.dtype)


def promoted(dtype: torch.dtype, other: torch.dtype) -> torch.dtype:
    """The dtype that two dtypes promote to."""
    return dtype if dtype == other else torch.promote_types(dtype, other)


def out_dtype(dtype: torch.dtype, instead: torch.dtype | None) -> torch.dtype:
    """The dtype to write results of ``dtype`` in: ``instead`` of float32, if given.

    A result of 16 bits is rounded to these before a further cast, which one rounding cannot do.
    """
    return instead if instead is not None and dtype == torch.float32 else dtype


def memory_order(x: Tensor) -> list[int]:
    """The leading dimensions, the one with the largest stride first; an expanded one stays in its place."""
    order: list[int] = []
    for dim in range(x.dim() - 1):
        place = len(order)
        while place and 0 < x.stride(order[place - 1]) < x.stride(dim):  # Dynamo sorts no symbols, but compares them
            place -= 1
        order.insert(place, dim)
    return order


def angles_layout(angles: Tensor, unsqueeze_dim: int) -> tuple[list[int], list[int]]:
    """Shape and strides of cos or sin against q's four dimensions; the stride of what is broadcast is 0."""
    shape, strides = list(angles.shape), list(angles.stride())
    for dim in (0, unsqueeze_dim)[len(shape) - 2 :]:
        shape.insert(dim, 1)
        strides.insert(dim, 0)
    return shape, [0 if size == 1 else step for size, step in zip(shape, strides, strict=True)]


def heads_dim_of(cos: Tensor, unsqueeze_dim: int) -> int | None:
    """The dimension, 1 or 2, along which cos does not vary, which is that of the heads; None if there is none."""
    shape, _ = angles_layout(cos, unsqueeze_dim)
    return next((dim for dim in (unsqueeze_dim, 3 - unsqueeze_dim) if shape[dim] == 1), None)


def is_long(tensors: Sequence[Tensor]) -> bool:
    """Return whether an offset into one of the tensors could pass 2^31 elements."""
    extents = (sum(n * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) for tensor in tensors)
    return any(extent >= INT32_LIMIT for extent in extents)


def row_stride(tensor: Tensor, order: list[int]) -> int | None:
    """Elements from one row to the next when rows are counted in ``order``, or None if that is not one number."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        return None
    innermost: int | None = None
    expected = 0
    for dim in reversed(order):
        size, stride = tensor.shape[dim], tensor.stride(dim)
        if size == 1:
            continue
        if innermost is None:
            innermost = stride
        elif stride != expected:
            return None
        expected = stride * size
    return tensor.shape[-1] if innermost is None else innermost
