"""The verdict sees every planted fault, and is green without one."""

import pytest

from fused_norm.convergence.comparison import Comparison
from fused_norm.model_configs import FAMILIES

from ..convergence.plans import tiny_plan
from .faults import FAULTS
from .runs import SOUND, run_faults


def faults_where(execution):
    return [name for name, fault in FAULTS.items() if fault.where == execution]


CONSUMERS = [*faults_where("consumers"), "add_rms_norm_for_consumers-dropped"]
EAGER = [name for name in faults_where("eager") if name not in (*CONSUMERS, "causal_conv1d-dw-tap")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "precision", "execution", "names", "hidden"),
    [
        ("llama", "bf16", "eager", EAGER, []),
        ("llama", "mixed", "eager", [*CONSUMERS, *faults_where("sites")], ["rms_norm_for_consumers-order"]),
        ("llama", "bf16", "recompute", faults_where("recompute"), []),
        ("llama", "mixed", "lora-dropout", faults_where("lora-dropout"), []),
        ("gemma2", "bf16", "loss", faults_where("loss"), ["linear_cross_entropy-dbias"]),
        *(
            pytest.param(*case, marks=pytest.mark.release)
            for case in (
                ("llama", "fp32", "compile", faults_where("compile"), []),
                ("llama", "bf16", "checkpointing", faults_where("checkpointing"), []),
                ("llama", "mixed", "lora-recompute", faults_where("lora-recompute"), []),
                ("llama", "mixed", "lora", faults_where("lora"), []),
                ("llama", "mixed", "lora-alone", faults_where("lora-alone"), []),
                ("llama", "mixed", "qlora", faults_where("qlora"), []),
                ("llama", "mixed", "qlora-qv", faults_where("qlora-qv"), []),
            )
        ),
    ],
)
def test_a_fault_is_caught_in_the_execution_that_runs_it(family, precision, execution, names, hidden):
    """A fault is hidden where it changes no number."""
    comparison = Comparison(family, precision, execution)
    plan = tiny_plan([comparison], layers=FAMILIES[family].tiny["num_hidden_layers"] if execution == "eager" else 1)
    outcomes = {result.fault: result.outcome for result in run_faults(plan, comparison, names)}
    assert outcomes == {SOUND: "sound"} | dict.fromkeys(names, "caught") | dict.fromkeys(hidden, "hidden")
