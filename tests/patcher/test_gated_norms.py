"""Norms with a gate are recognised by their results, and have stock's results in models, whatever happens there."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig

import fused_norm
from fused_norm.model_configs import build
from fused_norm.patcher.patch_report import Site

from .models import assert_trains_as_stock, fused_copy, tokens

pytestmark = pytest.mark.usefixtures("large_graphs")


def _stock_class(model_type: str, name: str) -> Callable[..., nn.Module]:
    """A class of the installed transformers."""
    try:
        return getattr(importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}"), name)
    except (ImportError, AttributeError):
        pytest.skip(f"this transformers has no {name}")


def _row_of(norm: nn.Module) -> Site:
    (row,) = fused_norm.apply_fused_norm(nn.Sequential(norm), strict=False).rows
    return row


@pytest.mark.parametrize(
    ("model_type", "name", "arguments", "what"),
    [
        ("qwen3_next", "Qwen3NextRMSNormGated", {}, "llama, weight, eps 1e-06, then silu(gate)"),
        ("kimi_linear", "KimiLinearRMSNormGated", {}, "gemma, weight, eps 1e-06, then sigmoid(gate)"),
        ("zamba2", "Zamba2RMSNormGated", {"group_size": 8}, "silu(gate), then llama, weight, eps 1e-06 in 3 groups"),
    ],
)
def test_the_classes_of_transformers_are_recognised(
    model_type: str, name: str, arguments: dict[str, Any], what: str
) -> None:
    stock = _stock_class(model_type, name)
    if "group_size" not in inspect.signature(stock).parameters:
        arguments = {name: value for name, value in arguments.items() if name != "group_size"}
    row = _row_of(stock(24, **arguments))
    assert (row.what, row.reason) == (what, None)


class Gated(nn.Module):
    """A norm to vary: subclasses override a single step."""

    def __init__(self, width: int = 24, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.eps = eps

    def norm(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)

    def forward(self, x, gate=None):
        if gate is None:
            return self.weight * self.norm(x)
        return (self.weight * self.norm(x) * functional.silu(gate.float())).to(x.dtype)


class GateFirst(Gated):
    def forward(self, x, gate):
        wide = x.float() * functional.silu(gate.float())
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class InGroups(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.group_size = 12

    def norm(self, x: Tensor) -> Tensor:
        return super().norm(x.unflatten(-1, (-1, self.group_size))).flatten(-2)


UNKNOWN = "none of the known formulas"
REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "the gate in its dtype": (
        lambda self, x, gate: (self.weight * self.norm(x) * functional.silu(gate)).to(x.dtype), UNKNOWN
    ),
    "the product rounded": (
        lambda self, x, gate: self.weight * self.norm((x.float() * functional.silu(gate.float())).to(x.dtype)), UNKNOWN
    ),
    "a detached gate": (lambda self, x, gate: Gated.forward(self, x, gate.detach()), "where gradients are needed"),
}  # fmt: skip


@pytest.mark.parametrize(("forward", "why"), REFUSED.values(), ids=REFUSED)
def test_other_roundings_and_other_arguments_are_refused(forward: Callable[..., Tensor], why: str) -> None:
    forward.__qualname__ = "GatedNorm.forward"
    row = _row_of(type("GatedNorm", (Gated,), {"forward": forward})())
    assert row.cause == "unrecognised"
    assert why in (row.reason or "")


def _twins(module: nn.Module, device: str) -> tuple[nn.Module, nn.Module]:
    """A stock norm, and its fused copy."""
    stock = nn.Sequential(module.to(device))
    fused = copy.deepcopy(stock)
    (site,) = fused_norm.apply_fused_norm(fused).fused
    assert (site.kind, site.path) == ("norm", "0")
    return stock[0], fused[0]


def _results(norm: nn.Module, x: Tensor, gate: Tensor) -> list[Tensor]:
    x, gate = x.detach().requires_grad_(), gate.detach().requires_grad_()
    y = norm(x, gate=gate)
    return [y, *torch.autograd.grad(y.float().square().sum(), (x, gate, norm.weight))]


@pytest.mark.parametrize("kind", [Gated, GateFirst])
def test_a_fused_norm_gives_what_stock_gives(kind: type[Gated], launches: list[str], device: str) -> None:
    stock, fused = _twins(kind(), device)
    x, gate = torch.randn(2, 2, 5, 24, device=device)
    restored = pickle.loads(pickle.dumps(fused))
    for norm in (fused, copy.deepcopy(fused), restored):
        torch.testing.assert_close(_results(norm, x, gate), _results(stock, x, gate), rtol=1e-5, atol=1e-5)
    assert launches[:3] == ["gated_rms_norm"] * 3
    assert type(restored) is type(fused)
    stock.eps = fused.eps = 0.5
    torch.testing.assert_close(fused(x, gate), stock(x, gate))
    seen: list[int] = []
    fused.register_forward_hook(lambda module, args, y: seen.append(len(args)))
    fused(x, gate)
    assert seen == [2], "a hook sees the call as it is"


def test_what_a_kernel_cannot_do_runs_the_stock_code(
    launches: list[str], device: str, caplog: pytest.LogCaptureFixture
) -> None:
    stock, fused = _twins(Gated(), device)
    x, gate = torch.randn(2, 2, 5, 24, device=device)
    for inputs in ((x,), (x, gate[:1]), (x.double(), gate.double()), (x, gate.double())):
        assert torch.equal(fused(*inputs), stock(*inputs))
    assert "gate must have x's shape (2, 5, 24), not (1, 5, 24)" in caplog.text
    assert ": gate is torch.float64" in caplog.text
    with fused_norm.disabled():
        assert torch.equal(fused(x, gate), stock(x, gate))
    wide, gates = torch.randn(2, 1, 8200, device=device)
    stock, fused_wide = _twins(Gated(8200), device)
    assert torch.equal(fused_wide(wide, gates), stock(wide, gates))
    assert "rows of 8200 in 1 groups are more than a kernel holds" in caplog.text
    assert launches == []


def test_groups_of_rows_that_were_cut_are_left_to_the_stock_code(launches: list[str], device: str) -> None:
    """As by tensor parallelism: whether they are fewer or narrower then is for the stock code to say."""
    stock, fused = _twins(InGroups(), device)
    x, gate = torch.randn(2, 5, 24, device=device)
    torch.testing.assert_close(fused(x, gate), stock(x, gate))
    assert launches == ["gated_rms_norm"]
    for norm in (stock, fused):
        norm.weight = nn.Parameter(norm.weight.detach()[:12])
    assert torch.equal(fused(x[:, :12], gate[:, :12]), stock(x[:, :12], gate[:, :12]))
    assert launches == ["gated_rms_norm"]


def test_code_that_replaces_the_class_forward_is_called(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, fused = _twins(Gated(), device)
    monkeypatch.setattr(Gated, "forward", lambda self, x, gate=None: (x, gate))
    x = torch.randn(3, 24, device=device)
    assert fused(x) == (x, None)
    assert fused(x, gate=x)[1] is x
    assert fused(x, x)[1] is x


@pytest.mark.slow
def test_a_model_trains_as_stock_and_its_gated_norms_refuse_other_rounding_points(
    launches: list[str], device: str
) -> None:
    how = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16}
    config = AutoConfig.for_model("mamba2", **how, state_size=8, n_groups=2, chunk_size=8)
    stock = build(config, seed=0, device=device)
    assert_trains_as_stock(stock, fused_copy(stock), tokens(device, length=11))
    assert launches.count("gated_rms_norm") == 2
    model = stock
    before = [type(module) for module in model.modules()]
    with pytest.raises(fused_norm.FusedNormError, match="which a norm with a gate does not take"):
        fused_norm.apply_fused_norm(model, norm_rounding={"*.mixer.norm": "gemma"})
    assert [type(module) for module in model.modules()] == before
