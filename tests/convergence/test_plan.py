"""The axes define the comparisons; comparisons with the same stock and control runs are grouped."""

import pickle

import pytest
import torch

from fused_norm.convergence.comparison import FEATURES, Comparison, by_baseline, options_for_feature
from fused_norm.convergence.plan import comparisons_of
from fused_norm.convergence.tiers import TIERS
from fused_norm.model_configs import FAMILIES
from fused_norm.patcher import FuseOptions
from fused_norm.spec import KINDS

from .plans import tiny_plan


@pytest.mark.parametrize("tier", ["quick", "full"])
def test_every_family_runs_in_every_precision_and_one_runs_everything(tier):
    planned = comparisons_of(TIERS[tier], TIERS[tier].families)
    families = FAMILIES if tier == "quick" else TIERS["full"].families
    assert {"qwen3", "llama", "gemma3_text", "olmo3", "glm4"} <= set(families) <= set(FAMILIES)
    precisions = ("fp32", "mixed", "bf16")
    assert {(entry.model, entry.precision) for entry in planned} == {(f, p) for f in families for p in precisions}
    wide = [entry for entry in planned if entry.model == "qwen3"]
    assert {"eager", "compile", "checkpointing", "recompute", "loss", "lora", "qlora"} < {e.execution for e in wide}
    assert {entry.feature for entry in wide if entry.precision == "bf16"} == set(FEATURES)
    assert len(planned) == len(set(planned)) == len({entry.name for entry in planned})


def test_an_axis_that_is_named_is_taken_in_full_and_linears_of_4_bits_are_trained_under_autocast_alone():
    axes = {"precisions": ["fp32", "mixed"], "executions": ["lora", "qlora"], "seeds": [0, 3]}
    planned = comparisons_of(TIERS["quick"], ["llama"], **axes)
    assert {entry.name for entry in planned} == {
        f"llama.{how}.all.seed{seed}" for how in ("fp32.lora", "mixed.lora", "mixed.qlora") for seed in (0, 3)
    }


def test_features_are_options_of_the_patcher_that_fuse_their_kinds_and_no_others():
    for feature, kinds in FEATURES.items():
        options = FuseOptions(**options_for_feature(feature))
        assert {kind for kind in KINDS if options.wants(kind)} == kinds


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
