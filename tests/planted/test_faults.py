"""A planted fault changes what its operator computes while it is planted, and leaves nothing behind."""

import contextlib
from functools import partial

import pytest
import torch

from fused_norm import apply_fused_norm
from fused_norm.kernels import linear_log_probs
from fused_norm.kernels.fp8 import dequantize, rms_norm_fp8
from fused_norm.kernels.operator import OPERATORS
from fused_norm.model_configs import build

from ..patcher import test_attention_functions, test_consumers, test_recompute_levels
from .faults import FAULTS, UNIT


@pytest.fixture(scope="module")
def fused():
    """A fused model, and the gradients that it has without a fault."""
    model = build("granite", seed=0, dtype=torch.bfloat16)
    apply_fused_norm(model)
    return model, gradients(model)


def gradients(model):
    tokens = torch.arange(4).view(1, 4)
    model.zero_grad()
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "name",
    [
        "add_rms_norm-dx-cut",
        "add_rms_norm_for_consumers-dropped",
        "linear_cross_entropy-unshifted",
    ],
)
def test_a_fault_changes_gradients_while_it_is_planted(name, fused):
    model, before = fused
    with FAULTS[name].planted(model) as planted:
        during = gradients(model)
    assert planted.calls > 0
    assert planted.share > 0.01
    assert any(not torch.equal(during[key], before[key]) for key in before)


def test_no_fault_is_left_behind(fused):
    model, before = fused
    own = {operator.name: dict(vars(operator)) for operator in OPERATORS.values()}
    for fault in FAULTS.values():
        with fault.planted(model):
            pass
    assert {operator.name: dict(vars(operator)) for operator in OPERATORS.values()} == own
    after = gradients(model)
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_a_scale_of_the_first_call_shows_in_the_second_one():
    x, weight = torch.randn(3, 8, 32).bfloat16(), torch.rand(32).bfloat16()

    def results():
        return [dequantize(rms_norm_fp8(x, weight * scale, fp8_format="tensorwise")) for scale in (1.0, 3.0)]

    before = results()
    with FAULTS["norm_fp8-stale"].planted(torch.nn.Module()) as planted:
        during = results()
    assert planted.calls == 2
    assert [torch.equal(*pair) for pair in zip(before, during, strict=True)] == [True, False]
    assert all(map(torch.equal, results(), before))


@pytest.fixture(scope="module")
def log_probs_step():
    """A function that computes log-probabilities, entropies and their gradients in a dtype."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((3, 8, 32), (50, 32)))
    target = torch.randint(50, (3, 8), generator=generator)
    target[:, 5:] = -100
    grads = torch.randn(2, 3, 8, generator=generator)

    def step(dtype):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (x, weight)]
        outputs = linear_log_probs(*leaves, target, temperature=0.7, entropies=True)[:2]
        return *outputs, *torch.autograd.grad(outputs, leaves, list(grads.to(outputs[0].dtype)))

    return step


@pytest.mark.parametrize("name", [None, *(name for name, fault in FAULTS.items() if fault.where == "linear_log_probs")])
def test_a_fault_in_log_probabilities_is_caught_beside_float64(name, log_probs_step):
    exact = log_probs_step(torch.float64)
    with contextlib.ExitStack() as stack:
        planted = None if name is None else stack.enter_context(FAULTS[name].planted(torch.nn.Module()))
        results = log_probs_step(torch.bfloat16)
    assert planted is None or (planted.calls == 1 and planted.share > 0.01)
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(results, exact, strict=True)]
    assert (max(errors) > 0.1) == (name is not None), errors


HOLDS_FEWER_BYTES = test_recompute_levels.test_every_level_holds_fewer_bytes_than_the_one_before
UNIT_TESTS = {
    "consumers-wide": (
        test_consumers.test_linears_read_the_dtype_that_autocast_casts_to_unless_it_is_switched_off_or_removed
    ),
    "attention-wide": partial(
        test_attention_functions.test_every_bit_is_that_of_q_and_k_in_their_own_dtype, "llama", "plain"
    ),
    "recomputed-attention": partial(HOLDS_FEWER_BYTES, None),
    "recomputed-held": partial(HOLDS_FEWER_BYTES, None),
    "recomputed-adapters": partial(HOLDS_FEWER_BYTES, test_recompute_levels.LORA),
}
"""The tests of what no number shows: a dtype that is cast again, bytes that are held."""
QUICK = ("consumers-wide", "recomputed-held")


def test_every_fault_that_no_number_shows_has_its_test():
    assert UNIT_TESTS.keys() == {name for name, fault in FAULTS.items() if fault.where == UNIT}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in UNIT_TESTS]
)
def test_a_fault_that_no_number_shows_fails_the_test_that_holds_it(name, device):
    if (name, device) == ("recomputed-attention", "cuda"):
        pytest.skip("attention keeps copies of what it reads on a GPU")
    with FAULTS[name].planted(torch.nn.Module()) as planted, pytest.raises(AssertionError):
        UNIT_TESTS[name](device=device)
    assert planted.calls > 0
