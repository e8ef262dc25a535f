"""Compiles what will be measured in several processes at once: one by one it takes longer than the measurements.

The compilers keep their work on disk, where the measuring process finds it.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable

import torch

from .cases import DIRECTIONS, Case, Op
from .kernels import calls, differentiable_again
from .providers import FUSED_MODES, PROVIDERS, Provider
from .session import Session
from .timing import own_stream

_PATIENCE = 60.0  # Seconds without a result; a compiler that hangs or dies must not hold up the measurements.

_EVERY = PROVIDERS | {provider.name: provider for provider in FUSED_MODES}

Task = tuple[Case, torch.dtype, Provider]


def compile_ahead(session: Session, tasks: Iterable[Task], jobs: int) -> None:
    """Run every task once, forward and backward, in ``jobs`` processes; errors are left to the measuring.

    Args:
        session: where, and for how long.
        tasks: what will be measured; who does not compile, or is missing here, is passed over.
        jobs: processes; with none of them everything is compiled as it is measured.
    """
    device = session.device
    compiling = [
        (case, dtype, provider.name, str(device))
        for case, dtype, provider in tasks
        if provider.compiles and provider.missing(device) is None
    ]
    if not compiling or jobs < 1 or session.remaining() <= 0:
        return
    session.say(f"compiling ahead: {len(compiling)} operations in {jobs} processes")
    outcomes: list[str | None] = []
    # Spawned, because a fork would share the CUDA context.
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(compiling))) as pool:
        pending = pool.imap_unordered(_compile, compiling)
        try:
            for _ in compiling:
                outcomes.append(pending.next(min(_PATIENCE, max(session.remaining(), 0))))
        except multiprocessing.TimeoutError:
            session.say(f"compiled {len(outcomes)} operations ahead; the rest is compiled as it is measured")
            return
    failures = [failure for failure in outcomes if failure]
    session.say(f"compiled ahead; {len(failures)} failed{': ' + failures[0] if failures else ''}")


def _compile(task: tuple[Case, torch.dtype, str, str]) -> str | None:
    """Compile one operation, forward and backward; what went wrong, or None."""
    import torch._inductor.config as inductor_config

    inductor_config.compile_threads = 1  # There are enough processes.
    case, dtype, name, device_name = task
    device = torch.device(device_name)
    try:
        with own_stream(device), differentiable_again():
            op: Op = _EVERY[name].build(case)
            inputs = [case.inputs(dtype, device, seed=0)]
            for direction in DIRECTIONS if case.backward else DIRECTIONS[:1]:
                with torch.set_grad_enabled(direction == "backward"):
                    for call in calls(op, direction, inputs, copy_gradients=True):
                        call()
        if device.type != "cpu":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
    except Exception as error:  # The measuring process meets it again and reports it.
        return f"{name} {case.name}: {type(error).__name__}"
    return None
