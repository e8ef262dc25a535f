"""Trains fused models with planted faults, one fault at a time, and tells which of them the verdict saw."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from fused_norm.cli.common import interpret_without_gpu
from fused_norm.cli.converge_command import plan_for
from fused_norm.convergence.call_checks import CallRecord, calls_of_step, compare
from fused_norm.convergence.comparison import EXECUTIONS, LORA, PRECISIONS, SECOND_RUNS, Comparison, Progress
from fused_norm.convergence.fused_calls import FusedCall, sites_not_seen
from fused_norm.convergence.paired_runs import ModelChange, PairedRuns, fused_for
from fused_norm.convergence.plan import Plan
from fused_norm.convergence.report_claims import claims_not_kept
from fused_norm.convergence.suite import Baseline, message_of, run_baseline, run_fused, train_fused
from fused_norm.convergence.verdict import BY_NAME, ComparisonResult
from fused_norm.model_configs import FAMILIES
from fused_norm.patcher import Site

from .faults import FAULTS, NO_NORM, ROUNDINGS, Fault
from .planting import PlantedFault

Outcome = Literal["caught", "missed", "hidden", "sound", "invalid"]

_TOGETHER = 24
"""Number of faults that share one stock run and its controls."""

_MADE_AGAIN = ("lora_linear", "lora_linear_4bit", "linear_cross_entropy")
"""The operators whose calls are repeated in executions of their own."""

_EXECUTION_OF = {"sites": "eager", "consumers": "eager"}
"""The execution for faults that no execution of the suite has to itself."""

SOUND = "none"
"""The name of the fused model without a fault."""


@dataclass(frozen=True)
class FaultResult:
    """What became of one planted fault.

    Attributes:
        fault: its name.
        outcome: ``caught`` or ``missed`` by the verdict, ``hidden`` if it changes hardly a number, ``sound``
            for a green run without a fault, else ``invalid``.
        reasons: those of the verdict, or why the fault is hidden.
    """

    fault: str
    outcome: Outcome
    reasons: tuple[str, ...]


def run_faults(plan: Plan, comparison: Comparison, names: Iterable[str]) -> Iterator[FaultResult]:
    """Plant faults in the fused model of a comparison, one at a time; the first result is that without a fault.

    Args:
        plan: has the model and the settings; its own comparisons are not run.
        comparison: its execution must be that of the faults.
        names: keys of ``FAULTS``.

    Raises:
        FusedNormError: as ``suite.run_baseline``.
    """
    baseline = run_baseline(plan, comparison.baseline, Progress())
    sound = run_fused(baseline, comparison, Progress()).verdict
    yield FaultResult(SOUND, "sound" if sound.status == "green" else "invalid", sound.reasons)
    checks = _Checks(baseline.trainer_of(comparison))
    for name in names:
        try:
            yield _run_fault(baseline, comparison, checks, FAULTS[name])
        except Exception as error:
            yield FaultResult(name, "invalid", (message_of(error),))


class _Checks:
    """Looks for planted faults before a model is trained.

    One call of each kind is kept from a step, and the calls of a fault's operator are repeated with the fault, which is
    in all of these calls or in none. Calls in fp16 show faults that are lost in the roundings of bf16.
    """

    def __init__(self, trainer: PairedRuns) -> None:
        self._trainer = trainer
        self._fused = fused_for(trainer.comparison.feature)
        self._kept: dict[bool, tuple[nn.Module, list[FusedCall]]] = {}

    def _calls(self, half: bool) -> tuple[nn.Module, list[FusedCall]]:
        if half not in self._kept:
            model, tokens, mixed = self._trainer.checked_model()
            with self._fused(model.half() if half else model):
                calls = calls_of_step(model, tokens, mixed=mixed)
            self._kept[half] = model, list({call.kind: call for call in reversed(calls)}.values())
        return self._kept[half]

    def records(self, fault: Fault, state: PlantedFault) -> Iterator[CallRecord]:
        """Yield the records of a model with this fault, the cheapest first; ``state`` counts what it has changed."""
        precision = PRECISIONS[self._trainer.comparison.precision]
        if fault.where == "eager" or fault.operator in _MADE_AGAIN:
            for half in (False, True) if precision.weights == "bfloat16" else (False,):
                model, calls = self._calls(half)
                record = CallRecord()
                with fault.planted(model) as planted:
                    # The norm with and without a rotation is one operator.
                    own_calls = [c for c in calls if fault.operator in {op.removesuffix("_rope") for op in c.operators}]
                    compare(record, model, own_calls, mixed=precision.mixed)
                state.add(planted)
                yield record
        elif fault.where in ("sites", "compile"):
            model, tokens, mixed = self._trainer.checked_model()
            with self._fused(model) as sites, fault.planted(model) as planted:
                calls = calls_of_step(model, tokens, mixed=mixed)
                not_done = claims_not_kept(model, sites, calls, tokens, mixed=mixed)
                record = CallRecord(not_seen=sites_not_seen(sites, calls), not_done=not_done)
            state.add(planted)
            yield record
        elif fault.where == "consumers":
            yield CallRecord(
                bits=self._trainer.check_bits(faulty(self._trainer.comparison, fault, state), consumers=False)
            )
        elif fault.where in (*SECOND_RUNS, *LORA, "loss"):
            record = self._trainer.check(faulty(self._trainer.comparison, fault, state))
            assert record is not None
            yield record


def faulty(comparison: Comparison, fault: Fault, state: PlantedFault) -> ModelChange:
    """Fuse the model of a comparison with a fault in it; ``state`` counts what it has changed."""

    @contextmanager
    def fused_with_fault(model: nn.Module) -> Iterator[Sequence[Site]]:
        with fused_for(comparison.feature)(model) as sites, fault.planted(model) as planted:
            yield sites
        state.add(planted)

    return fused_with_fault


def _run_fault(baseline: Baseline, comparison: Comparison, checks: _Checks, fault: Fault) -> FaultResult:
    state = PlantedFault()
    calls = CallRecord()
    for calls in checks.records(fault, state):
        result = ComparisonResult(comparison, baseline.record, baseline.controls, calls=calls)
        if _is_caught(result):  # no training is needed if one step shows it
            return FaultResult(fault.name, "caught", result.verdict.reasons)
    if fault.hidden == ROUNDINGS and not calls.bits:
        return FaultResult(fault.name, "hidden", (fault.hidden,))
    family = FAMILIES.get(comparison.model)
    if fault.hidden == NO_NORM and family is not None and {*family.layer_norms} <= {*family.sandwich_norms}:
        return FaultResult(fault.name, "hidden", (fault.hidden,))
    is_checked = bool(calls.bits) if fault.where == "consumers" else fault.where != "sites"
    if fault.where == "loss" and not state.calls:  # a repeated call has its labels
        is_checked = False
    if is_checked and state.share <= BY_NAME["call_outputs"].bar:
        hidden = fault.hidden if state.calls else "nothing here calls what has it"
        if hidden:
            return FaultResult(fault.name, "hidden", (hidden,))
    result = train_fused(baseline, comparison, faulty(comparison, fault, state), calls, Progress())
    if not state.calls:
        return FaultResult(fault.name, "hidden", ("nothing here calls what has it",))
    if _is_caught(result):
        return FaultResult(fault.name, "caught", result.verdict.reasons)
    outcome: Outcome = "missed" if result.verdict.status == "green" else "invalid"
    return FaultResult(fault.name, outcome, result.verdict.reasons)


def _is_caught(result: ComparisonResult) -> bool:
    """Return whether the verdict is red, or sites did not do what the report says, which makes it invalid."""
    calls = result.calls
    return result.verdict.status == "red" or bool(calls and (calls.not_seen or calls.not_done))


def tasks_of(args: argparse.Namespace) -> list[tuple[Comparison, list[str]]]:
    """Return the comparisons of a command line with the faults that are planted in each, a few at a time."""
    tasks = []
    plan = plan_for(args, interpret_without_gpu(args.device))
    eager = [comparison for comparison in plan.comparisons if comparison.execution == "eager"]
    for baseline in dict.fromkeys(comparison.baseline for comparison in eager):
        for execution in EXECUTIONS:
            names = [name for name, fault in FAULTS.items() if _EXECUTION_OF.get(fault.where, fault.where) == execution]
            comparison = replace(baseline, execution=execution)
            comparison = replace(comparison, precision=precision_of(comparison))
            tasks += [(comparison, names[at : at + _TOGETHER]) for at in range(0, len(names), _TOGETHER)]
    return tasks


def precision_of(comparison: Comparison) -> str:
    """Return the precision in which the faults of a comparison's execution are planted: its own if all show them."""
    if comparison.execution in LORA:  # autocast undoes their casts
        return "mixed"
    if comparison.execution == "loss" and comparison.precision == "fp32":  # fp32 rounds nothing here
        return "bf16"
    # In 16 bits one percent of a gradient is at the limit of what compiled code, which has no calls, shows.
    return "fp32" if comparison.execution == "compile" else comparison.precision


def run_task(args: argparse.Namespace, comparison: Comparison, names: Sequence[str]) -> list[FaultResult]:
    """Call ``run_faults`` for the plan of a command line, in a process of its own."""
    return list(run_faults(plan_for(args, interpret_without_gpu(args.device)), comparison, names))
