"""The curves as a picture: losses laid over each other, and below them the gaps with the band of the noise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .store import Result
from .verdict import loss_band, relative_gaps

_COLUMNS = 4


def draw(results: Sequence[Result], path: Path) -> None:
    """Draws every comparison that trained, those with planted faults left out, into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [result for result in results if result.case.mutation is None and result.fused and result.controls]
    if not shown:
        return
    rows = -(-len(shown) // _COLUMNS)
    columns = min(_COLUMNS, len(shown))
    # No pyplot: it would open a window system and keep the figure.
    figure = Figure(figsize=(1 + 4 * columns, 4.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    heights = {"height_ratios": [2, 1] * rows}
    axes = figure.subplots(2 * rows, columns, squeeze=False, gridspec_kw=heights)
    for index, result in enumerate(shown):
        row, column = divmod(index, columns)
        _draw_one(axes[2 * row, column], axes[2 * row + 1, column], result)
    for index in range(len(shown), rows * columns):
        row, column = divmod(index, columns)
        axes[2 * row, column].set_axis_off()
        axes[2 * row + 1, column].set_axis_off()
    figure.savefig(path, dpi=110)


def _draw_one(losses: Any, gaps: Any, result: Result) -> None:
    assert result.stock
    assert result.fused
    stock, fused = result.stock.losses, result.fused.losses
    losses.plot(stock, color="tab:blue", linewidth=4, alpha=0.35, label="stock")
    losses.plot(fused, color="tab:orange", linewidth=1.2, label="fused")
    losses.set_title(f"{result.case.name}\n{result.outcome}", fontsize="small")
    losses.set_ylabel("loss (nats per token)")
    band = loss_band(result.stock, result.controls)
    gaps.set_yscale("log", nonpositive="mask")
    gaps.fill_between(range(len(band)), band, min(filter(None, band), default=1e-9) / 10, color="tab:gray", alpha=0.25)
    gaps.plot(band, color="tab:gray", linewidth=1, label="worst control")
    # Steps without any gap are left out of a logarithmic axis; markers show those that stand alone.
    gaps.plot(relative_gaps(fused, stock), color="tab:orange", marker=".", markersize=4, linewidth=1, label="fused")
    gaps.set_ylabel("relative gap")
    gaps.set_xlabel("step")
    gaps.locator_params(axis="x", integer=True)
    losses.locator_params(axis="x", integer=True)
    for axis in (losses, gaps):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize="x-small")
