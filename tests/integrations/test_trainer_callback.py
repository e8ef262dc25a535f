"""The callback patches a Trainer's model before it is wrapped, and training gives the results of stock."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import TrainingArguments

from fused_norm import FusedNormError
from fused_norm.integrations.trainer import FusedNormCallback
from fused_norm.model_configs import FAMILIES, build, tiny_config
from fused_norm.patcher import cuda_graphs, survey

from ..patcher.graph_stand_in import StandIn
from ..patcher.models import counts, is_fused, losses_of, rows_of, trainer_of


def llama() -> nn.Module:
    """Build a model of one layer."""
    return build(tiny_config("llama", num_hidden_layers=1), seed=0)


def fused_modules(model: nn.Module) -> int:
    return sum(is_fused(module) for module in model.modules())


def trainer(model: nn.Module | None, folder: Path, callbacks: list[Any], **arguments: Any) -> Any:
    data = rows_of(torch.randint(0, 256, (4, 6), generator=torch.Generator().manual_seed(1)))
    model_init = None if model is not None else lambda: llama()
    return trainer_of(
        model, folder, data, **{"max_steps": 2, "callbacks": callbacks, "model_init": model_init, **arguments}
    )


def test_the_model_is_patched_before_it_is_wrapped_and_trains_as_stock(tmp_path, caplog, monkeypatch):
    seen, prepare = [], Accelerator.prepare

    def watched(self, *arguments, **named):
        seen.extend(fused_modules(argument) for argument in arguments if isinstance(argument, nn.Module))
        return prepare(self, *arguments, **named)

    monkeypatch.setattr(Accelerator, "prepare", watched)
    callback = FusedNormCallback(mlp=False)
    assert callback.report is None
    with caplog.at_level(logging.INFO, "fused_norm"):
        fused = trainer(llama(), tmp_path, [callback])
    assert callback.report is not None
    assert callback.report.counts == counts(**FAMILIES["llama"].sites(1) | {"mlp": 0})
    assert callback.report.summary() in caplog.messages
    fused.train()
    assert min(seen) > 0
    seen.clear()
    stock = trainer(llama(), tmp_path, [])
    stock.train()
    assert set(seen) == {0}
    torch.testing.assert_close(losses_of(fused), losses_of(stock), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["model_init", "add_callback"])
def test_a_model_that_comes_later_is_patched_when_training_begins(way, tmp_path):
    callback = FusedNormCallback()
    if way == "model_init":
        hf_trainer = trainer(None, tmp_path, [callback], max_steps=1)
        before = hf_trainer.model
        hf_trainer.train()
        assert hf_trainer.model is not before
    else:
        hf_trainer = trainer(llama(), tmp_path, [], max_steps=1)
        hf_trainer.add_callback(callback)
        hf_trainer.train()
    assert fused_modules(hf_trainer.model) > 0


def test_layers_are_compiled_by_themselves_after_they_are_fused(tmp_path):
    model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]))
    callback = FusedNormCallback(compile_layers=True)
    trainer(model, tmp_path, [callback])
    compiled = [module for module in model.modules() if module._compiled_call_impl is not None]
    assert compiled == list(model.get_base_model().model.layers)
    assert all(is_fused(layer) for layer in compiled)
    trainer(second_model := llama(), tmp_path, [FusedNormCallback()])
    assert not [module for module in second_model.modules() if module._compiled_call_impl is not None]
    nameless = nn.Sequential(nn.RMSNorm(8, eps=1e-6))
    with pytest.raises(FusedNormError, match="does not say what its layers are"):
        trainer(nameless, tmp_path, [FusedNormCallback(compile_layers=True)])


@pytest.mark.parametrize("is_on", [False, True])
def test_levels_of_recompute_take_the_place_of_checkpointing(is_on, tmp_path, caplog):
    losses = []
    for callbacks in ([], [callback := FusedNormCallback(recompute="attention")]):
        model = llama()
        if is_on:
            model.gradient_checkpointing_enable()
        run = trainer(model, tmp_path, callbacks, gradient_checkpointing=True)
        run.train()
        losses.append(losses_of(run))
        assert model.is_gradient_checkpointing == (not callbacks)
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    assert [row.reason for row in callback.report.recompute] == [None]
    assert "recompute='attention' takes the place of gradient checkpointing" in caplog.text


def test_recompute_true_leaves_checkpointing_as_it_is(tmp_path):
    run = trainer(model := llama(), tmp_path, [FusedNormCallback(recompute=True)], gradient_checkpointing=True)
    assert run.args.gradient_checkpointing
    run.train()
    assert model.is_gradient_checkpointing


EAGER_UNDER_CHECKPOINTING = "gradient checkpointing is on; recompute takes its place without host time"


@pytest.fixture
def graphs(monkeypatch):
    """Replay layers by a stand-in if there is no GPU."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(cuda_graphs, "make_device", StandIn)
        monkeypatch.setattr(survey, "why_no_graphs", lambda devices: None)


def replaying(folder: Path, *, use_cache: bool = False, is_on: Any = (), **options: Any) -> tuple[Any, Any]:
    """Return a Trainer after three steps of two batches each, and its callback; one norm alone is fused.

    ``is_on``: names of the Trainer's arguments that are to be True.
    """
    callback = FusedNormCallback(modules="model.norm", **options)
    arguments = {"max_steps": 3, "gradient_accumulation_steps": 2, **dict.fromkeys(is_on, True)}
    run = trainer(llama(), folder, [callback], **arguments)
    run.model.config.use_cache = use_cache
    run.train()
    return run, callback


def assert_same_training(one: Any, other: Any) -> None:
    assert torch.equal(losses_of(one), losses_of(other))
    weights = other.model.state_dict()
    for name, weight in one.model.state_dict().items():
        assert torch.equal(weight, weights[name]), name


@pytest.mark.parametrize("use_cache", [False, True])
def test_replayed_layers_train_as_eager_ones_to_the_bit(use_cache, tmp_path, graphs, caplog):
    eager, callback = replaying(tmp_path)
    assert callback.report.replays is None
    with caplog.at_level(logging.INFO, "fused_norm"):
        run, callback = replaying(tmp_path, use_cache=use_cache, cuda_graphs=True)
    assert_same_training(run, eager)
    replays = callback.report.replays
    assert (replays.captures, replays.forwards, replays.backwards) == (1, 5, 5), replays
    assert replays.eager == {"first sight of its arguments": 1}
    assert not run.model.config.use_cache
    assert ("config.use_cache is False from now on" in caplog.text) == use_cache


def test_a_cache_that_the_arguments_ask_for_stays_and_is_a_reason(tmp_path, graphs):
    if not hasattr(TrainingArguments, "use_cache"):
        pytest.skip("this transformers has no such argument")
    run, callback = replaying(tmp_path, use_cache=True, is_on=["use_cache"], cuda_graphs=True)
    layer = inspect.signature(run.model.model.layers[0].forward).parameters
    name = "past_key_values" if "past_key_values" in layer else "cache"  # as transformers 5.24 calls it
    assert callback.report.replays.eager == {f"{name} is a DynamicCache: pass use_cache=False": 6}


def test_under_checkpointing_layers_run_eager_and_a_warning_names_the_way_out(tmp_path, graphs, caplog):
    checkpointing = ["gradient_checkpointing"]
    eager, _ = replaying(tmp_path, is_on=checkpointing)
    run, callback = replaying(tmp_path, is_on=checkpointing, cuda_graphs=True)
    assert_same_training(run, eager)
    assert callback.report.replays.eager.keys() == {EAGER_UNDER_CHECKPOINTING}
    assert callback.report.replays.forwards == 0
    warnings = [message for message in caplog.messages if "gradient checkpointing" in message]
    (warning,) = [message for message in warnings if message.startswith("cuda_graphs")]
    assert "recompute='attention' takes the place of checkpointing" in warning
    run, callback = replaying(tmp_path, is_on=checkpointing, cuda_graphs=True, recompute="attention")
    assert_same_training(run, eager)
    assert callback.report.replays.forwards == 5


def test_in_compiled_models_cuda_graphs_are_left_out_with_a_warning(tmp_path, graphs, caplog):
    (model := llama()).compile(backend="eager")
    trainer(model, tmp_path, [callback := FusedNormCallback(cuda_graphs=True, recompute=True)])
    assert callback.report.graphs is None
    assert callback.report.replays is None
    assert "cuda_graphs is left out: the model is compiled" in caplog.text
    assert "recompute=True is left out: the model is compiled" in caplog.text
    with pytest.raises(ValueError, match="cuda_graphs=True does nothing in compiled layers"):
        FusedNormCallback(cuda_graphs=True, compile_layers=True)


def test_misspelt_options_are_errors_before_there_is_a_trainer():
    with pytest.raises(TypeError, match="recomputes"):
        FusedNormCallback(recomputes=True)
