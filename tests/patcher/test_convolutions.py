"""Short causal convolutions are fused with their SiLU if PyTorch's would run, and nothing else changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig

import fused_norm
from fused_norm.patcher import disabled

from .by_reference import by_reference
from .models import EXPERTS_ARE_MLPS, assert_all_near, logged, random_model, relative, slow_but
from .other_families import OTHERS, SIZES

CONV_ALONE: dict[str, Any] = dict.fromkeys(("norms", "qk", "mlp", "experts", "lora", "loss"), False)
CONVOLVING: dict[str, tuple[dict[str, Any], int]] = {
    "qwen3_next": (dict(OTHERS["qwen3_next"].sizes), 1),
    "lfm2": (dict(OTHERS["lfm2"].sizes), 1),
    "mamba2": ({"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 8}, 2),
}  # fmt: skip
"""Sizes of small models, and how many convolutions each has."""
IN_FORWARDS = ("qwen3_next",) if EXPERTS_ARE_MLPS else tuple(CONVOLVING)
"""The models whose layers convolve in their forward; transformers 4 does so elsewhere in most."""
QUICK = ("qwen3_next", "lfm2", "mamba2")
TOKENS = torch.randint(2, 64, (2, 9), generator=torch.Generator().manual_seed(1))


def model_of(model_type: str, device: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    return random_model(AutoConfig.for_model(model_type, **{**SIZES, **CONVOLVING[model_type][0]}), device, dtype)


def results(model: nn.Module, *, autocast: bool = False, **named: Any) -> list[Tensor]:
    """Return the logits and all gradients of a step."""
    model.zero_grad()
    ids = TOKENS.to(next(model.parameters()).device)
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
        output = model(input_ids=ids, labels=ids, use_cache=False, **named)
    output.loss.backward()
    return [
        output.logits.detach(),
        *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None),
    ]


def assert_equal(ours: list[Tensor], expected: list[Tensor]) -> None:
    """On a GPU PyTorch chooses other kernels for other strides, which may sum in another order."""
    assert len(ours) == len(expected)
    for tensor, stock in zip(ours, expected, strict=True):
        bound = 4 * torch.finfo(stock.dtype).eps
        assert relative(tensor, stock) < bound if stock.is_cuda else torch.equal(tensor, stock)


@pytest.mark.parametrize("model_type", slow_but(QUICK, CONVOLVING))
def test_a_model_has_the_bits_of_stock_by_pytorchs_operators_and_is_near_by_kernels(
    model_type: str, device: str, launches: list[str]
) -> None:
    for dtype, autocast in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, False)):
        stock = model_of(model_type, device, dtype)
        fused = copy.deepcopy(stock)
        report = fused_norm.apply_fused_norm(fused, strict=False, **CONV_ALONE)
        rows = [row for row in report.kept if row.kind == "conv"]
        if model_type not in IN_FORWARDS:
            assert (report.counts["conv"], rows) == (0, [])
            return
        count = CONVOLVING[model_type][1]
        assert (report.counts["conv"], rows) == (count, [])
        expected = results(stock, autocast=autocast)
        with by_reference() as noted:
            assert_equal(results(fused, autocast=autocast), expected)
        assert noted == ["causal_conv1d"] * count
        if dtype == torch.float32 and not autocast:
            launches.clear()
            # Stock's own gradients of a delta rule with random weights are 2.6e-5 from float64.
            assert_all_near(results(fused), expected, 1e-4)
            assert launches == ["causal_conv1d"] * count


@pytest.mark.parametrize("model_type", [name for name in ("qwen3_next", "lfm2") if name in IN_FORWARDS])
def test_generation_and_recomputation_give_what_stock_gives(model_type: str, device: str) -> None:
    stock = model_of(model_type, device).eval()
    fused = copy.deepcopy(stock)
    fused_norm.apply_fused_norm(fused, strict=False, **CONV_ALONE)
    how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(fused.generate(TOKENS.to(device), **how), stock.generate(TOKENS.to(device), **how))
    kept = results(fused.train())
    fused_norm.apply_fused_norm(fused, strict=False, recompute=True, **CONV_ALONE)
    assert_equal(results(fused), kept)
    fused_norm.remove_fused_norm(fused)
    assert_equal(results(fused), results(stock.train()))


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any) -> Tensor:
    """Compute what transformers' function does."""
    taps, length = weight.shape[-1], x.shape[-1]
    cast = x.to(weight.dtype)
    y = functional.conv1d(cast, weight.unsqueeze(1), bias, padding=taps - 1, groups=len(weight))[:, :, :length]
    return (functional.silu(y) if activation in ("silu", "swish") else y).to(x.dtype)


class Convolves(nn.Module):
    """Holds a causal convolution of rows."""

    def __init__(self, taps: int = 4, bias: bool = True, **how: Any) -> None:
        super().__init__()
        settings = {"groups": 6, "padding": taps - 1, "bias": bias, **how}
        self.conv1d = nn.Conv1d(6, 6, taps, **settings)
        self.act = nn.SiLU()


class ByFunction(Convolves):
    def forward(self, x: Tensor, **further: Any) -> Tensor:
        return convolved_causal_conv1d_fn(
            x.transpose(1, 2), self.conv1d.weight.squeeze(1), bias=self.conv1d.bias, activation="swish", **further
        ).transpose(1, 2)


convolved_causal_conv1d_fn = convolved


class BySilu(Convolves):
    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        x = x.transpose(1, 2)
        x = functional.silu(self.conv1d(x)[:, :, :length])
        return x.transpose(1, 2)


class Turned(Convolves):
    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        return self.act(self.conv1d(x.transpose(1, 2))[..., :length].transpose(1, 2))


class ByItsShape(Convolves):
    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        return functional.silu(self.conv1d(x)[:, :, : x.shape[-1]]).transpose(1, 2)


class Alone(Convolves):
    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        y = self.conv1d(x.transpose(1, 2))[..., :length]
        return y.transpose(1, 2)


FORMS = (ByFunction, BySilu, Turned, ByItsShape, Alone)


def fused_of(module: nn.Module) -> tuple[Any, Any]:
    """Return a fused copy of a module, and the report."""
    model = nn.ModuleList([copy.deepcopy(module)])
    report = fused_norm.apply_fused_norm(model, strict=False)
    return model[0], report


def grads(module: nn.Module, x: Tensor, **further: Any) -> list[Tensor]:
    """Return a module's output and its gradients."""
    leaf = x.detach().clone().requires_grad_()
    y = module(leaf, **further)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [leaf, *module.parameters()])]


@pytest.mark.parametrize(("form", "taps"), [(ByFunction, 2), (BySilu, 3), *((form, 4) for form in FORMS[1:])])
def test_every_form_of_source_is_fused_with_the_bits_of_stock(form: type[Convolves], taps: int, device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        stock = form(taps, bias=taps != 3).to(device, dtype)
        fused, report = fused_of(stock)
        assert report.counts["conv"] == 1
        x = torch.randn(2, 7, 6, device=device, dtype=dtype)
        with by_reference() as noted:
            assert_equal(grads(fused, x), grads(stock, x))
        assert noted == ["causal_conv1d"]
        assert_all_near(grads(fused, x), grads(stock, x), 8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("how", [{"padding_mode": "replicate"}, {"dilation": 2}, {"padding": 2}])
def test_no_other_convolution_is_a_site(how: dict[str, Any]) -> None:
    _, report = fused_of(BySilu(**how))
    assert not [row for row in report.rows if row.kind == "conv"]


def test_a_site_that_is_kept_says_why(device: str) -> None:
    hooked = Turned()
    hooked.conv1d.register_forward_hook(lambda *_: None)
    replaced = BySilu()
    replaced.conv1d.forward = lambda x: x
    with_gelu = Turned()
    with_gelu.act = nn.GELU()
    for module, words in (
        (hooked, "hooks or other code stand on its convolution"),
        (replaced, "hooks or other code stand on its convolution"),
        (with_gelu, "the activation of its convolution is gelu"),
    ):
        (row,) = [row for row in fused_of(module)[1].kept if row.kind == "conv"]
        assert words in row.reason
    model = nn.ModuleList([Turned()])
    (row,) = [row for row in fused_norm.apply_fused_norm(model, conv=False, strict=False).kept if row.kind == "conv"]
    assert (row.reason, row.cause) == ("switched off: conv=False", "option")


def test_a_hook_or_another_activation_that_comes_later_is_respected(device: str) -> None:
    x, seen = torch.randn(2, 7, 6, device=device), []
    for change in (
        lambda module: module.conv1d.register_forward_hook(lambda *_: seen.append(1)),
        lambda module: setattr(module, "act", nn.Tanh()),
        lambda module: setattr(module.conv1d, "padding", (5,)),
    ):
        stock = Turned().to(device)
        fused, _ = fused_of(stock)
        change(stock), change(fused)
        assert_equal(grads(fused, x), grads(stock, x))
    assert len(seen) == 2


def test_stock_code_runs_if_it_would_be_another_one(
    device: str, monkeypatch: pytest.MonkeyPatch, launches: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    stock = ByFunction().to(device)
    fused, _ = fused_of(stock)
    x = torch.randn(2, 7, 6, device=device)
    with disabled():
        assert_equal(grads(fused, x), grads(stock, x))
    assert not launches
    assert not logged(caplog)
    assert_equal(grads(fused, x, seq_idx=x), grads(fused, x))
    assert len(launches) == 2
    assert torch.equal(fused(x, initial_states=x), stock(x))
    assert len(launches) == 2
    assert any("other arguments: initial_states" in message for message in logged(caplog))
    monkeypatch.setitem(globals(), "convolved_causal_conv1d_fn", lambda *args, **kwargs: 2 * convolved(*args, **kwargs))
    assert torch.equal(fused(x), stock(x))


@pytest.mark.parametrize("form", [ByFunction, Turned, Alone])
def test_dtypes_are_those_of_stock(form: type[Convolves], device: str) -> None:
    """The weight is in fp32 and the rows are in 16 bits or fp32, with autocast and without."""
    stock = form().to(device)
    fused, _ = fused_of(stock)
    for dtype, autocast in ((torch.float32, True), (torch.float32, False), (torch.bfloat16, True)):
        x = torch.randn(2, 7, 6, device=device, dtype=dtype)
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            expected = grads(stock, x)
            with by_reference() as noted:
                ours = grads(fused, x)
            assert noted
            assert_equal(ours, expected)
            assert [grad.dtype for grad in ours] == [grad.dtype for grad in grads(fused, x)]


def by_packed_sequences(x: Tensor, *more: Any, seq_idx: Any = None, **named: Any) -> Tensor:
    y = convolved(x, *more, **named)
    return y if seq_idx is None else y * (seq_idx == 0)


def without_gradient(x: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, **_: Any) -> Tensor:
    return convolved(x, weight.detach(), bias, activation)


def test_what_computes_something_else_is_kept_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for function, words in (without_gradient, "computes no causal convolution"), (nn.Linear(2, 2), "not a function"):
        monkeypatch.setitem(globals(), "convolved_causal_conv1d_fn", function)
        (row,) = [row for row in fused_of(ByFunction())[1].kept if row.kind == "conv"]
        assert words in row.reason


def test_arguments_that_a_function_heeds_are_left_to_it(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer releases of transformers raise for packed sequences, which PyTorch's convolution cannot keep apart."""
    monkeypatch.setitem(globals(), "convolved_causal_conv1d_fn", by_packed_sequences)
    stock = ByFunction().to(device)
    fused, report = fused_of(stock)
    assert report.counts["conv"] == 1
    x, sequences = torch.randn(2, 7, 6, device=device), torch.zeros(7, dtype=torch.int64, device=device)
    with by_reference() as noted:
        assert_equal(grads(fused, x, seq_idx=sequences), grads(stock, x, seq_idx=sequences))
        assert not noted
        assert_equal(grads(fused, x, seq_idx=None), grads(stock, x))
        assert noted
