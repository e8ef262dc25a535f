"""Runs comparisons in several processes at a time: those with another stock run do not depend on each other."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from .comparison import Comparison
from .plan import Plan
from .result_store import ComparisonResult
from .suite import Groups, Progress, RunGroups, Unwatched, run_groups

_plan: Plan | None = None
"""The plan of a worker process."""


def in_processes(make_plan: Callable[[], Plan], jobs: int) -> RunGroups:
    """A way to run groups of comparisons for ``run_plan``: in ``jobs`` processes, which tell of results, not of runs.

    Args:
        make_plan: makes the plan anew in each process; must be picklable.
        jobs: processes.
    """

    def run(plan: Plan, groups: Groups, progress: Progress) -> Iterator[ComparisonResult]:
        # A process that shares the cores with others has one thread.
        for variable in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
            os.environ.setdefault(variable, "1")
        spawn = multiprocessing.get_context("spawn")
        longest_first = sorted(groups, key=lambda group: (group[0].execution != "compile", -len(group)))
        with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_begin, initargs=(make_plan,)) as pool:
            try:
                # Ctrl-C goes to all processes, and only this one is to answer it: the others inherit that they do not.
                answer = signal.signal(signal.SIGINT, signal.SIG_IGN)
                tasks = {pool.submit(_run, group): group for group in longest_first}
                signal.signal(signal.SIGINT, answer)
                for done in as_completed(tasks):
                    try:
                        yield from done.result()
                    except BrokenProcessPool:  # killed, for its memory perhaps, and all the others with it
                        yield from (ComparisonResult(each, trouble="its process was killed") for each in tasks[done])
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in multiprocessing.active_children():  # which is at work only where this is cut short
                    process.terminate()

    return run


def _begin(make_plan: Callable[[], Plan]) -> None:
    global _plan
    _plan = make_plan()


def _run(group: Sequence[Comparison]) -> list[ComparisonResult]:
    assert _plan is not None
    return list(run_groups(_plan, [group], Unwatched()))
