"""Positions of experts that kernels cannot take."""

from __future__ import annotations

import pytest
import torch

from fused_norm.kernels import expert_unpermute


def test_positions_of_other_dtypes_are_refused_without_absent_rows_too() -> None:
    x, weights = torch.randn(8, 16), torch.rand(4, 2)
    with pytest.raises(TypeError, match="position"):
        expert_unpermute(x, weights, torch.zeros(4, 2), None, dtype=torch.float32)
