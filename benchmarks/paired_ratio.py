"""The ratio of two times that were measured in turns, with a confidence interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

CONFIDENCE = 0.95


@dataclass(frozen=True)
class PairedRatio:
    """The median of the ratios of a time to a base time in the same round.

    The interval is the order-statistic interval of the median, (r_k, r_(n+1-k)) of the n sorted ratios with the largest
    k for which it holds the true median with at least 95 % probability, whatever the distribution.

    Attributes:
        median: over the rounds.
        low: lower end of the 95 % confidence interval; None where there are too few rounds for one.
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
        rank = _interval_rank(len(ratios))
        low, high = (ratios[rank - 1], ratios[-rank]) if rank else (None, None)
        return cls(statistics.median(ratios), low, high, len(ratios))

    @property
    def verdict(self) -> Literal["faster", "slower", "within noise"]:
        """``faster`` or ``slower`` than the base where the interval excludes 1."""
        if self.high is not None and self.high < 1:
            return "faster"
        if self.low is not None and self.low > 1:
            return "slower"
        return "within noise"


def _interval_rank(rounds: int) -> int:
    """The largest k with 2 P(B < k) <= 5 %, where B is the number of heads in ``rounds`` coin tosses."""
    rank, tail = 0, 0.0
    while True:
        tail += math.comb(rounds, rank) / 2**rounds
        if 2 * tail > 1 - CONFIDENCE or rank >= rounds:
            return rank
        rank += 1
