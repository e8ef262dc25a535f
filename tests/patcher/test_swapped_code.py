"""Code that is swapped inside functions, as by IPython's ``%autoreload``, runs in patched models and new ones."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import activations
from transformers.models.llama import modeling_llama as llama

import fused_norm
from fused_norm.model_configs import build
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


def rotated_less(q, k, cos, sin, unsqueeze_dim=1):
    return q * cos[:, None], k * cos[:, None]


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
    "a rotation": (lambda: llama.apply_rotary_pos_emb, rotated_less),
    "an MLP": (lambda: llama.LlamaMLP.forward, mlp_without_gate),
    "a layer": (lambda: llama.LlamaDecoderLayer.forward, layer_without_attention),
    "an activation": (lambda: type(activations.ACT2FN["silu"]).forward, silu_doubled),
    "a LoRA layer": (lambda: peft.tuners.lora.Linear.forward, base_alone),
}


@pytest.mark.parametrize("when", ["before the patch", "after it"])
@pytest.mark.parametrize("case", CASES)
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


def test_a_layer_of_the_kernels_hub_computes_what_its_class_computes_now(device: str) -> None:
    norm: Any = llama.LlamaRMSNorm(24).to(device)
    norm.weight.data.uniform_(0.5, 2)
    stock = copy.deepcopy(norm)
    norm.forward = MethodType(layers.RMSNorm.forward, norm)
    x = torch.randn(3, 24, device=device)
    assert relative(norm(x), stock(x)) < 1e-6
    with swapped(llama.LlamaRMSNorm.forward, norm_doubled):
        assert relative(norm(x), stock(x)) < 1e-6


def test_a_variable_around_a_forward_is_seen_when_it_changes(device: str) -> None:
    scale = 1.0

    class Norm(llama.LlamaRMSNorm):
        def forward(self, x):
            y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            return self.weight * (scale * y).to(x.dtype)

    old = Norm(16).to(device)
    fused_norm.apply_fused_norm(old)
    x, scale = torch.randn(3, 16, device=device), 3.0
    new = copy.deepcopy(old)
    fused_norm.remove_fused_norm(new)
    expected = new(x)
    assert torch.equal(old(x), expected)
    report = fused_norm.apply_fused_norm(new, strict=False)
    assert [site.kind for site in report.kept] == ["norm"]
    assert torch.equal(new(x), expected)


MODULE = """
from functools import wraps

import torch
from torch import nn


def decorated(function):
    @wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.linspace(0.5, 2, 16)), 1e-6

    @decorated
    def forward(self, x):
        y = x.float()
        return NUMBER * self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.act = nn.Linear(16, 16), nn.Linear(16, 16), nn.SiLU()

    @decorated
    def forward(self, x):
        return self.act(self.gate(x)) * self.up(NUMBER * x)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.norm = MLP(), Norm()

    @decorated
    def forward(self, x):
        x = x + self.mlp(NUMBER * x)
        return self.norm(x)
"""


def test_a_reload_gives_patched_models_what_it_gives_the_classes_of_their_modules(tmp_path: Path, device: str) -> None:
    """IPython writes new code and attributes over old functions, decorated ones among them, whose closures stay."""
    before, after = ModuleType("edited"), ModuleType("edited")
    for module, number in ((before, "1"), (after, "3")):
        path = tmp_path / f"edited_{number}.py"
        path.write_text(MODULE.replace("NUMBER", number))
        exec(compile(path.read_text(), str(path), "exec"), vars(module))
    model = before.Layer().to(device)
    x, unpatched = torch.randn(3, 16, device=device), copy.deepcopy(model)
    report = fused_norm.apply_fused_norm(nn.ModuleList([model]))
    assert {site.kind for site in report.fused} == {"norm", "residual", "mlp"}
    for name in ("Norm", "MLP", "Layer"):
        old, new = vars(before)[name].forward, vars(after)[name].forward
        old.__code__, old.__dict__ = new.__code__, new.__dict__
    for _ in range(2):
        assert relative(model(x), unpatched(x)) < 1e-6
        report = fused_norm.apply_fused_norm(nn.ModuleList([model]), strict=False)
    assert all("calls another function than it names" in site.reason for site in report.kept)
