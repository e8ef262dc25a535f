"""Trains fused twins with planted faults, one fault at a time, and tells which of them the verdict saw."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from fused_norm.cli.common import interpret_without_gpu
from fused_norm.cli.converge_command import plan_for, tier_for
from fused_norm.convergence.comparison import Comparison
from fused_norm.convergence.fused_calls import FusedCall
from fused_norm.convergence.plan import Plan
from fused_norm.convergence.result_store import ComparisonResult
from fused_norm.convergence.suite import Baseline, Unwatched, message_of, run_baseline, run_fused, train_fused
from fused_norm.convergence.twin_trainer import fused_for
from fused_norm.convergence.verdict import BY_NAME
from fused_norm.patcher import Site

from .faults import FAULTS, Fault
from .planting import PlantedFault

Outcome = Literal["caught", "missed", "hidden", "sound", "invalid"]

_TOGETHER = 24
"""Faults that share one stock run and its controls."""

SOUND = "none"
"""Stands for the fused twin without a fault."""


@dataclass(frozen=True)
class FaultResult:
    """What became of one planted fault.

    Attributes:
        fault: its name.
        outcome: ``caught`` or ``missed`` by the verdict, ``hidden`` where it changes hardly a number, ``sound``
            for a green twin without a fault, else ``invalid``.
        reasons: those of the verdict, or why the fault is hidden.
    """

    fault: str
    outcome: Outcome
    reasons: tuple[str, ...]


def run_faults(plan: Plan, comparison: Comparison, names: Iterable[str]) -> Iterator[FaultResult]:
    """Plant faults in the fused twin of a comparison, one at a time; the first result is that without a fault.

    Args:
        plan: has the model and the settings; its own comparisons are not run.
        comparison: its execution must be that of the faults.
        names: keys of ``FAULTS``.

    Raises:
        FusedNormError: as ``suite.run_baseline``.
    """
    baseline = run_baseline(plan, comparison, Unwatched())
    sound = run_fused(baseline, comparison, Unwatched()).verdict
    yield FaultResult(SOUND, "sound" if sound.status == "green" else "invalid", sound.reasons)
    for name in names:
        try:
            yield _run_fault(baseline, comparison, FAULTS[name])
        except Exception as error:
            yield FaultResult(name, "invalid", (message_of(error),))


def _run_fault(baseline: Baseline, comparison: Comparison, fault: Fault) -> FaultResult:
    state = PlantedFault()

    @contextmanager
    def faulty(model: nn.Module) -> Iterator[Sequence[Site]]:
        nonlocal state
        with fused_for(comparison.feature)(model) as sites, fault.planted(model) as state:
            yield sites

    def some(calls: Sequence[FusedCall]) -> Sequence[FusedCall]:
        """The first call of each kind: a fault is in every call of its operator, or in none."""
        return list({call.kind: call for call in reversed(calls)}.values())[::-1] if state.calls else ()

    calls = baseline.trainer.probe_calls(faulty, calls_wanted=some)
    if state.share <= BY_NAME["call_outputs"].bar:
        hidden = fault.hidden if state.calls else "nothing here calls what has it"
        if hidden:
            return FaultResult(fault.name, "hidden", (hidden,))
    result = ComparisonResult(comparison, baseline.record, baseline.controls, calls=calls)
    if not _is_caught(result):  # what the calls show needs no training
        result = train_fused(baseline, comparison, faulty, calls, Unwatched())
    if _is_caught(result):
        return FaultResult(fault.name, "caught", result.verdict.reasons)
    outcome: Outcome = "missed" if result.verdict.status == "green" else "invalid"
    return FaultResult(fault.name, outcome, result.verdict.reasons)


def _is_caught(result: ComparisonResult) -> bool:
    """Return whether the verdict is red, or sites ran stock code, which makes it invalid."""
    return result.verdict.status == "red" or bool(result.calls and result.calls.not_seen)


def tasks_of(args: argparse.Namespace) -> list[tuple[Comparison, list[str]]]:
    """The comparisons that a command line asks for, with the faults that are planted in each, a few at a time."""
    found = []
    for baseline in dict.fromkeys(each.baseline for each in _plan(args).comparisons if each.execution == "eager"):
        for where in ("eager", "compile"):
            names = [name for name, fault in FAULTS.items() if fault.where == where]
            comparison = replace(baseline, execution=where)
            found += [(comparison, names[at : at + _TOGETHER]) for at in range(0, len(names), _TOGETHER)]
    return found


def run_task(args: argparse.Namespace, comparison: Comparison, names: Sequence[str]) -> list[FaultResult]:
    """``run_faults`` for the plan of a command line, in a process that has only that."""
    return list(run_faults(_plan(args), comparison, names))


def _plan(args: argparse.Namespace) -> Plan:
    device = interpret_without_gpu(args.device)
    return plan_for(args, tier_for(args, device), device)
