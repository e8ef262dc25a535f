"""Variants of a model are measured one after the other, and each leaves the model as it was."""

from __future__ import annotations

import pytest
import torch

from fused_norm.bench import models
from fused_norm.bench.models import ROWS, VARIANTS, Row
from fused_norm.model_configs import FAMILIES

TINY = Row("gemma3_text", None, 1, 16)


def test_rows_have_the_sizes_of_published_models():
    for row in ROWS:
        config = row.config()
        shape = next(shape for shape in FAMILIES[row.model_type].shapes if shape.name == row.shape)
        assert (config.hidden_size, config.num_hidden_layers) == (shape.hidden_size, shape.num_hidden_layers)
        assert (config.head_dim, config.intermediate_size) == (shape.head_dim, shape.intermediate_size)
    assert ROWS[0].name == "Qwen3-0.6B 4x4096"


def test_a_shape_that_there_is_not_is_named():
    with pytest.raises(ValueError, match=r"no shape 'Qwen/Qwen3-5B' of qwen3; there are Qwen/Qwen3-0\.6B"):
        Row("qwen3", "Qwen/Qwen3-5B", 1, 1).config()


def test_every_variant_that_is_here_is_right_and_timed(session):
    models.measure(session, [TINY, Row("qwen3", None, 1, 16)], VARIANTS, torch.float32)
    for result in session.results.steps:
        assert (result.verdict, result.detail) == ("ok", None)
        assert result.timing is not None
        if result.variant not in ("stock", "identity"):
            assert result.error < 1e-3
    measured = {result.variant for result in session.results.steps}
    left_out = {line.partition(":")[0].rpartition(" ")[2] for line in session.results.left_out}
    assert {"stock", "fused", "torch", "identity"} <= measured
    assert measured | left_out == set(VARIANTS)


@pytest.mark.parametrize("variant", ["fused", "torch", "identity"])
def test_a_variant_changes_the_norms_and_puts_them_back(variant):
    bench = models._prepare(TINY, torch.float32, torch.device("cpu"))
    names = [name for name, _ in bench.model.named_modules()]
    before = {name: (type(module), dict(vars(module))) for name, module in bench.model.named_modules()}
    weights = {name: weight.clone() for name, weight in bench.model.state_dict().items()}
    norm = bench.model.layers[0].self_attn.q_norm
    with models._VARIANTS[variant](bench) as model:
        changed = (type(norm), vars(norm).get("forward")) != (before["layers.0.self_attn.q_norm"][0], None)
        assert changed
        assert model is bench.model
        bench.step()
        bench.forget()
    assert names == [name for name, _ in bench.model.named_modules()]
    for name, module in bench.model.named_modules():
        assert type(module) is before[name][0]
        assert vars(module).keys() == before[name][1].keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in bench.model.state_dict().items())


def test_norm_weights_are_away_from_their_initial_values():
    bench = models._prepare(TINY, torch.float32, torch.device("cpu"))
    assert len(bench.norms) == FAMILIES["gemma3_text"].sites()["norm"] + FAMILIES["gemma3_text"].sites()["qk"]
    for path in bench.norms:
        assert bench.model.get_submodule(path).weight.std() > 0.1


def test_a_variant_that_computes_something_else_is_not_timed(session, monkeypatch):
    def without_gamma(module, spec):
        return lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:], None, spec.eps)

    monkeypatch.setitem(models._VARIANTS, "torch", models._replaced(without_gamma))
    models.measure(session, [TINY], ["torch", "stock"], torch.float32)
    wrong, stock = session.results.steps
    assert (wrong.verdict, wrong.timing, stock.verdict) == ("wrong", None, "ok")
    assert wrong.error > models.ALLOWED_ERROR


def test_a_variant_that_raises_is_reported(session, monkeypatch):
    def broken(module, spec):
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(models._VARIANTS, "torch", models._replaced(broken))
    models.measure(session, [TINY], ["torch", "stock"], torch.float32)
    assert [(row.verdict, row.detail) for row in session.results.steps] == [
        ("failed", "RuntimeError: no such kernel"),
        ("ok", None),
    ]
