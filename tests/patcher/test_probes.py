"""Code of others that is run to be recognised leaves the process as it was: generators, settings, warnings."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig

import fused_norm
from fused_norm.model_configs import build, families_here
from fused_norm.patcher.activation_recognition import recognise_activation
from fused_norm.patcher.norm_recognition import recognise
from fused_norm.patcher.patterns.convolutions import recognise_convolution
from fused_norm.patcher.patterns.rotations import recognise_rotation
from fused_norm.patcher.probe import UnrecognisedError

from .models import tokens

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
WITH_DROPOUT: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("AutoModelForSeq2SeqLM", T5),
    "bert": ("AutoModelForMaskedLM", SIZES),
    "gpt2": ("AutoModelForCausalLM", {"n_embd": 16, "n_layer": 1, "n_head": 2}),
    "phi3": ("AutoModelForCausalLM", {**SIZES, "resid_pdrop": 0.1, "num_key_value_heads": 2, "pad_token_id": 0}),
}


def state() -> list[Any]:
    """Everything that a probe may not change, in a form that compares."""
    devices = [generator.get_state().tolist() for generator in torch.cuda.default_generators]
    seeds = torch.cuda._lazy_seed_tracker.call_order
    autocast = [(torch.is_autocast_enabled(on), torch.get_autocast_dtype(on)) for on in ("cpu", "cuda")]
    return [
        *(torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()), devices, list(seeds)),
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, torch.is_autocast_cache_enabled()),
        *(torch.get_default_dtype(), torch.get_default_device(), torch.get_deterministic_debug_mode()),
        *(torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark, list(warnings.filters)),
    ]


@pytest.mark.parametrize("model_type", families_here())
def test_a_patch_of_a_family_changes_no_state(model_type: str) -> None:
    model = build(model_type, seed=0)
    before = state()
    fused_norm.apply_fused_norm(model, strict=False)
    assert state() == before


@pytest.mark.parametrize("model_type", WITH_DROPOUT)
def test_the_same_seed_before_the_patch_drops_the_same(model_type: str) -> None:
    auto, sizes = WITH_DROPOUT[model_type]
    config = AutoConfig.for_model(model_type, vocab_size=256, **sizes)
    torch.manual_seed(0)
    model = getattr(transformers, auto).from_config(config).train()
    ids, before = tokens(), state()
    stock = [model(input_ids=ids, labels=ids).loss.item(), torch.rand(()).item()]
    torch.manual_seed(0)
    model = getattr(transformers, auto).from_config(config).train()
    assert state()[0] == before[0], "not the patch, but the test draws"
    fused_norm.apply_fused_norm(model, strict=False)
    assert state()[0] == before[0]
    assert [model(input_ids=ids, labels=ids).loss.item(), torch.rand(()).item()] == pytest.approx(stock, rel=1e-5)


def vandal(*_: Any, **__: Any) -> Any:
    """Change all that ``state`` sees, and compute nothing."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    torch.rand(3)
    torch.set_grad_enabled(not torch.is_grad_enabled())
    for on in ("cpu", "cuda"):
        torch.set_autocast_enabled(on, True)
        torch.set_autocast_dtype(on, torch.float16)
    torch.set_autocast_cache_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = torch.backends.cudnn.benchmark = True
    warnings.simplefilter("error")


def rotate(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return vandal()


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: Any) -> Any:
        return vandal()


class Act(nn.Module):
    def forward(self, x: Any) -> Any:
        return vandal()


def patch_with_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3_moe", seed=0)
    experts: Any = next(module for name, module in model.named_modules() if name.endswith("experts"))
    if isinstance(experts, nn.ModuleList):
        pytest.skip("transformers 4 has a module for each expert")
    monkeypatch.setattr(type(experts), "_apply_gate", vandal)
    fused_norm.apply_fused_norm(model, strict=False)


def patch_with_loss(_: Any) -> None:
    model: Any = build("llama", seed=0)
    model.loss_function = vandal
    fused_norm.apply_fused_norm(model, strict=False)


def patch_with_property(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", seed=0)
    monkeypatch.setattr(type(model), "get_output_embeddings", vandal)
    fused_norm.apply_fused_norm(model, strict=False)


PLACES: dict[str, Callable[[Any], Any]] = {
    "norm": lambda _: recognise(Norm()),
    "activation": lambda _: recognise_activation(Act()),
    "rotation": lambda _: recognise_rotation(rotate),
    "convolution": lambda _: recognise_convolution(vandal),
    "experts": patch_with_experts,
    "loss": patch_with_loss,
    "what the survey asks": patch_with_property,
}


@pytest.mark.parametrize("default_device", [None, "meta"])
@pytest.mark.parametrize("place", PLACES)
def test_code_that_changes_everything_is_undone(place: str, default_device: str | None, monkeypatch) -> None:
    kept = state()
    torch.set_default_device(default_device)
    try:
        torch.manual_seed(7)
        before = state()
        with suppress(UnrecognisedError):
            PLACES[place](monkeypatch)
        assert state() == before
    finally:
        torch.set_default_device(None)
    assert state()[5:] == kept[5:]
