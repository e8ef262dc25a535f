"""A head with its loss: what is exact, what every implementation computes, and what is measured of it."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.nn import functional

from benchmarks import losses
from benchmarks.benchmark_run import RefusedError
from benchmarks.loss_cases import CASES, LossCase, float64_results, relative_errors
from benchmarks.loss_providers import LOSS_PROVIDERS, with_backward
from benchmarks.operator_cases import tolerance
from benchmarks.providers import Provider
from benchmarks.results import Results

from .tiny_cases import LOSS_CASES

CPU = torch.device("cpu")
CASE = LOSS_CASES[0]
named = LossCase.named


def inputs_of(case, dtype=torch.float32, device=CPU):
    return case.inputs(dtype, torch.device(device))


def measured(run, *providers, case=CASE, dtype=torch.float32):
    losses.measure(run, [case], dtype, providers)
    return {row.by: row for row in run.results.of("losses")}


def test_a_name_stands_for_its_case_and_no_other():
    every = (*CASES, *LOSS_CASES)
    assert all(named(case.name) == case for case in every)
    assert len({case.name for case in every}) == len(every)
    assert named("linear_cross_entropy 8x4x9 softcap masked").name == "linear_cross_entropy 8x4x9 masked softcap"
    assert {(case.width, case.vocabulary) for case in CASES} == {
        (1024, 151936), (2048, 128256), (1152, 262144), (2560, 151936)
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["linear_cross_entropy 8x4", "linear_cross_entropy 8x4x9 wide", "rms_norm 8x4", "linear_cross_entropy 0x4x9"],
)
def test_what_is_no_case_is_named(name):
    with pytest.raises(ValueError, match="is no shape of a head with its loss such as"):
        named(name)


def test_masked_labels_are_those_of_the_first_half_of_four_sequences():
    inputs = inputs_of(named("linear_cross_entropy 32x4x9 masked"))
    assert (inputs.target == -100).tolist() == [*[True] * 4, *[False] * 4] * 4
    assert inputs.labels == 16
    assert torch.equal(inputs.labelled, inputs.x[inputs.target != -100])
    for case in LOSS_CASES:
        inputs = inputs_of(case)
        assert inputs.labels == len(inputs.labelled) == (inputs.target != -100).sum()
        assert (inputs.labels < case.rows) == ("masked" in case.words)
        assert len(inputs.trained()) == (1 if "frozen" in case.words else 2)


def test_inputs_repeat_and_logits_are_as_wide_as_those_of_a_trained_model():
    one, same = (inputs_of(named("linear_cross_entropy 64x32x97"), torch.bfloat16) for _ in range(2))
    assert torch.equal(one.x, same.x)
    assert torch.equal(one.target, same.target)
    assert 2 < functional.linear(one.x, one.weight).float().std() < 4


@pytest.mark.parametrize("rows_at_once", [4, 512])
@pytest.mark.parametrize("case", LOSS_CASES, ids=lambda case: case.name)
def test_truth_is_the_formula_in_float64_whatever_the_chunk(case, rows_at_once, monkeypatch):
    monkeypatch.setattr("benchmarks.loss_cases._ROWS_AT_ONCE", rows_at_once)
    inputs = inputs_of(case)
    x, weight = (tensor.detach().double().requires_grad_() for tensor in (inputs.x, inputs.weight))
    logits = x @ weight.t()
    logits = logits if case.softcap is None else 30 * torch.tanh(logits / 30)
    has_label = inputs.target != -100
    chosen = logits.log_softmax(-1)[has_label].gather(1, inputs.target[has_label, None])
    loss = -chosen.mean()
    expected = [loss, *torch.autograd.grad(loss, (x, weight))][: 1 + len(inputs.trained())]
    torch.testing.assert_close(float64_results(case, inputs), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", LOSS_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", [name for name in LOSS_PROVIDERS if name != "products"])
def test_every_provider_computes_loss_and_gradients(name, case, dtype, device):
    provider = LOSS_PROVIDERS[name]
    if why := provider.missing(torch.device(device)):
        pytest.skip(why)
    inputs = inputs_of(case, dtype, device)
    try:
        results = provider.build(case)(inputs)
    except RefusedError:
        assert name not in ("stock", "compile", "fused")
        return
    assert len(results) == 1 + len(inputs.trained())
    assert max(relative_errors(results, float64_results(case, inputs)).values()) <= tolerance(dtype)


def test_the_floor_is_the_products_of_rows_with_a_label():
    for case in LOSS_CASES:
        inputs = inputs_of(case)
        logits = inputs.labelled @ inputs.weight.detach().t()
        expected = [logits @ inputs.weight.detach(), logits.t() @ inputs.labelled][: len(inputs.trained())]
        torch.testing.assert_close(list(LOSS_PROVIDERS["products"].build(case)(inputs)), expected)


def test_ours_is_given_the_number_of_labels_if_some_are_masked():
    given = []

    def function(x, weight, target, *, softcap, max_labels):
        given.append((softcap, max_labels))
        return functional.cross_entropy(x @ weight.t(), target)

    with mock.patch("fused_norm.kernels.linear_cross_entropy", function):
        for case in (CASE, named("linear_cross_entropy 32x4x9 masked softcap")):
            LOSS_PROVIDERS["fused"].build(case)(inputs_of(case))
    assert given == [(None, None), (30.0, 16)]


@pytest.fixture
def liger(monkeypatch):
    """A package with Liger's function, whose arguments may be those of an older release."""

    def install(*, has_chunks):
        asked = []

        def noted(x, weight, options):
            asked.append(options)
            return functional.cross_entropy(x @ weight.t(), options.pop("target")), None

        class Function:
            if has_chunks:

                @staticmethod
                def forward(ctx, _input, weight, target, bias=None, softcap=None, accum_dtype=None, chunk_mem_const=1):
                    pass

            else:

                @staticmethod
                def forward(ctx, _input, weight, target, bias=None, softcap=None, accum_dtype=None):
                    pass

            @classmethod
            def apply(cls, x, weight, *rest):
                names = ("target", "bias", "softcap", "accum_dtype", "chunk_mem_const")
                return noted(x, weight, dict(zip(names, rest, strict=False)))

        package = types.ModuleType("liger_kernel.ops")
        package.LigerFusedLinearCrossEntropyFunction = Function
        monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
        monkeypatch.setitem(sys.modules, "liger_kernel.ops", package)
        return asked

    return install


def test_liger_runs_as_it_comes_and_with_sums_in_fp32_over_larger_chunks(liger):
    asked = liger(has_chunks=True)
    inputs = inputs_of(CASE)
    for name in ("liger", "liger-fp32"):
        LOSS_PROVIDERS[name].build(CASE)(inputs)
    plain = {"bias": None, "softcap": None, "accum_dtype": None, "chunk_mem_const": 1}
    assert asked == [plain, plain | {"accum_dtype": torch.float32, "chunk_mem_const": 16}]


def test_a_release_of_liger_without_that_argument_refuses(liger):
    liger(has_chunks=False)
    LOSS_PROVIDERS["liger"].build(CASE)(inputs_of(CASE))
    with pytest.raises(RefusedError, match="this release of Liger has no chunk_mem_const"):
        LOSS_PROVIDERS["liger-fp32"].build(CASE)


def test_pytorch_refuses_before_it_has_chunks_and_for_a_softcap(monkeypatch):
    monkeypatch.setattr(torch.nn, "LinearCrossEntropyOptions", dict, raising=False)
    monkeypatch.setattr(functional, "linear_cross_entropy", lambda *_, options: options, raising=False)
    with pytest.raises(RefusedError, match="no softcap"):
        LOSS_PROVIDERS["torch"].build(named("linear_cross_entropy 8x4x9 softcap"))
    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions")
    with pytest.raises(RefusedError, match=r"from 2\.13 on"):
        LOSS_PROVIDERS["torch"].build(CASE)


def test_trl_takes_labels_as_they_are_and_its_own_chunk(monkeypatch):
    asked = []

    def chunked(x, weight, rows, *, shift_labels, final_logit_softcapping):
        asked.append((rows, final_logit_softcapping))
        return functional.cross_entropy(x @ weight.t(), shift_labels), None

    trainer = types.SimpleNamespace(_chunked_cross_entropy_loss=chunked, _CHUNKED_LM_HEAD_CHUNK_SIZE=7)
    monkeypatch.setattr("importlib.import_module", {"trl.trainer.sft_trainer": trainer}.__getitem__)
    inputs = inputs_of(CASE)
    errors = relative_errors(LOSS_PROVIDERS["trl"].build(CASE)(inputs), float64_results(CASE, inputs))
    assert max(errors.values()) < 1e-5
    assert asked == [(7, None)]
    del trainer._chunked_cross_entropy_loss
    with pytest.raises(RefusedError, match="no loss in chunks"):
        LOSS_PROVIDERS["trl"].build(CASE)


def test_right_results_are_timed_and_have_errors_and_a_peak_of_memory(run):
    found = measured(run, *(LOSS_PROVIDERS[name] for name in ("stock", "fused", "products")))
    assert list(found) == ["stock", "fused", "products"]
    for row in found.values():
        assert (row.verdict, row.kind, row.timing.method) == ("ok", "training", run.device.type == "cpu" and "wall")
        assert row.extra_bytes > 0
    for name in ("stock", "fused"):
        assert set(found[name].errors) == {"loss", "dX", "dW"}
        assert found[name].error == max(found[name].errors.values()) < 1e-5
    assert found["products"].errors is None
    assert found["stock"].extra_bytes > found["products"].extra_bytes
    assert Results.load(run.path) == run.results


def test_memory_counts_logits_and_gradients(run):
    found = measured(run, LOSS_PROVIDERS["products"])["products"]
    logits, gradients = CASE.rows * CASE.vocabulary, (CASE.rows + CASE.vocabulary) * CASE.width
    assert found.extra_bytes == 4 * (logits + gradients)


@pytest.mark.parametrize(
    ("change", "error"),
    [(lambda loss: 1.01 * loss, pytest.approx(0.01, rel=0.01)), (lambda loss: loss * torch.nan, None)],
)
def test_wrong_results_are_not_timed_and_fit_into_json(change, error, run):
    def build(case):
        return lambda inputs: change(functional.cross_entropy(inputs.x @ inputs.weight.t(), inputs.target))

    row = measured(run, Provider("wrong", with_backward(build)), LOSS_PROVIDERS["stock"])["wrong"]
    assert (row.verdict, row.timing, row.error) == ("wrong", None, error)
    assert "relative errors loss" in row.detail
    assert Results.load(run.path) == run.results


def test_a_refusal_is_no_failure_and_the_others_are_measured(run):
    elsewhere = replace(LOSS_PROVIDERS["stock"], name="elsewhere", package="no_such_package")
    refusing = Provider("refusing", mock.Mock(side_effect=RefusedError("it has no softcap")))
    broken = Provider("broken", mock.Mock(side_effect=RuntimeError("out of\n memory")))
    found = measured(run, elsewhere, refusing, broken, LOSS_PROVIDERS["stock"])
    assert {name: (row.verdict, row.detail) for name, row in found.items()} == {
        "refusing": ("refused", "it has no softcap"),
        "broken": ("failed", "RuntimeError: out of memory"),
        "stock": ("ok", None),
    }
    assert run.results.left_out == ["losses by elsewhere: no_such_package is not installed"]


def test_after_the_budget_nothing_is_measured(run):
    run.budget = 0.0
    assert measured(run, LOSS_PROVIDERS["stock"]) == {}
    assert run.results.left_out == [f"{CASE.name} float32: after 0 s"]
