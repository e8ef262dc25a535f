"""First steps start from empty caches, sharded steps run in two processes, and what fails there is reported."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import child_processes
from benchmarks.model_cases import ModelCase
from benchmarks.results import Result, Results

COLD = ModelCase.named("tiny-llama cold start 1x8")
SHARDED = ModelCase.named("tiny-llama fsdp2 1x8")


@pytest.fixture
def commands(monkeypatch):
    """What would have been run, with its environment and job, in place of processes; each writes the result ``ok``."""
    kept = []

    def run(command, environment):
        job = json.loads(Path(command[-1]).read_text(encoding="utf-8"))
        kept.append((command, dict(environment), job))
        rows = [Result("models", "a row", variant) for variant in job["variants"]]
        Results({}, rows=rows).save(Path(job["results"]))

    monkeypatch.setattr(child_processes, "_run", run)
    return kept


def test_each_cold_start_has_a_process_and_empty_caches_of_its_own(run, commands, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/warm")
    child_processes.measure(run, COLD, ["stock", "fused"], torch.bfloat16)
    assert [job["variants"] for _, _, job in commands] == [["stock"], ["fused"]]
    assert {job["dtype"] for _, _, job in commands} == {"bfloat16"}
    for name in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        folders = [environment[name] for _, environment, _ in commands]
        assert len(set(folders)) == 2
        assert not any(Path(folder).exists() for folder in folders)
    assert [row.by for row in run.results.rows] == ["stock", "fused"]


def test_a_sharded_model_has_two_processes_for_all_variants(run, commands):
    child_processes.measure(run, SHARDED, ["stock", "fused"], torch.float32)
    ((command, _, job),) = commands
    assert "--nproc-per-node=2" in command
    assert job["variants"] == ["stock", "fused"]
    assert ModelCase.named(job["case"]) == SHARDED


def test_one_gpu_is_too_few_for_a_sharded_model(run, commands, monkeypatch):
    run.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    child_processes.measure(run, SHARDED, ["stock"], torch.float32)
    assert not commands
    assert run.results.left_out == [f"{SHARDED.name}: needs 2 GPUs"]


def test_processes_that_fail_or_hang_are_reported(run, monkeypatch):
    program = "import sys; print('no such\\n  device', file=sys.stderr); sys.exit(3)"
    monkeypatch.setattr(child_processes, "_launcher", lambda case: [sys.executable, "-c", program])
    child_processes.measure(run, SHARDED, ["stock", "torch"], torch.float32)
    monkeypatch.setattr(
        child_processes, "_launcher", lambda case: [sys.executable, "-c", "import time; time.sleep(60)"]
    )
    monkeypatch.setattr(child_processes, "TIMEOUT", 0.1)
    child_processes.measure(run, SHARDED, ["stock", "torch"], torch.float32)
    assert [(row.by, row.verdict, row.detail) for row in run.results.rows] == [
        *((variant, "failed", "exit code 3: no such device") for variant in ("stock", "torch")),
        *((variant, "failed", "not done after 0.1 s") for variant in ("stock", "torch")),
    ]


def test_nothing_is_started_after_the_budget(run, commands):
    run.budget = 0.0
    child_processes.measure(run, COLD, ["stock"], torch.float32)
    assert not commands
    assert run.results.left_out == [f"{COLD.name} stock: after 0 s"]


@pytest.mark.slow
@pytest.mark.parametrize("case", [COLD, SHARDED], ids=lambda case: case.name)
def test_in_real_processes_steps_are_right_and_timed(case, run):
    child_processes.measure(run, case, ["stock", "fused"], torch.float32)
    assert [(row.row, row.by, row.verdict) for row in run.results.rows] == [
        (case.name, variant, "ok") for variant in ("stock", "fused")
    ]
    for row in run.results.rows:
        assert row.timing.samples == 1
        assert case is COLD or row.error < 1e-5
