"""Compile operators in several processes before they are measured, because compiling takes longer than measuring.

Triton and Inductor cache compiled kernels on disk, where the measuring process finds them.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable

import torch

from .benchmark_run import BenchmarkRun, RefusedError
from .kernels import operator_calls, repeatable_backwards
from .operator_cases import DIRECTIONS, OperatorCase
from .providers import FUSED_MODES, PROVIDERS, Provider
from .timing import own_stream

_LONGEST_WAIT = 60.0  # Seconds for one result: a compiler that hangs or dies must not hold up the measurements.

_PROVIDERS_AND_MODES = PROVIDERS | {provider.name: provider for provider in FUSED_MODES}

OperatorTask = tuple[OperatorCase, torch.dtype, Provider]


def precompile(run: BenchmarkRun, tasks: Iterable[OperatorTask], jobs: int) -> None:
    """Run every task once, forward and backward, in ``jobs`` processes; the measurement reports the errors.

    Args:
        run: gives the device and the time left.
        tasks: what will be measured; those of providers that compile nothing or are missing here are passed over.
        jobs: processes; with 0 everything is compiled when it is measured.
    """
    device = run.device
    compiling = [
        (case, dtype, provider.name, str(device))
        for case, dtype, provider in tasks
        if provider.compiles and provider.missing(device) is None
    ]
    if not compiling or jobs < 1 or run.remaining() <= 0:
        return
    run.say(f"precompiling {len(compiling)} operators")
    outcomes: list[str | None] = []
    # Spawned, because a fork would share the CUDA context.
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(compiling))) as pool:
        pending = pool.imap_unordered(_compile, compiling)
        try:
            for _ in compiling:
                outcomes.append(pending.next(min(_LONGEST_WAIT, max(run.remaining(), 0))))
        except multiprocessing.TimeoutError:
            run.say(f"precompiled {len(outcomes)} operators; the rest is compiled when it is measured")
            return
    failures = [failure for failure in outcomes if failure]
    run.say(f"precompiled; {len(failures)} failed{': ' + failures[0] if failures else ''}")


def _compile(arguments: tuple[OperatorCase, torch.dtype, str, str]) -> str | None:
    """Compile one operator, forward and backward, and return the error as text, or None."""
    import torch._inductor.config as inductor_config

    inductor_config.compile_threads = 1  # There are enough processes.
    case, dtype, name, device_name = arguments
    device = torch.device(device_name)
    try:
        with own_stream(device), repeatable_backwards():
            function = _PROVIDERS_AND_MODES[name].build(case)
            inputs = [case.inputs(dtype, device, seed=0)]
            for direction in DIRECTIONS if case.backward else DIRECTIONS[:1]:
                with torch.set_grad_enabled(direction == "backward"):
                    for call in operator_calls(function, direction, inputs, copy_gradients=True):
                        call()
        if device.type != "cpu":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
    except RefusedError:
        return None
    except Exception as error:  # The measurement meets it again and reports it.
        return f"{name} {case.name}: {type(error).__name__}"
    return None
