"""An activation is recognised by its results, and no longer once something about it changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

import fused_norm
from fused_norm.patcher.patch_report import Site

from .forwards import layer_of
from .models import relative


def mlp_of(act: Any) -> tuple[nn.Module, Site]:
    """A patched module that multiplies by this activation, and its row."""
    module = layer_of("return self.act_fn(gate) * up", "gate, up", nn.Module)()
    module.act_fn = act
    (row,) = fused_norm.apply_fused_norm(nn.ModuleList([module]), strict=False).rows
    assert row.kind == "mlp"
    return module, row


class ByHand(nn.Module):
    """An activation with a setting that decides what it computes."""

    def __init__(self, approximate: str) -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(x, approximate=self.approximate)


KNOWN = [
    (nn.SiLU(), "silu"),
    (nn.functional.silu, "silu"),
    (nn.GELU(), "gelu"),
    (nn.GELU(approximate="tanh"), "gelu_tanh"),
    (nn.functional.gelu, "gelu"),
    (ByHand("tanh"), "gelu_tanh"),
    *((ACT2FN[name], formula) for name, formula in (("silu", "silu"), ("swish", "silu"), ("gelu", "gelu"))),
    (ACT2FN["gelu_pytorch_tanh"], "gelu_tanh"),
    (ACT2FN["gelu_new"], "gelu_new"),
]


@pytest.mark.parametrize(("act", "formula"), KNOWN, ids=lambda value: getattr(value, "__name__", str(value)))
def test_the_values_decide(act: Any, formula: str, device: str, launches: list[str]) -> None:
    module, row = mlp_of(act)
    assert (row.activation, row.reason) == (formula, None)
    gate, up = torch.randn(2, 3, 8, device=device)
    for same in (act, copy.deepcopy(act)):
        module.act_fn = same
        assert relative(module(gate, up), act(gate) * up) < 2e-6
    assert launches == ["glu"] * 2


def by(forward: Callable) -> nn.Module:
    """A module with this forward."""
    return type("ActivationByAFunction", (nn.Module,), {"forward": forward})()


silu = nn.functional.silu
UNKNOWN = {
    "in place": nn.SiLU(inplace=True),
    "ReLU": nn.ReLU(),
    "doubled": by(lambda self, x: silu(x * 2) / 2),
    "in place by its forward": by(lambda self, x: silu(x, inplace=True)),
    "in fp32 alone": by(lambda self, x: x * torch.sigmoid(x) if x.dtype != torch.float32 else silu(x)),
    "saturating": by(lambda self, x: silu(x).clamp(max=500)),
    "saturating far out": by(lambda self, x: silu(x.clamp(-5000, 5000))),
    "finite": by(lambda self, x: silu(torch.nan_to_num(x))),
    "otherwise in eval": by(lambda self, x: silu(x if self.training else 2 * x)),
    "otherwise in training": by(lambda self, x: silu(2 * x if self.training else x)),
    "detached": by(lambda self, x: silu(x.detach())),
    "straight through": by(lambda self, x: x + (silu(x) - x).detach() if x.requires_grad else silu(x)),
    **{name: ACT2FN[name] for name in ("quick_gelu", "gelu_fast")},
    "GELU by tanh of one rounding": by(lambda self, x: ACT2FN["gelu_new"](x.float()).to(x.dtype)),
    "a function": torch.relu,
    "a method": torch.tensor(1.0).mul,
    "holds a method": type(ACT2FN["gelu"])(use_gelu_python=True),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_computes_something_else_is_refused(name: str) -> None:
    reason = mlp_of(UNKNOWN[name])[1].reason or ""
    assert reason.startswith("its activation")
    assert "computes none of silu" in reason or name in ("a method", "holds a method")


@pytest.mark.parametrize("change", ["a setting", "a forward on its class", "another module"])
def test_what_changed_about_it_runs_as_it_is(change: str, device: str, launches: list[str], monkeypatch: Any) -> None:
    module, _ = mlp_of(ByHand("none"))
    gate, up = torch.randn(2, 3, 8, device=device)
    module(gate, up)
    assert launches == ["glu"]
    if change == "a setting":
        module.act_fn.approximate = "tanh"
    elif change == "a forward on its class":
        monkeypatch.setattr(ByHand, "forward", lambda self, x: 2 * x)
    else:
        module.act_fn = nn.GELU()
    assert torch.equal(module(gate, up), module.act_fn(gate) * up)
    assert launches == ["glu"]
