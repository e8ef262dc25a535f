"""Charts of the results, each for a light and for a dark page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .operator_cases import DIRECTIONS
from .providers import FUSED
from .results import Result, Results

_THEMES: Mapping[str, Mapping[str, str]] = {
    "light": {"page": "#ffffff", "ink": "#24292f", "grid": "#d0d7de"},
    "dark": {"page": "#0d1117", "ink": "#e6edf3", "grid": "#30363d"},
}
# Tol's bright palette: told apart by the colour-blind too, and readable on both pages. What belongs together is a
# lighter or darker shade of one colour.
_COLOURS = {
    "fused": "#ee6677",
    "fused-recompute": "#f5a3ad",
    "fused-compile-layers": "#c9505f",
    "fused-compile": "#a84853",
    "stock": "#999999",
    "torch": "#4477aa",
    "compile": "#ccbb44",
    "compile-layers": "#e0d68a",
    "compile-layers-max": "#a39536",
    "liger": "#228833",
    "liger-norms": "#7ab885",
    "liger-fused": "#b5d9bc",
    "quack": "#aa3377",
    "identity": "#66ccee",
    "identity-no-rope": "#b3e5f6",
}
_OTHER = "#bbbbbb"
_OVER_WIDTHS = ("rms_norm", "add_rms_norm")
"""The operators that are drawn over the length of a row; the others are drawn as bars."""


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw bandwidth over width, bandwidth of blocks, step time and memory, as far as there are results.

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
    speeds = [(row, (row.bandwidth or 0) / 1e9) for row in blocks]
    steps = results.of("models", "features")
    copy = results.copy_bandwidth
    written = []
    for theme, colours in _THEMES.items():
        for name, figure in (
            ("bandwidth", _lines(over_widths, colours, copy)),
            (
                "blocks",
                _bars(speeds, colours, "GB/s (least bytes / time)"),
            ),
            ("step-time", _bars([(row, 1e3 * row.seconds) for row in steps if row.seconds], colours, "step, ms")),
            ("memory", _bars([(row, row.peak_bytes / 2**30) for row in steps if row.peak_bytes], colours, "peak, GiB")),
        ):
            if figure is not None:
                path = folder / f"{name}-{theme}.png"
                figure.savefig(path, dpi=120, facecolor=figure.get_facecolor())
                written.append(path)
    return written


def _operator(row: Result) -> str:
    return row.row.partition(" ")[0]


def _lines(rows: Sequence[Result], colours: Mapping[str, str], copy: float | None) -> Any:
    """Bandwidth over the length of a row: a line of panels for each operator, and a panel for each direction."""
    operators = list(dict.fromkeys(map(_operator, rows)))
    if not operators or copy is None:
        return None
    figure, grid = _figure(colours, len(operators), len(DIRECTIONS), (11, 4.2 * len(operators)))
    for line, operator in zip(grid, operators, strict=True):
        for axes, direction in zip(line, DIRECTIONS, strict=True):
            chosen = [row for row in rows if _operator(row) == operator and row.kind == direction]
            for name in dict.fromkeys(row.by for row in chosen):
                # One point a width: that of the most bytes, which is nearest to what the memory gives.
                points: dict[int, Result] = {}
                for row in sorted((row for row in chosen if row.by == name), key=lambda row: row.bytes or 0):
                    points[int(row.row.split()[1].rpartition("x")[2])] = row
                ours = name == FUSED.name
                style: dict[str, Any] = (
                    {"markersize": 5, "linewidth": 2.6, "zorder": 3} if ours else {"markersize": 3.5}
                )
                values = [(points[width].bandwidth or 0) / 1e9 for width in sorted(points)]
                axes.plot(sorted(points), values, color=_COLOURS.get(name, _OTHER), label=name, marker="o", **style)
            axes.set_xscale("log", base=2)
            axes.axhline(copy / 1e9, color=colours["ink"], linestyle="--", linewidth=1, label="copy")
            axes.set_title(f"{operator}, {direction}, {rows[0].dtype}", color=colours["ink"], fontsize=11)
            axes.set_ylim(bottom=0)
            axes.set_xlabel("row length N")
        line[0].set_ylabel("GB/s (least bytes / time)")
    handles, labels = grid[0][0].get_legend_handles_labels()
    where: dict[str, Any] = {"loc": "outside lower center", "ncols": len(labels), "frameon": False}
    figure.legend(handles, labels, labelcolor=colours["ink"], **where)
    return figure


def _bars(values: Sequence[tuple[Result, float]], colours: Mapping[str, str], label: str) -> Any:
    """A panel for each row, since rows differ by an order of magnitude; a bar for each provider or variant."""
    names = list(dict.fromkeys(f"{row.row} {row.kind}".rstrip() for row, _ in values))
    if not names:
        return None
    width = max(4.2, 0.55 * len({row.by for row, _ in values}))
    columns = min(int(15 / width), len(names))
    lines = -(-len(names) // columns)
    figure, grid = _figure(colours, lines, columns, (width * columns, 2.9 * lines))
    panels = [axes for line in grid for axes in line]
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    for axes, name in zip(panels, names, strict=False):
        there = [(row, height) for row, height in values if f"{row.row} {row.kind}".rstrip() == name]
        who = [row.by for row, _ in there]
        bars = axes.bar(
            who, [height for _, height in there], color=[_COLOURS.get(one, _OTHER) for one in who], width=0.7
        )
        axes.bar_label(bars, fmt="%.1f", color=colours["ink"], fontsize=8, padding=2)
        for position, (row, height) in enumerate(there):
            if row.timing and label.startswith("step"):
                spread = height * row.timing.low / row.timing.median, height * row.timing.high / row.timing.median
                axes.vlines(position, *spread, color=colours["ink"], linewidth=1)
        axes.set_title(name, color=colours["ink"], fontsize=11)
        axes.set_xticks(range(len(who)), who, rotation=30, ha="right", fontsize=8)
        axes.margins(y=0.15)
    for line in grid:
        line[0].set_ylabel(label)
    return figure


def _figure(colours: Mapping[str, str], lines: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure in the colours of a theme, and its panels, [lines][columns]."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # No pyplot: it would open a window system and keep the figure.
    figure = Figure(figsize=size, layout="constrained", facecolor=colours["page"])
    FigureCanvasAgg(figure)
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_facecolor(colours["page"])
        axes.grid(color=colours["grid"], linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(colors=colours["ink"])
        axes.xaxis.label.set_color(colours["ink"])
        axes.yaxis.label.set_color(colours["ink"])
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(colours["grid"])
    return figure, grid
