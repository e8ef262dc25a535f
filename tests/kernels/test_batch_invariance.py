"""A row's result does not depend on the rows beside it: on a GPU at many widths, in the interpreter at one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fused_norm.kernels import add_rms_norm, rms_norm
from fused_norm.kernels.fp8 import add_rms_norm_fp8, rms_norm_fp8

from .calls import CALLS, every_call
from .conftest import ALL
from .fp8_values import assert_same_bits
from .numerics import BF16, FP16, FP32

GPU = torch.cuda.is_available()
# Rows begin at multiples of 16 bytes: others a GPU reads in smaller pieces, and may add up in another order.
WIDTHS = (96, 128, 1024, 1152, 2048, 2560, 4096, 5120, 8192, 16384, 32768) if GPU else (32,)
ROWS = 261 if GPU else 6

Outputs = tuple[Tensor, ...]


def values(device: str, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return (1.5 * torch.randn(*shape)).to(device, dtype)


def assert_invariant(call: Callable[..., Outputs], rows: tuple[Tensor, ...]) -> None:
    """Assert that rows alone, in chunks of odd sizes, elsewhere and with gradients have the bits of the whole batch."""
    count = rows[0].shape[0]
    with torch.no_grad():
        whole, turned = call(*rows), call(*(row.roll(2, 0) for row in rows))
        for start, some in ((0, 1), (count - 1, 1), (1, 3), (count // 3, count // 2), (0, count - 1)):
            parts = call(*(row.narrow(0, start, some) for row in rows))
            for part, expected in zip(parts, whole, strict=True):
                assert_same_bits(part, expected.narrow(0, start, some))
    trained = call(*(row.detach().requires_grad_() for row in rows))
    for expected, part, turned_part in zip(whole, trained, turned, strict=True):
        assert_same_bits(part.detach(), expected)
        codes = expected.view(torch.uint8) if expected.element_size() == 1 else expected
        assert_same_bits(turned_part, codes.roll(2, 0).view(expected.dtype))


@pytest.mark.parametrize("width", WIDTHS)
@CALLS
def test_a_sequence_has_the_same_bits_in_any_batch(case: str, width: int, device: str) -> None:
    call = every_call(device, width=width)[case]
    if call.name == "lora_add":
        pytest.skip("its tiles depend on the number of rows")
    if ALL[call.name].why_reference_only(*call.tensors, *call.options) is not None:
        pytest.skip("no kernel holds a row of this width")
    if GPU and (case == "sandwich uncast" or (case == "sandwich" and width <= 128)):
        pytest.skip("compiled with gradients it contracts products and sums of fp32 in another way")
    batched = [place for place, tensor in enumerate(call.tensors) if tensor is not None and tensor.dim() > 2]

    def outputs(*tensors: Tensor) -> Outputs:
        by_place = dict(zip(batched, tensors, strict=True))
        return tuple(call.outputs([by_place.get(place, tensor) for place, tensor in enumerate(call.tensors)]))

    rows = [call.tensors[place] for place in batched]
    assert_invariant(outputs, tuple(row.repeat(22 if GPU else 3, *[1] * (row.dim() - 1)) for row in rows))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP32, FP32), (BF16, FP16)], ids=str)
def test_a_norm_of_a_sum_has_the_bits_of_the_norm_fused_with_its_add(
    dtypes: tuple[torch.dtype, torch.dtype], width: int, device: str
) -> None:
    x, r = (values(device, ROWS, width, dtype=dtype) for dtype in dtypes)
    for dtype in (BF16, FP32):
        w = values(device, width, dtype=dtype)
        for casting in ("llama", "gemma"):
            y, s = add_rms_norm(x, r, w, casting=casting)
            assert_same_bits(rms_norm(s, w, casting=casting), y)


@pytest.mark.parametrize("fp8_format", ["rowwise", "block128"])
def test_a_row_of_codes_has_the_same_bits_in_any_batch(fp8_format: str, device: str) -> None:
    x, r, w = values(device, ROWS, 256), values(device, ROWS, 256), values(device, 256)

    def codes(x: Tensor, r: Tensor) -> Outputs:
        alone, (added, s) = rms_norm_fp8(x, w, fp8_format=fp8_format), add_rms_norm_fp8(x, r, w, fp8_format=fp8_format)
        return alone.q, alone.scale, added.q, added.scale, s

    assert_invariant(codes, (x, r))
