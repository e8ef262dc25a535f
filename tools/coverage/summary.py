"""The summary of a sweep: stored, one line a type, compared with that of another release, and shown as tables."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.markdown import in_markdown

KINDS = {
    "norm": "norms",
    "gated": "gated norms",
    "qk": "q and k norms",
    "residual": "residual adds",
    "rope": "half rotations",
    "neighbours": "rotations of neighbours",
    "complex": "complex rotations",
    "conv": "causal convolutions",
    "mlp": "gated products",
    "experts": "experts in one module",
    "loss": "heads with a loss",
}
"""The kinds that are counted, and their names in a table: norms without a gate, norms with one, those without that are
called q or k norms, adds that feed a norm in the same forward, attentions that rotate by halves, neighbours or complex
numbers, depthwise convolutions of at most four taps that see no later token, gated products, experts that are one
module, heads whose logits a cross entropy takes."""

PART = "a part of other models"
"""The reason why no model is built of a type that no auto class knows."""


@dataclass
class Summary:
    """The counts of a sweep over all model types of one release of transformers.

    Attributes:
        transformers: the release.
        types: by model type; of each kind of ``KINDS`` that it has ``[found, fused]``, under ``kept`` rows of kind,
            class, reason and number, and under ``not run`` how many norms of the small model did not run, and why.
        without: types that have nothing of what is counted.
        parts: types that are parts of other models and have no class of their own in the auto classes.
        unbuilt: other types of which no model was built, and why.
        classes: by class, its role and the hash of its forward.
    """

    transformers: str
    types: dict[str, dict[str, Any]] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    unbuilt: dict[str, str] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)

    def totals(self) -> dict[str, tuple[int, int, int]]:
        """Of each kind how many were found, how many of these are fused, and the number of types with any."""
        sums = {}
        for kind in KINDS:
            pairs = [row[kind] for row in self.types.values() if kind in row]
            sums[kind] = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs), len(pairs)
        return sums

    def save(self, path: Path) -> None:
        """Write the summary, sorted, one line for each type and class."""
        lines = ["{", f'"transformers": {json.dumps(self.transformers)},']
        for name in ("types", "unbuilt", "classes"):
            rows = sorted(getattr(self, name).items())
            inside = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in rows)
            lines.append(f'"{name}": {{\n{inside}\n}},')
        lines += [f'"without": {json.dumps(sorted(self.without))},', f'"parts": {json.dumps(sorted(self.parts))}', "}"]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Summary:
        """Read a summary that ``save`` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def summarise(release: str, results: Mapping[str, Mapping[str, Any]]) -> Summary:
    """The summary of the results of a sweep, by type."""
    summary = Summary(release)
    for name, result in results.items():
        if result.get("failed") == PART:
            summary.parts.append(name)
            continue
        if "failed" in result:
            summary.unbuilt[name] = result["failed"]
            continue
        summary.classes |= result["classes"]
        found, fused = result["found"], result["fused"]
        row: dict[str, Any] = {kind: [found[kind], fused[kind]] for kind in KINDS if found.get(kind)}
        if not row:
            summary.without.append(name)
            continue
        row |= {what: [list(cells) for cells in result[what]] for what in ("kept", "unfounded") if result[what]}
        ran, there = result["norms_run"]
        if result["why_not_run"]:
            row["not run"] = [there - ran if result["layers"] else "all", result["why_not_run"]]
        summary.types[name] = row
    return summary


def stored(folder: Path) -> dict[str, Path]:
    """The summaries in a folder by release, oldest first."""
    paths = {path.stem.removeprefix("transformers-"): path for path in folder.glob("transformers-*.json")}
    return dict(sorted(paths.items(), key=lambda item: [int(part) for part in re.findall(r"\d+", item[0])]))


def changes(old: Summary, new: Summary, only: Sequence[str] = ()) -> list[str]:
    """A line for every class and type that came, went or changed from one summary to the other.

    ``only``: the model types that ``new`` is of, all if there is none; of a few it cannot be told what is gone.
    """
    lines = []
    for name in sorted(new.classes.keys() | (() if only else old.classes.keys())):
        before, now = old.classes.get(name), new.classes.get(name)
        role = (now or before or "").partition(" ")[0]
        if before is None:
            lines.append(f"{role} {name}: new")
        elif now is None:
            lines.append(f"{role} {name}: gone")
        elif before.partition(" ")[2] != now.partition(" ")[2]:
            lines.append(f"{role} {name}: its forward is written otherwise")
    for name in sorted(only or old.types.keys() | new.types.keys()):
        rows = [_counts(summary.types.get(name)) for summary in (old, new)]
        if rows[0] != rows[1]:
            lines.append(f"type {name}: {rows[0]} -> {rows[1]}")
    return lines


def _counts(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "absent"
    return ", ".join(f"{row[kind][1]} of {row[kind][0]} {what}" for kind, what in KINDS.items() if kind in row)


def totals_table(summaries: Sequence[Summary]) -> str:
    """A table of what was found and fused, a column for each release."""
    heads = [f"transformers {summary.transformers}" for summary in summaries]
    rows = [["", *heads]]
    totals = [summary.totals() for summary in summaries]
    for kind, what in KINDS.items():
        counts = [total[kind] for total in totals]
        rows.append([what, *(f"{fused} of {count} ({100 * fused / count:.1f} %), {types} types" if count else "none"
                             for count, fused, types in counts)])  # fmt: skip
    for what, name in {"model types with any of these": "types", "model types with none": "without",
                       "parts of other types alone": "parts", "not built": "unbuilt"}.items():  # fmt: skip
        rows.append([what, *(str(len(getattr(summary, name))) for summary in summaries)])
    return in_markdown(rows, "---")


def types_table(summary: Summary) -> str:
    """A row for each model type that has anything of what is counted: what is fused, and what is kept and why."""
    rows = [["model type", "fused", "kept"]]
    for name, row in sorted(summary.types.items()):
        kept = "; ".join(
            f"{number} {KINDS[kind]} ({cls.partition('.')[2]}): {reason}"
            for kind, cls, reason, number in row.get("kept", ())
            if kind != "qk"
        )
        rows.append([f"`{name}`", _counts(row), kept.replace("|", "\\|").replace("<", "&lt;")])
    whole, there = sum("kept" not in row for row in summary.types.values()), len(summary.types)
    said = f"In transformers {summary.transformers}, {whole} of {there} model types keep nothing that is counted."
    return f"{said}\n\n{in_markdown(rows, '---')}"


def gaps(summary: Summary) -> list[tuple[int, int, str, str, str]]:
    """List what is kept: number, number of types, kind, class and reason; the largest number first."""
    numbers: dict[tuple[str, str, str], list[int]] = {}
    for row in summary.types.values():
        for kind, cls, reason, number in row.get("kept", ()):
            numbers.setdefault((kind, cls, reason), []).append(number)
    rows = [(sum(of_types), len(of_types), *what) for what, of_types in numbers.items()]
    return sorted(rows, key=lambda row: (-row[0], row[2:]))


def tables(summaries: Sequence[Summary]) -> dict[str, str]:
    """What the pages of the documentation show of these summaries, oldest first, by the name of the page."""
    return {"supported.md": totals_table(summaries), "model_types.md": types_table(summaries[-1])}
