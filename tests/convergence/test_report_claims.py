"""Claims of report rows that no number shows are checked in a step, and the place that breaks one is named."""

import pytest
import torch

from fused_norm import apply_fused_norm
from fused_norm.convergence.call_checks import CallRecord, calls_of_step
from fused_norm.convergence.comparison import Comparison
from fused_norm.convergence.fused_calls import sites_not_compiled, sites_not_seen, watched_calls
from fused_norm.convergence.model_source import add_adapters
from fused_norm.convergence.report_claims import claims_not_kept
from fused_norm.convergence.verdict import judge
from fused_norm.patcher import Site

from ..planted.faults import FAULTS
from .plans import DEVICE, TOKENS, small
from .test_verdict import CONTROL, CONTROLS, STOCK

ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
CONSUMERS = "a norm wrote float32 for its linears, which read 16 bits under autocast"
QUERIES = "queries and keys were written in float32, and attention reads 16 bits under autocast"
JOINED = "the gradient of its residual connection did not join in the backward of the norm"


def missing(model, sites, *, mixed):
    """Return the claims that a step of the model breaks, and the sites that did not run fused."""
    calls = calls_of_step(model, TOKENS, mixed=mixed)
    return claims_not_kept(model, sites, calls, TOKENS, mixed=mixed), sites_not_seen(sites, calls)


@pytest.fixture(scope="module")
def fused():
    # Separate keys: on a CPU transformers 4 repeats keys that heads share, and sums their gradients in float32.
    model = small(num_key_value_heads=4)
    report = apply_fused_norm(model)
    return model, [*report.fused, *(row for row in report.consumers if row.reason is None)]


def test_a_step_that_does_what_the_report_says_lacks_nothing(fused):
    assert missing(*fused, mixed=True) == ({}, ())


@pytest.mark.parametrize(
    ("fault", "lacks"),
    [
        ("consumers-wide", {CONSUMERS: [MLP, ATTENTION]}),
        ("attention-wide", {QUERIES: [ATTENTION]}),
        ("consumers-unjoined", {JOINED: ["model.layers.0"], CONSUMERS: [ATTENTION]}),
        ("consumers-past", {JOINED: ["model.layers.0"]}),
    ],
)
def test_what_changes_no_number_is_seen_with_its_place(fault, lacks, fused):
    model, sites = fused
    with FAULTS[fault].planted(model):
        not_done, _ = missing(model, sites, mixed=True)
    assert {what: sorted(places) for what, places in not_done.items()} == lacks
    verdict = judge("mixed", STOCK, CONTROLS, CONTROL, CallRecord(not_done=not_done))
    assert verdict.status == "invalid"
    assert all(places[0] in " ".join(verdict.reasons) for places in lacks.values())


def test_linears_behind_a_lora_dropout_may_read_float32():
    model = small()
    add_adapters(model, Comparison("llama", "mixed", "lora-dropout"))
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    report = apply_fused_norm(model)
    sites = [*report.fused, *(row for row in report.consumers if row.reason is None)]
    assert any(site.kind == "consumers" for site in sites)
    assert missing(model, sites, mixed=True)[0] == {}


def test_a_loss_that_falls_back_if_its_labels_are_counted_is_seen(fused):
    model, sites = fused
    with FAULTS["fallback-counted"].planted(model), watched_calls(model, with_tensors=False) as calls:
        model(input_ids=TOKENS, labels=TOKENS, use_cache=False, num_items_in_batch=torch.tensor(32, device=DEVICE))
    assert sites_not_seen(sites, calls) == ("lm_head (loss)",)


def test_calls_of_layers_that_recompute_are_seen(fused):
    model, sites = fused
    apply_fused_norm(model, recompute="attention")
    try:
        with watched_calls(model, with_tensors=False) as calls:
            model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        assert sites_not_seen(sites, calls) == ()
    finally:
        model.zero_grad(set_to_none=True)
        apply_fused_norm(model)


ADD, NORM, ROPE, SANDWICH, HEADS = (
    f"fused_norm.{name}_forward.default" for name in ("add_rms_norm", "rms_norm", "rope", "norm_add_norm", "qk_norm")
)


@pytest.mark.parametrize(
    ("kinds", "graphs", "not_seen"),
    [
        ("norm norm norm residual rope", [[NORM, ADD, NORM, ROPE]], ()),
        ("norm norm norm residual rope", [[NORM, ADD, ROPE]], ("c (norm)",)),
        ("norm norm norm residual rope", [[NORM, NORM, NORM]], ("d (residual)", "e (rope)")),
        ("norm norm norm", [[SANDWICH, SANDWICH]], ()),
        ("qk qk rope", [[HEADS]], ()),
        # One of several graphs may run for many layers.
        ("norm norm norm rope", [[NORM], []], ("d (rope)",)),
        ("norm norm norm rope", [[], []], ("a (norm)", "b (norm)", "c (norm)", "d (rope)")),
    ],
)
def test_compiled_code_needs_a_call_for_every_site(kinds, graphs, not_seen):
    sites = [Site(path, kind, "Module") for path, kind in zip("abcde", kinds.split(), strict=False)]
    assert sites_not_compiled(sites, graphs) == not_seen
