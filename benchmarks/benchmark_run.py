"""One run of the benchmarks: its device, its time budget and its results."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch

from .results import Result, Results
from .samples import Timing, in_turns
from .timing import Sampler, copy_sampler, own_stream

logger = logging.getLogger(__name__)

T = TypeVar("T")

LARGE_COPY = 2**29
"""Bytes moved by the copy at both ends of a run, far beyond any L2 cache. In a graph, an H200 copies a gigabyte at
two thirds of this copy's speed."""


@dataclass
class BenchmarkRun:
    """The state that all measurements of one run share.

    Attributes:
        device: where everything is measured.
        results: what was measured so far.
        path: the JSON file, written after each row; None where another process writes it.
        budget: seconds after which nothing new is started; None is no limit.
        quick: take as few samples as possible; the times mean nothing.
        began: when the run began, by ``time.perf_counter``.
    """

    device: torch.device
    results: Results
    path: Path | None
    budget: float | None = None
    quick: bool = False
    began: float = field(default_factory=time.perf_counter)

    def rounds(self, fewest: int, most: int) -> tuple[int, int]:
        """The fewest and the most samples of one measurement: these, or next to none in a quick run."""
        return (1, 2) if self.quick else (fewest, most)

    def seconds(self, usual: float) -> float:
        """The time for one measurement: ``usual`` seconds, none in a quick run, and no more than is left."""
        return 0.0 if self.quick else min(usual, self.remaining())

    def leave_out(self, what: str, why: str) -> None:
        """Add a line to the results on something that is not measured."""
        self.results.left_out.append(f"{what}: {why}")

    def passes_over(self, what: str, why: str | None = None) -> bool:
        """Return whether ``what`` is left out, for the reason ``why`` or for want of time; if so, note it."""
        if why is None and self.remaining() <= 0:
            why = f"after {self.budget:g} s"
        if why is not None:
            self.leave_out(what, why)
        return why is not None

    def remaining(self) -> float:
        """Seconds left of the time budget."""
        return float("inf") if self.budget is None else self.budget - (time.perf_counter() - self.began)

    def save(self) -> None:
        """Write the results so far."""
        if self.path is not None:
            self.results.save(self.path)

    def say(self, text: str) -> None:
        """Print a line of progress."""
        if self.path is not None:
            sys.stderr.write(f"[{time.perf_counter() - self.began:6.1f} s] {text}\n")

    def take_turns(
        self, found: dict[str, Result], samplers: Mapping[str, Callable[[], T]], rounds: tuple[int, int], seconds: float
    ) -> dict[str, list[T]]:
        """Samples of all that never raised, taken in turns; the results in ``found`` of others become failures.

        Args:
            found: by name; the others are not touched.
            samplers: take one sample each.
            rounds: the fewest and the most.
            seconds: after which no round is begun beyond the fewest.
        """

        def failed(name: str, error: Exception) -> None:
            found[name] = with_failure(found[name], error)

        return in_turns(samplers, rounds=self.rounds(*rounds), seconds=self.seconds(seconds), failed=failed)

    def compare(
        self,
        empty: Sequence[Result],
        prepare: Callable[[Result], tuple[Result, Sampler | None]],
        rounds: tuple[int, int],
        seconds: float,
    ) -> dict[str, Result]:
        """Complete results, time those that are right in turns, and keep all of them; also return them, by name.

        Args:
            empty: what is to be measured, by each implementation.
            prepare: adds what is known before anything is timed, and makes the sampler of what is right; may raise.
            rounds: the fewest and the most.
            seconds: for the samples of each.
        """
        ready: dict[str, Sampler] = {}

        def prepared(result: Result) -> Result:
            result, one = prepare(result)
            if one is not None:
                ready[result.by] = one
            return result

        found = {result.by: attempt(result, prepared) for result in empty}
        takes = {name: one.take for name, one in ready.items()}
        for name, samples in self.take_turns(found, takes, rounds, seconds * len(takes)).items():
            found[name] = replace(found[name], timing=Timing.of(samples, ready[name].method))
        self.results.rows += found.values()
        return found

    def measure_copy(self, moved_bytes: int | None = None) -> None:
        """Measure a copy that moves so many bytes, once for each size; without a size the large copy, at every call."""
        row = str(moved_bytes or (2**16 if self.quick else LARGE_COPY))
        if moved_bytes is not None and any(one.row == row for one in self.results.of("copy")):
            return
        with own_stream(self.device):
            one = copy_sampler(int(row), self.device)
            timing = Timing.of([one.take() for _ in range(self.rounds(10, 10)[1])], one.method)
        self.results.rows.append(Result("copy", row, "copy", bytes=int(row), timing=timing))


class RefusedError(Exception):
    """An implementation does not take a case, or a variant does not exist for a model or a step."""


def attempt(result: Result, measure: Callable[[Result], Result]) -> Result:
    """What ``measure`` makes of a result; or the result with its refusal, or with what else it raised."""
    try:
        return measure(result)
    except RefusedError as refusal:
        return replace(result, verdict="refused", detail=str(refusal))
    except Exception as error:  # Of whatever kind: the others are measured all the same.
        return with_failure(result, error)


def with_failure(result: Result, error: Exception) -> Result:
    """A result that says what was raised, and logs it."""
    logger.warning("%s by %s: %s", result.row, result.by, in_a_line(error))
    return replace(result, verdict="failed", detail=in_a_line(error), timing=None)


def in_a_line(error: Exception) -> str:
    """The type and message of an exception as one line of limited length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def name_of(dtype: torch.dtype) -> str:
    """``bfloat16`` of ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")
