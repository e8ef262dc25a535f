"""Runs a plan in several processes at a time: comparisons with another stock run do not depend on each other."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

from .comparison import Comparison, by_baseline
from .plan import Plan
from .result_store import ComparisonResult, ResultStore
from .suite import Progress, run_plan

_TOGETHER = 24
"""Comparisons that share one process's stock and control runs at most; planted faults are many."""

_plan: Plan | None = None
"""The plan of a worker process."""


def run_plan_in_processes(
    make_plan: Callable[[], Plan], plan: Plan, jobs: int, store: ResultStore, progress: Progress
) -> Iterator[ComparisonResult]:
    """The results of a plan as they come, from ``jobs`` processes; those that ``store`` has are not run again.

    Args:
        make_plan: makes the plan anew in each process; must be picklable.
        plan: what it makes.
        jobs: processes.
        store: where results are kept.
        progress: is told of results, not of runs.
    """
    missing = []
    for comparison in plan.comparisons:
        kept = store.load(comparison, plan.settings_key(comparison))
        if kept is None:
            missing.append(comparison)
        else:
            progress.done(kept, kept=True)
            yield kept
    # A process that shares the cores with others has one thread.
    for variable in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(variable, "1")
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_begin, initargs=(make_plan,)) as pool:
        try:
            tasks = {pool.submit(_run, task): task for task in _tasks(missing)}
            for done in as_completed(tasks):
                for result in _results(done, tasks[done]):
                    if not result.trouble:  # what went wrong is tried again
                        store.save(result, plan.settings_key(result.comparison))
                    progress.done(result, kept=False)
                    yield result
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _results(done: Future[list[ComparisonResult]], task: list[Comparison]) -> list[ComparisonResult]:
    try:
        return done.result()
    except BrokenProcessPool:  # killed, for its memory perhaps, and all the others with it
        return [ComparisonResult(each, trouble="its process was killed") for each in task]


def _tasks(comparisons: list[Comparison]) -> list[list[Comparison]]:
    """What a process runs in one go, the longest first."""
    sound = by_baseline(each for each in comparisons if each.mutation is None)
    faulty = by_baseline(each for each in comparisons if each.mutation is not None)
    tasks = [
        group[start : start + _TOGETHER]
        for group in (*sound.values(), *faulty.values())
        for start in range(0, len(group), _TOGETHER)
    ]
    return sorted(tasks, key=lambda task: (task[0].execution != "compile", -len(task)))


def _begin(make_plan: Callable[[], Plan]) -> None:
    global _plan
    _plan = make_plan()


def _run(comparisons: list[Comparison]) -> list[ComparisonResult]:
    assert _plan is not None
    return list(run_plan(replace(_plan, comparisons=tuple(comparisons)), None, _Unwatched()))


class _Unwatched:
    """The progress of a process that does not print."""

    def run(self, name: str, steps: int) -> Callable[[int, float], object]:
        return lambda step, loss: None

    def done(self, result: ComparisonResult, *, kept: bool) -> object:
        return None
