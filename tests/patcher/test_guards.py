"""Hooks see what they see in stock, whenever they are added and removed, and the result is that of stock."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn

import fused_norm

from .forwards import layer_of
from .models import assert_all_near, relative, tokens, twins


@pytest.mark.parametrize(
    ("model_type", "place", "remains"),
    [
        ("qwen3", "self_attn.q_norm", "rope"),
        ("qwen3", "mlp.act_fn", "add_rms_norm"),
        ("gemma3_text", "post_attention_layernorm", "add_rms_norm"),
    ],
)
def test_a_hook_sees_what_it_sees_in_stock_as_long_as_it_is_there(
    model_type: str, place: str, remains: str, device: str, launches: list[str]
) -> None:
    models, seen = twins(model_type, device), ([], [])
    ids, calls, handles = tokens(device, batch=1, length=2), [], []

    def run() -> None:
        launches.clear()
        logits = [model(ids, use_cache=False).logits for model in models]
        assert relative(*logits) < 1e-5
        calls.append(Counter(launches))

    run()
    for model, values in zip(models, seen, strict=True):
        for layer in model.model.layers[:2]:
            module = layer.get_submodule(place)
            handles.append(module.register_forward_hook(lambda _, args, y, to=values: to.extend((*args, y))))
    run()
    assert len(seen[0]) == len(seen[1]) == 4
    assert all(x.shape == y.shape and relative(x, y) < 1e-5 for x, y in zip(*seen, strict=True))
    assert calls[0] != calls[1]
    assert calls[1][remains] > 0
    for handle in handles:
        handle.remove()
    run()
    assert calls[2] == calls[0]


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.RMSNorm(16, eps=1e-5) for _ in range(4))


AFTER_ADDS = """
    x = x + x * 2; y = self.a(x); x = x + y; y = self.b(x); x = x + y; y = self.c(x); x = x + y
    return self.d(x)
"""


def test_norms_without_hooks_beside_one_with_a_hook_add_still(device: str, launches: list[str]) -> None:
    fused = layer_of(AFTER_ADDS, "x", Norms)().to(device)
    stock = copy.deepcopy(fused)
    fused_norm.apply_fused_norm(nn.ModuleList([fused]))
    x = torch.randn(5, 16, device=device)
    expected = stock(x)
    for number in range(16):
        hooked = [norm for bit, norm in enumerate(fused.children()) if number >> bit & 1]
        handles = [norm.register_forward_hook(lambda *_: None) for norm in hooked]
        launches.clear()
        assert relative(fused(x), expected) < 1e-6
        assert (launches.count("add_rms_norm"), launches.count("rms_norm")) == (4 - len(hooked), len(hooked))
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_linears_beside_a_norm_with_a_hook_read_what_they_read_in_stock(dtype: torch.dtype | None, device: str) -> None:
    """A layer passes the outputs of a norm to an attention that then makes all its calls."""
    stock, fused = twins("qwen3", device)
    heard: list[int] = []
    fused.model.layers[0].self_attn.k_norm.register_forward_hook(lambda *_: heard.append(1))
    ids, grads = tokens(device, batch=1, length=3), []
    for model in (stock, fused):
        with torch.autocast(device, torch.bfloat16, enabled=dtype is not None):
            model(ids, use_cache=False).logits.float().sum().backward()
        grads.append([parameter.grad for parameter in model.model.layers[0].self_attn.parameters()])
    assert len(heard) == 1
    assert_all_near(*grads, (1e-5 if dtype is None else 3e-2))


def test_a_norm_that_takes_part_twice_is_heard_twice(device: str, launches: list[str]) -> None:
    fused, heard = layer_of("s = x + self.a(x * 2); return self.a(s)", "x", Norms)().to(device), []
    stock = copy.deepcopy(fused)
    fused_norm.apply_fused_norm(nn.ModuleList([fused]))
    x = torch.randn(5, 16, device=device)
    fused(x)
    assert launches == ["norm_add_norm"]
    fused.a.register_forward_hook(lambda *_: heard.append(1))
    assert relative(fused(x), stock(x)) < 1e-6
    assert len(heard) == 2
