"""The report on comparisons: as text, as JSON, and as one HTML page with charts: losses laid over each other, their gap
with its limit, and every number over its own.
"""

from __future__ import annotations

import html
import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from .verdict import (
    BY_NAME,
    FIRST_STEPS_BAR,
    MEASURES,
    MULTIPLE,
    BoundCheck,
    ComparisonResult,
    relative_gaps,
)


def exit_code(results: Sequence[ComparisonResult]) -> int:
    """0 when all is green, 1 for a red verdict, else 2."""
    statuses = {result.verdict.status for result in results}
    return 1 if "red" in statuses else 2 if "invalid" in statuses or not statuses else 0


def summary(results: Sequence[ComparisonResult]) -> str:
    """The answer in one sentence."""
    counts = Counter(result.verdict.status for result in results)
    whole = f"{len(results)} comparison{'s' * (len(results) != 1)}"
    silent = f"; {counts['invalid']} said nothing" if counts["invalid"] else ""
    if counts["red"]:
        return f"No: training came out differently in {counts['red']} of {whole}{silent}"
    answer = "Not known" if silent or not results else "Yes"
    return f"{answer}: training came out the same in {counts['green']} of {whole}{silent}"


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
        where=html.escape(f"{facts.get('kernels run in', 'kernels of unknown kind')}; {versions}"),
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


STOCK, FUSED, NOISE, LIMIT = "#3b7dd8", "#e07b1a", "#8b949e", "#d64545"
_TEXT = "#808a94"
"""All colours stand out on light and on dark paper."""

COLOURS = {"stock": STOCK, "fused": FUSED, "noise": NOISE, "limit": LIMIT, "soft": _TEXT}
"""The colours by the names of the CSS variables that replace them on a page that has these."""

_LEAST, _MOST = 1e-4, 1e2
"""Shares of limits that are less, or more, are drawn at this."""


def curves_svg(result: ComparisonResult) -> str:
    """The three charts of a comparison that has stock, control and fused runs, as one ``svg`` without a background."""
    svg = as_svg(partial(_figure, result), result.comparison.name)
    for name, colour in COLOURS.items():
        svg = svg.replace(colour, f"var(--{name}, {colour})")
    return svg


def as_svg(draw: Callable[[], Figure], name: str, *, size: float = 8, ink: str = _TEXT) -> str:
    """Draw a figure as one ``svg`` element without a background, the same bytes at every call.

    Args:
        draw: makes the figure.
        name: tells the figure's ids from those of others on a page.
        size: of text, in points.
        ink: the colour of text and axes.
    """
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": name}
    style |= {"font.sans-serif": ["DejaVu Sans"]}  # a longer list would stand at every word
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
    style |= {"font.size": size} | dict.fromkeys(inked, ink)
    text = io.StringIO()
    with rc_context(style):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        draw().savefig(text, format="svg", transparent=True, metadata=nothing)
    return text.getvalue()[text.getvalue().index("<svg") :]


def _figure(result: ComparisonResult) -> Figure:
    # No pyplot: it would open a window system and keep the figure.
    figure = Figure(figsize=(3.6, 6.6), layout="constrained")
    losses, gaps, checks = figure.subplots(3, gridspec_kw={"height_ratios": [3, 3, 4]})
    stock, fused = result.stock, result.fused
    assert stock
    assert fused
    losses.plot(stock.losses, color=STOCK, linewidth=4, alpha=0.4, label="stock")
    losses.plot(fused.losses, color=FUSED, linewidth=1.2, label="fused")
    losses.set_ylabel("loss (nats per token)")

    noise = [relative_gaps(control.losses, stock.losses) for control in result.controls]
    band = [max(worst) for worst in zip(*noise, strict=True)]
    gaps.set_yscale("log", nonpositive="mask")
    bottom = min(filter(None, band), default=1e-9) / 10
    gaps.fill_between(
        range(len(band)), [max(gap, bottom) for gap in band], bottom, color=NOISE, alpha=0.25, label="controls"
    )
    # Steps without any gap are left out of a logarithmic axis; markers show those that stand alone.
    gaps.plot(relative_gaps(fused.losses, stock.losses), color=FUSED, marker=".", markersize=4, linewidth=1)
    if whole := result.verdict.worst("loss"):
        gaps.axhline(max(whole.value, bottom), color=FUSED, linewidth=1, linestyle=":", label="over all steps")
        gaps.axhline(whole.bound, color=LIMIT, linewidth=1, linestyle="--", label="its limit")
        gaps.set_ylim(bottom, 30 * max(whole.bound, whole.value, *band))  # with room for the legend
    gaps.set_ylabel("gap, relative")
    gaps.set_xlabel("step")
    for axes in (losses, gaps):
        axes.locator_params(axis="x", integer=True)
        axes.legend(frameon=False, fontsize="x-small", ncols=3)

    verdict = result.verdict
    measures = [measure for measure in MEASURES if verdict.worst(measure.name)]
    places = {measure.name: place for place, measure in enumerate(measures)}
    shares = [min(max(check.share, _LEAST), _MOST) for check in verdict.checks]
    colours = [FUSED if check.ok else LIMIT for check in verdict.checks]
    rows = [places[check.measure] for check in verdict.checks]
    checks.scatter(shares, rows, s=7, c=colours, alpha=0.5, linewidths=0)
    checks.axvline(1, color=LIMIT, linewidth=1, linestyle="--")
    checks.set_xscale("log")
    checks.set_xlim(_LEAST / 2, 2 * max(1.5, *shares, 0))
    checks.set_yticks(range(len(measures)), [measure.head for measure in measures])
    checks.invert_yaxis()
    checks.set_xlabel("share of its own limit")
    for axes in figure.axes:
        axes.set_axis_on()
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
