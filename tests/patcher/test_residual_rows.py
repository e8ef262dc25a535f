"""Every add that feeds a norm in the same forward has its row, and is fused or says why it is not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fused_norm
from tools.coverage.traced_sums import TracedSums

from .models import assert_near, relative, slow, step
from .other_families import TOKENS_WITH_AN_IMAGE, model_of


@pytest.mark.slow
def test_a_dropout_between_a_norm_and_its_add_drops_in_training_as_in_stock(device: str, launches: list[str]) -> None:
    stock, ids = model_of("t5gemma", device), TOKENS_WITH_AN_IMAGE.to(device)
    fused = copy.deepcopy(stock)
    assert fused_norm.apply_fused_norm(fused, strict=False).counts["post_norm"] == 5
    results = []
    for model in (stock.train(), fused.train()):
        torch.manual_seed(3)
        results.append(step(model, ids))
    assert_near(*reversed(results))
    assert launches.count("add_rms_norm") == 3
    assert "norm_add_norm" not in launches
    launches.clear()
    heard: list[str] = []
    fused.eval().model.encoder.layers[0].dropout.register_forward_hook(lambda *_: heard.append("dropout"))
    fused(ids, labels=ids, use_cache=False)
    assert len(heard) == 2
    assert launches.count("norm_add_norm") == 2


class Layer(nn.Module):
    def __init__(self, *, deep: bool) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.RMSNorm(24, eps=1e-5) for _ in range(3))
        self.norms = nn.ModuleList(nn.RMSNorm(24, eps=1e-5) for _ in range(2))
        self.layer_norm = nn.LayerNorm(24)
        self.deep = deep

    def forward(self, x):
        y = x + self.layer_norm(x + x)
        y = y + x
        y = self.layer_norm(y)
        y += x
        y = self.first(y)
        if self.deep:
            y = x + y
        y = self.second(y)
        y = x + y
        y = self.third(y)
        for index in range(2 if self.deep else 0):
            y = self.norms[index](x + y)
        return self.norms[-1](x + y)


@pytest.mark.parametrize("deep", [False, True])
def test_only_an_add_that_can_be_fused_with_an_rms_norm_has_a_row(deep: bool) -> None:
    report = fused_norm.apply_fused_norm(nn.ModuleList([Layer(deep=deep)]))
    rows = {site.path: site.reason for site in (*report.fused, *report.kept) if site.kind == "residual"}
    assert rows == {"0.third": None}
    off = fused_norm.apply_fused_norm(nn.ModuleList([Layer(deep=deep)]), residual=False)
    assert {site.path: site.cause for site in off.kept if site.kind == "residual"} == {"0.third": "option"}


OFFSET = 3


class AddsNumbers(nn.Module):
    """Norms of sums with numbers: the source or the module shows that all but the last are numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(24, eps=1e-5) for _ in range(7))
        self.offset = 0.5

    def forward(self, x, summand, annotated: float):
        x = x + self.offset
        x = self.norms[0](x)
        x = 2 + x
        x = self.norms[1](x)
        count = 0
        for _ in range(2):
            count = count + (-len(x) if self.training else x.shape[-1] / x.size(0))
        count += 1
        x = x + count
        x = self.norms[2](x)
        x = x + OFFSET
        x = self.norms[3](x)
        x = x + annotated
        x = self.norms[4](x)
        x += self.offset
        x = self.norms[5](x)
        x = x * 2 + summand
        return self.norms[6](x)


def test_a_norm_that_takes_a_sum_with_a_number_keeps_its_kernel_and_has_no_row_of_an_add(
    device: str, launches: list[str]
) -> None:
    stock = AddsNumbers().to(device)
    fused = copy.deepcopy(stock)
    report = fused_norm.apply_fused_norm(nn.ModuleList([fused]))
    rows = [(site.path, site.reason) for site in (*report.fused, *report.kept) if site.kind == "residual"]
    assert rows == [("0.norms.6", None)], "it may be a tensor"
    x = torch.randn(3, 24, device=device)
    assert relative(fused(x, 0.25, 0.5), stock(x, 0.25, 0.5)) < 1e-6
    assert launches == ["rms_norm"] * 7


@pytest.mark.parametrize("model_type", ["lfm2", *map(slow, ("qwen2_5_vl", "gemma3n_text", "glm4", "longcat_flash"))])
def test_rows_are_those_of_the_adds_that_are_seen_to_feed_a_norm(model_type: str) -> None:
    model = model_of(model_type, "cpu")
    report = fused_norm.apply_fused_norm(model, strict=False)
    fused_norm.remove_fused_norm(model)
    rows = (*report.fused, *report.kept)
    sums = TracedSums(model, {site.path for site in rows if site.kind == "norm" and site.spec is not None})
    with torch.no_grad(), sums:
        model(input_ids=TOKENS_WITH_AN_IMAGE, use_cache=False)
    assert sums.fed == {site.path for site in rows if site.kind == "residual"}
    assert bool(sums.fed) == (model_type != "gemma3n_text")
