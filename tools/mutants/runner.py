"""Runs tests on a copy of the checkout, in forks of a process that has imported the large packages already."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .mutations import PACKAGE, Mutant

PRELOADED = (
    "peft",
    "bitsandbytes",
    "torchao",
    "accelerate",
    "datasets",
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
)
"""What most tests import; a fork of a process that has it starts in seconds."""


@dataclass
class Map:
    """Which lines of the package each test runs.

    Attributes:
        seconds: of each test, by its pytest id.
        lines: of each test, by the path of the file in the package.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[str, list[int]]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Map:
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(vars(self)))

    def replace_file(self, test_file: str, seconds: Mapping[str, float], lines: Mapping[str, Any]) -> None:
        """Replace what is known of a file's tests."""
        for test in [test for test in self.seconds if test.split("::")[0] == test_file]:
            del self.seconds[test], self.lines[test]
        for test, taken in seconds.items():
            if test in lines:
                self.seconds[test], self.lines[test] = round(taken, 2), lines[test]

    def reached(self) -> dict[str, set[int]]:
        """Return the lines that any test runs, by file."""
        reached: dict[str, set[int]] = defaultdict(set)
        for files in self.lines.values():
            for file, numbers in files.items():
                reached[file].update(numbers)
        return reached

    def tests_of(self, mutant: Mutant, budget: float | None, first: Sequence[str] = ()) -> list[str]:
        """Return tests that run a mutant's statement: those in ``first``, then the cheapest.

        Within ``budget`` seconds few cases of one test function are taken, because most see the same; None takes all.
        """
        file = str(Path(mutant.file).relative_to(PACKAGE))
        begin, end = mutant.statement
        running = [
            test for test, files in self.lines.items() if any(begin <= line <= end for line in files.get(file, ()))
        ]
        word = Path(file).stem.split("_")[0]
        running.sort(key=lambda test: (self.seconds[test] > 2, word not in test, self.seconds[test]))
        if budget is None:
            return running
        chosen = [test for test in first if test in self.seconds]
        spent, cases = 0.0, Counter[str]()
        for test in running:
            name = test.split("[")[0]
            if test not in chosen and spent + self.seconds[test] <= budget and cases[name] < 3:
                cases[name] += 1
                spent += self.seconds[test]
                chosen.append(test)
        return chosen or running[:1]


def copied(checkout: Path, folder: Path) -> Path:
    """Copy the files of the checkout that git tracks or would track into a folder, and return it."""
    shutil.rmtree(folder, ignore_errors=True)
    command = ["git", "-C", str(checkout), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (checkout / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(checkout / name, folder / name)
    return folder


class _Notes:
    """A plugin of pytest that notes seconds, the first failure, and the lines that each test runs."""

    def __init__(self, coverage: Any) -> None:
        self.coverage, self.seconds, self.failed = coverage, defaultdict[str, float](float), ""

    def pytest_runtest_setup(self, item: Any) -> None:
        if self.coverage:
            self.coverage.switch_context(item.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        self.failed = self.failed or (report.nodeid if report.failed else "")

    def pytest_collectreport(self, report: Any) -> None:
        self.failed = self.failed or (report.nodeid or "collection" if report.failed else "")

    def lines(self, package: Path) -> dict[str, dict[str, list[int]]]:
        """Return the lines of files of the package, by test."""
        by_test: dict[str, dict[str, list[int]]] = defaultdict(dict)
        if not self.coverage:
            return by_test
        data = self.coverage.get_data()
        for file in data.measured_files():
            for line, tests in data.contexts_by_lineno(file).items():
                for test in tests:
                    by_test[test].setdefault(os.path.relpath(file, package), []).append(line)
        return by_test


@dataclass(frozen=True)
class Outcome:
    """What a run of tests came to.

    Attributes:
        code: pytest's exit code; None if the time was over.
        failed: the first test that failed; empty if none did.
        seconds, lines: as in ``Map``; lines only if they were measured.
    """

    code: int | None
    failed: str
    seconds: Mapping[str, float]
    lines: Mapping[str, Any]


def run_tests(tree: Path, tests: Sequence[str], limit: float, *, measured: bool = False) -> Outcome:
    """Run fast tests of a copy of the checkout in a fork, up to the first failure unless lines are ``measured``."""
    out = tree / ".outcome.json"
    out.unlink(missing_ok=True)
    begun, code = time.monotonic(), None
    if (child := os.fork()) == 0:
        _in_child(tree, tests, out, measured)
    while time.monotonic() - begun < limit and code is None:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if code is None:
        os.waitpid(child, 0)
    told = json.loads(out.read_text()) if out.exists() else {"failed": "", "seconds": {}, "lines": {}}
    return Outcome(code, **told)


def _in_child(tree: Path, tests: Sequence[str], out: Path, measured: bool) -> None:
    code = 99
    try:
        os.setsid()
        os.chdir(tree)
        log = os.open(tree / ".log", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ["PYTHONPATH"] = str(tree / "src")
        sys.path[:0] = [str(tree / "src"), str(tree)]
        for name in [name for name in sys.modules if name.split(".")[0] in ("fused_norm", "benchmarks", "tools")]:
            del sys.modules[name]
        import pytest

        coverage = None
        if measured:
            from coverage import Coverage

            coverage = Coverage(data_file=None, include=[f"{tree}/src/*"])
            coverage.start()
        notes = _Notes(coverage)
        options = ["-q", "-p", "no:cacheprovider", "-m", "not slow", *([] if measured else ["-x"])]
        code = int(pytest.main([*options, *tests], plugins=[notes]))
        told = {"failed": notes.failed, "seconds": notes.seconds, "lines": notes.lines(tree / PACKAGE)}
        out.write_text(json.dumps(told))
    finally:
        os._exit(code)
