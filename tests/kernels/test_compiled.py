"""Kernels compiled for GPUs that are not present: launches fit them, and rows are summed in one order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fused_norm.kernels.linear_4bit  # noqa: F401 -- registers operators that no public function loads
from fused_norm.kernels.fp8.operators import NORM_FP8
from fused_norm.kernels.operator import OPERATORS

from .compiled_launches import TARGETS

WITHOUT_FP8 = ("sm_80", "sm_86", "gfx942")
"""Targets on which norms write FP8 by PyTorch's own operators."""


def compiled_by(script: str, *arguments: str) -> list[str]:
    """Run a script beside this file without Triton's interpreter, and return the lines that it prints."""
    path = Path(__file__).with_name(script)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, path, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_a_norm_fits_an_amd_gpu_and_a_small_nvidia_one() -> None:
    few = ("--widths", "128", "--only", "rms_norm", "--dtypes", "bfloat16")
    assert len(compiled_by("compiled_plans.py", "gfx942", "sm_120", *few)) == 8


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_launches_of_every_operator_fit(target: str) -> None:
    lines = compiled_by("compiled_plans.py", target, "--widths", "128", "5120", "40960")
    absent = {NORM_FP8.name} if target in WITHOUT_FP8 else set()
    assert any(operator.plain_name for operator in OPERATORS.values())
    assert {line.split()[1] for line in lines} == set(OPERATORS) - absent


@pytest.mark.slow
def test_norms_that_give_fp8_sum_rows_in_the_16_bit_norms_order() -> None:
    """Compiled for a GPU, both sum a row in the same layout, so y has the same bits there too."""
    assert len(compiled_by("compiled_layouts.py")) >= 12
