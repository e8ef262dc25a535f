"""The variants of a row are compared with stock, their memory is measured, and then they take turns."""

import itertools
from unittest import mock

import pytest
import torch

from benchmarks import models
from benchmarks.model_cases import ModelCase
from benchmarks.model_steps import ALLOWED_ERROR, BenchmarkedModel
from benchmarks.model_variants import FEATURES, VARIANTS, Patched, float8_linears_alone
from benchmarks.results import RefusedError, Results
from benchmarks.samples import PairedRatio

from .tiny_cases import MODEL_CASES

TINY = ModelCase("llama", None, 1, 4)
IN_FEATURES = frozenset(FEATURES) - {"stock", "fused", "fused-stock-loss"}
OF_MODELS = [name for name in VARIANTS if name not in IN_FEATURES]


def measured(run, *variants, case=TINY, part="models"):
    models.measure(run, [case], variants, torch.float32, part)
    return {result.by: result for result in run.results.of(part)}


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in MODEL_CASES if "fsdp2" not in case.step], ids=lambda case: case.name)
def test_every_variant_that_is_here_is_right_and_timed(case, run):
    if "qlora" in case.step:
        pytest.importorskip("bitsandbytes")
    autocast = {"autocast", "lora", "qlora"} & {*case.step}
    variants = OF_MODELS if "masked" in case.step else ["stock", "fused", "torch"]
    models.measure(run, [case], variants, torch.bfloat16 if autocast else torch.float32)
    rows = {result.by: result for result in run.results.of("models")}
    for name, result in rows.items():
        assert (result.verdict, result.detail) == ("ok", None)
        assert 0 < result.host.median <= result.timing.median
        alone = rows.get(float8_linears_alone(name) or "")
        assert result.error < (1.25 * alone.error if alone else 0.1 if autocast else 1e-3)
    assert {"stock", "fused", "torch"} <= set(rows)


def test_a_variant_that_is_wrong_raises_or_is_refused_is_not_timed_and_the_others_are(run, monkeypatch):
    def doubled(step):
        step.model.register_forward_hook(
            lambda model, inputs, output: setattr(output, "last_hidden_state", 2 * output[0])
        )
        return Patched(step.model)

    changed = {
        "torch": doubled,
        "liger-norms": mock.Mock(side_effect=RuntimeError("no\n such kernel")),
        "liger": mock.Mock(side_effect=RefusedError("there is no such patch")),
    }
    monkeypatch.setattr(models, "missing", lambda variant, device: None)
    with mock.patch.dict(VARIANTS, changed):
        rows = measured(run, *changed, "stock")
    assert [(row.verdict, row.timing is None) for row in rows.values()] == [
        ("wrong", True), ("failed", True), ("refused", True), ("ok", False),
    ]  # fmt: skip
    assert rows["torch"].error > ALLOWED_ERROR
    assert rows["liger-norms"].detail == "RuntimeError: no such kernel"
    assert rows["liger"].detail == "there is no such patch"
    assert Results.load(run.path) == run.results


@pytest.mark.parametrize(
    ("step", "shares_weights", "seconds", "expected"),
    [
        ((), True, 0.07, {"calls": 2, "rounds": 15, "of one": 0.07}),
        (("generate",), True, 1.0, {"calls": 1, "rounds": 15, "of one": 0.25}),
        ((), False, 0.07, {"calls": 1, "rounds": 4, "of one": 0.07}),
    ],
    ids=["short steps together", "a token of a generation", "processes that share a model agree"],
)
def test_a_sample_is_of_so_many_steps_and_its_time_of_one(step, shares_weights, seconds, expected, run, monkeypatch):
    run.quick, calls = False, []
    monkeypatch.setattr(BenchmarkedModel, "shares_weights", shares_weights)
    monkeypatch.setattr(models, "host_and_step_time", lambda _, n, device: calls.append(n) or (seconds / 2, seconds))
    row = measured(run, "stock", case=ModelCase("qwen3", None, 1, 4, step))["stock"]
    samples = calls[-row.timing.samples :]
    assert {"calls": samples[0], "rounds": len(samples), "of one": row.timing.median} == expected
    assert row.host.median == expected["of one"] / 2


def test_an_option_is_compared_with_everything_on_in_the_same_round(run, monkeypatch):
    rounds = itertools.count(1)  # the first says how many calls a sample has

    def slower(step):
        step.model.is_slower = True
        return Patched(step.model)

    def host_and_step_time(call, calls, device):
        seconds = 2.0 ** (next(rounds) // 2) * (1.5 if "is_slower" in vars(call.args[0]) else 1.0)
        return seconds, seconds

    changed = {"fused": VARIANTS["stock"], "without rope": slower}
    run.quick = False
    monkeypatch.setitem(models.CASE_SECONDS, "features", 0.0)
    monkeypatch.setattr(models, "host_and_step_time", host_and_step_time)
    with mock.patch.dict(VARIANTS, changed):
        rows = measured(run, *changed, part="features")
    assert (rows["without rope"].ratio, rows["fused"].ratio) == (PairedRatio(1.5, 1.5, 1.5, 8), PairedRatio(1, 1, 1, 8))
    assert rows["without rope"].ratio.verdict == "slower"


@pytest.mark.slow
def test_every_option_can_be_left_out(run):
    models.measure(run, [ModelCase.named("tiny-qwen3 loss 1x8")], FEATURES, torch.float32, "features")
    verdicts = {row.by: row.verdict for row in run.results.of("features")}
    assert {name for name, verdict in verdicts.items() if verdict != "ok"} <= {
        "without post_norm", "without linear_4bit", "without lora",
    }  # fmt: skip
