"""Models with LoRA layers that run in one kernel: PEFT's numbers, whatever is switched, and when."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fused_norm
from fused_norm.model_configs import build
from fused_norm.patcher import fused_norm_module

from .models import assert_same, loss_of, relative, step, tokens
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


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "DoRA is not fused"),
        ({"lora_bias": True}, "its adapter has a bias"),
        ({"r": 257}, "a rank of 257 is more than 256"),
    ],
)
def test_layers_that_no_call_runs_fused_are_kept_with_the_reason(config: dict, reason: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8))
    lora = peft.LoraConfig(target_modules=["0"], **config)
    fused, report = fused_copy(peft.get_peft_model(model, lora), strict=False)
    assert {site.reason for site in (*report.fused, *report.kept) if site.kind == "lora"} == {reason}
    assert [type(layer) for layer in layers(fused)] == [Linear]


def test_the_options_leave_adapters_out_and_removing_gives_them_their_class_back(device: str) -> None:
    for options, reason in (({"lora": False}, "switched off: lora=False"), ({"modules": "*norm"}, None)):
        _, report = fused_copy(adapted(device), **options)
        assert {site.reason for site in report.kept if site.kind == "lora"} == {reason or "not selected by modules"}
    model, report = fused_copy(adapted(device), modules="*.q_proj", strict=False)
    assert report.counts["lora"] == 2
    fused_norm.remove_fused_norm(model)
    assert {type(layer) for layer in layers(model)} == {Linear}


def test_layers_that_come_after_the_patch_are_logged_and_fused_by_another_one(
    device: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_norm_module, "_warned", {})
    model = build("qwen3", seed=0, device=device).to(BF16)
    fused_norm.apply_fused_norm(model)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=LINEARS, init_lora_weights=False))
    run = lambda: step(model, tokens(device))  # noqa: E731
    with torch.autocast(device, BF16), caplog.at_level("WARNING", logger="fused_norm"):
        with fused_norm.disabled():
            run()
        assert not caplog.messages
        assert not fused_calls(run)
        messages = [message for message in caplog.messages if "were added after apply_fused_norm" in message]
        assert sorted(message.partition(":")[0] for message in messages) == [
            f"Qwen3{block} runs LoRA layers as PEFT has them" for block in ("Attention", "MLP")
        ]
        assert fused_norm.apply_fused_norm(model).counts["lora"] == len(fused_calls(run)) == 10


def test_a_forward_that_other_code_puts_on_pefts_class_runs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = fused_copy(adapted(device))
    monkeypatch.setattr(Linear, "forward", lambda layer, x, *args, **kwargs: layer.base_layer(x))
    with torch.autocast(device, BF16):
        assert not fused_calls(lambda: model(input_ids=tokens(device)))


@pytest.mark.parametrize(("reentrant", "dropout"), [(False, 0.3), (True, 0.0)])
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
            loss = loss_of(model, tokens(device))
        assert bool(fused_calls(loss.backward)) == is_checkpointed
        steps.append([loss.detach(), *(weight.grad for weight in weights)])
    assert_same(*steps)


WRAPPED = ("ddp", "fsdp2", "fsdp2, patched later")


def wrapped_losses(rank: int, ranks: int) -> dict[tuple[str, bool], tuple[list[float], int]]:
    """Return the losses of some steps on this rank's tokens, and how many LoRA layers ran fused."""
    mesh, results = init_device_mesh("cpu", (ranks,)), {}
    for way, is_fused in itertools.product(WRAPPED, (False, True)):
        model: Any = adapted("cpu", model_dtype=torch.float32).train()
        if "later" not in way:
            fused_norm.apply_fused_norm(model, lora=is_fused)
        if way == "ddp":
            model = DistributedDataParallel(model)
        else:
            for module in (*model.base_model.model.model.layers, model):
                fully_shard(module, mesh=mesh)
        if "later" in way:
            fused_norm.apply_fused_norm(model, lora=is_fused)
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer, losses = torch.optim.AdamW(weights, lr=1e-2), []
        ids = torch.randint(0, 256, (1, 8), generator=torch.Generator().manual_seed(rank))
        with called_operators() as called:
            for _ in range(3):
                with torch.autocast("cpu", BF16):
                    loss = loss_of(model, ids)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        results[way, is_fused] = losses, sum(name.startswith("lora_") for name in called)
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
def test_adapters_are_merged_switched_added_and_copied_as_in_stock(device: str) -> None:
    stock = adapted(device)
    reference, _ = fused_copy(stock, lora=False)
    fused = pickle.loads(pickle.dumps(fused_copy(stock)[0]))
    assert not {type(layer) for layer in layers(fused)} & {Linear}

    def logits(model: Any) -> Tensor:
        with torch.no_grad(), torch.autocast(device, BF16):
            return model(input_ids=tokens(device), use_cache=False).logits

    def add(model: Any) -> None:
        torch.manual_seed(5)
        model.add_adapter("other", peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))

    changes: list[tuple[Callable[[Any], Any], int]] = [
        (add, 10),
        (lambda model: model.set_adapter("other"), 2),
        (lambda model: model.base_model.set_adapter(["default", "other"]), 0),
        (lambda model: model.base_model.disable_adapter_layers(), 0),
        (lambda model: (model.base_model.enable_adapter_layers(), model.base_model.set_adapter("default")), 10),
        (lambda model: model.merge_adapter(), 0),
        (lambda model: model.unmerge_adapter(), 10),
    ]
    for change, count in changes:
        for model in (reference, fused):
            change(model)
        assert len(fused_calls(lambda: logits(fused))) == count
        assert relative(logits(fused), logits(reference)) < 5e-3
    assert fused.state_dict().keys() == reference.state_dict().keys()
    assert not layers(fused.merge_and_unload())
