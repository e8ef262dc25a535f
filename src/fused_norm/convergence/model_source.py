"""A model to train: built the same way every time, and set up for the way its steps run."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import model_configs
from ..check.against_float64 import dropouts_of
from ..model_configs.layers import BLOCK_SIZE, quantise
from ..patcher import apply_fused_norm
from .comparison import (
    FROZEN_NORMS,
    GRAPHS,
    PRECISIONS,
    QLORA,
    RECOMPUTE,
    WITH_DROPOUT,
    Comparison,
    options_for_feature,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class ModelSource:
    """A family's small model, or one of the user's.

    Attributes:
        name: in tables and file names.
        config: of a causal language model.
        weights: what ``from_pretrained`` takes; None for random weights, with norm weights moved away from one.
        has_own_sizes: its sizes matter; those of a family's small model may become others.
    """

    name: str
    config: PreTrainedConfig
    weights: str | None = None
    has_own_sizes: bool = True

    @classmethod
    def of_family(cls, model_type: str, overrides: Mapping[str, Any]) -> ModelSource:
        """The small model of a family in ``model_configs``, with the sizes in ``overrides``."""
        return cls(model_type, model_configs.tiny_config(model_type, **overrides), has_own_sizes=False)

    def in_whole_blocks(self) -> ModelSource:
        """The model with linears as wide as bitsandbytes packs them into 4 bits: in blocks of weights of one row."""
        if self.has_own_sizes:
            return self
        config: Any = copy.deepcopy(self.config)
        for name in ("hidden_size", "intermediate_size", "moe_intermediate_size"):
            if size := getattr(config, name, None):
                setattr(config, name, -(-size // BLOCK_SIZE) * BLOCK_SIZE)
        share = BLOCK_SIZE // math.gcd(BLOCK_SIZE, config.num_attention_heads)
        if size := getattr(config, "head_dim", None):
            config.head_dim = -(-size // share) * share
        return replace(self, config=config)

    def build(self, *, seed: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """The model in training mode, on ``device``, without dropout, which would hide everything else.

        Raises:
            OSError, ValueError: its weights cannot be loaded, or there is no causal language model for the config.
        """
        model: Any
        if self.weights is None:
            model = model_configs.build(self.config, seed=seed, dtype=dtype, device=device)
        else:
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(self.weights, config=self.config, dtype=dtype)
            model = model.to(device).train()
        for module, name in dropouts_of(model):
            setattr(module, name, 0.0)
        return model


def set_up_execution(
    model: Any, comparison: Comparison, compile_backend: str, graphs: list[list[str]] | None = None
) -> nn.Module:
    """The model set up for the comparison's execution; patched or not, it is the same call, but for those of
    ``FUSED_ALONE``, which no stock model is compared in.

    When code is compiled, ``graphs`` gets the names of the operators that each graph calls.
    """
    if comparison.execution == "checkpointing":
        # The name since transformers 5.23, which warns of the old one.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    elif comparison.execution in RECOMPUTE:
        apply_fused_norm(model, recompute="attention", **options_for_feature(comparison.feature))
    elif comparison.execution == GRAPHS:
        apply_fused_norm(model, cuda_graphs=True, **options_for_feature(comparison.feature))
    elif comparison.execution == "compile":
        torch._dynamo.reset()
        backend = torch._dynamo.lookup_backend(compile_backend)

        def noting(graph: torch.fx.GraphModule, inputs: list[Any], **named: Any) -> Any:
            parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
            if graphs is not None:
                graphs.append([str(node.target) for part in parts for node in part.graph.nodes])
            return backend(graph, inputs, **named)

        model.compile(backend=noting)
    return model


def add_adapters(model: Any, comparison: Comparison) -> None:
    """Put adapters on linear layers of a model, train them alone or beside its norms, and freeze all else.

    They are on all linear layers, or on those of queries and values alone.

    Raises:
        ModuleNotFoundError: there is no peft, or no bitsandbytes for linears of 4 bits.
    """
    from peft import LoraConfig, get_peft_model

    is_quantised = comparison.execution in QLORA
    if is_quantised:
        quantise(model)
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    dropout = 0.05 if comparison.execution in WITH_DROPOUT else 0.0
    # A scaling of one would hide that it is left out or applied twice.
    targets = ["q_proj", "v_proj"] if comparison.execution == "qlora-qv" else "all-linear"
    config = LoraConfig(r=8, lora_alpha=12, lora_dropout=dropout, target_modules=targets, init_lora_weights=False)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.default_generator.manual_seed(comparison.seed)
        # peft asks transformers for properties by the names that release 5.23 warns of.
        warnings.simplefilter("ignore", FutureWarning)
        # Both factors random: the usual zeros would leave the other factor without a gradient in the first step.
        is_float32 = PRECISIONS[comparison.precision].weights == "float32"
        # What it returns is a wrapper of the model, which is changed.
        get_peft_model(model, config, autocast_adapter_dtype=is_float32)
    for parameter in vectors if comparison.execution not in FROZEN_NORMS else ():
        parameter.requires_grad_(True)
    frozen = getattr(torch, PRECISIONS[comparison.precision].activations)
    for parameter in () if is_quantised else model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(frozen)
