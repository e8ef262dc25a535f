"""Small models of families that are not in the table of the package: their sites, and the operators that they call."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

from fused_norm.model_configs import build

from .models import counts

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 64,
}  # fmt: skip
START, END, IMAGE, VIDEO = 60, 61, 62, 63


def random_tokens(batch: int, length: int, end: int) -> Tensor:
    return torch.randint(2, end, (batch, length), generator=torch.Generator().manual_seed(1), device="cpu")


TOKENS, TOKENS_OF_TOWERS, TOKENS_WITH_AN_IMAGE = (
    random_tokens(*shape) for shape in ((2, 9, 64), (2, 16, 64), (1, 19, START))
)
TOKENS_WITH_AN_IMAGE[0, 3:9] = torch.tensor([START, *[IMAGE] * 4, END])


class Tower(nn.Module):
    """A tower with a head that predicts a token from each feature; its input is the same at every call."""

    def __init__(self, tower: nn.Module, name: str, features: Tensor, **others: Tensor) -> None:
        super().__init__()
        self.tower, self.head = tower, nn.Linear(64, 64)
        self.name, self.features, self.others = name, features, others

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> SimpleNamespace:
        features = self.features.bfloat16().to(input_ids.device, self.head.weight.dtype)
        others = {name: value.to(input_ids.device) for name, value in self.others.items()}
        logits = self.head(self.tower(**{self.name: features}, **others)[0])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return SimpleNamespace(logits=logits, loss=loss.to(logits.dtype))


class WithAnImage(nn.Module):
    """A model that gets the same image at every call, so that tokens are its only argument."""

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


def encoder_and_decoder(config: Any) -> nn.Module:
    return AutoModelForSeq2SeqLM.from_config(config)


def tower_of_images(config: Any) -> nn.Module:
    return Tower(AutoModel.from_config(config), "pixel_values", torch.randn(2, 3, 16, 16))


def tower_of_sound(config: Any) -> nn.Module:
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nAudioEncoder

    mask = torch.zeros(2, 128, dtype=torch.bool)
    return Tower(Gemma3nAudioEncoder(config), "audio_mel", torch.randn(2, 128, 32), audio_mel_mask=mask)


def decoder_with_a_tower(config: Any) -> nn.Module:
    return WithAnImage(AutoModelForImageTextToText.from_config(config))


@dataclass(frozen=True)
class OtherFamily:
    """A small model of a family.

    Attributes:
        sites: the counts of the report, of the kinds that are named.
        sizes: arguments of the config; those of a decoder alone update ``SIZES``, and None removes a size.
        make: makes the model of a config; None for a decoder.
        tokens: its inputs.
        expert_mlps: MLPs that are experts, if each of them is a module.
        in_bf16: its errors in bf16 are tested too.
        only_in_5: transformers 4 writes its attention, or its norms, in a way that is kept.
    """

    sites: Mapping[str, int]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[[Any], nn.Module] | None = None
    tokens: Tensor = field(default_factory=lambda: TOKENS)
    expert_mlps: int = 0
    in_bf16: bool = False
    only_in_5: bool = False


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LAYERS = ["sliding_attention", "full_attention"]
ROTATION = {"rope_type": "default", "type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
VISION = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
WITH_AN_IMAGE = {
    "text_config": {name: value for name, value in SIZES.items() if name != "head_dim"} | {"rope_scaling": ROTATION},
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
}
STACK = SIZES | {"num_hidden_layers": 1, "query_pre_attn_scalar": 16, "layer_types": ["full_attention"]}


OTHERS: Mapping[str, OtherFamily] = {
    "glm4": OtherFamily(counts(loss=1, norm=9, rope=2, residual=2, post_norm=4, mlp=2), in_bf16=True),
    # Neighbours are turned together: in fp32 in Cohere, whose norms are LayerNorms, and in ERNIE.
    "cohere": OtherFamily(counts(loss=1, rope=2, mlp=2), in_bf16=True),
    "ernie4_5": OtherFamily(counts(loss=1, norm=5, rope=2, residual=2, mlp=2), in_bf16=True),
    "helium": OtherFamily(counts(loss=1, norm=5, rope=2, residual=2, mlp=2)),
    # No norm in the layer takes a sum. The norms of q and k are over all heads, and differ in width: no pair.
    "olmo2": OtherFamily(counts(loss=1, norm=5, qk=4, rope=2, post_norm=4, mlp=2), in_bf16=True),
    # Its layers without a window do not rotate.
    "exaone4": OtherFamily(
        counts(loss=1, norm=5, qk=4, rope=1, post_norm=4, mlp=2),
        {"sliding_window": 8, "layer_types": LAYERS},
    ),
    "granite": OtherFamily(
        counts(loss=1, norm=5, rope=2, residual=2, mlp=2),
        {"residual_multiplier": 0.22},
        in_bf16=True,
    ),
    "glm4_moe": OtherFamily(
        counts(loss=1, norm=5, qk=4, rope=2, residual=2, mlp=2, experts=1),
        {**EXPERTS, "use_qk_norm": True, "n_routed_experts": 4, "n_shared_experts": 1},
        expert_mlps=4,
    ),
    "hunyuan_v1_dense": OtherFamily(counts(loss=1, norm=5, qk=4, rope=2, residual=2, mlp=2)),
    "phi3": OtherFamily(counts(loss=1, norm=5, rope=2, residual=2, mlp=2), {"partial_rotary_factor": 0.5}),
    "smollm3": OtherFamily(counts(loss=1, norm=5, rope=1, residual=2, mlp=2), {"no_rope_layers": [1, 0]}),
    # Its angles are those of half a head.
    "gpt_oss": OtherFamily(
        counts(loss=1, norm=5, rope=2, residual=2, experts=2),
        {"num_experts_per_tok": 2, "num_local_experts": 4, "layer_types": LAYERS},
    ),
    "stablelm": OtherFamily(counts(loss=1, rope=2, mlp=2), {"partial_rotary_factor": 0.5}, only_in_5=True),
    # Queries and keys are rotated separately; the norm before each layer's router runs twice.
    "gemma3n_text": OtherFamily(
        counts(loss=1, norm=18, qk=4, rope=4, post_norm=6, mlp=2),
        {
            "layer_types": LAYERS, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 0, "laurel_rank": 4, "activation_sparsity_pattern": [0.9, 0.0],
            "intermediate_size": [96, 96],
        },
        only_in_5=True,
    ),
    # The norm is called inside the branch's call, in both kinds of layers.
    "lfm2": OtherFamily(
        {"norm": 5, "qk": 2, "rope": 1, "residual": 2, "post_norm": 0, "mlp": 2, "loss": 1},
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        in_bf16=True,
    ),
    "qwen3_next": OtherFamily(
        counts(loss=1, norm=6, qk=2, rope=1, residual=2, mlp=2, conv=1, experts=2),
        {
            **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32,
            "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2,
            "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        },
        expert_mlps=8,
    ),
    # A layer has two attentions and two dense MLPs; its norms are in lists, four of the layer and four of attentions.
    "longcat_flash": OtherFamily(
        {"norm": 17, "residual": 6, "post_norm": 0, "rope": 4},
        {
            "num_layers": 2, "num_hidden_layers": 4, "num_key_value_heads": 4, "ffn_hidden_size": 96,
            "expert_ffn_hidden_size": 32, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16, "v_head_dim": 16, "moe_topk": 2, "n_routed_experts": 4, "zero_expert_num": 2,
        },
        tokens=TOKENS_WITH_AN_IMAGE,
        in_bf16=True,
    ),
    # Its Mamba layers add a transformer layer's output, if there is any: two of three have nothing to add.
    "zamba2": OtherFamily(
        {"norm": 9, "residual": 3, "post_norm": 0, "rope": 0},
        {
            "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"], "mamba_d_state": 16,
            "mamba_ngroups": 1, "n_mamba_heads": 4, "chunk_size": 8, "num_mem_blocks": 1, "adapter_rank": 8,
            "head_dim": None,
        },
        tokens=TOKENS_WITH_AN_IMAGE,
        in_bf16=True,
    ),
    # Sums are computed at the ends of modules with a single norm each, and reach the next norm from outside.
    "t5": OtherFamily(
        counts(norm=12, mlp=4, loss=1),
        {
            "vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4, "num_layers": 2,
            "decoder_start_token_id": 0, "dropout_rate": 0.0, "feed_forward_proj": "gated-gelu",
        },
        encoder_and_decoder,
        TOKENS_OF_TOWERS,
        in_bf16=True,
    ),
    # A layer of the encoder has four norms, a layer of the decoder six; dropout follows those of branches.
    "t5gemma": OtherFamily(
        {"norm": 12, "residual": 3, "post_norm": 5},
        {"encoder": STACK, "decoder": STACK, "dropout_rate": 0.2, "vocab_size": 64},
        encoder_and_decoder,
        TOKENS_WITH_AN_IMAGE,
        in_bf16=True,
    ),
    # A layer has two norms; a norm precedes and a norm follows the layers.
    "aimv2_vision_model": OtherFamily(
        counts(norm=6, residual=2, mlp=2),
        {
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": 16, "patch_size": 4, "use_head": False,
        },
        tower_of_images,
        TOKENS_OF_TOWERS,
        in_bf16=True,
    ),
    # A layer has nine norms; of those after branches, a single norm is added in a return, the others have a factor.
    "gemma3n_audio": OtherFamily(
        counts(norm=18, post_norm=2),
        {
            "hidden_size": 64, "input_feat_size": 32, "conf_num_attention_heads": 4, "conf_num_hidden_layers": 2,
            "sscp_conv_channel_size": (16, 8), "conf_reduction_factor": 2,
        },
        tower_of_sound,
        TOKENS_OF_TOWERS,
        in_bf16=True,
    ),
    # A block of the tower has two norms, and so has a layer of the text; there are two more.
    "qwen2_5_vl": OtherFamily(
        {"norm": 10, "residual": 4, "post_norm": 0, "rope": 4},
        {
            **WITH_AN_IMAGE, "vision_config": VISION | {"fullatt_block_indexes": [1], "window_size": 16},
            "vision_start_token_id": START, "vision_end_token_id": END,
        },
        decoder_with_a_tower,
        TOKENS_WITH_AN_IMAGE,
        in_bf16=True,
    ),
    # A layer of the text has four norms; the tower has two besides those of its blocks.
    "glm4v": OtherFamily(
        {"norm": 15, "residual": 4, "post_norm": 4, "rope": 4},
        {
            **WITH_AN_IMAGE, "vision_config": VISION | {"image_size": 16}, "image_start_token_id": START,
            "image_end_token_id": END,
        },
        decoder_with_a_tower,
        TOKENS_WITH_AN_IMAGE,
        in_bf16=True,
    ),
}  # fmt: skip
"""Families by model type; their sites are counted by hand."""


def model_of(model_type: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the model of a family in ``OTHERS`` or in the package's table."""
    if model_type not in OTHERS:
        return build(model_type, seed=0, device=device, dtype=dtype)
    family = OTHERS[model_type]
    sizes = copy.deepcopy({**({} if family.make else SIZES), **family.sizes})
    config = AutoConfig.for_model(model_type, **{name: value for name, value in sizes.items() if value is not None})
    if family.make is None:
        return build(config, seed=0, device=device, dtype=dtype)
    model = family.make(config)
    for module in model.modules():
        if "RMSNorm" in type(module).__name__ or "T5LayerNorm" in type(module).__name__:
            nn.init.normal_(module.weight, 1, 0.3)
    return model.to(device, dtype)
