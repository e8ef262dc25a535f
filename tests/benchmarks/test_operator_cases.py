"""Cases count the bytes that they must move, and tell right results from wrong ones."""

import pytest
import torch
from torch.nn import functional

from benchmarks.operator_cases import (
    CASES,
    HOST,
    OPERATORS,
    OperatorCase,
    Parts,
    eager_parts,
    float64_results,
    tolerance,
    worst_error,
)

from .tiny_cases import OPERATOR_CASES

named = OperatorCase.named


@pytest.mark.parametrize(
    ("name", "elements", "forward", "backward"),
    [
        ("add_rms_norm 8192x2048", 8192 * 2048, 4, 4),
        ("norm_add_norm 8192x3840 gemma", 8192 * 3840, 4, 6),
        ("glu 8192x3072", 8192 * 3072, 3, 5),
        ("causal_conv1d 16384x6144", 16384 * 6144, 2, 3),
        ("qk_norm_rope 16384x(32+8)x128", 16384 * 40 * 128, 2, 3),
    ],
)
def test_least_bytes_count_each_activation_once(name, elements, forward, backward):
    assert named(name).bytes("forward", torch.bfloat16) == forward * elements * 2
    assert named(name).bytes("backward", torch.float32) == backward * elements * 4


@pytest.mark.parametrize("case", OPERATOR_CASES, ids=lambda case: case.name)
def test_truth_is_the_formula_in_float64(case):
    inputs = case.inputs(torch.float32, torch.device("cpu"), seed=0)
    arguments = [tensor.detach().double().requires_grad_() for tensor in inputs.arguments]

    def norm(x, w):
        return functional.rms_norm(x, w.shape, 1 + w if case.spec.zero_centered else w, case.spec.eps)

    def rotate(q, k, cos, sin):
        """Rotate the halves of a row as the real and imaginary parts of complex numbers."""
        turn = torch.complex(cos, sin)[..., : case.width // 2].unsqueeze(2)
        turned = [torch.complex(*x.chunk(2, dim=-1)) * turn for x in (q, k)]
        return tuple(torch.cat((x.real, x.imag), dim=-1).transpose(1, 2) for x in turned)

    def gate(x, up):
        """Compute both activations by the logistic function, which is (1 + tanh(z / 2)) / 2."""
        z = x if case.option == "silu" else (8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
        return x * up / (1 + torch.exp(-z))

    def convolve(x, filters):
        padded = functional.pad(x, (0, 0, filters.shape[1] - 1, 0))
        c = (padded.unfold(1, filters.shape[1], 1) * filters).sum(-1)
        return c / (1 + torch.exp(-c))

    def expert_gate(x):
        if case.option == "silu":
            return x[:, : case.width] * x[:, case.width :] / (1 + torch.exp(-x[:, : case.width]))
        first, up = x.unflatten(-1, (-1, 2)).unbind(-1)
        first, up = torch.minimum(first, first.new_tensor(7.0)), torch.maximum(up, up.new_tensor(-7.0))
        return (torch.minimum(up, up.new_tensor(7.0)) + 1) * first / (1 + torch.exp(-1.702 * first))

    norms = norm, lambda x, r, w: (norm(x + r, w), x + r)
    parts = Parts(*norms, rotate, gate, eager_parts(case).gated_norm, convolve, expert_gate)
    outputs = OPERATORS[case.operator].made_of(parts)(*arguments, *(angle.double() for angle in inputs.angles))
    gradients = torch.autograd.grad(outputs, arguments, [gradient.double() for gradient in inputs.gradients])
    for actual, expected in zip(float64_results(case, inputs), (outputs, gradients), strict=True):
        torch.testing.assert_close(list(actual), list(expected), rtol=1e-9, atol=1e-12)


def test_one_wrong_row_one_wrong_element_and_nan_show():
    exact = torch.randn(100_000, 8, dtype=torch.float64)
    result = exact.to(torch.bfloat16)
    assert worst_error([result], [exact]) <= tolerance(torch.bfloat16)
    result[77_777] = 0
    assert worst_error([result], [exact]) > 0.9
    vector = torch.randn(65_536, dtype=torch.float64)
    wrong = vector.clone()
    wrong[-1] += 1
    assert worst_error([wrong], [vector]) > tolerance(torch.bfloat16)
    wrong[0] = float("nan")
    assert not worst_error([wrong], [vector]) <= tolerance(torch.bfloat16)


def test_a_name_stands_for_its_case_and_no_other_and_inputs_repeat():
    every = [*CASES, *OPERATOR_CASES, *HOST]
    assert all(named(case.name, backward=case.backward) == case for case in every)
    assert len({case.name for case in CASES}) == len(CASES)
    first, same, other_seed = (every[-1].inputs(torch.bfloat16, torch.device("cpu"), seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(*pair) for pair in zip(first.arguments, same.arguments, strict=True))
    assert not torch.equal(first.arguments[0], other_seed.arguments[0])
