"""Layers that are replayed under DistributedDataParallel: the reducer sees the gradients that eager gives it."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from fused_norm.patcher import cuda_graphs, survey

from .graph_cases import HAS_GPU, ONE, Run
from .graph_stand_in import StandIn
from .ranks import on_two_ranks


def _trained(rank: int, world: int, *, mode: str, is_real: bool) -> dict[str, Any]:
    """Train twins for steps of two micro-batches, the first of which is not reduced."""
    results: dict[str, Any] = {}
    stand_in = (
        mock.patch.object(cuda_graphs, "make_device", StandIn),
        mock.patch.object(survey, "why_no_graphs", return_value=None),
    )
    for graphs in (True, False):
        with nullcontext() if is_real else stand_in[0], nullcontext() if is_real else stand_in[1]:
            run = Run(mode, graphs=graphs)
            parallel = DistributedDataParallel(run.model)
            optimizer = torch.optim.AdamW(run.trained, 1e-3)
            for step in range(4):
                for micro in range(2):
                    ids = run.ids(ONE, 100 * rank + 10 * step + micro)
                    torch.manual_seed(step)
                    with parallel.no_sync() if micro == 0 else nullcontext():
                        parallel(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        results["graphs" if graphs else "eager"] = [parameter.detach().cpu() for parameter in run.trained]
        if graphs:
            results["backwards"] = run.replays.backwards
    return results


@pytest.mark.slow
@pytest.mark.skipif(HAS_GPU, reason="graphs themselves are tried on GPUs")
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_data_parallel_training_has_the_bits_of_eager(mode: str, tmp_path: Path) -> None:
    _compare(on_two_ranks(partial(_trained, mode=mode, is_real=False), tmp_path))


@pytest.mark.gpu(2)
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_data_parallel_training_on_gpus_has_the_bits_of_eager(mode: str, tmp_path: Path) -> None:
    _compare(on_two_ranks(partial(_trained, mode=mode, is_real=True), tmp_path, "nccl"))


def _compare(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["backwards"] > 0
        assert all(map(torch.equal, rank["graphs"], rank["eager"]))
        assert all(map(torch.equal, rank["graphs"], ranks[0]["graphs"]))
