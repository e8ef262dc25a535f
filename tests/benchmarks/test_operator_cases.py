"""Cases know the bytes that they must move, and tell a right result from one that is wrong anywhere."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from benchmarks import operator_cases
from benchmarks.operator_cases import CASES, GEMMA, QUICK, OperatorCase, float64_results, tolerance, worst_error


@pytest.mark.parametrize(
    ("case", "forward", "backward"),
    [
        (OperatorCase("norm", 8192, 4096), 2, 3),
        (OperatorCase("norm", 8192, 2560, GEMMA), 2, 3),
        (OperatorCase("add", 8192, 2048), 4, 4),
        (OperatorCase("post", 8192, 4096), 3, 3),
        (OperatorCase("sandwich", 8192, 3840, GEMMA), 4, 6),
        (OperatorCase("swiglu", 8192, 3072), 3, 5),
        (OperatorCase("geglu", 8192, 6912), 3, 5),
        (OperatorCase("gated", 8192, 4096), 3, 5),
    ],
)
def test_least_bytes_count_each_activation_once(case, forward, backward):
    assert case.bytes("forward", torch.bfloat16) == forward * case.rows * case.width * 2
    assert case.bytes("backward", torch.float32) == backward * case.rows * case.width * 4


@pytest.mark.parametrize(
    ("recipe", "scales"), [("tensorwise", 4), ("rowwise", 64 * 4), ("block128", 64 * 2 * 4), ("mxfp8", 64 * 8)]
)
def test_codes_are_bytes_and_scales_count(recipe, scales):
    norm, add = (OperatorCase(name, 64, 256, backward=False, recipe=recipe) for name in ("fp8", "fp8-add"))
    assert norm.bytes("forward", torch.bfloat16) == 64 * 256 * 3 + scales
    assert add.bytes("forward", torch.bfloat16) == 64 * 256 * 7 + scales
    assert norm.name == f"fp8 64x256 {recipe}"


def test_scales_of_columns_are_counted_by_columns():
    case = OperatorCase("fp8-columns", 64, 256, backward=False, recipe="rowwise")
    assert case.bytes("forward", torch.bfloat16) == 64 * 256 * 3 + 256 * 4


@pytest.mark.parametrize("operator", ["qk", "rope"])
def test_all_heads_are_moved(operator):
    assert (
        OperatorCase(operator, 16384, 128, heads=(32, 8)).bytes("backward", torch.bfloat16) == 3 * 16384 * 40 * 128 * 2
    )


def test_a_rotation_reads_and_writes_each_way():
    case = OperatorCase("rotate", 16384, 64, heads=(32, 8))
    assert {case.bytes(direction, torch.bfloat16) for direction in ("forward", "backward")} == {2 * 16384 * 40 * 64 * 2}


def test_names_are_unique_and_say_what_is_measured():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert {"norm 8192x4096", "gemma 8192x2560", "add 2048x65536", "qk 16384x(32+8)x128"} <= set(names)
    assert {"rope 4096x(32+8)x64", "post 8192x4096", "sandwich 8192x5376"} <= set(names)


def test_inputs_repeat_and_differ_between_seeds():
    case = QUICK[0]
    one, same, other = (case.inputs(torch.bfloat16, torch.device("cpu"), seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(one.arguments, same.arguments, strict=True))
    assert not torch.equal(one.arguments[0], other.arguments[0])
    assert not any(tensor.requires_grad for tensor in one.detached())


def test_rope_takes_what_a_projection_makes_and_returns_what_attention_takes():
    inputs = OperatorCase("rope", 6, 64, heads=(4, 2)).inputs(torch.bfloat16, torch.device("cpu"), seed=0)
    assert [tuple(x.shape) for x in inputs.arguments[:2]] == [(1, 6, 4, 64), (1, 6, 2, 64)]
    assert [tuple(dy.shape) for dy in inputs.gradients] == [(1, 4, 6, 64), (1, 2, 6, 64)]
    assert all(dy.transpose(1, 2).is_contiguous() for dy in inputs.gradients)
    assert all(angle.shape == (1, 6, 64) and not angle.requires_grad for angle in inputs.angles)
    assert len(inputs.detached()) == 6


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_truth_is_the_formula_in_float64(case):
    inputs = case.inputs(torch.float32, torch.device("cpu"), seed=0)
    arguments = [tensor.detach().double().requires_grad_() for tensor in inputs.arguments]

    def norm(x, w):
        return functional.rms_norm(x, w.shape, 1 + w if case.spec.zero_centered else w, case.spec.eps)

    def add_norm(x, r, w):
        return norm(x + r, w), x + r

    def rotate(q, k, cos, sin):
        """The halves of a row as the real and imaginary parts of numbers that are turned."""
        turn = torch.complex(cos, sin)[..., : case.width // 2].unsqueeze(2)
        turned = [torch.complex(*x.chunk(2, dim=-1)) * turn for x in (q, k)]
        return tuple(torch.cat((x.real, x.imag), dim=-1).transpose(1, 2) for x in turned)

    def gate(x, up):
        """The logistic function; of tanh, half its argument and half of it makes that too."""
        z = x if case.operator == "swiglu" else (8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
        return x * up / (1 + torch.exp(-z))

    angles = [angle.double() for angle in inputs.angles]
    outputs = operator_cases.compose_operator(case.operator, norm, add_norm, rotate, gate)(*arguments, *angles)
    gradients = torch.autograd.grad(outputs, arguments, [gradient.double() for gradient in inputs.gradients])
    for found, expected in zip(float64_results(case, inputs), (outputs, gradients), strict=True):
        torch.testing.assert_close(list(found), list(expected), rtol=1e-9, atol=1e-12)


def test_one_wrong_row_among_many_shows():
    exact = torch.randn(100_000, 8, dtype=torch.float64)
    result = exact.to(torch.bfloat16)
    assert worst_error([result], [exact]) <= tolerance(torch.bfloat16)
    result[77_777] = 0
    assert worst_error([result], [exact]) > 0.9


def test_one_wrong_element_of_a_vector_shows():
    exact = torch.randn(65_536, dtype=torch.float64)
    result = exact.clone()
    result[-1] += 1
    assert worst_error([result], [exact]) > tolerance(torch.bfloat16)


def test_nan_is_no_small_error():
    exact = torch.randn(4, 8, dtype=torch.float64)
    result = exact.clone()
    result[2, 3] = float("nan")
    assert not worst_error([result, exact], [exact, exact]) <= tolerance(torch.bfloat16)


@pytest.mark.parametrize("case", [*CASES, *QUICK], ids=lambda case: case.name)
def test_a_name_stands_for_its_case(case):
    named = OperatorCase.named(case.name)
    assert (named.name, named.spec, named.heads, named.recipe) == (case.name, case.spec, case.heads, case.recipe)
    assert named.backward == (not case.recipe)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("conv 8x8", "operators are gemma, norm, add"),
        ("norm 8x", "is no operator and shape such as 'add 4096x2560'"),
        ("norm 0x8", "is no operator and shape"),
        ("norm 8x(2+1)x8", "is no shape of norm, such as 'norm 4096x2560'"),
        ("qk 8x64", r"is no shape of qk, such as 'qk 4096x\(32\+8\)x128'"),
        ("fp8 8x64", "behind the shape comes tensorwise or rowwise"),
        ("norm 8x64 rowwise", "behind the shape comes nothing"),
    ],
)
def test_what_is_no_case_is_named(name, said):
    with pytest.raises(ValueError, match=said):
        OperatorCase.named(name)
