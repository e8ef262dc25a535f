"""The callback patches a Trainer's model before it is wrapped, and training gives the results of stock."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate import Accelerator
from torch import nn

from fused_norm import FusedNormError
from fused_norm.integrations.trainer import FusedNormCallback
from fused_norm.model_configs import FAMILIES, build, tiny_config

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


def test_misspelt_options_are_errors_before_there_is_a_trainer():
    with pytest.raises(TypeError, match="recomputes"):
        FusedNormCallback(recomputes=True)
