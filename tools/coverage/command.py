"""``python -m tools.coverage``: what all model types of the installed transformers have, and what of it is fused."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fused_norm.cli import parse_and_run
from fused_norm.cli.common import UsageError, interpret_without_gpu, positive, results_folder, writing_to

if TYPE_CHECKING:
    from .summary import Summary

_NEWEST = "newest"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with arguments, those of the process for None, and return the exit code."""
    return parse_and_run(
        sys.modules[__name__],
        "python -m tools.coverage",
        "What all model types of transformers have, and what of it is fused.",
        argv,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Norms, rotations and adds are counted by what they compute and by tracing a small model, not by the patcher. "
        "Each type has a process of its own. With --run small models are run instead, fused and stock, which takes "
        "seconds to minutes a type without a GPU."
    )
    parser.add_argument("types", nargs="*", metavar="TYPE", help="only these model types (default: all)")
    parser.add_argument("--jobs", type=positive, default=2, metavar="N", help="processes at the same time (2)")
    parser.add_argument("--seconds", type=positive, metavar="S", help="time of a type (120; 900 with --run)")
    parser.add_argument("--memory", type=positive, default=12, metavar="GB", help="memory of a process (12)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the summary, transformers-VERSION.json, there")
    parser.add_argument(
        "--resume", type=Path, metavar="DIR", help="keep the results by type there, and use those there"
    )
    parser.add_argument("--stored", type=Path, metavar="FILE", help="a stored summary instead of a sweep")
    parser.add_argument(
        "--against",
        nargs="?",
        const=_NEWEST,
        metavar="FILE",
        help="what changed since a stored summary (default: that of the newest release in the folder of --out)",
    )
    parser.add_argument(
        "--table", type=Path, metavar="PAGE", help="write the tables of all summaries in --out to a page"
    )
    parser.add_argument("--run", action="store_true", help="compare outputs and gradients of small models with stock")


def run(args: argparse.Namespace) -> int:
    """Sweep, store, compare; 1 where --against found a change, or --run a wrong result, else 0."""
    if args.table is not None:
        return _write_tables(args)
    if args.stored is not None:
        summary = _load(args.stored)
    else:
        interpret_without_gpu("cpu")
        if args.run:
            return _run_models(args)
        summary = _sweep(args)
    against = None if args.against is None else _load(_before(args, summary))
    _print(summary)
    if args.out is not None:
        with writing_to(args.out):
            summary.save(results_folder(args.out) / f"transformers-{summary.transformers}.json")
    if against is None:
        return 0
    from .summary import changes

    lines = changes(against, summary, only=args.types)
    print(f"\nsince transformers {against.transformers}: {len(lines) or 'no'} changes")
    print("\n".join(f"  {line}" for line in lines))
    return int(bool(lines))


def _count(model_type: str) -> Mapping[str, Any]:
    from .type_count import UnbuiltError, count

    try:
        return count(model_type).to_dict()
    except UnbuiltError as error:
        return {"failed": str(error)}


def _compare(model_type: str) -> Mapping[str, Any]:
    from .stock_comparison import compare
    from .type_count import UnbuiltError

    try:
        return compare(model_type)
    except UnbuiltError as error:
        return {"failed": str(error)}


def _sweep(args: argparse.Namespace) -> Summary:
    import transformers

    from .summary import summarise

    return summarise(transformers.__version__, _each(_count, args, 120))


def _each(job: Callable[[str], Mapping[str, Any]], args: argparse.Namespace, seconds: int) -> dict[str, Any]:
    """Do a job for each type that is asked for."""
    import transformers
    from tqdm import tqdm

    # Before the processes fork, so that each of them has it.
    from . import stock_comparison  # noqa: F401
    from .model_types import model_types
    from .sweep import sweep

    known = model_types()
    if unknown := sorted(set(args.types) - set(known)):
        raise UsageError(f"transformers has no model type {', '.join(unknown)}")
    names: Sequence[str] = args.types or known
    with tempfile.TemporaryDirectory() as temporary, tqdm(total=len(names), unit="type", disable=None) as bar:
        # Results of another release, or of the other job, are not to be taken for these.
        kind = f"{'run' if args.run else 'count'}-{transformers.__version__}"
        folder = Path(temporary) if args.resume is None else results_folder(args.resume / kind)
        return sweep(
            job,
            names,
            folder,
            jobs=args.jobs,
            seconds=args.seconds or seconds,
            gigabytes=args.memory,
            done=lambda name, _: bar.update(),
        )


def _run_models(args: argparse.Namespace) -> int:
    """Print what each small model's step is against stock; 1 where one is over budget."""
    results = _each(_compare, args, 900)
    for name, result in results.items():
        print(f"{name}: {result['failed']}" if "failed" in result else name)
        for what, outcome in result.items():
            if what == "failed":
                continue
            print(f"  {what}: {outcome if isinstance(outcome, str) else _over(outcome)}")
    outcomes = [one for result in results.values() for what, one in result.items() if what != "failed"]
    wrong = sum(not isinstance(one, str) for one in outcomes)
    same = sum(one == "ok" for one in outcomes)
    print(f"\n{same} steps within their budgets, {wrong} over, {len(outcomes) - same - wrong} not compared")
    return int(wrong > 0)


def _over(outcome: Mapping[str, Any]) -> str:
    worst = "; ".join(
        f"{name}: stock {stock:.1e}, fused {fused:.1e}, budget {budget:.1e}"
        for name, stock, fused, budget in outcome["worst"]
    )
    return f"{outcome['over budget']} of {outcome['of']} results over budget: {worst}"


def _print(summary: Summary) -> None:
    from .summary import KINDS, gaps

    print(f"transformers {summary.transformers}")
    for kind, (found, fused, types) in summary.totals().items():
        share = f"{100 * fused / found:5.1f} %" if found else "      -"
        print(f"  {KINDS[kind]:<16} {fused:>6} of {found:>6} fused  {share}  in {types} model types")
    bare, parts, unbuilt = len(summary.without), len(summary.parts), len(summary.unbuilt)
    print(f"  {bare} model types have none of these, {parts} are parts of others alone, and {unbuilt} were not built")
    print("\nkept, by number:")
    for number, types, kind, cls, reason in gaps(summary):
        print(f"  {number:>5} {KINDS[kind]:<16} {cls} ({types} types): {reason}")


def _before(args: argparse.Namespace, summary: Summary) -> Path:
    """The file to compare with."""
    if args.against != _NEWEST:
        return Path(args.against)
    from .summary import stored

    if args.out is None:
        raise UsageError("--against without a file needs --out, the folder with the stored summaries")
    found = [path for release, path in stored(args.out).items() if release != summary.transformers]
    if not found:
        raise UsageError(f"there is no summary of another release in {args.out}")
    return found[-1]


def _load(path: Path) -> Summary:
    from .summary import Summary

    try:
        return Summary.load(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"no summary of a sweep can be read from {path}: {error}") from error


def _write_tables(args: argparse.Namespace) -> int:
    from .summary import page_with_tables, stored

    if args.out is None:
        raise UsageError("--table needs --out, the folder with the stored summaries")
    summaries = [_load(path) for path in stored(args.out).values()]
    if not summaries:
        raise UsageError(f"there are no summaries in {args.out}")
    try:
        page = page_with_tables(args.table.read_text(encoding="utf-8"), summaries)
    except (OSError, ValueError) as error:
        raise UsageError(f"no tables can be written to {args.table}: {error}") from error
    with writing_to(args.table.parent):
        args.table.write_text(page, encoding="utf-8")
    return 0
