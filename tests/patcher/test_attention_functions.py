"""Under autocast q and k are written in the dtype that attention casts them to, and no bit changes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations import sdpa_attention

import fused_norm
from fused_norm.model_configs import build, tiny_config

from .models import assert_same, fused_copy, relative, slow, tokens

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PADDED = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
FULL = torch.ones_like(PADDED)


@contextmanager
def attention_dtypes(*names: str) -> Iterator[list[tuple[torch.dtype, ...]]]:
    """Yield a list of dtypes in the forwards' calls of PyTorch's attention, noted without replacing a function.

    ``names``: the caller's variables whose dtypes are noted.
    """
    dtypes: list[tuple[torch.dtype, ...]] = []

    def noted(frame: Any, event: str, function: Any) -> None:
        is_attention = event == "c_call" and function is nn.functional.scaled_dot_product_attention
        if is_attention and torch._C._current_graph_task_id() == -1:
            dtypes.append(tuple(frame.f_locals[name].dtype for name in names))

    before = sys.getprofile()
    sys.setprofile(noted)
    try:
        yield dtypes
    finally:
        sys.setprofile(before)


def model_of(family: str, device: str, *, groups: int = 2) -> Any:
    """Return a tiny model in float32; ``groups``: heads of queries for each head of keys."""
    heads = tiny_config(family).num_attention_heads
    config = tiny_config(family, num_key_value_heads=heads // groups, attn_implementation="sdpa")
    model = build(config, seed=0, device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.mul_(20)  # otherwise attention's weights are nearly equal
    return model


def results(
    model: Any, device: str, dtype: torch.dtype = BF16, mask: Tensor = FULL, use_cache: bool = False
) -> tuple[list[Tensor], Any]:
    """Return logits and the gradients of all hidden states and parameters, and the dtypes of attention's q and k."""
    ids = tokens(device)
    kwargs = {"attention_mask": mask.to(device), "use_cache": use_cache, "output_hidden_states": True}
    with attention_dtypes("query", "key") as dtypes, torch.autocast(device, dtype):
        output = model(input_ids=ids, labels=ids, **kwargs)
    leaves = [*(state for state in output.hidden_states if state.requires_grad), *model.parameters()]
    return [output.logits.detach(), *torch.autograd.grad(output.loss, leaves)], dtypes


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[torch.dtype, ...]]] = {
    "plain": ({}, {}, (BF16, BF16)),
    "fp16": ({}, {"dtype": FP16}, (FP16, FP16)),
    "recompute": ({}, {}, (BF16, BF16)),
    "checkpointed": ({}, {}, (BF16, BF16)),
    "padded": ({}, {"mask": PADDED}, (FP32, FP32)),
    "padded, keys of their own": ({"groups": 1}, {"mask": PADDED}, (BF16, BF16)),
    "cache": ({}, {"use_cache": True}, (FP32, FP32)),
}
"""Options of the model, arguments of its call, and the dtypes of q and k that reach PyTorch's attention, by name."""


@pytest.mark.parametrize(
    ("family", "way"),
    [
        *(
            ("qwen3", "recompute"),
            ("qwen3", "cache"),
            ("llama", "plain"),
            ("llama", "padded"),
            ("gemma3_text", "checkpointed"),
        ),
        *(slow("qwen3", way) for way in WAYS if way not in ("recompute", "cache")),
    ],
)
def test_every_bit_is_that_of_q_and_k_in_their_own_dtype(family: str, way: str, device: str) -> None:
    options, kwargs, dtypes = WAYS[way]
    model = fused_copy(model_of(family, device, **options), recompute=way == "recompute")
    # A function that is not transformers' own gets q and k in the dtype that they have in stock.
    AttentionInterface.register("wrapped", lambda *args, **named: sdpa_attention.sdpa_attention_forward(*args, **named))
    AttentionMaskInterface.register("wrapped", AttentionMaskInterface()["sdpa"])
    model.config._attn_implementation = "wrapped"
    expected, before = results(model, device, **kwargs)
    model.config._attn_implementation = "sdpa"
    if way == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    actual, after = results(model, device, **kwargs)
    layers = len(model.model.layers)
    assert before == [(FP32, FP32)] * layers
    assert after == [dtypes] * layers
    assert_same(actual, expected)


@pytest.mark.parametrize("context", [nullcontext, fused_norm.disabled])
def test_attention_that_other_code_replaces_reads_what_it_would_of_stock(
    context: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = model_of("llama", device)
    fused = fused_copy(stock)
    _, dtypes = results(fused, device)
    assert {*dtypes} == {(BF16, BF16)}, "before the replacement"
    attend, seen = nn.functional.scaled_dot_product_attention, []

    def noted(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append((q.dtype, k.dtype))
        return attend(q, k, *args, **kwargs)

    if context is nullcontext:
        monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", noted)
    with context():
        (expected, before), (actual, after) = (results(model, device) for model in (stock, fused))
    assert {*before, *after, *seen} == {(FP32, FP32)}
    assert relative(actual[0], expected[0]) < 2e-2
