"""Patched models on the meta device and under FakeTensorMode return tensors of the forms that stock returns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fused_norm
from fused_norm.model_configs import build, tiny_config

from .models import slow
from .ranks import called_operators

BF16 = torch.bfloat16
MODELS = [slow("qwen3"), "llama", "gemma3_text", "qwen3 with LoRA"]
OPTIONS = [{}, slow({"shared_inputs": False, "recompute": True}), {"recompute": "attention"}]


@contextlib.contextmanager
def autocast_on(device: str) -> Iterator[None]:
    """Turn autocast on for a type of device, even if there is no such device."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, BF16)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


def model_of(name: str) -> nn.Module:
    model = build(tiny_config(name.partition(" ")[0], num_hidden_layers=1), seed=0)
    if "LoRA" in name:
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "k_proj", "v_proj", "gate_proj"]))
    return model


def forms_of(model: nn.Module, ids: torch.Tensor, *, is_trained: bool) -> dict[str, Any]:
    """Return shapes, strides, dtypes and devices of all outputs of a call and of its gradients."""
    mask = torch.zeros(2, 1, 5, 5, device=ids.device)  # transformers reads the values of a mask of two dimensions
    with torch.set_grad_enabled(is_trained):
        output = model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False, output_hidden_states=True)
    if is_trained:
        output.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    states = dict(enumerate(output.hidden_states))
    tensors = {"loss": output.loss, "logits": output.logits, **states, **gradients}
    return {name: (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for name, tensor in tensors.items()}


def assert_forms_of_stock(model: nn.Module, ids: torch.Tensor, options: dict[str, Any]) -> int:
    """Assert stock's forms in all modes of gradients and autocast; return the number of fused operators' calls."""
    modes = contextlib.nullcontext, lambda: autocast_on("cpu"), lambda: autocast_on("cuda")

    def forms() -> list[dict[str, Any]]:
        found = []
        for mode in modes:
            with mode():
                found += [forms_of(model, ids, is_trained=is_trained) for is_trained in (True, False)]
        return found

    expected = forms()
    fused_norm.apply_fused_norm(model, **options)
    with called_operators() as called:
        assert forms() == expected
    return len(called)


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="its rotary embeddings fail on the meta device")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_on_meta_a_fused_model_makes_what_stock_makes(name: str, options: dict[str, Any]) -> None:
    ids = torch.zeros(2, 5, dtype=torch.int64, device="meta")
    assert assert_forms_of_stock(model_of(name).to("meta"), ids, options) > 0


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_fake_tensors_make_a_fused_model_return_what_stock_returns(name: str, options: dict[str, Any]) -> None:
    model, mode = model_of(name), FakeTensorMode()
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = nn.Parameter(mode.from_tensor(parameter.detach()), parameter.requires_grad)
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else mode.from_tensor(buffer)
    with mode:
        ids = torch.zeros(2, 5, dtype=torch.int64)
        assert_forms_of_stock(model, ids, options)
