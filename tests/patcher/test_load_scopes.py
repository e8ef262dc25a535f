"""Blocks of ``on_load`` are independent: threads, options and adapters of a block do not affect another block."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

import fused_norm
from fused_norm.model_configs import tiny_config

LORA = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)


@pytest.fixture
def checkpoint(tmp_path: Any) -> str:
    """Save a model: PEFT's method is wrapped when a model is loaded."""
    AutoModelForCausalLM.from_config(tiny_config("qwen3", num_hidden_layers=1)).save_pretrained(tmp_path)
    return str(tmp_path)


def adapters(reports: list[fused_norm.PatchReport]) -> list[int]:
    return [report.counts["adapter"] for report in reports]


class WaitingConfig(PretrainedConfig):
    model_type = "waiting"


class Waiting(PreTrainedModel):
    """A model that calls ``while_built`` when it is built."""

    config_class = WaitingConfig
    while_built: Any = None

    def __init__(self, config: WaitingConfig) -> None:
        super().__init__(config)
        self.norm = nn.RMSNorm(8, eps=1e-6)
        type(self).while_built()


def test_a_model_is_patched_while_another_thread_is_building_one(checkpoint: str, monkeypatch: Any) -> None:
    is_built, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        is_built.set()
        may_end.wait(20)

    monkeypatch.setattr(Waiting, "while_built", staticmethod(wait))
    with fused_norm.on_load(everywhere=True) as reports:
        thread = threading.Thread(target=lambda: Waiting._from_config(WaitingConfig()))
        thread.start()
        assert is_built.wait(20)
        AutoModelForCausalLM.from_pretrained(checkpoint)
        assert [report.model for report in reports] == ["Qwen3ForCausalLM"]
        may_end.set()
        thread.join()
    assert [report.model for report in reports] == ["Qwen3ForCausalLM", "Waiting"]


def test_adapters_get_the_options_of_the_block_that_has_loaded_the_model(checkpoint: str) -> None:
    with fused_norm.on_load(mlp=False) as reports:
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        with fused_norm.on_load(qk=False) as inner:
            peft.inject_adapter_in_model(LORA, model)
    assert adapters(reports) == [0, 2]
    assert [report.counts["mlp"] for report in reports] == [0, 0]
    assert all(report.counts["rope"] for report in reports)
    assert inner == []


def test_adapters_that_come_after_their_block_stay_pefts_inside_another_block(checkpoint: str) -> None:
    with fused_norm.on_load() as outer:
        with fused_norm.on_load() as reports:
            model = AutoModelForCausalLM.from_pretrained(checkpoint)
        peft.inject_adapter_in_model(LORA, model)
    assert adapters(reports) == adapters(outer) == [0]


def test_adapters_that_come_while_another_model_is_built_wait_for_it(checkpoint: str, monkeypatch: Any) -> None:
    with fused_norm.on_load() as reports:
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        put = staticmethod(lambda: peft.inject_adapter_in_model(LORA, model))
        monkeypatch.setattr(Waiting, "while_built", put)
        Waiting._from_config(WaitingConfig())
    assert [report.model for report in reports] == ["Qwen3ForCausalLM", "Waiting"]


def test_a_model_that_was_loaded_in_a_block_is_freed_inside_it(checkpoint: str) -> None:
    with fused_norm.on_load():
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        fused_norm.apply_fused_norm(model, recompute=True)
        model(input_ids=torch.zeros(1, 3, dtype=torch.int64)).logits.sum().backward()
        held = weakref.ref(model)
        del model
        gc.collect()
        assert held() is None
