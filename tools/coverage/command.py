"""``python -m tools.coverage``: what all model types of the installed transformers have, and what of it is fused."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fused_norm.cli import STOPPED, parse_and_run
from fused_norm.cli.common import UsageError, interpret_without_gpu, positive

if TYPE_CHECKING:
    from .summary import Summary

_ROOT = Path(__file__).parents[2]
STORED = _ROOT / "benchmarks" / "coverage"
"""The folder with a summary of each release that was swept, ``transformers-VERSION.json``."""
DOCS = _ROOT / "docs"
"""The folder of the pages with their tables."""

_NEWEST = "newest"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with arguments, those of the process for None, and return the exit code."""
    description = "What all model types of transformers have, and what of it is fused."
    return parse_and_run(sys.modules[__name__], "python -m tools.coverage", description, argv)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Norms, rotations and adds are counted by what they compute and by tracing a small model, not by the patcher. "
        "Each type has a process of its own. Summaries are stored in benchmarks/coverage."
    )
    parser.add_argument("types", nargs="*", metavar="TYPE", help="only these model types (default: all)")
    parser.add_argument("--jobs", type=positive, default=2, metavar="N", help="processes at the same time (2)")
    parser.add_argument("--seconds", type=positive, default=120, metavar="S", help="time of a type (120)")
    parser.add_argument("--memory", type=positive, default=12, metavar="GB", help="memory of a process (12)")
    parser.add_argument("--store", action="store_true", help="store the summary as that of this release")
    parser.add_argument("--against", nargs="?", const=_NEWEST, metavar="RELEASE",
                        help="what changed since a stored release (default: the newest but this one)")  # fmt: skip
    parser.add_argument(
        "--table", action="store_true", help="count nothing: write the tables of docs from what is stored"
    )


def run(args: argparse.Namespace) -> int:
    """Sweep, store, compare; 1 if --against found a change, else 0. Ctrl-C leaves what was counted, not stored."""
    from benchmarks.markdown import page_with

    from .summary import Summary, changes, stored, tables

    there = {release: Summary.load(path) for release, path in stored(STORED).items()}
    if args.table:
        for name, table in tables(list(there.values())).items():
            page = page_with((DOCS / name).read_text(encoding="utf-8"), "coverage", table)
            (DOCS / name).write_text(page, encoding="utf-8")
        return 0
    if args.store and args.types:
        raise UsageError("--store is of all model types")
    if args.against not in (None, _NEWEST, *there):
        raise UsageError(f"transformers {args.against} is not stored; there are {', '.join(there)}")
    against = args.against
    if against == _NEWEST:
        import transformers

        against = next((release for release in reversed(there) if release != transformers.__version__), None)
        if against is None:
            raise UsageError("no other release is stored to compare with: leave out --against")
    # The sweep imports the kernels, for which the device is chosen before.
    interpret_without_gpu("cpu")
    summary, missing = _sweep(args)
    _print(summary)
    if missing:
        print(f"\nstopped, with {missing} model types left to count")
        return STOPPED
    if args.store:
        summary.save(STORED / f"transformers-{summary.transformers}.json")
    if against is None:
        return 0
    before = there[against]
    lines = changes(before, summary, only=args.types)
    print(f"\nsince transformers {before.transformers}: {len(lines) or 'no'} changes")
    print("\n".join(f"  {line}" for line in lines))
    return int(bool(lines))


def _count(model_type: str) -> Mapping[str, Any]:
    from .type_count import UnbuiltError, count

    try:
        return asdict(count(model_type))
    except UnbuiltError as error:
        return {"failed": str(error)}


def _sweep(args: argparse.Namespace) -> tuple[Summary, int]:
    """The summary, and the number of model types that it lacks because the sweep was stopped."""
    import transformers
    from tqdm import tqdm

    # Before the processes fork, so that each of them has it.
    from . import type_count  # noqa: F401
    from .model_types import model_types
    from .summary import summarise
    from .sweep import sweep

    known = model_types()
    if unknown := sorted(set(args.types) - set(known)):
        raise UsageError(f"transformers has no model type {', '.join(unknown)}")
    names: Sequence[str] = args.types or known
    counts = sweep(_count, names, jobs=args.jobs, seconds=args.seconds, gigabytes=args.memory)
    results: dict[str, Any] = {}
    with suppress(KeyboardInterrupt):
        results.update(tqdm(counts, total=len(names), unit="type", disable=None))
    counted = {name: results[name] for name in names if name in results}
    return summarise(transformers.__version__, counted), len(names) - len(counted)


def _print(summary: Summary) -> None:
    from .summary import KINDS, gaps

    print(f"transformers {summary.transformers}")
    for kind, (count, fused, types) in summary.totals().items():
        share = f"{100 * fused / count:5.1f} %" if count else "      -"
        print(f"  {KINDS[kind]:<16} {fused:>6} of {count:>6} fused  {share}  in {types} model types")
    bare, parts, unbuilt = len(summary.without), len(summary.parts), len(summary.unbuilt)
    print(f"  {bare} model types have none of these, {parts} are parts of others alone, and {unbuilt} were not built")
    print("\nkept, by number:")
    for number, types, kind, cls, reason in gaps(summary):
        print(f"  {number:>5} {KINDS[kind]:<16} {cls} ({types} types): {reason}")
