"""A session that measures next to nothing and keeps its results in a temporary folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fused_norm.bench.results import Results
from fused_norm.bench.session import Session


@pytest.fixture
def session(tmp_path: Path, device: str) -> Session:
    return Session(
        torch.device(device), Results({}, meaningless=True), tmp_path / "results.json", lambda text: None, quick=True
    )
