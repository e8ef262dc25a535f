"""LoRA layers whose inputs are not cast under autocast, and whose scale is applied early: nobody can tell."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import peft
import pytest
import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from peft.tuners.lora import Linear
from torch import Tensor, nn

import fused_norm
from fused_norm.model_configs import build

from .models import step, tokens

LINEARS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]


def adapted(device: str, family: str = "qwen3", model_dtype: torch.dtype = torch.bfloat16, **config: Any) -> Any:
    """A tiny model with adapters that are not zero, of float32, on five linears of each of its two layers."""
    torch.manual_seed(0)
    model = build(family, seed=0, device=device).to(model_dtype)
    lora = peft.LoraConfig(r=4, target_modules=LINEARS, init_lora_weights=False, **config)
    return peft.get_peft_model(model, lora)


def fused_copy(model: nn.Module, **options: Any) -> tuple[Any, fused_norm.PatchReport]:
    fused = copy.deepcopy(model)
    return fused, fused_norm.apply_fused_norm(fused, **options)


def layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, Linear)]


def seen_by_adapters(model: nn.Module, run: Callable[[], Any]) -> list[torch.dtype]:
    """The dtypes that the first products of adapters are given; a hook would have the layers cast."""
    seen = []
    linear = nn.Linear.forward

    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if self.out_features == 4:
            seen.append(x.dtype)
        return linear(self, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Linear, "forward", forward)
        run()
    return seen


def gradients_at_hidden_states(model: nn.Module, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Logits, and gradients of every hidden state and of every adapter."""
    ids = tokens(device)
    model.zero_grad()
    with torch.autocast(device, dtype):
        output = model(input_ids=ids, labels=ids, use_cache=False, output_hidden_states=True)
    hidden = [one for one in output.hidden_states if one.requires_grad]
    found = torch.autograd.grad(
        output.loss, [*hidden, *(one for one in model.parameters() if one.requires_grad)], allow_unused=True
    )
    assert all(one is not None for one in found)
    return [output.logits.detach(), *found]


@pytest.mark.parametrize("family", ["qwen3", "llama", pytest.param("gemma3_text", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model_dtype", [torch.bfloat16, torch.float32])
def test_every_bit_under_autocast_is_that_of_casting_layers(family: str, model_dtype: torch.dtype, device: str) -> None:
    model = adapted(device, family, model_dtype)
    casting, _ = fused_copy(model, adapter=False)
    fused, report = fused_copy(model)
    assert report.counts["adapter"] == len(layers(model)) >= 10
    expected = gradients_at_hidden_states(casting, device, torch.bfloat16)
    found = gradients_at_hidden_states(fused, device, torch.bfloat16)
    assert [torch.equal(one, other) for one, other in zip(found, expected, strict=True)] == [True] * len(expected)


def test_adapters_get_16_bits_under_autocast_alone(device: str) -> None:
    model, _ = fused_copy(adapted(device))
    run = lambda: step(model, tokens(device))  # noqa: E731
    assert set(seen_by_adapters(model, run)) == {torch.float32}
    with torch.autocast(device, torch.bfloat16):
        assert set(seen_by_adapters(model, run)) == {torch.bfloat16}
        with fused_norm.disabled():
            assert set(seen_by_adapters(model, run)) == {torch.float32}
    with torch.autocast(device, torch.float16):  # a bf16 input is of another 16 bits
        assert torch.float32 in seen_by_adapters(model, run)


def test_removing_gives_the_layers_their_class_and_casts_back(device: str) -> None:
    model, _ = fused_copy(adapted(device))
    assert not {type(layer) for layer in layers(model)} & {Linear}
    fused_norm.remove_fused_norm(model)
    assert {type(layer) for layer in layers(model)} == {Linear}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "DoraLinearVariant may compute more with its input"),
        ({"lora_dropout": 0.1}, "its dropout may draw other numbers for another dtype"),
    ],
    ids=["dora", "dropout"],
)
def test_adapters_that_could_tell_are_kept_with_the_reason(config: dict, reason: str, device: str) -> None:
    model, report = fused_copy(adapted(device, **config))
    assert {site.reason for site in report.kept if site.kind == "adapter"} == {reason}
    assert {type(layer) is Linear for layer in layers(model)} == {"use_dora" in config}, "may read inputs of its own"


def test_the_options_leave_adapters_out(device: str) -> None:
    for options, reason in (({"adapter": False}, "switched off: adapter=False"), ({"modules": "*norm"}, None)):
        _, report = fused_copy(adapted(device), **options)
        assert {site.reason for site in report.kept if site.kind == "adapter"} == {reason or "not selected by modules"}
    _, report = fused_copy(adapted(device), modules="*.q_proj", strict=False)
    assert report.counts["adapter"] == 2


def with_hook_on_product(layer: Any) -> None:
    layer.lora_A["default"].register_forward_hook(lambda *_: None)


def with_dropout(layer: Any) -> None:
    layer.lora_dropout["default"] = nn.Dropout(0.5)


def with_another_product(layer: Any) -> None:
    class Traced(nn.Linear):
        pass

    layer.lora_A["default"].__class__ = Traced


def with_dora(layer: Any) -> None:
    layer.lora_variant["default"] = object()


@pytest.mark.parametrize("change", [with_hook_on_product, with_dropout, with_another_product, with_dora])
def test_what_changes_after_patching_is_seen_at_the_call(change: Callable[[Any], None], device: str) -> None:
    model, _ = fused_copy(adapted(device))
    layer = layers(model)[0]
    x = torch.ones(3, layer.in_features, dtype=torch.bfloat16, device=device)
    with torch.autocast(device, torch.bfloat16):
        assert layer._cast_input_dtype(x, torch.float32) is x
        change(layer)
        assert layer._cast_input_dtype(x, torch.float32).dtype == torch.float32


def test_dropout_that_is_not_active_at_the_call_lets_the_input_be(device: str) -> None:
    model, _ = fused_copy(adapted(device))
    layer = layers(model)[0]
    with_dropout(layer)
    layer.eval()
    x = torch.ones(3, layer.in_features, dtype=torch.bfloat16, device=device)
    with torch.autocast(device, torch.bfloat16):
        assert layer._cast_input_dtype(x, torch.float32) is x


def test_layers_without_such_a_cast_have_no_row(device: str) -> None:
    for change in ("switch", "dtype"):
        model = adapted(device)
        for layer in layers(model):
            if change == "switch":
                layer.cast_input_dtype_enabled = False
            else:
                layer.to(torch.bfloat16)
        _, report = fused_copy(model)
        assert not [site for site in (*report.fused, *report.kept) if site.kind == "adapter"]


def test_adapters_are_merged_switched_added_and_copied_as_in_stock(device: str) -> None:
    stock = adapted(device)
    fused, _ = fused_copy(stock)
    fused = pickle.loads(pickle.dumps(copy.deepcopy(fused)))
    assert not {type(layer) for layer in layers(fused)} & {Linear}
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            return model(input_ids=tokens(device), use_cache=False).logits

    def add(model: Any) -> None:
        torch.manual_seed(5)
        model.add_adapter("other", lora)

    changes: list[Callable[[Any], Any]] = [
        add,
        lambda model: model.set_adapter("other"),
        lambda model: model.base_model.set_adapter(["default", "other"]),
        lambda model: model.base_model.disable_adapter_layers(),
        lambda model: model.base_model.enable_adapter_layers(),
        lambda model: model.merge_adapter(),
        lambda model: model.unmerge_adapter(),
    ]
    reference, _ = fused_copy(stock, adapter=False)
    for change in changes:
        for model in (reference, fused):
            change(model)
        assert torch.equal(logits(fused), logits(reference))
    assert fused.state_dict().keys() == reference.state_dict().keys()
    assert not [module for module in fused.merge_and_unload().modules() if isinstance(module, Linear)]


def with_hook_on_second(layer: Any) -> None:
    layer.lora_B["default"].register_forward_hook(lambda *_: None)


SCALES: dict[str, tuple[dict[str, Any], Callable[[Any], None] | None, torch.dtype | None, float | None]] = {
    "two": ({"lora_alpha": 8}, None, torch.bfloat16, 2.0),
    "one": ({"lora_alpha": 4}, None, torch.bfloat16, 1.0),
    "a quarter, with dropout": ({"lora_alpha": 1, "lora_dropout": 0.3}, None, torch.bfloat16, 0.25),
    "in float32": ({"lora_alpha": 8}, None, None, 2.0),
    "by the root of the rank": ({"lora_alpha": 8, "use_rslora": True}, None, torch.bfloat16, 4.0),
    "three": ({"lora_alpha": 12}, None, torch.bfloat16, None),
    "in float16": ({"lora_alpha": 8}, None, torch.float16, None),
    "with a bias": ({"lora_alpha": 8, "lora_bias": True}, None, torch.bfloat16, None),
    "seen by a hook": ({"lora_alpha": 8}, with_hook_on_second, torch.bfloat16, None),
}
"""Options of the adapter, a change of the layer, autocast's dtype, and the scale of what the second product reads."""


def in_4_bits(width: int, columns: int) -> nn.Module:
    return Linear4bit(width, columns, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")


def in_8_bits(width: int, columns: int) -> nn.Module:
    return Linear8bitLt(width, columns, bias=False, has_fp16_weights=False)


@pytest.mark.parametrize("make", [partial(nn.Linear, bias=False), in_4_bits, in_8_bits])
@pytest.mark.parametrize("case", SCALES)
def test_a_power_of_two_scales_the_smaller_product_and_changes_no_bit(
    case: str, make: Callable[[int, int], nn.Module], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, change, autocast, scale = SCALES[case]
    base = nn.Sequential(make(48, 80).to(device, torch.bfloat16 if autocast else torch.float32))
    base.is_loaded_in_4bit, base.is_loaded_in_8bit = make is in_4_bits, make is in_8_bits  # which PEFT asks for
    read: list[Tensor] = []
    linear = nn.functional.linear

    def noted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight is layer.lora_B["default"].weight:
            read.append(x)
        return linear(x, weight, bias)

    monkeypatch.setattr(nn.functional, "linear", noted)
    torch.manual_seed(0)
    stock = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["0"], init_lora_weights=False, **config))
    fused = copy.deepcopy(stock)
    fused_norm.apply_fused_norm(fused, strict=False)
    found = []
    for model in (stock, fused):
        layer = model.base_model.model[0]
        if change is not None:
            change(layer)
        torch.manual_seed(1)
        x = torch.randn(7, 48, device=device, dtype=torch.bfloat16 if autocast else torch.float32, requires_grad=True)
        with torch.autocast(device, autocast, enabled=autocast is not None):
            y = model(x)
        weights = [one for one in model.parameters() if one.requires_grad]
        found.append([y, *torch.autograd.grad(y.float().square().sum(), [x, *weights])])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    stock_reads, fused_reads = read
    assert torch.equal(fused_reads, stock_reads * (scale or 1.0))
    assert layer.scaling["default"] == scale or scale is None
