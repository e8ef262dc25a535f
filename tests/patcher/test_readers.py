"""Linears that read a norm get an output of it each: the bits of one output, and nobody can tell."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fused_norm
from fused_norm.model_configs import build
from fused_norm.patcher.patterns.readers import find_inputs

from .models import relative, tokens

BF16, FP32 = torch.bfloat16, torch.float32
HOW = {
    "bf16": (BF16, False, None),
    "autocast": (FP32, True, None),
    "adapters": (BF16, True, 0.0),
    "adapters with dropout": (BF16, True, 0.1),
    "adapters in fp32 beside bf16": (BF16, False, 0.0),
}
"""The dtype of a model, whether it runs under autocast, and the dropout of its adapters."""

FAMILIES = ["qwen3", "llama", "gemma3_text", *(pytest.param(f, marks=pytest.mark.slow) for f in ("gemma2", "granite"))]


def made(family: str, how: str, device: str) -> nn.Module:
    dtype, _, dropout = HOW[how]
    torch.manual_seed(0)
    model = build(family, seed=0, dtype=dtype, device=device)
    if dropout is None:
        return model
    lora = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout, init_lora_weights=False)
    return peft.get_peft_model(model, lora)


def step(model: nn.Module, how: str, device: str) -> dict[str, Tensor]:
    """Logits, and the gradients of every parameter and of every hidden state."""
    ids = tokens(device)
    torch.manual_seed(3)
    with torch.autocast(device, BF16) if HOW[how][1] else contextlib.nullcontext():
        output = model(input_ids=ids, labels=ids, use_cache=False, output_hidden_states=True)
    hidden = {f"hidden {i}": one for i, one in enumerate(output.hidden_states) if one.requires_grad}
    wanted = hidden | {name: one for name, one in model.named_parameters() if one.requires_grad}
    found = torch.autograd.grad(output.loss, list(wanted.values()), allow_unused=True)
    assert all(one is not None for one in found)
    return dict(zip(wanted, found, strict=True)) | {"logits": output.logits.detach()}


def pair(family: str, how: str, device: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A fused model whose linears read one tensor, and one whose linears have inputs of their own."""
    without = made(family, how, device)
    within = copy.deepcopy(without)
    fused_norm.apply_fused_norm(without, readers=False)
    report = fused_norm.apply_fused_norm(within, **options)
    assert [row.reason for row in report.readers] == [None] * 2 * within.config.num_hidden_layers
    return without, within


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert equal bits; nearly equal numbers on a GPU, where a kernel of other dtypes may add up in another order."""
    assert found.keys() == expected.keys()
    if next(iter(found.values())).is_cuda:
        assert [name for name in expected if relative(found[name], expected[name]) > 2e-3] == []
    else:
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@contextlib.contextmanager
def inputs_of_linears() -> Iterator[list[Tensor]]:
    """What the linears of a model are given, in order."""
    seen: list[Tensor] = []
    linear = functional.linear

    def noted(x: Tensor, *rest: Any) -> Tensor:
        seen.append(x)
        return linear(x, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "linear", noted)
        yield seen


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_bit_is_that_of_one_output(family: str, how: str, device: str) -> None:
    without, within = pair(family, how, device)
    assert_same(step(within, how, device), step(without, how, device))


def test_adapters_of_the_other_16_bits_round_their_input_to_these_first(device: str) -> None:
    model = peft.get_peft_model(
        build("llama", seed=0, device=device),
        peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    )
    for name, one in model.named_parameters():
        if "lora_" in name:
            one.data = one.data.bfloat16()
    logits = []
    for readers in (False, True):
        fused = copy.deepcopy(model)
        assert not [row for row in fused_norm.apply_fused_norm(fused, readers=readers).readers or () if row.reason]
        with torch.no_grad(), torch.autocast(device, torch.float16):
            logits.append(fused(input_ids=tokens(device), use_cache=False).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("how", ["autocast", "adapters"])
def test_what_is_recomputed_has_the_same_bits(how: str, device: str) -> None:
    without, within = pair("qwen3", how, device, recompute=True)
    assert_same(step(within, how, device), step(without, how, device))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_have_the_same_bits(reentrant: bool, device: str) -> None:
    models = pair("llama", "autocast", device)
    for model in models:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    ids, gradients = tokens(device), []
    for model in models:
        with torch.autocast(device, BF16):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: one.grad for name, one in model.named_parameters()})
    assert_same(gradients[1], gradients[0])


def test_linears_read_outputs_of_their_own_in_the_dtype_that_autocast_casts_to(device: str) -> None:
    without, within = pair("llama", "autocast", device)
    for model, dtype, tensors in ((without, FP32, 1), (within, BF16, 3)):
        with inputs_of_linears() as seen, torch.autocast(device, BF16):
            model(input_ids=tokens(device), use_cache=False)
        q, k, v, _, gate, up, _ = seen[:7]
        assert {one.dtype for one in (q, k, v, gate, up)} == {dtype}
        assert len({id(one) for one in (q, k, v)}) == tensors
        assert len({one.data_ptr() for one in (q, k, v)}) == 1
        assert (gate is up) == (model is without)


def hook_on_linear(model: Any) -> None:
    model.layers[0].self_attn.k_proj.register_forward_pre_hook(lambda *_: None)


def hook_on_attention(model: Any) -> None:
    model.layers[0].self_attn.register_forward_hook(lambda *_: None)


def hook_on_norm(model: Any) -> None:
    model.layers[0].input_layernorm.register_forward_hook(lambda *_: None)


def forward_on_linear(model: Any) -> None:
    linear = model.layers[0].self_attn.q_proj
    linear.forward = lambda x: functional.linear(x, linear.weight)


def other_linear(model: Any) -> None:
    class Other(nn.Linear):
        pass

    model.layers[0].self_attn.v_proj.__class__ = Other


def compiled_attention(model: Any) -> None:
    model.layers[0].self_attn.compile(backend="eager")


@pytest.mark.parametrize(
    "change", [hook_on_linear, hook_on_attention, hook_on_norm, forward_on_linear, other_linear, compiled_attention]
)
def test_who_could_tell_gets_what_a_stock_norm_returns(change: Callable[[Any], None], device: str) -> None:
    model = build("llama", seed=0, device=device)
    fused_norm.apply_fused_norm(model)
    change(model.model)
    with inputs_of_linears() as seen, torch.autocast(device, BF16):
        model(input_ids=tokens(device), use_cache=False)
    first, second = [one for one in seen if one.shape[-1] == model.config.hidden_size][:3], seen[7:10]
    assert {one.dtype for one in first} == {FP32}
    assert {one.dtype for one in second} == {BF16}, "the second layer is as it was"


def test_switched_off_and_removed_all_read_one_tensor(device: str) -> None:
    model = build("llama", seed=0, device=device)
    fused_norm.apply_fused_norm(model)

    def read() -> int:
        with inputs_of_linears() as seen, torch.autocast(device, BF16):
            model(input_ids=tokens(device), use_cache=False)
        return len({id(one) for one in seen[:3]})

    assert read() == 3
    with fused_norm.disabled():
        assert read() == 1
    fused_norm.apply_fused_norm(model, readers=False)
    assert read() == 1
    fused_norm.apply_fused_norm(model)
    assert read() == 3
    fused_norm.remove_fused_norm(model)
    assert read() == 1
    assert not any("fused_norm" in type(module).__module__ for module in model.modules())


def test_a_block_that_reads_a_norm_otherwise_has_a_row_with_the_reason(device: str) -> None:
    report = fused_norm.apply_fused_norm(build("qwen3_moe", seed=0, device=device))
    reasons = {row.path.rpartition(".")[2]: row.reason for row in report.readers if row.reason is not None}
    assert reasons.keys() == {"mlp"}
    assert reasons["mlp"].startswith("its forward reads hidden_states in hidden_states.")
    assert reasons["mlp"] in " ".join(str(report).split())
    assert '"readers": [' in report.to_json()


class Attention(nn.Module):
    """Forwards that read ``x`` in several ways are put on it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)


class ByLinears(Attention):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 1:
            return self.q(x) + self.k(x)
        return self.k(x)


class ByAView(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x.view(-1, 8))


class InALoop(Attention):
    def forward(self, x: Tensor) -> Tensor:
        total = 0
        for _ in range(2):
            total = total + self.q(x)
        return total


class WhereItMayBeAnother(Attention):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if y is not None:
            x = y
        return self.q(x) + self.k(x)


class ByAFunctionInside(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return (lambda: self.q(x))() + self.k(x)


@pytest.mark.parametrize(
    ("block", "readers", "other"),
    [
        (ByLinears, ("q", "k", "k"), None),
        (ByAView, ("q",), "x.view"),
        (InALoop, (), "self.q(x)"),
        (WhereItMayBeAnother, (), "self.q(x)"),
        (ByAFunctionInside, ("q", "k"), "a function inside"),
    ],
)
def test_who_reads_an_argument(block: type[nn.Module], readers: tuple[str, ...], other: str | None) -> None:
    found = find_inputs(block)[0]
    assert (found.readers, found.other) == (readers, other)
