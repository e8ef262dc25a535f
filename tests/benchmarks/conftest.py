"""A benchmark run that measures almost nothing and stores its results in a temporary folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.benchmark_run import BenchmarkRun
from benchmarks.results import Results


@pytest.fixture
def run(tmp_path: Path, device: str) -> BenchmarkRun:
    return BenchmarkRun(torch.device(device), Results({}, meaningless=True), tmp_path / "results.json", quick=True)
