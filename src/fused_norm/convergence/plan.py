"""A plan: the comparisons to make, with the models, the text and the settings they need. Tiers are plans by name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

from torch import Tensor

from ..model_configs import FAMILIES
from .comparison import EXECUTIONS, PRECISIONS, Comparison, by_baseline, features_of
from .model_recipe import ModelRecipe
from .mutations import MUTATIONS, SOUND
from .result_store import fingerprint


@dataclass(frozen=True)
class TrainingOptions:
    """The length of a training run and the settings of its optimizer.

    Attributes:
        steps: optimizer steps.
        batch_size: sequences in a step, on each process.
        accumulation: micro-batches that a step's sequences are taken in.
        learning_rate: AdamW's, after the warm-up.
        warmup_steps: steps over which the learning rate rises linearly from 0; it stays constant afterwards.
        weight_decay: AdamW's.
        max_gradient_norm: gradients are scaled down to this norm.
    """

    steps: int
    batch_size: int
    learning_rate: float = 1e-3
    accumulation: int = 1
    warmup_steps: int = 5
    weight_decay: float = 0.01
    max_gradient_norm: float = 1.0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.batch_size % self.accumulation:
            raise ValueError(f"{self.batch_size} sequences cannot be split into {self.accumulation} micro-batches")


@dataclass(frozen=True)
class Settings:
    """The settings that all comparisons of a plan have in common.

    Attributes:
        options: how to train.
        length: tokens in a sequence.
        controls: control runs for each stock run.
        compile_backend: of ``torch.compile``.
        overrides: config arguments that replace those of a family's tiny model.
        mutation_steps: optimizer steps of a run with a planted fault, and of the runs it is compared with.
    """

    options: TrainingOptions
    length: int
    controls: int = 4
    compile_backend: str = "aot_eager"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    mutation_steps: int = 2


@dataclass(frozen=True)
class Tier:
    """A plan that has a name.

    Attributes:
        what: it is for, in words.
        settings: of every run.
        families: that are trained where the user names none.
        precisions: in which they are trained.
        wide: families that run every feature and execution. The others run all features at once.
        features_in: precisions in which wide families run every feature.
        executions_in: precisions in which wide families run every execution.
    """

    what: str
    settings: Settings
    families: tuple[str, ...] = tuple(FAMILIES)
    precisions: tuple[str, ...] = tuple(PRECISIONS)
    wide: tuple[str, ...] = ()
    features_in: tuple[str, ...] = ()
    executions_in: tuple[str, ...] = ()


TIERS: Mapping[str, Tier] = MappingProxyType(
    {
        # Long enough for curves to look at, in one precision and with few tokens.
        "demo": Tier(
            "curves of three families in a minute",
            Settings(
                TrainingOptions(steps=20, batch_size=2, learning_rate=1e-3, warmup_steps=4),
                length=32,
            ),
            families=("qwen3", "llama", "gemma"),
            precisions=("mixed",),
        ),
        # Short enough for Triton's interpreter, where a fused step costs a hundred times a stock one.
        "quick": Tier(
            "for a CPU",
            Settings(
                TrainingOptions(steps=4, batch_size=2, accumulation=2, learning_rate=1e-3, warmup_steps=2),
                length=20,
            ),
            wide=("qwen3",),
            features_in=("bf16",),
            executions_in=("bf16",),
        ),
        "full": Tier(
            "for a GPU",
            Settings(
                # Twice this rate is unstable in bf16: controls fall into other basins, and a floor of few says nothing.
                TrainingOptions(steps=20, batch_size=8, accumulation=2, learning_rate=2.5e-4, warmup_steps=5),
                length=512,
                compile_backend="inductor",
                overrides={
                    "hidden_size": 256,
                    "intermediate_size": 768,
                    "num_hidden_layers": 3,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                    "head_dim": 64,
                },
                mutation_steps=20,
            ),
            wide=("qwen3", "gemma3_text"),
            features_in=("fp32", "mixed", "bf16"),
            # Compiling takes longer than everything else.
            executions_in=("bf16",),
        ),
    }
)


@dataclass(frozen=True)
class Plan:
    """Comparisons and what they need to run.

    Attributes:
        comparisons: in order.
        recipes: of the models, by name.
        settings: of every run.
        sequences: token ids in training order for a comparison, (sequences, length), int64.
        facts: about versions, device and processes: a result is used again only where they are equal.
        cpu: stay on the CPU.
    """

    comparisons: tuple[Comparison, ...]
    recipes: Mapping[str, ModelRecipe]
    settings: Settings
    sequences: Callable[[Comparison], Tensor]
    facts: Mapping[str, Any]
    cpu: bool = False

    def options(self, comparison: Comparison) -> TrainingOptions:
        """The options that the runs of this comparison train with."""
        options = self.settings.options
        return replace(
            options,
            steps=options.steps if comparison.mutation is None else min(self.settings.mutation_steps, options.steps),
            learning_rate=options.learning_rate * PRECISIONS[comparison.precision].rate,
        )

    def settings_key(self, comparison: Comparison) -> str:
        """A fingerprint of everything that decides a result; a kept one is used again only under the same key."""
        recipe = self.recipes[comparison.model]
        return fingerprint(
            {
                **self.facts,
                "settings": {**asdict(self.settings), "options": asdict(self.options(comparison))},
                "config": recipe.config.to_dict(),
                "weights": recipe.weights,
                "tokens": hashlib.sha256(self.sequences(comparison).numpy().tobytes()).hexdigest(),
            }
        )


def comparisons_of(
    tier: Tier,
    models: Sequence[str],
    *,
    precisions: Iterable[str] | None = None,
    features: Iterable[str] | None = None,
    executions: Iterable[str] | None = None,
    seeds: Iterable[int] = (0,),
) -> list[Comparison]:
    """The comparisons of a tier, those that share stock and control runs one after the other.

    Every model runs in every precision, fused as far as it can be, eagerly. Wide ones also run with parts of it fused
    and in the other executions. An axis that the caller names is taken in full, for every model.

    Args:
        tier: says what is wide.
        models: names of recipes.
        precisions: keys of ``PRECISIONS``; those of the tier when None.
        features: keys of ``FEATURES``; those of the tier when None.
        executions: of ``EXECUTIONS``; those of the tier when None.
        seeds: each makes the whole plan once.
    """
    found: dict[Comparison, None] = {}
    for seed in seeds:
        for model in models:
            for precision in precisions or tier.precisions:
                for execution, feature in _ways(tier, model, precision, features, executions):
                    found[Comparison(model, precision, execution, feature, seed)] = None
    return list(found)


def _ways(
    tier: Tier, model: str, precision: str, features: Iterable[str] | None, executions: Iterable[str] | None
) -> Iterator[tuple[str, str]]:
    """Pairs of execution and feature."""
    if features is not None or executions is not None:
        yield from ((execution, feature) for execution in executions or ("eager",) for feature in features or ("all",))
        return
    yield "eager", "all"
    if model in tier.wide and precision in tier.features_in:
        yield from (("eager", feature) for feature in features_of(model))
    if model in tier.wide and precision in tier.executions_in:
        yield from ((execution, "all") for execution in EXECUTIONS)


def with_mutations(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """For each group that runs eagerly: the sound twin in a short run, and one twin with each fault."""
    return [
        replace(baseline, mutation=mutation)
        for baseline in by_baseline(each for each in comparisons if each.execution == "eager")
        for mutation in (SOUND, *MUTATIONS)
    ]
