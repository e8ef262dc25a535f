"""Plants all faults in models of the convergence suite and prints what became of each.

The exit code is 1 if a fault is missed. ``python -m tests.planted`` takes the options of ``fused-norm converge``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor

from fused_norm.cli import converge_command
from fused_norm.cli.common import interpret_without_gpu


def main() -> int:
    """Run, print, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    converge_command.add_arguments(parser)
    args = parser.parse_args()
    converge_command.refuse_misspelt(args)
    # A fault shows at once; in the larger models of the full tier some need the drift of a whole run.
    args.steps = args.steps or (20 if args.tier == "full" else 2)
    interpret_without_gpu(args.device)
    # After the choice of the interpreter, because these import the kernels.
    from .runs import run_task, tasks_of

    tasks = tasks_of(args)
    for variable in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(variable, "1")
    failed = 0
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        pending = [pool.submit(run_task, args, *task) for task in tasks]
        for (comparison, _), done in zip(tasks, pending, strict=True):
            for result in done.result():
                failed += result.outcome in ("missed", "invalid")
                print(
                    f"{result.outcome:<7}  {comparison.name}  {result.fault}: {'; '.join(result.reasons)}", flush=True
                )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
