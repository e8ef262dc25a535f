"""Outputs of linears that are recomputed too: the same bits from fewer bytes, level by level."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

import fused_norm
from fused_norm.model_configs import build
from fused_norm.patcher import recompute

from .models import assert_same, loss_of, slow, tokens
from .saved_tensors import saved_bytes
from .test_four_bit import quantised

LINEARS = 4 if transformers.__version__.startswith("4.") else 5
"""How many linears of a layer are recomputed; transformers 4 copies values for the heads that share them."""

LEVELS = (False, True, "mlp", "attention")
BF16 = torch.bfloat16
LORA = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
WAYS: dict[str, dict[str, Any]] = {
    "autocast": {"autocast": True},
    "lora": {"dtype": BF16, "autocast": True, "lora": {**LORA, "lora_dropout": 0.2}},
    "queries alone are trained": {"dtype": BF16, "trained": "q_proj"},
}
CASES = [
    ("qwen3", "autocast"),
    slow("gemma2", "lora"),
    slow("gemma3_text", "lora"),
    slow("qwen3", "queries alone are trained"),
]


def stock(
    model_type: str, device: str, *, dtype: torch.dtype = torch.float32, lora: Any = None, trained: str = ""
) -> nn.Module:
    model = build(model_type, seed=0, device=device, dtype=dtype)
    if lora is not None:
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(**lora))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and trained in name)
    return model.train()


def step(
    model: nn.Module, device: str, *, autocast: bool = False, ids: Tensor | None = None
) -> tuple[int, list[Tensor | None]]:
    """Return the bytes that a forward keeps, and its loss and gradients, including those of the hidden states."""
    ids = tokens(device, batch=2, length=6) if ids is None else ids
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    torch.manual_seed(2)
    with torch.autocast(device, BF16, enabled=autocast):
        output = model(inputs_embeds=embedded, output_hidden_states=True, use_cache=False)
    loss = sum(tensor.float().square().mean() for tensor in (output.logits, *output.hidden_states))
    kept = saved_bytes(loss.grad_fn)
    states = [state for state in output.hidden_states if state.grad_fn is not None]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return kept, [loss.detach(), *torch.autograd.grad(loss, [embedded, *parameters, *states], allow_unused=True)]


@pytest.mark.parametrize(("model_type", "way"), CASES)
def test_every_level_has_the_bits_of_the_one_before_and_keeps_less(
    model_type: str, way: str, device: str, products: list[str]
) -> None:
    options = dict(WAYS[way])
    autocast = options.pop("autocast", False)
    kept, counts, results = [], [], []
    for level in LEVELS:
        model = stock(model_type, device, **options)
        fused_norm.apply_fused_norm(model, recompute=level)
        products.clear()
        bytes_kept, tensors = step(model, device, autocast=autocast)
        kept.append(bytes_kept), counts.append(len(products)), results.append(tensors)
    for tensors in results[1:]:
        assert_same(tensors, results[0])
    layers = model.config.num_hidden_layers
    assert counts[:3] == [0, 0, 2 * layers]
    assert kept[0] >= kept[1] > kept[2]
    if (model_type, device) == ("qwen3", "cpu"):  # other attention keeps copies of what it reads
        assert counts[3] == LINEARS * layers
        assert kept[2] > kept[3]


def bytes_held_by(forward: Callable[[], Tensor], device: str) -> int:
    """Return the bytes that are allocated after a forward, whose result lives, and were not before it."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        before = torch.cuda.memory_stats().get("requested_bytes.all.current", 0)
        _result = forward()
        gc.collect()  # Triton's interpreter leaves cycles with tensors in them
        after = torch.cuda.memory_stats().get("requested_bytes.all.current", 0)
    events = profile.profiler.kineto_results.events()
    return after - before if device == "cuda" else sum(it.nbytes() for it in events if it.name() == "[memory]")


@pytest.mark.parametrize("lora", [None, slow(LORA)])
def test_every_level_holds_fewer_bytes_than_the_one_before(lora: Any, device: str) -> None:
    """What is recomputed is freed, whoever else might hold it."""
    held = []
    for level in LEVELS:
        model = stock("llama", device, lora=lora)
        fused_norm.apply_fused_norm(model, recompute=level)
        for _ in range(2):  # what a first call keeps for later ones does not count
            with torch.autocast(device, BF16):
                nbytes = bytes_held_by(lambda model=model: loss_of(model, tokens(device)), device)
        held.append(nbytes)
    levels = held if device == "cpu" else held[:3]  # other attention keeps copies of what it reads
    assert all(more > less > 0 for more, less in pairwise(levels)), held


@pytest.mark.parametrize("rows", [6, slow(1)])
def test_4_bit_linears_with_adapters_are_recomputed(rows: int, device: str, products: list[str]) -> None:
    results = []
    for level in LEVELS:
        model = stock("qwen3", device, dtype=BF16)
        linears = [name for name, module in model.model.named_modules() if isinstance(module, nn.Linear)]
        for name in linears:
            linear = model.model.get_submodule(name)
            if name.endswith("layers.0.mlp.up_proj"):
                linear.bias = nn.Parameter(torch.ones_like(linear.weight[:, 0]), requires_grad=False)
            model.model.set_submodule(name, quantised(linear, device))
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(**{**LORA, "lora_dropout": 0.2})).train()
        fused_norm.apply_fused_norm(model, recompute=level)
        products.clear()
        tensors = step(model, device, autocast=True, ids=tokens(device, batch=1, length=rows))[1]
        results.append((tensors, products.count("_linear_in_4_bits")))
    layers = model.config.num_hidden_layers
    # A single row takes another kernel.
    expected = [0, 0, 2 * layers - 1, LINEARS * layers - 1] if rows > 1 else [0] * 4
    assert [count for _, count in results] == expected
    for tensors, _ in results[1:]:
        assert_same(results[0][0], tensors)


def with_frozen_bias(linear: nn.Linear) -> None:
    bias = torch.linspace(-1, 1, linear.out_features, device=linear.weight.device)
    linear.bias = nn.Parameter(bias, requires_grad=False)


CHANGES: dict[str, tuple[Callable[[nn.Linear], Any], bool]] = {
    "a frozen weight": (lambda up: up.weight.requires_grad_(False), True),
    "a frozen bias": (with_frozen_bias, False),
    "a hook in place": (lambda up: up.register_forward_hook(lambda _, __, y: y.mul_(3.0)), False),
    "a hook with a function": (lambda up: up.register_forward_hook(lambda _, __, y: y.exp()), False),
}
"""A change of a linear, and whether its output is then recomputed."""


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_not_known_is_kept_and_named(
    name: str, device: str, products: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recompute, "_warned", set())
    change, is_recomputed = CHANGES[name]
    results = []
    for level in (False, "mlp"):
        model = stock("llama", device)
        change(model.model.layers[0].mlp.up_proj)
        fused_norm.apply_fused_norm(model, recompute=level)
        with caplog.at_level(logging.WARNING, logger="fused_norm"):
            results.append(step(model, device)[1])
    assert_same(*results)
    assert len(products) == 2 * model.config.num_hidden_layers - (not is_recomputed)
    assert any("recompute keeps outputs of linears" in message for message in caplog.messages) == (not is_recomputed)


def test_layers_that_are_checkpointed_have_a_row_and_recompute_nothing(device: str) -> None:
    model = stock("llama", device)
    model.gradient_checkpointing_enable()
    model.model.layers[0].gradient_checkpointing = False
    reason = "gradient checkpointing is on in this layer, and keeps less"
    for _ in range(2):
        report = fused_norm.apply_fused_norm(model, recompute="attention")
        assert [row.reason for row in report.recompute] == [None, reason]
    assert [layer.fused_norm_recompute for layer in model.model.layers] == ["attention", False]
    model.gradient_checkpointing_disable()
    fused_norm.apply_fused_norm(model, recompute="mlp")
    assert [layer.fused_norm_recompute for layer in model.model.layers] == ["mlp", "mlp"]


def test_a_weight_with_other_memory_is_recomputed_from_what_the_forward_has_read(device: str) -> None:
    gradients = []
    for level in (False, "attention"):
        model = stock("llama", device)
        fused_norm.apply_fused_norm(model, recompute=level)
        loss = loss_of(model, tokens(device))
        for parameter in model.parameters():
            parameter.data = parameter.data * 2
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert_same(*gradients)


def test_graphs_are_walked_twice_and_differentiated_again(device: str) -> None:
    results = []
    for level in (False, "attention"):
        model = stock("qwen3", device)
        model.config._attn_implementation = "eager"  # the flash attention of a CPU has no second derivative
        fused_norm.apply_fused_norm(model, recompute=level)
        layer = model.model.layers[0]
        weights = [layer.self_attn.q_proj.weight, layer.mlp.up_proj.weight, layer.input_layernorm.weight]
        loss = loss_of(model, tokens(device))
        first = torch.autograd.grad(loss, weights, retain_graph=True)
        assert_same(first, torch.autograd.grad(loss, weights, retain_graph=True))
        in_graph = torch.autograd.grad(loss, weights, create_graph=True)
        second = torch.autograd.grad(sum(grad.square().sum() for grad in in_graph), weights)
        assert all(grad.abs().max() > 0 for grad in second)
        results.append([*first, *second])
    assert_same(*results)
