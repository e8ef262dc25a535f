"""Time, memory and errors of a vocabulary head with its loss, forward and backward, all implementations in turns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from .benchmark_run import BenchmarkRun, name_of
from .loss_cases import LossCase, LossInputs, float64_results, relative_errors
from .loss_providers import PRODUCTS
from .model_steps import release_memory
from .operator_cases import tolerance
from .providers import Provider
from .results import Result
from .timing import Sampler, long_call_sampler, memory_over

_SECONDS = 1.0  # For the samples of each provider.
_ROUNDS = (7, 100)


def measure(run: BenchmarkRun, cases: Sequence[LossCase], dtype: torch.dtype, providers: Sequence[Provider]) -> None:
    """Measure every case, all providers in turns, as far as time allows.

    Args:
        run: gives the device and the time left, and takes the results.
        cases: in the order of measuring.
        dtype: of hidden states and weight.
        providers: of ``LOSS_PROVIDERS``; those that cannot be measured here are noted as left out.
    """
    why = {provider.name: provider.missing(run.device) for provider in providers}
    for name, reason in why.items():
        if reason is not None and cases:
            run.leave_out(f"losses by {name}", reason)
    present = {provider.name: provider for provider in providers if why[provider.name] is None}
    for case in cases if present else ():
        if not run.passes_over(f"{case.name} {name_of(dtype)}"):
            _measure_case(run, case, dtype, present)
            run.save()


def _measure_case(run: BenchmarkRun, case: LossCase, dtype: torch.dtype, providers: Mapping[str, Provider]) -> None:
    release_memory(run.device)
    inputs = case.inputs(dtype, run.device)
    prepare = partial(_prepare, case, providers, inputs, float64_results(case, inputs))
    empty = Result("losses", case.name, "", "training", name_of(dtype))
    found = run.compare([replace(empty, by=name) for name in providers], prepare, _ROUNDS, _SECONDS)
    times = (
        f"{name} {1e3 * one.seconds:.1f}" if one.seconds else f"{name} {one.verdict}" for name, one in found.items()
    )
    run.say(f"{case.name} {name_of(dtype)}, ms: {', '.join(times)}")


def _prepare(
    case: LossCase, providers: Mapping[str, Provider], inputs: LossInputs, exact: Sequence[Tensor], result: Result
) -> tuple[Result, Sampler | None]:
    """Hold loss and gradients against the exact ones; of what is right the peak of memory is taken, then the time."""
    device = inputs.x.device
    release_memory(device)
    call = partial(providers[result.by].build(case), inputs)
    if result.by != PRODUCTS.name:
        errors = relative_errors(call(), exact)
        worst = max(errors.values(), key=lambda error: error if math.isfinite(error) else math.inf)
        finite = {name: error if math.isfinite(error) else None for name, error in errors.items()}
        result = replace(result, errors=finite, error=worst if math.isfinite(worst) else None)
        if not worst <= (allowed := tolerance(inputs.x.dtype)):
            detail = f"relative errors {', '.join(f'{name} {error:.1e}' for name, error in errors.items())}"
            return replace(result, verdict="wrong", detail=f"{detail}, and {allowed:.1e} is allowed"), None
    peak, _ = memory_over(call, device)
    return replace(result, extra_bytes=peak), long_call_sampler(call, device)
