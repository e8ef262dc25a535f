"""``recompute`` in compiled layers, whose compiler decides what is saved: an error or a warning, and a row."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import fused_norm
from fused_norm.integrations.trainer import FusedNormCallback
from fused_norm.model_configs import build
from fused_norm.patcher import recompute

from .models import tokens


def test_a_callback_that_would_compile_layers_takes_no_recompute() -> None:
    with pytest.raises(ValueError, match=r"recompute=.* does nothing in compiled layers"):
        FusedNormCallback(recompute="attention", compile_layers=True)
    assert FusedNormCallback(compile_layers=True).options.recompute is False


def each_layer(model: Any) -> Any:
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    return model


def a_wrapper_of_a_layer(model: Any) -> Any:
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="aot_eager")
    return model


def a_wrapper_of_all(model: Any) -> Any:
    return torch.compile(model, backend="aot_eager")


def the_forward_of_all(model: Any) -> Any:
    model.forward = torch.compile(model.forward, backend="aot_eager")
    return model


@pytest.mark.parametrize(
    ("compiled", "count"),
    [(each_layer, 2), (a_wrapper_of_a_layer, 1), (a_wrapper_of_all, 2), (the_forward_of_all, 2)],
)
def test_a_layer_that_is_compiled_has_a_row_with_the_reason(
    compiled: Callable[[Any], nn.Module], count: int, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = compiled(build("llama", seed=0, device=device))
    report = fused_norm.apply_fused_norm(model, recompute="mlp", strict=False)
    without = [row for row in report.recompute or () if row.reason is not None]
    assert len(without) == count
    assert f"recompute='mlp' does nothing in {count} of 2 layers: it is compiled" in caplog.text


def test_a_part_of_a_layer_that_is_compiled_is_logged(device: str, caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama", seed=0, device=device)
    model.model.layers[1].mlp.compile(backend="aot_eager")
    report = fused_norm.apply_fused_norm(model, recompute="mlp")
    assert [row.reason for row in report.recompute or ()] == [None, None]
    assert "recompute='mlp' does nothing in 1 parts of layers, model.layers.1.mlp the first" in caplog.text


@pytest.mark.parametrize(("level", "trains"), [("attention", True), (True, False)])
def test_a_layer_that_is_compiled_later_is_logged_when_it_is_traced_for_a_backward(
    level: Any, trains: bool, device: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recompute, "_warned", set())
    model = build("llama", seed=0, device=device)
    fused_norm.apply_fused_norm(model, recompute=level)
    caplog.set_level(logging.WARNING, "fused_norm")
    with torch.set_grad_enabled(trains):
        each_layer(model)(input_ids=tokens(device), use_cache=False)
    assert ("recompute does nothing in a layer: it is compiled" in caplog.text) == trains
    assert ("recompute does nothing" in caplog.text) == trains


@pytest.mark.parametrize("compiled", ["by arguments", "by accelerate", "before"])
def test_checkpointing_stays_on_in_a_trainer_of_a_compiled_model(
    compiled: str, tmp_path: Path, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, callback = build("llama", seed=0), FusedNormCallback(recompute=True)
    options = {"torch_compile": True} if compiled == "by arguments" else {}
    with mock.patch.dict(os.environ):  # in which transformers leaves the backend
        if compiled == "by accelerate":
            os.environ["ACCELERATE_DYNAMO_BACKEND"] = "AOT_EAGER"
        elif compiled == "before":
            each_layer(model)
        arguments = TrainingArguments(
            str(tmp_path), gradient_checkpointing=True, report_to=[], use_cpu=device == "cpu", **options
        )
        Trainer(model, arguments, callbacks=[callback])
    assert arguments.gradient_checkpointing
    assert callback.report is not None
    assert callback.report.recompute is None
    assert "recompute=True is left out: the model is compiled" in caplog.text
