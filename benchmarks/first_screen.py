"""The picture at the top of the README: two curves of losses, and time and memory of the README's steps as bars.

``fused-norm demo qwen3 --steps 60 --out build/demo`` makes the losses, and ``python -m benchmarks.first_screen
build/demo`` draws them into ``docs/first_screen.svg``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fused_norm.convergence.curve_charts import as_svg

from .pages import ROOT, first_table, stored_run

COLOURS = {
    "stock": "#8b949e",
    "ours": "#e07b1a",
    "ours, graphs": "#c0392b",
    "Liger": "#3a9a5b",
    "compiled": "#3b7dd8",
}
"""The columns of the README's table. All of them stand out on light and on dark paper."""

DRAWN = {
    "SFT, full, 4x4096": "SFT, full",
    "SFT, LoRA, 4x4096": "SFT, LoRA",
    "SFT, LoRA, 1x512": "512 tokens",
    "DPO, LoRA, 2x512": "DPO, LoRA",
}
"""Rows of the table, by what the picture calls them."""

_LIGHT, _DARK = "#6e7781", "#8b949e"
_DARK_STYLE = f"<style>@media (prefers-color-scheme: dark) {{ svg {{ --ink: {_DARK} }} }}</style>"


def cells_of(table: str) -> dict[tuple[str, str], str]:
    """The cells of a Markdown table, by the names of the row and of the column.

    A column ``GiB`` is named after the one before it: that of the times of ``stock ms`` is ``stock GiB``.
    """
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    head, _, *rest = rows
    before = [head[0], *(left.removesuffix("ms") for left, _ in pairwise(head))]
    names = [f"{left}GiB" if name == "GiB" else name for left, name in zip(before, head, strict=True)]
    return {(row[0], name): cell for row in rest for name, cell in zip(names[1:], row[1:], strict=True)}


def draw(losses: Mapping[str, Sequence[float]], cells: Mapping[tuple[str, str], str]) -> str:
    """The picture as SVG, for light and dark pages: ``losses`` of stock and fused, ``cells`` of the table of steps."""
    return for_light_and_dark(partial(_figure, losses, cells), "first screen")


def for_light_and_dark(make: Callable[[], Figure], name: str) -> str:
    """A figure as SVG whose ink is that of light or dark pages; ``name`` tells its ids from those of others."""
    svg = as_svg(make, name, size=10, ink=_LIGHT)
    svg = svg.replace(_LIGHT, f"var(--ink, {_LIGHT})")
    return svg.replace("<defs>", f"{_DARK_STYLE}\n <defs>", 1)


def _figure(losses: Mapping[str, Sequence[float]], cells: Mapping[tuple[str, str], str]) -> Figure:
    # No pyplot: it would open a window system and keep the figure.
    # Two rows, so that its text is still read on the screen of a phone.
    figure = Figure(figsize=(4.8, 6.0), layout="constrained")
    panels = figure.subplot_mosaic([["curves"] * 2, ["time", "memory"]], height_ratios=[2, 6])
    curves, time, memory = (panels[name] for name in ("curves", "time", "memory"))
    curves.plot(losses["stock"], color=COLOURS["stock"], linewidth=4, alpha=0.6, label="stock")
    curves.plot(losses["fused"], color=COLOURS["ours"], linewidth=1.1, label="ours")
    curves.set_title("loss of a tiny Qwen3, step by step", fontsize=10)
    curves.legend(frameon=False)
    for axes, unit, title in ((time, "ms", "ms, Qwen3-0.6B"), (memory, "GiB", "GiB at the peak")):
        # A group of bars for each row, a bar for each column that has a number, labelled with the cell's text.
        for place, name in enumerate(COLOURS):
            texts = [cells.get((row, f"{name} {unit}"), "").strip("*") for row in DRAWN]
            places = [row + 0.17 * (place - 2) for row, text in enumerate(texts) if text]
            labels = [text for text in texts if text]
            bars = axes.barh(places, list(map(float, labels)), height=0.16, color=COLOURS[name], label=name)
            axes.bar_label(bars, labels, fontsize=8.5, padding=2)
        axes.set_yticks(range(len(DRAWN)), list(DRAWN.values()))
        axes.tick_params(length=0)
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.margins(x=0.3)  # for the labels
        axes.invert_yaxis()
        axes.set_title(title, fontsize=10)
    memory.set_yticklabels([])
    narrow: dict[str, Any] = {"columnspacing": 0.8, "handlelength": 1.0, "handletextpad": 0.4, "frameon": False}
    handles, names = time.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower right", ncols=len(COLOURS), **narrow)
    for axes in (curves, time, memory):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main(arguments: Sequence[str]) -> None:
    """Draw the losses of the demo in a folder, and the README's steps, into the documentation."""
    result = json.loads(min(Path(arguments[0]).glob("comparisons/*.json")).read_text(encoding="utf-8"))
    losses = {name: result[name]["losses"] for name in ("stock", "fused")}
    svg = draw(losses, cells_of(first_table(stored_run())))
    (ROOT / "docs" / "first_screen.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
