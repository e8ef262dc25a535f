"""The report on comparisons: as text, as one HTML page of the same text with charts, and as JSON."""

from __future__ import annotations

import html
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from string import Template
from typing import Any

from .curve_charts import BOUND, FUSED, NOISE, STOCK, curves_svg, has_curves
from .result_store import ComparisonResult
from .verdict import FIRST_STEPS_BAR, MEASURES, MULTIPLE, loss_band, relative_gaps


def exit_code(results: Sequence[ComparisonResult]) -> int:
    """0 when all is green, 1 for a red verdict, else 2."""
    statuses = {result.verdict.status for result in results}
    return 1 if "red" in statuses else 2 if "invalid" in statuses or not statuses else 0


def summary(results: Iterable[ComparisonResult]) -> str:
    """The number of comparisons that are green, red and invalid, in one line."""
    counts = Counter(result.verdict.status for result in results)
    return ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "nothing compared"


def share_table(results: Iterable[ComparisonResult]) -> str:
    """The share of each bound that every fused run takes, as aligned text."""
    rows = [["", "comparison", *(measure.head for measure in MEASURES)]]
    for result in results:
        worst = [result.verdict.worst(measure.name) for measure in MEASURES]
        shares = ["-" if check is None else f"{check.share:.2f}" if check.share < 100 else ">99" for check in worst]
        rows.append([result.verdict.status, result.comparison.name, *shares])
    return f"{_aligned(rows)}\n(share of the bound that the fused run takes, in the worst place; above 1 is red)"


def loss_table(results: Iterable[ComparisonResult]) -> str:
    """The losses of fused runs beside those of stock, with the largest gap that they and a control have to stock."""
    rows = [
        ["", "comparison", "first loss", "stock's last", "fused last", "gap", "control's gap", "of bound", "memory"]
    ]
    for result in results:
        if result.stock and result.fused and result.controls:
            stock, fused = result.stock, result.fused
            worst = max((check.share for check in result.verdict.checks), default=0.0)
            rows.append(
                [
                    result.verdict.status,
                    result.comparison.name,
                    *(f"{loss:.4f}" for loss in (stock.losses[0], stock.losses[-1], fused.losses[-1])),
                    f"{max(relative_gaps(fused.losses, stock.losses)):.1e}",
                    f"{max(loss_band(stock, result.controls)):.1e}",
                    f"{worst:.2f}",
                    f"{stock.memory_bytes / 1e6:.1f} -> {fused.memory_bytes / 1e6:.1f} MB",
                ]
            )
    return _aligned(rows)


def explanations(results: Iterable[ComparisonResult]) -> str:
    """The reasons of each comparison that is not green, in words; empty where all are."""
    lines = []
    for result in results:
        verdict = result.verdict
        if verdict.status != "green":
            lines.append(f"{verdict.status}: {result.comparison.name}")
            lines += [f"  {reason}" for reason in verdict.reasons]
            lines += [f"  diverges first in {verdict.divergence}"] if verdict.divergence else []
    return "\n".join(lines)


def bounds_table() -> str:
    """The measures and their bounds, with the reasons, as aligned text."""
    rows = [["measure", "bound", "what"]]
    for measure in MEASURES:
        granted = f" + {measure.floor:g} roundings" if measure.floor else ""
        bound = f"{MULTIPLE:g} x noise{granted}" if measure.bar is None else f"{measure.bar:g}"
        rows.append([measure.head, bound, measure.what])
    reasons = dict.fromkeys(measure.why for measure in MEASURES if measure.why)
    return "\n".join(
        (
            _aligned(rows),
            "",
            "The noise is what the worst control does in that place, or in the median place where that is more. A "
            "rounding is half",
            "an eps of bf16, or of fp32 where all is fp32. The first losses, of which only fp32 has bounds, may be "
            f"{FIRST_STEPS_BAR:g} off in any case.",
            *reasons,
        )
    )


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


_CHARTS = f"""
<h2>Curves</h2>
<p><b style="color: {STOCK}">stock</b> and <b style="color: {FUSED}">fused</b> losses over the steps; below, how far the
fused loss is from the stock loss, with the <b style="color: {NOISE}">band of the controls</b>; last, every number
compared, one dot each, its distance over the noise there, with the <b style="color: {BOUND}">bound</b> of a number that
is granted no rounding.</p>
<div class="cards">
"""


def as_page(results: Sequence[ComparisonResult], facts: Mapping[str, Any]) -> str:
    """The report as one HTML page that needs nothing else, light or dark as the reader has it.

    Args:
        results: of all comparisons.
        facts: versions, device, data, settings.
    """
    versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "triton", "transformers") if name in facts)
    wrong = explanations(results)
    shown = [(result, _marked(f"{result.verdict.status} {result.comparison.name}")) for result in results]
    cards = [
        f'<div class="card"><h3>{head}</h3>{curves_svg(result)}</div>' for result, head in shown if has_curves(result)
    ]
    template = Template(Path(__file__).with_name("report_page.html").read_text(encoding="utf-8"))
    return template.substitute(
        summary=html.escape(summary(results)),
        status={0: "green", 1: "red", 2: "invalid"}[exit_code(results)],
        where=html.escape(f"{facts.get('kernels run in', 'kernels of unknown kind')}; {versions}"),
        explanations=f"<h2>What went wrong</h2>\n<pre>{_marked(wrong)}</pre>" if wrong else "",
        losses=_marked(loss_table(results)),
        shares=_marked(share_table(results)),
        charts=_CHARTS + "\n".join(cards) + "\n</div>" if cards else "",
        bounds=html.escape(bounds_table()),
        facts=html.escape(_aligned([[name, str(value)] for name, value in facts.items()])) if facts else "",
    )


def _marked(text: str) -> str:
    """Text as HTML, the status that a line begins with in its colour."""
    return re.sub(r"^(green|red|invalid)\b", r'<b class="\1">\1</b>', html.escape(text), flags=re.MULTILINE)


def as_json(results: Sequence[ComparisonResult], facts: Mapping[str, Any]) -> str:
    """Facts, summary, and every result with its runs, its checks and its verdict; infinities and NaN are strings."""
    rows = []
    for result in results:
        verdict = result.verdict
        checks = [asdict(check) | {"ok": check.ok} for check in verdict.checks]
        rows.append(
            asdict(result)
            | {"name": result.comparison.name, "outcome": verdict.status, "reasons": verdict.reasons}
            | {"divergence": verdict.divergence, "checks": checks}
        )
    whole = {"summary": summary(results), "exit_code": exit_code(results), "facts": facts, "results": rows}
    return json.dumps(_plain(whole), indent=1, default=str)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
