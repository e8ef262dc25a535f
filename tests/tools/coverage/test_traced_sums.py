"""An add feeds a norm only if it adds two whole tensors in the same call of the module that holds the norm.

A convolution counts if it has few taps and sees no later token.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from tools.coverage.traced_sums import TracedSums

WIDTH = 8


class Block(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH, eps=1e-5)])
        self.inside = nn.Identity()

    def forward(self, x, earlier):
        if self.form == "earlier call":
            return self.norms[0](earlier)
        y = {"broadcast": lambda: x + x[:1], "in place": lambda: x.clone().add_(x)}.get(self.form, lambda: x + x)()
        if self.form == "written":
            y.mul_(2)
        if self.form == "viewed":
            y = y.view_as(y)
        return self.norms[0](y)


class Gated(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.act = form, nn.Tanh() if form == "tanh" else nn.GELU()

    def forward(self, x, _):
        gate = functional.silu(x) if self.form == "function" else self.act(x)
        return gate * (gate if self.form == "squared" else x)


class Reaching(nn.Module):
    """A module with a sum of its own, for a norm that another module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block("plain")

    def forward(self, x, _):
        return self.block.norms[0](x + x)


def traced(block: nn.Module, norms: set[str]) -> TracedSums:
    model = nn.ModuleList([block])
    sums = TracedSums(model, norms)
    x = torch.randn(2, 3, WIDTH)
    with torch.no_grad(), sums:
        block(x, x + 1)
    sums.remove()
    assert not block._forward_hooks
    return sums


@pytest.mark.parametrize(
    ("form", "fed"),
    [
        ("plain", True),
        ("in place", True),
        ("viewed", True),
        *((form, False) for form in ("written", "broadcast", "earlier call")),
    ],
)
def test_a_norm_is_fed_by_an_add_of_the_same_call(form, fed):
    sums = traced(Block(form), {"0.norms.0"})
    assert sums.called == {"0.norms.0"}
    assert bool(sums.fed) == fed


def test_a_norm_is_not_fed_by_an_add_of_a_module_that_does_not_hold_it():
    sums = traced(Reaching(), {"0.block.norms.0"})
    assert (sums.called, sums.fed) == ({"0.block.norms.0"}, set())


@pytest.mark.parametrize(
    ("form", "gated"),
    [("module", True), ("function", True), ("tanh", False), ("squared", False)],
)
def test_a_product_with_a_silu_or_a_gelu_is_a_gate(form, gated):
    assert traced(Gated(form), set()).gated == ({"0"} if gated else set())


class Convolving(nn.Module):
    """A convolution, as a module or a function; by default with three taps, padded on both sides by two."""

    def __init__(self, by_function: bool = False, **changed: int) -> None:
        super().__init__()
        settings = {"kernel_size": 3, "padding": 2, "groups": 3} | changed
        self.conv, self.by_function = nn.Conv1d(3, 3, **settings), by_function

    def forward(self, x, _):
        if self.by_function:
            return functional.conv1d(x, self.conv.weight, None, padding=2, groups=3)[..., : x.shape[-1]]
        return self.conv(x)[..., : x.shape[-1]]


@pytest.mark.parametrize(
    ("changed", "counts"),
    [
        ({}, True),
        ({"by_function": True}, True),
        ({"groups": 1}, False),
        ({"padding": 1}, False),
        ({"kernel_size": 5, "padding": 4}, False),
        ({"kernel_size": 2, "padding": 2, "dilation": 2}, False),
    ],
    ids=str,
)
def test_a_short_depthwise_convolution_counts_if_it_sees_no_later_token(changed, counts):
    assert traced(Convolving(**changed), set()).convolved == ({"0"} if counts else set())
