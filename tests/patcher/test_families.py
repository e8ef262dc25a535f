"""Models of families that are not in the table: what is fused in each, and results that are those of stock."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig

import fused_norm
from fused_norm.check.against_float64 import check_step
from fused_norm.model_configs import build
from fused_norm.patcher.fused_block import FusedBlock
from fused_norm.patcher.rewrite import Rewrite

from .models import EXPERTS_ARE_MLPS, counts, relative

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Norms of branches only: no norm in the layer takes a sum.
POST_NORM = counts(loss=1, norm=5, qk=4, sandwich=4, mlp=2)

FAMILIES = {
    "glm4": ({}, counts(loss=1, norm=9, residual=2, sandwich=4, mlp=2)),
    "olmo2": ({}, {**POST_NORM, "rope": 2}),
    "exaone4": (
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        {**POST_NORM, "rope": 1},  # its layers without a window do not rotate
    ),
    "granite": ({"residual_multiplier": 0.22}, counts(loss=1, norm=5, rope=2, residual=2, mlp=2)),
    "glm4_moe": (
        {**EXPERTS, "use_qk_norm": True, "n_routed_experts": 4, "n_shared_experts": 1},
        counts(loss=1, norm=5, qk=4, rope=2, residual=2, mlp=2),
    ),
    "hunyuan_v1_dense": ({}, counts(loss=1, norm=5, qk=4, rope=2, residual=2, mlp=2)),
    "phi3": ({"partial_rotary_factor": 0.5}, counts(loss=1, norm=5, rope=2, residual=2, mlp=2)),
    "smollm3": ({"no_rope_layers": [1, 0]}, counts(loss=1, norm=5, rope=1, residual=2, mlp=2)),
    # Its angles are those of one half.
    "gpt_oss": (
        {"num_experts_per_tok": 2, "num_local_experts": 4, "layer_types": ["sliding_attention", "full_attention"]},
        counts(loss=1, norm=5, rope=2, residual=2),
    ),
    "stablelm": ({"partial_rotary_factor": 0.5}, counts(loss=1, rope=2, mlp=2)),
    "gemma3n_text": (
        {
            "head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "vocab_size_per_layer_input": 64,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 0,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.9, 0.0],
            "intermediate_size": [96, 96],
        },
        counts(loss=1, norm=18, qk=4, rope=4, sandwich=6, mlp=2),
    ),
    # The norm is called inside the branch's call, in both kinds of layers.
    "lfm2": (
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        counts(loss=1, norm=5, qk=2, rope=1, residual=2, mlp=2),
    ),
    "qwen3_next": (
        {
            **EXPERTS,
            "num_experts": 4,
            "shared_expert_intermediate_size": 32,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        counts(loss=1, norm=6, qk=2, rope=1, residual=2, mlp=2),
    ),
}
ONLY_IN_5 = ("stablelm", "gemma3n_text")
EXPERT_MLPS = {"glm4_moe": 4, "qwen3_next": 8}
"""The experts of a model, where each of them is a module."""
# Which operators run in a forward, by hand from the layers of each family.
LAUNCHES = {
    "glm4": {"linear_cross_entropy": 1, "rms_norm": 3, "norm_add_norm": 2, "norm_add": 2, "glu": 2},
    # The norms of q and k are over all heads, and differ in width: no pair, and two norms in each layer.
    "olmo2": {"linear_cross_entropy": 1, "rms_norm": 5, "norm_add": 4, "rope": 2, "glu": 2},
    # Its layers without a window do not rotate.
    "exaone4": {"linear_cross_entropy": 1, "rms_norm": 1, "qk_norm": 2, "norm_add": 4, "rope": 1, "glu": 2},
    "granite": {"linear_cross_entropy": 1, "rms_norm": 3, "add_rms_norm": 2, "rope": 2, "glu": 2},
    "glm4_moe": {"linear_cross_entropy": 1, "rms_norm": 3, "add_rms_norm": 2, "qk_norm": 2, "rope": 2, "glu": 2},
    "hunyuan_v1_dense": {
        "linear_cross_entropy": 1,
        "rms_norm": 3,
        "add_rms_norm": 2,
        "qk_norm": 2,
        "rope": 2,
        "glu": 2,
    },
    "qwen3_next": {
        "linear_cross_entropy": 1,
        "rms_norm": 3,
        "gated_rms_norm": 1,
        "add_rms_norm": 2,
        "qk_norm_rope": 1,
        "glu": 2,
    },
    "phi3": {"linear_cross_entropy": 1, "rms_norm": 3, "add_rms_norm": 2, "rope": 2, "glu": 2},
    "smollm3": {"linear_cross_entropy": 1, "rms_norm": 3, "add_rms_norm": 2, "rope": 1, "glu": 2},
    "gpt_oss": {"linear_cross_entropy": 1, "rms_norm": 3, "add_rms_norm": 2, "rope": 2},
    "stablelm": {"linear_cross_entropy": 1, "rope": 2, "glu": 2},
    # Queries and keys are rotated one at a time; the norm in front of each layer's router runs twice.
    "gemma3n_text": {"linear_cross_entropy": 1, "rms_norm": 18, "norm_add": 6, "rope": 4, "glu": 2},
    "lfm2": {"linear_cross_entropy": 1, "rms_norm": 3, "add_rms_norm": 2, "qk_norm_rope": 1, "glu": 2},
}


def model_of(model_type: str, **kwargs) -> torch.nn.Module:
    return build(AutoConfig.for_model(model_type, **SIZES | FAMILIES[model_type][0]), seed=0, **kwargs)


def ids(device: str) -> torch.Tensor:
    return torch.randint(2, 64, (2, 9), generator=torch.Generator().manual_seed(1)).to(device)


IN_BF16 = ("glm4", "granite", "olmo2", "lfm2")
_LONG = ("gemma3n_text", "gpt_oss", "glm4_moe", "hunyuan_v1_dense", "smollm3", "stablelm")


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=pytest.mark.slow if name in _LONG else ()) for name in FAMILIES]
)
def test_sites_and_fp32_results(model_type: str, device: str, launches: list[str]) -> None:
    if EXPERTS_ARE_MLPS and model_type in ONLY_IN_5:
        pytest.skip("transformers 4 writes this attention, or these norms, in a way that is kept")
    model = model_of(model_type, device=device)
    result = check_step(model, ids(device), options={"strict": False})
    expected, launched = dict(FAMILIES[model_type][1]), {name: launches.count(name) for name in set(launches)}
    if EXPERTS_ARE_MLPS and model_type in EXPERT_MLPS:  # and those with tokens run
        expected["mlp"] += EXPERT_MLPS[model_type]
        assert launched["glu"] >= LAUNCHES[model_type]["glu"]
        launched["glu"] = LAUNCHES[model_type]["glu"]
    assert result.report.counts == expected
    assert launched == LAUNCHES[model_type]
    assert result.ok, str(result)
    model.eval()
    with torch.no_grad():
        stock = model(ids(device), use_cache=False).logits
        fused_norm.apply_fused_norm(model)
        assert relative(model(ids(device), use_cache=False).logits, stock) < 2e-6


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=pytest.mark.slow if name == "lfm2" else ()) for name in IN_BF16]
)
def test_bf16_errors_stay_within_the_stock_errors_budget(model_type: str, device: str) -> None:
    model = model_of(model_type, dtype=torch.bfloat16, device=device)
    result = check_step(model, ids(device).repeat(1, 3))
    assert result.ok, str(result)


def test_a_scale_that_is_a_tensor_is_multiplied_as_in_stock(device: str) -> None:
    stock = model_of("granite", device=device)
    fused = copy.deepcopy(stock)
    fused_norm.apply_fused_norm(fused)
    for model in (stock, fused):
        model.model.layers[0].residual_multiplier = torch.nn.Parameter(torch.tensor(0.3, device=device))
        model.model.layers[1].residual_multiplier = 1
        model(ids(device), labels=ids(device), use_cache=False).loss.backward()
    pairs = list(zip(fused.parameters(), stock.parameters(), strict=True))
    assert all(relative(mine.grad, theirs.grad) < 1e-5 for mine, theirs in pairs)
    assert fused.model.layers[0].residual_multiplier.grad != 0


def test_of_an_attention_whose_q_and_k_norms_differ_in_width_the_rotation_is_fused_alone() -> None:
    model = model_of("olmo2")
    fused_norm.apply_fused_norm(model)
    assert isinstance(model.model.layers[0], FusedBlock)
    assert model.model.layers[0].self_attn.fused_norm_rewrites == (Rewrite("rotations", 0),)


def test_a_layer_in_which_no_norm_takes_a_sum_has_no_row_for_that() -> None:
    report = fused_norm.apply_fused_norm(model_of("olmo2"))
    assert not [site for site in (*report.fused, *report.kept) if site.kind == "residual"]
