"""Variants of a model are measured one after the other, and each leaves the model as it was."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import pytest
import torch

from fused_norm.bench import models
from fused_norm.bench.models import CASES, COMPILED, VARIANTS, BenchmarkedModel, ModelCase, prepare, replaced_norms
from fused_norm.bench.providers import PROVIDERS
from fused_norm.bench.timing import Timing
from fused_norm.model_configs import FAMILIES

TINY = ModelCase("gemma3_text", None, 1, 16)


def test_rows_have_the_sizes_of_published_models():
    for case in CASES:
        config = case.config()
        shape = next(shape for shape in FAMILIES[case.model_type].shapes if shape.name == case.shape)
        assert (config.hidden_size, config.num_hidden_layers) == (shape.hidden_size, shape.num_hidden_layers)
        assert (config.head_dim, config.intermediate_size) == (shape.head_dim, shape.intermediate_size)
    assert CASES[0].name == "Qwen3-0.6B 4x4096"


def test_a_shape_that_there_is_not_is_named():
    with pytest.raises(ValueError, match=r"no shape 'Qwen/Qwen3-5B' of qwen3; there are Qwen/Qwen3-0\.6B"):
        ModelCase("qwen3", "Qwen/Qwen3-5B", 1, 1).config()


@pytest.mark.slow
def test_every_variant_that_is_here_is_right_and_timed(run):
    models.measure(run, [TINY, ModelCase("qwen3", None, 1, 16)], VARIANTS, torch.float32)
    for result in run.results.steps:
        assert (result.verdict, result.detail) == ("ok", None)
        assert result.timing is not None
        if result.variant not in ("stock", "identity", "identity-no-rope"):
            assert result.error < 1e-3
    measured = {result.variant for result in run.results.steps}
    left_out = {line.partition(":")[0].rpartition(" ")[2] for line in run.results.left_out}
    assert {"stock", "fused", "torch", "identity", "identity-no-rope"} <= measured
    assert measured | left_out == set(VARIANTS)


@pytest.mark.parametrize("variant", ["fused", "torch", "identity", "identity-no-rope"])
def test_a_variant_changes_the_norms_and_puts_them_back(variant):
    benchmarked = prepare(TINY, torch.float32, torch.device("cpu"))
    names = [name for name, _ in benchmarked.model.named_modules()]
    before = {name: (type(module), dict(vars(module))) for name, module in benchmarked.model.named_modules()}
    weights = {name: weight.clone() for name, weight in benchmarked.model.state_dict().items()}
    norm = benchmarked.model.layers[0].self_attn.q_norm
    with VARIANTS[variant](benchmarked) as model:
        changed = (type(norm), vars(norm).get("forward")) != (before["layers.0.self_attn.q_norm"][0], None)
        assert changed
        assert model is benchmarked.model
        benchmarked.step()
    assert names == [name for name, _ in benchmarked.model.named_modules()]
    for name, module in benchmarked.model.named_modules():
        assert type(module) is before[name][0]
        assert vars(module).keys() == before[name][1].keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in benchmarked.model.state_dict().items())


def test_norm_weights_are_away_from_their_initial_values():
    benchmarked = prepare(TINY, torch.float32, torch.device("cpu"))
    assert len(benchmarked.norms) == FAMILIES["gemma3_text"].sites()["norm"] + FAMILIES["gemma3_text"].sites()["qk"]
    for path in benchmarked.norms:
        assert benchmarked.model.get_submodule(path).weight.std() > 0.1


def test_a_variant_that_computes_something_else_is_not_timed(run, monkeypatch):
    def without_gamma(module, spec):
        return lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:], None, spec.eps)

    monkeypatch.setitem(VARIANTS, "torch", replaced_norms(without_gamma))
    models.measure(run, [TINY], ["torch", "stock"], torch.float32)
    wrong, stock = run.results.steps
    assert (wrong.verdict, wrong.timing, stock.verdict) == ("wrong", None, "ok")
    assert wrong.error > models.ALLOWED_ERROR


def test_a_variant_that_raises_is_reported(run, monkeypatch):
    def broken(module, spec):
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(VARIANTS, "torch", replaced_norms(broken))
    models.measure(run, [TINY], ["torch", "stock"], torch.float32)
    assert [(row.verdict, row.detail) for row in run.results.steps] == [
        ("failed", "RuntimeError: no such kernel"),
        ("ok", None),
    ]


def test_peak_memory_is_that_of_a_whole_step(run, monkeypatch):
    def peak_memory(call, device):
        benchmarked = call.func.__self__
        call()
        assert all(parameter.grad is None for parameter in benchmarked.model.parameters()), "none is kept for the next"
        return 2**30

    monkeypatch.setattr(models, "peak_memory", peak_memory)
    models.measure(run, [TINY], ["stock"], torch.float32)
    (row,) = run.results.steps
    assert (row.verdict, row.detail, row.peak_bytes) == ("ok", None, 2**30)


def test_gradients_do_not_add_up_over_steps(run, monkeypatch):
    before = []
    forward_backward = BenchmarkedModel.forward_backward

    def watched(benchmarked, model=None):
        before.append([parameter.grad for parameter in benchmarked.model.parameters()])
        return forward_backward(benchmarked, model)

    def step_time(step, device, *, seconds):
        step()
        step.func.__self__.forward_backward()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(BenchmarkedModel, "forward_backward", watched)
    monkeypatch.setattr(models, "step_time", step_time)
    models.measure(run, [TINY], ["stock", "torch"], torch.float32)
    assert len(before) == 1 + 2 * 3, "stock's own, then the outputs, the step and what fails"
    assert all(gradient is None for gradients in before for gradient in gradients)


def test_the_budget_is_asked_before_every_model_and_variant(run, monkeypatch):
    run.budget = 5.0

    def step_time(step, device, *, seconds):
        run.began -= 6
        return Timing.of([1.0], "wall")

    def too_late(*arguments):
        raise AssertionError("a model is built after the budget")

    monkeypatch.setattr(models, "step_time", step_time)
    models.measure(run, [TINY], ["stock", "torch"], torch.float32)
    monkeypatch.setattr(models, "prepare", too_late)
    models.measure(run, [TINY], ["stock", "torch"], torch.float32)
    assert [row.variant for row in run.results.steps] == ["stock"]
    assert run.results.left_out == [f"{TINY.name} torch: after 5 s", f"{TINY.name} stock, torch: after 5 s"]


def test_without_rope_nothing_is_rotated_and_the_rotation_comes_back():
    benchmarked = prepare(TINY, torch.float32, torch.device("cpu"))
    modelling = sys.modules[type(benchmarked.model).__module__]
    stock = modelling.apply_rotary_pos_emb
    with VARIANTS["identity-no-rope"](benchmarked):
        q, k = torch.randn(2, 1, 2, 3, 4)
        assert modelling.apply_rotary_pos_emb(q, k, None, None, unsqueeze_dim=1) == (q, k)
        first = benchmarked.forward_backward()
        benchmarked.model.rotary_emb.forward = lambda x, *_: (torch.full((1, 16, 16), float("nan")),) * 2
        assert torch.equal(benchmarked.forward_backward(), first), "the angles have no part in it"
    assert modelling.apply_rotary_pos_emb is stock


@pytest.mark.slow
@pytest.mark.parametrize("variant", COMPILED)
def test_under_torch_compile_the_compiled_model_is_what_is_timed(variant, run, monkeypatch):
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

    compile_model = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **options: compile_model(model, backend=backend, **options))
    monkeypatch.setitem(PROVIDERS, "compile", replace(PROVIDERS["compile"], on_cpu=True))
    monkeypatch.setattr(models, "step_time", step_time)
    models.measure(run, [TINY], [variant], torch.float32)
    (result,) = run.results.steps
    assert (result.verdict, result.detail) == ("ok", None)
    assert result.error < 1e-3
    assert timed[0] >= 1
    assert len(compiled) == timed[0], "compiled once"
    # Dynamo keeps the two halves of an autograd function in graphs inside the graph.
    inner = [part for graph in compiled for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
    called = {str(node.target) for part in inner for node in part.graph.nodes}
    assert any("fused_norm" in name for name in called) == (variant == "fused-compile")


def test_a_backward_that_writes_into_its_gradient_gets_a_copy_in_every_step():
    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.view_as(y)

        @staticmethod
        def backward(ctx, dy):
            return dy.mul_(2)

    linear = torch.nn.Linear(4, 4)
    embedding = torch.nn.Embedding(3, 4)
    gradient = torch.randn(1, 2, 4)

    def model(input_ids, use_cache):
        return types.SimpleNamespace(last_hidden_state=InPlace.apply(linear(embedding(input_ids))))

    benchmarked = BenchmarkedModel(linear, torch.tensor([[0, 2]]), gradient, {})
    found = []
    for _ in range(2):
        benchmarked.drop_gradients()
        benchmarked.forward_backward(model)
        found.append(linear.weight.grad)
    assert torch.equal(*found)
