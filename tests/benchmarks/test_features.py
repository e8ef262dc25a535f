"""Variants take turns in shuffled rounds, and each is held against stock before it is timed."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest
import torch

from benchmarks import features
from benchmarks.features import BASE, QUICK, VARIANTS
from benchmarks.model_cases import ModelCase
from benchmarks.results import Results
from benchmarks.timing import PeakMemory, Timing

LLAMA = ModelCase("llama", None, 1, 4)


def fused_modules(model):
    """The number of modules that run fused: their classes come from the project."""
    bases = [{base.__module__.partition(".")[0] for base in type(module).__mro__} for module in model.modules()]
    return sum("fused_norm" in names for names in bases)


@pytest.fixture
def calls(monkeypatch):
    """A clock instead of the real one: each timed series is kept as (fused modules of the model, calls)."""
    kept = []

    def synchronized_time(call, calls, device):
        kept.append((fused_modules(call.__self__.model), calls))
        return 1.0

    monkeypatch.setattr(features, "synchronized_time", synchronized_time)
    return kept


def by_variant(run):
    return {result.variant: result for result in run.results.features}


@pytest.mark.slow
def test_steps_are_compared_with_all_features(run):
    features.measure(run, [LLAMA], ["without residual", "stock"], torch.float32)
    assert [(row.row, row.variant) for row in run.results.features] == [
        ("tiny-llama 1x4", variant) for variant in (BASE, "without residual", "stock")
    ]
    for row in run.results.features:
        assert (row.verdict, row.detail) == ("ok", None)
        assert row.error < 1e-3
        assert row.timing.samples == row.ratio.rounds == 2
        assert (row.ratio.median == 1) == (row.variant == BASE)
    assert Results.load(run.path) == run.results


@pytest.mark.slow
@pytest.mark.parametrize(("case", "lacks"), [(QUICK[0], set()), (QUICK[1], {"without sandwich"})], ids=str)
def test_every_variant_is_right(case, lacks, run):
    features.measure(run, [case], list(VARIANTS), torch.float32)
    results = by_variant(run)
    assert {result.verdict for result in results.values()} == {"ok"}
    assert set(VARIANTS) - set(results) == lacks


@pytest.mark.slow
def test_a_variant_that_changes_nothing_is_left_out(run, calls):
    features.measure(run, [LLAMA], list(VARIANTS), torch.float32)
    measured = by_variant(run)
    assert set(VARIANTS) - set(measured) == {"without sandwich"}
    left_out = dict(line.removeprefix("features of tiny-llama 1x4, ").split(": ") for line in run.results.left_out)
    same = "the model has nothing of the kind"
    assert left_out["without sandwich"] == same


def test_every_round_has_every_variant_once_in_an_order_of_its_own(run, calls, monkeypatch):
    run.quick = False
    monkeypatch.setattr(features, "CASE_SECONDS", 0.0)
    features.measure(run, [LLAMA], ["all again", "without residual", "stock"], torch.float32)
    assert {row.ratio.rounds for row in run.results.features} == {8}, "the fewest rounds, whatever the time"
    fused = calls[-8 * 4 * 2 :]
    assert fused[::2] == fused[1::2], "a warm-up after each switch"
    rounds = [tuple(modules for modules, _ in fused[start : start + 8 : 2]) for start in range(0, 64, 8)]
    assert len(set(map(tuple, map(sorted, rounds)))) == 1
    assert len(set(rounds)) > 2
    assert sorted(Counter(rounds[0]).values()) == [1, 1, 2], "two variants are the same"


def test_a_short_call_is_timed_several_times_in_a_sample(run, monkeypatch):
    monkeypatch.setattr(features, "CASE_SECONDS", 0.0)
    run.quick = False
    series = []

    def synchronized_time(call, calls, device):
        series.append(calls)
        return 0.06

    monkeypatch.setattr(features, "synchronized_time", synchronized_time)
    features.measure(run, [LLAMA], [], torch.float32)
    assert set(series[2:]) == {2}


def test_the_ratio_is_of_the_same_round(run, monkeypatch):
    rounds = itertools.chain([0, 0], (index for index in range(100) for _ in range(4)))

    def synchronized_time(call, calls, device):
        return 2.0 ** next(rounds) * (1.0 if fused_modules(call.__self__.model) else 1.5)

    monkeypatch.setattr(features, "synchronized_time", synchronized_time)
    run.quick = False
    monkeypatch.setattr(features, "CASE_SECONDS", 0.0)
    features.measure(run, [LLAMA], ["stock"], torch.float32)
    ratio = by_variant(run)["stock"].ratio
    assert (ratio.median, ratio.low, ratio.high, ratio.verdict) == (1.5, 1.5, 1.5, "slower")


def test_a_wrong_variant_is_not_timed_and_one_that_raises_is_reported(run, calls, monkeypatch):
    apply = features.apply_fused_norm

    def broken(model, **options):
        report = apply(model, **options)
        if options.get("residual") is False:
            model.norm.forward = lambda x: 2 * x
        if options.get("norms") is False:
            raise RuntimeError("no such\n kernel")
        return report

    def remove(model):
        model.norm.__dict__.pop("forward", None)
        return restore(model)

    restore = features.remove_fused_norm
    monkeypatch.setattr(features, "apply_fused_norm", broken)
    monkeypatch.setattr(features, "remove_fused_norm", remove)
    features.measure(
        run, [ModelCase("qwen3", None, 1, 4)], ["without residual", "without norms", "stock"], torch.float32
    )
    results = by_variant(run)
    wrong, failed = results["without residual"], results["without norms"]
    assert (wrong.verdict, wrong.timing, wrong.ratio) == ("wrong", None, None)
    assert "is allowed" in wrong.detail
    assert (failed.verdict, failed.detail) == ("failed", "RuntimeError: no such kernel")
    assert results["stock"].ratio.rounds == 2


def test_a_variant_that_raises_in_a_round_is_measured_no_more(run, monkeypatch):
    taken = Counter()

    def synchronized_time(call, calls, device):
        stock = not fused_modules(call.__self__.model)
        taken[stock] += 1
        if stock and taken[stock] == 3:
            raise RuntimeError("out of memory")
        return 1.0

    monkeypatch.setattr(features, "synchronized_time", synchronized_time)
    features.measure(run, [LLAMA], ["stock"], torch.float32)
    results = by_variant(run)
    assert (results["stock"].verdict, results["stock"].detail) == ("failed", "RuntimeError: out of memory")
    assert results["stock"].ratio is results["stock"].timing is None
    assert results[BASE].ratio.rounds == 2


def test_no_time_is_left_out_in_words(run):
    run.budget, run.began = 5.0, time.perf_counter() - 6
    features.measure(run, QUICK, list(VARIANTS), torch.float32)
    assert run.results.features == []
    assert run.results.left_out == [f"features of {case.name}: after 5 s" for case in QUICK]


def test_peak_memory_is_that_of_what_is_timed(run, calls, monkeypatch):
    found = []
    monkeypatch.setattr(features, "peak_memory", lambda call, device: found.append(call) or PeakMemory(2**30, 2**31))
    monkeypatch.setattr(features, "synchronized_time", lambda call, calls, device: found.append(call) or 1.0)
    features.measure(run, [LLAMA], [], torch.float32)
    assert by_variant(run)[BASE].peak_bytes == 2**30
    assert len(set(found)) == 1


def test_the_gradients_of_a_timed_step_are_dropped(run, monkeypatch):
    def synchronized_time(call, calls, device):
        call()
        kept.extend(parameter.grad for parameter in call.__self__.model.parameters())
        return 1.0

    kept = []
    monkeypatch.setattr(features, "synchronized_time", synchronized_time)
    features.measure(run, [LLAMA], [], torch.float32)
    assert kept
    assert all(gradient is None for gradient in kept)


def test_after_the_budget_the_fewest_rounds_are_measured_and_no_more(run, monkeypatch):
    def synchronized_time(call, calls, device):
        run.began -= 6
        return 1.0

    monkeypatch.setattr(features, "synchronized_time", synchronized_time)
    run.quick, run.budget = False, 5.0
    features.measure(run, [LLAMA], [], torch.float32)
    assert by_variant(run)[BASE].ratio.rounds == 8


def test_times_are_of_one_call(run, calls):
    features.measure(run, [LLAMA], [], torch.float32)
    assert by_variant(run)[BASE].timing == Timing(1.0, 1.0, 1.0, 2, "wall")
