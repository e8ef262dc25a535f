"""The report on comparisons: as text, as one HTML page with charts, and as JSON."""

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

from .curve_charts import curves_svg
from .verdict import (
    BY_NAME,
    FIRST_STEPS_BAR,
    MEASURES,
    MULTIPLE,
    BoundCheck,
    ComparisonResult,
)


def exit_code(results: Sequence[ComparisonResult]) -> int:
    """0 when all is green, 1 for a red verdict, else 2."""
    statuses = {result.verdict.status for result in results}
    return 1 if "red" in statuses else 2 if "invalid" in statuses or not statuses else 0


def summary(results: Sequence[ComparisonResult]) -> str:
    """The answer in one sentence, with the number of steps that it is on."""
    counts = Counter(result.verdict.status for result in results)
    whole = f"{len(results)} comparison{'s' * (len(results) != 1)}"
    said = [result for result in results if result.verdict.status != "invalid"]
    numbers = [len(result.fused.losses) for result in said if result.fused is not None] or [0]
    steps = f"{min(numbers)}" if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"
    noise = f"beyond rounding noise in {steps} step{'s' * (steps != '1')}"
    silent = f"; {counts['invalid']} said nothing" if counts["invalid"] else ""
    if counts["red"]:
        return f"Differences {noise}: {counts['red']} of {whole}{silent}"
    if silent or not results:
        others = f"; no difference {noise} in the others" if said else ""
        return f"Not known: {counts['invalid']} of {whole} said nothing{others}"
    return f"No difference {noise}: {counts['green']} of {whole}"


def table(results: Iterable[ComparisonResult]) -> str:
    """The losses of each comparison, and the limit that it comes nearest to, as text of 80 columns."""
    rows = [["", "comparison", "stock", "fused", "share of the limit"]]
    for result in results:
        nearest = result.verdict.worst()
        where = f"{_share(nearest)} {BY_NAME[nearest.measure].head}" if nearest else "-"
        rows.append([result.verdict.status, result.comparison.title, *_last_losses(result), where])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, "(last losses; the limit that the fused run comes nearest to, above 1 is red)"])


def _last_losses(result: ComparisonResult) -> list[str]:
    return [f"{run.losses[-1]:.4f}" if run else "-" for run in (result.stock, result.fused)]


def _share(check: BoundCheck | None) -> str:
    return "-" if check is None else f"{check.share:.2f}" if check.share < 100 else ">99"


def explanations(results: Iterable[ComparisonResult]) -> str:
    """The reasons of each comparison that is not green, in words; empty if all are."""
    lines = []
    for result in results:
        verdict = result.verdict
        if verdict.status != "green":
            lines.append(f"{verdict.status}: {result.comparison.title}")
            lines += [f"  {reason}" for reason in verdict.reasons]
            lines += [f"  diverges first in {verdict.divergence}"] if verdict.divergence else []
    return "\n".join(lines)


_REASONS = (
    "The noise is what the worst control does in that place, or in the median place if that is more. A rounding is "
    "half an eps of bf16, or of fp32 if all is fp32. The first losses, of which only fp32 has limits, may be "
    f"{FIRST_STEPS_BAR:g} off in any case.",
    *dict.fromkeys(measure.why for measure in MEASURES if measure.why),
)


def as_page(results: Sequence[ComparisonResult], facts: Mapping[str, Any]) -> str:
    """The report as one HTML page that needs nothing else, light or dark as the reader has it.

    ``facts``: versions, device, data, settings.
    """
    versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "triton", "transformers") if name in facts)
    wrong = explanations(results)
    shares = [["", "comparison", *(measure.head for measure in MEASURES)]]
    for result in results:
        taken = [_share(result.verdict.worst(measure.name)) for measure in MEASURES]
        shares.append([result.verdict.status, result.comparison.title, *taken])
    limits = [["measure", "limit", "what"]]
    for measure in MEASURES:
        noise = f"{MULTIPLE:g} x noise + {measure.floor:g} roundings"
        limits.append([measure.head, noise if measure.bar is None else f"{measure.bar:g}", measure.what])
    template = Template(Path(__file__).with_name("report_page.html").read_text(encoding="utf-8"))
    return template.substitute(
        summary=html.escape(summary(results)),
        status={0: "green", 1: "red", 2: "invalid"}[exit_code(results)],
        where=html.escape(f"{facts.get('patched models run', 'kernels of unknown kind')}; {versions}"),
        explanations=f"<h2>What went wrong</h2>\n<pre>{_marked(wrong)}</pre>" if wrong else "",
        cards="\n".join(_card(result) for result in results if result.stock and result.fused and result.controls),
        shares=_as_html(shares),
        limits=_as_html(limits),
        reasons="\n".join(f"<p>{html.escape(reason)}</p>" for reason in _REASONS),
        facts=_as_html([["", ""], *([name, str(value)] for name, value in facts.items())]),
    )


def _card(result: ComparisonResult) -> str:
    """The charts of a comparison, with what they show in words."""
    words = "The last loss is {} stock and {} fused.".format(*_last_losses(result))
    if nearest := result.verdict.worst():
        words += f" Of {len(result.verdict.checks)} numbers the nearest to its limit takes {_share(nearest)} of it: "
        words += f"{BY_NAME[nearest.measure].what}."
    if result.fused and (ties := result.fused.near_ties):
        words += f" Routers were made to choose as in the stock run in {ties} rows that hold a near tie."
    head = _marked(f"{result.verdict.status} {result.comparison.title}")
    return f"<figure><h3>{head}</h3>{curves_svg(result)}<figcaption>{html.escape(words)}</figcaption></figure>"


def _as_html(rows: Sequence[Sequence[str]]) -> str:
    head, *body = ("".join(f"<td>{_marked(cell)}</td>" for cell in row) for row in rows)
    lines = "\n".join(f"<tr>{line}</tr>" for line in body)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>\n{lines}\n</tbody></table></div>'


def _marked(text: str) -> str:
    """Text as HTML, the status that a line begins with in its colour."""
    return re.sub(r"^(green|red|invalid)\b", r'<b class="\1">\1</b>', html.escape(text), flags=re.MULTILINE)


def as_json(results: Sequence[ComparisonResult], facts: Mapping[str, Any]) -> str:
    """Facts, summary, and every result with its runs, its checks and its verdict; infinities and NaN are strings."""
    rows = []
    for result in results:
        verdict = result.verdict
        checks = [asdict(check) | {"ok": check.ok} for check in verdict.checks]
        fields = asdict(result)
        fields["trouble"] = fields.pop("error")
        rows.append(
            fields
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
