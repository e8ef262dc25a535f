"""``python -m benchmarks``: host time, kernels and whole models beside their peers, and what each option saves."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fused_norm.cli import parse_and_run
from fused_norm.cli.common import UsageError, interpret_without_gpu, positive, results_folder, writing_to
from fused_norm.cli.env_command import clocks, environment

if TYPE_CHECKING:
    from .benchmark_run import BenchmarkRun
    from .results import Part, Results

T = TypeVar("T")

PARTS: tuple[Part, ...] = ("host", "models", "features", "kernels", "modes")
"""What can be measured, in the order of measuring: after torch.profiler was used, launches may cost more host time."""

_DTYPES = ("bfloat16", "float16", "float32")
_MOST_JOBS = 12


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with arguments, those of the process for None, and return the exit code."""
    description = "Kernels, host time and whole models, side by side with their peers."
    return parse_and_run(sys.modules[__name__], "python -m benchmarks", description, argv)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = """\
host: the Python time of a call. models: steps of whole models, beside peers. features: what each option of
apply_fused_norm saves on whole models. kernels: GPU time and memory of every operator, beside peers. modes: the modes
of the forward. tune: prints rows of launch plans for this device. plots RESULTS: tables and charts of a results.json.
Results, tables and charts are written to the folder of --out.

NAMES are separated by commas. Rows are patterns such as 'glu*' or 'Qwen3-0.6B*', or the names of any operator and shape
('add_rms_norm 4096x2560', 'qk_norm 4096x(28+4)x128') and any model and step ('Qwen3-4B train 1x512')."""
    parser.add_argument("part", nargs="?", choices=(*PARTS, "all", "tune", "plots"), default="all", metavar="PART",
                        help=f"{', '.join(PARTS)}, tune or plots (default: all that can be measured)")  # fmt: skip
    parser.add_argument("stored", nargs="?", type=Path, metavar="RESULTS", help="of plots: a results.json")
    parser.add_argument("--rows", type=_names, metavar="NAMES", help="only these; of models there are more by name")
    parser.add_argument("--providers", type=_names, metavar="NAMES", help="of kernels and host (default: all)")
    parser.add_argument(
        "--variants", type=_names, metavar="NAMES", help="of models and features; a wrong name lists all"
    )
    parser.add_argument("--dtype", type=_names, metavar="NAMES", help=f"of {', '.join(_DTYPES)} (bfloat16; modes: all)")
    parser.add_argument("--widths", type=_names, metavar="NUMBERS", help="of tune: row lengths (default: common ones)")
    parser.add_argument(
        "--out", type=Path, default=Path("build/bench"), metavar="DIR", help="for results (%(default)s)"
    )
    parser.add_argument("--budget-seconds", type=float, metavar="S", help="start nothing new after so many seconds")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes that precompile, 0 for none (default: cores)")
    parser.add_argument("--no-profiler", action="store_true", help="time by CUDA graphs alone, which is quicker")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, also on a CPU; the times mean nothing")


def run(args: argparse.Namespace) -> int:
    """Measure, write, print; 0 unless a fused result was wrong or failed, else 1."""
    if args.widths and args.part != "tune":
        raise UsageError("--widths belongs to tune; what is measured otherwise is chosen by --rows")
    if (args.stored is None) == (args.part == "plots"):
        raise UsageError("plots, and nothing else, takes the results.json of a run")
    device = interpret_without_gpu()
    if device.type == "cpu" and not args.quick and args.part != "plots":
        raise UsageError(
            "no GPU, and times of Triton's interpreter mean nothing; --quick shows that the benchmarks run, plots "
            "draws the results of another machine"
        )
    # After the lines above, because these import the kernels.
    from . import model_variants, providers
    from .benchmark_run import BenchmarkRun
    from .results import Results

    if args.part == "plots":
        return _plot(args.stored, args.out)
    if args.part == "tune":
        from . import tune

        if device.type == "cpu":
            raise UsageError("tune needs a GPU")
        tune.print_rows(device, [_width(one) for one in args.widths or ()])
        return 0
    facts = environment() | providers.peer_versions() | {"date": time.strftime("%Y-%m-%d", time.gmtime())}
    chosen = {name: value for name, value in vars(args).items() if name != "out" and value not in (None, False)}
    facts["options"] = ", ".join(f"{name} {value}" for name, value in chosen.items())
    path = results_folder(args.out) / "results.json"
    results = Results(facts, meaningless=args.quick)
    benchmark_run = BenchmarkRun(device, results, path, _progress(), args.budget_seconds, args.quick)
    with writing_to(args.out):
        measurements = _measurements(benchmark_run, args)
        benchmark_run.measure_copy()
        facts["clocks at first"] = clocks()
        for measure in measurements:
            measure()
        benchmark_run.measure_copy()
        facts["clocks at last"] = clocks()
        benchmark_run.save()
        _report(results, args.out)
    ours = {providers.FUSED.name, *model_variants.OURS}
    return int(any(row.bad for row in results.rows if row.by in ours and row.part != "modes"))


def _measurements(run: BenchmarkRun, args: argparse.Namespace) -> list[Callable[[], None]]:
    """The measurements that the arguments ask for, in order.

    Raises:
        UsageError: they name something that does not exist.
    """
    import torch

    from . import features, host, kernels, model_variants, models, operator_cases, precompile, providers

    wanted: tuple[Part, ...] = PARTS if args.part == "all" else (args.part,)
    rows = _rows(wanted, args.rows, args.quick)
    peers = _named(providers.PROVIDERS, args.providers, "provider")
    variants = _named({name: name for name in model_variants.VARIANTS}, args.variants, "variant")
    every_dtype = {name: getattr(torch, name) for name in _DTYPES}
    dtypes = _named(every_dtype, args.dtype or _DTYPES[:1], "dtype")
    operators: dict[Part, tuple[Sequence[Any], Sequence[Any], Sequence[Any]]] = {
        "host": (operator_cases.HOST, [torch.bfloat16], peers),
        "kernels": (rows["kernels"], dtypes, peers),
        "modes": (rows["modes"], dtypes if args.dtype else list(every_dtype.values()), providers.FUSED_MODES),
    }
    tasks = [task for part in wanted if part in operators for task in itertools.product(*operators[part])]

    def measure(part: Part) -> None:
        if part == "host":
            host.measure(run, peers)
        elif part == "models":
            models.measure(run, rows[part], model_variants.DEFAULT if args.variants is None else variants, dtypes[0])
        elif part == "features":
            features.measure(run, rows[part], features.VARIANTS if args.variants is None else variants, dtypes[0])
        else:
            kernels.measure(run, part, *operators[part], profile=not args.no_profiler)

    return [
        lambda: precompile.precompile(run, tasks, _jobs(args)),
        *((lambda part=part: measure(part)) for part in wanted),
    ]


def _rows(parts: Sequence[Part], names: Sequence[str] | None, quick: bool) -> Mapping[Part, list[Any]]:
    """The rows of each part that a pattern matches, or that have such a name; every name must have one.

    Raises:
        UsageError: one has none.
    """
    from . import model_cases, operator_cases

    known: dict[Part, Sequence[Any]] = {
        "kernels": operator_cases.QUICK if quick else operator_cases.CASES,
        "modes": operator_cases.QUICK_MODES if quick else operator_cases.MODES,
        "models": (*model_cases.QUICK, *model_cases.QUICK_BY_NAME) if quick else model_cases.CASES,
        "features": model_cases.QUICK_FEATURES if quick else model_cases.FEATURES,
    }
    if names is None:
        return {**known, "models": model_cases.QUICK if quick else model_cases.DEFAULT}  # type: ignore[dict-item]
    found: dict[Part, list[Any]] = {part: [] for part in known}
    for name in names:
        before = sum(map(len, found.values()))
        for part in (part for part in parts if part in known):
            matching = [row for row in known[part] if fnmatchcase(row.name, name)]
            found[part] += [row for row in matching or _any_row(part, name) if row not in found[part]]
        if sum(map(len, found.values())) == before:
            there = dict.fromkeys(row.name for part in parts for row in known.get(part, ()))
            raise UsageError(f"--rows {name!r} is no operator and shape, and no model and step, and matches none of: "
                             f"{', '.join(there) or 'no rows'}")  # fmt: skip
    return found


def _any_row(part: Part, name: str) -> list[Any]:
    """The row of a name that is in no table; none where it is no name."""
    from .model_cases import ModelCase
    from .operator_cases import OperatorCase

    try:
        if part in ("models", "features"):
            return [ModelCase.named(name)]
        case = OperatorCase.named(name, backward=part == "kernels")
        return [case] if part == "kernels" or case.operator == "rms_norm" else []
    except ValueError:
        return []


def _named(every: Mapping[str, T], names: Sequence[str] | None, what: str) -> list[T]:
    for name in names or ():
        if name not in every:
            raise UsageError(f"no {what} {name!r}; there are {', '.join(every)}")
    return [value for name, value in every.items() if names is None or name in names]


def _width(text: str) -> int:
    try:
        return positive(text)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--widths: {error}") from error


def _jobs(args: argparse.Namespace) -> int:
    """The number of processes that precompile."""
    if args.jobs is not None:
        return args.jobs
    return 0 if args.quick else min(_MOST_JOBS, len(os.sched_getaffinity(0)))


def _plot(path: Path, out: Path) -> int:
    from .results import Results

    try:
        results = Results.load(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UsageError(str(error)) from error
    with writing_to(results_folder(out)):
        _report(results, out)
    return 0


def _report(results: Results, folder: Path) -> None:
    from . import plots, tables

    text = tables.describe(results)
    (folder / "report.txt").write_text(text + "\n", encoding="utf-8")
    written = "no charts: they need matplotlib, pip install 'fused-norm[plots]'"
    if importlib.util.find_spec("matplotlib"):
        written = ", ".join(path.name for path in plots.draw(results, folder)) or "no charts"
    steps = tables.steps_in_markdown(results)
    if steps:
        (folder / "steps.md").write_text(steps + "\n", encoding="utf-8")
    print(text)
    print(f"\nin {folder}: report.txt, {'steps.md, ' if steps else ''}{written}")


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return names


def _progress() -> Callable[[str], None]:
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {text}", file=sys.stderr, flush=True)

    return say
