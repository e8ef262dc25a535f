"""The convergence suite sees every planted fault, and is green without one."""

import contextlib

import pytest

from fused_norm.convergence import suite
from fused_norm.convergence.comparison import Comparison
from fused_norm.model_configs import FAMILIES

from ..convergence.plans import tiny_plan
from .faults import FAULTS


def faults_where(execution):
    return [name for name, fault in FAULTS.items() if fault.where == execution]


CONSUMERS = [*faults_where("consumers"), "add_rms_norm_for_consumers-dropped"]
EAGER = [name for name in faults_where("eager") if name not in (*CONSUMERS, "causal_conv1d-dw-tap")]


def outcome(baseline, comparison, monkeypatch, fault=None):
    """Return what the suite says of a model with a planted fault, and whether it was part of a call."""
    calls = []

    def faulty(feature):
        @contextlib.contextmanager
        def fused(model):
            with fused_for(feature)(model) as sites, FAULTS[fault].planted(model) as planted:
                yield sites
            calls.append(planted.calls)

        return fused

    fused_for = suite.fused_for
    with monkeypatch.context() as patched:
        if fault:
            patched.setattr(suite, "fused_for", faulty)
        result = suite.run_fused(baseline, comparison, suite.Progress())
    if fault and not any(calls):
        return "not reached", ()
    breaks_report = bool(result.calls and (result.calls.not_seen or result.calls.not_done))
    is_seen = result.verdict.status == "red" or breaks_report
    return "caught" if is_seen else result.verdict.status, result.verdict.reasons


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "precision", "execution", "names"),
    [
        ("llama", "bf16", "eager", EAGER),
        ("llama", "mixed", "eager", [*CONSUMERS, *faults_where("sites")]),
        ("llama", "bf16", "recompute", faults_where("recompute")),
        ("llama", "mixed", "lora-dropout", faults_where("lora-dropout")),
        ("gemma2", "bf16", "loss", faults_where("loss")),
        ("llama", "bf16", "checkpointing", faults_where("checkpointing")),
        ("llama", "mixed", "lora-alone", faults_where("lora-alone")),
        *(
            pytest.param(*case, marks=pytest.mark.release)
            for case in (
                ("llama", "fp32", "compile", faults_where("compile")),
                ("llama", "mixed", "lora-recompute", faults_where("lora-recompute")),
                ("llama", "mixed", "lora", faults_where("lora")),
                ("llama", "mixed", "qlora-qv", faults_where("qlora-qv")),
            )
        ),
    ],
)
def test_a_fault_is_caught_in_the_execution_that_runs_it(family, precision, execution, names, monkeypatch):
    assert names
    comparison = Comparison(family, precision, execution)
    plan = tiny_plan([comparison], layers=FAMILIES[family].tiny["num_hidden_layers"] if execution == "eager" else 1)
    baseline = suite.run_baseline(plan, comparison.baseline, suite.Progress())
    assert outcome(baseline, comparison, monkeypatch) == ("green", ())
    outcomes = {name: outcome(baseline, comparison, monkeypatch, name) for name in names}
    assert {name: result[0] for name, result in outcomes.items()} == dict.fromkeys(names, "caught"), outcomes
