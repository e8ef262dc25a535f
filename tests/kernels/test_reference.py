"""The reference, used by the patcher and for CPU tensors, has the bits of modelling code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fused_norm.spec import NormSpec

from .conftest import OPERATORS
from .numerics import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    STOCK,
    Norm,
    assert_same_rounding,
    none_rounded_once,
    squares_that_round_up,
)

EPS = 1e-3
"""Large enough to show where it is added."""


def rms_norm(spec: NormSpec, x: Tensor, w: Tensor | None) -> Tensor:
    return OPERATORS["rms_norm"].reference(x, w, spec, None)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("x", DTYPES, ids=str)
@pytest.mark.parametrize("casting", STOCK)
def test_equals_the_stock_formula(
    casting: str, x: torch.dtype, zero_centered: bool, weighted: bool, device: str
) -> None:
    norm = Norm(casting, zero_centered, x=x, w=BF16 if weighted else None, eps=EPS)
    inputs = norm.inputs((64, 128), device)
    expected, _ = norm.stock(inputs.x, None, inputs.w)
    ours = rms_norm(norm.spec, inputs.x, inputs.w)
    if casting == "none" and x != FP32:  # torch sums 16-bit numbers in another order than fp32 ones
        assert_same_rounding(norm, ours, expected)
    else:
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("units", [0, 0.4])
def test_casting_none_rounds_the_squares_and_their_mean(units: float, dtype: torch.dtype, device: str) -> None:
    x, eps = squares_that_round_up((64, 130), dtype, device), units * torch.finfo(dtype).eps
    ours = rms_norm(NormSpec("none", eps=eps), x, None)
    assert_same_rounding(Norm("none", x=dtype, w=None), ours, none_rounded_once(x, None, eps, False))


def test_casting_none_squares_beyond_fp16() -> None:
    x = torch.tensor([[6e4, -6e4, 3e4, 0.0]], dtype=FP16)
    y = rms_norm(NormSpec("none"), x, None)
    exact, _ = Norm(w=None).true(x.double(), None, None)
    torch.testing.assert_close(y.double(), exact, rtol=2e-3, atol=0)  # half a step of rstd, 2^-25, is 0.13% of it


def test_the_sum_is_rounded_before_it_is_normalised() -> None:
    inputs = Norm(x=BF16, r=FP16, w=BF16).inputs((4, 128), "cpu")
    spec = NormSpec("gemma", True, eps=EPS)
    for x, r in ((inputs.x, inputs.r), (inputs.x, inputs.x.flip(0)), (inputs.r, inputs.r.flip(0))):
        y, s = OPERATORS["add_rms_norm"].reference(x, r, inputs.w, spec, None, 1.0)
        assert torch.equal(s, r + x)
        assert torch.equal(y, rms_norm(spec, r + x, inputs.w))
