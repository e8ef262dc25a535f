"""The results of a plan as tables to read and as JSON to keep."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .mutations import MUTATIONS, SOUND
from .result_store import FAILED, ComparisonResult, plain, to_json
from .verdict import Verdict, loss_band, relative_gaps

HEADS = {
    "first_losses": "first loss",
    "outputs": "layers",
    "call_outputs": "calls",
    "call_rows": "rows",
    "call_changes": "in place",
    "call_gradients": "d calls",
    "call_slopes": "d calls, slope",
    "output_gradients": "d layers",
    "output_gradient_slopes": "d layers, slope",
    "gradients": "d params",
    "gradient_slopes": "d params, slope",
    "loss": "loss",
    "gradient_norm": "grad norm",
    "drifts": "drift",
}


def is_sound(result: ComparisonResult) -> bool:
    """Return whether the fused twin had no fault planted."""
    return result.comparison.mutation in (None, SOUND)


def exit_code(results: Sequence[ComparisonResult]) -> int:
    """0 when all is green and every visible fault was caught, 1 for a red verdict or a missed fault, else 2."""
    outcomes = {result.outcome for result in results}
    if outcomes & set(FAILED):
        return 1
    return 2 if "invalid" in outcomes or not outcomes else 0


def summary(results: Sequence[ComparisonResult]) -> str:
    """One line: how many comparisons came out how."""
    sound = Counter(result.outcome for result in results if is_sound(result))
    faults = Counter(result.outcome for result in results if not is_sound(result))
    words = [", ".join(f"{count} {outcome}" for outcome, count in sorted(sound.items())) or "nothing compared"]
    if faults:
        words.append("planted faults: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(faults.items())))
    return "; ".join(words)


def table(results: Sequence[ComparisonResult]) -> str:
    """All results: of fused twins how much of each bound was taken, of planted faults what saw them."""
    return "\n\n".join(part for part in (_sound_table(results), _fault_table(results), _explanations(results)) if part)


def loss_table(results: Iterable[ComparisonResult]) -> str:
    """The losses of fused twins beside those of stock, with the largest gap that they and a control have to stock."""
    rows = [
        ["", "comparison", "first loss", "stock's last", "fused last", "gap", "control's gap", "of bound", "memory"]
    ]
    for result in results:
        if result.comparison.mutation is None and result.stock and result.fused and result.controls:
            stock, fused = result.stock, result.fused
            worst = max((check.share for check in result.verdict.checks), default=0.0)
            rows.append(
                [
                    result.outcome,
                    result.comparison.name,
                    *(f"{loss:.4f}" for loss in (stock.losses[0], stock.losses[-1], fused.losses[-1])),
                    f"{max(relative_gaps(fused.losses, stock.losses)):.1e}",
                    f"{max(loss_band(stock, result.controls)):.1e}",
                    f"{worst:.2f}",
                    f"{stock.memory_bytes / 1e6:.1f} -> {fused.memory_bytes / 1e6:.1f} MB",
                ]
            )
    explanations = _explanations(results)
    return "\n\n".join(part for part in (_aligned(rows) if len(rows) > 1 else "", explanations) if part)


def _sound_table(results: Iterable[ComparisonResult]) -> str:
    rows = [["", "comparison", *HEADS.values()]]
    for result in results:
        if result.comparison.mutation is None:
            rows.append([result.outcome, result.comparison.name, *_shares(result.verdict)])
    if len(rows) == 1:
        return ""
    return _aligned(rows) + "\n(share of the bound that the fused run takes, in the worst place; above 1 is red)"


def _shares(verdict: Verdict) -> list[str]:
    worst = (verdict.worst(name) for name in HEADS)
    return ["-" if check is None else f"{check.share:.2f}" if check.share < 100 else ">99" for check in worst]


def _fault_table(results: Sequence[ComparisonResult]) -> str:
    faults = [result for result in results if result.comparison.mutation is not None]
    if not faults:
        return ""
    rows = [["planted fault", *fault_columns(faults)]]
    for name, results_of in fault_rows(faults).items():
        rows.append([name, *("-" if one is None else one.outcome for one in results_of)])
    return _aligned(rows)


def fault_columns(faults: Iterable[ComparisonResult]) -> list[str]:
    """The names of the comparisons that faults were planted in."""
    return list(dict.fromkeys(result.comparison.baseline.name for result in faults))


def fault_rows(faults: Sequence[ComparisonResult]) -> dict[str, list[ComparisonResult | None]]:
    """For each fault that was planted its result in each of ``fault_columns``; None where it was not."""
    found = {(result.comparison.mutation, result.comparison.baseline.name): result for result in faults}
    planted = {result.comparison.mutation for result in faults}
    names = [name for name in (SOUND, *MUTATIONS) if name in planted]
    return {name: [found.get((name, column)) for column in fault_columns(faults)] for name in names}


def _explanations(results: Iterable[ComparisonResult]) -> str:
    lines = []
    for result in results:
        if result.outcome in ("red", "missed", "invalid"):
            verdict = result.verdict
            lines.append(f"{result.outcome}: {result.comparison.name}")
            lines += [f"  {reason}" for reason in verdict.reasons]
            lines += [f"  diverges first in {verdict.divergence}"] if verdict.divergence else []
    return "\n".join(lines)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def as_json(results: Sequence[ComparisonResult], facts: Mapping[str, Any]) -> str:
    """Facts, summary, and every result with its runs, its checks and its verdict."""
    rows = []
    for result in results:
        verdict = result.verdict
        checks = [asdict(check) | {"ok": check.ok} for check in verdict.checks]
        rows.append(
            to_json(result)
            | {"name": result.comparison.name, "outcome": result.outcome, "reasons": list(verdict.reasons)}
            | {"divergence": verdict.divergence, "checks": plain(checks)}
        )
    whole = {"summary": summary(results), "exit_code": exit_code(results), "facts": facts, "results": rows}
    return json.dumps(whole, indent=1, default=str)
