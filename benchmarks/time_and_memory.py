"""The chart of time beside memory: what levels of recompute take, and what PyTorch has in their place.

``python -m benchmarks.time_and_memory`` draws the stored run into ``docs/time_and_memory.svg``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from matplotlib.figure import Figure

from .first_screen import COLOURS, for_light_and_dark
from .pages import LEVELS, LEVELS_OF, ROOT, milliseconds_and_gibibytes, step_of, stored_run
from .results import Results

MODELS = ("Qwen3-0.6B", "Llama-3.2-1B")

LINES: Mapping[str, tuple[str, Sequence[str]]] = {
    "compiled layers: whole, activation_memory_budget 0.7, 0.4 and 0.1, checkpointing": (
        "compiled",
        [name for name in LEVELS if name.startswith("compiled")],
    ),
    "ours: recompute False, True, mlp, attention, checkpointing": (
        "ours",
        [name for name, (variant, _) in LEVELS.items() if variant.startswith("fused")],
    ),
}
"""What a line joins, from most to least memory: what it is, its colour in ``COLOURS``, and names in ``LEVELS``."""


def draw(run: Results) -> str:
    """The chart as SVG, for light and dark pages."""
    return for_light_and_dark(partial(_figure, run), "time and memory")


def _figure(run: Results) -> Figure:
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(MODELS)), MODELS, strict=True):
        for label, (colour, names) in LINES.items():
            levels = [LEVELS[name] for name in names]
            steps = [step_of(run, LEVELS_OF[model].format(word), variant) for variant, word in levels]
            times, memory = zip(*(map(float, milliseconds_and_gibibytes(step)) for step in steps), strict=True)
            axes.plot(memory, times, "o-", color=COLOURS[colour], markersize=4, label=label)
        axes.set_title(model, fontsize=10)
        axes.set_xlabel("GiB at the peak")
        axes.set_xlim(left=0)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("ms")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", frameon=False)
    return figure


if __name__ == "__main__":
    (ROOT / "docs" / "time_and_memory.svg").write_text(draw(stored_run()), encoding="utf-8")
