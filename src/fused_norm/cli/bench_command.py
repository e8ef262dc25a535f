"""``fused-norm bench``: host time, kernels and whole models, side by side with their peers."""

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

from .common import UsageError, interpret_without_gpu
from .env_command import environment

if TYPE_CHECKING:
    from ..bench.results import Results
    from ..bench.session import Session

T = TypeVar("T")

_PARTS = ("host", "models", "kernels", "modes")
_DTYPES = ("bfloat16", "float16", "float32")
_VARIANTS = (
    "stock; fused, and parts of it, each fusing more than the one before: fused-norms, fused-qk, fused-rope, "
    "fused-residual; norms of others: liger, liger-rope (and its rotary embedding), torch; no norms: identity, "
    "identity-no-rope; torch.compile: compile, fused-compile"
)
_MOST_JOBS = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "host: Python time of a call. kernels: every provider on every row. modes: those of the fused forward. models: "
        "training steps. NAMES are separated by commas. Results, tables and pictures land in the folder of --out."
    )
    parser.add_argument(
        "part", nargs="?", choices=(*_PARTS, "all"), default="all", help="what to measure (default: all)"
    )
    parser.add_argument("--rows", type=_names, metavar="NAMES", help="only these, such as 'add *,Qwen3-0.6B*'")
    parser.add_argument("--providers", type=_names, metavar="NAMES", help="of kernels and host (default: all)")
    parser.add_argument("--variants", type=_names, metavar="NAMES", help=f"of models: {_VARIANTS} (default: all)")
    parser.add_argument(
        "--dtype", type=_names, metavar="NAMES", help=f"of {', '.join(_DTYPES)} (default: bfloat16; modes: all)"
    )
    parser.add_argument("--out", type=Path, default=Path("bench"), metavar="DIR", help="folder for results (bench)")
    parser.add_argument("--budget-seconds", type=float, metavar="S", help="start nothing new after so many seconds")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes that compile ahead, 0 for none (most cores)")
    parser.add_argument("--no-profiler", action="store_true", help="time by CUDA graphs alone, which is quicker")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, also on a CPU: whether it runs, not how fast")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--plot", type=Path, metavar="RESULTS", help="tables and pictures of the results.json of a run")
    other.add_argument("--tune", action="store_true", help="measure launch plans instead and print the best")
    parser.add_argument("--widths", type=_names, metavar="NUMBERS", help="row lengths to tune (default: those of rows)")


def run(args: argparse.Namespace) -> int:
    """Measure, write, print; 0 unless a fused result was wrong or failed, else 1."""
    if args.widths and not args.tune:
        raise UsageError("--widths belongs to --tune; what is measured otherwise is chosen by --rows")
    if args.plot:
        return _plot(args.plot, args.out)
    device = interpret_without_gpu()
    if device.type == "cpu" and not args.quick:
        raise UsageError(
            "no GPU, and times of Triton's interpreter mean nothing; --quick shows that the benchmarks run, --plot "
            "draws the results of another machine"
        )
    # After the lines above, because these import the kernels.
    from ..bench import models, providers
    from ..bench.results import Results
    from ..bench.session import Session

    facts = environment() | providers.versions() | {"date": time.strftime("%Y-%m-%d", time.gmtime())}
    chosen = {name: value for name, value in vars(args).items() if name != "out" and value not in (None, False)}
    facts["options"] = ", ".join(f"{name} {value}" for name, value in chosen.items())
    session = Session(
        device,
        Results(facts, meaningless=args.quick),
        _folder(args.out) / "results.json",
        _progress(),
        args.budget_seconds,
        args.quick,
    )
    if args.tune:
        return _tune(session, args)
    parts = _parts(session, args)
    session.measure_copy()
    for measure in parts:
        measure()
    session.measure_copy()
    session.save()
    _report(session.results, session.path.parent)
    verdicts = [row.verdict for row in session.results.kernels if row.provider == providers.FUSED.name]
    verdicts += [row.verdict for row in session.results.steps if row.variant in (*models.FEATURES, "fused-compile")]
    return int(any(verdict != "ok" for verdict in verdicts))


def _parts(session: Session, args: argparse.Namespace) -> list[Callable[[], None]]:
    """What the arguments ask for, in the order of measuring.

    Raises:
        UsageError: they name something that there is not.
    """
    import torch

    from ..bench import ahead, cases, host, kernels, models, providers

    peers = _named(providers.PROVIDERS, args.providers, "provider")
    variants = _named({name: name for name in models.VARIANTS}, args.variants, "variant")
    every_dtype = {name: getattr(torch, name) for name in _DTYPES}
    dtypes = _named(every_dtype, args.dtype or ["bfloat16"], "dtype")
    wanted = _PARTS if args.part == "all" else (args.part,)
    every_row = {
        "kernels": cases.QUICK if session.quick else cases.CASES,
        "modes": cases.QUICK_MODES if session.quick else cases.MODES,
        "models": models.QUICK if session.quick else models.ROWS,
    }
    rows = _matching({part: every_row[part] for part in wanted if part in every_row}, args.rows)
    mode_dtypes = dtypes if args.dtype else list(every_dtype.values())
    operations: dict[str, tuple[Sequence[Any], Sequence[Any], Sequence[Any]]] = {
        "host": (host.CASES, [torch.bfloat16], peers),
        "kernels": (rows.get("kernels", ()), dtypes, peers),
        "modes": (rows.get("modes", ()), mode_dtypes, providers.FUSED_MODES),
    }
    tasks = [task for part in wanted if part in operations for task in itertools.product(*operations[part])]
    jobs = args.jobs
    if jobs is None:
        jobs = 0 if session.quick else min(_MOST_JOBS, len(os.sched_getaffinity(0)))

    def steps(chosen: list[str]) -> None:
        models.measure(session, rows["models"], chosen, dtypes[0])

    # What host time counts for comes first: once torch.profiler has been used, launches may cost more. Compiling whole
    # models takes longest, so it comes last.
    measures: dict[str, Callable[[], None]] = {
        "host": lambda: host.measure(session, peers),
        "models": lambda: steps([name for name in variants if name not in models.COMPILED]),
        "kernels": lambda: kernels.measure(session, "kernels", *operations["kernels"], profile=not args.no_profiler),
        "modes": lambda: kernels.measure(session, "modes", *operations["modes"], profile=False),
    }
    compiled_models = [lambda: steps([name for name in variants if name in models.COMPILED])]
    return [
        lambda: ahead.compile_ahead(session, tasks, jobs),
        *(measures[part] for part in wanted),
        *(compiled_models if "models" in wanted else ()),
    ]


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


def _tune(session: Session, args: argparse.Namespace) -> int:
    from ..bench import tune

    if args.widths and not all(width.isdecimal() and int(width) for width in args.widths):
        raise UsageError(f"--widths takes numbers from 1 on, not {','.join(args.widths)}")
    found = tune.tune(session, [int(width) for width in args.widths] if args.widths else None)
    text = "\n".join([tune.table(found), *(f"left out: {line}" for line in session.results.left_out)])
    (session.path.parent / "plans.txt").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def _plot(path: Path, out: Path) -> int:
    from ..bench.results import Results

    try:
        results = Results.load(path)
    except (OSError, ValueError) as error:
        raise UsageError(error) from error
    if not importlib.util.find_spec("matplotlib"):
        raise UsageError("pictures need matplotlib: pip install 'fused-norm[plots]'")
    _report(results, _folder(out))
    return 0


def _report(results: Results, folder: Path) -> None:
    from ..bench import plots, report

    text = report.describe(results)
    (folder / "report.txt").write_text(text + "\n", encoding="utf-8")
    written = "no pictures: they need matplotlib, pip install 'fused-norm[plots]'"
    if importlib.util.find_spec("matplotlib"):
        written = ", ".join(path.name for path in plots.draw(results, folder)) or "no pictures"
    print(text)
    print(f"\nin {folder}: report.txt, {written}")


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"no results can be written to {path}: {error}") from error
    return path


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _progress() -> Callable[[str], None]:
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {text}", file=sys.stderr, flush=True)

    return say
