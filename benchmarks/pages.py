"""The tables that pages show of the stored run: ``python -m benchmarks.pages`` writes them into README and docs.

A table stands between two marks in its page, ``<!-- NAME: ... -->`` and ``<!-- end of NAME -->``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from .markdown import in_markdown, page_with
from .model_cases import ModelCase
from .results import Result, Results
from .tables import losses_in_markdown, pivot, speed, steps_in_markdown

ROOT = Path(__file__).parents[1]
RUN = ROOT / "benchmarks" / "results" / "h200" / "results.json"
OPERATORS_ON_H100 = ROOT / "benchmarks" / "results" / "h100" / "operators" / "results.json"

STEPS = {
    "full fine-tuning, Qwen3-0.6B": "Qwen3-0.6B loss 4x4096",
    "LoRA, Qwen3-0.6B": "Qwen3-0.6B lora loss 4x4096",
    "LoRA, half of the labels masked, Qwen3-0.6B": "Qwen3-0.6B lora loss masked 4x4096",
    "LoRA, checkpointing, Qwen3-0.6B": "Qwen3-0.6B lora checkpointing loss 4x4096",
    "QLoRA, checkpointing, Qwen3-0.6B": "Qwen3-0.6B qlora checkpointing loss 4x4096",
    "QLoRA, checkpointing, Qwen3-8B, 1x4096": "Qwen3-8B qlora checkpointing loss 1x4096",
    "the same, adapters on q and v alone": "Qwen3-8B qlora qv checkpointing loss 1x4096",
    "full, mixture of experts, Qwen3-30B-A3B, 6 layers, 2x4096": "Qwen3-30B-A3B (6 layers) loss 2x4096",
}
"""The README's names for rows of the run, in its order: the steps that people run, which end in the loss."""

VARIANTS = {"stock": "stock", "Liger": "liger", "compiled": "compile-layers", "ours": "fused"}
"""The README's names for variants."""

LEVELS = {
    "`recompute=False`": ("fused", ""),
    "`recompute=True`": ("fused-recompute", ""),
    '`recompute="mlp"`': ("fused-recompute-mlp", ""),
    '`recompute="attention"`': ("fused-recompute-attention", ""),
    "fused, checkpointing": ("fused", "checkpointing "),
    "compiled": ("compile-layers", ""),
    "compiled, budget 0.7": ("compile-layers-budget-0.7", ""),
    "compiled, budget 0.4": ("compile-layers-budget-0.4", ""),
    "compiled, budget 0.1": ("compile-layers-budget-0.1", ""),
    "compiled, checkpointing": ("compile-layers", "checkpointing "),
    "stock": ("stock", ""),
    "stock, checkpointing": ("stock", "checkpointing "),
}
"""Ways to take less memory: the variant, and the word in the name of its step."""

LEVELS_OF = {
    "Qwen3-0.6B": "Qwen3-0.6B {}4x4096",
    "Qwen3-0.6B, LoRA": "Qwen3-0.6B lora {}4x4096",
    "Qwen3-0.6B, autocast": "Qwen3-0.6B autocast {}4x4096",
    "Llama-3.2-1B": "Llama-3.2-1B {}4x4096",
    "gemma-3-1b-pt": "gemma-3-1b-pt {}4x4096",
}
"""Steps that were measured in these ways, the word left out."""


def stored_run() -> Results:
    """The run that pages show."""
    return Results.load(RUN)


def step_of(run: Results, row: str, variant: str) -> Result | None:
    """The step of a variant, or None if it was not measured."""
    return next((step for step in run.of("models") if (step.row, step.by) == (row, variant)), None)


def milliseconds_and_gibibytes(step: Result | None) -> tuple[str, str]:
    """The time and the peak memory of a step.

    Raises:
        ValueError: it was not measured.
    """
    if step is None or step.seconds is None or step.peak_bytes is None:
        raise ValueError(f"not measured: {step}")
    return f"{1e3 * step.seconds:.1f}", f"{step.peak_bytes / 2**30:.1f}"


def first_table(run: Results) -> str:
    """The steps that people run, and their variants, by names for people."""
    rows: dict[str, list[Result]] = {}
    for step in run.of("models"):
        rows.setdefault(step.row, []).append(step)
    names = {variant: name for name, variant in VARIANTS.items()}
    named = [replace(step, row=name, by=names.get(step.by, "")) for name, row in STEPS.items() for step in rows[row]]
    return steps_in_markdown(replace(run, rows=named), list(VARIANTS)) or ""


def all_steps(run: Results) -> str:
    """Every step, those of ``STEPS`` first, with the variants that were measured in all kinds of step."""
    places = {step: place for place, step in enumerate(STEPS.values())}
    rows = sorted(_steps(run, generate=False), key=lambda row: places.get(row.row, len(places)))
    return steps_in_markdown(replace(run, rows=rows), [*VARIANTS.values(), "fused-stock-loss"]) or ""


def generation(run: Results) -> str:
    """The time of a token, for all sequences of the batch, and the peak of memory of each generation."""
    rows = _steps(run, generate=True)
    return steps_in_markdown(replace(run, rows=rows), list(VARIANTS.values())) or ""


def _steps(run: Results, *, generate: bool) -> list[Result]:
    return [step for step in run.of("models") if ModelCase.named(step.row).generates == generate]


def less_memory(run: Results) -> str:
    """Time and memory of the levels of recompute, and of what there is in their place."""
    lines = [["", *LEVELS_OF]]
    for name, (variant, word) in LEVELS.items():
        steps = [step_of(run, step.format(word), variant) for step in LEVELS_OF.values()]
        lines.append([name, *(", ".join(milliseconds_and_gibibytes(step)) if step else "" for step in steps)])
    return in_markdown(lines)


def options(run: Results) -> str:
    """What each option brings to each step that was measured for it."""
    lines = [["step", "", "ms", "time against everything on, 95 %", "GiB"]]
    for step in run.of("features"):
        if step.ratio and step.ratio.interval:
            time, memory = milliseconds_and_gibibytes(step)
            interval = "" if step.by == "fused" else step.ratio.interval
            lines.append([step.row, step.by, time, interval, memory])
    return in_markdown(lines)


def operators(run: Results) -> str:
    """The share of a copy's bandwidth that operators reach, forward / backward."""
    assert run.copy_bandwidth is not None
    return in_markdown(pivot(run.of("kernels"), speed(run.copy_bandwidth))).replace("*", "")


def operators_on_h100(_: Results) -> str:
    """As ``operators``, of the run on an H100."""
    return operators(Results.load(OPERATORS_ON_H100))


TABLES: Mapping[str, Mapping[str, Callable[[Results], str]]] = {
    "README.md": {"steps": first_table},
    "docs/numbers.md": {
        "steps": all_steps,
        "generation": generation,
        "losses": losses_in_markdown,
        "options": options,
        "operators": operators,
    },
    "docs/options.md": {"memory": less_memory},
    "docs/tuning.md": {"operators-h100": operators_on_h100},
}
"""What makes the tables of each page, by their marks."""


def with_tables(page: str, text: str, run: Results) -> str:
    """The text of a page with the tables of a run in place of those that it has."""
    for mark, table in TABLES[page].items():
        text = page_with(text, mark, table(run))
    return text


def main() -> None:
    """Write all tables into their pages."""
    run = stored_run()
    for page in TABLES:
        path = ROOT / page
        path.write_text(with_tables(page, path.read_text(encoding="utf-8"), run), encoding="utf-8")


if __name__ == "__main__":
    main()
