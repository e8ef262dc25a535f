"""The rows of ``python -m benchmarks models``: a model of a published shape, a kind of step and a size of batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

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

    @property
    def name(self) -> str:
        """The name in tables and for ``--rows``, such as ``Qwen3-0.6B 4x4096`` or ``Qwen3-0.6B train 4x4096``."""
        kind = "" if self.step == "body" else f"{self.step} "
        return f"{self.model_name} {kind}{self.batch}x{self.length}"

    @property
    def model_name(self) -> str:
        """The name of the model alone, such as ``Qwen3-0.6B``, ``Qwen3-8B (8 layers)`` or ``tiny-qwen3``."""
        name = self.shape.partition("/")[2] if self.shape else f"tiny-{self.model_type}"
        return name if self.layers is None else f"{name} ({self.layers} layers)"

    @property
    def generates(self) -> bool:
        """Return whether the step generates tokens; others train."""
        return self.step in ("generate", "generate static")

    @property
    def in_processes_of_its_own(self) -> bool:
        """Return whether the step is measured in new processes: a cold start, or several GPUs."""
        return self.step in ("cold start", "fsdp2")

    def config(self) -> PreTrainedConfig:
        """The config of the model.

        Raises:
            ValueError: the family has no such shape.
        """
        if self.shape is None:
            return tiny_config(self.model_type)
        from transformers import AutoConfig

        if self.shape in OTHERS:
            return AutoConfig.for_model(self.model_type, **OTHERS[self.shape])
        shapes = {shape.name: shape for shape in FAMILIES[self.model_type].shapes}
        if self.shape not in shapes:
            raise ValueError(f"no shape {self.shape!r} of {self.model_type}; there are {', '.join(shapes)}")
        sizes = {key: value for key, value in asdict(shapes[self.shape]).items() if key != "name"}
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

QWEN3_06B = ("qwen3", "Qwen/Qwen3-0.6B")
LLAMA_1B = ("llama", "meta-llama/Llama-3.2-1B")
GEMMA_1B = ("gemma3_text", "google/gemma-3-1b-pt")
_QWEN3_4B = ("qwen3", "Qwen/Qwen3-4B")
_QWEN3_8B = ("qwen3", "Qwen/Qwen3-8B")
_LLAMA_8B = ("llama", "meta-llama/Llama-3.1-8B")
_SMALL = (QWEN3_06B, LLAMA_1B, GEMMA_1B)

DEFAULT: tuple[ModelCase, ...] = (*(ModelCase(*model, 4, 4096) for model in _SMALL), ModelCase(*QWEN3_06B, 1, 512))
"""The rows that are measured where none are named."""

CASES: tuple[ModelCase, ...] = (
    *DEFAULT,
    ModelCase(*_QWEN3_4B, 4, 4096),
    *(ModelCase(*model, 1, 512) for model in (LLAMA_1B, GEMMA_1B, _QWEN3_4B)),
    *(ModelCase(*model, 1, 16384) for model in (*_SMALL, _QWEN3_4B)),
    *(ModelCase(*model, 4, 4096, layers=8) for model in (_QWEN3_8B, _LLAMA_8B)),
    *(ModelCase(*model, 4, 4096, step="train") for model in _SMALL),
    *(ModelCase(*model, 4, 4096, step="autocast") for model in _SMALL),
    *(ModelCase(*model, 4, 4096, step="checkpointing") for model in _SMALL),
    *(ModelCase(*model, 4, 4096, step="lora") for model in _SMALL),
    *(ModelCase(*model, 1, 16384, step="packed") for model in _SMALL),
    *(ModelCase(*QWEN3_06B, batch, 32, step="generate") for batch in (1, 32)),
    *(ModelCase(*QWEN3_06B, batch, 32, step="generate static") for batch in (1, 32)),
    ModelCase(*QWEN3_06B, 4, 4096, step="cold start"),
    *(ModelCase(*model, 4, 4096, step="fsdp2") for model in (QWEN3_06B, LLAMA_1B)),
    ModelCase("qwen2_5_vl", "Qwen/Qwen2.5-VL-3B (8 and 8 layers)", 1, 4096, step="image"),
    ModelCase("glm4v", "zai-org/GLM-4.1V-9B (4 and 8 layers)", 1, 4096, step="image"),
    ModelCase("qwen3_next", "Qwen/Qwen3-Next (4 layers, 16 experts)", 2, 2048),
    ModelCase("qwen3_5_text", "Qwen/Qwen3.5-9B (4 layers)", 2, 2048),
    ModelCase("lfm2", "LiquidAI/LFM2-1.2B", 4, 4096),
    ModelCase("mamba2", "mistralai/Mamba-Codestral-7B (8 layers)", 1, 512),
    ModelCase("bamba", "ibm-fms/Bamba-9B (4 layers)", 1, 512),
    ModelCase("t5", "google/flan-t5-large", 8, 512),
)

QUICK: tuple[ModelCase, ...] = (ModelCase("qwen3", None, 1, 16), ModelCase("gemma3_text", None, 1, 16))
"""Tiny models, which show on a CPU that the measurements run."""

QUICK_BY_NAME: tuple[ModelCase, ...] = (
    ModelCase("qwen3", None, 1, 16, step="train"),
    ModelCase("qwen3", None, 1, 16, step="autocast"),
    ModelCase("qwen3", None, 1, 16, step="checkpointing"),
    ModelCase("qwen3", None, 1, 16, step="lora"),
    ModelCase("qwen3", None, 1, 16, step="packed"),
    ModelCase("qwen3", None, 1, 2, step="generate"),
    ModelCase("qwen3", None, 2, 2, step="generate static"),
    ModelCase("qwen3", None, 1, 16, step="cold start"),
    ModelCase("qwen3", None, 1, 16, step="fsdp2"),
)
"""A tiny model for every other kind of step."""
