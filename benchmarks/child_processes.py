"""Steps that need processes of their own: the first one of a new process, and those of a model on several GPUs.

``python -m benchmarks.child_processes JOB`` is what runs in them. JOB is a JSON file that ``measure`` wrote.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from .benchmark_run import BenchmarkRun, attempt, name_of
from .model_cases import ModelCase
from .model_steps import prepare
from .model_variants import VARIANTS, missing
from .results import Result, Results
from .samples import Timing
from .timing import host_and_step_time

TIMEOUT = 500.0
"""Seconds after which processes are stopped."""

_PROCESSES = 2
_ROOT = str(Path(__file__).parents[1])
_SHOWN = 300  # Characters of what a process said before it failed.


def measure(run: BenchmarkRun, case: ModelCase, variants: Sequence[str], dtype: torch.dtype) -> None:
    """Measure a case in new processes: one for each variant of a cold start, two for a sharded model."""
    if case.step == "cold start":
        for variant in variants:
            if not run.passes_over(f"{case.name} {variant}", missing(variant, run.device)):
                _measure_in_children(run, case, [variant], dtype)
    elif run.device.type != "cpu" and torch.cuda.device_count() < _PROCESSES:
        run.leave_out(case.name, f"needs {_PROCESSES} GPUs")
    else:
        _measure_in_children(run, case, variants, dtype)


def main(arguments: Sequence[str]) -> None:
    """Do a job and write its results to the file that it names."""
    job = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    case, dtype = ModelCase.named(job["case"]), getattr(torch, job["dtype"])
    path, sharded = Path(job["results"]), case.step == "fsdp2"
    rank = int(os.environ.get("RANK", "0"))
    device = torch.device(f"cuda:{rank}" if job["device"] == "cuda" else job["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    say = partial(print, file=sys.stderr, flush=True) if rank == 0 else lambda text: None
    run = BenchmarkRun(device, Results({}), path, say, quick=job["quick"])
    if sharded:
        from .models import measure_here

        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        try:
            measure_here(run, case, job["variants"], dtype)
            torch.distributed.barrier()
        finally:
            torch.distributed.destroy_process_group()
    else:
        run.results.rows += [_first_step(run, case, variant, dtype) for variant in job["variants"]]
    if rank == 0:
        run.save()


def _first_step(run: BenchmarkRun, case: ModelCase, variant: str, dtype: torch.dtype) -> Result:
    """The time from a built model to the end of its first step; what a step takes afterwards is in other rows."""

    def measure(result: Result) -> Result:
        host_and_step_time(lambda: None, 1, run.device)
        began = time.perf_counter()
        patched = VARIANTS[variant](step)
        with patched.running():
            host_and_step_time(partial(step.step, patched.model), 1, run.device)
        return replace(result, timing=Timing.of([time.perf_counter() - began], "wall"))

    step = prepare(case, dtype, run.device)
    return attempt(Result("models", case.name, variant), measure)


def _measure_in_children(run: BenchmarkRun, case: ModelCase, variants: Sequence[str], dtype: torch.dtype) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job, results = folder / "job.json", folder / "results.json"
        content = {
            "case": case.name,
            "variants": list(variants),
            "dtype": name_of(dtype),
            "device": run.device.type,
            "quick": run.quick,
            "results": str(results),
        }
        job.write_text(json.dumps(content), encoding="utf-8")
        failure = _run([*_launcher(case), "-m", __name__, str(job)], _environment(case, folder))
        found = Results({}) if failure else Results.load(results)
    if failure:
        found.rows += [Result("models", case.name, one, verdict="failed", detail=failure) for one in variants]
    run.results.rows += found.rows
    run.results.left_out += found.left_out
    for result in found.rows:
        run.say(f"{result.row} {result.by}: {f'{result.seconds:.3f} s' if result.seconds else result.detail}")


def _launcher(case: ModelCase) -> list[str]:
    if case.step != "fsdp2":
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={_PROCESSES}"]


def _environment(case: ModelCase, folder: Path) -> Mapping[str, str]:
    """The environment of the processes, which find this package; nothing compiled is found in that of a cold start."""
    found = {**os.environ, "PYTHONPATH": os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])}
    if case.step == "cold start":
        caches = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
        found |= {name: str(folder / name.lower()) for name in caches}
    return found


def _run(command: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Run a command; return None, or what went wrong."""
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            _, said = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            process.terminate()  # Not killed: a launcher has processes of its own to stop.
            return f"not done after {TIMEOUT:g} s"
    return None if process.returncode == 0 else f"exit code {process.returncode}: {' '.join(said.split())[-_SHOWN:]}"


if __name__ == "__main__":
    main(sys.argv[1:])
