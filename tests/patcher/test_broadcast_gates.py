"""A gate of one column, as of a shared expert, broadcasts: it is no gate of the fused operator, and no row says so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fused_norm import apply_fused_norm


class Layer(nn.Module):
    def __init__(self, columns: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(16, columns), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return functional.silu(self.gate(x)) * up


@pytest.mark.parametrize(
    ("columns", "reason"), [(1, "its gate is one number for each row, which broadcasts"), (16, None)]
)
def test_a_gate_of_one_column_is_kept(columns: int, reason: str | None) -> None:
    model = nn.Sequential(Layer(columns))
    x = torch.randn(3, 16)
    expected = model(x)
    report = apply_fused_norm(model, strict=False)
    assert [site.reason for site in (*report.fused, *report.kept) if site.kind == "mlp"] == [reason]
    torch.testing.assert_close(model(x), expected)
