"""Runs a plan: for each group of comparisons the stock model, its controls, then every fused model.

Results are kept on disk: each is found again as long as settings and code are the same.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor

from ..check.against_stock import CallRecord
from ..check.fast_interpreter import speed_up
from ..spec import FusedNormError
from .comparison import PRECISIONS, Comparison, by_baseline
from .near_ties import noted_choices
from .paired_runs import ModelChange, PairedRuns, fused_for
from .plan import Plan
from .progress import Progress
from .training import RunRecord, RunTensors, record_run
from .verdict import ComparisonResult

Group = Sequence[Comparison]
"""Comparisons that share their stock and control runs."""


class ResultStore:
    """A folder of results.

    Args:
        folder: made if it is not there.
        fresh: ignore the results of earlier runs.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, folder: Path, *, fresh: bool = False) -> None:
        self._fresh, self._files = fresh, folder / "comparisons"
        self._files.mkdir(parents=True, exist_ok=True)

    def load(self, comparison: Comparison, key: str) -> ComparisonResult | None:
        """Return the result that was saved under this key, or None if there is none that can be read."""
        try:
            path = self._files / f"{comparison.name}.json"
            kept = {} if self._fresh else json.loads(path.read_text(encoding="utf-8"))
            if kept["key"] != key:
                return None
            runs = {name: _record(RunRecord, kept[name]) for name in ("stock", "fused")}
            controls = tuple(_record(RunRecord, run) for run in kept["controls"])
            return ComparisonResult(comparison, **runs, controls=controls, calls=_record(CallRecord, kept["calls"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, result: ComparisonResult, key: str) -> None:
        """Write a result; a reader never sees half of it."""
        path = self._files / f"{result.comparison.name}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(result) | {"key": key}), encoding="utf-8")
        os.replace(partial, path)


def _record(kind: type[Any], kept: Mapping[str, Any] | None) -> Any:
    """The record with these fields, in which JSON has lists for tuples."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in (kept or {}).items()}
    return None if kept is None else kind(**values)


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
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=speed_up) as pool:
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

    @cached_property
    def further_controls(self) -> tuple[RunRecord, ...]:
        """Twice as many controls again, for a run that is red only because it is off by more than ``controls``."""
        there = len(self.controls)
        return tuple([record_run(self.trainer.train_control(i), self.stock) for i in range(there, 3 * there)])

    @cached_property
    def choices(self) -> Sequence[Tensor]:
        """The experts that the routers of the stock run choose, call by call; none in compiled code."""
        if self.trainer.comparison.execution == "compile":
            return ()
        with noted_choices() as choices:
            self.trainer.train()
        return choices.indices

    def trainer_of(self, comparison: Comparison) -> PairedRuns:
        """The trainer of a comparison that shares these runs."""
        return self.trainer if comparison == self.trainer.comparison else replace(self.trainer, comparison=comparison)


def run_baseline(plan: Plan, comparison: Comparison, progress: Progress) -> Baseline:
    """Make the stock and control runs that a comparison shares with others.

    Raises:
        FusedNormError: no site of the model can be fused.
    """
    trainer = PairedRuns(plan, comparison)
    stock = trainer.train(on_step=progress.run("stock"))
    record = record_run(stock, stock)
    controls = [
        record_run(trainer.train_control(index, on_step=progress.run(f"control {index}")), stock)
        for index in range(plan.settings.controls if record.finite else 0)
    ]
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
    run = baseline.trainer_of(comparison).train(fused, on_step=progress.run(f"fused {comparison.feature}"))
    if run.not_seen:
        calls = calls or CallRecord()
        calls = replace(calls, not_seen=tuple(dict.fromkeys((*calls.not_seen, *run.not_seen))))
    result = ComparisonResult(comparison, baseline.record, baseline.controls, record_run(run, baseline.stock), calls)
    # Rare controls are far off, so four of them can be lucky. All processes have to train the further ones, or none.
    if not broadcast_object_list([result.verdict.is_red_by_noise])[0]:
        return result
    with_more = replace(result, controls=(*baseline.controls, *baseline.further_controls))
    if broadcast_object_list([with_more.verdict.is_red_by_noise])[0] and baseline.choices:
        like_stock = _with_choices_of_stock(baseline, comparison, fused)
        if like_stock is not None and (again := replace(with_more, fused=like_stock)).verdict.status == "green":
            return again
    return result if with_more.verdict.status == "invalid" else with_more


def _with_choices_of_stock(baseline: Baseline, comparison: Comparison, fused: ModelChange) -> RunRecord | None:
    """The record of a fused run whose routers choose what they chose in the stock run, if scores are all but equal.

    None if there was no such choice, or if a site ran as stock code does.
    """
    with noted_choices(baseline.choices, getattr(torch, PRECISIONS[comparison.precision].activations)) as choices:
        run = baseline.trainer_of(comparison).train(fused)
    if run.not_seen or not choices.rows:
        return None
    return replace(record_run(run, baseline.stock), near_ties=choices.rows)


def message_of(error: Exception) -> str:
    """An error in one line, with its class unless it is this package's own."""
    text = " ".join(str(error).split())[:500]
    return text if isinstance(error, FusedNormError) else f"{type(error).__name__}: {text}"
