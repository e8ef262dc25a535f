"""``python -m benchmarks``: host time, kernels, losses, models and trainers beside peers; what each option saves."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fused_norm.cli import parse_and_run
from fused_norm.cli.common import UsageError, interpret_without_gpu, positive, results_folder, writing_to
from fused_norm.cli.env_command import clocks, environment

if TYPE_CHECKING:
    import torch

    from .benchmark_run import BenchmarkRun
    from .results import Results

PARTS = ("host", "models", "features", "trainers", "losses", "kernels")
"""What can be measured, in the order of measuring."""

_DTYPES = ("bfloat16", "float16", "float32")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with arguments, those of the process for None, and return the exit code."""
    description = "Kernels, losses, host time, whole models and their trainers, side by side with their peers."
    return parse_and_run(sys.modules[__name__], "python -m benchmarks", description, argv)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = """\
host: the Python time of a call. models: steps of whole models, beside peers. features: what each option of
apply_fused_norm saves on whole models. trainers: steps of TRL's trainers (pip install trl). losses: time, memory and
errors of a vocabulary head with its loss, beside peers. kernels: GPU time and memory of every other operator, beside
peers. tune: prints rows of launch plans for this device. plots RESULTS: tables and charts of a results.json. Results,
tables and charts are written to the folder of --out.

NAMES are separated by commas. Rows are patterns such as 'glu*' or 'Qwen3-0.6B*', or the names of any operator and shape
('add_rms_norm 4096x2560', 'qk_norm 4096x(28+4)x128'), head with its loss ('linear_cross_entropy 8192x1024x32000
masked' or 'linear_log_probs 8192x1024x32000 weighted': rows, H and V), model and step ('Qwen3-4B lora loss 1x512')
and trainer, model and batch ('SFT Qwen3-4B lora padded 4x1024')."""
    parser.add_argument("part", nargs="?", choices=(*PARTS, "all", "tune", "plots"), default="all", metavar="PART",
                        help=f"{', '.join(PARTS)}, tune or plots (default: all that can be measured)")  # fmt: skip
    parser.add_argument("stored", nargs="?", type=Path, metavar="RESULTS", help="of plots: a results.json")
    parser.add_argument("--rows", type=_names, metavar="NAMES", help="only these; of models there are more by name")
    parser.add_argument(
        "--providers", type=_names, metavar="NAMES", help="of kernels, losses and host; a wrong one lists all"
    )
    parser.add_argument(
        "--variants", type=_names, metavar="NAMES", help="of models, features and trainers, in the same way"
    )
    parser.add_argument("--dtype", type=_names, metavar="NAMES", help=f"of {', '.join(_DTYPES)} (bfloat16)")
    parser.add_argument("--widths", type=lambda text: [positive(name) for name in _names(text)], metavar="NUMBERS",
                        help="of tune: row lengths (default: common ones)")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("build/bench"), metavar="DIR", help="results (%(default)s)")
    parser.add_argument("--budget-seconds", type=float, metavar="S", help="start nothing new after so many seconds")
    parser.add_argument("--quick", action="store_true", help="a sample or two, also on a CPU; the times mean nothing")


def run(args: argparse.Namespace) -> int:
    """Measure, write, print; 0 unless a fused result was wrong or failed, else 1."""
    if args.widths and args.part != "tune":
        raise UsageError("--widths belongs to tune; what is measured otherwise is chosen by --rows")
    if (args.stored is None) == (args.part == "plots"):
        raise UsageError("plots, and nothing else, takes the results.json of a run")
    if args.part == "plots":
        from .results import Results

        try:
            results = Results.load(args.stored)
        except OSError as error:
            raise UsageError(f"{args.stored} cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise UsageError(str(error)) from error
        with writing_to(results_folder(args.out)):
            _report(results, args.out)
        return 0
    if args.budget_seconds is not None and "LOCAL_RANK" in os.environ:
        raise UsageError("processes of torchrun would not end at the same row: leave --budget-seconds out")
    device = interpret_without_gpu()
    if device.type == "cpu" and (not args.quick or args.part == "tune"):
        raise UsageError("no GPU, and times of Triton's interpreter mean nothing; --quick shows that measurements run, "
                         "plots draws the results of another machine")  # fmt: skip
    if args.part == "tune":
        from . import tune

        tune.print_rows(device, args.widths)
        return 0
    with _one_of_several(device) as (own_device, is_first):
        return _measure(args, own_device, is_first)


def _measure(args: argparse.Namespace, device: torch.device, is_first: bool) -> int:
    # After the device was chosen, because these import the kernels.
    from . import model_variants, providers
    from .benchmark_run import BenchmarkRun
    from .results import Results

    facts = environment() | providers.peer_versions() | {"date": time.strftime("%Y-%m-%d", time.gmtime())}
    chosen = {name: value for name, value in vars(args).items() if name != "out" and value not in (None, False)}
    facts["options"] = ", ".join(f"{name} {value}" for name, value in chosen.items())
    path = results_folder(args.out) / "results.json" if is_first else None
    results = Results(facts, meaningless=args.quick)
    benchmark_run = BenchmarkRun(device, results, path, args.budget_seconds, args.quick)
    with writing_to(args.out):
        measurements = _measurements(benchmark_run, args)
        benchmark_run.measure_copy()
        facts["clocks at first"] = clocks()
        for measure in measurements:
            measure()
        benchmark_run.measure_copy()
        facts["clocks at last"] = clocks()
        benchmark_run.save()
        if is_first:
            _report(results, args.out)
    ours = {*providers.OURS, *model_variants.OURS}
    return int(any(row.bad for row in results.rows if row.by in ours))


@contextlib.contextmanager
def _one_of_several(device: torch.device) -> Iterator[tuple[torch.device, bool]]:
    """A context with the process group of ``torchrun``, if it runs this process: its device, and if it reports."""
    if "LOCAL_RANK" not in os.environ:
        yield device, True
        return
    import torch

    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield device, torch.distributed.get_rank() == 0
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


def _measurements(run: BenchmarkRun, args: argparse.Namespace) -> list[Callable[[], None]]:
    """The measurements that the arguments ask for, in order.

    Raises:
        UsageError: they name something that does not exist.
    """
    import torch

    from . import host, kernels, losses, models, providers, trainers
    from .loss_providers import LOSS_PROVIDERS
    from .model_variants import DEFAULT, FEATURES, VARIANTS

    parts = PARTS if args.part == "all" else (args.part,)
    rows = _rows(parts, args.rows)
    of_operators = {} if parts == ("losses",) else providers.EVERY
    of_losses = LOSS_PROVIDERS if "losses" in parts else {}
    names = (*of_operators, *of_losses)
    chosen = _named(names, args.providers, "provider", (*providers.PROVIDERS, *LOSS_PROVIDERS))
    peers, loss_peers = ([every[name] for name in every if name in chosen] for every in (of_operators, of_losses))
    dtypes = [getattr(torch, name) for name in _named(_DTYPES, args.dtype, "dtype", _DTYPES[:1])]
    variants = _named(VARIANTS, args.variants, "variant", DEFAULT)
    compared = args.variants and [models.BASE, *args.variants]
    features = _named((*FEATURES, *VARIANTS), compared, "variant", FEATURES)
    of_trainers = _named(VARIANTS, args.variants, "variant", trainers.DEFAULT)
    measure = {
        "host": partial(host.measure, run, peers),
        "models": partial(models.measure, run, rows["models"], variants, dtypes[0]),
        "features": partial(models.measure, run, rows["features"], features, dtypes[0], "features"),
        "trainers": partial(trainers.measure, run, rows["trainers"], of_trainers, dtypes[0]),
        "losses": partial(losses.measure, run, rows["losses"], dtypes[0], loss_peers),
        "kernels": partial(kernels.measure, run, rows["kernels"], dtypes, peers),
    }
    return [measure[part] for part in parts]


def _rows(parts: Sequence[str], names: Sequence[str] | None) -> Mapping[str, Sequence[Any]]:
    """The rows of each part that a pattern matches, or that have such a name; every name must have one.

    Raises:
        UsageError: one has none.
    """
    from .loss_cases import CASES as LOSS_CASES
    from .loss_cases import LossCase
    from .model_cases import CASES, DEFAULT, FEATURES, ModelCase
    from .operator_cases import CASES as OPERATOR_CASES
    from .operator_cases import OperatorCase
    from .trainers import CASES as TRAINER_CASES
    from .trainers import TrainerCase

    rows: dict[str, Sequence[Any]] = {
        "kernels": OPERATOR_CASES, "losses": LOSS_CASES, "models": CASES, "features": FEATURES,
        "trainers": TRAINER_CASES,
    }  # fmt: skip
    if names is None:
        return rows | {"models": DEFAULT}
    kinds: Mapping[str, Any] = {"kernels": OperatorCase, "losses": LossCase, "trainers": TrainerCase}
    chosen: dict[str, dict[Any, None]] = {part: {} for part in rows}
    for name in names:
        is_known = False
        for part in (part for part in parts if part in rows):
            matching = [row for row in rows[part] if fnmatchcase(row.name, name)]
            with contextlib.suppress(ValueError):  # it is the name of no row
                matching = matching or [kinds.get(part, ModelCase).named(name)]
            chosen[part] |= dict.fromkeys(matching)
            is_known = is_known or bool(matching)
        if not is_known:
            there = dict.fromkeys(row.name for part in parts for row in rows.get(part, ()))
            raise UsageError(f"--rows {name!r} is no operator and shape, and no model and step, and matches none of: "
                             f"{', '.join(there) or 'no rows'}")  # fmt: skip
    return {part: list(cases) for part, cases in chosen.items()}


def _named(every: Collection[str], names: Sequence[str] | None, what: str, default: Sequence[str]) -> list[str]:
    """Those of ``every`` that are among ``names``, or among ``default`` if none are given, in their order."""
    for name in names or ():
        if name not in every:
            raise UsageError(f"no {what} {name!r}; there are {', '.join(dict.fromkeys(every))}")
    return [name for name in dict.fromkeys(every) if name in (default if names is None else names)]


def _report(results: Results, folder: Path) -> None:
    from . import plots, tables

    text = tables.describe(results)
    (folder / "report.txt").write_text(text + "\n", encoding="utf-8")
    written = "no charts: they need matplotlib, pip install 'fused-norm[plots]'"
    if importlib.util.find_spec("matplotlib"):
        written = ", ".join(path.name for path in plots.draw(results, folder)) or "no charts"
    steps = results.of("models")
    if steps:
        (folder / "steps.md").write_text(tables.steps_in_markdown(steps) + "\n", encoding="utf-8")
    print(text)
    print(f"\nin {folder}: report.txt, {'steps.md, ' if steps else ''}{written}")


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return names
