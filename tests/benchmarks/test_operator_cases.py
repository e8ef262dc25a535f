"""Cases count the bytes that they must move, and tell right results from wrong ones."""

import pytest
import torch

from benchmarks.operator_cases import CASES, HOST, OperatorCase, tolerance, worst_error

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


def test_one_wrong_row_and_nan_show():
    exact = torch.randn(100_000, 8, dtype=torch.float64)
    result = exact.to(torch.bfloat16)
    assert worst_error([result], [exact]) <= tolerance(torch.bfloat16)
    result[77_777] = 0
    assert worst_error([result], [exact]) > 0.9
    result[0, 0] = float("nan")
    assert not worst_error([result], [exact]) <= tolerance(torch.bfloat16)


def test_a_name_stands_for_its_case_and_no_other():
    every = [*CASES, *OPERATOR_CASES, *HOST]
    assert all(named(case.name, backward=case.backward) == case for case in every)
    assert len({case.name for case in CASES}) == len(CASES)
