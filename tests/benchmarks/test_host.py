"""Host time is measured for calls alone and in a chain, forward and backward, with the gradients of the weights."""

from unittest import mock

import pytest

from benchmarks import host
from benchmarks.operator_cases import HOST
from benchmarks.providers import FUSED, PROVIDERS, Provider

STOCK = PROVIDERS["stock"]
ARGUMENTS = {"rms_norm": 2, "add_rms_norm": 3, "norm_add_norm": 4, "qk_norm": 4, "qk_norm_rope": 4, "glu": 2}


@pytest.mark.parametrize(
    "provider", [STOCK, pytest.param(FUSED, marks=pytest.mark.slow)], ids=lambda provider: provider.name
)
def test_calls_are_timed_alone_and_in_a_chain_with_the_gradients_of_every_layer(run, provider):
    differentiated = {}

    def build(case):
        function = provider.build(case)

        def watched(*arguments):
            for index, argument in enumerate(arguments):
                if argument.requires_grad:
                    gradients = differentiated.setdefault(case.operator, set())
                    argument.register_hook(
                        lambda _, index=index, x=argument, gradients=gradients: gradients.add((index, x))
                    )
            return function(*arguments)

        return watched

    host.measure(run, [Provider("watched", build)])
    assert run.results.left_out == []
    rows = {(row.row, row.kind) for row in run.results.of("host") if row.seconds > 0}
    names = [name for case in HOST for name in (case.name, f"{case.name} in a chain of 2")]
    assert rows == {(name, kind) for name in names for kind in ("forward", "training")}
    indices = {operator: {index for index, _ in gradients} for operator, gradients in differentiated.items()}
    assert indices == {operator: set(range(count)) for operator, count in ARGUMENTS.items()}
    weights = {x for index, x in differentiated["rms_norm"] if index == 1}
    assert len(weights) == 1 + 2, "in chains of one and of two"


def test_host_time_is_of_one_call_of_the_operator(run):
    calls, divisors = [], []

    def build(case):
        function = STOCK.build(case)
        return lambda *arguments: calls.append(case) or function(*arguments)

    def host_and_step_time(chain, repeats, device):
        calls.clear()
        chain()
        divisors.append(len(calls) * repeats)
        return 32.0, 32.0

    run.quick, run.budget = False, 600.0
    with mock.patch.multiple(host, host_and_step_time=host_and_step_time, _ROUNDS=(1, 1), HOST=HOST[:1]):
        host.measure(run, [Provider("counted", build)])
    times = {(row.row, row.seconds) for row in run.results.of("host")}
    assert times == {("rms_norm 16x1024", 32.0), ("rms_norm 16x1024 in a chain of 32", 1.0)}
    assert set(divisors) == {20, host.CHAIN}
