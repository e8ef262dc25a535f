"""Models whose layers are replayed: copied, saved, loaded, patched again and put back; layers that run eager, and why."""

from __future__ import annotations

import copy
import io
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import fused_norm
from fused_norm.check import check_step
from fused_norm.patcher import cuda_graphs, survey

from .graph_cases import DEVICE, HAS_GPU, LAYERS, ONE, Run, base_model, patched
from .graph_stand_in import StandIn
from .models import assert_same

ATTRIBUTE = "_fused_norm_graphs"
CHECKPOINTED = "gradient checkpointing is on in this layer; recompute takes its place"
COMPILED = "it is compiled; torch.compile has graphs of its own, mode='reduce-overhead'"
SHARDED = "FSDP gives its parameters other memory in each step"


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay by a stand-in if there is no GPU."""
    if not HAS_GPU:
        monkeypatch.setattr(cuda_graphs, "make_device", StandIn)
        monkeypatch.setattr(survey, "why_no_graphs", lambda devices: None)


def run_of(model: Any, report: Any) -> Run:
    """Return a run that drives this model."""
    run = copy.copy(RUNS.template)
    run.model, run.report, run.results = model, report, []
    run.layers, run.trained = model.model.layers, list(model.parameters())
    return run


RUNS = SimpleNamespace(template=object.__new__(Run))
RUNS.template.mode = "full"


def holders(model: Any) -> list[str]:
    """Return the paths of the modules that hold graphs."""
    return [path for path, module in model.named_modules() if ATTRIBUTE in vars(module)]


def reasons(model: Any, **options: Any) -> list[str | None]:
    """Patch a model; return the reasons of its rows of graphs."""
    report = patched(model, cuda_graphs=True, **options)
    assert [row.path for row in report.graphs] == [f"model.layers.{i}" for i in range(LAYERS)]
    held = [path for path, _ in [(row.path, row) for row in report.graphs if row.reason is None]]
    assert holders(model) == held
    assert (report.replays is None) == (not held)
    return [row.reason for row in report.graphs]
