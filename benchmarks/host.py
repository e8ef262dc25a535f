"""Host time of an operator: the time of small batches, where the GPU waits for Python."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from .benchmark_run import BenchmarkRun
from .kernels import repeatable_backwards
from .operator_cases import HOST, OperatorCase
from .providers import Provider
from .results import Result
from .timing import Sampler, host_and_step_time

CHAIN = 32
"""Calls in a row, each on the result of the one before, as in a model."""

_ALONE = 20
"""Independent calls between two readings of the clock."""

_SECONDS = 0.2
"""For the samples of each provider."""

_ROUNDS = (10, 1000)


def measure(run: BenchmarkRun, providers: Sequence[Provider]) -> None:
    """Measure every case and length of chain, all providers in turns, as far as time allows."""
    lengths = ((1, 1), (2, 1)) if run.quick else ((1, _ALONE), (CHAIN, 1))
    present = run.present(providers, "host time")
    with repeatable_backwards():
        for case in run.in_time(HOST, "host time of {}"):
            for (chain, repeats), kind in itertools.product(lengths, ("forward", "training")):
                row = f"{case.name} in a chain of {chain}" if chain > 1 else case.name
                prepare = partial(_prepare, case, run.device, chain, repeats)
                run.compare(Result("host", row, "", kind), present, prepare, _ROUNDS, _SECONDS)


def _prepare(
    case: OperatorCase, device: torch.device, chain: int, repeats: int, provider: Provider, result: Result
) -> tuple[Result, Sampler]:
    """Make what times a chain of calls: forward without autograd, or forward and backward for ``training``."""
    function = provider.build(case)
    inputs = case.inputs(torch.bfloat16 if device.type != "cpu" else torch.float32, device, seed=0)
    count = len(inputs.arguments) - sum(tensor.dim() == 1 for tensor in inputs.arguments)
    state, weights = inputs.arguments[:count], inputs.arguments[count:]
    layers = [tuple(w.detach().clone().requires_grad_() for w in weights) for _ in range(chain)]
    leaves = (*state, *(weight for layer in layers for weight in layer))
    rotates = case.operator == "qk_norm_rope"

    def forward() -> tuple[Tensor, ...]:
        values = state
        for layer in layers:
            results = function(*values, *layer, *inputs.angles)
            if rotates:  # Back to the layout of its arguments: two views more in everyone's time.
                results = tuple(value.transpose(1, 2) for value in results)
            values = (*results, *values[len(results) :])
        return values[: len(inputs.gradients)]

    gradients = [gradient.transpose(1, 2) if rotates else gradient for gradient in inputs.gradients]

    def without_gradients() -> object:
        with torch.no_grad():
            return forward()

    def train() -> object:
        return torch.autograd.grad(forward(), leaves, gradients, allow_unused=True)

    calls = without_gradients if result.kind == "forward" else train
    for _ in range(3):  # what is compiled, prepared or allocated once
        calls()

    def take() -> float:
        calls()  # what the others have driven out of the processor's caches comes back
        return host_and_step_time(calls, repeats, device)[0] / chain

    return result, Sampler(take, "wall")
