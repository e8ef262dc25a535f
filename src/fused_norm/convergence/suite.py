"""Runs a plan: for each group of comparisons the stock model, its controls, then every fused twin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from accelerate.utils import broadcast_object_list

from ..spec import FusedNormError
from .call_probe import CallRecord
from .comparison import Comparison, by_baseline
from .mutations import MUTATIONS
from .plan import Plan
from .planting import PlantedFault
from .result_store import ComparisonResult, ResultStore
from .run_record import record_run
from .twin_trainer import TwinTrainer
from .verdict import CALL_BARS


class Progress(Protocol):
    """Receives every run and every result while a plan runs."""

    def run(self, name: str, steps: int) -> Callable[[int, float], object]:
        """Called when a training run begins; returns what is to be called after each step with its index and loss."""

    def done(self, result: ComparisonResult, *, kept: bool) -> object:
        """Called when a comparison has its result: from this run, or ``kept`` from an earlier one."""


def run_plan(plan: Plan, store: ResultStore | None, progress: Progress) -> Iterator[ComparisonResult]:
    """The results of a plan as they come; those that ``store`` has are not run again.

    A model that fails in one comparison leaves the others as they are: its result says what happened.

    Args:
        plan: what to run.
        store: where results are kept; None in all but the first of several processes.
        progress: is told.
    """
    sound = by_baseline(each for each in plan.comparisons if each.mutation is None)
    faulty = by_baseline(each for each in plan.comparisons if each.mutation is not None)
    for baseline, group in (*sound.items(), *faulty.items()):
        # What is missing all processes have to run, so the first one decides.
        found = broadcast_object_list([store.load(each, plan.settings_key(each)) if store else None for each in group])
        for kept in filter(None, found):
            progress.done(kept, kept=True)
            yield kept
        missing = [each for each, kept in zip(group, found, strict=True) if kept is None]
        for result in _run_group(plan, baseline, missing, progress) if missing else ():
            if store and not result.trouble:  # what went wrong is tried again
                store.save(result, plan.settings_key(result.comparison))
            progress.done(result, kept=False)
            yield result


def _run_group(
    plan: Plan, baseline: Comparison, group: list[Comparison], progress: Progress
) -> Iterator[ComparisonResult]:
    options = plan.options(group[0])
    sequences = plan.sequences(baseline)
    trainer = TwinTrainer(plan.recipes[baseline.model], baseline, plan.settings, options, sequences, plan.cpu)
    try:
        sites = trainer.fusible_sites()
        stock = trainer.train_stock(sites, on_step=progress.run("stock", options.steps))
        stock_record = record_run(stock, stock)
        controls = []
        for index in range(plan.settings.controls if stock_record.finite else 0):
            on_step = progress.run(f"control {index}", options.steps)
            controls.append(record_run(trainer.train_control(index, sites, stock, on_step=on_step), stock))
    except Exception as error:
        yield from (ComparisonResult(each, trouble=_message(error)) for each in group)
        return
    for each in group:
        if not stock_record.finite:
            yield ComparisonResult(each, stock=stock_record, fused=stock_record)
            continue
        try:
            # However its steps run, a model's calls are the same; whether one has the fault is asked anew.
            probed = each.execution == "eager" or each.mutation is not None
            calls, fault = trainer.probe_fused_calls(each) if probed else (None, None)
            result = ComparisonResult(each, stock_record, tuple(controls), calls=calls, hidden=_hidden(each, fault))
            seen = calls is not None and result.outcome in ("caught", "hidden")  # and needs no training
            if not seen:
                on_step = progress.run(f"fused {each.mutation or each.feature}", options.steps)
                fused = trainer.train_fused(each, stock, on_step=on_step)
                if fused.not_compiled:
                    result = replace(result, calls=CallRecord(not_seen=fused.not_compiled))
                result = replace(result, fused=record_run(fused, stock))
            yield result
        except Exception as error:
            yield ComparisonResult(each, trouble=_message(error))


def _hidden(comparison: Comparison, fault: PlantedFault | None) -> str | None:
    """The reason why a fault changed hardly a number; None where it did, or should have."""
    if fault is None or comparison.mutation is None or fault.share > CALL_BARS["call_outputs"]:
        return None
    return MUTATIONS[comparison.mutation].hidden or None if fault.calls else "nothing here calls what has it"


def _message(error: Exception) -> str:
    text = " ".join(str(error).split())[:500]
    return text if isinstance(error, FusedNormError) else f"{type(error).__name__}: {text}"
