"""The one table of model families: the norm each uses, where its layers have it, a tiny config, real shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..spec import Kind, NormSpec


@dataclass(frozen=True)
class Shape:
    """The sizes of one published model, named as its ``config.json`` names them.

    Attributes:
        name: repository name on the model hub.
        hidden_size: width of the residual stream, and of every norm but the q and k norms.
        num_hidden_layers: decoder layers.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads.
        head_dim: width of a head, and of the q and k norms.
        intermediate_size: width of the MLP; of the dense MLP where there are experts too.
        vocab_size: rows of the embedding.
        tie_word_embeddings: the output layer shares the embedding's weight.
    """

    name: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool


@dataclass(frozen=True)
class Family:
    """One model family as data: all that this package knows of it.

    Attributes:
        model_type: ``config.model_type`` of the text model.
        spec: what every norm of the tiny model computes. Other models of the family may have another eps.
        tiny: config arguments of a model that trains in seconds on a CPU and still has what the family has.
        shapes: published models that are measured, smallest first.
        layer_norms: the norms of a decoder layer, in the order of their use.
        residual_norms: those of them that take the sum of a residual add within the layer.
        sandwich_norms: those of them whose result is added to the residual.
        qk_norms: the norms of queries and keys in the attention, which rotates what they return.
        dense_layers: the layers of the tiny model that have one MLP; the others have experts. None
            is all.
        attention: the attribute of a decoder layer that is its attention.
        mlp: the attribute of a decoder layer that is its MLP, with a gate, or holds its experts.
        layers: the attribute of a decoder that is the list of its layers.
        final_norm: the attribute of a decoder that is the norm after its last layer.
    """

    model_type: str
    spec: NormSpec
    tiny: Mapping[str, Any]
    shapes: tuple[Shape, ...]
    layer_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    residual_norms: tuple[str, ...] = ("post_attention_layernorm",)
    sandwich_norms: tuple[str, ...] = ()
    qk_norms: tuple[str, ...] = ()
    dense_layers: tuple[int, ...] | None = None
    attention: str = "self_attn"
    mlp: str = "mlp"
    layers: str = "layers"
    final_norm: str = "norm"

    @property
    def layer_sites(self) -> tuple[tuple[str, Kind], ...]:
        """The path within a decoder layer, and the kind, of each of its sites."""
        return (
            *((name, "norm") for name in self.layer_norms),
            *((f"{self.attention}.{name}", "qk") for name in self.qk_norms),
            (self.attention, "rope"),
            *((name, "residual") for name in self.residual_norms),
            *((name, "sandwich") for name in self.sandwich_norms),
            (self.mlp, "mlp"),
        )

    @property
    def sites_per_layer(self) -> Mapping[Kind, int]:
        """The number of sites of each kind in one decoder layer."""
        return Counter(kind for _, kind in self.layer_sites)

    def sites(self, num_hidden_layers: int | None = None) -> dict[Kind, int]:
        """The number of sites of each kind in a causal language model of this family, final norm and head included.

        Args:
            num_hidden_layers: decoder layers; those of the tiny model when None.
        """
        layers = self.tiny["num_hidden_layers"] if num_hidden_layers is None else num_hidden_layers
        counts = {kind: layers * count for kind, count in self.sites_per_layer.items()}
        dense = range(layers) if self.dense_layers is None else [layer for layer in self.dense_layers if layer < layers]
        experts: dict[Kind, int] = {} if self.dense_layers is None else {"experts": layers - len(dense)}
        return {**counts, "norm": counts["norm"] + 1, "mlp": len(dense), **experts, "loss": 1}


# A vocabulary of bytes, with room for special tokens.
_VOCAB = 264

_QK_NORMS = ("q_norm", "k_norm")
_FOUR_NORMS: Mapping[str, Any] = MappingProxyType(
    {
        "layer_norms": (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        "residual_norms": ("pre_feedforward_layernorm",),
        "sandwich_norms": ("post_attention_layernorm", "post_feedforward_layernorm"),
    }
)
"""A layer that also normalises what its attention and its MLP return."""

_GEMMA_SPEC = NormSpec("gemma", zero_centered=True, eps=1e-6)


def _tiny(**kwargs: Any) -> Mapping[str, Any]:
    sizes = {"vocab_size": _VOCAB, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return MappingProxyType(sizes | kwargs)


# Widths are no powers of two, so that a kernel's masks have something to mask; eps is the one the released models use.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.model_type: family
        for family in (
            Family(
                model_type="llama",
                spec=NormSpec("llama", eps=1e-5),
                tiny=_tiny(hidden_size=72, intermediate_size=136, tie_word_embeddings=False, rms_norm_eps=1e-5),
                shapes=(
                    Shape("meta-llama/Llama-3.2-1B", 2048, 16, 32, 8, 64, 8192, 128256, True),
                    Shape("meta-llama/Llama-3.2-3B", 3072, 28, 24, 8, 128, 8192, 128256, True),
                    Shape("meta-llama/Llama-3.1-8B", 4096, 32, 32, 8, 128, 14336, 128256, False),
                    Shape("meta-llama/Llama-3.1-70B", 8192, 80, 64, 8, 128, 28672, 128256, False),
                ),
            ),
            Family(
                model_type="mistral",
                spec=NormSpec("llama", eps=1e-5),
                tiny=_tiny(
                    hidden_size=72,
                    head_dim=20,
                    intermediate_size=136,
                    sliding_window=16,
                    tie_word_embeddings=False,
                    rms_norm_eps=1e-5,
                ),
                shapes=(
                    Shape("mistralai/Mistral-7B-v0.1", 4096, 32, 32, 8, 128, 14336, 32000, False),
                    Shape("mistralai/Mistral-7B-v0.3", 4096, 32, 32, 8, 128, 14336, 32768, False),
                ),
            ),
            Family(
                model_type="granite",  # its layers multiply a branch before they add it
                spec=NormSpec("llama", eps=1e-5),
                tiny=_tiny(
                    hidden_size=72,
                    intermediate_size=136,
                    tie_word_embeddings=True,
                    rms_norm_eps=1e-5,
                    residual_multiplier=0.22,
                ),
                shapes=(),
            ),
            Family(
                model_type="qwen3",
                spec=NormSpec("llama", eps=1e-6),
                qk_norms=_QK_NORMS,
                tiny=_tiny(
                    hidden_size=72, head_dim=24, intermediate_size=136, tie_word_embeddings=True, rms_norm_eps=1e-6
                ),
                shapes=(
                    Shape("Qwen/Qwen3-0.6B", 1024, 28, 16, 8, 128, 3072, 151936, True),
                    Shape("Qwen/Qwen3-1.7B", 2048, 28, 16, 8, 128, 6144, 151936, True),
                    Shape("Qwen/Qwen3-4B", 2560, 36, 32, 8, 128, 9728, 151936, True),
                    Shape("Qwen/Qwen3-8B", 4096, 36, 32, 8, 128, 12288, 151936, False),
                    Shape("Qwen/Qwen3-14B", 5120, 40, 40, 8, 128, 17408, 151936, False),
                    Shape("Qwen/Qwen3-32B", 5120, 64, 64, 8, 128, 25600, 151936, False),
                ),
            ),
            Family(
                model_type="qwen3_moe",
                spec=NormSpec("llama", eps=1e-6),
                qk_norms=_QK_NORMS,
                # The released models have experts in every layer; here the first layer is dense, to cover both.
                dense_layers=(0,),
                tiny=_tiny(
                    hidden_size=72,
                    head_dim=24,
                    intermediate_size=136,
                    moe_intermediate_size=40,
                    num_experts=4,
                    num_experts_per_tok=2,
                    mlp_only_layers=[0],
                    tie_word_embeddings=False,
                    rms_norm_eps=1e-6,
                ),
                shapes=(
                    Shape("Qwen/Qwen3-30B-A3B", 2048, 48, 32, 4, 128, 6144, 151936, False),
                    Shape("Qwen/Qwen3-235B-A22B", 4096, 94, 64, 4, 128, 12288, 151936, False),
                ),
            ),
            Family(
                model_type="gemma",
                spec=_GEMMA_SPEC,
                tiny=_tiny(
                    hidden_size=72,
                    head_dim=20,
                    intermediate_size=136,
                    num_key_value_heads=1,
                    tie_word_embeddings=True,
                    rms_norm_eps=1e-6,
                ),
                shapes=(
                    Shape("google/gemma-2b", 2048, 18, 8, 1, 256, 16384, 256000, True),
                    Shape("google/gemma-7b", 3072, 28, 16, 16, 256, 24576, 256000, True),
                ),
            ),
            Family(
                model_type="gemma2",
                spec=_GEMMA_SPEC,
                **_FOUR_NORMS,
                # Soft-capping needs eager attention: scaled_dot_product_attention has none.
                tiny=_tiny(
                    hidden_size=72,
                    head_dim=20,
                    intermediate_size=136,
                    query_pre_attn_scalar=20,
                    sliding_window=16,
                    attn_logit_softcapping=50.0,
                    final_logit_softcapping=30.0,
                    attn_implementation="eager",
                    tie_word_embeddings=True,
                    rms_norm_eps=1e-6,
                ),
                shapes=(
                    Shape("google/gemma-2-2b", 2304, 26, 8, 4, 256, 9216, 256000, True),
                    Shape("google/gemma-2-9b", 3584, 42, 16, 8, 256, 14336, 256000, True),
                    Shape("google/gemma-2-27b", 4608, 46, 32, 16, 128, 36864, 256000, True),
                ),
            ),
            Family(
                model_type="gemma3_text",
                spec=_GEMMA_SPEC,
                **_FOUR_NORMS,
                qk_norms=_QK_NORMS,
                # Every third layer is full: sliding, sliding, full. The released models have every sixth.
                tiny=_tiny(
                    num_hidden_layers=3,
                    hidden_size=72,
                    head_dim=20,
                    intermediate_size=136,
                    query_pre_attn_scalar=20,
                    sliding_window=16,
                    sliding_window_pattern=3,
                    tie_word_embeddings=True,
                    rms_norm_eps=1e-6,
                ),
                shapes=(
                    Shape("google/gemma-3-1b-pt", 1152, 26, 4, 1, 256, 6912, 262144, True),
                    Shape("google/gemma-3-4b-pt", 2560, 34, 8, 4, 256, 10240, 262208, True),
                    Shape("google/gemma-3-12b-pt", 3840, 48, 16, 8, 256, 15360, 262208, True),
                ),
            ),
        )
    }
)
