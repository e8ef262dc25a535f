"""The convergence suite sees every planted fault, and is green without one."""

import pytest

from fused_norm.model_configs import FAMILIES

from ..convergence.runs import config_of, converge, one_baseline
from .faults import FAULTS


def faults_where(execution):
    return [name for name, fault in FAULTS.items() if fault.where == execution]


CONSUMERS = [*faults_where("consumers"), "add_rms_norm_for_consumers-dropped"]
OF_LOG_PROBS = [f"linear_log_probs-{what}" for what in ("shifted", "temperature", "entropy")]
OF_A_FILTER = "causal_conv1d-dw-tap"
EAGER = [name for name in faults_where("eager") if name not in (*CONSUMERS, OF_A_FILTER)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "precision", "execution", "names"),
    [
        ("llama", "bf16", "eager", EAGER),
        ("llama", "mixed", "eager", [*CONSUMERS, *faults_where("sites")]),
        ("qwen3_5_text", "mixed", "eager", [OF_A_FILTER]),
        ("llama", "bf16", "recompute", faults_where("recompute")),
        ("llama", "mixed", "lora-dropout", faults_where("lora-dropout")),
        ("gemma2", "bf16", "loss", faults_where("loss")),
        ("llama", "bf16", "log-probs", [*faults_where("log-probs"), *OF_LOG_PROBS]),
        ("llama", "bf16", "checkpointing", faults_where("checkpointing")),
        ("llama", "mixed", "lora-alone", faults_where("lora-alone")),
        *(
            pytest.param(*case, marks=pytest.mark.release)
            for case in (
                ("llama", "fp32", "compile", faults_where("compile")),
                ("llama", "mixed", "lora-recompute", ["recomputed-size"]),
                ("llama", "mixed", "lora", faults_where("lora")),
                ("llama", "mixed", "qlora-qv", faults_where("qlora-qv")),
            )
        ),
    ],
)
def test_a_fault_is_caught_in_the_execution_that_runs_it(family, precision, execution, names, tmp_path):
    assert names
    changes = {"final_logit_softcapping": 2.0} if family == "gemma2" else {}
    if execution == "eager" and family == "llama":
        changes["num_hidden_layers"] = FAMILIES[family].tiny["num_hidden_layers"]
    # A family's linears, not a config's, get the widths that are packed into 4 bits.
    model = [family] if execution == "qlora-qv" else ["--config", config_of(tmp_path, family, **changes)]
    steps = "1" if precision == "bf16" else "2"  # In one step under autocast, noise alone can be red.
    line = (*model, "--dtype", precision, "--axis", execution, "--steps", steps)
    outcomes = {}
    with one_baseline():
        row, _ = converge(tmp_path, *line)
        assert (row["outcome"], row["reasons"]) == ("green", [])
        for name in names:
            row, planted = converge(tmp_path, *line, fault=name)
            calls = row["calls"] or {}
            is_seen = row["outcome"] == "red" or calls.get("not_seen") or calls.get("not_done")
            outcomes[name] = ("caught" if is_seen else row["outcome"]) if planted else "not reached", row["reasons"]
    assert {name: result[0] for name, result in outcomes.items()} == dict.fromkeys(names, "caught"), outcomes
