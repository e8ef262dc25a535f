"""What is trained: the axes as data, the tiers as choices of them, and the cases that come of both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from ..model_configs import FAMILIES
from .training import TrainingOptions


@dataclass(frozen=True)
class Precision:
    """How numbers are kept.

    Attributes:
        weights: dtype of the parameters.
        mixed: computed under bf16 autocast.
        rounding: dtype whose roundings make the noise, that of the activations.
        rate: multiple of the plan's learning rate. A bf16 weight near one does not move by less than 1/256 of it.
    """

    weights: torch.dtype
    mixed: bool
    rounding: torch.dtype
    rate: float = 1.0


PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        "fp32": Precision(torch.float32, mixed=False, rounding=torch.float32),
        "mixed": Precision(torch.float32, mixed=True, rounding=torch.bfloat16),
        "bf16": Precision(torch.bfloat16, mixed=False, rounding=torch.bfloat16, rate=10.0),
    }
)

FEATURES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "norms": {"qk": False, "residual": False},
        "norms+qk": {"rope": False, "residual": False},
        "norms+rope": {"residual": False},
        "norms+residual": {"qk": False, "sandwich": False},
        "all": {},
    }
)
"""What is fused: options of ``apply_fused_norm``."""

NORM_KINDS = ("norm", "qk")
"""The kinds of sites that are norms, and can be called on their own."""

EXECUTIONS = ("eager", "compile", "checkpointing", "lora")
"""How a step runs. ``lora`` trains adapters on every linear layer, and the norms beside them."""


@dataclass(frozen=True, order=True)
class Case:
    """One comparison: a fused model against its stock twin, under the same settings.

    Attributes:
        model: name of the subject.
        precision: a key of ``PRECISIONS``.
        execution: one of ``EXECUTIONS``.
        feature: a key of ``FEATURES``.
        seed: of weights, batches and controls.
        mutation: the fault planted in the fused twin, a key of ``mutations.MUTATIONS``; None for a true comparison.
    """

    model: str
    precision: str
    execution: str = "eager"
    feature: str = "all"
    seed: int = 0
    mutation: str | None = None

    @property
    def name(self) -> str:
        """What the case is called in tables and as a file."""
        parts = [self.model, self.precision, self.execution, self.feature, f"seed{self.seed}"]
        return ".".join([*parts, self.mutation] if self.mutation else parts)

    @property
    def twins(self) -> Case:
        """The case that stands for all those that are compared with the same stock and control runs."""
        return replace(self, feature="all", mutation=None)


@dataclass(frozen=True)
class Settings:
    """What all cases of a plan have in common.

    Attributes:
        options: how to train.
        length: tokens in a sequence.
        controls: control runs for each stock run.
        compile_backend: of ``torch.compile``.
        overrides: config arguments that replace those of a family's tiny model.
    """

    options: TrainingOptions
    length: int
    controls: int
    compile_backend: str
    overrides: Mapping[str, Any]


@dataclass(frozen=True)
class Tier:
    """A plan that has a name.

    Attributes:
        settings: of every run.
        mutation_steps: optimizer steps of a run with a planted fault, and of the runs it is compared with.
        wide: families that run every feature and execution. The others run all features at once.
        features_in: precisions in which wide families run every feature.
        executions_in: precisions in which wide families run every execution.
    """

    settings: Settings
    mutation_steps: int
    wide: tuple[str, ...]
    features_in: tuple[str, ...]
    executions_in: tuple[str, ...]


TIERS: Mapping[str, Tier] = MappingProxyType(
    {
        # Short enough for Triton's interpreter, where a fused step costs a hundred times a stock one.
        "quick": Tier(
            Settings(
                TrainingOptions(steps=4, batch_size=2, accumulation=2, learning_rate=1e-3, warmup_steps=2),
                length=20,
                controls=4,
                compile_backend="aot_eager",
                overrides={},
            ),
            mutation_steps=2,
            wide=("qwen3",),
            features_in=("bf16",),
            executions_in=("bf16",),
        ),
        "full": Tier(
            Settings(
                # Twice this rate is unstable in bf16: controls fall into other basins, and a floor of few says nothing.
                TrainingOptions(steps=20, batch_size=8, accumulation=2, learning_rate=2.5e-4, warmup_steps=5),
                length=512,
                controls=4,
                compile_backend="inductor",
                overrides={
                    "hidden_size": 256,
                    "intermediate_size": 768,
                    "num_hidden_layers": 3,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                    "head_dim": 64,
                },
            ),
            mutation_steps=20,
            wide=("qwen3", "gemma3_text"),
            features_in=("fp32", "mixed", "bf16"),
            # Compiling takes longer than everything else.
            executions_in=("bf16",),
        ),
    }
)


def cases(
    tier: Tier,
    models: Sequence[str],
    *,
    precisions: Iterable[str] | None = None,
    features: Iterable[str] | None = None,
    executions: Iterable[str] | None = None,
    seeds: Iterable[int] = (0,),
) -> list[Case]:
    """The cases of a tier, those that share stock and control runs one after the other.

    Every model runs in every precision, fused as far as it can be, eagerly. Wide ones also run with parts of it fused
    and in the other executions. An axis that the caller names is taken in full, for every model.

    Args:
        tier: says what is wide.
        models: names of subjects.
        precisions: keys of ``PRECISIONS``; those of the tier when None.
        features: keys of ``FEATURES``; those of the tier when None.
        executions: of ``EXECUTIONS``; those of the tier when None.
        seeds: each makes the whole plan once.
    """
    found: dict[Case, None] = {}
    for seed in seeds:
        for model in models:
            for precision in precisions or PRECISIONS:
                for execution, feature in _sides(tier, model, precision, features, executions):
                    found[Case(model, precision, execution, feature, seed)] = None
    return list(found)


def _sides(
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


def features_of(model: str) -> list[str]:
    """The features that differ for this model: one without q and k norms has no use for those that name them."""
    has_qk = model not in FAMILIES or "qk" in FAMILIES[model].sites_per_layer
    distinct: dict[frozenset[tuple[str, bool]], str] = {}
    for feature in ("all", *FEATURES):
        choices = FEATURES[feature].items()
        options = frozenset((key, value) for key, value in choices if has_qk or key not in ("qk", "rope"))
        distinct.setdefault(options, feature)
    return list(distinct.values())


def groups(plan: Iterable[Case]) -> dict[Case, list[Case]]:
    """The cases by the stock and control runs they share."""
    found: dict[Case, list[Case]] = {}
    for case in plan:
        found.setdefault(case.twins, []).append(case)
    return found
