"""Only right results are timed, providers take turns, and an error of one does not stop the others."""

from dataclasses import replace

import pytest
import torch

from benchmarks import kernels
from benchmarks.operator_cases import OPERATORS, OperatorCase, eager_parts
from benchmarks.providers import PROVIDERS, Provider
from benchmarks.results import Results

CASE = OperatorCase.named("rms_norm 8x64")
STOCK = PROVIDERS["stock"]


def measured(run, *providers, case=CASE):
    kernels.measure(run, [case], [torch.float32], providers)
    return {(row.by, row.kind): row for row in run.results.of("kernels")}


def provider(name, change):
    """Return a provider of the stock norm that applies ``change`` to its result."""

    def build(case):
        parts = eager_parts(case)
        return OPERATORS[case.operator].made_of(replace(parts, norm=lambda x, w: change(parts.norm(x, w))))

    return Provider(name, build)


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        return 1.01 * dy


@pytest.mark.parametrize(
    ("change", "wrong_in", "error"),
    [
        (lambda y: 1.01 * y, "forward", pytest.approx(0.01, rel=0.01)),
        (lambda y: y * float("nan"), "forward", None),
        (_WrongBackward.apply, "backward", pytest.approx(0.0226, rel=0.01)),
    ],
)
def test_wrong_results_are_not_timed_and_fit_into_json(change, wrong_in, error, run):
    rows = measured(run, provider("wrong", change), STOCK)
    row = rows["wrong", wrong_in]
    assert (row.verdict, row.timing, row.error) == ("wrong", None, error)
    assert rows["stock", wrong_in].verdict == "ok"
    assert rows["wrong", "forward"].verdict == ("wrong" if wrong_in == "forward" else "ok")
    assert Results.load(run.path) == run.results


@pytest.mark.gpu
def test_a_row_that_is_not_written_shows_even_when_the_memory_held_the_right_result(run):
    def lazily(y):
        result = torch.empty_like(y)
        result[:-1] = y[:-1]
        return result

    case = OperatorCase.named("rms_norm 4096x4096", backward=False)
    assert measured(run, STOCK, provider("lazy", lazily), case=case)["lazy", "forward"].verdict == "wrong"
