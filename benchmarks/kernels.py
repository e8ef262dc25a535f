"""GPU time of operators, provider beside provider in turns; results are held against float64, wrong ones not timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor

from fused_norm.kernels.fp8 import Quantized

from .benchmark_run import BenchmarkRun, name_of
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
from .timing import Sampler, input_sets, leaves_cache, memory_over, own_stream, sampler

OperatorCall = Callable[[], Sequence[Tensor]]

_SECONDS = 0.2  # For the samples of each provider.
_ROUNDS = (5, 100)


def measure(
    run: BenchmarkRun, cases: Sequence[OperatorCase], dtypes: Sequence[torch.dtype], providers: Sequence[Provider]
) -> None:
    """Measure every case, dtype of activations and weights, direction and provider, as far as time allows."""
    present = run.present(providers, "kernels")
    with own_stream(run.device), repeatable_backwards():
        for dtype in dtypes:
            for case in run.in_time(cases, f"{{}} {name_of(dtype)}"):
                _measure_case(run, case, dtype, present)


def repeatable_backwards() -> AbstractContextManager[None]:
    """A context in which torch.compile makes backwards that may run more than once after one forward."""
    return functorch_config.patch(donated_buffer=False)


def operator_calls(
    function: OperatorFunction, direction: Direction, sets: Sequence[OperatorInputs], *, copy_gradients: bool = False
) -> list[OperatorCall]:
    """Make the call that is timed, one for each set of inputs; for a backward the forward runs here.

    A forward's call is meant for ``torch.no_grad``. ``copy_gradients``: each backward has copies of its own.
    """
    if direction == "forward":
        return [partial(function, *inputs.detached()) for inputs in sets]
    backwards: list[OperatorCall] = []
    for inputs in sets:
        gradients = [gradient.clone() for gradient in inputs.gradients] if copy_gradients else inputs.gradients
        outputs = function(*inputs.attached())
        backwards.append(partial(torch.autograd.grad, outputs, inputs.arguments, gradients, retain_graph=True))
    return backwards


def _measure_case(run: BenchmarkRun, case: OperatorCase, dtype: torch.dtype, providers: Mapping[str, Provider]) -> None:
    count = input_sets(case.bytes("forward", dtype), run.device)
    sets = [case.inputs(dtype, run.device, seed=seed) for seed in range(count)]
    exact = dict(zip(DIRECTIONS, float64_results(case, sets[0]), strict=True))
    for direction in DIRECTIONS if case.backward else DIRECTIONS[:1]:
        moved = case.bytes(direction, dtype)
        run.measure_copy(moved)
        cold = leaves_cache(moved * len(sets), run.device)
        empty = Result("kernels", case.name, "", direction, name_of(dtype), bytes=moved, cold=cold)
        with torch.set_grad_enabled(direction == "backward"):
            prepare = partial(_prepare, case, sets, exact[direction])
            run.compare(empty, providers, prepare, _ROUNDS, _SECONDS)


def _prepare(
    case: OperatorCase, sets: Sequence[OperatorInputs], exact: Sequence[Tensor], provider: Provider, result: Result
) -> tuple[Result, Sampler | None]:
    """Hold an operator against the exact results; one that is right is captured, and its peak of memory is taken."""
    function, first = provider.build(case), sets[0]
    direction: Direction = "backward" if result.kind == "backward" else "forward"
    calls = operator_calls(function, direction, sets, copy_gradients=provider.overwrites_gradients)
    device, dtype = first.arguments[0].device, first.arguments[0].dtype
    # The memory that is allocated next holds NaN, so that results that are not written are seen to be wrong.
    if device.type != "cpu":
        torch.cuda.empty_cache()  # Else blocks that hold the results of others would be taken first.
    block = torch.full((8 * sum(true.numel() for true in exact),), float("nan"), device=device)
    del block
    result = result.checked(worst_error(calls[0](), exact), tolerance(dtype, case))
    if result.bad:
        return result, None
    captured = sampler(calls, device)
    if case.operator not in provider.overwrites_arguments:  # else its copies of them would count
        result = replace(result, extra_bytes=extra_memory(function, direction, first, device))
    return result, captured


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
    tensors = [tensor for y in results for tensor in ((y.q, y.scale) if isinstance(y, Quantized) else (y,))]
    return peak - sum(size for address, size in _storages(tensors).items() if address not in there)


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The memory that tensors lie in: bytes by address."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
