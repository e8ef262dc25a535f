"""Steps of TRL's trainers are timed for variants whose losses and gradients are those of stock."""

import importlib.util
from unittest import mock

import pytest
import torch

from benchmarks import trainers
from benchmarks.model_variants import VARIANTS
from benchmarks.trainers import CASES, TrainerCase

has_trl = importlib.util.find_spec("trl") is not None


def test_a_name_stands_for_its_case_and_no_other():
    cases = (*CASES, TrainerCase.named("DPO tiny-llama qlora dropout padded 2x16"))
    assert [TrainerCase.named(case.name) for case in cases] == [*cases]
    assert len({case.name for case in cases}) == len(cases)
    assert cases[-1].model.step == ("qlora", "dropout", "loss")
    for name in ("PPO tiny-llama 1x8", "SFT tiny-llama", "SFT 1x8"):
        with pytest.raises(ValueError, match=r"is no (trainer, model|model, step)"):
            TrainerCase.named(name)


@pytest.mark.skipif(has_trl, reason="TRL is installed")
def test_without_trl_nothing_is_measured_and_the_reason_is_noted(run):
    trainers.measure(run, [TrainerCase.named("SFT tiny-llama 1x8")], ["stock"], torch.float32)
    assert run.results.rows == []
    assert run.results.left_out == ["trainers: SFT tiny-llama 1x8: trl is not installed"]


@pytest.mark.slow
@pytest.mark.skipif(not has_trl, reason="TRL is not installed")
@pytest.mark.usefixtures("replays_anywhere")
@pytest.mark.parametrize(
    "name",
    ["SFT tiny-llama padded 2x16", "SFT tiny-llama qlora 1x8", "DPO tiny-llama lora 1x8", "GRPO tiny-llama 2x8"],
)
def test_trainers_run_every_variant_with_the_losses_and_gradients_of_stock(name, run, monkeypatch):
    monkeypatch.setattr(trainers, "missing", lambda variant, device: None)
    trainers.measure(run, [TrainerCase.named(name)], ["fused", "fused-graphs"], torch.float32)
    assert run.results.left_out == []
    for result in run.results.of("trainers"):
        assert (result.row, result.verdict, result.detail) == (name, "ok", None)
        assert 0 < result.host.median <= result.timing.median
        assert result.error < 1e-4
    assert [result.by for result in run.results.of("trainers")] == ["fused", "fused-graphs"]


@pytest.mark.slow
@pytest.mark.skipif(not has_trl, reason="TRL is not installed")
@pytest.mark.usefixtures("replays_anywhere")
def test_a_variant_that_is_not_replayed_in_the_trainer_is_refused(run, monkeypatch):
    replayed = VARIANTS["fused-graphs"]

    def replayed_before(step, **options):
        patched = replayed(step, **options)
        for layer in step.model.model.layers:
            layer.self_attn.register_forward_pre_hook(lambda *_: None)
        return patched

    monkeypatch.setattr(trainers, "missing", lambda variant, device: None)
    with mock.patch.dict(VARIANTS, {"fused-graphs": replayed_before}):
        trainers.measure(run, [TrainerCase.named("SFT tiny-llama 1x8")], ["fused-graphs"], torch.float32)
    (result,) = run.results.rows
    assert result.verdict == "refused"
    assert result.detail.startswith("no layer was replayed: ")


@pytest.mark.skipif(not has_trl, reason="TRL is not installed")
def test_without_a_stock_step_nothing_is_compared(run, monkeypatch):
    def fails(*arguments):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(trainers, "_trainer", fails)
    trainers.measure(run, [TrainerCase.named("SFT tiny-llama 1x8")], ["fused"], torch.float32)
    assert [(result.by, result.verdict, result.timing) for result in run.results.rows] == [("stock", "failed", None)]
    assert run.results.left_out == ["SFT tiny-llama 1x8: RuntimeError: stock failed: RuntimeError: out of luck"]
