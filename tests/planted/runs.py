"""Trains fused twins with planted faults, one fault at a time, and tells which of them the verdict saw."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from torch import nn

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
