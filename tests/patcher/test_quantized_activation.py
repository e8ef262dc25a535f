"""A norm's result in FP8: the very tensor for every operator, and codes for those who know of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fused_norm.kernels.fp8 import quantize
from fused_norm.kernels.operator import norm_spec
from fused_norm.kernels.rms_norm import RMS_NORM
from fused_norm.patcher.fused_norm_module import is_plain
from fused_norm.patcher.quantized_activation import Codes, NormResult, QuantizedActivation, Remake, quantized_activation

SPEC = norm_spec("llama", False, 1e-6)


@pytest.fixture
def made(device: str) -> tuple[Any, Tensor, Tensor]:
    """An activation, the result that it stands for, and the input of the norm."""
    x = torch.randn(2, 3, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(32, device=device, dtype=torch.bfloat16)
    y = RMS_NORM(SPEC, x, weight, None)
    (rstd,) = RMS_NORM.kept_of(y)
    codes = quantize(y, "rowwise")
    kept = Codes(codes.q, codes.scale.reciprocal(), codes.recipe)
    assert codes.carrier is not None
    return quantized_activation(NormResult(Remake(SPEC), (x.detach(), weight, rstd)), kept, codes.carrier), y, x


OPERATORS = {
    "add": lambda one: one + 1,
    "linear": lambda one: torch.nn.functional.linear(one, torch.eye(32, dtype=one.dtype, device=one.device)[:5]),
    "float": lambda one: one.float(),
    "transpose": lambda one: one.transpose(0, 1),
    "slice": lambda one: one[..., 3:7],
    "reshape": lambda one: one.reshape(-1, 16),
    "split": lambda one: one.split(16, -1)[1],
    "cat": lambda one: torch.cat([one, one]),
    "clone": lambda one: one.clone(),
    "view of rows": lambda one: one.view(-1, 32) * 2,
    "as an argument by name": lambda one: torch.add(one.new_ones(()), other=one),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_get_the_result_itself_and_its_gradient_goes_to_the_norm(
    name: str, made: tuple[Any, Tensor, Tensor]
) -> None:
    activation, y, x = made
    expected, found = OPERATORS[name](y), OPERATORS[name](activation)
    assert type(found) is Tensor
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    incoming = torch.randn_like(expected)
    (wanted,) = torch.autograd.grad(expected, x, incoming, retain_graph=True)
    (gradient,) = torch.autograd.grad(found, x, incoming)
    assert torch.equal(gradient, wanted)


def test_it_looks_like_the_result_and_has_no_memory(made: tuple[Any, Tensor, Tensor]) -> None:
    activation, y, _ = made
    assert type(activation) is QuantizedActivation
    assert (activation.shape, activation.dtype, activation.device) == (y.shape, y.dtype, y.device)
    assert (activation.stride(), activation.requires_grad) == (y.stride(), True)
    with pytest.raises(RuntimeError, match="invalid python storage"):
        activation.untyped_storage().data_ptr()
    assert repr(activation) == f"QuantizedActivation({y.detach()!r})"
    assert not is_plain(activation)  # so that no kernel takes it for one with memory


def test_rows_in_another_shape_and_a_detached_one_keep_the_codes(made: tuple[Any, Tensor, Tensor]) -> None:
    activation, y, _ = made
    rows = activation.view(-1, 32)
    for other in (rows, rows.view(3, 2, 32), activation.detach(), activation.reshape(6, 32)):
        assert type(other) is QuantizedActivation
        assert other.has_codes()
        assert torch.equal(other + 0, y.view(other.shape))
    assert rows.shape == (6, 32)
    assert type(activation.view(2, -1)) is Tensor


def test_who_writes_into_it_writes_into_the_result_and_the_codes_are_void(made: tuple[Any, Tensor, Tensor]) -> None:
    activation, y, _ = made
    assert activation.has_codes()
    written = activation.mul_(2)
    assert written is activation
    assert not activation.has_codes()
    assert torch.equal(activation + 0, y * 2)


def test_who_writes_into_a_part_of_it_makes_the_codes_void(made: tuple[Any, Tensor, Tensor]) -> None:
    activation, y, _ = made
    with torch.no_grad():
        activation[..., :2].zero_()
    assert not activation.has_codes()
    expected = y.detach().clone()
    expected[..., :2] = 0
    assert torch.equal(activation.detach() + 0, expected)


def test_it_is_not_made_again_of_what_was_written_into(made: tuple[Any, Tensor, Tensor]) -> None:
    activation, _, x = made
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        activation + 1


def test_it_says_whose_memory_is_gone(made: tuple[Any, Tensor, Tensor]) -> None:
    activation, _, x = made
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="was freed between forward and backward"):
        activation + 1


def test_what_is_made_for_the_backward_is_made_once_for_all_readers(made: tuple[Any, Tensor, Tensor]) -> None:
    remake = made[0].result.remake
    remake.readers = 2
    calls: list[int] = []

    def make() -> int:
        calls.append(1)
        return len(calls)

    assert [remake.once(make) for _ in range(4)] == [1, 1, 2, 2]


def test_columns_are_those_of_the_result(made: tuple[Any, Tensor, Tensor]) -> None:
    activation, y, _ = made
    expected = quantize(y.detach(), activation.codes.recipe.along_rows())
    found = activation.result.remake.columns(activation.codes.recipe, *activation.result.kept)
    assert torch.equal(found.q.float(), expected.q.float())
    assert torch.equal(found.scale, expected.scale)


@pytest.mark.slow
def test_a_compiled_function_gets_the_result(made: tuple[Any, Tensor, Tensor]) -> None:
    activation, y, x = made
    compiled = torch.compile(lambda one: one * 2 + one.sum(-1, keepdim=True), backend="aot_eager")
    wanted, found = y * 2 + y.sum(-1, keepdim=True), compiled(activation)
    assert torch.equal(found, wanted)
    incoming = torch.randn_like(wanted)
    gradients = [torch.autograd.grad(one, x, incoming, retain_graph=True)[0] for one in (wanted, found)]
    assert torch.equal(*gradients)
