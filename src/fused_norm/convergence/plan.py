"""A plan: the comparisons to make, with the models, the text and the settings they need."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor

from .comparison import PRECISIONS, QLORA, Comparison, features_of
from .model_source import ModelSource
from .text_sequences import training_order
from .tiers import Tier, TrainingOptions


@dataclass(frozen=True)
class Plan:
    """Comparisons and what they need to run.

    Attributes:
        comparisons: in order.
        sources: of the models, by name.
        settings: of every run.
        tokens: the text as token ids for each model, (sequences, length), int64.
        facts: about versions, device and processes: a result is used again only if they are equal.
        processes: that share a step.
        cpu: stay on the CPU.
    """

    comparisons: tuple[Comparison, ...]
    sources: Mapping[str, ModelSource]
    settings: TrainingOptions
    tokens: Mapping[str, Tensor]
    facts: Mapping[str, Any]
    processes: int = 1
    cpu: bool = False

    def options(self, comparison: Comparison) -> TrainingOptions:
        """The options that the runs of this comparison train with."""
        rate = self.settings.learning_rate * PRECISIONS[comparison.precision].rate
        return replace(self.settings, learning_rate=rate)

    def sequences(self, comparison: Comparison) -> Tensor:
        """The token ids of all steps of this comparison's runs in training order, (sequences, length), int64."""
        count = self.settings.steps * self.settings.batch_size * self.processes
        return training_order(self.tokens[comparison.model], count=count, seed=comparison.seed)

    def settings_key(self, comparison: Comparison) -> str:
        """A hash of everything that decides a result; a kept one is used again only under the same key.

        The code of this package is part of it: a result of yesterday's kernels says nothing about today's.
        """
        source = self.sources[comparison.model]
        facts = {
            **self.facts,
            "settings": asdict(self.settings),
            "config": source.config.to_dict(),
            "weights": source.weights,
            "tokens": hashlib.sha256(self.sequences(comparison).numpy().tobytes()).hexdigest(),
            "code": code_digest(Path(__file__).parents[1]),
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


@cache
def code_digest(folder: Path) -> str:
    """A hash of the names and contents of all Python files below ``folder``."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}".encode() + path.read_bytes())
    return digest.hexdigest()


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
        models: their names.
        precisions: keys of ``PRECISIONS``; those of the tier when None.
        features: keys of ``FEATURES``; those of the tier when None.
        executions: of ``EXECUTIONS``; those of the tier when None.
        seeds: each makes the whole plan once.
    """
    comparisons: list[Comparison] = []
    for seed, model, precision in product(seeds, models, precisions or tier.precisions):
        ways = [("eager", "all")]
        if features is not None or executions is not None:
            ways = list(product(executions or ("eager",), features or ("all",)))
        elif model in tier.wide:
            ways += [("eager", feature) for feature in features_of(model) if precision in tier.features_in]
            ways += [(execution, "all") for execution in tier.executions.get(precision, ())]
        comparisons += [
            Comparison(model, precision, execution, feature, seed)
            for execution, feature in ways
            if execution not in QLORA or PRECISIONS[precision].mixed  # without autocast they run PEFT's code
        ]
    return list(dict.fromkeys(comparisons))
