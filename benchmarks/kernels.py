"""GPU time of operators, provider beside provider in turns; results are held against float64, wrong ones not timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch._functorch.config as functorch_config
from torch import Tensor

from fused_norm.kernels.fp8 import Quantized

from .benchmark_run import BenchmarkRun, attempt, name_of
from .operator_cases import (
    DIRECTIONS,
    Direction,
    OperatorCase,
    OperatorFunction,
    OperatorInputs,
    float64_results,
    tolerance,
    worst_error,
)
from .providers import Provider
from .results import Result
from .samples import Timing
from .timing import Sampler, input_sets, leaves_cache, memory_over, own_stream, sampler

OperatorCall = Callable[[], Sequence[Tensor]]

_SECONDS = 0.2  # For the samples of each provider.
_ROUNDS = (5, 100)


def measure(
    run: BenchmarkRun,
    cases: Sequence[OperatorCase],
    dtypes: Sequence[torch.dtype],
    providers: Sequence[Provider],
) -> None:
    """Measure every case, dtype, direction and provider, as far as time allows.

    Args:
        run: gives the device and the time left, and takes the results.
        cases: in the order of measuring.
        dtypes: of activations and weights.
        providers: those that cannot be measured here are noted as left out.
    """
    why = {provider.name: provider.missing(run.device) for provider in providers}
    for name, reason in why.items():
        if reason is not None:
            run.leave_out(name, reason)
    present = [provider for provider in providers if why[provider.name] is None]
    with own_stream(run.device), repeatable_backwards():
        for dtype in dtypes:
            for case in cases:
                if not run.passes_over(f"{case.name} {name_of(dtype)}"):
                    _measure_case(run, case, dtype, present)
                    run.save()


def repeatable_backwards() -> AbstractContextManager[None]:
    """A context in which torch.compile makes backwards that may run more than once after one forward."""
    return functorch_config.patch(donated_buffer=False)


def operator_calls(
    function: OperatorFunction, direction: Direction, sets: Sequence[OperatorInputs], *, copy_gradients: bool = False
) -> list[OperatorCall]:
    """Make the call that is timed, one for each set of inputs; for a backward the forward runs here.

    Args:
        function: the operator of a provider.
        direction: a forward's call is meant for ``torch.no_grad``.
        sets: inputs.
        copy_gradients: give each backward its own copies of the gradients.
    """
    if direction == "forward":
        return [partial(function, *inputs.detached()) for inputs in sets]
    backwards: list[OperatorCall] = []
    for inputs in sets:
        gradients = [gradient.clone() for gradient in inputs.gradients] if copy_gradients else inputs.gradients
        outputs = function(*inputs.attached())
        backwards.append(partial(torch.autograd.grad, outputs, inputs.arguments, gradients, retain_graph=True))
    return backwards


class _Ready(NamedTuple):
    """An operator that is right and ready to be timed."""

    provider: Provider
    function: OperatorFunction
    sampler: Sampler


def _measure_case(run: BenchmarkRun, case: OperatorCase, dtype: torch.dtype, providers: Sequence[Provider]) -> None:
    count = input_sets(case.bytes("forward", dtype), run.device)
    sets = [case.inputs(dtype, run.device, seed=seed) for seed in range(count)]
    exact = dict(zip(DIRECTIONS, float64_results(case, sets[0]), strict=True))
    for direction in DIRECTIONS if case.backward else DIRECTIONS[:1]:
        moved = case.bytes(direction, dtype)
        run.measure_copy(moved)
        cold = leaves_cache(moved * len(sets), run.device)
        empty = Result("kernels", case.name, "", direction, name_of(dtype), bytes=moved, cold=cold)
        ready: dict[str, _Ready] = {}
        with torch.set_grad_enabled(direction == "backward"):
            found = {
                one.name: attempt(
                    replace(empty, by=one.name), partial(_prepare, case, one, sets, exact[direction], ready)
                )
                for one in providers
            }
            takes = {name: one.sampler.take for name, one in ready.items()}
            for name, samples in run.take_turns(found, takes, _ROUNDS, _SECONDS * len(takes)).items():
                right = ready[name]
                found[name] = replace(found[name], timing=Timing.of(samples, right.sampler.method))
                found[name] = attempt(found[name], partial(_with_memory, case, right, sets[0]))
        ready.clear()
        run.results.rows += found.values()
        times = (
            f"{name} {1e6 * one.seconds:.1f}" if one.seconds else f"{name} {one.verdict}" for name, one in found.items()
        )
        run.say(f"{case.name} {name_of(dtype)} {direction}, us: {', '.join(times)}")


def _prepare(
    case: OperatorCase,
    provider: Provider,
    sets: Sequence[OperatorInputs],
    exact: Sequence[Tensor],
    ready: dict[str, _Ready],
    result: Result,
) -> Result:
    """Hold an operator against the exact results; one that is right is captured and goes into ``ready``."""
    function, (first, *_) = provider.build(case), sets
    direction = _direction(result)
    calls = operator_calls(function, direction, sets, copy_gradients=provider.overwrites_gradients)
    device, dtype = first.arguments[0].device, first.arguments[0].dtype
    _poison(exact, device)
    error = worst_error(calls[0](), exact)
    result = replace(result, error=error if math.isfinite(error) else None)
    if not error <= (allowed := tolerance(dtype, case)):
        detail = f"relative error {error:.1e}, and {allowed:.1e} is allowed"
        return replace(result, verdict="wrong", detail=detail)
    ready[provider.name] = _Ready(provider, function, sampler(calls, device))
    return result


def _with_memory(case: OperatorCase, ready: _Ready, inputs: OperatorInputs, result: Result) -> Result:
    """The result with its peak of memory; without for those that get copies of their arguments, which would count."""
    if case.operator in ready.provider.overwrites_arguments:
        return result
    extra = extra_memory(ready.function, _direction(result), inputs, inputs.arguments[0].device)
    return replace(result, extra_bytes=extra)


def _direction(result: Result) -> Direction:
    return "backward" if result.kind == "backward" else "forward"


def extra_memory(function: OperatorFunction, direction: Direction, inputs: OperatorInputs, device: torch.device) -> int:
    """The peak of memory beyond inputs and outputs, in bytes; of a backward, that of its forward and itself together.

    Results that lie in what was there before, as those of an operator in place, are no new outputs.
    """
    gradients = [gradient.clone() for gradient in inputs.gradients]  # Some write over them.

    def call() -> tuple[Any, ...]:
        if direction == "forward":
            return function(*inputs.detached())
        outputs = function(*inputs.attached())
        return *outputs, *torch.autograd.grad(outputs, inputs.arguments, gradients)

    peak, results = memory_over(call, device)
    there = _storages((*inputs.attached(), *gradients))
    tensors = [one for result in results for one in _tensors_of(result)]
    return peak - sum(size for address, size in _storages(tensors).items() if address not in there)


def _tensors_of(result: Tensor | Quantized) -> tuple[Tensor, ...]:
    return (result.q, result.scale) if isinstance(result, Quantized) else (result,)


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The memory that tensors lie in: bytes by address."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _poison(exact: Sequence[Tensor], device: torch.device) -> None:
    """Fill the memory that is allocated next with NaN, so that results that are not written are seen to be wrong."""
    if device.type != "cpu":
        torch.cuda.empty_cache()  # Else blocks that hold the results of others would be taken first.
    held = torch.full((8 * sum(true.numel() for true in exact),), float("nan"), device=device)
    del held
