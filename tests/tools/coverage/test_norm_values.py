"""What modules normalise is told by their results, whatever they are called."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from tools.coverage.norm_values import normalises

WIDTH = 24


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), 1e-6

    def root(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Thing(Weighted):
    def forward(self, x):
        return self.weight * self.root(x)


class Centred(Weighted):
    def forward(self, x):
        return (1 + self.weight) * self.root(x)


class Grouped(Weighted):
    def forward(self, x):
        return self.weight * self.root(x.unflatten(-1, (4, -1))).flatten(-2)


class Buffered(Thing):
    def __init__(self) -> None:
        super().__init__()
        del self.weight
        self.register_buffer("weight", torch.ones(WIDTH))


class Weightless(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class GateBehind(Weighted):
    def forward(self, x, z):
        return self.weight * self.root(x) * functional.silu(z)


class GateBefore(Weighted):
    def forward(self, x, gate=None):
        return self.weight * self.root(x if gate is None else x * functional.silu(gate))


class Length(nn.Module):
    def forward(self, x):
        return functional.normalize(x, dim=-1)


class Subtracting(Weighted):
    def forward(self, x):
        return self.weight * self.root(x - x.mean(-1, keepdim=True))


class RMSNorm(Weighted):
    """A norm by name alone."""

    def forward(self, x):
        return self.weight * x


class Clip(nn.Module):
    def forward(self, x):
        return x * (1 / x.norm(dim=-1, keepdim=True)).clamp(max=1)


class Softmax(nn.Module):
    def forward(self, x):
        return x.softmax(-1)


class Signs(nn.Module):
    def forward(self, x):
        return x.sign()


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        *((cls(), "rms") for cls in (Thing, Centred, Grouped, Buffered, Weightless)),
        (nn.RMSNorm(WIDTH), "rms"),
        (GateBehind(), "gated"),
        (GateBefore(), "gated"),
        (Length(), "length"),
        (Subtracting(), "layer"),
        (nn.LayerNorm(WIDTH), "layer"),
        *((module, None) for module in (RMSNorm(), Clip(), Softmax(), Signs(), nn.SiLU(), nn.Linear(WIDTH, WIDTH))),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, nn.Module) else str(one),
)
def test_what_a_module_normalises_goes_by_its_results(module: nn.Module, expected: str | None) -> None:
    assert normalises(module) == expected
    assert normalises(module.to("meta")) == expected
