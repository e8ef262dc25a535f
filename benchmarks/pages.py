"""The tables that pages show of the stored run: ``python -m benchmarks.pages`` writes them into README and docs.

A table stands between two marks in its page, ``<!-- NAME: ... -->`` and ``<!-- end of NAME -->``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from .cards import LIMITS, MOST
from .markdown import in_markdown, page_with
from .model_cases import ModelCase
from .results import Result, Results
from .tables import losses_in_markdown, pivot, speed, steps_in_markdown

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RUN = RESULTS / "h200" / "results.json"
TRAINERS = RESULTS / "h200-trainers" / "results.json"
LONG_RUN = RESULTS / "h200-long" / "results.json"
CARDS = RESULTS / "h200" / "cards.json"
OPERATORS_ON_H100 = RESULTS / "h100" / "operators" / "results.json"

STEPS = {
    "SFT, full, 4x4096": "SFT Qwen3-0.6B 4x4096",
    "SFT, LoRA, 4x4096": "SFT Qwen3-0.6B lora 4x4096",
    "SFT, LoRA, 1x512": "SFT Qwen3-0.6B lora 1x512",
    "DPO, LoRA, 2x512": "DPO Qwen3-0.6B lora 2x512",
    "SFT, QLoRA, Qwen3-8B, 1x4096": "SFT Qwen3-8B qlora checkpointing 1x4096",
    "mixture of experts, full, 2x4096": "Qwen3-30B-A3B (6 layers) loss 2x4096",
}
"""The README's names for steps that people run: whole steps of TRL's trainers, and steps of models with their loss."""

NAMES = {
    "stock": "stock",
    "fused": "ours",
    "fused-graphs": "ours, graphs",
    "liger": "Liger",
    "compile-layers": "compiled",
}
"""The names of variants on pages, in the order of their columns."""

EAGER = {variant: name for variant, name in NAMES.items() if variant != "fused-graphs"}
"""Those that are measured in every kind of step."""

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
    """The run that pages show: of models and operators, and of trainers."""
    run = Results.load(RUN)
    return replace(run, rows=[*run.rows, *Results.load(TRAINERS).of("trainers")])


def step_of(run: Results, row: str, variant: str) -> Result | None:
    """The step of a variant, or None if it was not measured."""
    return next((step for step in run.of("models", "trainers") if (step.row, step.by) == (row, variant)), None)


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
    for step in run.of("models", "trainers"):
        rows.setdefault(step.row, []).append(step)
    return steps_in_markdown([replace(step, row=name) for name, row in STEPS.items() for step in rows[row]], NAMES)


def trainers(run: Results) -> str:
    """Every step of a trainer."""
    return steps_in_markdown(run.of("trainers"), NAMES)


def graphs(run: Results) -> str:
    """The steps of trainers that were measured with CUDA graphs."""
    steps = run.of("trainers")
    rows = {step.row for step in steps if step.by == "fused-graphs" and step.seconds}
    names = {variant: NAMES[variant] for variant in ("fused", "fused-graphs", "compile-layers")}
    return steps_in_markdown([step for step in steps if step.row in rows], names)


def steps_of(kind: str) -> Callable[[Results], str]:
    """The table of all steps of models of a kind, as ``kind_of`` calls it."""

    def table(run: Results) -> str:
        return steps_in_markdown([row for row in run.of("models") if kind_of(ModelCase.named(row.row)) == kind], EAGER)

    return table


def kind_of(case: ModelCase) -> str:
    """What is trained, in a step that ends in the loss; else ``layers`` or ``generation``."""
    if case.generates:
        return "generation"
    if "loss" not in case.step:
        return "layers"
    return next((word for word in ("qlora", "lora") if word in case.step), "full")


KINDS = ("full", "lora", "qlora", "layers", "generation")
"""What ``kind_of`` returns."""


def longest_on_cards(recipe: str) -> Callable[[Results], str]:
    """The table of the most tokens in a step of a recipe, by card, and of the speed on the largest."""

    def table(_: Results) -> str:
        levels = json.loads(CARDS.read_text(encoding="utf-8"))["recipes"][recipe]
        lines = [["", *(f"{card} GB" for card in LIMITS), "tokens a second"]]
        for level, cells in levels.items():
            of_card = {cell["card"]: cell for cell in cells}
            tokens = [of_card[card]["tokens"] for card in LIMITS]
            speed = of_card[max(LIMITS)]["tokens"] / of_card[max(LIMITS)]["seconds"]
            lines.append([level, *(f"{most:,}{'+' * (most == MOST)}" for most in tokens), f"{speed:,.0f}"])
        return in_markdown(lines)

    return table


def long_run(_: Results) -> str:
    """The losses at the end of a long training run, its time and its memory, for each of its models."""
    stored = json.loads(LONG_RUN.read_text(encoding="utf-8"))
    runs = {name: run for name, run in stored.items() if isinstance(run, dict) and "losses" in run}

    def distances(run: Any) -> str:
        apart = [abs(one - other) for one, other in zip(run["losses"], stored["stock"]["losses"], strict=True)]
        means = [fmean(apart[start : start + 100]) for start in range(0, len(apart), 100)]
        return f"{min(means):.4f} to {max(means):.4f}" if any(means) else ""

    rows: Mapping[str, Callable[[Any], str]] = {
        "loss, mean of the last 50 steps, nats a byte": lambda run: f"{fmean(run['losses'][-50:]):.4f}",
        "loss of the last batch after the last step": lambda run: f"{run['evaluation_loss']:.4f}",
        "distance from stock in a step, means of 100 steps": distances,
        "ms a step": lambda run: f"{1e3 * run['seconds_per_step']:.1f}",
        "GiB at the peak": lambda run: f"{run['memory_bytes'] / 2**30:.1f}",
    }
    return in_markdown([["", *runs], *([name, *map(cell, runs.values())] for name, cell in rows.items())])


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
        "trainers": trainers,
        "long-run": long_run,
        **{kind: steps_of(kind) for kind in KINDS},
        "losses": losses_in_markdown,
        "options": options,
        "operators": operators,
    },
    "docs/options.md": {"memory": less_memory},
    "docs/short_steps.md": {"graphs": graphs},
    "docs/settings.md": {
        "cards-qlora": longest_on_cards("Qwen3-8B, QLoRA"),
        "cards-lora": longest_on_cards("Qwen3-8B, LoRA"),
        "cards-full": longest_on_cards("Qwen3-1.7B, full"),
    },
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
