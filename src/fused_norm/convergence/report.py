"""What came out, as a table to read and as JSON to keep."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .mutations import MUTATIONS, SOUND
from .store import FAILED, Result, plain, to_json
from .verdict import Verdict

HEADS = {
    "first_losses": "first loss",
    "outputs": "layers",
    "norm_outputs": "norms",
    "bits": "bits",
    "overwritten": "in place",
    "output_gradients": "d layers",
    "input_gradients": "d inputs",
    "weight_gradients": "d weights",
    "gradients": "d params",
    "loss": "loss",
    "gradient_norm": "grad norm",
    "drifts": "drift",
}


def is_sound(result: Result) -> bool:
    """Whether the fused twin had no fault planted."""
    return result.case.mutation in (None, SOUND)


def exit_code(results: Sequence[Result]) -> int:
    """0 when all is green and every visible fault was caught, 1 for a red verdict or a missed fault, else 2."""
    outcomes = {result.outcome for result in results}
    if outcomes & set(FAILED):
        return 1
    return 2 if "invalid" in outcomes or not outcomes else 0


def summary(results: Sequence[Result]) -> str:
    """One line: how many comparisons came out how."""
    sound = Counter(result.outcome for result in results if is_sound(result))
    faults = Counter(result.outcome for result in results if not is_sound(result))
    words = [", ".join(f"{count} {outcome}" for outcome, count in sorted(sound.items())) or "nothing compared"]
    if faults:
        words.append("planted faults: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(faults.items())))
    return "; ".join(words)


def table(results: Sequence[Result]) -> str:
    """All results: of fused twins how much of each bound was taken, of planted faults what saw them."""
    return "\n\n".join(part for part in (_sound_table(results), _fault_table(results), _explanations(results)) if part)


def _sound_table(results: Iterable[Result]) -> str:
    rows = [["", "case", *HEADS.values()]]
    for result in results:
        if result.case.mutation is None:
            rows.append([result.outcome, result.case.name, *_shares(result.verdict)])
    if len(rows) == 1:
        return ""
    return _aligned(rows) + "\n(share of the bound that the fused run takes, in the worst place; above 1 is red)"


def _shares(verdict: Verdict) -> list[str]:
    worst = (verdict.worst(name) for name in HEADS)
    return ["-" if check is None else f"{check.share:.2f}" if check.share < 100 else ">99" for check in worst]


def _fault_table(results: Sequence[Result]) -> str:
    faults = [result for result in results if result.case.mutation is not None]
    if not faults:
        return ""
    names = list(dict.fromkeys(result.case.twins.name for result in faults))
    columns = [SOUND, *MUTATIONS]
    found = {(result.case.twins.name, result.case.mutation): result for result in faults}
    rows = [["planted fault", *columns]]
    for name in names:
        cells = [found.get((name, column)) for column in columns]
        rows.append([name, *("-" if cell is None else cell.outcome for cell in cells)])
    return _aligned(rows)


def _explanations(results: Iterable[Result]) -> str:
    lines = []
    for result in results:
        if result.outcome in ("red", "missed", "invalid"):
            verdict = result.verdict
            lines.append(f"{result.outcome}: {result.case.name}")
            lines += [f"  {reason}" for reason in verdict.reasons]
            lines += [f"  diverges first in {verdict.divergence}"] if verdict.divergence else []
    return "\n".join(lines)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def as_json(results: Sequence[Result], facts: Mapping[str, Any]) -> str:
    """Facts, summary, and every result with its runs, its checks and its verdict."""
    rows = []
    for result in results:
        verdict = result.verdict
        checks = [asdict(check) | {"ok": check.ok} for check in verdict.checks]
        rows.append(
            to_json(result)
            | {"name": result.case.name, "outcome": result.outcome, "reasons": list(verdict.reasons)}
            | {"divergence": verdict.divergence, "checks": plain(checks)}
        )
    whole = {"summary": summary(results), "exit_code": exit_code(results), "facts": facts, "results": rows}
    return json.dumps(whole, indent=1, default=str)
