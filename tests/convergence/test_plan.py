"""The axes define the comparisons; comparisons with the same stock and control runs are grouped."""

import pickle

import pytest
import torch

from fused_norm.convergence.comparison import (
    EXECUTIONS,
    FEATURES,
    LORA,
    PRECISIONS,
    Comparison,
    by_baseline,
    features_of,
    options_for_feature,
)
from fused_norm.convergence.plan import comparisons_of
from fused_norm.convergence.tiers import TIERS
from fused_norm.model_configs import FAMILIES
from fused_norm.patcher import FuseOptions
from fused_norm.spec import KINDS

from .plans import tiny_plan


@pytest.mark.parametrize("tier", ["quick", "full"])
def test_every_family_runs_in_every_precision_and_some_run_everything(tier):
    planned = comparisons_of(TIERS[tier], TIERS[tier].families)
    families = FAMILIES if tier == "quick" else TIERS["full"].families
    assert {"qwen3", "llama", "gemma3_text", "olmo3", "glm4"} <= set(families) <= set(FAMILIES)
    assert {(entry.model, entry.precision) for entry in planned} == {(f, p) for f in families for p in PRECISIONS}
    wide = [entry for entry in planned if entry.model == "qwen3"]
    assert {entry.execution for entry in wide} == set(EXECUTIONS)
    assert {entry.feature for entry in wide if entry.precision == "bf16"} == set(FEATURES)
    assert {entry.execution for entry in wide if entry.precision == "mixed"} == {"eager", *LORA}
    assert len(planned) == len(set(planned)) == len({entry.name for entry in planned})


def test_the_demo_is_one_comparison_of_each_of_three_families():
    planned = comparisons_of(TIERS["demo"], TIERS["demo"].families)
    assert [entry.model for entry in planned] == ["qwen3", "llama", "gemma"]
    assert {entry.feature for entry in planned} == {"all"}


def test_an_axis_that_is_named_is_taken_in_full():
    planned = comparisons_of(
        TIERS["quick"], ["llama"], precisions=["fp32"], executions=["compile", "lora"], seeds=[0, 3]
    )
    assert [entry.name for entry in planned] == [
        "llama.fp32.compile.all.seed0",
        "llama.fp32.lora.all.seed0",
        "llama.fp32.compile.all.seed3",
        "llama.fp32.lora.all.seed3",
    ]


def test_linears_of_4_bits_are_trained_under_autocast_alone():
    comparisons = comparisons_of(TIERS["full"], ["qwen3"], executions=["lora", "qlora"])
    assert {entry.precision for entry in comparisons if entry.execution == "qlora"} == {"mixed"}
    assert {entry.precision for entry in comparisons if entry.execution == "lora"} == set(PRECISIONS)


def test_a_model_runs_no_feature_twice():
    assert set(features_of("qwen3")) == set(features_of("gemma3_text")) == set(FEATURES)
    assert features_of("llama") == ["all", "norms", "norms+rope", "norms+residual", "norms+mlp", "norms+loss"]


def test_features_are_options_of_the_patcher_that_fuse_their_kinds_and_no_others():
    for feature, kinds in FEATURES.items():
        options = FuseOptions(**options_for_feature(feature))
        assert {kind for kind in KINDS if options.wants(kind)} == kinds


def test_comparisons_that_share_their_stock_run_form_a_group():
    planned = comparisons_of(TIERS["quick"], ["qwen3"], precisions=["bf16"], features=["all", "norms"])
    assert list(by_baseline(planned).values()) == [planned]


def test_what_the_fused_model_alone_does_is_compared_with_the_runs_of_the_eager_one():
    eager, alone, masked, lora, lora_alone = (
        Comparison("llama", "bf16", execution) for execution in ("eager", "recompute", "loss", "lora", "lora-recompute")
    )
    assert by_baseline([eager, alone, masked]) == {eager: [eager, alone], masked: [masked]}
    assert by_baseline([lora, lora_alone]) == {lora: [lora, lora_alone]}


def test_every_process_has_sequences_of_its_own_in_each_step_and_a_worker_gets_the_plan_as_it_is():
    comparison = Comparison("llama", "fp32", seed=1)
    plan = tiny_plan([comparison], processes=3)
    sequences, options = plan.sequences(comparison), plan.settings
    assert len(sequences) == options.steps * options.batch_size * 3
    copy = pickle.loads(pickle.dumps(plan))
    assert torch.equal(copy.sequences(comparison), sequences)
    assert copy.settings_key(comparison) == plan.settings_key(comparison)
