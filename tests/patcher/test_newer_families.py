"""Families whose layers differ, or rotate neighbours: every site of each layer, and stock's steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import fused_norm
from fused_norm import FusedNormError
from fused_norm.model_configs import FAMILIES, build, tiny_config

from .models import EXPERTS_ARE_MLPS, NEWER_MODEL_TYPES, assert_gradients_near, slow_but, step, tokens, twins

QUICK = ("glm4", "gemma4_text")


def of_this_release(*cases: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the cases of a parametrized test whose family this transformers has."""
    return [case for case in cases if case[0] in NEWER_MODEL_TYPES]


@pytest.mark.parametrize("model_type", NEWER_MODEL_TYPES)
def test_every_site_of_every_layer_is_fused_and_computes_its_spec(model_type: str) -> None:
    family, model = FAMILIES[model_type], build(model_type, seed=0)
    report = fused_norm.apply_fused_norm(model)
    fused = [(site.kind, site.path) for site in report.fused]
    expected = [("norm", f"model.{name}") for name in (*family.decoder_norms, family.final_norm)]
    for index in range(len(model.model.layers)):
        layer = family.layer(index, model.config)
        newer = () if EXPERTS_ARE_MLPS else layer.newer_sites
        sites = (
            (kind, f"model.layers.{index}.{name}".removesuffix(".")) for name, kind in (*layer.layer_sites, *newer)
        )
        expected += sites
        for site in report.fused:
            path = site.path.removeprefix(f"model.layers.{index}.")
            if site.kind in ("norm", "qk") and path != site.path:
                spec = layer.spec_of(path)
                assert replace(site.spec, casts_weight=spec.casts_weight) == spec, site.path
    with_experts = [path for kind, path in fused if kind == "mlp" and "experts" in path]
    assert sorted(fused) == sorted([*expected, ("loss", "lm_head"), *(("mlp", path) for path in with_experts)])
    assert {site.path.rpartition(".")[2] for site in report.kept if site.kind != "consumers"} <= {"experts"}


@pytest.mark.parametrize("model_type", slow_but(QUICK, NEWER_MODEL_TYPES))
def test_a_step_is_that_of_stock(model_type: str, device: str) -> None:
    stock, fused = twins(model_type, device)
    ids = tokens(device, length=19)  # more than a sliding window of 16
    (expected, gradients), (logits, fused_gradients) = step(stock, ids), step(fused, ids)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert_gradients_near(fused_gradients, gradients, 1e-4, floor=1e-7)


@pytest.mark.parametrize(
    ("model_type", "path"),
    of_this_release(
        ("gemma4_text", "layers.1.self_attn.v_norm"),
        ("gemma4_text", "layers.3.self_attn.q_norm"),
        ("gemma4_text", "per_layer_projection_norm"),
        ("qwen3_5_text", "layers.0.linear_attn.norm"),
        ("qwen3_5_text", "layers.1.self_attn.k_norm"),
    ),
)
def test_a_site_of_one_layer_that_is_lost_is_an_error_with_its_path(model_type: str, path: str) -> None:
    model = build(model_type, seed=0)
    parent, _, name = f"model.{path}".rpartition(".")
    setattr(model.get_submodule(parent), name, nn.Identity())
    with pytest.raises(FusedNormError, match=rf"model\.{path} \(.*: not found"):
        fused_norm.apply_fused_norm(model)


@pytest.mark.parametrize(
    ("model_type", "path"),
    of_this_release(("gemma4_text", "self_attn.v_norm"), ("qwen3_5_text", "linear_attn.norm")),
)
def test_a_norm_that_computes_something_else_is_an_error(model_type: str, path: str) -> None:
    """A norm with a weight in the place of one without, and one without a gate in the place of one with a gate."""
    model = build(model_type, seed=0)
    model.model.layers[0].set_submodule(path, nn.RMSNorm(20, eps=1e-6))
    with pytest.raises(FusedNormError, match=rf"model\.layers\.0\.{path} \(norm\): computes "):
        fused_norm.apply_fused_norm(model)


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
    assert report.counts["sandwich"] == (8 if "hidden_size_per_layer_input" in overrides else 12)


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
