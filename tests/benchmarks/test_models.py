"""The variants of a row are held against stock, their memory is measured, and then they take turns."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch

from benchmarks import models
from benchmarks.benchmark_run import RefusedError
from benchmarks.model_cases import ModelCase
from benchmarks.model_steps import ALLOWED_ERROR, BenchmarkedModel
from benchmarks.model_variants import (
    COMPILED,
    FEATURES,
    FLOAT8,
    VARIANTS,
    Patched,
    float8_linears_alone,
    replaced_norms,
)
from benchmarks.providers import PROVIDERS
from benchmarks.results import Results
from benchmarks.samples import PairedRatio

from .tiny_cases import MODEL_CASES

TINY = ModelCase("llama", None, 1, 4)
IN_FEATURES = frozenset(FEATURES) - {"stock", "fused", "fused-stock-loss"}
OF_MODELS = [name for name in VARIANTS if name not in IN_FEATURES]


PREPARED = {}


@pytest.fixture(autouse=True)
def prepared_once(monkeypatch):
    """A tiny model is built once for all tests that take a step of it; each has a twin of its own."""
    prepare = models.prepare

    def twin_of_prepared(case, dtype, device):
        if case.step:
            return prepare(case, dtype, device)
        key = case, dtype, device
        if key not in PREPARED:
            PREPARED[key] = prepare(case, dtype, device)
        return PREPARED[key].twin()

    monkeypatch.setattr(models, "prepare", twin_of_prepared)


@pytest.fixture
def clock(monkeypatch):
    """A clock instead of the real one: keeps the variant that ran, and lets a call take 1 s, half of it the host's."""
    timed = []

    def host_and_step_time(call, calls, device):
        call()
        timed.append((call.args[0], calls))
        return 0.5, 1.0

    monkeypatch.setattr(models, "host_and_step_time", host_and_step_time)
    return timed


def results_of(run):
    return {result.by: result for result in run.results.of("models")}


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in MODEL_CASES if "fsdp2" not in case.step], ids=lambda case: case.name)
def test_every_variant_that_is_here_is_right_and_timed(case, run):
    if "qlora" in case.step:
        pytest.importorskip("bitsandbytes")
    autocast = {"autocast", "lora", "qlora"} & {*case.step}
    models.measure(run, [case], OF_MODELS, torch.bfloat16 if autocast else torch.float32)
    assert run.results.of("models")
    for result in run.results.of("models"):
        if result.by.startswith("fused-recompute") and case.generates:
            assert result.verdict == "refused"
            continue
        if result.by == "fused-stock-loss" and not {"loss", "masked"} & {*case.step}:
            assert result.verdict == "refused"
            continue
        if result.by in FLOAT8 and (case.generates or {"lora", "qlora"} & {*case.step}):
            assert result.verdict == "refused"
            continue
        assert (result.verdict, result.detail) == ("ok", None)
        assert result.timing is not None
        assert 0 < result.host.median <= result.timing.median
        alone = results_of(run).get(float8_linears_alone(result.by) or "")
        assert result.error < (1.25 * alone.error if alone else 0.1 if autocast else 1e-3)
    left_out = {line.partition(":")[0].rpartition(" ")[2] for line in run.results.left_out}
    assert {"stock", "fused", "fused-recompute", "torch"} <= set(results_of(run))
    assert set(results_of(run)) | left_out == set(OF_MODELS)


def test_a_variant_that_computes_something_else_is_not_timed(run, monkeypatch):
    def without_gamma(module, spec):
        return lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:], None, spec.eps)

    monkeypatch.setitem(VARIANTS, "torch", replaced_norms(without_gamma))
    models.measure(run, [TINY], ["torch", "stock"], torch.float32)
    wrong, stock = run.results.of("models")
    assert (wrong.verdict, wrong.timing, stock.verdict) == ("wrong", None, "ok")
    assert wrong.error > ALLOWED_ERROR
    assert Results.load(run.path) == run.results


def test_float8_may_be_hardly_farther_from_stock_than_its_linears_take_it(run, monkeypatch):
    pytest.importorskip("torchao.float8")

    float8 = VARIANTS["float8-rowwise"]

    def smaller(step):
        patched = float8(step)
        step.model.layers[0].mlp.register_forward_hook(lambda mlp, given, result: 0.5 * result)
        return patched

    monkeypatch.setitem(VARIANTS, "float8-rowwise-compile-layers", smaller)
    monkeypatch.setattr(models, "missing", lambda variant, device: None)
    models.measure(run, [replace(TINY, length=16)], ["float8-rowwise", "float8-rowwise-compile-layers"], torch.float32)
    alone, wrong = run.results.of("models")
    assert (alone.verdict, wrong.verdict) == ("ok", "wrong")
    assert wrong.error < ALLOWED_ERROR, "an error that would pass without float8"


@pytest.mark.parametrize(("variant", "verdict"), [("torch", "wrong"), ("compile-layers", "ok")])
def test_only_a_compiled_variant_may_draw_other_numbers_of_dropout(variant, verdict, run, monkeypatch):
    pytest.importorskip("peft")

    def drawn_again(step):
        step.model.register_forward_pre_hook(lambda *_: torch.manual_seed(5) and None)
        return Patched(step.model)

    monkeypatch.setitem(VARIANTS, variant, drawn_again)
    monkeypatch.setattr(models, "ALLOWED_ERROR", 1e-3)
    monkeypatch.setattr(models, "missing", lambda variant, device: None)
    models.measure(run, [replace(TINY, step=("lora", "dropout"), length=32)], [variant], torch.float32)
    (row,) = run.results.of("models")
    assert row.verdict == verdict
    assert row.error > 1e-3


def test_a_variant_that_raises_is_reported_and_one_that_there_is_not_is_refused(run, monkeypatch):
    def broken(module, spec):
        raise RuntimeError("no such kernel")

    def refused(step):
        raise RefusedError("there is no such patch")

    monkeypatch.setitem(VARIANTS, "torch", replaced_norms(broken))
    monkeypatch.setitem(VARIANTS, "liger", refused)
    monkeypatch.setattr(models, "missing", lambda variant, device: None)
    models.measure(run, [TINY], ["torch", "liger", "stock"], torch.float32)
    assert [(row.verdict, row.detail) for row in run.results.of("models")] == [
        ("failed", "RuntimeError: no such kernel"),
        ("refused", "there is no such patch"),
        ("ok", None),
    ]


def test_every_round_has_every_variant_once_in_an_order_of_its_own(run, clock, monkeypatch):
    run.quick = False
    monkeypatch.setitem(VARIANTS, "fused", VARIANTS["stock"])
    models.measure(run, [TINY], ["stock", "torch", "fused"], torch.float32)
    rounds = clock[1:]  # The first says how many calls a sample has.
    assert {calls for _, calls in rounds} == {1}
    turns = [tuple(id(model) for model, _ in rounds[start : start + 3]) for start in range(0, len(rounds), 3)]
    assert len(turns) == 15
    assert all(len(set(turn)) == 3 for turn in turns)
    assert len(set(turns)) > 2
    for result in run.results.of("models"):
        assert (result.timing.median, result.timing.samples) == (1.0, 15)
        assert (result.host.median, result.host.samples) == (0.5, 15)


def test_a_short_step_is_timed_several_times_in_a_sample(run, monkeypatch):
    run.quick = False
    series = []
    monkeypatch.setattr(models, "host_and_step_time", lambda call, calls, device: series.append(calls) or (0.01, 0.07))
    models.measure(run, [TINY], ["stock"], torch.float32)
    assert set(series[1:]) == {2}


def test_the_time_of_a_generation_is_that_of_a_token(run, clock):
    models.measure(run, [ModelCase("qwen3", None, 1, 4, ("generate",))], ["stock"], torch.float32)
    (result,) = run.results.of("models")
    assert (result.timing.median, result.host.median) == (0.25, 0.125)


def test_a_variant_runs_in_its_context_when_it_is_checked_and_timed(run, clock, monkeypatch):
    inside = Counter()
    running = []

    @contextlib.contextmanager
    def context():
        running.append(1)
        yield
        running.pop()

    forward_backward = BenchmarkedModel.forward_backward

    def watched(step, model=None):
        if model is not None:
            inside[len(running)] += 1
        return forward_backward(step, model)

    monkeypatch.setattr(BenchmarkedModel, "forward_backward", watched)
    monkeypatch.setitem(VARIANTS, "stock", lambda step: Patched(step.model, context))
    models.measure(run, [TINY], ["stock"], torch.float32)
    assert inside == {1: 1 + 2}, "a check, and a warm-up and a sample in each round"
    assert not running


def test_a_variant_that_raises_in_a_round_is_timed_no_more(run, monkeypatch):
    taken = Counter()

    def host_and_step_time(call, calls, device):
        replaced = "forward" in vars(call.args[0].norm)
        taken[replaced] += 1
        if replaced:
            raise RuntimeError("out of memory")
        return 0.5, 1.0

    monkeypatch.setattr(models, "host_and_step_time", host_and_step_time)
    models.measure(run, [TINY], ["stock", "torch"], torch.float32)
    results = results_of(run)
    assert (results["torch"].verdict, results["torch"].detail) == ("failed", "RuntimeError: out of memory")
    assert results["torch"].timing is None
    assert results["stock"].timing.samples == 1
    assert taken == {True: 1, False: 1}


def test_peaks_are_of_a_whole_step_without_what_others_hold(run, clock, monkeypatch):
    held = iter([40, 140, 140, 147])  # by former rows, with the weights, before each variant

    def peak_memory(call, device):
        step = call.func.__self__
        call()
        assert all(parameter.grad is None for parameter in step.model.parameters()), "none is kept for the next"
        return 1000, 2000

    monkeypatch.setattr(models, "peak_memory", peak_memory)
    monkeypatch.setattr(models, "_allocated", lambda device: next(held))
    models.measure(run, [TINY], ["stock", "torch"], torch.float32)
    assert [(row.peak_bytes, row.reserved_bytes) for row in run.results.of("models")] == [(960, 1960), (953, 1953)]


def test_gradients_do_not_add_up_over_steps(run, clock, monkeypatch):
    before = []
    forward_backward = BenchmarkedModel.forward_backward

    def watched(step, model=None):
        before.append([parameter.grad for parameter in step.model.parameters()])
        return forward_backward(step, model)

    monkeypatch.setattr(BenchmarkedModel, "forward_backward", watched)
    models.measure(run, [TINY], ["stock", "torch"], torch.float32)
    assert len(before) == 1 + 2 * (1 + 2), "stock's own, then for each a check, a warm-up and a sample"
    assert all(gradient is None for gradients in before for gradient in gradients)


def test_the_budget_is_asked_before_every_row_and_variant(run, clock, monkeypatch):
    run.budget = 5.0

    def slow(step):
        run.began -= 6
        return Patched(step.model)

    def too_late(*arguments):
        raise AssertionError("a model is built after the budget")

    monkeypatch.setitem(VARIANTS, "stock", slow)
    models.measure(run, [TINY], ["stock", "torch"], torch.float32)
    monkeypatch.setattr(models, "prepare", too_late)
    models.measure(run, [TINY], ["stock", "torch"], torch.float32)
    assert [row.by for row in run.results.of("models")] == ["stock"]
    assert run.results.left_out == [f"{TINY.name} torch: after 5 s", f"models: {TINY.name} stock, torch: after 5 s"]


def test_a_row_has_room_for_the_graphs_of_all_its_variants(run, clock, monkeypatch):
    config = torch._dynamo.config
    before = config.recompile_limit, config.fail_on_recompile_limit_hit
    found = []

    def variant(step):
        found.append((config.recompile_limit, config.fail_on_recompile_limit_hit))
        return Patched(step.model)

    monkeypatch.setitem(VARIANTS, "stock", variant)
    models.measure(run, [TINY], ["stock"], torch.float32)
    assert found == [(256, True)]
    assert (config.recompile_limit, config.fail_on_recompile_limit_hit) == before


def test_a_sharded_step_is_timed_by_the_same_calls_in_every_process(run, clock, monkeypatch):
    run.quick = False
    monkeypatch.setattr(BenchmarkedModel, "shares_weights", False)
    models.measure(run, [TINY], ["stock"], torch.float32, "features")
    assert [calls for _, calls in clock] == [1] * 8, "the fewest rounds"


def test_an_option_is_compared_with_everything_on_in_the_same_round(run, monkeypatch):
    rounds = itertools.count(1)  # the first says how many calls a sample has

    def slower(step):
        step.model.is_slower = True
        return Patched(step.model)

    def refused(step):
        raise RefusedError("the model has nothing of the kind")

    def host_and_step_time(call, calls, device):
        return 0.5, 2.0 ** (next(rounds) // 2) * (1.5 if "is_slower" in vars(call.args[0]) else 1.0)

    changed = {"fused": VARIANTS["stock"], "without rope": slower, "without sandwich": refused}
    run.quick = False
    monkeypatch.setitem(models.CASE_SECONDS, "features", 0.0)
    monkeypatch.setattr(models, "host_and_step_time", host_and_step_time)
    with mock.patch.dict(VARIANTS, changed):
        models.measure(run, [TINY], ["fused", "without rope", "without sandwich"], torch.float32, "features")
    rows = {row.by: row for row in run.results.of("features")}
    assert list(rows) == ["fused", "without rope", "without sandwich"]
    assert (rows["without rope"].ratio, rows["fused"].ratio) == (PairedRatio(1.5, 1.5, 1.5, 8), PairedRatio(1, 1, 1, 8))
    assert rows["without rope"].ratio.verdict == "slower"
    assert (rows["without sandwich"].verdict, rows["without sandwich"].ratio) == ("refused", None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-gemma3_text 1x8", "tiny-qwen3 loss 1x8", "tiny-qwen3 generate 1x2"])
def test_every_option_can_be_left_out(name, run):
    models.measure(run, [ModelCase.named(name)], FEATURES, torch.float32, "features")
    may_be_absent = ["without sandwich", "without adapter", *(() if "loss" in name else ("fused-stock-loss",))]
    assert {row.verdict for row in run.results.of("features") if row.by not in may_be_absent} == {"ok"}


def test_a_row_whose_stock_model_does_not_run_is_left_out_and_the_next_one_measured(run, clock, monkeypatch):
    outputs = BenchmarkedModel.outputs_and_gradients

    def too_large(step, model=None, seed=0):
        if step.tokens.shape[1] > 16:
            raise RuntimeError("out of memory")
        return outputs(step, model, seed)

    monkeypatch.setattr(BenchmarkedModel, "outputs_and_gradients", too_large)
    models.measure(run, [replace(TINY, length=32), TINY], ["stock"], torch.float32)
    assert [row.row for row in run.results.of("models")] == [TINY.name]
    assert run.results.left_out == ["tiny-llama 1x32: RuntimeError: out of memory"]


def test_a_sharded_model_is_left_to_torchrun(run):
    models.measure(run, [replace(TINY, step=("fsdp2",))], ["stock"], torch.float32)
    assert run.results.rows == []
    assert "torchrun --nproc-per-node 2" in run.results.left_out[0]


@pytest.mark.slow
def test_taking_turns_compiles_nothing_again(run, monkeypatch):
    graphs, while_timed = [], []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    def host_and_step_time(call, calls, device):
        call()
        while_timed.append(len(graphs))
        return 0.5, 1.0

    compile_model = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda model, *, dynamic, mode=None: compile_model(model, backend=backend, dynamic=dynamic)
    )
    monkeypatch.setitem(PROVIDERS, "compile", replace(PROVIDERS["compile"], on_cpu=True))
    monkeypatch.setattr(models, "host_and_step_time", host_and_step_time)
    other_numbers = [name for name in COMPILED if "tensorwise" in name or name.endswith("max")]  # of the same code
    variants = ["stock", "fused", *sorted(COMPILED.difference(other_numbers))]
    models.measure(run, [ModelCase("qwen3", None, 1, 16)], variants, torch.float32)
    assert [(row.by, row.detail) for row in run.results.of("models")] == [(variant, None) for variant in variants]
    assert len(while_timed) == len(variants)
    assert set(while_timed) == {len(graphs)}
