"""An activation is recognised by its results, and no longer once something about it changes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from fused_norm.patcher.activation_recognition import recognise_activation
from fused_norm.patcher.probe import UnrecognisedError


class ByHand(nn.Module):
    """An activation with a setting that decides what it computes."""

    def __init__(self, approximate: str) -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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


@pytest.mark.parametrize(("value", "formula"), KNOWN, ids=lambda value: getattr(value, "__name__", str(value)))
def test_the_values_decide(value, formula: str) -> None:
    activation = recognise_activation(value)
    assert activation.formula == formula
    for same in (value, copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert activation.is_now(same)
        assert recognise_activation(same) == activation
        assert hash(recognise_activation(same)) == hash(activation)


def by(forward: Callable) -> nn.Module:
    """A module with this forward."""
    return type("ActivationByAFunction", (nn.Module,), {"forward": forward})()


class WithAShape(nn.Module):
    """As OLMo's norm without a weight, which may stand in a layer beside an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.shape = (64,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, self.shape)


silu = nn.functional.silu
UNKNOWN = {
    "in place": nn.SiLU(inplace=True),
    "ReLU": nn.ReLU(),
    "identity": nn.Identity(),
    "dropout": nn.Dropout(0.5),
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
    "a shape": WithAShape(),
    **{name: ACT2FN[name] for name in ("quick_gelu", "gelu_fast", "relu2", "sigmoid")},
    "GELU by tanh of one rounding": by(lambda self, x: ACT2FN["gelu_new"](x.float()).to(x.dtype)),
    "relu": torch.relu,
    "a method": torch.tensor(1.0).mul,
    "linear": nn.Linear(2, 2),
    "none": None,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_computes_something_else_is_refused(name: str) -> None:
    with pytest.raises(UnrecognisedError, match="its activation"):
        recognise_activation(UNKNOWN[name])


def test_the_method_of_an_instance_among_the_settings_is_refused() -> None:
    """A GELU that is computed by another object, which cannot be compared."""
    activation = type(ACT2FN["gelu"])(use_gelu_python=True)
    with pytest.raises(UnrecognisedError, match="holds act, a method"):
        recognise_activation(activation)


def test_a_setting_of_its_own_makes_it_another() -> None:
    act = ByHand("none")
    activation = recognise_activation(act)
    assert activation.is_now(act)
    act.approximate = "tanh"
    assert not activation.is_now(act)
    act.approximate = "none"
    assert activation.is_now(act)
    assert not activation.is_now(nn.GELU())
    assert not recognise_activation(nn.functional.gelu).is_now(act)


def test_a_forward_put_on_its_class_makes_it_another(monkeypatch) -> None:
    act = ByHand("none")
    activation = recognise_activation(act)
    monkeypatch.setattr(ByHand, "forward", lambda self, x: x)
    assert not activation.is_now(act)
    with pytest.raises(UnrecognisedError, match="computes none of silu, gelu, gelu_tanh"):
        recognise_activation(act)
