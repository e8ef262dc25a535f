"""Compilation runs in other processes, and its failures are reported."""

from __future__ import annotations

import pytest
import torch

from fused_norm.bench.operator_cases import OperatorCase
from fused_norm.bench.precompile import precompile
from fused_norm.bench.providers import FUSED, FUSED_MODES, PROVIDERS


@pytest.mark.slow
def test_operators_are_compiled_in_other_processes(run):
    said = []
    run.say = said.append
    case, wide = OperatorCase("norm", 8, 64), OperatorCase("norm", 1, 65536)
    refusing = next(provider for provider in FUSED_MODES if provider.name == "multi_wave_cached")
    tasks = [(case, torch.float32, FUSED), (case, torch.float32, PROVIDERS["stock"]), (wide, torch.float32, refusing)]
    precompile(run, tasks, 1)
    assert said == [
        "precompiling 2 operators in 1 processes",
        "precompiled; 1 failed: multi_wave_cached norm 1x65536: ValueError",
    ]


def test_after_the_budget_nothing_is_compiled(run):
    said = []
    run.say, run.budget = said.append, 0.0
    precompile(run, [(OperatorCase("norm", 8, 64), torch.float32, FUSED)], 1)
    assert said == []
