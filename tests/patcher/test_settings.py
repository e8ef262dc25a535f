"""Code that a module's settings never run has no row in the report."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM, modeling_deepseek_v3

import fused_norm
from fused_norm.patcher.patch_report import Site

from .forwards import layer_of
from .models import assert_gradients_near, step, tokens


def deepseek(device: str, **settings: Any) -> DeepseekV3ForCausalLM:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=256, hidden_size=72, intermediate_size=40, moe_intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=3, num_key_value_heads=3, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=2, kv_lora_rank=20, qk_rope_head_dim=8, qk_nope_head_dim=12,
        v_head_dim=12, **{"q_lora_rank": 28, **settings},
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 1, 0.3)
    return model.to(device).train()


@pytest.mark.parametrize("interleaved", [True, False])
def test_the_rotation_that_a_config_chooses_has_the_row(interleaved: bool, device: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(modeling_deepseek_v3, "apply_rotary_pos_emb_interleave", lambda q, k, cos, sin: (k, q))
    model = deepseek(device, rope_interleave=interleaved, q_lora_rank=28 if interleaved else None)
    report = fused_norm.apply_fused_norm(model)
    assert {row.reason for row in report.shared_inputs} == {None}
    kept = [site.reason or "" for site in report.kept if site.kind == "rope"]
    assert [reason.partition(",")[0] for reason in kept] == (
        ["apply_rotary_pos_emb_interleave was replaced"] * 2 if interleaved else []
    )
    assert report.counts["rope"] == (0 if interleaved else 2)


def test_a_rotation_that_is_chosen_after_the_patch_is_fused(device: str, launches: list[str]) -> None:
    model = deepseek(device, rope_interleave=False)
    fused_norm.apply_fused_norm(model)
    model.config.rope_interleave = True
    launches.clear()
    fused = step(model, tokens(device))
    assert any("rope" in kernel for kernel in launches)
    with fused_norm.disabled():
        stock = step(model, tokens(device))
    torch.testing.assert_close(fused[0], stock[0], rtol=1e-5, atol=1e-5)
    assert_gradients_near(fused[1], stock[1], 1e-5, floor=1e-6)


CHOOSING = """
    if self.on:
        z = self.act(x) * x
    else:
        z = self.act(x) * y
    if self.none is None and self.on:
        z = z + self.act(z) * x
    elif self.training:
        z = z + self.act(z) * y
    if not (self.off or self.none):
        z = z + self.act(z) * x
    else:
        z = z + self.act(z) * y
    if self.inner.mode == "slow":
        z = z + self.act(z) * y
    if self.off and z.numel() > 1:
        z = z + self.none_act(z) * y
    if self.training or z.numel() > 1:
        z = z + self.act(z) * x
    if self.broken:  # its value is unknown
        z = z + self.act(z) * x
    return z
"""
"""A product for each way in which settings decide: reachable products have x as a factor, others y."""


class Settings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.inner, self.inner.mode = nn.SiLU(), nn.Identity(), "fast"
        self.off, self.on, self.none, self.none_act = False, True, None, None

    @property
    def broken(self) -> bool:
        raise RuntimeError


def rows_of(layer: type[nn.Module], **settings: Any) -> list[Site]:
    model = layer()
    vars(model).update(settings)
    return list(fused_norm.apply_fused_norm(model, strict=False).rows)


def test_settings_decide_which_products_have_rows() -> None:
    layer = layer_of(CHOOSING, "x, y", Settings)
    assert [row.kind for row in rows_of(layer)] == ["mlp"] * 5
    assert len(rows_of(layer, off=True)) == 6


def is_on() -> bool:
    return True


def test_a_function_without_arguments_is_no_obstacle() -> None:
    layer = layer_of("if is_on():\n    x = self.act(x) * x\nreturn x", "x", Settings, {"is_on": is_on})
    assert [row.kind for row in rows_of(layer)] == ["mlp"]
