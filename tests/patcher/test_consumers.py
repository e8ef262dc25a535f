"""Models whose linears read a norm's outputs of their own: gradients, casts and observers are those of stock."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import fused_norm
from fused_norm.model_configs import build

from .models import (
    assert_all_near,
    assert_gradients_near,
    distance,
    fused_copy,
    loss_of,
    relative,
    slow,
    tokens,
)

BF16, FP32 = torch.bfloat16, torch.float32
HOW = {
    "bf16": (BF16, False, None),
    "autocast": (FP32, True, None),
    "adapters": (BF16, True, 0.0),
    "adapters with dropout": (BF16, True, 0.1),
    "adapters in fp32 beside bf16": (BF16, False, 0.0),
}
"""The dtype of a model, whether it runs under autocast, and the dropout of its adapters."""


def model_of(family: str, how: str, device: str) -> nn.Module:
    dtype, _, dropout = HOW[how]
    torch.manual_seed(0)
    model = build(family, seed=0, dtype=dtype, device=device)
    if dropout is None:
        return model
    lora = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout, init_lora_weights=False)
    return peft.get_peft_model(model, lora)


def autocast(device: str, how: str = "autocast") -> Any:
    return torch.autocast(device, BF16, enabled=HOW[how][1])


def logits_of(model: nn.Module, device: str, how: str = "autocast") -> Tensor:
    with autocast(device, how):
        return model(input_ids=tokens(device), use_cache=False).logits


def step(model: nn.Module, device: str, how: str = "bf16") -> dict[str, Tensor]:
    """Return logits, and the gradients of all parameters and hidden states."""
    ids = tokens(device)
    torch.manual_seed(3)
    with autocast(device, how):
        output = model(input_ids=ids, labels=ids, use_cache=False, output_hidden_states=True)
    tensors = {f"hidden {i}": state for i, state in enumerate(output.hidden_states) if state.requires_grad}
    tensors |= {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    gradients = torch.autograd.grad(output.loss, list(tensors.values()))
    return dict(zip(tensors, gradients, strict=True)) | {"logits": output.logits.detach()}


@pytest.mark.parametrize(
    ("family", "how"),
    [
        *(("qwen3", "bf16"), ("gemma3_text", "autocast"), ("llama", "adapters")),
        *(slow("gemma2", "adapters"), slow("granite", "autocast")),
    ],
)
def test_gradients_are_as_near_to_float64_as_those_of_stock_at_hidden_states_too(
    family: str, how: str, device: str
) -> None:
    stock = model_of(family, how, device)
    exact = step(copy.deepcopy(stock).double(), device)
    errors = [
        {name: float(distance(value, exact[name]) / exact[name].norm()) for name, value in results.items()}
        for results in (step(model, device, how) for model in (stock, fused_copy(stock)))
    ]
    theirs, ours = errors
    assert sum(ours.values()) <= 1.1 * sum(theirs.values())
    assert not {name: error for name, error in ours.items() if error > 1.5 * theirs[name] + 1e-2}


@pytest.mark.parametrize(
    ("family", "how", "rerun"),
    [
        *(("gemma3_text", "autocast", ""), ("llama", "adapters with dropout", ""), ("qwen3", "autocast", "recomputed")),
        *(("llama", "autocast", "checkpointed"), slow("qwen3", "adapters", "recomputed"), slow("qwen3", "bf16", "")),
    ],
)
def test_every_bit_is_that_of_one_output(family: str, how: str, rerun: str, device: str) -> None:
    without = model_of(family, how, device)
    within = copy.deepcopy(without)
    fused_norm.apply_fused_norm(without, shared_inputs=False)
    report = fused_norm.apply_fused_norm(within, recompute=rerun == "recomputed")
    assert [row.reason for row in report.shared_inputs] == [None] * 2 * within.config.num_hidden_layers
    if rerun == "checkpointed":
        without.gradient_checkpointing_enable({"use_reentrant": False})
        within.gradient_checkpointing_enable({"use_reentrant": False})
    actual, expected = step(within, device, how), step(without, device, how)
    # On a GPU a kernel of other dtypes may add up in another order.
    assert_all_near(actual, expected, 2e-3 if device == "cuda" else 0.0)


# ---- Casts ----


@contextlib.contextmanager
def inputs_of_linears() -> Iterator[list[Tensor]]:
    """Yield a list of the inputs of linears, in the order of their calls."""
    inputs: list[Tensor] = []

    def noted(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is nn.Linear.forward.__code__:
            inputs.append(frame.f_locals["input"])

    before = sys.getprofile()
    sys.setprofile(noted)  # a replacement of the linears' code would be noticed
    try:
        yield inputs
    finally:
        sys.setprofile(before)


def test_linears_read_the_dtype_that_autocast_casts_to_unless_it_is_switched_off_or_removed(device: str) -> None:
    model = build("llama", seed=0, device=device)

    def read() -> set[torch.dtype]:
        with inputs_of_linears() as inputs:
            logits_of(model, device)
        q, k, v, _, gate, up, _ = inputs[:7]
        assert q.data_ptr() == k.data_ptr() == v.data_ptr()
        assert gate.data_ptr() == up.data_ptr()
        return {x.dtype for x in (q, k, v, gate, up)}

    fused_norm.apply_fused_norm(model)
    assert read() == {BF16}
    with fused_norm.disabled():
        assert read() == {FP32}
    fused_norm.apply_fused_norm(model, shared_inputs=False)
    assert read() == {FP32}
    fused_norm.apply_fused_norm(model)
    assert read() == {BF16}
    fused_norm.remove_fused_norm(model)
    assert read() == {FP32}


def test_a_compiled_attention_gets_what_a_stock_norm_returns(device: str) -> None:
    model = fused_copy(build("llama", seed=0, device=device))
    arguments: list[Any] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        arguments.extend(inputs)
        return graph

    model.model.layers[0].self_attn.compile(backend=backend)
    logits_of(model, device)
    hidden = [x for x in arguments if isinstance(x, Tensor) and x.shape[-1] == model.config.hidden_size]
    assert [x.dtype for x in hidden if x.dim() == 3] == [FP32]


# ---- Code of others ----


class Rounding(TorchFunctionMode):
    """A mode that doubles the result of ``torch.nn.functional.linear``, like a mode that quantises or calibrates."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        return 2 * y if func is functional.linear else y


LINEAR, FORWARD = functional.linear, nn.Linear.forward


@contextlib.contextmanager
def swapped_code() -> Iterator[None]:
    def doubled(self: Any, x: Tensor) -> Tensor:
        return torch.matmul(x.float(), self.weight.T.float()) * 2

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FORWARD, "__code__", doubled.__code__)
        yield


REPLACED: dict[str, Callable[[], Any]] = {
    "the function": lambda: mock.patch.object(functional, "linear", lambda *args: 2 * LINEAR(*args)),
    "the forward": lambda: mock.patch.object(nn.Linear, "forward", lambda self, x: 2 * FORWARD(self, x)),
    "the code of the forward": swapped_code,
    "by a mode": Rounding,
}


@pytest.mark.parametrize(
    ("how", "is_patched_inside"),
    [("autocast", False), ("adapters", True), ("adapters in fp32 beside bf16", False)],
)
@pytest.mark.parametrize("replaced", REPLACED)
def test_linears_that_other_code_has_replaced_run_as_in_stock(
    replaced: str, how: str, is_patched_inside: bool, device: str
) -> None:
    model = model_of("llama", how, device)
    fused = copy.deepcopy(model) if is_patched_inside else fused_copy(model)
    with torch.set_grad_enabled(is_patched_inside), REPLACED[replaced]():
        if is_patched_inside:
            fused_norm.apply_fused_norm(fused)
        stock_logits, logits = (logits_of(variant, device, how) for variant in (model, fused))
    assert relative(logits, stock_logits) < 2e-2


def test_wrappers_that_come_after_the_patch_change_nothing(device: str) -> None:
    fused = fused_copy(build("llama", seed=0, device=device))
    wrapped, steps = copy.deepcopy(fused), []
    for layer in wrapped.model.layers:
        layer.self_attn, layer.mlp = checkpoint_wrapper(layer.self_attn), offload_wrapper(layer.mlp)
    for model in (fused, wrapped):
        with autocast(device):
            loss_of(model, tokens(device)).backward()
        steps.append({str(i): p.grad for i, p in enumerate(model.parameters())})
    assert_gradients_near(steps[1], steps[0], 2e-2)


def test_a_copy_of_an_mlp_that_peft_trains_whole_is_called_as_in_stock(device: str) -> None:
    stock = build("llama", seed=0, device=device)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["mlp"])
    fused = peft.get_peft_model(fused_copy(stock), copy.deepcopy(lora))
    assert relative(logits_of(fused, device), logits_of(peft.get_peft_model(stock, lora), device)) < 2e-2
