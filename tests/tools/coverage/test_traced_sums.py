"""An add feeds a norm only if it adds two whole tensors in the same call of the module that holds the norm."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from tools.coverage.traced_sums import TracedSums

WIDTH = 8


class Block(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form = form
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH, eps=1e-5)])

    def forward(self, x, earlier):
        if self.form == "earlier call":
            return self.norms[0](earlier)
        y = x + (x[:1] if self.form == "broadcast" else x)
        if self.form == "written":
            y.mul_(2)
        if self.form == "viewed":
            y = y.view_as(y)
        return self.norms[0](y)


class Gated(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form, self.act = form, nn.Tanh() if form == "tanh" else nn.GELU()

    def forward(self, x, _):
        gate = functional.silu(x) if self.form == "function" else self.act(x)
        return gate * (gate if self.form == "squared" else x)


def traced(block, norms):
    model = nn.ModuleList([block])
    sums = TracedSums(model, norms)
    x = torch.randn(2, 3, WIDTH)
    with torch.no_grad(), sums:
        block(x, x + 1)
    sums.remove()
    return sums


@pytest.mark.parametrize(
    ("form", "fed"),
    [
        ("plain", True),
        ("viewed", True),
        *((form, False) for form in ("written", "broadcast", "earlier call")),
    ],
)
def test_a_norm_is_fed_by_an_add_of_the_same_call(form, fed):
    sums = traced(Block(form), {"0.norms.0"})
    assert sums.called == {"0.norms.0"}
    assert bool(sums.fed) == fed


@pytest.mark.parametrize(
    ("form", "gated"),
    [("module", True), ("function", True), ("tanh", False), ("squared", False)],
)
def test_a_product_with_a_silu_or_a_gelu_is_a_gate(form, gated):
    assert traced(Gated(form), set()).gated == ({"0"} if gated else set())
