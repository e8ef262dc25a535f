"""Host time is measured for calls alone and in a chain, forward and backward, with the gradients of the weights."""

from __future__ import annotations

from unittest import mock

import pytest

from benchmarks import host
from benchmarks.operator_cases import HOST
from benchmarks.providers import FUSED, PROVIDERS, Provider

STOCK = PROVIDERS["stock"]


@pytest.mark.parametrize("provider", [STOCK, pytest.param(FUSED, marks=pytest.mark.slow)], ids=lambda one: one.name)
def test_host_time_is_measured_alone_and_in_a_chain(run, provider):
    host.measure(run, [provider])
    assert run.results.left_out == []
    found = {(row.row, row.kind): row for row in run.results.of("host") if row.by == provider.name}
    rows = [name for case in HOST for name in (case.name, f"{case.name} in a chain of 2")]
    assert set(found) == {(row, kind) for row in rows for kind in ("forward", "training")}
    assert all(row.seconds > 0 for row in found.values())


def test_the_backward_computes_the_gradients_of_all_activations_and_weights_of_every_layer(run):
    differentiated = {}

    def build(case):
        function = STOCK.build(case)

        def watched(*arguments):
            for index, argument in enumerate(arguments):
                if argument.requires_grad:
                    seen = differentiated.setdefault(case.operator, set())
                    argument.register_hook(lambda _, index=index, one=argument, seen=seen: seen.add((index, one)))
            return function(*arguments)

        return watched

    host.measure(run, [Provider("watched", build)])
    arguments = {"rms_norm": 2, "add_rms_norm": 3, "norm_add_norm": 4, "qk_norm": 4, "qk_norm_rope": 4, "glu": 2}
    assert {name: {index for index, _ in found} for name, found in differentiated.items()} == {
        operator: set(range(count)) for operator, count in arguments.items()
    }
    weights = {one for index, one in differentiated["rms_norm"] if index == 1}
    assert len(weights) == 1 + 2, "in chains of one and of two"


def test_host_time_is_of_one_call_of_the_operator(run):
    called, divided = [], []

    def build(case):
        function = STOCK.build(case)
        return lambda *arguments: called.append(case) or function(*arguments)

    def host_and_step_time(chain, repeats, device):
        called.clear()
        chain()
        divided.append(len(called) * repeats)
        return 32.0, 32.0

    run.quick, run.budget = False, 600.0
    with mock.patch.multiple(host, host_and_step_time=host_and_step_time, _ROUNDS=(1, 1), HOST=HOST[:1]):
        host.measure(run, [Provider("counted", build)])
    counted = [row for row in run.results.of("host") if row.by == "counted"]
    assert {(row.row, row.seconds) for row in counted} == {
        ("rms_norm 16x1024", 32.0), ("rms_norm 16x1024 in a chain of 32", 1.0),
    }  # fmt: skip
    assert set(divided) == {20, host.CHAIN}
