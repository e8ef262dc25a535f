"""Compilation runs in other processes, and its failures are reported."""

from __future__ import annotations

import pytest
import torch

from benchmarks.operator_cases import OperatorCase
from benchmarks.precompile import precompile
from benchmarks.providers import FUSED, FUSED_MODES, PROVIDERS


@pytest.mark.slow
def test_operators_are_compiled_in_other_processes(run):
    said = []
    run.say = said.append
    small, too_wide, unknown = (
        OperatorCase(*case) for case in (("rms_norm", 8, 64), ("rms_norm", 1, 65536), ("nothing", 8, 64))
    )
    in_one_wave = next(provider for provider in FUSED_MODES if provider.name == "multi_wave_cached")
    pairs = [(small, FUSED), (small, PROVIDERS["stock"]), (too_wide, in_one_wave), (unknown, FUSED)]
    precompile(run, [(case, torch.float32, provider) for case, provider in pairs], 1)
    assert said == [
        "precompiling 3 operators",
        "precompiled; 1 failed: fused nothing 8x64: KeyError",
    ]


def test_after_the_budget_nothing_is_compiled(run):
    said = []
    run.say, run.budget = said.append, 0.0
    precompile(run, [(OperatorCase("rms_norm", 8, 64), torch.float32, FUSED)], 1)
    assert said == []
