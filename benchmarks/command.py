"""``python -m benchmarks``: host time, kernels and whole models beside their peers, and what each feature saves."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fused_norm.cli import parse_and_run
from fused_norm.cli.common import UsageError, interpret_without_gpu, results_folder, writing_to
from fused_norm.cli.env_command import clocks, environment

if TYPE_CHECKING:
    from .benchmark_run import BenchmarkRun
    from .results import Part, Results

T = TypeVar("T")

_PARTS = ("host", "models", "features", "kernels", "modes")
_DTYPES = ("bfloat16", "float16", "float32")
_VARIANTS = (
    "of models: stock, fused, fused-recompute, liger, liger-fused, compile-layers, fused-compile-layers, "
    "compile-layers-max, compile, fused-compile, liger-norms, torch (F.rms_norm), identity (no norms), "
    "identity-no-rope, float8-tensorwise, float8-tensorwise-compile-layers, "
    "float8-tensorwise-fused-compile-layers, float8-rowwise, float8-rowwise-compile-layers, "
    "float8-rowwise-fused-compile-layers (default: the first seven); of features: all, all again (a control), without "
    "rope, without qk, without residual, without sandwich, without norms, without mlp, stock (default: all)"
)
_MOST_JOBS = 12


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with arguments, those of the process for None, and return the exit code."""
    return parse_and_run(
        sys.modules[__name__],
        "python -m benchmarks",
        "Kernels, host time and whole models, side by side with their peers.",
        argv,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "host: the Python time of a call. models: steps of whole models, beside peers. features: what each option of "
        "apply_fused_norm saves on whole models. kernels: GPU time and memory of every operator, beside peers. "
        "modes: the modes of the forward. NAMES are separated by commas. Results, tables and charts are written to "
        "the folder of --out."
    )
    parser.add_argument(
        "part", nargs="?", choices=(*_PARTS, "all"), default="all", help="what to measure (default: all)"
    )
    parser.add_argument(
        "--rows",
        type=_names,
        metavar="NAMES",
        help="only these, such as 'add *,Qwen3-0.6B*'; of models there are more than are measured without it",
    )
    parser.add_argument(
        "--shapes",
        type=_names,
        metavar="NAMES",
        help="kernels or modes of any shapes instead of the rows, such as 'add 4096x2560,qk 4096x(28+4)x128'",
    )
    parser.add_argument("--providers", type=_names, metavar="NAMES", help="of kernels and host (default: all)")
    parser.add_argument("--variants", type=_names, metavar="NAMES", help=_VARIANTS)
    parser.add_argument(
        "--dtype", type=_names, metavar="NAMES", help=f"of {', '.join(_DTYPES)} (default: bfloat16; modes: all)"
    )
    parser.add_argument("--out", type=Path, default=Path("bench"), metavar="DIR", help="folder for results (bench)")
    parser.add_argument("--budget-seconds", type=float, metavar="S", help="start nothing new after so many seconds")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes that precompile, 0 for none (default: cores)")
    parser.add_argument("--no-profiler", action="store_true", help="time by CUDA graphs alone, which is quicker")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, also on a CPU; the times mean nothing")
    parser.add_argument("--plot", type=Path, metavar="RESULTS", help="tables and charts from the results.json of a run")


def run(args: argparse.Namespace) -> int:
    """Measure, write, print; 0 unless a fused result was wrong or failed, else 1."""
    if args.shapes and (args.rows or args.part not in ("kernels", "modes")):
        raise UsageError("--shapes belongs to `bench kernels` and `bench modes`, instead of --rows")
    if args.plot:
        return _plot(args.plot, args.out)
    device = interpret_without_gpu()
    if device.type == "cpu" and not args.quick:
        raise UsageError(
            "no GPU, and times of Triton's interpreter mean nothing; --quick shows that the benchmarks run, --plot "
            "draws the results of another machine"
        )
    # After the lines above, because these import the kernels.
    from . import model_variants, providers
    from .benchmark_run import BenchmarkRun
    from .results import Results

    facts = environment() | providers.peer_versions() | {"date": time.strftime("%Y-%m-%d", time.gmtime())}
    chosen = {name: value for name, value in vars(args).items() if name != "out" and value not in (None, False)}
    facts["options"] = ", ".join(f"{name} {value}" for name, value in chosen.items())
    benchmark_run = BenchmarkRun(
        device,
        Results(facts, meaningless=args.quick),
        results_folder(args.out) / "results.json",
        _progress(),
        args.budget_seconds,
        args.quick,
    )
    with writing_to(args.out):
        measurements = _measurements(benchmark_run, args)
        benchmark_run.measure_copy()
        facts["clocks at first"] = clocks()
        for measure in measurements:
            measure()
        benchmark_run.measure_copy()
        facts["clocks at last"] = clocks()
        benchmark_run.save()
        _report(benchmark_run.results, args.out)
    results = benchmark_run.results
    verdicts = [row.verdict for row in results.kernels if row.provider == providers.FUSED.name]
    verdicts += [row.verdict for row in results.steps if row.variant in model_variants.OURS]
    verdicts += [row.verdict for row in results.features]
    return int(any(verdict in ("wrong", "failed") for verdict in verdicts))


def _measurements(benchmark_run: BenchmarkRun, args: argparse.Namespace) -> list[Callable[[], None]]:
    """The measurements that the arguments ask for, in order.

    Raises:
        UsageError: they name something that does not exist.
    """
    import torch

    from . import (
        features,
        host,
        model_cases,
        model_variants,
        models,
        operator_cases,
        operator_timings,
        precompile,
        providers,
    )

    peers = _named(providers.PROVIDERS, args.providers, "provider")
    variants = _named({name: name for name in (*model_variants.VARIANTS, *features.VARIANTS)}, args.variants, "variant")
    every_dtype = {name: getattr(torch, name) for name in _DTYPES}
    dtypes = _named(every_dtype, args.dtype or ["bfloat16"], "dtype")
    wanted = _PARTS if args.part == "all" else (args.part,)
    quick = benchmark_run.quick
    every_row: dict[str, Sequence[Any]] = {
        "kernels": operator_cases.QUICK if quick else operator_cases.CASES,
        "modes": operator_cases.QUICK_MODES if quick else operator_cases.MODES,
        "models": (*model_cases.QUICK, *model_cases.QUICK_BY_NAME) if quick else model_cases.CASES,
        "features": features.QUICK if quick else features.CASES,
    }
    if args.shapes:
        every_row["kernels"], every_row["modes"] = _shapes(args.shapes, args.part)
    rows = _matching({part: every_row[part] for part in wanted if part in every_row}, args.rows)
    if args.rows is None:
        rows["models"] = list(model_cases.QUICK if quick else model_cases.DEFAULT)
    mode_dtypes = dtypes if args.dtype else list(every_dtype.values())
    operators: dict[str, tuple[Sequence[Any], Sequence[Any], Sequence[Any]]] = {
        "host": (host.CASES, [torch.bfloat16], peers),
        "kernels": (rows.get("kernels", ()), dtypes, peers),
        "modes": (rows.get("modes", ()), mode_dtypes, providers.FUSED_MODES),
    }
    tasks = [task for part in wanted if part in operators for task in itertools.product(*operators[part])]

    def measure_operators(part: Part, profile: bool) -> None:
        operator_timings.measure(benchmark_run, part, *operators[part], profile=profile)

    def measure_models() -> None:
        default = model_variants.DEFAULT if args.variants is None else variants
        models.measure(
            benchmark_run, rows["models"], [name for name in default if name in model_variants.VARIANTS], dtypes[0]
        )

    def measure_features() -> None:
        chosen = [name for name in variants if name in features.VARIANTS]
        features.measure(benchmark_run, rows["features"], chosen, dtypes[0])

    # In the order of _PARTS: after torch.profiler was used, launches may cost more host time.
    measurements: dict[str, Callable[[], None]] = {
        "host": lambda: host.measure(benchmark_run, peers),
        "models": measure_models,
        "features": measure_features,
        "kernels": lambda: measure_operators("kernels", not args.no_profiler),
        "modes": lambda: measure_operators("modes", not args.no_profiler),
    }
    return [
        lambda: precompile.precompile(benchmark_run, tasks, _jobs(args)),
        *(measurements[part] for part in wanted),
    ]


def _shapes(names: Sequence[str], part: str) -> tuple[list[Any], list[Any]]:
    """The cases of ``--shapes``: of kernels, and of modes.

    Raises:
        UsageError: one is no such case, or the part does not have it.
    """
    from dataclasses import replace

    from .operator_cases import OperatorCase

    try:
        cases = [OperatorCase.named(name) for name in names]
    except ValueError as error:
        raise UsageError(f"--shapes: {error}") from error
    for case in cases:
        if part == "modes" and case.operator != "norm":
            raise UsageError(f"--shapes {case.name!r}: modes are compared on norm and gemma")
    return cases, [replace(case, backward=False) for case in cases]


def _matching(rows: Mapping[str, Sequence[Any]], patterns: Sequence[str] | None) -> dict[str, list[Any]]:
    """The rows whose names match a pattern, by part; every pattern must match one.

    Raises:
        UsageError: one matches none.
    """
    from fnmatch import fnmatchcase

    names = [row.name for chosen in rows.values() for row in chosen]
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(f"--rows {pattern!r} matches none of: {', '.join(dict.fromkeys(names)) or 'no rows'}")
    return {
        part: [row for row in chosen if patterns is None or any(fnmatchcase(row.name, p) for p in patterns)]
        for part, chosen in rows.items()
    }


def _named(every: Mapping[str, T], names: Sequence[str] | None, what: str) -> list[T]:
    for name in names or ():
        if name not in every:
            raise UsageError(f"no {what} {name!r}; there are {', '.join(every)}")
    return [value for name, value in every.items() if names is None or name in names]


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
    if not importlib.util.find_spec("matplotlib"):
        raise UsageError("charts need matplotlib: pip install 'fused-norm[plots]'")
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
