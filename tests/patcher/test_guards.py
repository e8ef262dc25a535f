"""A forward equals that of a fresh patch of its module, even if hooks were added or removed since."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn

import fused_norm
from fused_norm.patcher import fused_classes

from .forwards import layer_of
from .models import assert_all_near, relative, tokens, twins


@pytest.mark.parametrize(
    ("model_type", "place"),
    [("qwen3", "self_attn.q_norm"), ("qwen3", "mlp.act_fn"), ("gemma3_text", "post_attention_layernorm")],
)
def test_a_hook_leaves_fused_what_a_patch_would_still_fuse(
    model_type: str, place: str, device: str, launches: list[str]
) -> None:
    stock, fused = twins(model_type, device)
    ids, outputs, calls = tokens(device, batch=1, length=2), [], []

    def run() -> None:
        launches.clear()
        outputs.append(fused(ids, use_cache=False).logits)
        calls.append(Counter(launches))

    run()
    for module in (layer.get_submodule(place) for layer in fused.model.layers[:2]):
        module.register_forward_hook(lambda *_: None)
    run()
    fused_norm.apply_fused_norm(fused)
    run()
    assert calls[1] == calls[2]
    assert calls[0] != calls[1]
    assert all(relative(logits, stock(ids, use_cache=False).logits) < 1e-5 for logits in outputs)


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.RMSNorm(16, eps=1e-5) for _ in range(4))


AFTER_ADDS = """
    x = x + x * 2; y = self.a(x); x = x + y; y = self.b(x); x = x + y; y = self.c(x); x = x + y
    return self.d(x)
"""


def test_no_more_variants_are_made_than_are_worth_it(device: str, launches: list[str]) -> None:
    fused = layer_of(AFTER_ADDS, "x", Norms)().to(device)
    stock = copy.deepcopy(fused)
    fused_norm.apply_fused_norm(nn.ModuleList([fused]))
    x, added = torch.randn(5, 16, device=device), []
    expected = stock(x)
    for number in range(16):
        hooked = [norm for bit, norm in enumerate(fused.children()) if number >> bit & 1]
        handles = [norm.register_forward_hook(lambda *_: None) for norm in hooked]
        launches.clear()
        assert relative(fused(x), expected) < 1e-6
        added.append((launches.count("add_rms_norm"), 4 - len(hooked)))
        for handle in handles:
            handle.remove()
    most = [actual for actual, _ in added].index(0)
    assert 4 < most < 15
    assert [actual for actual, _ in added] == [possible for _, possible in added[:most]] + [0] * (16 - most)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_stock_forward_gets_the_tensor_that_a_norm_returns_in_stock(
    dtype: torch.dtype | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer passes the outputs of a norm to an attention that then runs its stock forward."""
    monkeypatch.setattr(fused_classes, "_MOST_VARIANTS", 0)
    stock, fused = twins("qwen3", device)
    monkeypatch.setattr(fused_classes, "rewritten_forward", None)
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
