"""Only right results are timed, and no error of one provider keeps the others from being measured."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest
import torch

from benchmarks import operator_timings
from benchmarks.operator_cases import QUICK, QUICK_MODES, OperatorCase, compose_operator
from benchmarks.providers import FUSED, FUSED_MODES, PROVIDERS, Provider
from benchmarks.results import Results
from benchmarks.timing import Timing
from fused_norm.kernels.plans import backward_plan
from fused_norm.kernels.triton.devices import device_facts

CASE = OperatorCase("norm", 8, 64)
STOCK = PROVIDERS["stock"]


def measured(run, *providers, case=CASE):
    operator_timings.measure(run, "kernels", [case], [torch.float32], providers)
    return {(row.provider, row.direction): row for row in run.results.kernels}


def provider(name, change, **options):
    """The stock norm with ``change`` made to its result."""

    def build(case):
        norm = STOCK.build(case)
        return compose_operator(case.operator, lambda x, w: change(norm(x, w)[0]), None)

    return Provider(name, build, **options)


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        return 1.01 * dy


class _InPlaceBackward(_WrongBackward):
    @staticmethod
    def backward(ctx, dy):
        return dy.zero_()


def test_right_results_are_timed_in_both_ways(run):
    found = measured(run, STOCK, FUSED)
    assert set(found) == {(name, direction) for name in ("stock", "fused") for direction in ("forward", "backward")}
    for row in found.values():
        assert row.verdict == "ok"
        assert row.timing is not None
        assert row.profiled is not None
        assert row.extra_bytes >= 0
        assert 0 < row.error < 1e-4
        assert run.results.copy_of(row.bytes) is not None


def test_wrong_results_are_not_timed(run):
    found = measured(run, provider("wrong", lambda y: 1.01 * y), STOCK)
    row = found["wrong", "forward"]
    assert (row.verdict, row.timing, row.profiled) == ("wrong", None, None)
    assert row.error == pytest.approx(0.01, rel=0.01)
    assert found["stock", "forward"].verdict == "ok"


def test_a_wrong_backward_shows_although_the_forward_is_right(run):
    found = measured(run, provider("wrong", _WrongBackward.apply))
    assert found["wrong", "forward"].verdict == "ok"
    assert (found["wrong", "backward"].verdict, found["wrong", "backward"].timing) == ("wrong", None)


def test_results_that_are_not_finite_are_wrong_and_fit_into_json(run):
    row = measured(run, provider("nan", lambda y: y * float("nan")))["nan", "forward"]
    assert (row.verdict, row.error) == ("wrong", None)
    assert Results.load(run.path) == run.results


@pytest.mark.gpu
def test_a_row_that_is_not_written_shows_even_when_the_memory_held_the_right_result(run):
    def lazily(y):
        result = torch.empty_like(y)
        result[:-1] = y[:-1]
        return result

    case = OperatorCase("norm", 4096, 4096, backward=False)
    assert measured(run, STOCK, provider("lazy", lazily), case=case)["lazy", "forward"].verdict == "wrong"


def test_an_exception_is_reported_and_the_others_are_measured(run):
    def build(case):
        raise RuntimeError("out of\n  shared memory")

    found = measured(run, Provider("broken", build), STOCK)
    assert found["broken", "forward"].verdict == "failed"
    assert found["broken", "forward"].detail == "RuntimeError: out of shared memory"
    assert found["stock", "backward"].verdict == "ok"


def test_a_refusal_is_no_failure(run):
    def build(case):
        raise ValueError("rows are too wide")

    assert measured(run, Provider("narrow", build, refuses=(ValueError,)))["narrow", "forward"].verdict == "refused"


def test_who_is_missing_is_left_out_by_name(run):
    measured(run, Provider("elsewhere", STOCK.build, package="no_such_package"))
    assert run.results.kernels == []
    assert run.results.left_out == ["elsewhere: no_such_package is not installed"]


def test_a_backward_that_writes_into_its_gradient_gets_copies(device):
    inputs = CASE.inputs(torch.float32, torch.device(device), seed=0)
    before = inputs.gradients[0].clone()
    for copies in (True, False):
        (backward,) = operator_timings.operator_calls(
            provider("in place", _InPlaceBackward.apply).build(CASE), "backward", [inputs], copy_gradients=copies
        )
        backward()
        assert torch.equal(inputs.gradients[0], before) == copies


def test_no_time_is_left_out_in_words(run):
    run.budget, run.began = 5.0, time.perf_counter() - 6
    measured(run, STOCK)
    assert run.results.kernels == []
    assert run.results.left_out == [f"{CASE.name} float32: after 5 s"]


def test_results_are_on_disk_after_every_case(run):
    seen = []
    run.say = lambda text: seen.append(run.path.exists() and len(Results.load(run.path).kernels))
    operator_timings.measure(run, "kernels", QUICK[:3], [torch.float32], [STOCK])
    assert seen == [False, 2, 4]


def test_modes_are_measured_side_by_side(run):
    operator_timings.measure(run, "modes", QUICK_MODES, [torch.float32], FUSED_MODES, profile=False)
    rows = run.results.kernels
    assert [row.provider for row in rows] == ["fused", "static_persistent", "multi_wave_cached", "multi_wave_reload"]
    assert {(row.part, row.direction, row.verdict, row.profiled) for row in rows} == {("modes", "forward", "ok", None)}


def test_calls_go_through_all_sets_of_inputs(run, monkeypatch):
    monkeypatch.setattr(operator_timings, "input_sets", lambda moved_bytes, device: 3)
    monkeypatch.setattr(operator_timings, "leaves_cache", lambda total_bytes, device: total_bytes)
    results = []

    def gpu_time(calls, device, *, seconds):
        results.append([call()[0] for call in calls])
        return Timing.of([1.0], "wall")

    monkeypatch.setattr(operator_timings, "gpu_time", gpu_time)
    found = measured(run, STOCK)
    for row, results_of_sets in zip(found.values(), results, strict=True):
        assert row.verdict == "ok"
        assert row.cold == 3 * row.bytes, "all sets together have to be larger than the cache"
        assert len(results_of_sets) == 3
        assert not any(torch.equal(one, other) for one, other in itertools.combinations(results_of_sets, 2))


@pytest.mark.parametrize(("overwrites", "verdict"), [(True, "ok"), (False, "wrong")])
def test_gradients_that_a_provider_overwrites_are_not_those_of_the_next(overwrites, verdict, run):
    overwriting = provider("in place", _InPlaceBackward.apply, overwrites_gradients=overwrites)
    assert measured(run, overwriting, STOCK)["stock", "backward"].verdict == verdict


def test_the_budget_is_asked_before_every_provider(run):
    run.budget = 5.0

    def build(case):
        run.began -= 6
        return STOCK.build(case)

    found = measured(run, Provider("slow", build), STOCK)
    assert {name for name, _ in found} == {"slow"}
    assert run.results.left_out == [f"{CASE.name} float32 stock: after 5 s"]


def test_memory_is_what_is_kept_and_what_is_summed(run):
    """Of a norm: nothing by itself; with its backward rstd and each program's share of dw, fp32 all of them."""
    rows, width = 64, 128
    case = OperatorCase("norm", rows, width)
    inputs = case.inputs(torch.bfloat16, run.device, seed=0)
    operator = FUSED.build(case)
    with torch.no_grad():
        assert operator_timings.extra_memory(operator, "forward", inputs, run.device) == 0
    plan = backward_plan(width, 6, device_facts(run.device))
    shares = min(plan.programs, rows // plan.rows)
    extra = operator_timings.extra_memory(operator, "backward", inputs, run.device)
    assert extra == 4 * rows + 4 * width * shares


def test_memory_counts_what_is_given_back_before_the_end(run):
    def build(case):
        return lambda x, w: (((x * w) * w) * w,)

    with torch.no_grad():
        inputs = CASE.inputs(torch.float32, run.device, seed=0)
        extra = operator_timings.extra_memory(build(CASE), "forward", inputs, run.device)
    assert extra == inputs.arguments[0].nbytes, "two at the peak, one of which is the output"


def test_a_result_in_place_is_no_new_output(run):
    with torch.no_grad():
        inputs = CASE.inputs(torch.float32, run.device, seed=0)
        assert operator_timings.extra_memory(lambda x, w: (x.mul_(w),), "forward", inputs, run.device) == 0


def test_no_memory_is_told_of_who_gets_copies_of_its_arguments(run):
    found = measured(run, replace(STOCK, overwrites_arguments=("norm",)))
    assert {(row.verdict, row.extra_bytes) for row in found.values()} == {("ok", None)}
