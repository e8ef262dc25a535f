"""norm_add: the sum and where its gradient goes, held against the stock code and float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fused_norm.kernels import norm_add

from .numerics import BASE_CASTINGS, BF16, FP16, FP32, in_layout
from .sandwich import Sandwich, assert_within_budget, make_inputs, run

GEMMA = Sandwich("gemma", True, BF16, BF16, BF16).opened
LLAMA = Sandwich("llama", False, BF16, BF16, BF16).opened
MIXED = Sandwich("llama", True, BF16, FP16, FP32).opened
ONE_NUMBER = Sandwich("gemma", False, FP32, FP32, FP32).opened

# x, residual, weight
DTYPES = [
    (FP32, FP32, FP32),
    (BF16, BF16, BF16),
    (FP16, FP16, FP16),
    (BF16, BF16, FP32),
    (BF16, FP32, BF16),
    (FP32, BF16, BF16),
    (BF16, FP16, FP16),
]
MEANINGS = [
    *(Sandwich(c, z, *dtypes).opened for c in BASE_CASTINGS for z in (False, True) for dtypes in DTYPES),
    *(Sandwich(c, False, BF16, r, None).opened for c in BASE_CASTINGS for r in (BF16, FP32)),
    Sandwich("weight_dtype", False, FP32, FP32, BF16).opened,
    Sandwich("rounded_rstd", False, BF16, FP32, None).opened,
    Sandwich("rounded_gamma", True, FP32, BF16, BF16).opened,
]


@pytest.mark.parametrize("sandwich", MEANINGS, ids=str)
def test_every_meaning_is_as_accurate_as_the_stock_code(sandwich: Sandwich, device: str) -> None:
    assert_within_budget(sandwich, make_inputs(sandwich, (19, 130), device))


@pytest.mark.parametrize("width", [1, 7, 64, 123, 513, 1024, 1025, 3840, 5376])
def test_every_width_is_as_accurate_as_the_stock_code(width: int, device: str) -> None:
    assert_within_budget(GEMMA, make_inputs(GEMMA, (67 if width <= 130 else 2, width), device))


@pytest.mark.parametrize("sandwich", [GEMMA, MIXED, Sandwich("none", False, BF16, FP32, None).opened], ids=str)
@pytest.mark.parametrize("sandwich_limits", ["forward"], indirect=True)
@pytest.mark.usefixtures("sandwich_limits")
def test_too_wide_rows_are_as_accurate_as_the_stock_code(
    sandwich: Sandwich, device: str, launched: Callable[[], list[str]]
) -> None:
    inputs = make_inputs(sandwich, (2, 3, 4, 130), device)
    inputs["x"] = in_layout("transposed heads", inputs["x"])
    ours = assert_within_budget(sandwich, inputs)
    assert launched() == ["_forward_kernel", "_backward_kernel", *_summing(sandwich)]
    assert ours["s"].transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("shape", [(130,), (2, 3, 5, 130), (3, 1)], ids=str)
def test_any_leading_shape(shape: tuple[int, ...], device: str) -> None:
    assert_within_budget(GEMMA, make_inputs(GEMMA, shape, device))


def _summing(sandwich: Sandwich) -> list[str]:
    """The launch that sums the weight's gradient."""
    return [] if sandwich.inner is None else ["_sum_shares_kernel"]


def test_one_launch_forward_and_one_backward(device: str, launched: Callable[[], list[str]]) -> None:
    run(GEMMA.fused, make_inputs(GEMMA, (5, 64), device))
    assert launched() == ["_forward_kernel", "_backward_kernel", *_summing(GEMMA)]


@pytest.mark.parametrize("frozen", [("inner",), ("x",), ("x", "inner")], ids="-".join)
def test_the_residuals_gradient_needs_no_kernel(
    frozen: tuple[str, ...], device: str, launched: Callable[[], list[str]]
) -> None:
    run(GEMMA.fused, make_inputs(GEMMA, (5, 123), device), frozen)
    assert ("_backward_kernel" in launched()) == (frozen != ("x", "inner"))


@pytest.mark.parametrize("sandwich", [GEMMA, MIXED], ids=str)
def test_the_residual_gets_the_gradient_that_arrives(sandwich: Sandwich, device: str) -> None:
    inputs = make_inputs(sandwich, (5, 130), device)
    ours = run(sandwich.fused, inputs)
    assert torch.equal(ours["dr"], inputs["ds"].to(sandwich.r))
    assert ours["dr"].untyped_storage().data_ptr() != ours["dx"].untyped_storage().data_ptr()


def test_gradients_accumulated_in_place_do_not_meet(device: str) -> None:
    """The residual feeds two adds, whose gradients autograd sums: what each was handed stays as it was."""
    inputs = make_inputs(ONE_NUMBER, (5, 64), device)
    x, r, w = (inputs[name].detach().requires_grad_() for name in ("x", "r", "inner"))
    s = norm_add(x, r, w, casting="gemma") + norm_add(x, r, w, casting="gemma")
    once = run(ONE_NUMBER.fused, inputs)
    for _ in range(2):
        s.backward(inputs["ds"], retain_graph=True)
    assert torch.equal(r.grad, 4 * once["dr"])
    torch.testing.assert_close(x.grad, 4 * once["dx"])
    torch.testing.assert_close(w.grad, 4 * once["dinner"])
