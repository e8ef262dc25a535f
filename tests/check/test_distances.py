"""Distances between runs are relative, robust if required, and infinite if there is nothing to compare."""

import math

import pytest
import torch

from fused_norm.check.distances import distances, share_apart, slope_errors


def test_a_distance_is_relative_to_the_stock_tensor_and_of_one_that_should_be_zero_to_all():
    stock = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([100.0])}
    near = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([101.0])}
    assert distances(near, stock) == pytest.approx({"a": 0.1, "b": 0.01})
    stock = {"zero": torch.zeros(4), "other": torch.ones(4)}
    actual = distances({"zero": torch.full((4,), 1e-6), "other": torch.ones(4)}, stock)
    assert actual["zero"] == pytest.approx(1e-6 / (1e-3 * 0.5**0.5), rel=1e-4)


def test_what_is_missing_or_not_finite_is_infinitely_far():
    stock = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}
    actual = distances({"a": torch.tensor([1.0, math.nan]), "b": torch.tensor([1.0, math.inf])}, stock, trim=0.01)
    assert actual == {"a": math.inf, "b": math.inf, "c": math.inf}


@pytest.mark.parametrize(("size", "left_out"), [(400, 4), (32, 3)], ids=["a share", "a few of a small tensor"])
def test_the_farthest_elements_can_be_left_out_and_no_more_of_them(size, left_out):
    stock, few, many = (torch.ones(size) for _ in range(3))
    few[:left_out], many[: left_out + 1] = 5.0, 5.0
    assert distances({"a": few}, {"a": stock}, trim=0.01)["a"] == 0
    assert distances({"a": many}, {"a": stock}, trim=0.01)["a"] > 0.1


def test_a_slope_sees_what_all_numbers_have_in_common_and_averages_out_the_rest():
    torch.manual_seed(0)
    stock = {"a": torch.randn(10_000), "zero": torch.full((16,), 1e-9), "few": torch.ones(8)}
    rounded = {"a": stock["a"].bfloat16().float(), "zero": torch.ones(16), "few": torch.ones(8)}
    smaller = {"a": rounded["a"] * 0.998, "zero": torch.ones(16)}
    assert slope_errors(rounded, stock)["a"] < 1e-4
    assert slope_errors(smaller, stock)["a"] == pytest.approx(0.002, rel=0.05)
    assert slope_errors(rounded, stock).keys() == {"a"}, "of no zero and no few numbers"
    assert slope_errors({"zero": stock["zero"]}, stock)["a"] == math.inf


def test_the_rows_that_differ_most_can_be_left_out_and_no_more_of_them():
    stock = torch.ones(21, 72, dtype=torch.float16)
    others = stock.clone()
    others[4], others[9, :12] = 2.0, 2.0  # 84 numbers, 72 of them in one row
    assert share_apart(others, stock) == pytest.approx(84 / (21 * 72))
    assert share_apart(others, stock, rows_left_out=1 / 21) == pytest.approx(12 / (21 * 72))
    for rows in range(1, 200):
        assert share_apart(torch.zeros(rows, 1), torch.ones(rows, 1), rows_left_out=1 / rows) == (rows - 1) / rows
