"""Tuning tries plans that the kernels take, and what it prints can be pasted."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from fused_norm.bench import tune
from fused_norm.kernels.plans import BackwardPlan, Device, ForwardPlan, backward_plan, forward_plan

WIDTHS = (1, 128, 1000, 4096, 5120, 16384, 40000)


@dataclass(frozen=True)
class Plan:
    rows: int
    warps: int


def test_candidates_are_all_combinations_and_the_plan_comes_first():
    found = tune.candidates(Plan(1, 4), {"rows": (1, 2), "warps": (4, 8), "no_such_field": (1, 2, 3)})
    assert found == [Plan(1, 4), Plan(1, 8), Plan(2, 4), Plan(2, 8)]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_shipped_plan_is_always_tried_first(width):
    device = Device()
    assert tune.forward_candidates(width, device)[0] == forward_plan(width, device)
    assert tune.backward_candidates(width, 6, device, summed=False)[0] == backward_plan(width, 6, device)


@pytest.mark.parametrize("width", WIDTHS)
def test_candidates_differ_and_are_many(width):
    device = Device()
    plans = [*tune.forward_candidates(width, device), *tune.backward_candidates(width, 6, device, summed=False)]
    assert len(set(plans)) == len(plans) > (10 if width > 1 else 2)


@pytest.mark.parametrize("operator", [pytest.param("norm", marks=pytest.mark.slow), "add"])
def test_every_candidate_for_a_narrow_row_is_right(run, operator):
    run.quick = operator == "add"  # A few are enough for the second one.
    forward, backward = tune.tune_case(run, tune.OperatorCase(operator, 5, 24), torch.bfloat16)
    assert forward.failed == backward.failed == 0
    assert min(forward.tried, backward.tried) >= (3 if run.quick else 30)
    assert forward.shipped_seconds >= forward.seconds


def test_a_plan_that_fails_is_counted_and_the_next_one_tried(run):
    case = tune.OperatorCase("norm", 4, 8)
    good, bad = forward_plan(8, Device()), ForwardPlan("static_persistent", 1, 8, 1, 1)

    def calls(plan):
        if plan == bad:
            raise RuntimeError("out of resources")
        return [lambda: [torch.ones(4, 8)]]

    exact = [torch.ones(4, 8, dtype=torch.float64)]
    found = tune.fastest_plan(run, case, "forward", calls, [good, bad], exact, torch.bfloat16)
    assert (found.best, found.tried, found.failed) == (good, 1, 1)
    wrong = [2 * exact[0]]
    assert tune.fastest_plan(run, case, "forward", calls, [good, bad], wrong, torch.bfloat16) is None


def test_what_is_printed_can_be_pasted(run):
    found = tune.tune(run, [64])
    assert [(row.operator, row.direction) for row in found] == [
        (operator, direction) for operator in ("norm", "add") for direction in ("forward", "backward")
    ]
    names = {"ForwardPlan": ForwardPlan, "BackwardPlan": BackwardPlan}
    for row, text in zip(found, tune.table(found).splitlines()[2:], strict=True):
        assert eval(text[text.index(type(row.best).__name__) :], names) == row.best


def test_no_time_is_left_out_in_words(run):
    run.budget = 0.0
    assert tune.tune(run, [64]) == []
    assert run.results.left_out
