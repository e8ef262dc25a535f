"""Two ranks without GPUs are the same on every machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from .ranks import on_two_ranks


def devices_of(rank: int, ranks: int) -> tuple[int, bool]:
    """The GPUs that a rank sees, and whether kernels run on its CPU."""
    from fused_norm.kernels.triton.devices import runs_kernels_on

    return torch.cuda.device_count(), runs_kernels_on(torch.empty(1))


@pytest.mark.slow
def test_ranks_on_the_cpu_see_no_gpu_and_have_kernels_interpreted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # as on a machine with a GPU
    before = dict(os.environ)
    assert on_two_ranks(devices_of, tmp_path) == [(0, True), (0, True)]
    assert dict(os.environ) == before
