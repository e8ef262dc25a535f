"""Every add that feeds a norm in the same forward has its row; in models that take images too, with stock's results."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

import fused_norm
from fused_norm.check.against_float64 import check_step
from fused_norm.model_configs import FAMILIES, build
from fused_norm.spec import Kind
from tools.coverage.traced_sums import TracedSums

from . import test_families
from .models import assert_near, assert_same_bits, relative, step

START, END, IMAGE, VIDEO = 60, 61, 62, 63
SIZES = {name: value for name, value in test_families.SIZES.items() if name != "head_dim"}
ROTATION = {"rope_type": "default", "type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
WITH_IMAGES = {
    "qwen2_5_vl": {
        "vision_config": VISION | {"fullatt_block_indexes": [1], "window_size": 16},
        "vision_start_token_id": START,
        "vision_end_token_id": END,
    },
    "glm4v": {
        "vision_config": VISION | {"image_size": 16},
        "image_start_token_id": START,
        "image_end_token_id": END,
    },
}
TEXT_ALONE = {
    # Two attentions and two dense MLPs in a layer, whose norms are in lists.
    "longcat_flash": {
        "num_layers": 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "head_dim": 16,
        "v_head_dim": 16,
        "moe_topk": 2,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
    },
    # Its Mamba layers add what a transformer layer made, where there is one.
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "mamba_d_state": 16,
        "mamba_ngroups": 1,
        "n_mamba_heads": 4,
        "chunk_size": 8,
        "num_mem_blocks": 1,
        "adapter_rank": 8,
    },
}
STACK = SIZES | {"num_hidden_layers": 1, "head_dim": 16, "query_pre_attn_scalar": 16, "layer_types": ["full_attention"]}
SITES: dict[str, dict[Kind, int]] = {
    # A block of the tower has two norms, and so has a layer of the text; there are two more.
    "qwen2_5_vl": {"norm": 10, "residual": 4, "sandwich": 0, "rope": 4},
    # A layer of the text has four norms; the tower has two besides those of its blocks, and alone turns halves.
    "glm4v": {"norm": 15, "residual": 4, "sandwich": 4, "rope": 2},
    # Four norms of layers and four of attentions in each, and one at the end.
    "longcat_flash": {"norm": 17, "residual": 6, "sandwich": 0},
    # Three of its norms have a gate.
    "zamba2": {"norm": 9, "residual": 3, "sandwich": 0, "rope": 0},  # by its default settings nothing rotates
    # Four norms in the layer of the encoder and six in that of the decoder; dropout stands behind those of branches.
    "t5gemma": {"norm": 12, "residual": 3, "sandwich": 5},
}
IN_BF16 = tuple(SITES)
LAUNCHES = {
    "qwen2_5_vl": {"add_rms_norm": 4, "rope": 4},
    "glm4v": {"add_rms_norm": 2, "norm_add_norm": 2, "norm_add": 2, "rope": 2},
    "longcat_flash": {"add_rms_norm": 6},
    # Two of the three layers are given nothing to add.
    "zamba2": {"add_rms_norm": 1},
    "t5gemma": {"norm_add_norm": 3, "norm_add": 2},
}
"""The fused adds, and in models with images rotations, that run in a forward."""


class WithAnImage(nn.Module):
    """A model that is given the same image at every call, so that it takes nothing but tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.pixels = torch.randn(16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(2))

    def forward(self, input_ids, **named):
        if "mm_token_type_ids" in inspect.signature(type(self.model).forward).parameters:
            named["mm_token_type_ids"] = (input_ids == IMAGE).int()
        pixels = self.pixels.bfloat16().to(self.model.device, self.model.dtype)
        named["attention_mask"] = torch.ones_like(input_ids)
        grid = torch.tensor([[1, 4, 4]], device=input_ids.device)
        return self.model(input_ids, pixel_values=pixels, image_grid_thw=grid, **named)


def model_of(model_type: str, device: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    if model_type in FAMILIES:
        return build(model_type, seed=0, device=device, dtype=dtype)
    if model_type in test_families.FAMILIES:
        return test_families.model_of(model_type, device=device, dtype=dtype)
    if model_type in TEXT_ALONE:
        config = AutoConfig.for_model(model_type, **copy.deepcopy(SIZES | TEXT_ALONE[model_type]))
        return build(config, seed=0, device=device, dtype=dtype)
    if model_type == "t5gemma":
        stacks = {name: copy.deepcopy(STACK) for name in ("encoder", "decoder")}
        config = AutoConfig.for_model(model_type, **stacks, dropout_rate=0.2, vocab_size=64)
        return _with_weights(AutoModelForSeq2SeqLM.from_config(config)).to(device, dtype)
    config = AutoConfig.for_model(
        model_type,
        text_config=copy.deepcopy(SIZES | {"rope_scaling": ROTATION}),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        **copy.deepcopy(WITH_IMAGES[model_type]),
    )
    return WithAnImage(_with_weights(AutoModelForImageTextToText.from_config(config)).to(device, dtype))


def _with_weights(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            nn.init.normal_(module.weight, 1, 0.3)
    return model


def ids(device: str) -> torch.Tensor:
    """Tokens with a place for the image."""
    tokens = torch.randint(2, START, (1, 19), generator=torch.Generator().manual_seed(1))
    tokens[0, 3:9] = torch.tensor([START, *[IMAGE] * 4, END])
    return tokens.to(device)


@pytest.mark.parametrize(
    "model_type",
    ["qwen2_5_vl", *(pytest.param(name, marks=pytest.mark.slow) for name in SITES if name != "qwen2_5_vl")],
)
def test_sites_and_fp32_results(model_type: str, device: str, launches: list[str]) -> None:
    result = check_step(model_of(model_type, device), ids(device), options={"strict": False})
    assert {kind: result.report.counts[kind] for kind in SITES[model_type]} == SITES[model_type]
    counted = ("add_rms_norm", "norm_add", "norm_add_norm", *(["rope"] if model_type in WITH_IMAGES else []))
    assert {name: launches.count(name) for name in counted if name in launches} == LAUNCHES[model_type]
    assert result.ok, str(result)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", IN_BF16)
def test_bf16_errors_stay_within_the_stock_errors_budget(model_type: str, device: str) -> None:
    result = check_step(model_of(model_type, device, torch.bfloat16), ids(device), options={"strict": False})
    assert result.ok, str(result)


@pytest.mark.slow
def test_a_tower_of_images_is_stock_with_hooks_checkpointing_and_where_fusing_is_off(
    device: str, launches: list[str]
) -> None:
    stock = model_of("qwen2_5_vl", device)
    fused = copy.deepcopy(stock)
    fused_norm.apply_fused_norm(fused)
    tokens = ids(device)
    expected = step(stock, tokens)
    with fused_norm.disabled():
        assert_same_bits(step(fused, tokens), expected)
    assert launches == []
    seen: dict[str, list[torch.Tensor]] = {"stock": [], "fused": []}
    handles = []
    for name, model in (("stock", stock), ("fused", fused)):
        block = model.model.model.visual.blocks[0]
        for module in (block.norm2, block.attn, block):
            keep = seen[name].extend
            handles.append(module.register_forward_hook(lambda _, args, out, keep=keep: keep([*args, out])))
    stock(tokens, use_cache=False)
    fused(tokens, use_cache=False)
    assert len(seen["fused"]) == len(seen["stock"]) >= 5
    assert all(relative(mine, theirs) < 1e-5 for mine, theirs in zip(seen["fused"], seen["stock"], strict=True))
    assert launches.count("add_rms_norm") == 3
    for handle in handles:
        handle.remove()
    launches.clear()
    fused.model.gradient_checkpointing_enable({"use_reentrant": False})
    fused.train()
    assert_near(step(fused, tokens), expected)
    assert launches.count("add_rms_norm") == 8


@pytest.mark.slow
def test_a_dropout_between_a_norm_and_its_add_drops_in_training_as_in_stock(device: str, launches: list[str]) -> None:
    stock = model_of("t5gemma", device)
    fused = copy.deepcopy(stock)
    assert fused_norm.apply_fused_norm(fused, strict=False).counts["sandwich"] == 5
    results = []
    for model in (stock.train(), fused.train()):
        torch.manual_seed(3)
        results.append(step(model, ids(device)))
    assert_near(*reversed(results))
    assert launches.count("add_rms_norm") == 3
    assert "norm_add_norm" not in launches
    launches.clear()
    heard: list[str] = []
    fused.eval().model.encoder.layers[0].dropout.register_forward_hook(lambda *_: heard.append("dropout"))
    fused(ids(device), labels=ids(device), use_cache=False)
    assert len(heard) == 2
    assert launches.count("norm_add_norm") == 2


class Mixer(nn.Module):
    """It holds a norm, and is none."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.factor = nn.RMSNorm(24, eps=1e-5), nn.Parameter(torch.ones(24))

    def forward(self, x):
        return self.norm(x) * self.factor


class Layer(nn.Module):
    def __init__(self, *, deep: bool) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.RMSNorm(24, eps=1e-5) for _ in range(3))
        self.norms = nn.ModuleList(nn.RMSNorm(24, eps=1e-5) for _ in range(2))
        self.layer_norm, self.mixer = nn.LayerNorm(24), Mixer()
        self.deep = deep

    def forward(self, x):
        y = x + self.layer_norm(x + x)
        y = y + self.mixer(y)
        y = y + x
        y = self.layer_norm(y)
        y += x
        y = self.first(y)
        if self.deep:
            y = x + y
        y = self.second(y)
        y = x + y
        y = self.third(y)
        for index in range(2 if self.deep else 0):
            y = self.norms[index](x + y)
        return self.norms[-1](x + y)


@pytest.mark.parametrize("deep", [False, True])
def test_an_add_that_cannot_be_fused_has_a_row_and_what_feeds_no_rms_norm_has_none(deep: bool) -> None:
    report = fused_norm.apply_fused_norm(nn.ModuleList([Layer(deep=deep)]))
    rows = {site.path: site.reason for site in (*report.fused, *report.kept) if site.kind == "residual"}
    expected = {"0.third": None, "0.first": "its sum, y += x, reaches it in a way that is not rewritten"}
    expected["0.norms.1"] = "its sum, x + y, reaches it in a way that is not rewritten"
    expected["0.norms.0"] = expected["0.norms.1"]
    if deep:
        expected["0.second"] = expected["0.norms.1"]
    assert rows == expected
    off = fused_norm.apply_fused_norm(nn.ModuleList([Layer(deep=deep)]), residual=False)
    assert {site.path: site.cause for site in off.kept if site.kind == "residual"} == dict.fromkeys(expected, "option")


OFFSET = 3


class AddsNumbers(nn.Module):
    """Its norms take sums with numbers, of which the source or the module tells all but the last."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(24, eps=1e-5) for _ in range(8))
        self.offset = 0.5

    def forward(self, x, given, annotated: float, default=2):
        x = x + self.offset
        x = self.norms[0](x)
        x = 2 + x
        x = self.norms[1](x)
        count = 0
        for _ in range(2):
            count = count + (-len(x) if self.training else x.shape[-1] / x.size(0))
        count += 1
        x = x + count
        x = self.norms[2](x)
        x = x + OFFSET
        x = self.norms[3](x)
        x = x + annotated
        x = self.norms[4](x)
        x = x + default
        x = self.norms[5](x)
        x += self.offset
        x = self.norms[6](x)
        x = x * 2 + given
        return self.norms[7](x)


def test_a_norm_that_takes_a_sum_with_a_number_keeps_its_kernel_and_has_no_row_of_an_add(
    device: str, launches: list[str]
) -> None:
    stock = AddsNumbers().to(device)
    fused = copy.deepcopy(stock)
    report = fused_norm.apply_fused_norm(nn.ModuleList([fused]))
    rows = [(site.path, site.reason) for site in (*report.fused, *report.kept) if site.kind == "residual"]
    assert rows == [("0.norms.7", None)], "it may be a tensor"
    x = torch.randn(3, 24, device=device)
    assert relative(fused(x, 0.25, 0.5), stock(x, 0.25, 0.5)) < 1e-6
    assert launches == ["rms_norm"] * 8


QUICK = ("llama", "lfm2", "qwen2_5_vl")
COUNTED = ("gemma2", "gemma3n_text", "glm4", "glm4v", "granite", "longcat_flash", "olmo2", "qwen3_next")


@pytest.mark.parametrize("model_type", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in COUNTED)])
def test_rows_are_those_of_the_adds_that_are_seen_to_feed_a_norm(model_type: str) -> None:
    model = model_of(model_type, "cpu")
    report = fused_norm.apply_fused_norm(model, strict=False)
    fused_norm.remove_fused_norm(model)
    rows = (*report.fused, *report.kept)
    sums = TracedSums(model, {site.path for site in rows if site.kind == "norm" and site.spec is not None})
    with torch.no_grad(), sums:
        model(input_ids=ids("cpu"), use_cache=False)
    assert sums.fed == {site.path for site in rows if site.kind == "residual"}
    assert bool(sums.fed) == (model_type not in ("olmo2", "gemma3n_text"))
