"""Sites that run stock code are reported, in a checked step and in the first forward of a training."""

import contextlib
import inspect

import pytest
import torch

from fused_norm import apply_fused_norm, disabled
from fused_norm.convergence.call_checks import CallRecord, calls_of_step, compare
from fused_norm.convergence.comparison import Comparison
from fused_norm.convergence.fused_calls import FusedCall, sites_not_compiled, sites_not_seen, watched_calls
from fused_norm.convergence.model_source import add_adapters
from fused_norm.patcher import Site

from ..conftest import slow_rows
from ..patcher.test_convolutions import BySilu
from ..planted.faults import FAULTS
from .plans import DEVICE, TOKENS, small

FILTERS = "args[1]", "conv1d.weight"
"""The name of a convolution's filters as an argument of a function, and as the weight of a module."""


def call(path, operator):
    return FusedCall(path, len, (path,), inspect.signature(len).bind([]), [operator])


def record_of(model, calls, *, fault=None, **options):
    """Return the record of calls, with a planted fault if one is named."""
    record = CallRecord()
    with FAULTS[fault].planted(model) if fault else contextlib.nullcontext():
        compare(record, model, calls, **options)
    return record


def norms(*paths):
    return [Site(path, "norm", "Norm", None) for path in paths]


def test_a_site_that_ran_stock_code_once_is_not_seen():
    calls = [call("a", "rms_norm"), call("b", "rms_norm"), call("b", "none of its kind")]
    assert sites_not_seen(norms("a", "b"), calls) == ("b (norm)",)


def test_a_site_without_a_call_is_seen_only_where_it_may_be_idle_and_another_of_its_kind_is_not():
    calls = [call("a", "rms_norm")]
    assert sites_not_seen(norms("a", "b"), calls) == ("b (norm)",)
    assert sites_not_seen(norms("a", "b"), calls, may_be_idle=True) == ()
    gate = Site("c", "mlp", "MLP", None)
    assert sites_not_seen([*norms("a"), gate], calls, may_be_idle=True) == ("c (mlp)",)


@pytest.fixture
def adapted():
    """A bf16 model with fp32 adapters."""
    model = small()
    add_adapters(model, Comparison("llama", "mixed", "lora-alone"))
    return model, apply_fused_norm(model).fused


def test_a_lora_layer_is_held_to_the_stock_layer_and_so_are_its_adapters(adapted):
    model, sites = adapted
    calls = calls_of_step(model, TOKENS, mixed=True)
    assert sites_not_seen(sites, calls) == ()
    layers = [call for call in calls if call.path.endswith("_proj")]
    assert len(layers) == 7
    record = record_of(model, layers, mixed=True)
    assert max(record.outputs.values()) < 0.01
    down = "model.layers.0.mlp.down_proj"
    places = [f"{down}.lora_{factor}.default.weight" for factor in "AB"]
    assert max(record.gradients[f"{down}: gradient of {place}"] for place in ("x", *places)) < 1
    classes = [type(model.get_submodule(layer.path)) for layer in layers]
    assert all(cls.forward is cls.fused_norm_forward for cls in classes)


def test_a_norm_is_held_to_the_stock_norm_with_a_gradient_for_each_of_its_consumers(adapted):
    model, _ = adapted
    calls = [call for call in calls_of_step(model, TOKENS, mixed=True) if "consumer" in call.arguments.arguments]
    # The embeddings are frozen, so the first norm has no gradients to sum.
    assert [call.dtypes for call in calls] == [[torch.bfloat16, torch.bfloat16], [torch.bfloat16] * 5]
    right, wrong = (
        record_of(model, calls[1:], fault=fault, mixed=True) for fault in (None, "add_rms_norm_for_consumers-dropped")
    )
    assert max(right.outputs.values()) == max(wrong.outputs.values()) == 0.0
    assert max(right.gradients.values()) < 1
    assert max(wrong.gradients.values()) > 10


def test_adapters_that_run_stock_code_are_seen_unless_they_multiply_in_float32(adapted):
    model, sites = adapted
    with disabled():
        calls = calls_of_step(model, TOKENS, mixed=True)
    assert len([site for site in sites_not_seen(sites, calls) if site.endswith("(adapter)")]) == 7
    assert not [site for site in sites_not_seen(sites, calls_of_step(model, TOKENS)) if site.endswith("(adapter)")]


def head_of(model, **options):
    """Return the calls of the fused head in a step."""
    sites = [site for site in apply_fused_norm(model).fused if site.kind == "loss"]
    calls = calls_of_step(model, TOKENS.repeat(2, 1), **options)
    assert sites_not_seen(sites, calls) == ()
    return [call for call in calls if call.path == sites[0].path]


@pytest.mark.parametrize(
    ("family", "change", "mixed"),
    [
        ("llama", {}, False),
        *slow_rows(("gemma2", {"final_logit_softcapping": 2.0}, True)),
    ],
)
def test_a_head_and_its_loss_are_held_to_the_stock_formula(family, change, mixed):
    model = small(family, dtype=torch.float32 if mixed else torch.bfloat16, **change)
    calls = head_of(model, mixed=mixed)
    rows = [call.arguments.arguments["x"].shape[:-1].numel() for call in calls]
    labels = [call.arguments.arguments["how"].target for call in calls]
    assert rows == [66]
    assert [int((label >= 0).sum()) for label in labels] == [63]
    record = record_of(model, calls, mixed=mixed)
    assert len(record.losses) == 6
    assert len(record.turned) == 7
    assert max(record.losses.values()) < 0.1
    assert max(record.turned.values()) < 0.01
    assert max(record.gradients.values()) < 1
    assert not record.outputs
    with disabled():
        unfused = calls_of_step(model, TOKENS.repeat(2, 1), mixed=mixed)
    assert "lm_head (loss)" in sites_not_seen([Site("lm_head", "loss", "Model")], unfused)


@pytest.mark.slow
def test_a_convolution_and_the_gradients_of_its_filters_are_held_to_stock():
    module = BySilu().to(DEVICE)
    model = torch.nn.ModuleList([module])
    assert apply_fused_norm(model, strict=False).counts["conv"] == 1
    x = torch.randn(2, 33, 6, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    with watched_calls(model) as calls, torch.autocast(DEVICE, torch.bfloat16):
        module(x).float().square().sum().backward()
    assert len(calls) == 1
    record = record_of(model, calls, mixed=True)
    ways = {name.removeprefix(calls[0].name) for name in record.outputs}
    assert ways == {"", ", norms frozen", ", no gradients", ", its beginning", ", packed", ", one NaN"}
    assert max(record.outputs.values()) < 0.01
    assert max(record.rows.values()) == 0
    assert max(record.gradients.values()) < 1
    trained = [name for name in record.gradients if "frozen" not in name]
    with FAULTS["causal_conv1d-dw-tap"].planted(model) as planted:
        wrong = record_of(model, calls, mixed=True)
    assert planted.share == 1
    assert len(trained) == 9  # of the input, the filters and the bias; of the call, its beginning and packed sequences
    assert [name for name in trained if wrong.gradients[name] > 10] == [n for n in trained if n.endswith(FILTERS)]


ADD, NORM, ROPE, SANDWICH, HEADS = (
    f"fused_norm.{name}_forward.default" for name in ("add_rms_norm", "rms_norm", "rope", "norm_add_norm", "qk_norm")
)


@pytest.mark.parametrize(
    ("kinds", "graphs", "not_seen"),
    [
        ("norm norm norm residual rope", [[NORM, ADD, NORM, ROPE]], ()),
        ("norm norm norm residual rope", [[NORM, NORM, NORM]], ("d (residual)", "e (rope)")),
        ("norm norm norm", [[SANDWICH, SANDWICH]], ()),
        ("qk qk rope", [[HEADS]], ()),
        # One of several graphs may run for many layers.
        ("norm norm norm rope", [[NORM], []], ("d (rope)",)),
    ],
)
def test_compiled_code_needs_a_call_for_every_site(kinds, graphs, not_seen):
    sites = [Site(path, kind, "Module") for path, kind in zip("abcde", kinds.split(), strict=False)]
    assert sites_not_compiled(sites, graphs) == not_seen
