"""Variants of a model are measured one after the other, and each leaves the model as it was."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch

from fused_norm.bench import models
from fused_norm.bench.models import COMPILED, FEATURES, ROWS, VARIANTS, Row
from fused_norm.bench.timing import Timing
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
        if result.variant not in ("stock", "identity", "identity-no-rope"):
            assert result.error < 1e-3
    measured = {result.variant for result in session.results.steps}
    left_out = {line.partition(":")[0].rpartition(" ")[2] for line in session.results.left_out}
    assert {"stock", *FEATURES, "torch", "identity", "identity-no-rope"} <= measured
    assert measured | left_out == set(VARIANTS)


@pytest.mark.parametrize("variant", ["fused", "fused-qk", "torch", "identity", "identity-no-rope"])
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


def test_each_of_our_variants_fuses_more_than_the_one_before(monkeypatch):
    def wanted(*, norms=None, qk=None, rope=None, residual=None, sandwich=None):
        """The options as the patcher reads them: one that is not given follows another."""
        norms, qk = norms is not False, qk is not False
        rope = qk if rope is None else rope
        residual = norms if residual is None else residual
        sandwich = residual if sandwich is None else sandwich
        chosen = {"norms": norms, "qk": qk, "rope": rope, "residual": residual, "sandwich": sandwich}
        return {name for name, value in chosen.items() if value}

    found = []
    monkeypatch.setattr(models, "apply_fused_norm", lambda model, **options: found.append(wanted(**options)))
    bench = models._Bench(torch.nn.Identity(), torch.empty(0), torch.empty(0), {})
    for feature in FEATURES:
        with models._VARIANTS[feature](bench):
            pass
    assert all(less < more for less, more in itertools.pairwise(found))
    added = [more - less for less, more in itertools.pairwise([set(), *found])]
    assert added == [{"norms"}, {"qk"}, {"rope"}, {"residual"}, {"sandwich"}]


def test_without_rope_nothing_is_rotated_and_the_rotation_comes_back():
    bench = models._prepare(TINY, torch.float32, torch.device("cpu"))
    modelling = sys.modules[type(bench.model).__module__]
    stock = modelling.apply_rotary_pos_emb
    with models._VARIANTS["identity-no-rope"](bench):
        q, k = torch.randn(2, 1, 2, 3, 4)
        assert modelling.apply_rotary_pos_emb(q, k, None, None, unsqueeze_dim=1) == (q, k)
        first = bench.step()
        bench.forget()
        bench.model.rotary_emb.forward = lambda x, *_: (torch.full((1, 16, 16), float("nan")),) * 2
        assert torch.equal(bench.step(), first), "the angles have no part in it"
    assert modelling.apply_rotary_pos_emb is stock


@pytest.mark.parametrize("variant", COMPILED)
def test_under_torch_compile_the_compiled_model_is_what_is_timed(variant, session, monkeypatch):
    ran, compiled = [], []

    def backend(graph, example_inputs):
        compiled.append(graph)

        def run(*inputs):
            ran.append(graph)
            return graph.forward(*inputs)

        return run

    timed = []

    def step_time(step, device, *, seconds):
        before = len(ran)
        step()
        timed.append(len(ran) - before)
        return Timing.of([1.0], "wall")

    monkeypatch.setattr(models, "_BACKEND", backend)
    monkeypatch.setattr(models, "_missing", lambda variant, device: None)
    monkeypatch.setattr(models, "step_time", step_time)
    models.measure(session, [TINY], [variant], torch.float32)
    (result,) = session.results.steps
    assert (result.verdict, result.detail) == ("ok", None)
    assert result.error < 1e-3
    assert timed[0] >= 1
    assert len(compiled) == timed[0], "compiled once"
    # Dynamo keeps the two halves of an autograd function in graphs inside the graph.
    inner = [part for graph in compiled for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
    called = {str(node.target) for part in inner for node in part.graph.nodes}
    assert any("fused_norm" in name for name in called) == (variant == "fused-compile")
