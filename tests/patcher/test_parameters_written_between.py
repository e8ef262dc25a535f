"""Parameters that are written between a forward and its backward: a patched model trains, or raises, as stock does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fused_norm.model_configs import build

from .models import assert_gradients_near, fused_copy, gradients_of, slow, tokens
from .test_adapters import adapted

BF16 = torch.bfloat16
WRITES = pytest.mark.parametrize("write", ["data", "counted"])


def gradients(model: Any, device: str, write: str, which: str, autocast: bool) -> dict[str, Tensor] | None:
    """Return gradients of a loss, with parameters ``which`` written before its backward; None if autograd raises."""
    ids = tokens(device)
    model.zero_grad()
    with torch.autocast(device, BF16, enabled=autocast):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    written = [parameter for name, parameter in model.named_parameters() if which in name]
    assert written
    before = [parameter.detach().clone() for parameter in written]
    with torch.no_grad():
        for parameter in written if write != "none" else ():
            (parameter.data if write == "data" else parameter).mul_(-2)
    try:
        loss.backward()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return None
    finally:
        for parameter, value in zip(written, before, strict=True):
            parameter.data.copy_(value)
    return gradients_of(model)


def assert_trains_or_raises_as_stock(
    stock: nn.Module, device: str, write: str, which: str, tolerance: float, *, autocast: bool = False, **options: Any
) -> bool:
    """Compare the gradients of a model and its fused copy, and return whether there are any."""
    fused = fused_copy(stock, **options)
    actual, expected = (gradients(model, device, write, which, autocast) for model in (fused, stock))
    if actual is None or expected is None:
        assert actual is expected
        return False
    assert_gradients_near(actual, expected, tolerance)
    return True


@WRITES
@pytest.mark.parametrize("level", [False, True, slow("mlp")])
def test_norms_that_stock_adds_one_to_and_casts_of_lora_are_those_of_the_forward(
    level: Any, write: str, device: str
) -> None:
    norms, lora = build("gemma3_text", seed=0, device=device), adapted(device, "qwen3", torch.float32)
    assert assert_trains_or_raises_as_stock(norms, device, write, "norm", 1e-4, recompute=level)
    assert assert_trains_or_raises_as_stock(lora, device, write, "lora_", 0.05, autocast=True, recompute=level)


@WRITES
def test_weights_that_stock_keeps_without_a_cast_are_read_in_the_backward(write: str, device: str) -> None:
    norms, lora = build("llama", seed=0, device=device), adapted(device, "qwen3").bfloat16()
    for stock, which, tolerance in ((norms, "norm", 1e-4), (lora, "lora_", 0.1)):
        trains = assert_trains_or_raises_as_stock(stock, device, write, which, tolerance)
        assert trains == (write == "data"), which


@pytest.mark.parametrize("factors", [torch.float32, torch.float64])
def test_lora_layers_in_float64_run_under_autocast_as_stocks_do(factors: torch.dtype, device: str) -> None:
    stock = adapted(device, "qwen3", torch.float64)
    for name, parameter in stock.named_parameters():
        parameter.data = parameter.data.to(factors) if "lora_" in name else parameter.data
    assert assert_trains_or_raises_as_stock(stock, device, "none", "lora_", 1e-12, autocast=True)
