"""The longest sequences that training steps take on cards of 16 to 80 GB, of which PyTorch gets what a driver leaves.

``python -m benchmarks.cards FOLDER [SECONDS [RECIPE ...]]`` searches them on the GPU that is there, whose memory is
limited for each card, and writes ``cards.json`` after each card. A step is forward, backward and AdamW of a model
with random weights under bf16 autocast; a length fits if two steps in a row do, with graphs four.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fused_norm.patcher import PatchReport, apply_fused_norm, remove_fused_norm

from .benchmark_run import in_a_line
from .model_cases import ModelCase
from .model_steps import BenchmarkedModel, prepare, release_memory

LIMITS: Mapping[int, float] = {16: 15.0, 24: 22.0, 48: 44.0, 80: 78.0}
"""GiB that PyTorch may use of a card of so many GB: an L4 has 22.5 of 24, an L40S 45 of 48, an H100 79.6 of 80."""

CONTEXT, PART = 8192, 1024
"""The longest single sequence, and the length of those that longer batches have: memory goes by tokens alone, as flash
attention holds no scores."""

MOST = 65536
"""Tokens beyond which nothing is tried."""

_FIRST, _SECOND = 1024, 4096
"""Lengths whose peaks give the line on which the search begins."""

_FILLED = 0.96
"""The share of the memory that the search expects to be allocated at best; the rest lies between blocks."""

EXACT = 0.03
"""The search ends if what fits and what does not are this close, as a share."""

LEAST = 128
"""The fewest tokens that are tried."""

LEVELS: Mapping[str, Mapping[str, Any] | None] = {
    "stock, gradient checkpointing": None,
    "ours, gradient checkpointing": {},
    'ours, `recompute="attention"`': {"recompute": "attention"},
    'ours, `recompute="mlp"`': {"recompute": "mlp"},
    "ours, `recompute=True`": {"recompute": True},
    "ours": {},
    'ours, graphs, `recompute="attention"`': {"recompute": "attention", "cuda_graphs": True},
    "ours, graphs": {"cuda_graphs": True},
}
"""Options of ``apply_fused_norm`` by the names of pages, from little memory to much; None is not patched."""

_OF_ADAPTERS = tuple(level for level in LEVELS if level != "ours, `recompute=True`")

RECIPES: Mapping[str, tuple[str, Sequence[str]]] = {
    "Qwen3-8B, QLoRA": ("Qwen3-8B qlora", _OF_ADAPTERS),
    "Mistral-7B, QLoRA": ("Mistral-7B-v0.3 qlora", _OF_ADAPTERS),
    "Qwen3-8B, LoRA": ("Qwen3-8B lora", _OF_ADAPTERS),
    "Qwen3-1.7B, full": ("Qwen3-1.7B", tuple(LEVELS)),
}
"""The model and the words of a step, and the levels that are searched for it."""


def shape_of(tokens: int) -> tuple[int, int]:
    """The batch and the length of so many tokens."""
    return (1, tokens) if tokens <= CONTEXT else (tokens // PART, PART)


def grain(tokens: int) -> int:
    """The number that lengths near ``tokens`` are multiples of."""
    return PART if tokens > CONTEXT else LEAST


def longest(fits: Callable[[int], bool], guess: float) -> int:
    """The most tokens that fit, to ``EXACT`` of them, by a search that begins near ``guess``; 0 if none do.

    ``fits``: tells whether so many tokens do; it is not asked about more than ``MOST``.
    """

    def rounded(tokens: float) -> int:
        tokens = min(max(int(tokens), LEAST), MOST)
        return tokens // grain(tokens) * grain(tokens)

    good, bad, place, stride = 0, 0, rounded(guess), EXACT
    while True:
        if fits(place):
            good = place
        else:
            bad = place
        if good == MOST or bad == LEAST or (good and bad and bad - good <= max(grain(good), EXACT * good)):
            return good
        if good and bad:
            place = rounded((good + bad) / 2)
        else:  # Farther and farther from the guess, which is near.
            place = rounded(good + max(grain(good + 1), good * stride) if good else bad - max(grain(bad), bad * stride))
            stride *= 2
        if place in (good, bad):
            return good


@dataclass
class _Trained:
    """A model whose steps are tried, patched anew for each length.

    Attributes:
        step: the model and what it is called with.
        options: of ``apply_fused_norm``; None leaves the model as it is.
        optimizer: AdamW over its trained parameters.
        replayed: the replays of one step, forward and backward.
    """

    step: BenchmarkedModel
    options: Mapping[str, Any] | None
    optimizer: torch.optim.Optimizer
    replayed: int = 0

    def peak_and_seconds(self, tokens: int) -> tuple[int, float]:
        """Run steps of so many tokens; the peak of allocated bytes, and the time of the last.

        Raises:
            torch.OutOfMemoryError: they do not fit.
        """
        release_memory(self.step.tokens.device)
        model = self.step.model
        config: Any = model.config
        ids = torch.randint(1, config.vocab_size, shape_of(tokens), device=self.step.tokens.device)
        step = replace(self.step, tokens=ids, inputs={"labels": ids})
        report = None if self.options is None else apply_fused_norm(model, **self.options)
        graphs = bool(self.options and self.options.get("cuda_graphs"))
        try:
            torch.cuda.reset_peak_memory_stats()
            began, before = 0.0, 0
            for _ in range(4 if graphs else 2):
                began, before = time.perf_counter(), _replays(report)
                step.forward_backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                torch.cuda.synchronize()
            self.replayed = _replays(report) - before
            return torch.cuda.max_memory_allocated(), time.perf_counter() - began
        finally:
            self.optimizer.zero_grad()
            if report is not None:
                remove_fused_norm(model)


def _replays(report: PatchReport | None) -> int:
    """The forwards and backwards that were replayed so far."""
    replays = report and report.replays
    return replays.forwards + replays.backwards if replays else 0


def search(step: BenchmarkedModel, level: str) -> Iterator[dict[str, Any]]:
    """What fits into each card, with the seconds of a step, its peak in GiB, and how many lengths that fit were tried.

    With graphs, what leaves a layer without its replay does not fit.
    """
    model = step.model
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if level.endswith("gradient checkpointing"):
        base.gradient_checkpointing_enable({"use_reentrant": False})
    trained = _Trained(step, LEVELS[level], torch.optim.AdamW(step.trained, fused=True))
    whole = torch.cuda.get_device_properties(0).total_memory
    try:
        points = [(tokens, trained.peak_and_seconds(tokens)[0]) for tokens in (_FIRST, _SECOND)]
        replayed = trained.replayed
        for card, limit in LIMITS.items():
            found: dict[int, tuple[int, float]] = {}

            def fits(tokens: int, found: dict[int, tuple[int, float]] = found) -> bool:
                try:
                    found[tokens] = trained.peak_and_seconds(tokens)
                except torch.OutOfMemoryError:
                    return False
                return trained.replayed == replayed

            torch.cuda.set_per_process_memory_fraction(limit * 2**30 / whole)
            (few, low), (many, high) = points[-2:]
            tokens = longest(fits, many + (_FILLED * limit * 2**30 - high) * (many - few) / max(high - low, 1))
            peak, seconds = found[tokens] if tokens else (0, 0.0)
            if tokens > many:
                points.append((tokens, peak))
            yield {
                "card": card,
                "tokens": tokens,
                "seconds": round(seconds, 4),
                "peak": round(peak / 2**30, 2),
                "tried": len(found),
            }
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        base.gradient_checkpointing_disable()


def main(arguments: Sequence[str]) -> None:
    """Search all recipes, or those that are named, into a folder; after so many seconds nothing new is begun."""
    from fused_norm.cli.env_command import environment

    folder, seconds, *recipes = (*arguments, "inf") if len(arguments) == 1 else arguments
    end, device = time.perf_counter() + float(seconds), torch.device("cuda")
    facts = environment() | {"date": time.strftime("%Y-%m-%d", time.gmtime())}
    stored: dict[str, Any] = {"environment": facts, "GiB of cards": LIMITS, "recipes": {}}
    Path(folder).mkdir(parents=True, exist_ok=True)
    for recipe, (name, levels) in RECIPES.items():
        if (recipes and recipe not in recipes) or time.perf_counter() > end:
            continue
        step = prepare(ModelCase.named(f"{name} loss 1x{_FIRST}"), torch.bfloat16, device, in_fp32=False)
        for parameter in step.trained if "qlora" in name else ():
            parameter.data = parameter.data.to(torch.bfloat16)  # as TRL has it
        for level in levels:
            if time.perf_counter() > end:
                break
            cells = stored["recipes"].setdefault(recipe, {})[level] = []
            try:
                for cell in search(step, level):
                    cells.append(cell)
                    sys.stderr.write(f"{recipe}; {level}: {cell}\n")
                    (Path(folder) / "cards.json").write_text(json.dumps(stored, indent=1), encoding="utf-8")
            except Exception as failure:
                sys.stderr.write(f"{recipe}; {level}: {in_a_line(failure)}\n")
        del step
        release_memory(device)


if __name__ == "__main__":
    main(sys.argv[1:])
