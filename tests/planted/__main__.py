"""Plants all faults in models of the convergence suite and prints what became of each; exit code 1 for a missed one.

``python -m tests.planted`` takes the options of ``fused-norm converge``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from fused_norm.cli import converge_command
from fused_norm.cli.common import interpret_without_gpu

if TYPE_CHECKING:
    from fused_norm.convergence.comparison import Comparison

    from .runs import FaultResult

_TOGETHER = 24
"""Faults that share one process's stock and control runs."""


def main() -> int:
    """Run, print, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    converge_command.add_arguments(parser)
    args = parser.parse_args()
    # A fault shows at once; in the larger models of the full tier some need the drift of a whole run.
    args.steps = args.steps or (20 if args.tier == "full" else 2)
    tasks = _tasks(args)
    for variable in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(variable, "1")
    failed = 0
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        pending = [pool.submit(_run, args, *task) for task in tasks]
        for (comparison, _), done in zip(tasks, pending, strict=True):
            for result in done.result():
                failed += result.outcome in ("missed", "invalid")
                print(
                    f"{result.outcome:<7}  {comparison.name}  {result.fault}: {'; '.join(result.reasons)}", flush=True
                )
    return int(failed > 0)


def _tasks(args: argparse.Namespace) -> list[tuple[Comparison, Sequence[str]]]:
    """Comparisons with the faults that are planted in each, in groups that share their stock run."""
    device = interpret_without_gpu(args.device)
    plan = converge_command.plan_for(args, converge_command.tier_for(args, device), device)
    from .faults import FAULTS

    found = []
    for baseline in dict.fromkeys(each.baseline for each in plan.comparisons if each.execution == "eager"):
        for where in ("eager", "compile"):
            names = [name for name, fault in FAULTS.items() if fault.where == where]
            comparison = replace(baseline, execution=where)
            found += [(comparison, names[at : at + _TOGETHER]) for at in range(0, len(names), _TOGETHER)]
    return found


def _run(args: argparse.Namespace, comparison: Comparison, names: Sequence[str]) -> list[FaultResult]:
    device = interpret_without_gpu(args.device)
    plan = converge_command.plan_for(args, converge_command.tier_for(args, device), device)
    from .runs import run_faults

    return list(run_faults(plan, comparison, names))


if __name__ == "__main__":
    sys.exit(main())
