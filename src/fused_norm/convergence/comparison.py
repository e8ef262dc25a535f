"""One comparison of a fused model with the stock one, and the choices that make it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ..model_configs import FAMILIES
from ..spec import KINDS, Kind


@dataclass(frozen=True)
class Precision:
    """The dtypes of weights and computation, by their names in torch.

    Attributes:
        weights: dtype of the parameters that are trained.
        activations: dtype whose roundings make the noise, also that of the parameters that are not trained.
        mixed: computed under bf16 autocast.
        rate: multiple of the plan's learning rate. A bf16 weight near one does not move by less than 1/256 of it.
    """

    weights: str
    activations: str
    mixed: bool = False
    rate: float = 1.0


PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        "fp32": Precision("float32", "float32"),
        "mixed": Precision("float32", "bfloat16", mixed=True),
        "bf16": Precision("bfloat16", "bfloat16", rate=10.0),
    }
)

FEATURES: Mapping[str, frozenset[Kind]] = MappingProxyType(
    {
        "norms": frozenset({"norm"}),
        "norms+qk": frozenset({"norm", "qk"}),
        "norms+rope": frozenset({"norm", "qk", "rope"}),
        "norms+residual": frozenset({"norm", "residual"}),
        "norms+mlp": frozenset({"norm", "mlp"}),
        "norms+loss": frozenset({"norm", "loss"}),
        "all": frozenset(KINDS),
    }
)
"""The kinds of sites that are fused."""

QLORA = ("qlora", "qlora-dropout", "qlora-qv")
"""The executions whose linears have 4 bits, which are bitsandbytes'."""

LORA = ("lora", "lora-alone", "lora-dropout", "lora-recompute", *QLORA)
"""The executions that train adapters, which are peft's."""

GRAPHS = "graphs"
"""The execution whose layers are replayed as CUDA graphs; its training is held to the bits of ``eager``'s as well."""

LOG_PROBS = "log-probs"
"""The execution whose loss is of log-probabilities that it computes of logits itself."""

WITHOUT_ADAPTERS = ("eager", "compile", "checkpointing", "recompute", GRAPHS, "loss", LOG_PROBS)
"""The executions that train the model's own parameters."""

EXECUTIONS = (*WITHOUT_ADAPTERS, *LORA)
"""The ways a step runs. ``recompute``, ``graphs`` and ``lora-recompute`` are ways of the fused model alone: their stock
models and controls run as those of ``eager`` and ``lora``. ``loss`` and ``log-probs`` leave out labels of half a
sequence and of whole ones; the others leave out a few. ``lora`` trains adapters on every linear layer, and the norms
beside them; ``lora-alone`` freezes the norms, and so does ``lora-dropout``, whose adapters have dropout. ``qlora`` and
``qlora-dropout`` are these two with linears of 4 bits; ``qlora-qv`` has adapters on those of queries and values
alone."""

WITH_DROPOUT = ("lora-dropout", "qlora-dropout")
"""The executions whose adapters have dropout."""

RECOMPUTE: Mapping[str, str] = MappingProxyType({"recompute": "eager", "lora-recompute": "lora"})
"""The executions that recompute what others keep, by the way that their stock models run."""

FUSED_ALONE: Mapping[str, str] = MappingProxyType({**RECOMPUTE, GRAPHS: "eager"})
"""The executions that no stock model runs in, by the way that their stock models run."""

FROZEN_NORMS = ("lora-alone", "lora-dropout", *QLORA)
"""The executions that train no norm."""

_WORDS = {
    "mixed": "bf16 autocast",
    "compile": "compiled",
    "checkpointing": "checkpointed",
    "lora": "LoRA+norms",
    "lora-alone": "LoRA",
    "lora-dropout": "LoRA+dropout",
    "lora-recompute": "LoRA+recomp.",
    "qlora": "QLoRA",
    "qlora-dropout": "QLoRA+drop.",
    "qlora-qv": "QLoRA q, v",
    "graphs": "CUDA graphs",
    "loss": "masked labels",
    "norms": "norms alone",
    "norms+qk": "norms+QK",
    "norms+rope": "norms+RoPE",
    "norms+residual": "norms+adds",
    "norms+mlp": "norms+MLPs",
}

SECOND_RUNS = ("checkpointing", *RECOMPUTE)
"""The executions that compute values of the forward a second time in the backward."""


@dataclass(frozen=True, order=True)
class Comparison:
    """A fused and a stock model, trained under the same settings.

    Attributes:
        model: name of the model.
        precision: a key of ``PRECISIONS``.
        execution: one of ``EXECUTIONS``.
        feature: a key of ``FEATURES``.
        seed: of weights, batches and controls.
    """

    model: str
    precision: str
    execution: str = "eager"
    feature: str = "all"
    seed: int = 0

    @property
    def name(self) -> str:
        """The name of the file with the result."""
        return f"{self.model}.{self.precision}.{self.execution}.{self.feature}.seed{self.seed}"

    @property
    def title(self) -> str:
        """The comparison in words, for people: all is fused and the seed is 0 if nothing else is said."""
        model = self.model.removesuffix("_text").replace("_moe", "-MoE") if self.model in FAMILIES else self.model
        ways = [way for way in (self.execution, self.feature) if way not in ("eager", "all")] or ["eager"]
        words = [model[0].upper() + model[1:], *(_WORDS.get(way, way) for way in (self.precision, *ways))]
        return ", ".join([*words, f"seed {self.seed}"] if self.seed else words)

    @property
    def baseline(self) -> Comparison:
        """The comparison whose stock and control runs this one shares with others."""
        return replace(self, feature="all", execution=FUSED_ALONE.get(self.execution, self.execution))


def options_for_feature(feature: str) -> dict[str, Any]:
    """The options of ``apply_fused_norm`` that fuse the kinds of sites in ``feature`` and no others."""
    return {kind: False for kind in KINDS if kind not in FEATURES[feature]}


def features_of(model: str) -> list[str]:
    """The features that differ for this model: a family without q and k norms has no use for those that name them."""
    kinds = frozenset(FAMILIES[model].sites() if model in FAMILIES else KINDS)
    distinct: dict[frozenset[Kind], str] = {}
    for feature in ("all", *FEATURES):
        distinct.setdefault(FEATURES[feature] & kinds, feature)
    return list(distinct.values())


def by_baseline(comparisons: Iterable[Comparison]) -> dict[Comparison, list[Comparison]]:
    """The comparisons, grouped by the stock and control runs they share."""
    groups: dict[Comparison, list[Comparison]] = {}
    for comparison in comparisons:
        groups.setdefault(comparison.baseline, []).append(comparison)
    return groups
