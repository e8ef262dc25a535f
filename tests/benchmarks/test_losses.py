"""A head with its loss: the exact result, what every implementation computes, and what is measured."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from benchmarks import losses
from benchmarks.loss_cases import LossCase, float64_results, relative_errors
from benchmarks.loss_providers import FLOORS, LOSS_PROVIDERS, with_backward
from benchmarks.operator_cases import tolerance
from benchmarks.providers import Provider
from benchmarks.results import RefusedError, Results

from .tiny_cases import LOSS_CASES

CASE = LOSS_CASES[0]
every_case = pytest.mark.parametrize("case", LOSS_CASES, ids=lambda case: case.name)


def inputs_of(case, dtype=torch.float32, device="cpu"):
    return case.inputs(dtype, torch.device(device))


def measured(run, *providers):
    losses.measure(run, [CASE], torch.float32, providers)
    return {row.by: row for row in run.results.of("losses")}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@every_case
@pytest.mark.parametrize("name", [name for name in LOSS_PROVIDERS if name not in FLOORS])
def test_every_provider_computes_loss_and_gradients(name, case, dtype, device, monkeypatch):
    monkeypatch.setattr("benchmarks.loss_cases._ROWS_AT_ONCE", 4)
    provider = LOSS_PROVIDERS[name]
    if why := provider.missing(torch.device(device)):
        pytest.skip(why)
    inputs = inputs_of(case, dtype, device)
    assert inputs.labels == (inputs.target != -100).sum() == (9 if "masked" in case.words else 21)
    try:
        results = provider.build(case)(inputs)
    except RefusedError:
        assert name not in ("stock", "compile", "fused")
        return
    assert len(results) == 1 + len(inputs.trained())
    assert max(relative_errors(results, float64_results(case, inputs)).values()) <= tolerance(dtype)


@pytest.mark.parametrize(("factor", "error"), [(1.01, pytest.approx(0.01, rel=0.01)), (torch.nan, None)])
def test_wrong_results_are_not_timed_and_fit_into_json(factor, error, run):
    def build(case):
        return lambda inputs: factor * functional.cross_entropy(inputs.x @ inputs.weight.t(), inputs.target)

    elsewhere = replace(LOSS_PROVIDERS["stock"], name="elsewhere", package="no_such_package")
    rows = measured(run, Provider("wrong", with_backward(build)), elsewhere, LOSS_PROVIDERS["stock"])
    row = rows["wrong"]
    assert (row.verdict, row.timing, row.error, rows["stock"].verdict) == ("wrong", None, error, "ok")
    assert "relative errors loss" in row.detail
    assert run.results.left_out == ["losses by elsewhere: no_such_package is not installed"]
    assert Results.load(run.path) == run.results


def test_log_probabilities_stand_beside_the_cross_entropy(run):
    weighted = LossCase.named("linear_log_probs 21x16x37 weighted")
    providers = [LOSS_PROVIDERS[name] for name in ("stock", "liger", "fused", "cross-entropy")]
    losses.measure(run, [weighted, CASE], torch.float32, providers)
    verdicts = {(row.row.split()[0], row.by): row.verdict for row in run.results.of("losses")}
    assert verdicts["linear_log_probs", "cross-entropy"] == verdicts["linear_log_probs", "fused"] == "ok"
    assert verdicts["linear_cross_entropy", "cross-entropy"] == "refused"
    inputs = inputs_of(weighted)
    (loss, *grads), exact = LOSS_PROVIDERS["fused"].build(weighted)(inputs), float64_results(weighted, inputs)
    mean, *_ = LOSS_PROVIDERS["cross-entropy"].build(weighted)(inputs)
    assert abs(loss - exact[0]) < 1e-6 < abs(mean - exact[0])
    assert len(grads) == 2


@pytest.mark.parametrize(
    "name",
    [
        "linear_log_probs 21x16x37",
        "linear_log_probs 21x16x37 weighted uniform",
        "linear_cross_entropy 21x16x37 uniform",
        "linear 21x16x37",
    ],
)
def test_names_that_say_too_little_or_too_much_are_no_cases(name):
    with pytest.raises(ValueError, match="is no shape of a head with its loss such as"):
        LossCase.named(name)
