"""One run of the benchmarks: its device, its time budget and its results."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from .results import RefusedError, Result, Results
from .samples import Timing, in_turns
from .timing import Sampler, copy_sampler, own_stream

if TYPE_CHECKING:
    from .loss_cases import LossCase
    from .operator_cases import OperatorCase
    from .providers import Provider

logger = logging.getLogger(__name__)

T = TypeVar("T")
CaseT = TypeVar("CaseT", "OperatorCase", "LossCase")

LARGE_COPY = 2**29
"""Bytes moved by the copy at both ends of a run, far beyond any L2 cache. In a graph, an H200 copies a gigabyte at
two thirds of this copy's speed."""


@dataclass
class BenchmarkRun:
    """The state that all measurements of one run share.

    Attributes:
        device: where everything is measured.
        results: what was measured so far.
        path: the JSON file, written after each row; None if another process writes it.
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

    def passes_over(self, what: str, why: str | None = None) -> bool:
        """Return whether ``what`` is left out, for the reason ``why`` or for want of time; if so, note it."""
        if why is None and self.remaining() <= 0:
            why = f"after {self.budget:g} s"
        if why is not None:
            self.results.left_out.append(f"{what}: {why}")
        return why is not None

    def in_time(self, cases: Iterable[CaseT], what: str) -> Iterator[CaseT]:
        """Yield cases until the time is spent, and save after each; ``what`` is a format for the names of others."""
        for case in cases:
            if not self.passes_over(what.format(case.name)):
                yield case
                self.save()

    def present(self, providers: Iterable[Provider], part: str) -> dict[str, Provider]:
        """Return the providers that can be measured on this device, by name; the others are noted as left out."""
        whys = [(provider, provider.missing(self.device)) for provider in providers]
        self.results.left_out += [f"{part} by {provider.name}: {why}" for provider, why in whys if why is not None]
        return {provider.name: provider for provider, why in whys if why is None}

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
        self,
        results: dict[str, Result],
        samplers: Mapping[str, Callable[[], T]],
        rounds: tuple[int, int],
        seconds: float,
    ) -> dict[str, list[T]]:
        """Samples of all that never raised, as of ``in_turns``; the ``results`` of others become failures."""

        def failed(name: str, error: Exception) -> None:
            results[name] = with_failure(results[name], error)

        if self.quick:
            rounds, seconds = (1, 2), 0.0
        return in_turns(samplers, rounds=rounds, seconds=min(seconds, self.remaining()), failed=failed)

    def compare(
        self,
        empty: Result,
        providers: Mapping[str, Provider],
        prepare: Callable[[Provider, Result], tuple[Result, Sampler | None]],
        rounds: tuple[int, int],
        seconds: float,
    ) -> None:
        """Complete the result of each implementation, time those that are right in turns, and keep all results.

        Args:
            empty: what is to be measured.
            providers: the implementations, by name.
            prepare: adds what is known before anything is timed, and makes the sampler of what is right; may raise.
            rounds: the fewest and the most.
            seconds: for the samples of each.
        """
        ready: dict[str, Sampler] = {}

        def prepared(result: Result) -> Result:
            result, sampler = prepare(providers[result.by], result)
            if sampler is not None:
                ready[result.by] = sampler
            return result

        results = {name: attempt(replace(empty, by=name), prepared) for name in providers}
        takes = {name: sampler.take for name, sampler in ready.items()}
        for name, samples in self.take_turns(results, takes, rounds, seconds * len(takes)).items():
            results[name] = replace(results[name], timing=Timing.of(samples, ready[name].method))
        self.results.rows += results.values()
        times = (f"{row.by} {1e6 * row.seconds:.1f} us" if row.seconds else f"{row.by} {row.verdict}"
                 for row in results.values())  # fmt: skip
        self.say(f"{' '.join(filter(None, (empty.part, empty.row, empty.dtype, empty.kind)))}: {', '.join(times)}")

    def measure_copy(self, moved_bytes: int | None = None) -> None:
        """Measure a copy that moves so many bytes, once for each size; without a size the large copy, at every call."""
        row = str(moved_bytes or (2**16 if self.quick else LARGE_COPY))
        if moved_bytes is not None and any(copy.row == row for copy in self.results.of("copy")):
            return
        with own_stream(self.device):
            sampler = copy_sampler(int(row), self.device)
            timing = Timing.of([sampler.take() for _ in range(2 if self.quick else 10)], sampler.method)
        self.results.rows.append(Result("copy", row, "copy", bytes=int(row), timing=timing))


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
