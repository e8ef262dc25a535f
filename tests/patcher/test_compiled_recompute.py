"""``recompute`` in compiled layers, whose compiler decides what is kept: an error or a warning, and a row with it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import Trainer, TrainingArguments

import fused_norm
from fused_norm.integrations.trainer import FusedNormCallback
from fused_norm.model_configs import build
from fused_norm.patcher import recompute

from .models import tokens

LEVELS = [True, "mlp", "attention"]


@pytest.mark.parametrize("level", LEVELS)
def test_a_callback_that_would_compile_layers_takes_no_recompute(level: Any) -> None:
    with pytest.raises(ValueError, match=r"recompute=.* does nothing in compiled layers"):
        FusedNormCallback(recompute=level, compile_layers=True)
    assert FusedNormCallback(compile_layers=True).options.recompute is False


def each_layer(model: Any) -> Any:
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    return model


def a_wrapper_of_a_layer(model: Any) -> Any:
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="aot_eager")
    return model


def the_decoder(model: Any) -> Any:
    model.model.compile(backend="aot_eager")
    return model


def a_wrapper_of_all(model: Any) -> Any:
    return torch.compile(model, backend="aot_eager")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("compiled", "count"), [(each_layer, 2), (a_wrapper_of_a_layer, 1), (the_decoder, 2), (a_wrapper_of_all, 2)]
)
def test_a_layer_that_is_compiled_has_a_row_with_the_reason(
    compiled: Callable[[Any], nn.Module], count: int, level: Any, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = compiled(build("llama", seed=0, device=device))
    report = fused_norm.apply_fused_norm(model, recompute=level, strict=False)
    without = [row for row in report.recompute or () if row.reason is not None]
    assert len(without) == count
    assert f"recompute={level!r} does nothing in {count} of 2 layers: it is compiled" in caplog.text


@pytest.mark.parametrize("level", [True, "attention"])
def test_a_layer_that_is_compiled_later_is_logged_when_it_is_traced(
    level: Any, device: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recompute, "_explained", set())
    model = build("llama", seed=0, device=device)
    fused_norm.apply_fused_norm(model, recompute=level)
    caplog.set_level(logging.WARNING, "fused_norm")
    each_layer(model)(input_ids=tokens(device), use_cache=False)
    assert "recompute does nothing in a layer: it is compiled" in caplog.text


def test_compiled_layers_keep_as_much_at_every_level(device: str) -> None:
    kept = []
    for level in (False, *LEVELS):
        model = build("llama", seed=0, device=device)
        fused_norm.apply_fused_norm(model, recompute=level)
        sizes: dict[int, int] = {}
        with saved_tensors_hooks(lambda one, to=sizes: to.setdefault(id(one), one.nbytes) and one, lambda one: one):
            each_layer(model)(input_ids=tokens(device), use_cache=False)
        kept.append(sum(sizes.values()))
    assert len(set(kept)) == 1


@pytest.mark.parametrize("level", LEVELS)
def test_checkpointing_stays_on_in_a_trainer_that_compiles(
    level: Any, tmp_path: Path, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = TrainingArguments(
        str(tmp_path), gradient_checkpointing=True, torch_compile=True, report_to=[], use_cpu=device == "cpu"
    )
    callback = FusedNormCallback(recompute=level)
    Trainer(build("llama", seed=0), arguments, callbacks=[callback])
    assert arguments.gradient_checkpointing
    assert callback.report is not None
    assert callback.report.recompute is None
    assert f"recompute={level!r} is left out: it is compiled" in caplog.text
