"""One run of the benchmarks: where, for how long, and where its results go."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .results import CopyResult, Results
from .timing import copy_time, own_stream

LARGE_COPY = 2**29
"""Bytes moved by the copy at both ends of a run, far beyond any L2. Captured in a graph, an H200 copies a gigabyte at
two thirds of the speed that it copies this much with."""


@dataclass
class Session:
    """What all measurements of a run share.

    Attributes:
        device: where to measure.
        results: filled as it goes.
        path: the JSON file, written after each row.
        say: takes a line of progress.
        budget: seconds after which nothing new is started; None is no limit.
        quick: tiny sizes and next to no samples.
    """

    device: torch.device
    results: Results
    path: Path
    say: Callable[[str], None]
    budget: float | None = None
    quick: bool = False
    began: float = field(default_factory=time.perf_counter)

    def seconds(self, usual: float) -> float:
        """How long to measure one thing that usually takes ``usual`` seconds."""
        return 0.002 if self.quick else usual

    def leave_out(self, what: str, why: str) -> None:
        """Note what is not measured."""
        self.results.left_out.append(f"{what}: {why}")

    def out_of_time(self, what: str) -> bool:
        """Whether ``what`` must be left out, which is noted then."""
        if self.remaining() > 0:
            return False
        self.leave_out(what, f"after {self.budget:g} s")
        return True

    def remaining(self) -> float:
        """Seconds left."""
        return float("inf") if self.budget is None else self.budget - (time.perf_counter() - self.began)

    def save(self) -> None:
        """Write what there is."""
        self.results.save(self.path)

    def measure_copy(self, moved_bytes: int | None = None) -> None:
        """Measure a copy of so many bytes unless that was done; without a size the large one, each time."""
        if moved_bytes is None:
            moved_bytes = 2**16 if self.quick else LARGE_COPY
        elif self.results.copy_of(moved_bytes):
            return
        with own_stream(self.device):
            timing = copy_time(moved_bytes, self.device, seconds=self.seconds(0.05))
        self.results.copies.append(CopyResult(moved_bytes, timing))


def in_a_line(error: Exception) -> str:
    """An exception, of whatever length, as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
