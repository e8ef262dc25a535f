"""Values that casts to FP8 find hard, and equality of codes and scales."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_norm.kernels.fp8 import Quantized

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def hard_rows(rows: int, width: int, dtype: torch.dtype, *, finite: bool = False) -> Tensor:
    """Return rows of many magnitudes; the first ones are zero, tiny, subnormal, huge, with NaN and with inf."""
    values = torch.randn(rows, width) * torch.exp2(torch.randint(-12, 12, (rows, 1)).float())
    values = values.to(dtype)
    numbers = torch.finfo(dtype)
    values[0] = 0
    values[1] = numbers.tiny
    values[2] = numbers.smallest_normal / 4
    values[3, width // 2] = numbers.max
    values[4, -1] = 1.0 if finite else float("nan")
    values[5, width // 3] = 1.0 if finite else -float("inf")
    return values


def in_bits(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers; all NaNs become the same one."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    nan = tensor.float().isnan()
    return tensor.contiguous().view(integers).masked_fill(nan, torch.iinfo(integers).max)


def assert_same_bits(ours: Tensor, expected: Tensor) -> None:
    """Assert the same shape, dtype and bits; all NaNs are equal."""
    assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype)
    differing = in_bits(ours) != in_bits(expected)
    assert not differing.any(), (differing.sum(), ours.float()[differing][:4], expected.float()[differing][:4])


def assert_same_codes(ours: Quantized, expected: Quantized) -> None:
    """Assert the same codes and scales, in the same layout."""
    for a, b in ((ours.q, expected.q), (ours.scale, expected.scale)):
        assert_same_bits(a, b)
        if min(a.shape, default=0) > 1:  # otherwise strides do not matter
            assert a.stride() == b.stride()
    assert ours.fp8_format == expected.fp8_format
