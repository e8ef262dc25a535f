"""Names the plans: what to train, how long and in which ways. Commands read this for their help, so without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ..model_configs import FAMILIES
from .comparison import EXECUTIONS, LORA, PRECISIONS, WITHOUT_ADAPTERS


@dataclass(frozen=True)
class TrainingOptions:
    """The settings of training runs, which all comparisons of a plan have in common.

    Attributes:
        steps: optimizer steps.
        batch_size: sequences in a step, on each process.
        learning_rate: AdamW's, after the warm-up.
        accumulation: micro-batches that a step's sequences are taken in, a divisor of their number.
        warmup_steps: steps over which the learning rate rises linearly from 0; it stays constant afterwards.
        weight_decay: AdamW's.
        max_gradient_norm: gradients are scaled down to this norm.
        length: tokens in a sequence.
        controls: control runs for each stock run.
        compile_backend: of ``torch.compile``.
        overrides: config arguments that replace those of a family's tiny model.
        hidden_sizes: of a family's model, if not that of the tiny model.
    """

    steps: int
    batch_size: int
    learning_rate: float = 1e-3
    accumulation: int = 1
    warmup_steps: int = 5
    weight_decay: float = 0.01
    max_gradient_norm: float = 1.0
    # More than 32 positions, and an odd number: the last tile of rows is not full, and there are several.
    length: int = 33
    controls: int = 4
    compile_backend: str = "aot_eager"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    hidden_sizes: Mapping[str, int] = field(default_factory=dict)

    def overrides_of(self, family: str) -> dict[str, Any]:
        """The config arguments that replace those of a family's tiny model."""
        width = self.hidden_sizes.get(family)
        return {**self.overrides, **_HEADS.get(family, {}), **({} if width is None else {"hidden_size": width})}


@dataclass(frozen=True)
class Tier:
    """A plan that has a name.

    Attributes:
        what: it is for, in words.
        settings: of every run.
        families: that are trained if the user names none, if this release of transformers has them.
        precisions: in which they are trained.
        wide: families that run every feature and execution. The others run all features at once.
        features_in: precisions in which wide families run every feature.
        executions: that wide families run in, by precision.
    """

    what: str
    settings: TrainingOptions
    families: tuple[str, ...] = tuple(FAMILIES)
    precisions: tuple[str, ...] = tuple(PRECISIONS)
    wide: tuple[str, ...] = ()
    features_in: tuple[str, ...] = ()
    executions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_WIDTHS = {
    "granite": 2048,
    "llama": 4096,
    "mistral": 3584,
    "qwen3": 5120,
    "qwen3_moe": 256,  # in wide ones the norm of the keys has gradients too small to move it
    "gemma": 3072,
    "gemma2": 2304,
    "gemma3_text": 2560,
    "olmo3": 2048,
    "glm4": 4096,
}
"""Most are those of published models; launch plans differ between them."""

_HEADS: Mapping[str, Mapping[str, Any]] = {
    "granite": {"logits_scaling": 3.0},
    "gemma2": {"final_logit_softcapping": 2.0},
    "gemma4_text": {"final_logit_softcapping": 2.0},
}
"""Options of heads that transform logits: a scale that is no power of two, and a cap near the logits of an untrained
model."""

TIERS: Mapping[str, Tier] = MappingProxyType(
    {
        # Long enough for curves to look at, in one precision and with few tokens.
        "demo": Tier(
            "curves of three families",
            TrainingOptions(steps=20, batch_size=2, warmup_steps=4, length=32),
            families=("qwen3", "llama", "gemma"),
            precisions=("mixed",),
        ),
        # Short enough for Triton's interpreter, in which a fused step costs a hundred times a stock one.
        "quick": Tier(
            "for a CPU",
            TrainingOptions(steps=4, batch_size=2, accumulation=2, warmup_steps=2),
            wide=("qwen3",),
            features_in=("bf16",),
            # Trainers run adapters under autocast.
            executions={"bf16": WITHOUT_ADAPTERS, "mixed": LORA, "fp32": ("compile",)},
        ),
        "full": Tier(
            "for a GPU",
            TrainingOptions(
                steps=20,
                batch_size=8,
                # Twice this rate is unstable in bf16: controls fall into other basins, and a floor of few says nothing.
                learning_rate=2.5e-4,
                accumulation=2,
                length=509,
                compile_backend="inductor",
                overrides={
                    "intermediate_size": 768,
                    "num_hidden_layers": 3,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                    "head_dim": 64,
                },
                hidden_sizes=_WIDTHS,
            ),
            families=tuple(_WIDTHS),
            wide=("qwen3", "gemma3_text"),
            features_in=("fp32", "mixed", "bf16"),
            # Compiling takes longer than everything else.
            executions={"bf16": EXECUTIONS, "mixed": LORA, "fp32": ("compile",)},
        ),
    }
)
