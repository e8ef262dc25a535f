"""Verdicts depend on the model alone, and what is kept is reported with its reason."""

from __future__ import annotations

import pytest
import torch

import fused_norm
from fused_norm.kernels import expert_unpermute
from fused_norm.model_configs import build


def test_a_default_device_changes_no_verdict() -> None:
    expected = fused_norm.apply_fused_norm(build("qwen3", seed=0)).counts
    model = build("qwen3", seed=0)
    with torch.device("meta"):
        assert fused_norm.apply_fused_norm(model).counts == expected


def test_what_is_not_selected_says_so_and_stays_stock() -> None:
    model = build("qwen3", seed=0)
    stock = type(model.model.norm)
    report = fused_norm.apply_fused_norm(model, modules="model.layers.0.*")
    reasons = {site.path: site.reason for site in report.rows if site.kind == "norm"}
    assert reasons["model.norm"] == "not selected by modules"
    assert type(model.model.norm) is stock
    assert reasons["model.layers.0.input_layernorm"] is None


def test_a_compiled_loss_function_keeps_its_logits() -> None:
    model = build("qwen3", seed=0)
    model.loss_function = torch.compile(model.loss_function, backend="eager")
    (site,) = [site for site in fused_norm.apply_fused_norm(model).rows if site.kind == "loss"]
    assert site.reason == "its loss function is compiled"


def test_a_forward_put_on_a_fused_class_is_reported_at_the_next_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3", seed=0)
    fused_norm.apply_fused_norm(model)
    norm = model.model.norm

    def forward(self: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    monkeypatch.setattr(type(norm), "forward", forward)
    report = fused_norm.apply_fused_norm(model, strict=False)
    reasons = {site.path: site.reason for site in report.rows}
    assert "the forward of its fused class was replaced, by" in str(reasons["model.norm"])


def test_positions_of_other_dtypes_are_refused_without_absent_rows_too() -> None:
    x, weights = torch.randn(8, 16), torch.rand(4, 2)
    with pytest.raises(TypeError, match="position"):
        expert_unpermute(x, weights, torch.zeros(4, 2), None, dtype=torch.float32)
