"""The chart of time beside memory: what levels of recompute take, and what PyTorch has in their place.

``python -m benchmarks.time_and_memory`` draws the stored run into ``docs/time_and_memory.svg``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial

from matplotlib.figure import Figure

from .first_screen import COLOURS, ROOT, for_light_and_dark

RUN = ROOT / "benchmarks" / "results" / "h200-recompute" / "time_and_memory.json"

MODELS = ("Qwen3-0.6B", "Llama-3.2-1B", "Qwen3-4B")

LINES: Mapping[str, tuple[str, Sequence[str]]] = {
    "compiled layers: whole, activation_memory_budget 0.7 to 0.1, checkpointing": (
        "compiled",
        ("compiled", *(f"compiled, budget 0.{tenth}" for tenth in (7, 5, 3, 1)), "compiled, checkpointing"),
    ),
    "ours: recompute False, True, mlp, attention, checkpointing": (
        "ours",
        ("fused", "recompute", "mlp", "attention", "fused, checkpointing"),
    ),
}
"""What is joined by a line, from most to least memory: what it is, its colour in ``COLOURS``, and rows of a model."""

Rows = Mapping[str, tuple[float, float]]
"""Milliseconds and GiB, by the names of a model and of what ran."""


def draw(rows: Rows) -> str:
    """The chart as SVG, for light and dark pages."""
    return for_light_and_dark(partial(_figure, rows), "time and memory")


def _figure(rows: Rows) -> Figure:
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(MODELS)), MODELS, strict=True):
        for label, (colour, names) in LINES.items():
            times, memory = zip(*(rows[f"{model} {name}"] for name in names), strict=True)
            axes.plot(memory, times, "o-", color=COLOURS[colour], markersize=4, label=label)
        axes.set_title(model, fontsize=10)
        axes.set_xlabel("GiB at the peak")
        axes.set_xlim(left=0)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("ms")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", frameon=False)
    return figure


def stored_rows() -> Rows:
    """The rows of the stored run."""
    rows: Rows = json.loads(RUN.read_text(encoding="utf-8"))["rows"]
    return rows


if __name__ == "__main__":
    (ROOT / "docs" / "time_and_memory.svg").write_text(draw(stored_rows()), encoding="utf-8")
