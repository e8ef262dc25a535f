"""A control computes the same mathematics: its numbers differ from the stock model's by roundings only."""

import pytest
import torch

from fused_norm import apply_fused_norm, remove_fused_norm
from fused_norm.check.distances import distance
from fused_norm.check.reordered_norms import reordered_norms
from fused_norm.convergence.paired_runs import regroup
from fused_norm.convergence.tiers import TrainingOptions
from fused_norm.model_configs import FAMILIES, build, tiny_config


def step(model, tokens):
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text"])
def test_a_reordered_model_differs_by_roundings(model_type, dtype):
    model, stock = (build(tiny_config(model_type, num_hidden_layers=1), seed=0, dtype=dtype) for _ in range(2))
    sites = apply_fused_norm(model).fused
    remove_fused_norm(model)
    tokens = torch.arange(24).view(1, 24)
    before = torch.get_rng_state()
    with reordered_norms(model, sites, seed=1):
        loss, gradients = step(model, tokens)
    assert torch.equal(torch.get_rng_state(), before)  # otherwise a control would drop other numbers than stock
    expected, exact_gradients = step(stock, tokens)
    eps = torch.finfo(dtype).eps
    assert loss == pytest.approx(expected.item(), rel=4 * eps)
    different = 0
    for name, exact in exact_gradients.items():
        gap = distance(gradients[name], exact)
        assert gap < 40 * eps, name
        different += gap > 0
    assert different > len(exact_gradients) / 2


def test_a_reordered_norm_has_the_stock_norms_rounding_points():
    model = build("llama", seed=0, dtype=torch.bfloat16)
    norm, spec = model.model.norm, FAMILIES["llama"].spec
    x = torch.randn(64, 72, dtype=torch.bfloat16)
    before = norm(x)
    sites = [site for site in apply_fused_norm(model).fused if site.path == "model.norm"]
    remove_fused_norm(model)
    assert sites[0].spec == spec
    with reordered_norms(model, sites, seed=0):
        assert (norm(x) != before).float().mean() < 0.01
    assert "forward" not in vars(norm)
    assert torch.equal(norm(x), before)


def test_regrouped_steps_keep_their_sequences():
    sequences = torch.arange(12).view(12, 1)
    options = TrainingOptions(steps=3, batch_size=2, accumulation=1)
    regrouped, finer = regroup(sequences, options, processes=2, seed=0)
    assert finer.accumulation == 2
    for start in range(0, 12, 4):
        assert sorted(regrouped[start : start + 4].flatten().tolist()) == list(range(start, start + 4))
    assert not torch.equal(regrouped, sequences)
    _, coarser = regroup(sequences, TrainingOptions(3, 4, accumulation=4), processes=1, seed=0)
    assert coarser.accumulation == 2
