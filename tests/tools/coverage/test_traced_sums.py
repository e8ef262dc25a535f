"""An add feeds a norm only if it adds two whole tensors in the same call of the module that holds the norm."""

import pytest
import torch
from torch import nn

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
