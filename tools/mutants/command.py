"""``python -m tools.mutants``: plant one-line faults in the package, and tell which of them the fast tests catch."""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fused_norm.cli import parse_and_run
from fused_norm.cli.common import positive

from .mutations import Mutant, drawn, mutants_of
from .runner import PRELOADED, Map, copied, run_tests

_ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results.json")
"""The verdict of each mutant of the last run that was stored, with its date, commit and seed."""
_BUILD = _ROOT / "build" / "mutants"
_MAP = _BUILD / "map.json"
_FOLDERS = ("kernels", "patcher", "check", "model_configs", "integrations", "convergence", "planted")
"""The folders of tests that mutants are run with."""

CAUGHT, SURVIVED, TIMED_OUT, GONE = "caught", "survived", "timed out", "gone"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with arguments, those of the process for None, and return the exit code."""
    return parse_and_run(sys.modules[__name__], "python -m tools.mutants", __doc__ or "", argv)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "map: note which lines each fast test runs, in build/mutants. run: draw mutants and run the tests that reach "
        "them. again: run the stored mutants, first with the tests that caught them; 1 if one survives that was caught."
    )
    parser.add_argument("do", choices=["map", "run", "again"])
    parser.add_argument("files", nargs="*", metavar="FILE", help="map: only these test files")
    parser.add_argument("--count", type=positive, default=330, metavar="N", help="mutants to draw (330)")
    parser.add_argument("--seed", type=int, default=7, metavar="N", help="of the draw (7)")
    parser.add_argument("--seconds", type=positive, default=6, metavar="S", help="seconds of tests of a mutant (6)")
    parser.add_argument("--jobs", type=positive, default=2, metavar="N", help="processes at the same time (2)")
    parser.add_argument("--store", action="store_true", help="store the verdicts, beside this file")


def run(args: argparse.Namespace) -> int:
    """Map, run or run again. The checkout is copied; nothing is written into it but stored verdicts."""
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "TRITON_INTERPRET", "HF_HUB_OFFLINE"), "1")
    sys.dont_write_bytecode = True
    for name in PRELOADED:
        importlib.import_module(name)
    if args.do == "map":
        return _map(args)
    tests = Map.load(_MAP)
    if args.do == "run":
        before: dict[str, Any] = {}
        mutants: list[Mutant | str] = [*drawn(_ROOT, args.count, args.seed, tests.reached())]
        seed = args.seed
    else:
        stored = json.loads(RESULTS.read_text())
        before, seed = stored["mutants"], stored["seed"]
        mutants = list(_found_again(before))

    def judge(tree: Path, mutant: Mutant | str) -> tuple[str, dict[str, Any]]:
        if isinstance(mutant, str):
            return mutant, {"verdict": GONE}
        old = before.get(mutant.name, {})
        killer, was_caught = old.get("by"), old.get("verdict") == CAUGHT
        said = _judged(tree, mutant, tests, args.seconds, [killer] if killer else [])
        if was_caught and said["verdict"] == SURVIVED:  # It is lost only if no test at all catches it.
            said = _judged(tree, mutant, tests, None)
        return mutant.name, said

    verdicts = {}
    for name, said in _in_processes(judge, mutants, args.jobs):
        verdicts[name] = said
        print(f"{said['verdict']:10} {name}  {said.get('by', '')}", flush=True)
    lost = [
        name for name, said in verdicts.items() if said["verdict"] == SURVIVED and before.get(name, said) != said
        and before[name]["verdict"] == CAUGHT
    ]  # fmt: skip
    print(dict(Counter(said["verdict"] for said in verdicts.values())), *(f"lost: {name}" for name in lost), sep="\n")
    if args.store:
        RESULTS.write_text(json.dumps(_dated(seed, verdicts), indent=1) + "\n")
    return int(bool(lost))


def _map(args: argparse.Namespace) -> int:
    tests = Map.load(_MAP) if args.files else Map()
    files = args.files or [
        str(path.relative_to(_ROOT)) for folder in _FOLDERS for path in (_ROOT / "tests" / folder).glob("test_*.py")
    ]

    def measure(tree: Path, file: str) -> tuple[str, Any]:
        return file, run_tests(tree, [file], 3600, measured=True)

    failed = False
    for file, outcome in _in_processes(measure, files, args.jobs):
        tests.replace_file(file, outcome.seconds, outcome.lines)
        failed |= bool(outcome.failed) or outcome.code is None
        print(file, f"exit code {outcome.code}", f"{len(outcome.seconds)} tests", outcome.failed, flush=True)
    tests.save(_MAP)
    return int(failed)


def _judged(tree: Path, mutant: Mutant, tests: Map, seconds: float | None, first: Sequence[str] = ()) -> dict[str, Any]:
    path, chosen = tree / mutant.file, tests.tests_of(mutant, seconds, first)
    said: dict[str, Any] = {"kind": mutant.kind, "line": mutant.line, "tests": len(chosen)}
    if not chosen:
        return {**said, "verdict": SURVIVED}
    source = path.read_bytes()
    try:
        path.write_bytes(mutant.applied(source))
        outcome = run_tests(tree, chosen, 1200 if seconds is None else 30 + 5 * seconds)
    finally:
        path.write_bytes(source)
    if outcome.failed or outcome.code:
        return {**said, "verdict": CAUGHT, "by": outcome.failed}
    return {**said, "verdict": TIMED_OUT if outcome.code is None else SURVIVED}


def _found_again(before: dict[str, Any]) -> Iterator[Mutant | str]:
    """Yield the stored mutants as they are in today's source; the name of one whose code is no longer there."""
    files = sorted({Path(name.partition(":")[0]) for name in before})
    there = {mutant.name: mutant for file in files if (_ROOT / file).exists() for mutant in mutants_of(_ROOT, file)}
    yield from (there.get(name, name) for name in before)


def _in_processes(
    function: Callable[[Path, Any], tuple[str, Any]], work: Sequence[Any], jobs: int
) -> Iterator[tuple[str, Any]]:
    """Yield the results of a function on each of ``work``; every process has a copy of the checkout."""
    fork = multiprocessing.get_context("fork")
    results, position = fork.Queue(), fork.Value("i", 0)

    def worker(tree: Path) -> None:
        while True:
            with position.get_lock():
                i, position.value = position.value, position.value + 1
            if i >= len(work):
                return
            results.put(function(tree, work[i]))

    trees = [copied(_ROOT, _BUILD / f"tree-{i}") for i in range(jobs)]
    processes = [fork.Process(target=worker, args=(tree,)) for tree in trees]
    for process in processes:
        process.start()
    for _ in work:
        yield results.get()
    for process in processes:
        process.join()


def _dated(seed: int, verdicts: dict[str, Any]) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "-C", str(_ROOT), "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    totals = Counter(said["verdict"] for said in verdicts.values())
    dated = {"date": time.strftime("%Y-%m-%d"), "commit": commit, "seed": seed, "totals": totals}
    return dated | {"mutants": dict(sorted(verdicts.items()))}
