"""The model types of the installed transformers, and models of them: whole without weights, and small ones that run."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

_FIRST = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING",
    "MODEL_MAPPING",
)
"""The mappings in which a type's class is looked up first: those of the classes with the most parts."""

# What a field of a config means, by its name. The names in configs are many, and these are most of them: where one is
# missed, the small config has no model, and the next larger one is tried.
_LAYERS = re.compile(r"(^|_)(num|n)_(\w+_)?(layers?|blocks?)$|^(\w+_)?layers$|(^|_)depth$|^n_layer$")
_EXPERTS = re.compile(r"(^|_)(num|n)_(\w+_)?experts?$|^moe_num_experts$|^zero_expert_num$")
_CHOSEN = re.compile(r"experts_per_tok|^(?!index).*top_?k|moe_k$")
_GROUPS = re.compile(r"^n_group$|^topk_group$|^num_expert_group")
_WIDTH = re.compile(
    r"hidden|embed|model|dim|width|ffn|inner|intermediate|rank|channels|^d_|_d_|embd|mlp|proj|filter|latent|d_kv|d_ff|head_size"
)
_NO_WIDTH = re.compile(r"^(num|n)_(?!embd|inner)|token|position|vocab|layer_types|image_size|window|kernel|max_|_ids?$")
_INDICES = re.compile(r"ind(ex(es)?|ices)|idxs?$|_layers$|_at$|stages?$")
_TOKEN = re.compile(r"token_(id|index|ids)$")
_VOCABULARY = 512
_STAGES = ("stage_names", "out_features", "_out_features", "out_indices", "_out_indices")
_NOT_CHANGED = ("id2label", "label2id", "task_specific_params", "quantization_config")

MOST_LAYERS = 12
"""Of a small model."""

_COMPLETED: dict[str, dict[str, Any]] = {
    "chameleon": {"vocabulary_map": {"<image>": 4}},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "emu3": {"vocabulary_map": {"<image>": 4}},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hunyuan_vl_text": {"head_dim": 128},
    "idefics3": {"pad_token_id": 0},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "smolvlm": {"pad_token_id": 0},
}
"""Values without which a type's default config has no model."""


def model_types() -> list[str]:
    """The names of all model types that have a config."""
    return sorted(CONFIG_MAPPING.keys())


def default_config(model_type: str) -> Any:
    """The default config of a type, with what it lacks."""
    return CONFIG_MAPPING[model_type](**_COMPLETED.get(model_type, {}))


def model_class_of(config: Any) -> Any:
    """The class of the model with the most parts that the auto classes know for a config; None without one."""
    names = [name for name in dir(modeling_auto) if re.fullmatch(r"MODEL_\w*MAPPING", name)]
    for name in (*_FIRST, *names):
        mapping = getattr(modeling_auto, name, None)
        if mapping is not None and type(config) in mapping:
            classes = mapping[type(config)]
            return classes[0] if isinstance(classes, (tuple, list)) else classes
    return None


def build(model_class: Any, config: Any, device: str) -> nn.Module:
    """A model of a config in fp32, in evaluation mode."""
    with torch.device(device):
        return model_class._from_config(config, dtype=torch.float32).eval()


def rotates_in_sections(model: nn.Module) -> bool:
    """Return whether the code of a model reads ``mrope_section``, of which the widths fit its default heads alone."""
    modules = {inspect.getmodule(type(module)) for module in model.modules()}
    return any("mrope_section" in _source(module) for module in modules if module is not None)


@cache
def _source(module: ModuleType) -> str:
    try:
        return inspect.getsource(module)
    except OSError:
        return ""


def small_configs(config: Any, *, sections: bool) -> Iterator[tuple[int, int, Any]]:
    """Configs like this one with fewer layers, narrower, and with few tokens and experts; the smallest first.

    Every width is divided by the same number, so that what fits together in the config fits in these too. Each comes
    with the number of its layers and the divisor of its widths. ``sections``: the model rotates in sections.
    """
    for divisor in (4, 2, 1):
        for layers in (2, 3, 4, 6, 8, MOST_LAYERS):
            values = _shrunk(config.to_dict(), layers, divisor, {})
            if sections:
                _add_sections(values)
            try:
                yield layers, divisor, type(config).from_dict(values)
            except Exception:  # of whatever kind a config raises that does not like its values
                continue


def _add_sections(values: dict[str, Any]) -> None:
    """Give every text config in ``values`` three sections that fit its heads."""
    for config in [values, *(config for config in values.values() if isinstance(config, dict))]:
        if config is not values:
            _add_sections(config)
        heads = config.get("num_attention_heads")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rotates = {"rope_parameters", "rope_scaling", "rope_theta"} & config.keys()
        if not heads or not rotates or "hidden_size" not in config:
            continue
        width = config.get("head_dim") or config["hidden_size"] // heads
        half = int(width * (rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1)) // 2
        side = 3 * half // 8
        name = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
        config[name] = (
            {"rope_type": "default", "type": "default"} | rope | {"mrope_section": [side, side, half - 2 * side]}
        )


def _shrunk(values: Mapping[str, Any], layers: int, divisor: int, tokens: dict[int, int]) -> dict[str, Any]:
    lengths = {value for name, value in values.items() if type(value) is int and _LAYERS.search(str(name))}
    stages = values.get("stage_names") or ()
    if len(stages) - 1 in lengths and len(stages) > layers + 1:  # a stage for each layer: to be named anew
        values = {name: value for name, value in values.items() if name not in _STAGES}
    return {
        name: value
        if name in _NOT_CHANGED or not isinstance(name, str)
        else _shrunk_value(name, value, lengths, layers, divisor, tokens)
        for name, value in values.items()
    }


def _shrunk_value(name: str, value: Any, lengths: set[int], layers: int, divisor: int, tokens: dict[int, int]) -> Any:
    if isinstance(value, dict):
        if name == "per_layer_config":
            return {key: layer for key, layer in value.items() if int(key) < layers}
        return _shrunk(value, layers, divisor, tokens)
    if isinstance(value, (list, tuple)) and value:
        if all(isinstance(item, dict) for item in value):
            return [_shrunk(item, layers, divisor, tokens) for item in value]
        if name == "depths":
            return [1] * len(value)
        if len(value) in lengths and len(value) > layers:
            return [_shrunk_value(name[:-1], item, set(), layers, divisor, tokens) for item in value[:layers]]
        if _INDICES.search(name) and all(type(item) is int for item in value):
            return [item for item in value if item < layers] or [layers - 1]
        if _WIDTH.search(name):
            return [_narrower(item, divisor) for item in value]
        return value
    if value is None and name == "num_experts_per_tok":
        return 2
    if type(value) is not int:
        return value
    if _TOKEN.search(name):
        return tokens.setdefault(value, _VOCABULARY - 1 - len(tokens)) if value >= _VOCABULARY else value
    if "kv_shared" in name:
        return 0  # no layer is left that shares with another one
    for pattern, most in ((_GROUPS, 1), (_LAYERS, layers), (_EXPERTS, 4), (_CHOSEN, 2)):
        if pattern.search(name):
            return min(value, most)
    if "chunk_size" in name and "vision" not in name:
        return min(value, 16)
    if "vocab_size" in name:
        return min(value, _VOCABULARY)
    if _WIDTH.search(name) and not _NO_WIDTH.search(name):
        return _narrower(value, divisor)
    return value


def _narrower(value: Any, divisor: int) -> Any:
    return value // divisor if type(value) is int and value >= 32 and value % divisor == 0 else value
