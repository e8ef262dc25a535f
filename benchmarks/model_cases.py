"""The rows of models: a model of a published shape, a kind of step and a size of batch, written as a name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

from fused_norm.model_configs import FAMILIES, tiny_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

StepKind = Literal[
    "body",
    "image",
    "train",
    "autocast",
    "checkpointing",
    "lora",
    "packed",
    "generate",
    "generate static",
    "cold start",
    "fsdp2",
]
"""``body``: forward and backward without a head, from a fixed gradient of the last hidden state. ``image``: ``body`` of
a model that sees an image, whose tokens are the first of each sequence. ``train``: with head,
loss and fused AdamW. ``autocast``: ``body`` with fp32 weights under autocast. ``checkpointing``: ``body`` with gradient
checkpointing. ``lora``: ``body`` with adapters on every linear layer and all else frozen. ``packed``: ``body`` of
sequences packed one behind the other into a row, with positions that start again. ``generate``: greedy generation with
a dynamic cache, ``generate static`` with a static one. ``cold start``: the first ``body`` step of a new process with
empty caches. ``fsdp2``: ``body`` of a model sharded over two GPUs."""


@dataclass(frozen=True)
class ModelCase:
    """One model, one kind of step and one size of batch.

    Attributes:
        model_type: the family.
        shape: name of one of the family's published models, or a key of ``OTHERS``; None for the family's tiny model.
        batch: sequences.
        length: tokens in each; generated ones for a generation.
        step: see ``StepKind``.
        layers: of the published ones only so many, for a model whose whole does not fit; None for all of them.
    """

    model_type: str
    shape: str | None
    batch: int
    length: int
    step: StepKind = "body"
    layers: int | None = None

    @classmethod
    def named(cls, name: str) -> ModelCase:
        """The case of a name, such as ``Qwen3-0.6B 4x4096``, ``Qwen3-0.6B train 1x512`` or ``tiny-llama lora 1x8``.

        Raises:
            ValueError: it is no such name.
        """
        kinds = "|".join(get_args(StepKind))
        found = re.fullmatch(rf"(.+?)(?: \((\d+) layers\))?(?: ({kinds}))? (\d+)x(\d+)", name)
        if found is None:
            raise ValueError(f"{name!r} is no model, step and size such as 'Qwen3-0.6B train 4x4096'")
        model, layers, batch, length = found[1], found[2], int(found[4]), int(found[5])
        step: Any = found[3] or "body"
        if model.removeprefix("tiny-") in FAMILIES:
            return cls(model.removeprefix("tiny-"), None, batch, length, step)
        whole = f"{model} ({layers} layers)"
        if whole in _MODELS:
            return cls(*_MODELS[whole], batch, length, step)
        if model not in _MODELS:
            raise ValueError(f"no model {model!r}; there are {', '.join(_MODELS)}, and tiny-FAMILY")
        return cls(*_MODELS[model], batch, length, step, None if layers is None else int(layers))

    @property
    def name(self) -> str:
        """The name in tables and for ``--rows``, from which ``named`` makes the case."""
        model = self.shape.partition("/")[2] if self.shape else f"tiny-{self.model_type}"
        layers = "" if self.layers is None else f" ({self.layers} layers)"
        kind = "" if self.step == "body" else f"{self.step} "
        return f"{model}{layers} {kind}{self.batch}x{self.length}"

    @property
    def generates(self) -> bool:
        """Return whether the step generates tokens; others train."""
        return self.step in ("generate", "generate static")

    @property
    def in_processes_of_its_own(self) -> bool:
        """Return whether the step is measured in new processes: a cold start, or several GPUs."""
        return self.step in ("cold start", "fsdp2")

    def config(self) -> PreTrainedConfig:
        """The config of the model."""
        if self.shape is None:
            return tiny_config(self.model_type)
        from transformers import AutoConfig

        if self.shape in OTHERS:
            return AutoConfig.for_model(self.model_type, **OTHERS[self.shape])
        (shape,) = (shape for shape in FAMILIES[self.model_type].shapes if shape.name == self.shape)
        sizes = {key: value for key, value in asdict(shape).items() if key != "name"}
        if self.layers is not None:
            sizes["num_hidden_layers"] = self.layers
        return AutoConfig.for_model(self.model_type, **sizes)


_TEXT_3B = {
    "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16, "num_key_value_heads": 2,
    "num_hidden_layers": 8, "vocab_size": 151936,
}  # fmt: skip
OTHERS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "Qwen/Qwen2.5-VL-3B (8 and 8 layers)": {
        "text_config": _TEXT_3B,
        "vision_config": {"hidden_size": 1280, "out_hidden_size": 2048, "depth": 8, "fullatt_block_indexes": [3, 7]},
    },
    "zai-org/GLM-4.1V-9B (4 and 8 layers)": {
        "text_config": {
            "num_hidden_layers": 4,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                "mrope_section": [8, 12, 12],
            },
        },
        "vision_config": {"depth": 8},
    },
    "Qwen/Qwen3-Next (4 layers, 16 experts)": {"num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 4},
    "Qwen/Qwen3.5-9B (4 layers)": {"num_hidden_layers": 4},
    "LiquidAI/LFM2-1.2B": {
        "hidden_size": 2048, "num_hidden_layers": 16, "block_auto_adjust_ff_dim": True,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
    "mistralai/Mamba-Codestral-7B (8 layers)": {"num_hidden_layers": 8, "n_groups": 8},
    "ibm-fms/Bamba-9B (4 layers)": {"num_hidden_layers": 4, "attn_layer_indices": [2]},
    "google/flan-t5-large": {
        "d_model": 1024, "d_ff": 2816, "d_kv": 64, "num_layers": 24, "num_heads": 16, "feed_forward_proj": "gated-gelu",
        "dropout_rate": 0.0,
    },
})  # fmt: skip
"""Config arguments of models of further families, some cut to a few layers; the rest is their config's default."""

_FURTHER = {
    "qwen2_5_vl": "Qwen/Qwen2.5-VL-3B (8 and 8 layers)",
    "glm4v": "zai-org/GLM-4.1V-9B (4 and 8 layers)",
    "qwen3_next": "Qwen/Qwen3-Next (4 layers, 16 experts)",
    "qwen3_5_text": "Qwen/Qwen3.5-9B (4 layers)",
    "lfm2": "LiquidAI/LFM2-1.2B",
    "mamba2": "mistralai/Mamba-Codestral-7B (8 layers)",
    "bamba": "ibm-fms/Bamba-9B (4 layers)",
    "t5": "google/flan-t5-large",
}
_MODELS: Mapping[str, tuple[str, str]] = {
    name.partition("/")[2]: (family, name)
    for family, name in (
        *((family, shape.name) for family, model in FAMILIES.items() for shape in model.shapes),
        *_FURTHER.items(),
    )
}
"""Family and full name of every published model, by its name without the organisation."""

_SMALL = ("Qwen3-0.6B", "Llama-3.2-1B", "gemma-3-1b-pt")


def _cases(models: Sequence[str], *steps: str) -> list[ModelCase]:
    return [ModelCase.named(f"{model} {step}") for step in steps for model in models]


DEFAULT = (*_cases(_SMALL, "4x4096"), ModelCase.named("Qwen3-0.6B 1x512"))
"""The rows that are measured where none are named."""

CASES: tuple[ModelCase, ...] = (
    *DEFAULT,
    *_cases(["Qwen3-4B"], "4x4096"),
    *_cases((*_SMALL[1:], "Qwen3-4B"), "1x512"),
    *_cases((*_SMALL, "Qwen3-4B"), "1x16384"),
    *_cases(("Qwen3-8B (8 layers)", "Llama-3.1-8B (8 layers)"), "4x4096"),
    *_cases(_SMALL, "train 4x4096", "autocast 4x4096", "checkpointing 4x4096", "lora 4x4096", "packed 1x16384"),
    *_cases(_SMALL[:1], *(f"{kind} {batch}x32" for kind in ("generate", "generate static") for batch in (1, 32))),
    *_cases(_SMALL[:1], "cold start 4x4096"),
    *_cases(_SMALL[:2], "fsdp2 4x4096"),
    *_cases(("Qwen2.5-VL-3B (8 and 8 layers)", "GLM-4.1V-9B (4 and 8 layers)"), "image 1x4096"),
    *_cases(("Qwen3-Next (4 layers, 16 experts)", "Qwen3.5-9B (4 layers)"), "2x2048"),
    *_cases(["LFM2-1.2B"], "4x4096"),
    *_cases(("Mamba-Codestral-7B (8 layers)", "Bamba-9B (4 layers)"), "1x512"),
    *_cases(["flan-t5-large"], "8x512"),
)

FEATURES = (*_cases(_SMALL, "4x4096", "1x512"), ModelCase.named("Qwen3-0.6B generate 1x32"))
"""The rows on which options are compared."""

QUICK = tuple(_cases(["tiny-qwen3", "tiny-gemma3_text"], "1x16"))
"""Tiny models, which show on a CPU that the measurements run."""

QUICK_BY_NAME = tuple(
    ModelCase.named(f"tiny-qwen3 {step} {2 if step == 'generate static' else 1}x{2 if 'generate' in step else 16}")
    for step in get_args(StepKind)
    if step not in ("body", "image")
)
"""A tiny model for every other kind of step."""

QUICK_FEATURES = (ModelCase.named("tiny-gemma3_text 1x8"), ModelCase.named("tiny-qwen3 generate 1x2"))
