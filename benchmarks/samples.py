"""Samples that are taken in turns, and what they say: quartiles, and the ratio of two times with its interval."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

Method = Literal["graph", "events", "wall"]
T = TypeVar("T")

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Timing:
    """Time of one call, in seconds.

    Attributes:
        median: over all samples.
        low: the first quartile.
        high: the third quartile.
        samples: the number of samples; each is the mean of a series of calls.
        method: ``graph``: replays of a CUDA graph. ``events``: calls from Python between two CUDA events, which shows
            host time if that is longer. ``wall``: the host's clock.
    """

    median: float
    low: float
    high: float
    samples: int
    method: Method

    @classmethod
    def of(cls, samples: Sequence[float], method: Method) -> Timing:
        """Median and quartiles of ``samples``."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], 1, method)
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high, len(samples), method)


@dataclass(frozen=True)
class PairedRatio:
    """The median of the ratios of a time to a base time in the same round.

    The interval is the order-statistic interval of the median, (r_k, r_(n+1-k)) of the n sorted ratios with the largest
    k for which it holds the true median with at least 95 % probability, whatever the distribution.

    Attributes:
        median: over the rounds.
        low: lower end of the 95 % confidence interval; None if there are too few rounds for one.
        high: upper end of it.
        rounds: how many there were.
    """

    median: float
    low: float | None
    high: float | None
    rounds: int

    @classmethod
    def of(cls, seconds: Sequence[float], base: Sequence[float]) -> PairedRatio:
        """The ratio of ``seconds`` to ``base``, one time each for every round, in the same order."""
        ratios = sorted(time / base_time for time, base_time in zip(seconds, base, strict=True))
        rounds, rank, tail = len(ratios), 0, 1 / 2 ** len(ratios)
        # The largest k with 2 P(B < k) <= 5 %, where B is the number of heads in so many coin tosses.
        while 2 * tail <= 1 - CONFIDENCE and rank < rounds:
            rank += 1
            tail += math.comb(rounds, rank) / 2**rounds
        low, high = (ratios[rank - 1], ratios[-rank]) if rank else (None, None)
        return cls(statistics.median(ratios), low, high, rounds)

    @property
    def interval(self) -> str:
        """The interval in words; empty without one."""
        return "" if self.low is None else f"{self.low:.3f} to {self.high:.3f}"

    @property
    def verdict(self) -> Literal["faster", "slower", "within noise"]:
        """``faster`` or ``slower`` than the base if the interval excludes 1."""
        if self.high is not None and self.high < 1:
            return "faster"
        if self.low is not None and self.low > 1:
            return "slower"
        return "within noise"


def in_turns(
    samplers: Mapping[str, Callable[[], T]],
    *,
    rounds: tuple[int, int],
    seconds: float,
    failed: Callable[[str, Exception], None] | None = None,
) -> dict[str, list[T]]:
    """Take one sample of each in every round, in a freshly shuffled order, so that what drifts drifts for all.

    Args:
        samplers: by name; a call takes a sample.
        rounds: the fewest and the most.
        seconds: after which no round is begun beyond the fewest.
        failed: is told of a sampler that raises, which then has no more turns; if None, it raises.

    Returns:
        The samples of those that never raised, one for each round.
    """
    order = list(samplers)
    samples: dict[str, list[T]] = {name: [] for name in order}
    shuffle = random.Random(0).shuffle  # the same order in every process and every run
    until = time.perf_counter() + seconds
    for done in range(rounds[1]):
        if done >= rounds[0] and time.perf_counter() >= until:
            break
        shuffle(order)
        for name in list(order):
            try:
                samples[name].append(samplers[name]())
            except Exception as error:  # of whatever kind: the others are measured all the same
                if failed is None:
                    raise
                order.remove(name)
                del samples[name]
                failed(name, error)
    return samples
