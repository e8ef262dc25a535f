"""The report on every site: values to test and to store, and a table to read."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from ..old_names import ByKind, OldNames
from ..options import RecomputeLevel
from ..spec import KINDS, Casting, Kind, NormSpec
from .cuda_graphs import Replays

Cause = Literal["option", "overridden", "unrecognised"]
RowKind = Kind | Literal["shared_inputs", "recompute", "graphs"]

_WHATS: Mapping[RowKind, str] = MappingProxyType(
    {
        "linear_4bit": "weight dequantised in one kernel",
        "lora": "sum with the adapter",
        "conv": "causal convolution",
        "loss": "cross entropy without logits",
        "shared_inputs": "an output of the norm for each linear",
        "recompute": "outputs computed again in the backward",
        "graphs": "replayed as CUDA graphs",
    }
)
"""What runs at sites of kinds that fuse one thing."""


@dataclass(frozen=True)
class Site(OldNames):
    """One place in a model where something may be fused, and what became of it.

    Attributes:
        path: a module's name in the model, as in ``named_modules``. ``norm``, ``qk``: the norm. ``residual``: the norm
            that takes the sum, or the layer if none does. ``post_norm``: the norm of the branch. ``rope``: the
            attention. ``mlp``: the module with the product. ``conv``: the module around the convolution.
            ``linear_4bit``: the 4-bit linear. ``lora``: the LoRA layer, or PEFT's wrapper of a parameter. ``loss``: the
            head. ``shared_inputs``: the attention or MLP. ``recompute`` and ``graphs``: the layer.
        kind: one of ``KINDS``; ``shared_inputs`` for an attention or MLP that reads a fused norm, each of whose linears
            gets an output of that norm of its own; ``recompute`` for a layer with something fused in it, which
            recomputes outputs of fused operators in its backward; ``graphs`` for a layer that is replayed as CUDA
            graphs.
        module: the class of the norm; for the kinds that fuse more than a norm that of the layer, attention, MLP, LoRA
            layer or language model.
        spec: what the norm computes; None if it was not recognised, and for a site without one.
        reason: why it was kept as it was; None if it was fused.
        cause: the source of that reason. ``option``: the caller's options. ``overridden``: other code that has replaced
            or wrapped it. ``unrecognised``: it does not compute what is fused here. None for ``shared_inputs``,
            ``recompute`` and ``graphs``.
        activation: what the activation of an MLP computes; None if it was not recognised.
        replaced: the casting of the stock norm if the caller's options give it another one, which ``spec`` has.
        trainer: ``TRL`` if a trainer of TRL has put its head on the language model: then its log-probabilities, or the
            reason why they are not fused, are what the row is on. None for the model's own loss.
    """

    path: str
    kind: RowKind
    module: str
    spec: NormSpec | None = None
    reason: str | None = None
    cause: Cause | None = None
    activation: str | None = None
    replaced: Casting | None = None
    trainer: str | None = None

    @property
    def what(self) -> str:
        """What runs at a fused site, in words: the norm or the activation if the site has one."""
        if self.trainer is not None:
            return f"log-probabilities of {self.trainer} without logits"
        if self.kind in _WHATS:
            return _WHATS[self.kind]
        if self.spec is not None:
            return str(self.spec) if self.replaced is None else f"{self.spec}, in place of {self.replaced}"
        return self.activation or "rotation alone"

    def skipped(self, reason: str, cause: Cause | None = "unrecognised") -> Site:
        """Return this row as skipped for this reason; itself if it has a reason already."""
        return self if self.reason is not None else replace(self, reason=reason, cause=cause)

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON has it."""
        names: tuple[str, ...] = ("path", "module", "reason")
        if self.kind in KINDS:
            names = ("path", "kind", "module", "spec", "reason", "cause", "activation", "replaced", "trainer")
        values = asdict(self)
        return {name: values[name] for name in names}


@dataclass(frozen=True)
class PatchReport(OldNames):
    """The result of ``apply_fused_norm``: one row for every site, fused or kept.

    Attributes:
        model: the model's class.
        model_type: ``config.model_type``, or None for a model without one.
        rows: all of them.
        level: the option ``recompute``.
        has_graphs: the option ``cuda_graphs``.
        replays: under ``cuda_graphs`` what becomes of the calls of layers, as it is now; None without it.
    """

    model: str
    model_type: str | None
    rows: tuple[Site, ...]
    level: RecomputeLevel = False
    has_graphs: bool = False
    replays: Replays | None = field(default=None, compare=False)

    @property
    def fused(self) -> tuple[Site, ...]:
        """The sites that run fused now."""
        return tuple(row for row in self.rows if row.kind in KINDS and row.reason is None)

    @property
    def kept(self) -> tuple[Site, ...]:
        """The sites that run stock code, each with its reason."""
        return tuple(row for row in self.rows if row.kind in KINDS and row.reason is not None)

    @property
    def recompute(self) -> tuple[Site, ...] | None:
        """Under ``recompute`` the layers in which something is fused; without it None."""
        return tuple(row for row in self.rows if row.kind == "recompute") if self.level else None

    @property
    def graphs(self) -> tuple[Site, ...] | None:
        """Under ``cuda_graphs`` the layers; without it None."""
        return tuple(row for row in self.rows if row.kind == "graphs") if self.has_graphs else None

    @property
    def shared_inputs(self) -> tuple[Site, ...]:
        """Under ``shared_inputs`` the blocks that read fused norms."""
        return tuple(row for row in self.rows if row.kind == "shared_inputs")

    @property
    def counts(self) -> dict[Kind, int]:
        """Fused sites by kind."""
        numbers = Counter([site.kind for site in self.fused])
        return ByKind({kind: numbers[kind] for kind in KINDS})

    def why_not_replayed(self, since: Replays | None = None) -> str | None:
        """Return why no layer was replayed as CUDA graphs, forward and backward; None if one was.

        ``since``: a copy of ``replays`` as it was when the calls in question began; None counts all calls.
        """
        now, then = self.replays or Replays(), since or Replays()
        if now.forwards > then.forwards and now.backwards > then.backwards:
            return None
        kept = [row.reason for row in self.graphs or () if row.reason is not None]
        reasons = dict.fromkeys([*kept, *(now.eager - then.eager), *(now.recomputed - then.recomputed)])
        return "; ".join(reasons) or "never called"

    def to_json(self, *, indent: int | None = 2) -> str:
        """The report as JSON: model, model_type, counts, and rows: fused, kept, recompute, graphs and shared_inputs."""
        fields = {"model": self.model, "model_type": self.model_type, "counts": self.counts}
        lists = {name: getattr(self, name) for name in ("fused", "kept", "recompute", "graphs", "shared_inputs")}
        rows = {name: [row.to_dict() for row in sites] for name, sites in lists.items() if sites is not None}
        return json.dumps({**fields, **rows}, indent=indent)

    def summary(self) -> str:
        """One line with the numbers of sites fused and kept, and of layers that recompute and that are replayed."""
        fused = ", ".join(f"{count} {kind}" for kind, count in self.counts.items() if count) or "nothing"
        name = f"{self.model} ({self.model_type})" if self.model_type else self.model
        layers = ""
        for option, rows in (("recompute", self.recompute), ("CUDA graphs", self.graphs)):
            if rows is not None:
                layers += f"; {option} in {sum(row.reason is None for row in rows)} layers"
        return f"{name}: fused {fused}; kept {len(self.kept)}{layers}"

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("fused", row.module, row.what, row.kind, row.path) for row in self.fused]
        rows += [("kept", row.module, row.reason or "", row.kind, row.path) for row in self.kept]
        others = [
            row
            for row in (*(self.recompute or ()), *(self.graphs or ()), *self.shared_inputs)
            if row.reason is not None
        ]
        rows += [(f"no {row.kind} in", row.module, row.reason or "", row.kind, row.path) for row in others]
        # A line for each status, module and what, and below it one for each kind and path, with numbers in it as ``*``.
        groups: dict[str, dict[tuple[str, str], list[str]]] = {}
        for status, module, what, kind, path in rows:
            pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
            group = groups.setdefault(f"{status} {module}: {what}", {})
            group.setdefault((kind, pattern), []).append(path)
        width = max((len(row[3]) for row in rows), default=0)
        lines = [_in_80_columns(self.summary())]
        for head, group in groups.items():
            lines.append(_in_80_columns(head))
            for (kind, pattern), paths in group.items():
                lines.append(f"  {len(paths):>4} {kind:<{width}}  {pattern if len(paths) > 1 else paths[0]}")
        return "\n".join(lines)


_in_80_columns = partial(
    textwrap.fill, width=80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
)
