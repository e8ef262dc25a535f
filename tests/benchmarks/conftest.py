"""A benchmark run that measures almost nothing and stores its results in a temporary folder."""

import pytest
import torch

from benchmarks.benchmark_run import BenchmarkRun
from benchmarks.results import Results


@pytest.fixture
def run(tmp_path, device):
    return BenchmarkRun(torch.device(device), Results({}, meaningless=True), tmp_path / "results.json", quick=True)
