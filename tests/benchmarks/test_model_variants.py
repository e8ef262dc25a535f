"""A variant changes only its twin; changes to the process last while its steps run."""

import sys
from unittest import mock

import pytest
import torch
from torch._inductor import compile_fx

from benchmarks import model_variants
from benchmarks.model_cases import ModelCase
from benchmarks.model_steps import prepare, relative_error
from benchmarks.model_variants import FLOAT8, OURS, VARIANTS, float8_linears_alone
from benchmarks.results import RefusedError

from ..conftest import HAS_GPU, slow
from ..patcher.models import is_fused, snapshot

CPU = torch.device("cpu")


def prepared(model_type="gemma3_text", step="", length=16):
    return prepare(ModelCase(model_type, None, 1, length, tuple(step.split())), torch.float32, CPU)


def modelling(step):
    return sys.modules[type(step.model).__module__]


def test_a_variant_changes_its_twin_and_nothing_else():
    step = prepared()
    before, names = snapshot(step.model), dict(vars(modelling(step)))
    twin = step.twin()
    patched = VARIANTS["fused"](twin)
    assert patched.model is twin.model
    assert is_fused(twin.model.layers[0].self_attn.q_norm)
    with patched.running():
        twin.step()
    assert [kind for kind, _ in snapshot(step.model)] == [kind for kind, _ in before]
    assert [held.keys() for _, held in snapshot(step.model)] == [held.keys() for _, held in before]
    assert vars(modelling(step)) == names


@pytest.mark.parametrize(
    ("variant", "step", "reason"),
    [
        ("fused-recompute", "qwen3 generate", "nothing is kept for a backward"),
        ("fused-stock-loss", "qwen3", "the step has no loss"),
        ("without post_norm", "llama", "nothing of the kind"),
        ("compile", "qwen3 generate", "static cache"),
        ("fused-graphs", "qwen3 generate", "measured for training steps"),
    ],
)
def test_a_variant_that_would_be_another_one_is_refused(variant, step, reason):
    with pytest.raises(RefusedError, match=reason):
        VARIANTS[variant](prepared(*step.split(maxsplit=1), length=2 if "generate" in step else 16))


def test_an_option_that_is_left_out_leaves_out_that_and_nothing_else():
    twin = prepared("llama").twin()
    VARIANTS["without residual"](twin)
    assert is_fused(twin.model.norm)
    assert not any(rewrite.pattern == "adds" for rewrite in twin.model.layers[0].fused_norm_rewrites)


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("fused-recompute-mlp", {"recompute": "mlp"}),
        ("fused-stock-loss", {"loss": False}),
    ],
)
def test_a_fused_variant_has_its_options_and_the_results_of_stock(variant, options, monkeypatch):
    step = prepared("qwen3", "masked")
    stock, twin = step.outputs_and_gradients(), step.twin()
    apply = mock.Mock(wraps=model_variants.apply_fused_norm)
    monkeypatch.setattr(model_variants, "apply_fused_norm", apply)
    patched = VARIANTS[variant](twin)
    assert apply.call_args == mock.call(twin.model, **options)
    assert (type(twin.model.lm_head) is torch.nn.Linear) == ("loss" in options)
    assert relative_error(twin.outputs_and_gradients(patched.model), stock) < 1e-5


@pytest.mark.usefixtures("replays_anywhere")
@pytest.mark.parametrize("variant", ["fused-graphs", "fused-graphs-recompute-attention"])
def test_layers_of_a_variant_with_graphs_are_replayed_in_every_step_with_the_results_of_stock(variant):
    step = prepared("qwen3", "loss", length=8)
    stock, twin = step.outputs_and_gradients(), step.twin()
    patched = VARIANTS[variant](twin)
    before = patched.report.replays.forwards
    assert relative_error(twin.outputs_and_gradients(patched.model), stock) < 1e-5
    assert patched.report.replays.forwards - before == len(twin.model.model.layers)
    assert [row.reason for row in patched.report.recompute or ()] == [None, None] * ("recompute" in variant)


@pytest.mark.skipif(HAS_GPU, reason="there layers are replayed")
def test_a_variant_whose_layers_are_not_replayed_is_refused_with_the_reason():
    with pytest.raises(RefusedError, match="no layer was replayed: there is no CUDA device"):
        VARIANTS["fused-graphs"](prepared("qwen3", length=2).twin())
    assert model_variants.missing("fused-graphs", CPU) == "needs a GPU"


def test_liger_patches_all_it_has_and_its_names_are_in_force_while_it_runs():
    pytest.importorskip("liger_kernel")
    step = prepared("qwen3", "loss")
    stock, twin = modelling(step).apply_rotary_pos_emb, step.twin()
    patched = VARIANTS["liger"](twin)
    assert modelling(step).apply_rotary_pos_emb is stock
    with patched.running():
        assert modelling(step).apply_rotary_pos_emb.__module__.startswith("liger_kernel")
    assert modelling(step).apply_rotary_pos_emb is stock
    for model, by_liger in ((twin.model, True), (step.model, False)):
        for module in (model, model.model.norm, model.model.layers[0].mlp):
            assert module.forward.__func__.__module__.startswith("liger_kernel") == by_liger


@pytest.fixture
def graphs(monkeypatch):
    """Graphs run as they are in place of Inductor's code, and are recorded."""
    recorded = []
    monkeypatch.setattr(compile_fx, "compile_fx", lambda graph, *_, **__: recorded.append(graph) or graph.forward)
    yield recorded
    torch.compiler.reset()


@pytest.mark.usefixtures("large_graphs")
@pytest.mark.parametrize(
    "variant",
    ["compile-layers", *slow("fused-compile", "fused-compile-layers", "float8-rowwise-fused-compile-layers")],
)
def test_compiled_variants_are_right_and_run_compiled(variant, graphs):
    step = prepared("qwen3")
    eager = step.twin()
    stock = VARIANTS[float8_linears_alone(variant) or "stock"](eager) and eager.outputs_and_gradients()
    twin = step.twin()
    patched = VARIANTS[variant](twin)
    with patched.running():
        # Fused norms round differently, so a float8 code may be the next one.
        rounds = variant in OURS and variant in FLOAT8
        assert relative_error(twin.outputs_and_gradients(patched.model), stock) < (0.05 if rounds else 1e-5)
        compiled = len(graphs)
        twin.step(patched.model)
    assert len(graphs) == compiled > 0, "compiled once"
    # Dynamo keeps the two halves of an autograd function in graphs inside the graph.
    inner = [part for graph in graphs for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
    assert any("fused_norm" in str(node.target) for part in inner for node in part.graph.nodes) == (variant in OURS)
