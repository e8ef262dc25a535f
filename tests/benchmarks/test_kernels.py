"""Only right results are timed, providers take turns, and an error of one does not stop the others."""

import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch

from benchmarks import kernels
from benchmarks.benchmark_run import RefusedError
from benchmarks.operator_cases import OPERATORS, OperatorCase, eager_parts
from benchmarks.providers import EVERY, FUSED, OURS, PROVIDERS, Provider
from benchmarks.results import Results
from benchmarks.timing import Sampler

CASE = OperatorCase.named("rms_norm 8x64")
STOCK = PROVIDERS["stock"]


def measured(run, *providers, case=CASE):
    kernels.measure(run, [case], [torch.float32], providers)
    return {(row.by, row.kind): row for row in run.results.of("kernels")}


def provider(name, change, **options):
    """Return a provider of the stock norm that applies ``change`` to its result."""

    def build(case):
        parts = eager_parts(case)
        return OPERATORS[case.operator].made_of(replace(parts, norm=lambda x, w: change(parts.norm(x, w))))

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


@pytest.mark.slow
def test_right_results_are_timed_and_the_default_beside_modes(run):
    rows = measured(run, STOCK, FUSED)
    assert set(rows) == {(name, direction) for name in ("stock", "fused") for direction in ("forward", "backward")}
    copies = {row.bytes for row in run.results.of("copy")}
    for row in rows.values():
        assert row.verdict == "ok"
        assert row.timing is not None
        assert row.extra_bytes >= 0
        assert 0 < row.error < 1e-4
        assert row.bytes in copies
    assert Results.load(run.path) == run.results
    run.results.rows.clear()
    modes = measured(run, *(EVERY[name] for name in OURS), case=replace(CASE, backward=False))
    names = ("fused", "static_persistent", "multi_wave_cached", "multi_wave_reload")
    assert {key: row.verdict for key, row in modes.items()} == {(name, "forward"): "ok" for name in names}


@pytest.mark.parametrize(
    ("change", "wrong_in", "error"),
    [
        (lambda y: 1.01 * y, "forward", pytest.approx(0.01, rel=0.01)),
        (lambda y: y * float("nan"), "forward", None),
        (_WrongBackward.apply, "backward", pytest.approx(0.0226, rel=0.01)),
    ],
)
def test_wrong_results_are_not_timed_and_fit_into_json(change, wrong_in, error, run):
    rows = measured(run, provider("wrong", change), STOCK)
    row = rows["wrong", wrong_in]
    assert (row.verdict, row.timing, row.error) == ("wrong", None, error)
    assert rows["stock", wrong_in].verdict == "ok"
    assert rows["wrong", "forward"].verdict == ("wrong" if wrong_in == "forward" else "ok")
    assert Results.load(run.path) == run.results


@pytest.mark.gpu
def test_a_row_that_is_not_written_shows_even_when_the_memory_held_the_right_result(run):
    def lazily(y):
        result = torch.empty_like(y)
        result[:-1] = y[:-1]
        return result

    case = OperatorCase.named("rms_norm 4096x4096", backward=False)
    assert measured(run, STOCK, provider("lazy", lazily), case=case)["lazy", "forward"].verdict == "wrong"


def test_who_refuses_raises_or_is_missing_does_not_keep_the_others_from_being_measured(run):
    broken = Provider("broken", mock.Mock(side_effect=RuntimeError("out of\n  shared memory")))
    refusing = Provider("refusing", mock.Mock(side_effect=RefusedError("rows are too wide")))
    elsewhere = Provider("elsewhere", STOCK.build, package="no_such_package")
    rows = measured(run, broken, refusing, elsewhere, STOCK, case=replace(CASE, backward=False))
    assert {name: (row.verdict, row.detail) for (name, _), row in rows.items()} == {
        "broken": ("failed", "RuntimeError: out of shared memory"),
        "refusing": ("refused", "rows are too wide"),
        "stock": ("ok", None),
    }
    assert run.results.left_out == ["kernels by elsewhere: no_such_package is not installed"]


@pytest.mark.parametrize("overwrites", [True, False])
def test_gradients_that_a_provider_overwrites_are_not_those_of_the_next(overwrites, run):
    overwriting = provider("in place", _InPlaceBackward.apply, overwrites_gradients=overwrites)
    rows = measured(run, overwriting, STOCK)
    assert rows["stock", "backward"].verdict == ("ok" if overwrites else "wrong")


def test_calls_go_through_all_sets_of_inputs(run):
    results = []

    def sampler(calls, device):
        results.append([call()[0] for call in calls])
        return Sampler(lambda: 1.0, "wall")

    changed = {"sampler": sampler, "input_sets": lambda *_: 3, "leaves_cache": lambda total_bytes, device: total_bytes}
    with mock.patch.multiple(kernels, **changed):
        rows = measured(run, STOCK)
    for row, of_sets in zip(rows.values(), results, strict=True):
        assert row.verdict == "ok"
        assert row.cold == 3 * row.bytes, "all sets together have to be larger than the cache"
        assert len(of_sets) == 3
        assert not any(torch.equal(*pair) for pair in itertools.combinations(of_sets, 2))


def test_the_time_of_a_provider_is_that_of_its_own_calls(run):
    order = []

    def sampler(calls, device):
        return Sampler(lambda: calls[0]() and {"first": 1.0, "second": 2.0}[order[-1]], "wall")

    providers = [provider(name, lambda y, name=name: order.append(name) or y) for name in ("first", "second")]
    with mock.patch.object(kernels, "sampler", sampler):
        rows = measured(run, *providers, case=replace(CASE, backward=False))
    assert {name: row.seconds for (name, _), row in rows.items()} == {"first": 1.0, "second": 2.0}


@pytest.mark.parametrize(
    ("function", "tensors"),
    [(lambda x, w: (((x * w) * w) * w,), 1), (lambda x, w: (x.mul_(w),), 0)],
    ids=["two at the peak, one of which is the output", "in place"],
)
def test_memory_counts_what_is_given_back_before_the_end_and_no_result_in_place(function, tensors, run):
    with torch.no_grad():
        inputs = CASE.inputs(torch.float32, run.device, seed=0)
        extra = kernels.extra_memory(function, "forward", inputs, run.device)
    assert extra == tensors * inputs.arguments[0].nbytes
