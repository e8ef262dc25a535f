"""DeepSpeed's ZeRO-3, if installed, on two processes: it gathers a module's weights for the module's own call."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fused_norm
from fused_norm.model_configs import build

from .models import sites
from .ranks import called_operators, on_two_ranks

STEPS = 2
MODEL_TYPE = "qwen3"
FUSED = ("patch, shard", "shard, patch", "shard, patch, recompute")
ORDERS = (FUSED[0], "stock", *FUSED[1:])  # the first engine replaces `F.linear` for good


def trained(model: nn.Module, run: Any) -> list[float]:
    """The losses of some steps of ``run(loss)`` with the same tokens on every rank."""
    ids = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        run(loss)
        losses.append(loss.item())
    return losses


def trained_alone() -> list[float]:
    model = build(MODEL_TYPE, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def run(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(model, run)


def trained_under_zero3(order: str) -> tuple[list[float], dict[str, int]]:
    """Return the losses and the called operators of a model that is sharded down to its smallest weights."""
    import deepspeed

    model = build(MODEL_TYPE, seed=0)
    if order == "patch, shard":
        assert fused_norm.apply_fused_norm(model).counts == sites(MODEL_TYPE)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    assert all(parameter.numel() == 0 and parameter.ds_numel > 0 for parameter in model.parameters())
    if order.startswith("shard"):
        report = fused_norm.apply_fused_norm(model, recompute="recompute" in order)
        assert report.counts == {**sites(MODEL_TYPE), "residual": 0, "mlp": 0, "loss": 0}  # DeepSpeed hooks modules
        assert {site.cause for site in report.kept} == {"overridden"}

    def run(loss: torch.Tensor) -> None:
        engine.backward(loss)
        engine.step()

    with called_operators() as called:
        losses = trained(engine, run)
    engine.destroy()
    return losses, Counter(called)


def losses_of_every_order(rank: int, ranks: int) -> dict[str, Any]:
    return {order: trained_under_zero3(order) for order in ORDERS}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_two_ranks_of_zero3_train_a_patched_model_as_one_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    alone = trained_alone()
    for rank in on_two_ranks(losses_of_every_order, tmp_path):
        stock, called = rank["stock"]
        assert called == {}
        assert stock[-1] < stock[0]
        assert stock == pytest.approx(alone, rel=1e-4)
        for order in FUSED:
            losses, called = rank[order]
            assert losses == pytest.approx(stock, rel=1e-6)
            assert called == {"rms_norm": STEPS * 9, "rope": STEPS * 2}, order
