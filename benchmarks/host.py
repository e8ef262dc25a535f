"""Host time of an operator: the time of small batches, where the GPU waits for Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .benchmark_run import BenchmarkRun, in_a_line
from .operator_cases import GEMMA, OperatorCase, OperatorFunction, compose_operator
from .operator_timings import repeatable_backwards
from .providers import Provider
from .results import HostResult
from .timing import Timing, host_time

CHAIN = 32
"""Calls in a row, each on the result of the one before, as in a model."""

_ALONE = 20
"""Independent calls between two readings of the clock."""

CASES: tuple[OperatorCase, ...] = (
    OperatorCase("norm", 16, 1024),
    OperatorCase("add", 16, 1024),
    OperatorCase("sandwich", 16, 1024, GEMMA),
    OperatorCase("qk", 4, 128, heads=(4, 2)),
    OperatorCase("rope", 4, 128, heads=(4, 2)),
)
"""Cases so small that the GPU is done long before the host is."""


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def _identity(case: OperatorCase) -> OperatorFunction:
    return compose_operator(case.operator, lambda x, w: _Identity.apply(x), lambda x, r, w: (_Identity.apply(x), r))


IDENTITY = Provider("identity", _identity)
"""A Python autograd function that does nothing, the floor of host times."""


def measure(run: BenchmarkRun, providers: Sequence[Provider]) -> None:
    """Measure every case, provider and length of chain, as far as time allows."""
    with repeatable_backwards():
        for case in CASES:
            for provider in (*providers, *((IDENTITY,) if case.operator == "norm" else ())):
                what = f"host time of {case.operator} by {provider.name}"
                if not run.passes_over(what, provider.missing(run.device)):
                    _measure(run, case, provider, what)
            run.save()


def _measure(run: BenchmarkRun, case: OperatorCase, provider: Provider, what: str) -> None:
    try:
        function = provider.build(case)
        lengths = ((1, _ALONE), (CHAIN, 1)) if not run.quick else ((1, 1), (2, 1))
        found = [_time(run, case, provider, function, chain, repeats) for chain, repeats in lengths]
    except Exception as error:  # Of whatever kind: the others are measured all the same.
        run.leave_out(what, in_a_line(error))
        return
    run.results.host += found
    times = ", ".join(f"{1e6 * r.forward.median:.1f}/{1e6 * r.training.median:.1f} in {r.chain}" for r in found)
    run.say(f"{what}, us a call: {times}")


def _time(
    run: BenchmarkRun, case: OperatorCase, provider: Provider, function: OperatorFunction, chain: int, repeats: int
) -> HostResult:
    device = run.device
    inputs = case.inputs(torch.bfloat16 if device.type != "cpu" else torch.float32, device, seed=0)
    # These operators return as many activations as they take: a call takes the results of the one before.
    state = tuple(gradient.detach().clone().requires_grad_() for gradient in inputs.gradients)
    weights = inputs.arguments[len(state) :]
    layers = [tuple(w.detach().clone().requires_grad_() for w in weights) for _ in range(chain)]
    leaves = (*state, *(weight for layer in layers for weight in layer))

    def forward() -> tuple[Tensor, ...]:
        values = state
        for layer in layers:
            if case.operator == "rope":  # Back to the layout of its arguments: two views more in everyone's time.
                values = tuple(value.transpose(1, 2) for value in values)
            values = function(*values, *layer, *inputs.angles)
        return values

    def train() -> None:
        torch.autograd.grad(forward(), leaves, inputs.gradients, allow_unused=True)

    def seconds_of(chained_calls: Callable[[], object]) -> Timing:
        def repeated() -> None:
            for _ in range(repeats):
                chained_calls()

        return host_time(repeated, chain * repeats, device, seconds=run.seconds(0.1))

    training = seconds_of(train)
    with torch.no_grad():
        return HostResult(case.operator, provider.name, chain, seconds_of(forward), training)
