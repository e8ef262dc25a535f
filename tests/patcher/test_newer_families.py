"""Families whose layers differ, or rotate neighbours: every site of each layer, and stock's steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import fused_norm
from fused_norm import FusedNormError, NormSpec
from fused_norm.model_configs import FAMILIES, build, tiny_config

from .models import NEWER_MODEL_TYPES, assert_gradients_near, slow_but, step, tokens, twins

QUICK = ("glm4", "gemma4_text")


def of_this_release(*cases: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the cases of a parametrized test whose family this transformers has."""
    return [case for case in cases if case[0] in NEWER_MODEL_TYPES]


@pytest.mark.parametrize("model_type", slow_but(QUICK, NEWER_MODEL_TYPES))
def test_a_step_is_that_of_stock(model_type: str, device: str) -> None:
    stock, fused = twins(model_type, device)
    ids = tokens(device, length=19)  # more than a sliding window of 16
    (expected, gradients), (logits, fused_gradients) = step(stock, ids), step(fused, ids)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert_gradients_near(fused_gradients, gradients, 1e-4, floor=1e-7)


@pytest.mark.parametrize(
    ("model_type", "path", "lacking"),
    of_this_release(
        ("gemma4_text", "layers.1.self_attn.v_norm", r"layers\.1 \(norm\): 5 of 6 found"),
        ("gemma4_text", "layers.3.self_attn.q_norm", r"layers\.3 \(qk\): 0 of 1 found"),
        ("gemma4_text", "per_layer_projection_norm", r"model \(norm\): 1 of 2 found"),
        ("qwen3_5_text", "layers.0.linear_attn.norm", r"layers\.0 \(norm\): 2 of 3 found"),
        ("qwen3_5_text", "layers.1.self_attn.k_norm", r"layers\.1 \(qk\): 1 of 2 found"),
    ),
)
def test_a_site_of_one_layer_that_is_lost_is_an_error_with_its_layer(model_type: str, path: str, lacking: str) -> None:
    model = build(model_type, seed=0)
    parent, _, name = f"model.{path}".rpartition(".")
    setattr(model.get_submodule(parent), name, nn.Identity())
    with pytest.raises(FusedNormError, match=lacking):
        fused_norm.apply_fused_norm(model)


@pytest.mark.parametrize(
    ("model_type", "path"),
    of_this_release(("gemma4_text", "self_attn.v_norm"), ("qwen3_5_text", "linear_attn.norm")),
)
def test_a_norm_that_computes_something_else_is_fused_as_what_it_computes(model_type: str, path: str) -> None:
    """A norm with a weight in the place of one without, and one without a gate in the place of one with a gate."""
    model = build(model_type, seed=0)
    model.model.layers[0].set_submodule(path, nn.RMSNorm(20, eps=1e-6))
    specs = {site.path: site.spec for site in fused_norm.apply_fused_norm(model).fused}
    assert specs[f"model.layers.0.{path}"] == NormSpec("gemma", eps=1e-6, casts_weight=False)


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    of_this_release(
        ("gemma4_text", {"hidden_size_per_layer_input": 0}),
        ("gemma4_text", {"num_kv_shared_layers": 0}),
        ("gemma4_text", {"attention_k_eq_v": True}),
    ),
)
def test_a_variant_of_gemma_4_is_no_error(model_type: str, overrides: dict[str, object]) -> None:
    report = fused_norm.apply_fused_norm(build(tiny_config(model_type, **overrides), seed=0))
    assert report.counts["post_norm"] == (8 if "hidden_size_per_layer_input" in overrides else 12)


@pytest.mark.parametrize("model_type", NEWER_MODEL_TYPES)
def test_the_default_model_has_the_sites_of_the_row(model_type: str) -> None:
    config = AutoConfig.for_model(model_type)
    layers = len(FAMILIES[model_type].tiny.get("layer_types", ())) or 2
    if getattr(config, "layer_types", None) is not None:
        layers = 6
        config.layer_types = config.layer_types[:layers]
    config.num_hidden_layers = layers
    if hasattr(config, "num_kv_shared_layers"):
        config.num_kv_shared_layers = 0
    with torch.device("meta"):
        report = fused_norm.apply_fused_norm(AutoModelForCausalLM.from_config(config))
    assert report.counts["norm"] > 2 * layers


def test_types_of_layers_go_on_by_turns_in_a_model_of_more_layers() -> None:
    family = FAMILIES["qwen3_5_text"]
    types = family.tiny_arguments({"num_hidden_layers": 3})["layer_types"]
    assert types == ["linear_attention", "full_attention", "linear_attention"]
    assert family.sites(3) == {"norm": 9, "qk": 2, "rope": 1, "residual": 3, "mlp": 3, "conv": 2, "loss": 1}
    assert FAMILIES["gemma4_text"].sites()["qk"] == 6
