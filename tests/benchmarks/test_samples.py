"""Samples are taken in turns; a ratio belongs to a round, and its interval has the stated coverage of the median."""

from math import comb

import pytest

from benchmarks.samples import PairedRatio, in_turns


@pytest.mark.parametrize("rounds", [6, 9, 20])
def test_the_interval_is_the_narrowest_pair_of_samples_with_95_percent(rounds):
    ratio = PairedRatio.of([float(index) for index in range(1, rounds + 1)], [1.0] * rounds)
    rank = int(ratio.low)
    assert ratio.high == rounds + 1 - rank

    def coverage(rank):
        return 1 - 2 * sum(comb(rounds, heads) for heads in range(rank)) / 2**rounds

    assert coverage(rank) >= 0.95 > coverage(rank + 1)


def test_every_round_has_each_once_in_an_order_of_its_own_that_repeats_until_it_raises():
    def turns():
        names, errors = [], []
        samplers = {name: lambda name=name: names.append(name) or 1 // (len(names) != 7) for name in "abc"}
        samples = in_turns(samplers, rounds=(15, 100), seconds=0, failed=lambda *error: errors.append(error))
        ((broken, error),) = errors
        assert isinstance(error, ZeroDivisionError)
        assert {name: len(of_one) for name, of_one in samples.items()} == dict.fromkeys({*"abc"} - {broken}, 15)
        rounds = [tuple(names[start : start + 3]) for start in (0, 3, 6)]
        rounds += [tuple(names[start : start + 2]) for start in range(9, len(names), 2)]
        assert [sorted(turn) for turn in rounds] == [[*"abc"]] * 3 + [sorted(samples)] * 12
        return rounds

    first = turns()
    assert len(set(first[3:])) > 1
    assert turns() == first, "processes that share a model agree"
    assert in_turns({"a": lambda: 1.0}, rounds=(1, 4), seconds=60, failed=None) == {"a": [1.0] * 4}, "the most rounds"
