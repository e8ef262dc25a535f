"""Distances between runs: relative, robust where they have to be, and infinite where there is nothing to compare."""

import math

import pytest
import torch

from fused_norm.convergence.run_record import ZERO_SHARE, distances, share_unequal


def test_a_distance_is_relative_to_the_stock_tensor():
    stock = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([100.0])}
    assert distances({"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([101.0])}, stock) == pytest.approx(
        {"a": 0.1, "b": 0.01}
    )


def test_a_tensor_that_should_be_zero_is_compared_with_the_others():
    stock = {"zero": torch.zeros(4), "other": torch.ones(4)}
    rms = 0.5**0.5
    found = distances({"zero": torch.full((4,), 1e-6), "other": torch.ones(4)}, stock)
    assert found["zero"] == pytest.approx(1e-6 / (ZERO_SHARE * rms), rel=1e-4)


def test_what_is_missing_or_not_finite_is_infinitely_far():
    stock = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}
    found = distances({"a": torch.tensor([1.0, math.nan]), "b": torch.tensor([1.0, math.inf])}, stock, trim=0.01)
    assert found == {"a": math.inf, "b": math.inf, "c": math.inf}


def test_the_farthest_elements_can_be_left_out_and_no_more_of_them():
    stock, one, many = torch.ones(200), torch.ones(200), torch.ones(200)
    one[:2], many[:3] = 5.0, 5.0
    assert distances({"a": one}, {"a": stock}, trim=0.01)["a"] == 0
    assert distances({"a": many}, {"a": stock}, trim=0.01)["a"] > 0.1


def test_elements_that_differ_are_counted_and_another_dtype_counts_as_all():
    one = torch.ones(8, dtype=torch.bfloat16)
    other = one.clone()
    other[0] = 2.0
    assert share_unequal(one, other) == 1 / 8
    assert share_unequal(one, one.float()) == 1.0
