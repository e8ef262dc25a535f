"""The one table of model families: the norm each uses, where its layers have it, a tiny config, real shapes."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

from ..spec import KINDS, Kind, NormSpec


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
        intermediate_size: width of the MLP; of the dense MLP if there are experts too.
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
        spec: what the norms of the tiny model compute. Other models of the family may have another eps.
        tiny: config arguments of a model that trains in seconds on a CPU and still has what the family has.
        shapes: published models that are measured, smallest first.
        layer_sites: the number of sites of each kind in a decoder layer; a module with experts counts as an MLP.
        newer_sites: as ``layer_sites``, but a model of an older release of transformers may lack them.
        dense_layers: the layers of the tiny model that have one MLP; the others have experts. None
            is all.
        layers_of_type: what is other in decoder layers of a type in ``config.layer_types``: attributes of this class.
        last_layers: the attribute of a config that is a number of decoder layers at the end, and what is other in
            these; None if nothing is.
        variant: attributes of a config that must be set, or not, as in the tiny model's. Models of other configs have
            other sites, of which the table says nothing.
        decoder_norms: the number of norms of a decoder besides those of its layers.
    """

    model_type: str
    spec: NormSpec
    tiny: Mapping[str, Any]
    shapes: tuple[Shape, ...] = ()
    layer_sites: Mapping[Kind, int] = field(default_factory=lambda: _LLAMA_LAYER)
    newer_sites: Mapping[Kind, int] = field(default_factory=dict)
    dense_layers: tuple[int, ...] | None = None
    layers_of_type: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    last_layers: tuple[str, Mapping[str, Any]] | None = None
    variant: tuple[str, ...] = ()
    decoder_norms: int = 1

    def describes(self, config: Any) -> bool:
        """Whether the sites of a model of this config are those of the row."""
        return all(bool(getattr(config, name, None)) == bool(self.tiny.get(name)) for name in self.variant)

    def layer(self, index: int, config: Any) -> Family:
        """The family as the decoder layer of this number has it, in a model of this config."""
        other: dict[str, Any] = {}
        if self.layers_of_type:
            other |= self.layers_of_type.get(config.layer_types[index], {})
        if self.last_layers is not None:
            count, what = self.last_layers
            other |= what if index >= config.num_hidden_layers - getattr(config, count) else {}
        return replace(self, **other) if other else self

    def sites(self, num_hidden_layers: int | None = None) -> dict[Kind, int]:
        """The number of sites of each kind in a causal language model of this family, final norm and head included.

        Args:
            num_hidden_layers: decoder layers; those of the tiny model when None.
        """
        sizes = self.tiny_arguments({} if num_hidden_layers is None else {"num_hidden_layers": num_hidden_layers})
        config, counts = SimpleNamespace(**sizes), Counter[Kind]({"loss": 1, "norm": self.decoder_norms})
        for index in range(config.num_hidden_layers):
            layer, is_dense = self.layer(index, config), self.dense_layers is None or index in self.dense_layers
            for kind, count in (*layer.layer_sites.items(), *layer.newer_sites.items()):
                counts["experts" if kind == "mlp" and not is_dense else kind] += count
        return {kind: counts[kind] for kind in KINDS if kind in counts}

    def tiny_arguments(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """``tiny``, with the eps of ``spec``, and some arguments replaced.

        Types of layers go on by turns in a model of more layers.
        """
        # A config keeps the lists that it is given.
        arguments = {"rms_norm_eps": self.spec.eps} | copy.deepcopy(dict(self.tiny)) | dict(overrides)
        if "layer_types" in self.tiny and "layer_types" not in overrides:
            types = itertools.cycle(self.tiny["layer_types"])
            arguments["layer_types"] = list(itertools.islice(types, arguments["num_hidden_layers"]))
        return arguments


# A vocabulary of bytes, with room for special tokens.
_VOCAB = 264

_QK_NORMS: Mapping[Kind, int] = MappingProxyType({"qk": 2})
_LLAMA_LAYER: Mapping[Kind, int] = MappingProxyType({"norm": 2, "rope": 1, "residual": 1, "mlp": 1})
_FOUR_NORMS: Mapping[Kind, int] = MappingProxyType({**_LLAMA_LAYER, "norm": 4, "post_norm": 2})
"""A layer that also normalises what its attention and its MLP return."""

_GEMMA_4_LAYER: Mapping[Kind, int] = MappingProxyType(
    {"norm": 5, "qk": 1, "rope": 1, "residual": 1, "post_norm": 3, "mlp": 2}
)
_OLMO: Mapping[str, Any] = MappingProxyType(
    {
        "spec": NormSpec("gemma", eps=1e-6, casts_weight=False),
        # It normalises only what its attention and its MLP return.
        "layer_sites": {**_QK_NORMS, "norm": 2, "rope": 1, "post_norm": 2, "mlp": 1},
    }
)
_OLMO_SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "intermediate_size": 136,
        # At the config's 0.02 the norms of q and k divide by so little that stock gradients overflow in fp16.
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
)

_GEMMA_SPEC = NormSpec("gemma", zero_centered=True, eps=1e-6)

_LINEAR_ATTENTION: Mapping[str, Any] = MappingProxyType(
    {"layer_sites": {"norm": 3, "residual": 1, "mlp": 1}, "newer_sites": {"conv": 1}}
)
"""A gated delta net: no rotation, and a norm with a gate."""

_DELTA_NET_SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "head_dim": 24,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 20,
        "tie_word_embeddings": True,
    }
)


def _tiny(**kwargs: Any) -> Mapping[str, Any]:
    sizes = {"vocab_size": _VOCAB, "hidden_size": 72, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return MappingProxyType(sizes | heads | kwargs)


# Widths are no powers of two, so that a kernel's masks have something to mask; eps is that of the released models.
_FAMILIES = (
    Family(
        model_type="llama",
        spec=NormSpec("llama", eps=1e-5),
        tiny=_tiny(intermediate_size=136, tie_word_embeddings=False),
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
        tiny=_tiny(head_dim=20, intermediate_size=136, sliding_window=16, tie_word_embeddings=False),
        shapes=(Shape("mistralai/Mistral-7B-v0.1", 4096, 32, 32, 8, 128, 14336, 32000, False),),
    ),
    Family(
        model_type="granite",  # its layers multiply a branch before they add it
        spec=NormSpec("llama", eps=1e-5),
        tiny=_tiny(intermediate_size=136, tie_word_embeddings=True, residual_multiplier=0.22),
    ),
    Family(
        model_type="qwen3",
        spec=NormSpec("llama", eps=1e-6),
        layer_sites={**_LLAMA_LAYER, **_QK_NORMS},
        tiny=_tiny(head_dim=24, intermediate_size=136, tie_word_embeddings=True),
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
        layer_sites={**_LLAMA_LAYER, **_QK_NORMS},
        # The released models have experts in every layer; here the first layer is dense, to cover both.
        dense_layers=(0,),
        tiny=_tiny(
            head_dim=24,
            intermediate_size=136,
            moe_intermediate_size=40,
            num_experts=4,
            num_experts_per_tok=2,
            mlp_only_layers=[0],
            tie_word_embeddings=False,
        ),
        shapes=(
            Shape("Qwen/Qwen3-30B-A3B", 2048, 48, 32, 4, 128, 6144, 151936, False),
            Shape("Qwen/Qwen3-235B-A22B", 4096, 94, 64, 4, 128, 12288, 151936, False),
        ),
    ),
    Family(
        model_type="gemma",
        spec=_GEMMA_SPEC,
        tiny=_tiny(head_dim=20, intermediate_size=136, num_key_value_heads=1, tie_word_embeddings=True),
        shapes=(
            Shape("google/gemma-2b", 2048, 18, 8, 1, 256, 16384, 256000, True),
            Shape("google/gemma-7b", 3072, 28, 16, 16, 256, 24576, 256000, True),
        ),
    ),
    Family(
        model_type="gemma2",
        spec=_GEMMA_SPEC,
        layer_sites=_FOUR_NORMS,
        # Soft-capping needs eager attention: scaled_dot_product_attention has none.
        tiny=_tiny(
            head_dim=20,
            intermediate_size=136,
            query_pre_attn_scalar=20,
            sliding_window=16,
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
            attn_implementation="eager",
            tie_word_embeddings=True,
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
        layer_sites={**_FOUR_NORMS, **_QK_NORMS},
        # Every third layer is full: sliding, sliding, full. The released models have every sixth.
        tiny=_tiny(
            num_hidden_layers=3,
            head_dim=20,
            intermediate_size=136,
            query_pre_attn_scalar=20,
            sliding_window=16,
            sliding_window_pattern=3,
            tie_word_embeddings=True,
        ),
        shapes=(
            Shape("google/gemma-3-1b-pt", 1152, 26, 4, 1, 256, 6912, 262144, True),
            Shape("google/gemma-3-4b-pt", 2560, 34, 8, 4, 256, 10240, 262208, True),
            Shape("google/gemma-3-12b-pt", 3840, 48, 16, 8, 256, 15360, 262208, True),
        ),
    ),
    Family(
        model_type="gemma4_text",
        spec=NormSpec("gemma", eps=1e-6),
        # Queries and keys are rotated one at a time, and the layer has a gate for its per-layer input.
        layer_sites={**_GEMMA_4_LAYER, "norm": 6, "qk": 2, "rope": 2},
        last_layers=("num_kv_shared_layers", {"layer_sites": _GEMMA_4_LAYER}),  # they take keys and values of others
        variant=("hidden_size_per_layer_input", "enable_moe_block"),
        decoder_norms=2,
        tiny=_tiny(
            num_hidden_layers=4,
            head_dim=20,
            global_head_dim=24,
            intermediate_size=136,
            layer_types=["sliding_attention", "full_attention"] * 2,
            sliding_window=16,
            num_kv_shared_layers=2,
            hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=_VOCAB,
            final_logit_softcapping=30.0,
            tie_word_embeddings=True,
        ),
    ),
    Family(
        model_type="olmo2",
        **_OLMO,
        tiny=_tiny(**_OLMO_SIZES),
        shapes=(Shape("allenai/OLMo-2-1124-7B", 4096, 32, 32, 32, 128, 11008, 100352, False),),
    ),
    Family(
        model_type="olmo3",
        **_OLMO,
        tiny=_tiny(**_OLMO_SIZES, layer_types=["sliding_attention", "full_attention"], sliding_window=16),
    ),
    Family(
        model_type="glm4",
        spec=NormSpec("llama", eps=1e-5),
        layer_sites=_FOUR_NORMS,
        tiny=_tiny(head_dim=20, intermediate_size=136, tie_word_embeddings=False, pad_token_id=0, eos_token_id=1),
    ),
    Family(
        model_type="ministral3",
        spec=NormSpec("llama", eps=1e-5),
        tiny=_tiny(head_dim=20, intermediate_size=136, tie_word_embeddings=False),
    ),
    Family(
        model_type="gpt_oss",
        spec=NormSpec("gemma", eps=1e-5, casts_weight=False),
        layer_sites={"norm": 2, "rope": 1, "residual": 1},
        newer_sites={"experts": 1},
        tiny=_tiny(
            head_dim=20,
            intermediate_size=40,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=16,
            tie_word_embeddings=False,
            pad_token_id=0,
            eos_token_id=1,
        ),
    ),
    Family(
        model_type="qwen3_5_text",
        spec=_GEMMA_SPEC,
        layer_sites={**_LLAMA_LAYER, **_QK_NORMS},
        layers_of_type={"linear_attention": _LINEAR_ATTENTION},  # of the released models' layers, three out of four
        tiny=_tiny(**_DELTA_NET_SIZES, intermediate_size=136),
    ),
    Family(
        model_type="qwen3_5_moe_text",
        spec=_GEMMA_SPEC,
        layer_sites={**_LLAMA_LAYER, **_QK_NORMS},  # the MLP is the expert that all tokens share
        newer_sites={"experts": 1},
        layers_of_type={"linear_attention": {**_LINEAR_ATTENTION, "newer_sites": {"conv": 1, "experts": 1}}},
        tiny=_tiny(
            **_DELTA_NET_SIZES,
            moe_intermediate_size=40,
            shared_expert_intermediate_size=40,
            num_experts=4,
            num_experts_per_tok=2,
        ),
    ),
)

FAMILIES: Mapping[str, Family] = MappingProxyType({family.model_type: family for family in _FAMILIES})
