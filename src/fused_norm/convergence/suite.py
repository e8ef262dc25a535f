"""Runs a plan: for each group of comparisons the stock model, its controls, then every fused model."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace

from accelerate.utils import broadcast_object_list

from ..spec import FusedNormError
from .call_checks import CallRecord
from .comparison import Comparison, Progress, by_baseline
from .paired_runs import ModelChange, PairedRuns, fused_for
from .plan import Plan
from .result_store import ComparisonResult, ResultStore
from .run_record import RunRecord, RunTensors, record_run

Group = Sequence[Comparison]
"""Comparisons that share their stock and control runs."""


def run_groups(plan: Plan, groups: Sequence[Group], progress: Progress) -> Iterator[ComparisonResult]:
    """The results of a plan's comparisons as they come, in this process.

    A model that fails in one comparison leaves the others as they are: its result says what happened.
    """
    for group in groups:
        try:
            baseline = run_baseline(plan, group[0].baseline, progress)
        except Exception as error:
            yield from (ComparisonResult(each, error=message_of(error)) for each in group)
            continue
        for each in group:
            try:
                yield run_fused(baseline, each, progress)
            except Exception as error:
                yield ComparisonResult(each, error=message_of(error))


def run_groups_in_processes(plan: Plan, jobs: int, groups: Sequence[Group]) -> Iterator[ComparisonResult]:
    """The results of a plan's comparisons as they come, from ``jobs`` processes."""
    # A process that shares the cores with others has one thread.
    for variable in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(variable, "1")
    spawn = multiprocessing.get_context("spawn")
    longest_first = sorted(groups, key=lambda group: (group[0].execution != "compile", -len(group)))
    with ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        try:
            # Ctrl-C goes to all processes, and only this one is to answer it: the others inherit that they do not.
            answer = signal.signal(signal.SIGINT, signal.SIG_IGN)
            tasks = {pool.submit(_run_group, plan, group): group for group in longest_first}
            signal.signal(signal.SIGINT, answer)
            for done in as_completed(tasks):
                try:
                    yield from done.result()
                except BrokenProcessPool:  # killed, for its memory perhaps, and all the others with it
                    yield from (ComparisonResult(each, error="its process was killed") for each in tasks[done])
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():  # some are at work only if this is cut short
                process.terminate()


def _run_group(plan: Plan, group: Group) -> list[ComparisonResult]:
    return list(run_groups(plan, [group], Progress()))


def run_plan(plan: Plan, store: ResultStore | None, progress: Progress, *, jobs: int = 1) -> Iterator[ComparisonResult]:
    """The results of a plan as they come; those that ``store`` has are not run again, and come first.

    ``store``: None in all but the first of several processes. ``progress``: is told of results alone if there are
    several ``jobs``, which are processes that share the comparisons.
    """
    keys = {each: plan.settings_key(each) for each in plan.comparisons}
    # What is missing all processes have to run, so the first one decides.
    stored = broadcast_object_list([store.load(each, key) if store else None for each, key in keys.items()])
    for kept in filter(None, stored):
        progress.done(kept, kept=True)
        yield kept
    missing = by_baseline(each for each, kept in zip(keys, stored, strict=True) if kept is None)
    groups = list(missing.values())
    for result in run_groups_in_processes(plan, jobs, groups) if jobs > 1 else run_groups(plan, groups, progress):
        if store and not result.error:  # what went wrong is tried again
            store.save(result, keys[result.comparison])
        progress.done(result, kept=False)
        yield result


@dataclass(frozen=True)
class Baseline:
    """The runs that fused ones are compared with.

    Attributes:
        trainer: of stock and controls.
        stock: the stock run, with its tensors.
        record: the same as numbers.
        controls: harmlessly perturbed stock runs; none if the stock run is not finite.
    """

    trainer: PairedRuns
    stock: RunTensors
    record: RunRecord
    controls: tuple[RunRecord, ...]

    def trainer_of(self, comparison: Comparison) -> PairedRuns:
        """The trainer of a comparison that shares these runs."""
        return self.trainer if comparison == self.trainer.comparison else replace(self.trainer, comparison=comparison)


def run_baseline(plan: Plan, comparison: Comparison, progress: Progress) -> Baseline:
    """Make the stock and control runs that a comparison shares with others.

    Raises:
        FusedNormError: no site of the model can be fused.
    """
    trainer, steps = PairedRuns(plan, comparison), plan.settings.options.steps
    stock = trainer.train(on_step=progress.run("stock", steps))
    record = record_run(stock, stock)
    controls = []
    for index in range(plan.settings.controls if record.finite else 0):
        on_step = progress.run(f"control {index}", steps)
        controls.append(record_run(trainer.train_control(index, on_step=on_step), stock))
    return Baseline(trainer, stock, record, tuple(controls))


def run_fused(baseline: Baseline, comparison: Comparison, progress: Progress) -> ComparisonResult:
    """Compare the fused model: its calls with the stock modules, and its training with the stock run."""
    if not baseline.record.finite:
        return ComparisonResult(comparison, stock=baseline.record, fused=baseline.record)
    fused = fused_for(comparison.feature)
    calls = baseline.trainer_of(comparison).check(fused, in_half=comparison.feature == "all")
    return train_fused(baseline, comparison, fused, calls, progress)


def train_fused(
    baseline: Baseline, comparison: Comparison, fused: ModelChange, calls: CallRecord | None, progress: Progress
) -> ComparisonResult:
    """Compare the training of the model that ``fused`` makes with the stock run; ``calls`` are compared already."""
    on_step = progress.run(f"fused {comparison.feature}", baseline.trainer.plan.settings.options.steps)
    run = baseline.trainer_of(comparison).train(fused, on_step=on_step)
    if run.not_seen:
        calls = calls or CallRecord()
        calls = replace(calls, not_seen=tuple(dict.fromkeys((*calls.not_seen, *run.not_seen))))
    return ComparisonResult(comparison, baseline.record, baseline.controls, record_run(run, baseline.stock), calls)


def message_of(error: Exception) -> str:
    """An error in one line, with its class unless it is this package's own."""
    text = " ".join(str(error).split())[:500]
    return text if isinstance(error, FusedNormError) else f"{type(error).__name__}: {text}"
