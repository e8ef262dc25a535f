"""A long training run, stock and fused, beside a stock run whose weights began a millionth larger, as a picture.

``python -m benchmarks.long_run train FOLDER`` trains a Qwen3 of 85 million parameters on the source of Python's
standard library, byte by byte, under bf16 autocast, and writes ``results.json``; ``python -m benchmarks.long_run draw``
draws the stored run into ``docs/long_run.svg``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from .first_screen import COLOURS, for_light_and_dark
from .pages import LONG_RUN, ROOT

SIZES = {
    "vocab_size": 256,  # bytes
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "pad_token_id": None,
}
"""Of the Qwen3 that is trained."""

LENGTH, BATCH, STEPS = 1024, 16, 800

LARGER = 1 + 1e-6
"""What the weights of the third run are multiplied by."""

RUNS = ("stock", "ours", "stock, weights larger by 1e-6")
"""The models that are trained, by the names of pages."""

_STOCK, _OURS, _OTHER = RUNS

_AVERAGED = 25
"""Steps over which the picture averages gaps."""


def train(
    sizes: Mapping[str, Any] = SIZES, length: int = LENGTH, batch: int = BATCH, steps: int = STEPS
) -> dict[str, Any]:
    """Train all runs on the same sequences, on the GPU if there is one; their results by the names of runs."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from fused_norm.convergence.text_sequences import pack, read_files, standard_library, training_order
    from fused_norm.convergence.tiers import TrainingOptions
    from fused_norm.convergence.training import accelerator_for
    from fused_norm.convergence.training import train as train_model
    from fused_norm.patcher import apply_fused_norm

    options = TrainingOptions(steps, batch, learning_rate=6e-4, warmup_steps=min(50, steps), length=length)
    text = pack(read_files(standard_library()), length=length, limit=batch * steps)
    sequences = training_order(text, count=batch * steps, seed=0)
    results: dict[str, Any] = {}
    for name in RUNS:
        accelerator = accelerator_for(mixed=True)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes), dtype=torch.float32)
        model.to(accelerator.device)
        if name == _OURS:
            results["report"] = apply_fused_norm(model).summary()
        elif name == _OTHER:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(LARGER)
        results["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        results[name] = asdict(train_model(model, sequences, options, accelerator=accelerator))
        sys.stderr.write(f"{name}: {results[name]['losses'][-1]:.4f} after {steps} steps\n")
    return results


def draw(results: Mapping[str, Any]) -> str:
    """The picture as SVG, for light and dark pages."""
    return for_light_and_dark(partial(_figure, results), "long run")


def _gaps(results: Mapping[str, Any], name: str) -> list[float]:
    """How far the losses of a run are from those of stock, averaged over the steps before each, in nats a byte."""
    pairs = zip(results[name]["losses"], results[_STOCK]["losses"], strict=True)
    apart = [abs(one - other) for one, other in pairs]
    return [fmean(apart[max(0, end - _AVERAGED) : end]) for end in range(1, len(apart) + 1)]


def _figure(results: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(4.8, 4.8), layout="constrained")
    curves, apart = figure.subplots(2, sharex=True)
    styles: dict[str, dict[str, Any]] = {
        _STOCK: {"color": COLOURS["stock"], "linewidth": 4.0, "alpha": 0.6},
        _OURS: {"color": COLOURS["ours"], "linewidth": 1.0},
        _OTHER: {"color": COLOURS["compiled"], "linewidth": 1.0},
    }
    for name, style in styles.items():
        curves.plot(results[name]["losses"], label=name, **style)
    curves.set_yscale("log")
    curves.set_yticks([1, 2, 4], ["1", "2", "4"])
    curves.minorticks_off()
    curves.set_title("loss, nats a byte", fontsize=10)
    curves.legend(frameon=False)
    for name in (_OURS, _OTHER):
        apart.plot(_gaps(results, name), **styles[name])
    apart.set_yscale("log")
    apart.set_title(f"distance from stock, mean of {_AVERAGED} steps", fontsize=10)
    apart.set_xlabel("step")
    for axes in (curves, apart):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main(arguments: Sequence[str]) -> None:
    """Train into a folder, or draw the stored run."""
    if arguments[:1] == ["draw"]:
        svg = draw(json.loads(LONG_RUN.read_text(encoding="utf-8")))
        (ROOT / "docs" / "long_run.svg").write_text(svg, encoding="utf-8")
        return
    from fused_norm.cli.env_command import environment

    _, folder = arguments
    results = train() | {"environment": environment() | {"date": time.strftime("%Y-%m-%d", time.gmtime())}}
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / "results.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
