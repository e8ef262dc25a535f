"""Host time is measured for calls alone and in a chain, forward and backward, with the gradients of the weights."""

from __future__ import annotations

import itertools

import pytest

from benchmarks import host
from benchmarks.providers import FUSED, PROVIDERS, Provider
from benchmarks.timing import Timing

STOCK = PROVIDERS["stock"]


@pytest.mark.parametrize("provider", [STOCK, pytest.param(FUSED, marks=pytest.mark.slow)], ids=lambda one: one.name)
def test_host_time_is_measured_alone_and_in_a_chain(run, provider):
    host.measure(run, [provider])
    assert run.results.left_out == []
    found = {(row.operator, row.provider, row.chain) for row in run.results.host}
    every = itertools.product(("norm", "add", "sandwich", "qk", "rope"), (provider.name,), (1, 2))
    assert set(every) <= found
    assert ("norm", "identity", 1) in found
    timed = [row for row in run.results.host if row.provider == provider.name]
    assert all(row.training.median > row.forward.median > 0 for row in timed if provider is STOCK)


def test_the_backward_computes_the_gradients_of_activations_and_weights(run):
    differentiated = {}

    def build(case):
        function = STOCK.build(case)

        def watched(*arguments):
            for index, argument in enumerate(arguments):
                if argument.requires_grad:
                    argument.register_hook(lambda gradient, index=index: differentiated[case.operator].add(index))
            return function(*arguments)

        differentiated[case.operator] = set()
        return watched

    host.measure(run, [Provider("watched", build)])
    arguments = {"norm": 2, "add": 3, "sandwich": 4, "qk": 4, "rope": 4}
    assert differentiated == {operator: set(range(count)) for operator, count in arguments.items()}


def test_every_layer_of_a_chain_has_weights_of_its_own_and_their_gradients(run):
    differentiated = []

    def build(case):
        function = STOCK.build(case)

        def watched(*arguments):
            weight = arguments[-1]
            if case.operator == "norm" and weight.requires_grad:
                weight.register_hook(lambda gradient: differentiated.append(weight))
            return function(*arguments)

        return watched

    host.measure(run, [Provider("watched", build)])
    assert len(set(differentiated)) == 1 + 2, "in chains of one and of two"


def test_host_time_is_of_one_call_of_the_operator(run, monkeypatch):
    called = []

    def build(case):
        function = STOCK.build(case)
        return lambda *arguments: called.append(case) or function(*arguments)

    def host_time(repeated, calls, device, *, seconds):
        called.clear()
        repeated()
        assert len(called) == calls
        divisors.append(calls)
        return Timing.of([1.0], "wall")

    divisors = []
    monkeypatch.setattr(host, "host_time", host_time)
    run.quick = False
    monkeypatch.setattr(host, "IDENTITY", Provider("counted too", build))
    host.measure(run, [Provider("counted", build)])
    assert run.results.left_out == []
    assert set(divisors) == {20, host.CHAIN}
