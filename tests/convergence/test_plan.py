"""The axes make the cases, and cases that share stock and control runs stand together."""

import dataclasses

import pytest

from fused_norm.convergence import plan
from fused_norm.convergence.mutations import MUTATIONS, SOUND
from fused_norm.convergence.suite import with_mutations
from fused_norm.model_configs import FAMILIES
from fused_norm.patcher import FuseOptions


@pytest.mark.parametrize("tier", plan.TIERS.values(), ids=plan.TIERS)
def test_every_family_runs_in_every_precision_and_some_run_everything(tier):
    cases = plan.cases(tier, tuple(FAMILIES))
    assert {(case.model, case.precision) for case in cases} == {(f, p) for f in FAMILIES for p in plan.PRECISIONS}
    wide = [case for case in cases if case.model == "qwen3" and case.precision == "bf16"]
    assert {case.execution for case in wide} == set(plan.EXECUTIONS)
    assert {case.feature for case in wide} == set(plan.FEATURES)
    assert len(cases) == len(set(cases)) == len({case.name for case in cases})


def test_an_axis_that_is_named_is_taken_in_full():
    cases = plan.cases(
        plan.TIERS["quick"], ["llama"], precisions=["fp32"], executions=["compile", "lora"], seeds=[0, 3]
    )
    assert [case.name for case in cases] == [
        "llama.fp32.compile.all.seed0",
        "llama.fp32.lora.all.seed0",
        "llama.fp32.compile.all.seed3",
        "llama.fp32.lora.all.seed3",
    ]


def test_a_model_without_qk_norms_runs_no_feature_twice():
    assert set(plan.features_of("qwen3")) == set(plan.FEATURES)
    assert plan.features_of("llama") == ["all", "norms", "norms+residual"]


def test_features_are_options_of_the_patcher():
    for options in plan.FEATURES.values():
        FuseOptions(**options)


def test_cases_that_share_their_stock_run_form_a_group():
    cases = plan.cases(plan.TIERS["quick"], ["qwen3"], precisions=["bf16"], features=["all", "norms"])
    assert list(plan.groups(cases).values()) == [cases]
    faulty = with_mutations(cases)
    assert [case.mutation for case in faulty] == [SOUND, *MUTATIONS]
    assert with_mutations([dataclasses.replace(cases[0], execution="compile")]) == []
