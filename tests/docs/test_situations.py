"""A situation of the documentation that no other test puts a model in: tensor parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import fused_norm
from fused_norm.model_configs import build, tiny_config
from fused_norm.patcher.fused_block import FusedBlock

from ..patcher.models import sites
from ..patcher.ranks import on_two_ranks

FOLDER = "tensor_parallel"


def logits_and_gradients(rank: int, ranks: int) -> list[dict[str, Tensor]]:
    """Logits and gradients of all norms of a tensor-parallel model, stock and patched."""
    ids = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(0))
    found = []
    for patched in (False, True):
        model = AutoModelForCausalLM.from_pretrained(FOLDER, tp_plan="auto")
        if patched:
            assert fused_norm.apply_fused_norm(model).counts == sites("qwen3")
            assert isinstance(model.model.layers[0].self_attn, FusedBlock)
        output = model(ids, labels=ids, use_cache=False)
        output.loss.backward()
        norms = {name: parameter.grad for name, parameter in model.named_parameters() if "norm" in name}
        found.append({"logits": output.logits.detach(), **norms})
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Passing `tp_plan`:FutureWarning")
def test_a_tensor_parallel_model_has_the_gradients_of_stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    build(tiny_config("qwen3", hidden_size=64, head_dim=16, intermediate_size=128), seed=0).save_pretrained(FOLDER)
    for stock, fused in on_two_ranks(logits_and_gradients, tmp_path):
        assert len(stock) == 10
        for name, value in stock.items():
            torch.testing.assert_close(fused[name], value, rtol=1e-4, atol=1e-6, msg=name)
