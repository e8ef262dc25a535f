"""GPU time of operators, provider beside provider; results are held against float64 first, and wrong ones not timed."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor

from fused_norm.kernels.fp8 import Quantized

from .benchmark_run import BenchmarkRun, in_a_line
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
from .results import KernelResult, Part
from .timing import gpu_time, input_sets, leaves_cache, memory_over, own_stream, profiled_time

logger = logging.getLogger(__name__)

OperatorCall = Callable[[], Sequence[Tensor]]


def measure(
    run: BenchmarkRun,
    part: Part,
    cases: Sequence[OperatorCase],
    dtypes: Sequence[torch.dtype],
    providers: Sequence[Provider],
    *,
    profile: bool = True,
) -> None:
    """Measure every case, dtype, provider and direction, as far as time allows.

    Args:
        run: gives the device and the time left, and takes the results.
        part: the part of the benchmarks that the results belong to.
        cases: in the order of measuring.
        dtypes: of activations and weights.
        providers: those that cannot be measured here are noted as left out.
        profile: take torch.profiler's time as well.
    """
    present = []
    for provider in providers:
        why = provider.missing(run.device)
        if why is None:
            present.append(provider)
        else:
            run.leave_out(provider.name, why)
    with own_stream(run.device), repeatable_backwards():
        for dtype in dtypes:
            for case in cases:
                if not run.out_of_time(f"{case.name} {_name(dtype)}"):
                    _measure_case(run, part, case, dtype, present, profile)
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


def _measure_case(
    run: BenchmarkRun, part: Part, case: OperatorCase, dtype: torch.dtype, providers: Sequence[Provider], profile: bool
) -> None:
    device = run.device
    directions = DIRECTIONS if case.backward else DIRECTIONS[:1]
    for direction in directions:
        run.measure_copy(case.bytes(direction, dtype))
    count = input_sets(case.bytes("forward", dtype), device)
    sets = [case.inputs(dtype, device, seed=seed) for seed in range(count)]
    exact = dict(zip(DIRECTIONS, float64_results(case, sets[0]), strict=True))
    progress = []
    for provider in providers:
        if run.out_of_time(f"{case.name} {_name(dtype)} {provider.name}"):
            continue
        found = [
            _measure(run, part, case, direction, dtype, provider, sets, exact[direction], profile)
            for direction in directions
        ]
        run.results.kernels += found
        times = "/".join(f"{1e6 * r.timing.median:.1f}" if r.timing else r.verdict for r in found)
        progress.append(f"{provider.name} {times}")
    run.say(f"{case.name} {_name(dtype)}, us: {', '.join(progress)}")


def _measure(
    run: BenchmarkRun,
    part: Part,
    case: OperatorCase,
    direction: Direction,
    dtype: torch.dtype,
    provider: Provider,
    sets: Sequence[OperatorInputs],
    exact: Sequence[Tensor],
    profile: bool,
) -> KernelResult:
    device, moved = run.device, case.bytes(direction, dtype)
    result = KernelResult(
        part=part,
        case=case.name,
        group=case.group,
        rows=case.rows,
        width=case.width,
        dtype=_name(dtype),
        provider=provider.name,
        direction=direction,
        bytes=moved,
        cold=leaves_cache(moved * len(sets), device),
        verdict="ok",
    )
    try:
        with torch.set_grad_enabled(direction == "backward"):
            function = provider.build(case)
            calls = operator_calls(function, direction, sets, copy_gradients=provider.overwrites_gradients)
            _poison(exact, device)
            error = worst_error(calls[0](), exact)
            if not error <= (allowed := tolerance(dtype, case)):
                detail = f"relative error {error:.1e}, and {allowed:.1e} is allowed"
                return replace(result, verdict="wrong", detail=detail, error=error if math.isfinite(error) else None)
            result = replace(result, error=error, timing=gpu_time(calls, device, seconds=run.seconds(0.1)))
            if case.operator not in provider.overwrites_arguments:  # The copies that it gets would count.
                result = replace(result, extra_bytes=extra_memory(function, direction, sets[0], device))
            return replace(result, profiled=_profiled(calls, device)) if profile else result
    except provider.refuses as refusal:
        return replace(result, verdict="refused", detail=in_a_line(refusal))
    except Exception as failure:  # Of whatever kind: the others are measured all the same.
        logger.warning("%s %s %s: %s", provider.name, case.name, direction, in_a_line(failure))
        return replace(result, verdict="failed", detail=in_a_line(failure), timing=None)


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


def _profiled(calls: Sequence[OperatorCall], device: torch.device) -> float | None:
    try:
        return profiled_time(calls, device)
    except RuntimeError as error:
        logger.warning("no time from torch.profiler: %s", in_a_line(error))
        return None


def _poison(exact: Sequence[Tensor], device: torch.device) -> None:
    """Fill the memory that is allocated next with NaN, so that results that are not written are seen to be wrong."""
    if device.type != "cpu":
        torch.cuda.empty_cache()  # Else blocks that hold the results of others would be taken first.
    held = torch.full((8 * sum(true.numel() for true in exact),), float("nan"), device=device)
    del held


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
