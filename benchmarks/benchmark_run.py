"""One run of the benchmarks: its device, its time budget and its results."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .results import CopyResult, Results
from .timing import copy_time, own_stream

LARGE_COPY = 2**29
"""Bytes moved by the copy at both ends of a run, far beyond any L2 cache. In a graph, an H200 copies a gigabyte at
two thirds of this copy's speed."""


@dataclass
class BenchmarkRun:
    """The state that all measurements of one run share.

    Attributes:
        device: where everything is measured.
        results: what was measured so far.
        path: the JSON file, written after each row.
        say: prints a line of progress.
        budget: seconds after which nothing new is started; None is no limit.
        quick: take as few samples as possible; the times mean nothing.
        began: when the run began, by ``time.perf_counter``.
    """

    device: torch.device
    results: Results
    path: Path
    say: Callable[[str], None]
    budget: float | None = None
    quick: bool = False
    began: float = field(default_factory=time.perf_counter)

    def seconds(self, usual: float) -> float:
        """The time for one measurement: ``usual`` seconds, or next to none in a quick run."""
        return 0.002 if self.quick else usual

    def leave_out(self, what: str, why: str) -> None:
        """Add a line to the results on something that is not measured."""
        self.results.left_out.append(f"{what}: {why}")

    def out_of_time(self, what: str) -> bool:
        """Return whether the time budget is used up; if so, note that ``what`` was left out."""
        if self.remaining() > 0:
            return False
        self.leave_out(what, f"after {self.budget:g} s")
        return True

    def passes_over(self, what: str, why: str | None) -> bool:
        """Return whether ``what`` is left out, for the reason ``why`` or for want of time; if so, note it."""
        if why is None:
            return self.out_of_time(what)
        self.leave_out(what, why)
        return True

    def remaining(self) -> float:
        """Seconds left of the time budget."""
        return float("inf") if self.budget is None else self.budget - (time.perf_counter() - self.began)

    def save(self) -> None:
        """Write the results so far."""
        self.results.save(self.path)

    def measure_copy(self, moved_bytes: int | None = None) -> None:
        """Measure a copy that moves so many bytes, once for each size; without a size the large copy, at every call."""
        if moved_bytes is None:
            moved_bytes = 2**16 if self.quick else LARGE_COPY
        elif self.results.copy_of(moved_bytes):
            return
        with own_stream(self.device):
            timing = copy_time(moved_bytes, self.device, seconds=self.seconds(0.05))
        self.results.copies.append(CopyResult(moved_bytes, timing))


def in_a_line(error: Exception) -> str:
    """The type and message of an exception as one line of limited length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
