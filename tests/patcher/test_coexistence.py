"""Other code on the same model: what it owns is left to it, and what it hooks is never skipped."""

from __future__ import annotations

import copy
import functools
import socket
import types
from pathlib import Path

import accelerate
import peft
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Trainer, TrainingArguments

import fused_norm
from fused_norm import FusedNormError
from fused_norm.model_configs import build
from fused_norm.patcher.fused_norm_module import FusedNorm

from .models import counts, relative, sites, snapshot, step, tokens, twins


def test_a_forward_replaced_on_a_norm_stays_in_place() -> None:
    model = build("llama", seed=0)
    norm = model.model.layers[0].post_attention_layernorm
    norm.forward = types.MethodType(lambda self, hidden_states: hidden_states * 2, norm)
    report = fused_norm.apply_fused_norm(model)
    assert report.counts == counts(norm=4, residual=1)
    assert [(site.path, site.kind, site.cause) for site in report.kept] == [
        ("model.layers.0.post_attention_layernorm", "norm", "owner"),
        ("model.layers.0.post_attention_layernorm", "residual", "owner"),
    ]
    assert "forward was replaced on the instance, by" in report.kept[0].reason
    assert not isinstance(norm, FusedNorm)
    assert torch.equal(norm(torch.ones(3)), torch.full((3,), 2.0))


def test_a_forward_replaced_on_a_layer_keeps_its_block() -> None:
    model = build("llama", seed=0)
    layer = model.model.layers[1]
    layer.forward = functools.partial(type(layer).forward, layer)
    report = fused_norm.apply_fused_norm(model)
    assert report.counts == counts(norm=5, residual=1)
    assert [(site.path, site.kind, site.cause) for site in report.kept] == [
        ("model.layers.1.post_attention_layernorm", "residual", "owner")
    ]


def test_a_hub_kernel_cannot_be_bound_over_a_fused_norm() -> None:
    """kernelize() binds a forward to every instance whose class has a ``kernel_layer_name``."""
    model = build("llama", seed=0)
    kernelized = [module for module in model.modules() if hasattr(type(module), "kernel_layer_name")]
    fused_norm.apply_fused_norm(model)
    assert not any(hasattr(type(module), "kernel_layer_name") for module in model.modules() if module in kernelized)
    fused_norm.remove_fused_norm(model)
    assert [module for module in model.modules() if hasattr(type(module), "kernel_layer_name")] == kernelized


@pytest.mark.parametrize("first", ["peft", "fused_norm"])
def test_lora_trains_the_same_on_top_or_below(first: str, device: str) -> None:
    torch.manual_seed(3)
    config = peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    stock = peft.get_peft_model(build("qwen3", seed=0, device=device), config)
    fused = copy.deepcopy(stock)
    if first == "peft":
        report = fused_norm.apply_fused_norm(fused)
    else:
        fused = build("qwen3", seed=0, device=device)
        report = fused_norm.apply_fused_norm(fused)
        fused = peft.get_peft_model(fused, config)
        fused.load_state_dict(stock.state_dict())
    assert report.counts == sites("qwen3")
    ids = tokens(device)
    (expected, gradients), (logits, fused_gradients) = step(stock, ids), step(fused, ids)
    assert relative(logits, expected) < 1e-5
    assert gradients.keys() == fused_gradients.keys()
    assert all("lora" in name for name in gradients)
    assert all(relative(fused_gradients[name], value) < 1e-5 for name, value in gradients.items())


@pytest.mark.parametrize(
    "config",
    [
        peft.LNTuningConfig(target_modules=["post_attention_layernorm", "norm"]),
        peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["post_attention_layernorm", "norm"]),
    ],
    ids=["ln_tuning", "modules_to_save"],
)
def test_norms_wrapped_by_peft_are_called_through_their_wrappers(config, device: str) -> None:
    stock = peft.get_peft_model(build("llama", seed=0, device=device), config)
    with torch.no_grad():
        for parameter in stock.parameters():
            if parameter.requires_grad:  # the wrapper's copy now differs from the original norm
                parameter.add_(torch.randn_like(parameter) * 0.3)
    fused = copy.deepcopy(stock)
    report = fused_norm.apply_fused_norm(fused)
    residual = [site for site in report.kept if site.kind == "residual"]
    assert len(residual) == 2
    assert all("is wrapped in a" in site.reason for site in residual)
    ids = tokens(device)
    (expected, gradients), (logits, fused_gradients) = step(stock, ids), step(fused, ids)
    assert relative(logits, expected) < 1e-5
    assert any("norm" in name for name in gradients)
    assert all(relative(fused_gradients[name], value) < 1e-5 for name, value in gradients.items())
    with fused.disable_adapter(), stock.disable_adapter():
        assert relative(fused(ids, use_cache=False).logits, stock(ids, use_cache=False).logits) < 1e-5


def test_wrapping_a_fused_norm_later_falls_back_to_separate_calls(device: str) -> None:
    stock, fused = twins("llama", device)
    ids = tokens(device)

    class Wrapper(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x) * 1.5

    for model in (stock, fused):
        layer = model.model.layers[0]
        layer.post_attention_layernorm = Wrapper(layer.post_attention_layernorm)
    assert relative(step(fused, ids)[0], step(stock, ids)[0]) < 1e-5


@pytest.mark.parametrize("order", ["patch, offload", "offload, patch"])
def test_offloaded_norms_are_materialised_by_their_hooks(order: str, device: str) -> None:
    stock = build("qwen3", seed=0, device=device)
    ids = tokens(device)
    expected = stock(ids, use_cache=False).logits
    fused = copy.deepcopy(stock)
    if order == "patch, offload":
        fused_norm.apply_fused_norm(fused)
    accelerate.cpu_offload(fused, execution_device=torch.device(device))
    assert fused.model.norm.weight.is_meta
    before = snapshot(fused)
    if order == "offload, patch":
        assert fused_norm.apply_fused_norm(fused).counts == sites("qwen3")
    assert isinstance(fused.model.norm, FusedNorm)
    with torch.no_grad():
        assert relative(fused(ids, use_cache=False).logits, expected) < 1e-5
    if order == "offload, patch":
        fused_norm.remove_fused_norm(fused)
        assert [kind for kind, _ in snapshot(fused)] == [kind for kind, _ in before]
        with torch.no_grad():
            assert torch.equal(fused(ids, use_cache=False).logits, expected)
    accelerate.hooks.remove_hook_from_submodules(fused)
    with torch.no_grad():
        assert relative(fused(ids, use_cache=False).logits, expected) < 1e-5


def trainer_losses(model: nn.Module, rows: torch.Tensor, output: Path, **arguments: int) -> torch.Tensor:
    """The losses of the steps of a Trainer with gradient checkpointing."""
    given = TrainingArguments(
        output_dir=str(output),
        gradient_checkpointing=True,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=rows.device.type == "cpu",
        disable_tqdm=True,
        **arguments,
    )
    trainer = Trainer(model=model, args=given, train_dataset=[{"input_ids": row, "labels": row} for row in rows.cpu()])
    trainer.train()
    return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


def test_a_patched_model_takes_the_steps_of_stock_in_a_trainer(tmp_path: Path, device: str) -> None:
    rows = tokens(device, batch=2, length=6)
    options = {"max_steps": 2, "per_device_train_batch_size": 1}
    stock, fused = (trainer_losses(model, rows, tmp_path, **options) for model in twins("qwen3", device))
    assert len(fused) == 2
    torch.testing.assert_close(fused, stock, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_trainer_trains_a_patched_model_as_it_trains_stock(tmp_path: Path, device: str) -> None:
    options = {"max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    rows = tokens(device, batch=8)
    stock, fused = (trainer_losses(model, rows, tmp_path, **options) for model in twins("qwen3", device))
    assert len(fused) == 4
    torch.testing.assert_close(fused, stock, rtol=1e-4, atol=1e-4)
    assert stock[-1] < stock[0]


SHARDINGS = ("stock", "patch, shard", "shard, patch")


def sharded_losses(order: str, rank: int, ranks: int, steps: int) -> list[float]:
    """The losses of a rank of FSDP2 with its own batch; the model is stock, or patched before or after sharding."""
    mesh = init_device_mesh("cpu", (ranks,))
    model = build("gemma3_text", seed=0)  # with every kind of site
    if order == "patch, shard":
        fused_norm.apply_fused_norm(model)
    # Norms that are units of their own have hooks that must run before them, and one call is not enough for them.
    fully_shard(model.model.layers[1].pre_feedforward_layernorm, mesh=mesh)
    fully_shard(model.model.layers[1].post_feedforward_layernorm, mesh=mesh)
    fully_shard(model.model.layers[1].self_attn.q_norm, mesh=mesh)
    # A layer that is a unit, besides those that belong to the unit of the whole model.
    fully_shard(model.model.layers[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    if order == "shard, patch":
        assert fused_norm.apply_fused_norm(model).counts == sites("gemma3_text")
    if order == "patch, shard":
        with pytest.raises(FusedNormError, match="remove_fused_norm before sharding"):
            fused_norm.remove_fused_norm(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(0, 256, (2, 8 * ranks), generator=torch.Generator().manual_seed(rank))
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_one_rank_of_fsdp2_trains_a_patched_model_as_it_trains_stock() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        losses = {order: sharded_losses(order, 0, 1, steps=2) for order in SHARDINGS}
    finally:
        dist.destroy_process_group()
    assert losses["stock"][-1] < losses["stock"][0]
    assert losses["patch, shard"] == pytest.approx(losses["stock"], rel=1e-5)
    assert losses["shard, patch"] == pytest.approx(losses["stock"], rel=1e-5)


def rank_of_two(rank: int, port: int, results: Path) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    losses = {order: sharded_losses(order, rank, 2, steps=2) for order in SHARDINGS}
    if rank == 0:
        torch.save(losses, results)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_of_fsdp2_train_a_patched_model_as_they_train_stock(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = tmp_path / "losses.pt"
    mp.spawn(rank_of_two, args=(port, results), nprocs=2)
    losses = torch.load(results)
    assert losses["stock"][-1] < losses["stock"][0]
    assert losses["patch, shard"] == pytest.approx(losses["stock"], rel=1e-5)
    assert losses["shard, patch"] == pytest.approx(losses["stock"], rel=1e-5)
