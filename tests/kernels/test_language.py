"""Rounding and index arithmetic inside of kernels."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from fused_norm.kernels.triton.language import round_to, rows_of

from .numerics import BF16, DTYPES, FP16, FP32

TL_DTYPES = {FP32: tl.float32, BF16: tl.bfloat16, FP16: tl.float16}
SIZE = 4096


@triton.jit
def _round_kernel(value_ptr, rounded_ptr, stored_ptr, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    rounded = round_to(tl.load(value_ptr + index), DTYPE)
    tl.store(rounded_ptr + index, rounded)
    tl.store(stored_ptr + index, rounded)


def _hard_values(dtype: torch.dtype) -> Tensor:
    """Return 4096 fp32 values: ties and their neighbours, subnormals, limits of dtype, NaN, inf, and random bits."""
    generator = torch.Generator().manual_seed(0)
    info = torch.finfo(dtype)
    bits = torch.int32 if dtype == FP32 else torch.int16
    values = torch.randn(512, generator=generator).to(dtype)
    ties = (values.float() + (values.view(bits) + 1).view(dtype).float()) / 2
    limits = [0.0, -0.0, info.max, -info.max, info.tiny, info.smallest_normal / 4, float("inf"), -float("inf")]
    beyond = [65519.9, 65520.0, 3.39e38, 3.4e38, -3.4e38, 1e-45, float("nan")]
    parts = [
        values.float(),
        ties,
        torch.nextafter(ties, torch.tensor(float("inf"))),
        torch.nextafter(ties, torch.tensor(-float("inf"))),
        info.smallest_normal / 2 * torch.randn(512, generator=generator),
        torch.tensor(limits + beyond),
    ]
    rest = SIZE - sum(part.numel() for part in parts)
    parts.append(torch.randint(-(2**31), 2**31, (rest,), generator=generator).to(torch.int32).view(FP32))
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_round_to_is_the_cast_of_torch(dtype: torch.dtype, device: str) -> None:
    values = _hard_values(dtype).to(device)
    rounded, stored = torch.empty_like(values), torch.empty_like(values, dtype=dtype)
    _round_kernel[(1,)](values, rounded, stored, DTYPE=TL_DTYPES[dtype], SIZE=SIZE)
    expected = values.to(dtype)
    number = ~values.isnan()
    integer = torch.int32 if dtype == FP32 else torch.int16
    assert number.sum() > SIZE - 64
    assert torch.equal(rounded[number].view(torch.int32), expected[number].float().view(torch.int32))
    storable = number
    if knobs.runtime.interpret and dtype == BF16:  # the interpreter's own cast mangles the subnormal ones
        storable = number & ((expected == 0) | (expected.abs() >= torch.finfo(BF16).smallest_normal))
    assert torch.equal(stored[storable].view(integer), expected[storable].view(integer))
    assert stored[~number].isnan().all()
    assert rounded[~number].isnan().all()


@triton.jit
def _index_kernel(tile_ptr, row_ptr, TILE: tl.constexpr, LONG: tl.constexpr):
    tl.store(row_ptr + tl.arange(0, TILE), rows_of(tl.load(tile_ptr), TILE, LONG))


@pytest.mark.parametrize(("first", "long"), [(3, False), (3, True), (2**27, True), (2**31 - 1, True)])
def test_rows_of_any_tile_are_counted_without_overflow(first: int, long: bool, device: str) -> None:
    rows = torch.empty(16, dtype=torch.int64, device=device)
    tile = torch.tensor([first], dtype=torch.int32, device=device)
    _index_kernel[(1,)](tile, rows, TILE=16, LONG=long)
    assert torch.equal(rows, first * 16 + torch.arange(16, device=device))
