"""Kernels compiled for GPUs that are not present: launches fit them, and rows are summed in one order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fused_norm.kernels.fp8
import fused_norm.kernels.linear_4bit  # noqa: F401 -- registers operators that no public function loads

from .compiled_launches import TARGETS
from .conftest import ALL

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


IN_CI = ("sm_90", "gfx942")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "options"),
    [
        *((target, ("--widths", "5120", "40960", "128", "--few")) for target in IN_CI),
        *(pytest.param(target, ("--widths", "128", "5120", "40960"), marks=pytest.mark.release) for target in TARGETS),
    ],
    ids=lambda value: value if isinstance(value, str) else "few" if "--few" in value else "all",
)
def test_launches_of_every_operator_fit(target: str, options: tuple[str, ...]) -> None:
    lines = compiled_by("compiled_plans.py", target, *options)
    absent = {"norm_fp8"} if target in WITHOUT_FP8 else set()
    assert any(operator.plain_name for operator in ALL.values())
    assert {line.split()[1] for line in lines} == set(ALL) - absent
