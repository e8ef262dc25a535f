"""Charts of comparisons: losses laid over each other, their gap with its limit, and every number over its own."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from .verdict import MEASURES, ComparisonResult, relative_gaps

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
