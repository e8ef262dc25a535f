"""Samples are taken in turns; a ratio is of one round, and its interval holds the median as often as it says."""

from __future__ import annotations

import random
from math import comb

import pytest

from benchmarks.samples import PairedRatio, Timing, in_turns


def test_ratios_are_of_the_same_round():
    base = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    found = PairedRatio.of([1.1 * time for time in base], base)
    assert (found.median, found.low, found.high) == pytest.approx((1.1, 1.1, 1.1))
    assert found.rounds == 7


@pytest.mark.parametrize("rounds", [6, 8, 9, 20, 60])
def test_the_interval_is_the_narrowest_pair_of_samples_with_95_percent(rounds):
    found = PairedRatio.of([float(index) for index in range(1, rounds + 1)], [1.0] * rounds)
    rank = int(found.low)
    assert found.high == rounds + 1 - rank

    def coverage(rank):
        return 1 - 2 * sum(comb(rounds, heads) for heads in range(rank)) / 2**rounds

    assert coverage(rank) >= 0.95 > coverage(rank + 1)


def test_the_interval_holds_the_true_median_as_often_as_it_says():
    draw = random.Random(0)
    held = 0
    for _ in range(1000):
        found = PairedRatio.of([draw.lognormvariate(0, 0.3) for _ in range(20)], [1.0] * 20)
        held += found.low <= 1 <= found.high
    assert 940 <= held <= 980, "95.9 percent for 20 rounds"


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_too_few_rounds_have_no_interval_and_no_verdict(rounds):
    found = PairedRatio.of([9.0] * rounds, [1.0] * rounds)
    assert (found.median, found.low, found.high, found.verdict) == (9.0, None, None, "within noise")


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.9, 0.99, "faster"), (1.01, 1.2, "slower"), (0.99, 1.01, "within noise"), (1.0, 1.2, "within noise")],
)
def test_the_verdict_is_by_the_interval(low, high, verdict):
    assert PairedRatio((low + high) / 2, low, high, 8).verdict == verdict


def test_median_and_quartiles():
    assert Timing.of([3.0, 1.0, 2.0, 5.0, 4.0], "wall") == Timing(3.0, 2.0, 4.0, 5, "wall")
    assert Timing.of([7.0], "wall") == Timing(7.0, 7.0, 7.0, 1, "wall")


def test_every_round_has_each_once_in_an_order_of_its_own_that_repeats():
    def turns():
        taken = []
        samplers = {name: lambda name=name: taken.append(name) or len(taken) for name in "abc"}
        found = in_turns(samplers, rounds=(15, 100), seconds=0, failed=raise_again)
        assert {len(samples) for samples in found.values()} == {15}, "the fewest rounds, whatever the time"
        return [tuple(taken[start : start + 3]) for start in range(0, len(taken), 3)]

    found = turns()
    assert {tuple(sorted(turn)) for turn in found} == {("a", "b", "c")}
    assert len(set(found)) > 2
    assert turns() == found, "processes that share a model agree"


def test_no_more_than_the_most_rounds_are_taken():
    assert in_turns({"a": lambda: 1.0}, rounds=(1, 4), seconds=60, failed=raise_again) == {"a": [1.0] * 4}


def test_what_raises_has_no_more_turns():
    told = []
    later = iter([1.0])
    samplers = {"good": lambda: 1.0, "broken": lambda: next(later)}
    found = in_turns(samplers, rounds=(3, 3), seconds=0, failed=lambda name, error: told.append((name, type(error))))
    assert found == {"good": [1.0] * 3}
    assert told == [("broken", StopIteration)]


def raise_again(name, error):
    raise error
