"""Charts of the results, each for a light and for a dark page."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from .model_variants import VARIANTS
from .operator_cases import DIRECTIONS, Direction
from .providers import FUSED, PROVIDERS
from .results import KernelResult, Results

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
    "float8-tensorwise": "#bbbbbb",
    "float8-tensorwise-compile-layers": "#ddcc77",
    "float8-tensorwise-fused-compile-layers": "#ccbb44",
    "float8-rowwise": "#777777",
    "float8-rowwise-compile-layers": "#999933",
    "float8-rowwise-fused-compile-layers": "#777711",
}
_GROUPS = {"norm": "RMSNorm", "add": "residual add + RMSNorm"}
_BLOCKS = ("post", "sandwich", "qk", "rope", "rotate", "swiglu", "geglu", "gated", "gate-first")


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw bandwidth over width, bandwidth of blocks, step time and memory, as far as there are results.

    Returns:
        The PNG files written.

    Raises:
        ImportError: matplotlib is not installed.
    """
    charts = {"bandwidth": _bandwidth, "blocks": _blocks, "step-time": _step_time, "memory": _memory}
    written = []
    for theme in _THEMES:
        for name, chart in charts.items():
            figure = chart(results, _THEMES[theme])
            if figure is not None:
                path = folder / f"{name}-{theme}.png"
                figure.savefig(path, dpi=120, facecolor=figure.get_facecolor())
                written.append(path)
    return written


def _bandwidth(results: Results, theme: Mapping[str, str]) -> Any:
    rows = _timed(results, _GROUPS)
    groups = [group for group in _GROUPS if _widths(rows, group)]
    if not groups or results.copy_bandwidth is None:
        return None
    figure, grid = _figure(theme, len(groups), len(DIRECTIONS), (11, 4.2 * len(groups)))
    for line, group in zip(grid, groups, strict=True):
        for axes, direction in zip(line, DIRECTIONS, strict=True):
            _bandwidth_panel(axes, [row for row in rows if row.group == group], direction)
            axes.axhline(results.copy_bandwidth / 1e9, color=theme["ink"], linestyle="--", linewidth=1, label="copy")
            axes.set_title(f"{_GROUPS[group]}, {direction}, {rows[0].dtype}", color=theme["ink"], fontsize=11)
            axes.set_ylim(bottom=0)
        line[0].set_ylabel("GB/s (least bytes / time)")
    for axes in grid[-1]:
        axes.set_xlabel("row length N")
    _legend(figure, grid[0][0], theme)
    return figure


def _timed(results: Results, groups: Collection[str]) -> list[KernelResult]:
    """The timed rows of ``groups``, of the dtype that was measured first."""
    rows = [row for row in results.kernels if row.part == "kernels" and row.timing and row.group in groups]
    return [row for row in rows if row.dtype == rows[0].dtype]


def _bandwidth_panel(axes: Any, rows: Sequence[KernelResult], direction: Direction) -> None:
    widths = _widths(rows, rows[0].group)
    for provider in PROVIDERS:
        points = {}
        for row in rows:
            # One point a width: that of the most bytes, which is nearest to what the memory gives.
            most = widths.get(row.width, {}).get(direction)
            if row.timing and (row.provider, row.direction, row.bytes) == (provider, direction, most):
                points[row.width] = row.bytes / row.timing.median / 1e9
        if points:
            ours = provider == FUSED.name
            axes.plot(
                sorted(points),
                [points[width] for width in sorted(points)],
                color=_COLOURS[provider],
                label=provider,
                marker="o",
                markersize=5 if ours else 3.5,
                linewidth=2.6 if ours else 1.3,
                zorder=3 if ours else 2,
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(widths), [str(width) for width in sorted(widths)], rotation=45, fontsize=8)
    axes.minorticks_off()


def _widths(rows: Sequence[KernelResult], group: str) -> dict[int, dict[Direction, int]]:
    """The most bytes that a case with a backward moves, for each width and direction."""
    most: dict[int, dict[Direction, int]] = {}
    both = {row.case for row in rows if row.direction == "backward"}
    for row in rows:
        if row.group == group and row.case in both:
            here = most.setdefault(row.width, {})
            here[row.direction] = max(here.get(row.direction, 0), row.bytes)
    return most


def _blocks(results: Results, theme: Mapping[str, str]) -> Any:
    """A bar for each provider and block, forward above backward."""
    rows = sorted(_timed(results, _BLOCKS), key=lambda row: _BLOCKS.index(row.group))
    if not rows or results.copy_bandwidth is None:
        return None
    cases = list(dict.fromkeys(row.case for row in rows))
    names = [name for name in PROVIDERS if any(row.provider == name for row in rows)]
    width = 0.8 / len(names)
    figure, grid = _figure(theme, len(DIRECTIONS), 1, (max(7, 1.1 * len(cases)), 8.4))
    for (axes,), direction in zip(grid, DIRECTIONS, strict=True):
        for index, name in enumerate(names):
            heights = {
                cases.index(row.case): row.bytes / row.timing.median / 1e9
                for row in rows
                if row.timing and (row.provider, row.direction) == (name, direction)
            }
            places = [case + (index - (len(names) - 1) / 2) * width for case in heights]
            axes.bar(places, heights.values(), color=_COLOURS[name], width=width, label=name)
        axes.axhline(results.copy_bandwidth / 1e9, color=theme["ink"], linestyle="--", linewidth=1, label="copy")
        axes.set_title(f"{direction}, {rows[0].dtype}", color=theme["ink"], fontsize=11)
        axes.set_ylabel("GB/s (least bytes / time)")
        axes.set_xticks(range(len(cases)), cases, rotation=20, ha="right", fontsize=8)
    _legend(figure, grid[0][0], theme)
    return figure


def _step_time(results: Results, theme: Mapping[str, str]) -> Any:
    values = {(row.row, row.variant): 1e3 * row.timing.median for row in results.steps if row.timing}
    spans = {
        (row.row, row.variant): (1e3 * row.timing.low, 1e3 * row.timing.high) for row in results.steps if row.timing
    }
    return _bars(values, theme, "step, ms", spans)


def _memory(results: Results, theme: Mapping[str, str]) -> Any:
    values = {(row.row, row.variant): row.peak_bytes / 2**30 for row in results.steps if row.peak_bytes}
    return _bars(values, theme, "peak memory, GiB", {})


def _bars(
    values: Mapping[tuple[str, str], float],
    theme: Mapping[str, str],
    label: str,
    spans: Mapping[tuple[str, str], tuple[float, float]],
) -> Any:
    """A panel for each row, since rows differ by an order of magnitude; a bar for each variant."""
    names = list(dict.fromkeys(name for name, _ in values))
    if not names:
        return None
    width = max(4.2, 0.55 * len({variant for _, variant in values}))
    columns = min(int(15 / width), len(names))
    lines = -(-len(names) // columns)
    figure, grid = _figure(theme, lines, columns, (width * columns, 2.9 * lines))
    panels = [axes for line in grid for axes in line]
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    for axes, name in zip(panels, names, strict=False):
        there = [variant for variant in VARIANTS if (name, variant) in values]
        heights = [values[name, variant] for variant in there]
        bars = axes.bar(there, heights, color=[_COLOURS[variant] for variant in there], width=0.7)
        axes.bar_label(bars, fmt="%.1f", color=theme["ink"], fontsize=8, padding=2)
        for position, variant in enumerate(there):
            if (name, variant) in spans:
                axes.vlines(position, *spans[name, variant], color=theme["ink"], linewidth=1)
        axes.set_title(name, color=theme["ink"], fontsize=11)
        axes.set_xticks(range(len(there)), there, rotation=30, ha="right", fontsize=8)
        axes.margins(y=0.15)
    for line in grid:
        line[0].set_ylabel(label)
    return figure


def _figure(theme: Mapping[str, str], lines: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure in the colours of a theme, and its panels, [lines][columns]."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # No pyplot: it would open a window system and keep the figure.
    figure = Figure(figsize=size, layout="constrained", facecolor=theme["page"])
    FigureCanvasAgg(figure)
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_facecolor(theme["page"])
        axes.grid(color=theme["grid"], linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(colors=theme["ink"])
        axes.xaxis.label.set_color(theme["ink"])
        axes.yaxis.label.set_color(theme["ink"])
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(theme["grid"])
    return figure, grid


def _legend(figure: Any, axes: Any, theme: Mapping[str, str]) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=len(labels),
        frameon=False,
        labelcolor=theme["ink"],
    )
