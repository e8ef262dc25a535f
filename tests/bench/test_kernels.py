"""Only what is right is timed, and nothing that one provider does keeps the others from being measured."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from fused_norm.bench import ahead, host, kernels
from fused_norm.bench.cases import QUICK, QUICK_MODES, Case, compose
from fused_norm.bench.providers import FUSED, FUSED_MODES, PROVIDERS, Provider
from fused_norm.bench.results import Results

CASE = Case("norm", 8, 64)
STOCK = PROVIDERS["stock"]


def measured(session, *providers, case=CASE):
    kernels.measure(session, "kernels", [case], [torch.float32], providers)
    return {(row.provider, row.direction): row for row in session.results.kernels}


def provider(name, change, **options):
    """The stock norm with ``change`` made to its result."""

    def build(case):
        norm = STOCK.build(case)
        return compose(case.operation, lambda x, w: change(norm(x, w)[0]), None)

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


def test_right_results_are_timed_in_both_ways(session):
    found = measured(session, STOCK, FUSED)
    assert set(found) == {(name, direction) for name in ("stock", "fused") for direction in ("forward", "backward")}
    for row in found.values():
        assert row.verdict == "ok"
        assert row.timing is not None
        assert row.profiled is not None
        assert 0 < row.error < 1e-4
        assert session.results.copy_of(row.bytes) is not None


def test_wrong_results_are_not_timed(session):
    found = measured(session, provider("wrong", lambda y: 1.01 * y), STOCK)
    row = found["wrong", "forward"]
    assert (row.verdict, row.timing, row.profiled) == ("wrong", None, None)
    assert row.error == pytest.approx(0.01, rel=0.01)
    assert found["stock", "forward"].verdict == "ok"


def test_a_wrong_backward_shows_although_the_forward_is_right(session):
    found = measured(session, provider("wrong", _WrongBackward.apply))
    assert found["wrong", "forward"].verdict == "ok"
    assert (found["wrong", "backward"].verdict, found["wrong", "backward"].timing) == ("wrong", None)


def test_results_that_are_not_finite_are_wrong_and_fit_into_json(session):
    row = measured(session, provider("nan", lambda y: y * float("nan")))["nan", "forward"]
    assert (row.verdict, row.error) == ("wrong", None)
    assert Results.load(session.path) == session.results


@pytest.mark.gpu
def test_a_row_that_is_not_written_shows_even_when_the_memory_held_the_right_result(session):
    def lazily(y):
        result = torch.empty_like(y)
        result[:-1] = y[:-1]
        return result

    case = Case("norm", 4096, 4096, backward=False)
    assert measured(session, STOCK, provider("lazy", lazily), case=case)["lazy", "forward"].verdict == "wrong"


def test_an_exception_is_reported_and_the_others_are_measured(session):
    def build(case):
        raise RuntimeError("out of\n  shared memory")

    found = measured(session, Provider("broken", build), STOCK)
    assert found["broken", "forward"].verdict == "failed"
    assert found["broken", "forward"].detail == "RuntimeError: out of shared memory"
    assert found["stock", "backward"].verdict == "ok"


def test_a_refusal_is_no_failure(session):
    def build(case):
        raise ValueError("rows are too wide")

    assert measured(session, Provider("narrow", build, refuses=(ValueError,)))["narrow", "forward"].verdict == "refused"


def test_who_is_missing_is_left_out_by_name(session):
    measured(session, Provider("elsewhere", STOCK.build, package="no_such_package"))
    assert session.results.kernels == []
    assert session.results.left_out == ["elsewhere: no_such_package is not installed"]


def test_a_backward_that_writes_into_its_gradient_gets_copies(device):
    inputs = CASE.inputs(torch.float32, torch.device(device), seed=0)
    before = inputs.gradients[0].clone()
    for copies in (True, False):
        (backward,) = kernels.calls(
            provider("in place", _InPlaceBackward.apply).build(CASE), "backward", [inputs], copy_gradients=copies
        )
        backward()
        assert torch.equal(inputs.gradients[0], before) == copies


def test_no_time_is_left_out_in_words(session):
    session.budget, session.began = 5.0, time.perf_counter() - 6
    measured(session, STOCK)
    assert session.results.kernels == []
    assert session.results.left_out == [f"{CASE.name} float32: after 5 s"]


def test_results_are_on_disk_after_every_case(session):
    seen = []
    session.say = lambda text: seen.append(session.path.exists() and len(Results.load(session.path).kernels))
    kernels.measure(session, "kernels", QUICK[:3], [torch.float32], [STOCK])
    assert seen == [False, 2, 4]


def test_modes_are_measured_side_by_side(session):
    kernels.measure(session, "modes", QUICK_MODES, [torch.float32], FUSED_MODES, profile=False)
    rows = session.results.kernels
    assert [row.provider for row in rows] == ["fused", "static_persistent", "multi_wave_cached", "multi_wave_reload"]
    assert {(row.part, row.direction, row.verdict, row.profiled) for row in rows} == {("modes", "forward", "ok", None)}


def test_host_time_is_measured_alone_and_in_a_chain(session):
    host.measure(session, [STOCK, FUSED])
    assert session.results.left_out == []
    found = {(row.operation, row.provider, row.chain) for row in session.results.host}
    every = itertools.product(("norm", "add", "sandwich", "qk", "rope"), ("stock", "fused"), (1, 2))
    assert set(every) <= found
    assert ("norm", "identity", 1) in found
    stock = [row for row in session.results.host if row.provider == "stock"]
    assert all(row.training.median > row.forward.median > 0 for row in stock), "the interpreter's times are noise"


def test_compiling_ahead_runs_in_other_processes(session):
    said = []
    session.say = said.append
    wide = Case("norm", 1, 65536)
    refusing = next(provider for provider in FUSED_MODES if provider.name == "multi_wave_cached")
    tasks = [(CASE, torch.float32, FUSED), (CASE, torch.float32, STOCK), (wide, torch.float32, refusing)]
    ahead.compile_ahead(session, tasks, 1)
    assert said == [
        "compiling ahead: 2 operations in 1 processes",
        "compiled ahead; 1 failed: multi_wave_cached norm 1x65536: ValueError",
    ]
