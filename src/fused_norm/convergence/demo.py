"""``fused-norm demo``: trains small models of each family, stock and fused, on real text, and compares the two.

Two correct runs differ by rounding, and training makes such differences grow. How much, a third run measures: a stock
model again, every initial weight off by one rounding. The fused run may leave the stock run by no more than a small
multiple of what that control run does. Losses and gradient norms are both held to it: AdamW hides a gradient that is
wrong by a factor, and its norm does not.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import math
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..model_configs import FAMILIES, build, tiny_config
from ..patcher import apply_fused_norm
from ..spec import Kind

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from .training import TrainingOptions, TrainingResult

BOUND = 8.0
"""How many times the control run's gap the fused run's may be. Of four such control runs, for six families, two dtypes
and five seeds, one had a gap of up to 5.4 times another's. Anything wrong is off by far more."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Scale:
    """Sizes that say something on a device and do not take long there.

    Attributes:
        overrides: config arguments that replace those of the tiny model.
        length: tokens in a sequence.
        batch_size: sequences in a step.
        steps: optimizer steps.
        learning_rate: for AdamW.
        dtype: of weights and computation, a key of ``DTYPES``.
    """

    overrides: Mapping[str, Any]
    length: int
    batch_size: int
    steps: int
    learning_rate: float
    dtype: str


CPU = Scale(overrides={}, length=64, batch_size=2, steps=40, learning_rate=1e-3, dtype="float32")
GPU = Scale(
    overrides={
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
    length=1024,
    batch_size=8,
    steps=100,
    learning_rate=1e-4,
    dtype="bfloat16",
)


@dataclass(frozen=True)
class Gap:
    """How far two runs are from the stock run.

    Attributes:
        fused: the fused run.
        control: the control run.
        rounding: one rounding of the numbers compared, granted in any case.
    """

    fused: float
    control: float
    rounding: float

    @property
    def bound(self) -> float:
        """What ``fused`` may not exceed."""
        return BOUND * self.control + self.rounding


@dataclass(frozen=True)
class Comparison:
    """Three runs of one model on the same batches.

    Attributes:
        model_type: the family.
        parameters: how many numbers are trained.
        dtype: of weights and computation.
        fused_sites: fused sites of each kind.
        stock: the model as transformers has it.
        fused: its twin after ``apply_fused_norm``.
        control: stock again, every initial weight multiplied by ``1 + eps`` or ``1 - eps`` of its dtype.
    """

    model_type: str
    parameters: int
    dtype: torch.dtype
    fused_sites: Mapping[Kind, int]
    stock: TrainingResult
    fused: TrainingResult
    control: TrainingResult

    @property
    def loss(self) -> Gap:
        """The largest gap between losses in the same step, in nats; losses are fp32 whatever the model is."""
        stock = self.stock.losses
        rounding = torch.finfo(torch.float32).eps * max(stock)
        return Gap(max(distances(self.fused.losses, stock)), max(distances(self.control.losses, stock)), rounding)

    @property
    def gradient_norm(self) -> Gap:
        """The median gap between gradient norms in the same step; the largest is that of a spike, a matter of luck."""
        stock = self.stock.gradient_norms
        fused, control = (distances(run.gradient_norms, stock) for run in (self.fused, self.control))
        rounding = torch.finfo(self.dtype).eps * statistics.median(stock)
        return Gap(statistics.median(fused), statistics.median(control), rounding)

    @property
    def failure(self) -> str | None:
        """Why the fused run does not pass, or None."""
        for name, result in (("stock", self.stock), ("fused", self.fused), ("control", self.control)):
            if not all(map(math.isfinite, result.losses + result.gradient_norms)):
                return f"the {name} run has a loss or gradient that is not finite"
        for what, gap in (("loss", self.loss), ("gradient norm", self.gradient_norm)):
            if gap.fused > gap.bound:
                return f"the {what} of the fused run leaves that of the stock run by more than the bound"
        return None


def distances(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """How far apart two runs are in each step."""
    return [abs(a - b) for a, b in zip(one, other, strict=True)]


def compare(
    config: PreTrainedConfig,
    sequences: Tensor,
    options: TrainingOptions,
    *,
    seed: int,
    dtype: torch.dtype,
    on_step: Callable[[int, float], object] | None = None,
) -> Comparison:
    """Trains a model three times on the same batches: stock, fused, and stock from slightly moved weights.

    Args:
        config: of a causal language model that ``apply_fused_norm`` can patch.
        sequences: token ids in training order, (steps * batch_size, length), int64.
        options: how to train.
        seed: of the weights.
        dtype: of weights and computation.
        on_step: called after each step of each run with its index and loss.

    Raises:
        FusedNormError: the model cannot be patched.
        ValueError: there are too few sequences.
    """
    from .training import train

    def run(prepare: Callable[[nn.Module], Any]) -> tuple[TrainingResult, Any]:
        gc.collect()  # The model before would count as memory of this one.
        model = build(config, seed=seed, dtype=dtype)
        prepared = prepare(model)
        return train(model, sequences, options, on_step=on_step), prepared

    stock, parameters = run(lambda model: sum(parameter.numel() for parameter in model.parameters()))
    fused, report = run(apply_fused_norm)
    control, _ = run(lambda model: _move_by_one_rounding(model, seed))
    return Comparison(config.model_type, parameters, dtype, report.counts, stock, fused, control)


@torch.no_grad()
def _move_by_one_rounding(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        up = torch.rand(parameter.shape, generator=generator) < 0.5
        parameter.mul_(1 + torch.finfo(parameter.dtype).eps * (2 * up.to(parameter) - 1))


def describe(comparison: Comparison) -> str:
    """A comparison as a few lines of text."""
    stock, fused = comparison.stock, comparison.fused
    sites = ", ".join(f"{count} {kind}" for kind, count in comparison.fused_sites.items())
    return "\n".join(
        (
            f"{comparison.model_type} ({comparison.parameters:,} parameters), fused: {sites}",
            f"  loss         stock {stock.losses[0]:.4f} -> {stock.losses[-1]:.4f}"
            f"   fused {fused.losses[0]:.4f} -> {fused.losses[-1]:.4f}",
            f"  largest gap  {_in_words(comparison.loss)}",
            f"  grad norms   {_in_words(comparison.gradient_norm)}, median gap",
            f"  step time    stock {stock.seconds_per_step * 1e3:.1f} ms   fused {fused.seconds_per_step * 1e3:.1f} ms",
            f"  memory       stock {stock.memory_bytes / 1e6:.1f} MB   fused {fused.memory_bytes / 1e6:.1f} MB"
            f"   ({fused.memory_measure})",
            f"  {'FAILED: ' + comparison.failure if comparison.failure else 'passed'}",
        )
    )


def _in_words(gap: Gap) -> str:
    return f"{gap.fused:.2e} fused, {gap.control:.2e} control, bound {gap.bound:.2e}"


def plot(comparisons: Sequence[Comparison], path: Path) -> None:
    """Draws the loss curves of each comparison, with the gaps below, into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # No pyplot: it would open a window system and keep the figure.
    figure = Figure(figsize=(1 + 4 * len(comparisons), 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(
        2, len(comparisons), sharex=True, sharey="row", squeeze=False, gridspec_kw={"height_ratios": [2, 1]}
    )
    for (losses, gaps), comparison in zip(axes.T, comparisons, strict=True):
        stock, fused, control = (run.losses for run in (comparison.stock, comparison.fused, comparison.control))
        losses.plot(stock, color="tab:blue", linewidth=4, alpha=0.35, label="stock")
        losses.plot(fused, color="tab:orange", linewidth=1.2, label="fused")
        losses.set_title(comparison.model_type)
        # Steps without any gap are left out of a logarithmic axis; markers show those that stand alone.
        gaps.set_yscale("log", nonpositive="mask")
        line = {"marker": ".", "markersize": 3, "linewidth": 1}
        gaps.plot(distances(control, stock), color="tab:gray", label="control: stock, off by one rounding", **line)
        gaps.plot(distances(fused, stock), color="tab:orange", label="fused", **line)
        gaps.axhline(comparison.loss.bound, color="tab:red", linestyle="--", linewidth=1, label="bound")
        gaps.set_xlabel("step")
        for axis in (losses, gaps):
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("loss (nats per token)")
    axes[1, 0].set_ylabel("gap to stock (nats)")
    for row in axes:
        row[0].legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=120)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``fused-norm demo``."""
    parser.add_argument(
        "--family",
        action="append",
        choices=tuple(FAMILIES),
        help="train this one; may be given several times (default: qwen3, llama and gemma)",
    )
    parser.add_argument("--steps", type=int, help=f"optimizer steps (default: {GPU.steps} on a GPU, else {CPU.steps})")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--text", nargs="+", type=Path, metavar="PATH", help="train on these text files (default: Python's own source)"
    )
    source.add_argument(
        "--dataset", metavar="NAME[:CONFIG]", help="train on this dataset, a folder or a name on the hub"
    )
    parser.add_argument("--column", default="text", help="the dataset's column with the text (default: text)")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the picture (default: demo)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), help=f"of the model (default: {GPU.dtype} on a GPU, else {CPU.dtype})"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the demo and prints what comes out.

    Returns:
        0 when every fused run stays within its bound, 1 when one does not, 2 for input that cannot be used.
    """
    missing = [name for name in ("accelerate", "datasets", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        return _bad_input(f"needs {' and '.join(missing)}: pip install 'fused-norm[convergence,plots]'")

    from accelerate import Accelerator
    from tqdm import tqdm

    from . import data
    from .training import TrainingOptions

    device = Accelerator().device
    scale = CPU if device.type == "cpu" else GPU
    dtype = args.dtype or scale.dtype
    steps = scale.steps if args.steps is None else args.steps
    try:
        options = TrainingOptions(steps, scale.batch_size, scale.learning_rate)
        texts = (
            data.read_dataset(args.dataset, column=args.column)
            if args.dataset
            else data.read_files(args.text or data.standard_library())
        )
        drawn = options.steps * options.batch_size
        packed = data.pack(texts, length=scale.length, limit=drawn)
        args.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        return _bad_input(str(error))
    sequences = data.schedule(packed, count=drawn, seed=args.seed)

    text = args.dataset or (f"{len(args.text)} file(s)" if args.text else "Python's standard library")
    print(f"device: {_device_in_words(device)}")
    print(f"text:   {text}; {options.steps} steps of {options.batch_size} x {scale.length} bytes, {dtype}", flush=True)
    families = list(dict.fromkeys(args.family or ("qwen3", "llama", "gemma")))
    comparisons = []
    # disable=None: a bar on a terminal, nothing in a file.
    with tqdm(total=3 * options.steps * len(families), unit="step", disable=None, leave=False) as bar:
        for model_type in families:
            bar.set_description(model_type)
            config = tiny_config(model_type, **scale.overrides)
            comparison = compare(
                config,
                sequences,
                options,
                seed=args.seed,
                dtype=DTYPES[dtype],
                on_step=lambda step, loss: bar.update(),
            )
            comparisons.append(comparison)
            bar.clear()
            print(f"\n{describe(comparison)}", flush=True)
    picture = args.out / "curves.png"
    plot(comparisons, picture)
    print(f"\nbound: {BOUND:g} x the gap of the control run, stock with initial weights off by one rounding of {dtype}")
    print(f"picture: {picture}")
    return int(any(comparison.failure for comparison in comparisons))


def _bad_input(message: str) -> int:
    print(f"fused-norm demo: {message}", file=sys.stderr)
    return 2


def _device_in_words(device: torch.device) -> str:
    if device.type != "cpu":
        return f"{torch.get_device_module(device).get_device_name(device)}, Triton kernels"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "CPU, Triton kernels in its interpreter (their times say nothing about a GPU)"
    return "CPU, PyTorch reference instead of Triton kernels (TRITON_INTERPRET is not 1)"
