"""The verdict sees every planted fault, and is green without one."""

import pytest

from fused_norm.convergence.comparison import Comparison
from fused_norm.model_configs import FAMILIES

from ..convergence.plans import tiny_plan
from .faults import FAULTS
from .runs import SOUND, run_faults


def outcomes_of(family, precision, names, execution="eager", **options):
    """Return what became of faults in the fused model of a comparison, which must be green without one."""
    comparison = Comparison(family, precision, execution)
    results = {result.fault: result for result in run_faults(tiny_plan([comparison], **options), comparison, names)}
    assert results.pop(SOUND).outcome == "sound"
    assert set(results) == set(names)
    return {name: result.outcome for name, result in results.items()}


OF_NO_FAMILY = ("gated_rms_norm", "causal_conv1d", "expert_bias", "expert_gate", "expert_permute", "expert_unpermute")
"""The operators that neither Granite nor Gemma 3 has."""


def one_of_each_form(names):
    """Each kind of fault once; the operators alternate."""
    forms = {}
    for name in names:
        forms.setdefault(name.partition("-")[2], []).append(name)
    return [several[turn % len(several)] for turn, several in enumerate(forms.values())]


def by_family():
    """Faults in code that is not compiled, by family; the experts of the last one have no biases."""
    eager = [name for name, fault in FAULTS.items() if fault.where in ("eager", "sites")]
    chosen = {"granite": [], "gemma3_text": []}
    for name in one_of_each_form(name for name in eager if name.partition("-")[0] not in OF_NO_FAMILY):
        operator, _, form = name.partition("-")
        # Half a last place in the gradients of a few heads is at the limit of what so small a model shows.
        operator = "add_rms_norm" if form == "dx-cut" else operator
        in_gemma = operator.removesuffix("_for_consumers") in ("qk_norm", "norm_add", "norm_add_norm")
        in_gemma = in_gemma or form in ("sandwich", "square")
        chosen["gemma3_text" if in_gemma else "granite"].append(f"{operator}-{form}")
    of_experts = [name for name in eager if name.startswith("expert_") and not name.startswith("expert_bias-")]
    return chosen | {"qwen3_moe": one_of_each_form(of_experts)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "precision"), {"granite": "mixed", "gemma3_text": "bf16", "qwen3_moe": "bf16"}.items()
)
def test_no_fault_is_missed(family, precision):
    """The first two have a scaled branch, a wide stream, sandwiches, heads, gates and a rotation without norms."""
    names = by_family()[family]
    outcomes = outcomes_of(family, precision, names, layers=FAMILIES[family].tiny["num_hidden_layers"])
    assert set(outcomes.values()) <= {"caught", "hidden"}, outcomes
    assert list(outcomes.values()).count("caught") >= 0.8 * len(names), outcomes


@pytest.mark.slow
def test_no_fault_of_biases_of_experts_is_missed():
    forms = ("size", "last-row", "no-grad", "in-place", "even", "next-bias", "dbias", "dbias-next")
    names = [f"expert_bias-{form}" for form in forms]
    outcomes = outcomes_of("gpt_oss", "bf16", names, layers=FAMILIES["gpt_oss"].tiny["num_hidden_layers"])
    assert set(outcomes.values()) == {"caught"}, outcomes


@pytest.mark.slow
@pytest.mark.parametrize(("family", "precision"), [("llama", "mixed"), ("llama", "bf16"), ("gemma3_text", "bf16")])
def test_faults_of_norms_that_know_their_consumers_are_caught_where_they_change_a_number(family, precision):
    names = [name for name, fault in FAULTS.items() if fault.where == "consumers" or "_for_consumers-" in name]
    outcomes = outcomes_of(family, precision, names)
    assert set(outcomes.values()) == {"caught", "hidden"}, outcomes
    caught = {name.rpartition("_for_consumers-")[2] for name, outcome in outcomes.items() if outcome == "caught"}
    everywhere = {"dropped", "doubled", "ds", "ds-twice"}
    everywhere |= {f"consumers-{name}" for name in ("input", "neighbour", "detached")}
    assert caught - everywhere == ({"early", "copy"} if precision == "mixed" else {"order", "late", "ds-joined"})
    assert caught >= everywhere


def faults_where(execution):
    return [name for name, fault in FAULTS.items() if fault.where == execution]


TOO_WIDE = ["consumers-wide", "attention-wide"]
IN_SITES = [*TOO_WIDE, "consumers-unjoined", "consumers-past", "fallback-counted", "num-items-unheeded"]
CHECKPOINTED = ["glu-checkpointed"]
AT_FIRST = ["lora_add-dx-cut", "lora_add-frozen"]
"""Calls are compared in the first layer, whose input has no gradient."""
PACKED_FORMS = ("absmax", "codes", "offset", "absmax-back", "dx-cut", "frozen")
PACKED = ["adapter-16-bits", *(f"lora_linear_4bit-{form}" for form in PACKED_FORMS)]
# Autograd itself rejects a step whose products are overwritten.
WITHOUT_ADAPTERS = [name for name in faults_where("qlora-qv") if name != "linear_4bit-in-place"]
WITHOUT_NORMS = ["recomputed-attention", "recomputed-no-linears"]
SOME_HEADS = [f"linear_cross_entropy-{form}" for form in ("few", "dw-chunks", "divided-late", "num-items")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "precision", "execution", "names", "hidden"),
    [
        ("llama", "fp32", "compile", ["rms_norm-compiled-dw"], []),
        ("gemma3_text", "fp32", "compile", ["add_rms_norm-compiled-dw"], ["add_rms_norm-compiled-dw"]),
        ("llama", "bf16", "checkpointing", CHECKPOINTED, []),
        ("llama", "mixed", "eager", IN_SITES, []),
        ("llama", "bf16", "eager", TOO_WIDE, TOO_WIDE),  # nothing casts there
        ("llama", "bf16", "recompute", faults_where("recompute"), []),
        ("olmo2", "bf16", "recompute", ["recomputed-size", *WITHOUT_NORMS], WITHOUT_NORMS),
        ("llama", "mixed", "lora-recompute", faults_where("lora-recompute"), []),
        ("llama", "mixed", "lora", faults_where("lora"), []),
        ("llama", "mixed", "lora-alone", ["adapter-shared", "adapter-fallback"], []),
        ("llama", "mixed", "lora-dropout", faults_where("lora-dropout"), AT_FIRST),
        ("llama", "mixed", "qlora", PACKED, []),
        ("llama", "mixed", "qlora-dropout", ["adapter-cast-twice", "rms_norm_for_consumers-copy"], []),
        ("llama", "mixed", "qlora-qv", WITHOUT_ADAPTERS, []),
        ("gemma2", "bf16", "loss", faults_where("loss"), ["linear_cross_entropy-dbias"]),  # its logits are capped
        ("granite", "mixed", "loss", SOME_HEADS, []),
    ],
)
def test_a_fault_is_caught_in_the_execution_that_runs_it(family, precision, execution, names, hidden):
    outcomes = outcomes_of(family, precision, names, execution)
    assert outcomes == dict.fromkeys(names, "caught") | dict.fromkeys(hidden, "hidden")
