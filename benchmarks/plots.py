"""Charts of the bandwidth of operators: over the length of a row, and as bars for whole blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .operator_cases import DIRECTIONS
from .providers import FUSED
from .results import Result, Results

_INK, _GRID = "#24292f", "#d0d7de"
# Tol's bright palette, which the colour-blind can tell apart too.
_COLOURS: Mapping[str, str] = {
    "fused": "#ee6677", "stock": "#999999", "torch": "#4477aa", "compile": "#ccbb44", "liger": "#228833",
    "quack": "#aa3377",
}  # fmt: skip
_OTHER = "#bbbbbb"
_OVER_WIDTHS = ("rms_norm", "add_rms_norm")
"""The operators that are drawn over the length of a row; the others are drawn as bars."""


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw bandwidth over width, and bandwidth of blocks, as far as there are results.

    Returns:
        The PNG files written.

    Raises:
        ImportError: matplotlib is not installed.
    """
    kernels = [row for row in results.of("kernels") if row.bandwidth]
    kernels = [row for row in kernels if row.dtype == kernels[0].dtype]
    both = {row.row for row in kernels if row.kind == "backward"}
    over_widths = [row for row in kernels if row.row in both and _operator(row) in _OVER_WIDTHS]
    blocks = [row for row in kernels if row.row in both and _operator(row) not in _OVER_WIDTHS]
    written = []
    for name, figure in (("bandwidth", _lines(over_widths, results.copy_bandwidth)), ("blocks", _bars(blocks))):
        if figure is not None:
            written.append(folder / f"{name}.png")
            figure.savefig(written[-1], dpi=120)
    return written


def _operator(row: Result) -> str:
    return row.row.partition(" ")[0]


def _lines(rows: Sequence[Result], copy: float | None) -> Any:
    """Bandwidth over the length of a row: a line of panels for each operator, and a panel for each direction."""
    operators = list(dict.fromkeys(map(_operator, rows)))
    if not operators or copy is None:
        return None
    figure, grid = _figure(len(operators), len(DIRECTIONS), (11, 4.2 * len(operators)))
    for line, operator in zip(grid, operators, strict=True):
        for axes, direction in zip(line, DIRECTIONS, strict=True):
            chosen = [row for row in rows if _operator(row) == operator and row.kind == direction]
            for name in dict.fromkeys(row.by for row in chosen):
                # One point a width: that of the most bytes, which is nearest to what the memory gives.
                points: dict[int, float] = {}
                for row in sorted((row for row in chosen if row.by == name), key=lambda row: row.bytes or 0):
                    points[int(row.row.split()[1].rpartition("x")[2])] = (row.bandwidth or 0) / 1e9
                widths, values = zip(*sorted(points.items()), strict=True)
                color, thick = _COLOURS.get(name, _OTHER), 2.6 if name == FUSED.name else 1.5
                axes.plot(widths, values, color=color, label=name, marker="o", linewidth=thick)
            axes.set_xscale("log", base=2)
            axes.axhline(copy / 1e9, color=_INK, linestyle="--", linewidth=1, label="copy")
            axes.set_title(f"{operator}, {direction}, {rows[0].dtype}", fontsize=11)
            axes.set_ylim(bottom=0)
            axes.set_xlabel("row length N")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


def _bars(rows: Sequence[Result]) -> Any:
    """A panel for each row and direction, since rows differ by an order of magnitude; a bar for each provider."""
    panels = list(dict.fromkeys((row.row, row.kind) for row in rows))
    if not panels:
        return None
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, grid = _figure(lines, columns, (4.2 * columns, 2.9 * lines))
    every = [axes for line in grid for axes in line]
    for axes in every[len(panels) :]:
        axes.set_visible(False)
    for axes, panel in zip(every, panels, strict=False):
        there = {row.by: (row.bandwidth or 0) / 1e9 for row in rows if (row.row, row.kind) == panel}
        bars = axes.bar(list(there), list(there.values()), color=[_COLOURS.get(name, _OTHER) for name in there])
        axes.bar_label(bars, fmt="%.0f", fontsize=8, padding=2)
        axes.set_title(" ".join(panel), fontsize=11)
        axes.tick_params(axis="x", rotation=30, labelsize=8)
        axes.margins(y=0.15)
    return figure


def _figure(lines: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure and its panels, [lines][columns]."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # No pyplot: it would open a window system and keep the figure.
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes in grid.flat:
        axes.grid(color=_GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    for line in grid:
        line[0].set_ylabel("GB/s (least bytes / time)")
    return figure, grid
