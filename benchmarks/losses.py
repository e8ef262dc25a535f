"""Time, memory and errors of a vocabulary head with its loss, forward and backward, all implementations in turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from .benchmark_run import BenchmarkRun, name_of
from .loss_cases import LossCase, LossInputs, float64_results, relative_errors
from .loss_providers import FLOORS
from .model_steps import release_memory
from .operator_cases import tolerance
from .providers import Provider
from .results import Result
from .timing import Sampler, long_call_sampler, memory_over

_SECONDS = 1.0  # For the samples of each provider.
_ROUNDS = (7, 100)


def measure(run: BenchmarkRun, cases: Sequence[LossCase], dtype: torch.dtype, providers: Sequence[Provider]) -> None:
    """Measure every case, all of ``LOSS_PROVIDERS`` in turns, as far as time allows; states and weight in ``dtype``."""
    present = run.present(providers, "losses") if cases else {}
    for case in run.in_time(cases if present else (), f"{{}} {name_of(dtype)}"):
        release_memory(run.device)
        inputs = case.inputs(dtype, run.device)
        prepare = partial(_prepare, case, inputs, float64_results(case, inputs))
        empty = Result("losses", case.name, "", "training", name_of(dtype))
        run.compare(empty, present, prepare, _ROUNDS, _SECONDS)


def _prepare(
    case: LossCase, inputs: LossInputs, exact: Sequence[Tensor], provider: Provider, result: Result
) -> tuple[Result, Sampler | None]:
    """Hold loss and gradients against the exact ones; of what is right the peak of memory is taken, then the time."""
    device = inputs.x.device
    release_memory(device)
    call = partial(provider.build(case), inputs)
    if result.by not in FLOORS:
        errors = relative_errors(call(), exact)
        finite = {name: error if math.isfinite(error) else None for name, error in errors.items()}
        detail = f"relative errors {', '.join(f'{name} {error:.1e}' for name, error in errors.items())}"
        result = replace(result, errors=finite).checked(max(errors.values()), tolerance(inputs.x.dtype), detail)
        if result.bad:
            return result, None
    peak, _ = memory_over(call, device)
    return replace(result, extra_bytes=peak), long_call_sampler(call, device)
