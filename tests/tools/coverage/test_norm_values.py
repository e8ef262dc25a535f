"""Modules are recognised as norms by their results, whatever they are called."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from tools.coverage.norm_values import normalises

WIDTH = 24


def root(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def module(name, forward, weighted=True):
    """Return a module of a class with this name and forward."""
    made = type(name, (nn.Module,), {"forward": forward})()
    made.weight = nn.Parameter(torch.ones(WIDTH)) if weighted else None
    return made


MODULES = [
    (module("Thing", lambda self, x: self.weight * root(x)), "rms"),
    (module("Weightless", lambda self, x: root(x), False), "rms"),
    (module("GateBehind", lambda self, x, z: self.weight * root(x) * functional.silu(z)), "gated"),
    (module("Length", lambda self, x: functional.normalize(x, dim=-1), False), "length"),
    (module("Subtracting", lambda self, x: self.weight * root(x - x.mean(-1, keepdim=True))), "layer"),
    (nn.LayerNorm(WIDTH), "layer"),
    (module("RMSNorm", lambda self, x: self.weight * x), None),  # a norm by name only
    (nn.Linear(WIDTH, WIDTH), None),
]


@pytest.mark.parametrize(("module", "expected"), MODULES, ids=lambda value: getattr(type(value), "__name__", None))
def test_what_a_module_normalises_goes_by_its_results(module, expected):
    assert normalises(module) == expected
    assert normalises(module.to("meta")) == expected
