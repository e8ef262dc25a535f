"""The option that gives norms other rounding points than those of their code: values, reports and errors."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from torch import nn

import fused_norm
from fused_norm.kernels import add_rms_norm, rms_norm
from fused_norm.model_configs import build

from .models import assert_same, tokens

BF16 = torch.bfloat16
ON_HEADS = {"*.q_norm": "gemma", "*.k_norm": "gemma"}


class RoundedOnce(nn.Module):
    """A norm whose own code has the option's rounding points."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (wide * self.weight.float()).type_as(hidden_states)


@pytest.fixture
def model(device: str) -> nn.Module:
    return build("qwen3", seed=0, dtype=BF16, device=device)


def test_a_norm_rounds_as_it_is_told_with_and_without_an_add(model, device):
    fused_norm.apply_fused_norm(model, norm_rounding={"model.layers.*.input_layernorm": "gemma"})
    norm, norm_of_stock = model.model.layers[0].input_layernorm, model.model.layers[0].post_attention_layernorm
    width, eps = norm.weight.numel(), norm.variance_epsilon
    x, r = (torch.randn(16, width, device=device).to(BF16) for _ in range(2))
    told, own = (rms_norm(x, norm.weight, eps, casting=casting) for casting in ("gemma", "llama"))
    assert not torch.equal(told, own)
    assert torch.equal(norm(x), told)
    assert_same(norm(x, r), add_rms_norm(x, r, norm.weight, eps, casting="gemma"))
    assert torch.equal(norm_of_stock(x), rms_norm(x, norm_of_stock.weight, eps))


def test_what_kernels_do_not_take_rounds_as_it_is_told_and_stock_code_runs_only_where_all_is_switched_off(
    model, device
):
    stock = copy.deepcopy(model.model.norm)
    fused_norm.apply_fused_norm(model, norm_rounding={"model.norm": "gemma"})
    norm, x = model.model.norm, torch.randn(3, 8, stock.weight.numel(), device=device).to(BF16)
    expected = RoundedOnce(stock)(x)
    assert not torch.equal(expected, stock(x))
    assert torch.equal(torch.func.vmap(norm)(x), expected)
    with fused_norm.disabled():
        assert torch.equal(norm(x), stock(x))


def test_a_model_computes_what_it_would_with_norms_of_that_code(model, device):
    twin = copy.deepcopy(model)
    for layer in twin.model.layers:
        for name in ("q_norm", "k_norm"):
            setattr(layer.self_attn, name, RoundedOnce(getattr(layer.self_attn, name)))
    before = fused_norm.apply_fused_norm(copy.deepcopy(model))
    fused_norm.apply_fused_norm(twin, strict=False)
    report = fused_norm.apply_fused_norm(model, norm_rounding=ON_HEADS)
    assert report.counts["norm"] == before.counts["norm"]
    ids = tokens(device)
    assert torch.equal(model(ids).logits, twin(ids).logits)


def test_the_report_says_where_rounding_points_were_replaced_and_a_norms_own_replace_nothing(model):
    plain = fused_norm.apply_fused_norm(copy.deepcopy(model))
    assert fused_norm.apply_fused_norm(copy.deepcopy(model), norm_rounding={"*": "llama"}) == plain
    report = fused_norm.apply_fused_norm(model, norm_rounding=ON_HEADS)
    rows = {site.path: site for site in report.fused if site.kind == "qk"}
    assert {site.spec.casting for site in rows.values()} == {"gemma"}
    assert {site.replaced for site in rows.values()} == {"llama"}
    assert "gemma, weight, eps 1e-06, in place of llama" in str(report)
    assert [row["replaced"] for row in json.loads(report.to_json())["fused"] if row["kind"] == "qk"] == ["llama"] * 4
    assert {site.replaced for site in report.fused if site.kind == "norm"} == {None}


def test_the_last_call_decides_and_copies_keep_it(model):
    fused_norm.apply_fused_norm(model, norm_rounding=ON_HEADS)
    norm = model.model.layers[0].self_attn.q_norm
    cls = type(norm)
    fused_norm.apply_fused_norm(model, norm_rounding=ON_HEADS)
    assert {type(twin) for twin in (norm, copy.deepcopy(norm), pickle.loads(pickle.dumps(norm)))} == {cls}
    report = fused_norm.apply_fused_norm(model)
    assert norm.fused_norm_spec.casting == "llama"
    assert all(site.replaced is None for site in report.fused)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"norm_rounding": "gemma"}, TypeError, "norm_rounding must map patterns"),
        ({"norm_rounding": {"*": "none"}}, ValueError, "'llama' or 'gemma', not 'none'"),
        ({"norm_rounding": {"*.q_nrom": "gemma"}}, fused_norm.FusedNormError, "selects none of the"),
        ({"norm_rounding": {"*.q_norm": "gemma", "*": "llama"}}, ValueError, "q_norm several castings: gemma, llama"),
        ({"norm_rounding": ON_HEADS, "qk": False}, fused_norm.FusedNormError, "q_norm .* stays stock: .*qk=False"),
    ],
)
def test_what_is_unclear_is_refused_and_changes_nothing(options, error, says, model):
    with pytest.raises(error, match=says):
        fused_norm.apply_fused_norm(model, **options)
    assert fused_norm.remove_fused_norm(model) == 0
