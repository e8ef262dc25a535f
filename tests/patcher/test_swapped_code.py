"""Code that is swapped inside functions, as by IPython's ``%autoreload``, runs in patched models and new ones."""

from __future__ import annotations

import contextlib
import copy
import linecache
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import activations
from transformers.models.llama import modeling_llama as llama

import fused_norm
from fused_norm.model_configs import build
from fused_norm.patcher.running_code import RunningCode
from tools.hub_export import layers

from .models import relative, tokens


@contextlib.contextmanager
def swapped(function: Any, replacement: Any) -> Iterator[None]:
    """Give a function the code and the defaults of another function."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    before = function.__code__, function.__defaults__, function.__kwdefaults__
    function.__code__, function.__defaults__, function.__kwdefaults__ = (
        replacement.__code__, replacement.__defaults__, replacement.__kwdefaults__,
    )  # fmt: skip
    try:
        yield
    finally:
        function.__code__, function.__defaults__, function.__kwdefaults__ = before


def norm_doubled(self, hidden_states):
    y = hidden_states.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return 2 * self.weight * y.to(hidden_states.dtype)


def norm_unlike_any(self, hidden_states):
    return hidden_states.float().tanh() * self.weight


def rotated_less(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin / 2, k * cos + rotate_half(k) * sin / 2  # type: ignore[name-defined]  # noqa: F821


def half_turned_round(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second, -first), dim=-1)


def silu_doubled(self, input):  # noqa: A002
    return 2 * nn.functional.silu(input)


def mlp_without_gate(self, x):
    return self.down_proj(self.up_proj(x))


def layer_without_attention(self, hidden_states, *args, **kwargs):
    residual = hidden_states
    hidden_states = self.post_attention_layernorm(hidden_states)
    hidden_states = self.mlp(hidden_states)
    return residual + hidden_states


def base_alone(self, x, *args, **kwargs):
    return self.base_layer(x)


CASES: dict[str, tuple[Callable[[], Any], Any]] = {
    "a norm": (lambda: llama.LlamaRMSNorm.forward, norm_doubled),
    "another norm": (lambda: llama.LlamaRMSNorm.forward, norm_unlike_any),
    "a rotation": (lambda: llama.apply_rotary_pos_emb, rotated_less),
    "what a rotation calls": (lambda: llama.rotate_half, half_turned_round),
    "an MLP": (lambda: llama.LlamaMLP.forward, mlp_without_gate),
    "a layer": (lambda: llama.LlamaDecoderLayer.forward, layer_without_attention),
    "an activation": (lambda: type(activations.ACT2FN["silu"]).forward, silu_doubled),
    "a LoRA layer": (lambda: peft.tuners.lora.Linear.forward, base_alone),
}


# A patched model checks the functions that it replaces, not those that they call.
@pytest.mark.parametrize(
    ("case", "when"),
    [(case, "before the patch") for case in CASES] + [(case, "after it") for case in CASES if "calls" not in case],
)
def test_the_code_that_was_swapped_in_runs(case: str, when: str, device: str) -> None:
    function, replacement = CASES[case]
    base = build("llama", seed=0, device=device)
    model: Any = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    old = copy.deepcopy(model)
    fused_norm.apply_fused_norm(old)  # all of it is known by now
    logits: list[torch.Tensor] = []
    with torch.no_grad():
        plain = model(input_ids=tokens(device), use_cache=False).logits
        with swapped(function(), replacement):
            fused = old
            if when == "before the patch":
                fused = copy.deepcopy(model)
                fused_norm.apply_fused_norm(fused, strict=False)
            for variant in (model, fused):
                logits.append(variant(input_ids=tokens(device), use_cache=False).logits)
        again = old(input_ids=tokens(device), use_cache=False).logits
    assert relative(logits[0], plain) > 0.02, "the swap changes nothing"
    assert relative(logits[1], logits[0]) < 1e-4
    assert relative(again, plain) < 1e-4


@pytest.mark.parametrize("change", ["code", "class"])
def test_a_layer_of_the_kernels_hub_computes_what_its_class_computes_now(change: str, device: str) -> None:
    norm: Any = llama.LlamaRMSNorm(24).to(device)
    norm.weight.data.uniform_(0.5, 2)
    stock = copy.deepcopy(norm)
    norm.forward = MethodType(layers.RMSNorm.forward, norm)
    x = torch.randn(3, 24, device=device)
    assert relative(norm(x), stock(x)) < 1e-6
    with contextlib.ExitStack() as stack:
        if change == "code":
            stack.enter_context(swapped(llama.LlamaRMSNorm.forward, norm_doubled))
        else:
            norm.__class__ = stock.__class__ = type("Doubled", (llama.LlamaRMSNorm,), {"forward": norm_doubled})
        assert relative(norm(x), stock(x)) < 1e-6


def scaled_norm() -> Any:
    """Return a class of norms, and a function that sets the variable that its forward multiplies by."""
    scale = 1.0

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.rand(16) + 0.5), 1e-6

        def forward(self, x):
            y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
            return self.weight * (scale * y).to(x.dtype)

    def set_scale(value: float) -> None:
        nonlocal scale
        scale = value

    return Norm, set_scale


def test_a_variable_around_a_forward_is_seen_when_it_changes(device: str) -> None:
    kind, set_scale = scaled_norm()
    old = kind().to(device)
    fused_norm.apply_fused_norm(old)
    x = torch.randn(3, 16, device=device)
    set_scale(3.0)
    new = copy.deepcopy(old)
    fused_norm.remove_fused_norm(new)
    expected = new(x)
    assert torch.equal(old(x), expected)
    report = fused_norm.apply_fused_norm(new, strict=False)
    assert [site.kind for site in report.kept] == ["norm"]
    assert torch.equal(new(x), expected)


def test_a_function_edited_in_its_file_is_read_anew(tmp_path, device: str, monkeypatch) -> None:
    source = """
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = LlamaRMSNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        residual = x
        x = self.linear(x)
        x = residual + {scale} * x
        return x + self.norm(x)
"""
    path = tmp_path / "edited_layers.py"

    def loaded(scale: float) -> Any:
        path.write_text(source.format(scale=scale))
        module = ModuleType("edited_layers")
        exec(compile(path.read_text(), str(path), "exec"), vars(module))
        return module

    first = loaded(1.0)
    monkeypatch.setitem(sys.modules, "edited_layers", first)
    layers = nn.ModuleList([first.Layer()]).to(device)
    fused = copy.deepcopy(layers)
    fused_norm.apply_fused_norm(fused, strict=False)
    x = torch.randn(2, 3, 16, device=device)
    assert relative(fused[0](x), layers[0](x)) < 1e-5
    second = loaded(0.25)
    linecache.checkcache()
    forward: FunctionType = first.Layer.forward
    forward.__code__ = second.Layer.forward.__code__  # as %autoreload edits a function in place
    expected = layers[0](x)
    assert relative(fused[0](x), expected) < 1e-5
    fresh = copy.deepcopy(layers)
    fused_norm.apply_fused_norm(fresh, strict=False)
    assert relative(fresh[0](x), expected) < 1e-5


def test_a_function_whose_variable_is_gone_by_now_runs_other_code() -> None:
    held: Any = ModuleType("held")

    def function() -> Any:
        return held

    running = RunningCode(function)
    assert running.is_in(function)
    held = None
    assert not running.is_in(function)
