"""The verdict sees every planted fault, and is green without one."""

from dataclasses import replace

import pytest

from fused_norm.convergence.comparison import RECOMPUTE, Comparison
from fused_norm.model_configs import FAMILIES

from ..convergence.plans import tiny_plan
from .faults import FAULTS
from .runs import SOUND, precision_of, run_faults


def one_fault_of_each_form():
    """Each way to go wrong once where code is not compiled, the operators in turns: by family, the names of faults."""
    forms = {}
    for name, fault in FAULTS.items():
        operator, _, form = name.partition("-")
        if fault.where in ("eager", "sites") and operator != "gated_rms_norm":  # which no family of the suite has
            forms.setdefault(form, []).append(operator)
    chosen = {"granite": [], "gemma3_text": []}
    for turn, (form, operators) in enumerate(forms.items()):
        # Half a last place in the gradients of a few heads is at the limit of what so small a model shows.
        operator = "add_rms_norm" if form == "dx-cut" else operators[turn % len(operators)]
        in_gemma = operator.removesuffix("_for_readers") in ("qk_norm", "norm_add", "norm_add_norm") or form in (
            "sandwich",
            "square",
        )
        chosen["gemma3_text" if in_gemma else "granite"].append(f"{operator}-{form}")
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize(("family", "precision"), [("granite", "mixed"), ("gemma3_text", "bf16")])
def test_no_fault_is_missed(family, precision):
    """Together these have a scaled branch, a wide stream, sandwiches, heads, gates and a rotation by itself."""
    names, comparison = one_fault_of_each_form()[family], Comparison(family, precision)
    plan = tiny_plan([comparison], layers=FAMILIES[family].tiny["num_hidden_layers"])
    results = {result.fault: result for result in run_faults(plan, comparison, names)}
    assert results.pop(SOUND).outcome == "sound"
    outcomes = {name: result.outcome for name, result in results.items()}
    assert set(outcomes) == set(names)
    assert set(outcomes.values()) <= {"caught", "hidden"}, outcomes
    assert list(outcomes.values()).count("caught") >= 0.8 * len(names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "fault", "outcome"),
    [
        ("llama", "rms_norm-compiled-dw", "caught"),
        ("gemma3_text", "add_rms_norm-compiled-dw", "hidden"),
        ("llama", "glu-checkpointed", "caught"),
        ("llama", "adapter-shared", "caught"),
        ("llama", "adapter-fallback", "caught"),
        ("llama", "adapter-dropout-cast", "caught"),
        ("llama", "adapter-dropout-none", "caught"),
        ("llama", "adapter-dropout-same", "caught"),
    ],
)
def test_a_fault_of_one_execution_alone_is_caught_where_it_is_run(family, fault, outcome):
    comparison = Comparison(family, "bf16", FAULTS[fault].where)
    comparison = replace(comparison, precision=precision_of(comparison))
    sound, result = run_faults(tiny_plan([comparison]), comparison, [fault])
    assert (sound.outcome, result.outcome) == ("sound", outcome)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "precision"), [("llama", "mixed"), ("llama", "bf16"), ("gemma3_text", "bf16")])
def test_faults_of_norms_that_know_their_readers_are_caught_where_they_change_a_number(family, precision):
    names = [name for name, fault in FAULTS.items() if fault.where == "readers" or "_for_readers-" in name]
    comparison = Comparison(family, precision)
    sound, *results = run_faults(tiny_plan([comparison]), comparison, names)
    assert sound.outcome == "sound"
    caught = {result.fault.rpartition("_for_readers-")[2] for result in results if result.outcome == "caught"}
    assert {result.outcome for result in results} == {"caught", "hidden"}
    everywhere = {"dropped", "doubled", "ds", "ds-twice", "readers-input", "readers-neighbour", "readers-detached"}
    assert caught - everywhere == ({"early", "copy"} if precision == "mixed" else {"order", "late", "ds-joined"})
    assert caught >= everywhere


IN_SITES = ["readers-wide", "attention-wide", "readers-unjoined", "readers-past", "fallback-counted"]
IN_SITES += ["num-items-unheeded"]


@pytest.mark.slow
def test_outputs_that_nothing_casts_cannot_be_written_too_wide():
    comparison = Comparison("llama", "bf16")
    sound, *results = run_faults(tiny_plan([comparison]), comparison, ["readers-wide", "attention-wide"])
    assert (sound.outcome, *(result.outcome for result in results)) == ("sound", "hidden", "hidden")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "execution", "names"),
    [
        ("mixed", "eager", IN_SITES),
        *((precision_of(Comparison("llama", "bf16", execution)), execution, None) for execution in RECOMPUTE),
    ],
)
def test_no_step_that_does_less_than_the_report_says_is_missed(precision, execution, names):
    names = names or [name for name, fault in FAULTS.items() if fault.where == execution]
    comparison = Comparison("llama", precision, execution)
    sound, *results = run_faults(tiny_plan([comparison]), comparison, names)
    assert sound.outcome == "sound"
    assert {result.fault: result.outcome for result in results} == dict.fromkeys(names, "caught")


HEADS = [name for name, fault in FAULTS.items() if fault.where == "loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "precision", "names"),
    [
        ("gemma2", "bf16", HEADS),  # whose logits are capped
        (
            "granite",
            "mixed",
            [f"linear_cross_entropy-{form}" for form in ("few", "dw-chunks", "divided-late", "num-items")],
        ),
    ],
)
def test_no_fault_of_heads_and_their_losses_is_missed(family, precision, names):
    comparison = Comparison(family, precision, "loss")
    sound, *results = run_faults(tiny_plan([comparison]), comparison, names)
    assert sound.outcome == "sound"
    outcomes = dict.fromkeys(names, "caught") | {"linear_cross_entropy-dbias": "hidden"}
    assert {result.fault: result.outcome for result in results} == {name: outcomes[name] for name in names}


@pytest.mark.slow
def test_no_fault_of_adapters_is_missed():
    names = [name for name, fault in FAULTS.items() if fault.where == "lora"]
    comparison = Comparison("llama", "mixed", "lora")
    sound, *results = run_faults(tiny_plan([comparison]), comparison, names)
    assert sound.outcome == "sound"
    assert {result.fault: result.outcome for result in results} == dict.fromkeys(names, "caught")
