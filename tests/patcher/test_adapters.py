"""LoRA layers that add their adapter's output in one kernel: PEFT's numbers, whatever is switched, and when."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fused_norm
from fused_norm.model_configs import build
from fused_norm.patcher import fused_norm_module
from fused_norm.patcher.adapters import why_stock

from .models import assert_same, logged, slow, step, tokens
from .ranks import called_operators, on_two_ranks

LINEARS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
BF16 = torch.bfloat16


def adapted(device: str, family: str = "qwen3", model_dtype: torch.dtype = BF16, **config: Any) -> Any:
    """Return a tiny model with nonzero float32 adapters on five linears of each of its two layers."""
    torch.manual_seed(0)
    model = build(family, seed=0, device=device).to(model_dtype)
    lora = peft.LoraConfig(r=4, target_modules=LINEARS, init_lora_weights=False, **config)
    return peft.get_peft_model(model, lora)


def fused_copy(model: nn.Module, **options: Any) -> tuple[Any, fused_norm.PatchReport]:
    fused = copy.deepcopy(model)
    return fused, fused_norm.apply_fused_norm(fused, **options)


def layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, Linear)]


def fused_calls(run: Callable[[], Any]) -> list[str]:
    """Return the operators of all fused LoRA layers that run."""
    with called_operators() as called:
        run()
    return [name for name in called if name.startswith("lora_")]


def gradients_at_hidden_states(model: nn.Module, device: str, autocast: torch.dtype | None) -> list[Tensor]:
    """Return logits, and the gradients of all hidden states and adapters."""
    ids = tokens(device)
    model.zero_grad()
    with torch.autocast(device, autocast or BF16, enabled=autocast is not None):
        output = model(input_ids=ids, labels=ids, use_cache=False, output_hidden_states=True)
    hidden = [state for state in output.hidden_states if state.requires_grad]
    grads = torch.autograd.grad(
        output.loss,
        [*hidden, *(parameter for parameter in model.parameters() if parameter.requires_grad)],
        allow_unused=True,
    )
    assert all(grad is not None for grad in grads)
    return [output.logits.detach(), *grads]


def errors(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.double().norm()) for a, b in zip(actual, expected, strict=True)]


@pytest.mark.parametrize("family", ["llama", *(slow(name) for name in ("qwen3", "gemma3_text"))])
def test_a_model_is_as_near_to_float32_as_with_stock_layers(family: str, device: str) -> None:
    model = adapted(device, family, lora_alpha=7)
    expected = gradients_at_hidden_states(copy.deepcopy(model).float(), device, None)
    stock, _ = fused_copy(model, adapter=False)
    fused, report = fused_copy(model)
    assert report.counts["adapter"] == len(layers(model)) >= 10
    of_stock, of_fused = (errors(gradients_at_hidden_states(model, device, BF16), expected) for model in (stock, fused))
    assert sum(of_fused) <= 1.1 * sum(of_stock)
    assert all(ours <= 1.5 * theirs + 1e-2 for ours, theirs in zip(of_fused, of_stock, strict=True))


# ---- A single layer, of numbers whose sums are exact, so that all bits are comparable ----


def linear(width: int, columns: int) -> nn.Module:
    return nn.Linear(width, columns, bias=False)


def in_4_bits(width: int, columns: int) -> nn.Module:
    return Linear4bit(width, columns, bias=False, compute_dtype=BF16, quant_type="nf4")


def in_8_bits(width: int, columns: int) -> nn.Module:
    return Linear8bitLt(width, columns, bias=False, has_fp16_weights=False)


def with_integers(weight: Tensor) -> None:
    """Fill a weight with numbers whose sums are exact in 16 bits, so that the order of a sum changes no bit."""
    with torch.no_grad():
        weight.copy_(torch.randint(-1, 2, weight.shape))


def with_hook(layer: Any, part: str = "lora_A") -> None:
    getattr(layer, part)["default"].register_forward_hook(lambda *_: None)


def with_dropout(layer: Any) -> None:
    layer.lora_dropout["default"] = nn.Dropout(0.5)


def with_another_product(layer: Any) -> None:
    class Traced(nn.Linear):
        pass

    layer.lora_A["default"].__class__ = Traced


def in_16_bits(layer: Any) -> None:
    layer.lora_A.to(BF16), layer.lora_B.to(BF16)


LAYERS: dict[str, tuple[dict[str, Any], Callable[[Any], Any] | None, torch.dtype | None, bool]] = {
    "scale of two": ({"lora_alpha": 8}, None, BF16, True),
    "scale of three quarters": ({"lora_alpha": 3}, None, BF16, True),
    "dropout": ({"lora_dropout": 0.5}, None, BF16, True),
    "by the root of the rank": ({"lora_alpha": 8, "use_rslora": True}, None, BF16, True),
    "float16": ({"lora_alpha": 8}, None, torch.float16, True),
    "16-bit adapters": ({"lora_dropout": 0.5}, in_16_bits, BF16, True),
    "16-bit adapters without autocast": ({"lora_alpha": 8}, in_16_bits, None, True),
    "without autocast": ({"lora_alpha": 8}, None, None, False),
    "with a bias": ({"lora_bias": True}, None, BF16, False),
    "dora": ({"use_dora": True}, None, BF16, False),
    "seen by a hook": ({}, with_hook, BF16, False),
    "seen by a hook behind it": ({}, partial(with_hook, part="lora_B"), BF16, False),
    "dropout later": ({}, with_dropout, BF16, True),
    "another product": ({}, with_another_product, BF16, False),
    "another scale": ({}, lambda layer: layer.set_scale("default", 3), BF16, True),
}
"""Options of the adapter, a change of the layer after it was patched, autocast's dtype, and whether it runs fused."""


@pytest.mark.parametrize("make", [linear, in_4_bits, in_8_bits])
@pytest.mark.parametrize("case", LAYERS)
def test_a_layer_has_pefts_bits_and_says_whether_it_is_fused(
    case: str,
    make: Callable[[int, int], nn.Module],
    device: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused_norm_module, "_warned", {})
    config, change, autocast, is_fused = LAYERS[case]
    torch.manual_seed(0)
    base = nn.Sequential(make(64, 80))
    if make is linear:
        with_integers(base[0].weight)
    base.to(device, BF16)
    base.is_loaded_in_4bit, base.is_loaded_in_8bit = make is in_4_bits, make is in_8_bits  # PEFT reads both
    stock = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["0"], **config)).train()
    for part in ("lora_A", "lora_B"):
        with_integers(getattr(stock.base_model.model[0], part)["default"].weight)
    fused = copy.deepcopy(stock)
    report = fused_norm.apply_fused_norm(fused, strict=False)
    x = torch.randint(-1, 2, (3, 7, 64)).to(device, BF16)
    dy = torch.randint(-1, 2, (3, 7, 80)).to(device, torch.float32)
    results = []
    for model in (stock, fused):
        if change is not None:
            change(model.base_model.model[0])
        x = x.detach().requires_grad_()
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]

        def run(model: Any = model, x: Tensor = x, weights: Any = weights) -> None:
            torch.manual_seed(1)
            with torch.autocast(device, autocast or BF16, enabled=autocast is not None):
                y = model(x)
            results.append([y, *torch.autograd.grad(y, [x, *weights], dy.to(y.dtype))])

        # PEFT has another formula for quantised linears without autocast; under fp16's some of them return bf16.
        is_taken = make is linear or autocast == BF16
        count = len(fused_calls(run))
        assert count == (model is fused and is_fused and is_taken) or (autocast == torch.float16 and make is not linear)
    assert_same(*results)
    assert [site.reason is None for site in (*report.fused, *report.kept)] == [
        is_fused or change is not None or autocast is None
    ]
    if change is not None and not is_fused:
        reason = why_stock(fused.base_model.model[0])
        assert [message.partition(": ")[2] for message in logged(caplog)] == [reason]


def tensor_scaling(layer: Any) -> None:
    layer.scaling["default"] = torch.tensor(2.0)


def high_rank(layer: Any) -> None:
    for part, shape in ((layer.lora_A, (257, layer.in_features)), (layer.lora_B, (layer.out_features, 257))):
        part["default"].weight = nn.Parameter(torch.randn(shape, device=part["default"].weight.device) / 16)


@pytest.mark.parametrize(
    ("config", "change", "reason"),
    [
        ({"use_dora": True}, None, "DoraLinearVariant may compute more with its input"),
        ({"lora_bias": True}, None, "its adapter has a bias"),
        ({}, tensor_scaling, "its scale is a tensor, as prepare_model_for_compiled_hotswap leaves it"),
        ({}, high_rank, "a rank of 257 is more than 256"),
    ],
)
def test_layers_that_no_call_runs_fused_are_kept_with_the_reason(
    config: dict, change: Callable[[Any], None] | None, reason: str, device: str
) -> None:
    model = adapted(device, **config)
    for layer in layers(model) if change is not None else ():
        change(layer)
    fused, report = fused_copy(model)
    assert {site.reason for site in (*report.fused, *report.kept) if site.kind == "adapter"} == {reason}
    assert {type(layer) for layer in layers(fused)} == {Linear}


def test_the_options_leave_adapters_out(device: str) -> None:
    for options, reason in (({"adapter": False}, "switched off: adapter=False"), ({"modules": "*norm"}, None)):
        _, report = fused_copy(adapted(device), **options)
        assert {site.reason for site in report.kept if site.kind == "adapter"} == {reason or "not selected by modules"}
    _, report = fused_copy(adapted(device), modules="*.q_proj", strict=False)
    assert report.counts["adapter"] == 2


def test_removing_gives_the_layers_their_class_back(device: str) -> None:
    model, _ = fused_copy(adapted(device))
    assert not {type(layer) for layer in layers(model)} & {Linear}
    fused_norm.remove_fused_norm(model)
    assert {type(layer) for layer in layers(model)} == {Linear}


def test_layers_run_fused_under_autocast_and_not_while_all_is_disabled(device: str) -> None:
    model, _ = fused_copy(adapted(device))
    run = lambda: step(model, tokens(device))  # noqa: E731
    assert not fused_calls(run), "adapters in float32 make products in float32"
    with torch.autocast(device, BF16):
        assert fused_calls(run)
        with fused_norm.disabled():
            assert not fused_calls(run)


def test_layers_that_come_after_the_patch_are_logged_and_fused_by_another_one(
    device: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_norm_module, "_warned", {})
    model = build("qwen3", seed=0, device=device).to(BF16)
    fused_norm.apply_fused_norm(model)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=LINEARS, init_lora_weights=False))
    run = lambda: step(model, tokens(device))  # noqa: E731
    with torch.autocast(device, BF16), caplog.at_level("WARNING", logger="fused_norm"):
        assert not fused_calls(run)
        messages = [message for message in caplog.messages if "come since the model was patched" in message]
        assert sorted(message.partition(":")[0] for message in messages) == [
            f"Qwen3{block} runs LoRA layers as PEFT has them" for block in ("Attention", "MLP")
        ]
        assert fused_norm.apply_fused_norm(model).counts["adapter"] == len(fused_calls(run)) == 10


def test_a_forward_that_other_code_puts_on_pefts_class_runs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = fused_copy(adapted(device))
    monkeypatch.setattr(Linear, "forward", lambda layer, x, *args, **kwargs: layer.base_layer(x))
    with torch.autocast(device, BF16):
        assert not fused_calls(lambda: model(input_ids=tokens(device)))


@pytest.mark.parametrize(
    ("reentrant", "dropout"),
    [(False, 0.3), (True, 0.0), *(slow(*case) for case in ((False, 0.0), (True, 0.3)))],
)
def test_checkpointed_layers_have_the_bits_of_others(reentrant: bool, dropout: float, device: str) -> None:
    model, _ = fused_copy(adapted(device, lora_dropout=dropout).train())
    model.enable_input_require_grads()
    weights, steps = [parameter for parameter in model.parameters() if parameter.requires_grad], []
    for is_checkpointed in (False, True):
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        torch.manual_seed(3)
        with torch.autocast(device, BF16):
            loss = model(input_ids=tokens(device), labels=tokens(device), use_cache=False).loss
        assert bool(fused_calls(loss.backward)) == is_checkpointed
        steps.append([loss.detach(), *(weight.grad for weight in weights)])
    assert_same(*steps)


WRAPPED = ("ddp", "fsdp2", "fsdp2, patched later")


def wrapped_losses(rank: int, ranks: int) -> dict[tuple[str, bool], tuple[list[float], int]]:
    """Return the losses of some steps on this rank's tokens, and how many LoRA layers ran fused."""
    mesh = init_device_mesh("cpu", (ranks,))
    results = {}
    for way, is_fused in itertools.product(WRAPPED, (False, True)):
        model: Any = adapted("cpu", model_dtype=torch.float32).train()
        if "later" not in way:
            fused_norm.apply_fused_norm(model, adapter=is_fused)
        if way == "ddp":
            model = DistributedDataParallel(model)
        else:
            for module in (*model.base_model.model.model.layers, model):
                fully_shard(module, mesh=mesh)
        if "later" in way:
            fused_norm.apply_fused_norm(model, adapter=is_fused)
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer, losses = torch.optim.AdamW(weights, lr=1e-2), []
        ids = torch.randint(0, 256, (1, 8), generator=torch.Generator().manual_seed(rank))

        def run(model: Any = model, ids: Any = ids, optimizer: Any = optimizer, losses: Any = losses) -> None:
            for _ in range(3):
                with torch.autocast("cpu", BF16):
                    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())

        count = len(fused_calls(run))
        results[way, is_fused] = losses, count
    return results


@pytest.mark.slow
def test_adapters_train_on_two_ranks(tmp_path: Path) -> None:
    for results in on_two_ranks(wrapped_losses, tmp_path):
        for way in WRAPPED:
            (stock, none), (fused, count) = results[way, False], results[way, True]
            assert (none, count) == (0, 3 * 10)
            assert stock[-1] < stock[0]
            assert fused == pytest.approx(stock, rel=5e-3), way


@pytest.mark.slow
def test_adapters_are_merged_switched_added_and_copied_as_in_stock(
    device: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_norm_module, "_warned", {})
    stock = adapted(device)
    fused, _ = fused_copy(stock)
    fused = pickle.loads(pickle.dumps(copy.deepcopy(fused)))
    assert not {type(layer) for layer in layers(fused)} & {Linear}
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)

    def logits(model: Any) -> Tensor:
        with torch.no_grad(), torch.autocast(device, BF16):
            return model(input_ids=tokens(device), use_cache=False).logits

    def add(model: Any) -> None:
        torch.manual_seed(5)
        model.add_adapter("other", lora)

    changes: list[tuple[Callable[[Any], Any], int]] = [
        (add, 10),
        (lambda model: model.set_adapter("other"), 2),
        (lambda model: model.base_model.set_adapter(["default", "other"]), 0),
        (lambda model: model.base_model.disable_adapter_layers(), 0),
        (lambda model: model.base_model.enable_adapter_layers(), 0),
        (lambda model: model.base_model.set_adapter("default"), 10),
        (lambda model: model.merge_adapter(), 0),
        (lambda model: model.unmerge_adapter(), 10),
    ]
    reference, _ = fused_copy(stock, adapter=False)
    for change, count in changes:
        for model in (reference, fused):
            change(model)
        assert len(fused_calls(lambda: logits(fused))) == count
        (distance,) = errors([logits(fused)], [logits(reference)])
        assert distance < 5e-3
    said = [message for message in caplog.messages if "PEFT's LoRA code" in message]
    assert said == ["Linear runs PEFT's LoRA code: it has 2 active adapters"], "not where nothing is added"
    assert fused.state_dict().keys() == reference.state_dict().keys()
    assert not [module for module in fused.merge_and_unload().modules() if isinstance(module, Linear)]


@pytest.mark.parametrize("autocast", [False, True])
def test_layers_in_float64_are_those_of_peft(autocast: bool, device: str) -> None:
    model = adapted(device, model_dtype=torch.float64)
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    fused, _ = fused_copy(model)
    with torch.autocast(device, BF16, enabled=autocast):
        logits = [variant(input_ids=tokens(device), use_cache=False).logits for variant in (model, fused)]
    assert logits[0].dtype == logits[1].dtype
    assert torch.equal(*logits)


def test_adapted_linears_in_a_list_are_no_layers_that_recompute() -> None:
    model = nn.Module()
    model.linears = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["linears.0", "linears.1"]))
    stock = [type(module) for module in model.modules()]
    for _ in range(2):
        report = fused_norm.apply_fused_norm(model, recompute=True)
        assert (report.counts["adapter"], report.recompute) == (2, ())
    assert fused_norm.remove_fused_norm(model) == 2
    assert [type(module) for module in model.modules()] == stock
