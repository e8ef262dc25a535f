"""Charts of comparisons: losses laid over each other, their gaps with the noise band, and all checks with the bound."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from .result_store import ComparisonResult
from .verdict import BY_NAME, MULTIPLE, BoundCheck, loss_band, relative_gaps

STOCK, FUSED, NOISE, BOUND = "#3b7dd8", "#e07b1a", "#8b949e", "#d64545"
_TEXT = "#808a94"
"""All colours stand out on light and on dark paper."""

_COLUMNS = 4
_LEAST = 1e-10
"""Distances below this are drawn at this."""


def draw_curves(results: Sequence[ComparisonResult], path: Path) -> bool:
    """Draw every comparison that trained into a PNG file.

    Returns:
        Whether there was one to draw.
    """
    shown = [result for result in results if has_curves(result)]
    if not shown:
        return False
    columns = min(_COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    # No pyplot: it would open a window system and keep the figure.
    figure = Figure(figsize=(1 + 4 * columns, 4.2 * rows), layout="constrained")
    axes = figure.subplots(2 * rows, columns, squeeze=False, gridspec_kw={"height_ratios": [2, 1] * rows})
    for axis in axes.flat:
        axis.set_axis_off()
    for index, result in enumerate(shown):
        row, column = divmod(index, columns)
        losses, gaps = axes[2 * row : 2 * row + 2, column]
        losses.set_title(f"{result.comparison.name}\n{result.verdict.status}", fontsize="small")
        _draw_run(losses, gaps, result)
    figure.savefig(path, dpi=110)
    return True


def has_curves(result: ComparisonResult) -> bool:
    """Return whether stock, control and fused runs were made."""
    return bool(result.stock and result.fused and result.controls)


def curves_svg(result: ComparisonResult) -> str:
    """The three charts of a comparison as one ``svg`` element, without a background."""
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": result.comparison.name}
    style |= {"font.size": 8, "font.sans-serif": ["DejaVu Sans"]}  # a longer list would stand at every word
    style |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _TEXT)
    with rc_context(style):
        figure = Figure(figsize=(3.4, 5.6), layout="constrained")
        losses, gaps, checks = figure.subplots(3, gridspec_kw={"height_ratios": [3, 2, 3]})
        _draw_run(losses, gaps, result)
        _draw_checks(checks, result.verdict.checks)
        text = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    return text.getvalue()[text.getvalue().index("<svg") :]


def _draw_run(losses: Any, gaps: Any, result: ComparisonResult) -> None:
    stock, fused = result.stock, result.fused
    assert stock
    assert fused
    losses.plot(stock.losses, color=STOCK, linewidth=4, alpha=0.4, label="stock")
    losses.plot(fused.losses, color=FUSED, linewidth=1.2, label="fused")
    losses.set_ylabel("loss (nats per token)")

    band = loss_band(stock, result.controls)
    gaps.set_yscale("log", nonpositive="mask")
    bottom = min(filter(None, band), default=1e-9) / 10
    gaps.fill_between(range(len(band)), [max(noise, bottom) for noise in band], bottom, color=NOISE, alpha=0.25)
    gaps.plot(band, color=NOISE, linewidth=1, label="worst control")
    # Steps without any gap are left out of a logarithmic axis; markers show those that stand alone.
    gaps.plot(
        relative_gaps(fused.losses, stock.losses), color=FUSED, marker=".", markersize=4, linewidth=1, label="fused"
    )
    gaps.set_ylabel("relative gap")
    gaps.set_xlabel("step")
    for axis in (losses, gaps):
        axis.locator_params(axis="x", integer=True)
        _finish(axis)


def _draw_checks(axis: Any, checks: Sequence[BoundCheck]) -> None:
    shown = [check for check in checks if check.value and BY_NAME[check.measure].bar is None]
    for ok, color, label in ((True, FUSED, "a check"), (False, BOUND, "over its bound")):
        points = [(max(check.noise, _LEAST), max(check.value, _LEAST)) for check in shown if check.ok is ok]
        if points:
            axis.scatter(*zip(*points, strict=True), s=6, color=color, alpha=0.65, linewidths=0, label=label)
    axis.set_xscale("log")
    axis.set_yscale("log")
    ends = axis.get_xlim()
    axis.plot(ends, [MULTIPLE * end for end in ends], color=BOUND, linewidth=1, linestyle="--", label="bound")
    axis.set_xlabel("noise")
    axis.set_ylabel("distance, fused")
    _finish(axis)


def _finish(axis: Any) -> None:
    axis.set_axis_on()
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize="x-small")
