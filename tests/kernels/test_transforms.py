"""Operators under PyTorch's transforms: second derivatives, torch.func, batched and dual gradients, torch.jit.trace."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from fused_norm.kernels.triton.launch import Launch
from fused_norm.spec import NormSpec

from .calls import NAMES, ONE_OF_EACH, Call, every_call
from .conftest import OPERATORS
from .numerics import FP32


class Case(Call):
    """A call and its formula as functions of the tensors that can have a gradient."""

    def kernel_backward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self._of(OPERATORS[self.name].checked, inputs)

    def by_formula(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self._of(OPERATORS[self.name].reference, inputs)

    def _of(self, call: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        left = list(inputs)
        tensors = [
            left.pop(0) if tensor is not None and place < self.differentiated else tensor
            for place, tensor in enumerate(self.tensors)
        ]
        return tuple(self.outputs(tensors, call))


def _case(name: str, device: str) -> Case:
    """Return a call in fp32, with an eps that keeps second derivatives small."""
    calls = every_call(device, width=8, dtype=FP32)
    if name == "adapter of a row":
        return _adapter_of_a_row(device)
    calls["glu by erf"] = calls["glu"]._replace(options=("gelu",))
    case = Case(*calls[name.removesuffix(" of a row")])
    if name.endswith(" of a row"):
        case = case.converted(lambda tensor: tensor[0, 0, 0].clone() if tensor.dim() == 4 else tensor)
    return case if case.spec is None else case.with_spec(eps=1e-3)


OF_A_ROW = [
    f"{name} of a row"
    for name in ("norm", "add", "norm and add", "sandwich", "heads", "glu", "gated in groups", "adapter")
]
"""Calls of tensors of one dimension, each a single row."""
EACH = [*ONE_OF_EACH, "heads rotated in part", "glu by erf"]
CASES = pytest.mark.parametrize("case", EACH)


def _assert_close(ours: Sequence[Tensor | None], expected: Sequence[Tensor | None], tolerance: float = 1e-4) -> None:
    for a, b in zip(ours, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            largest = max(1.0, b.abs().max().item())
            torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=tolerance * largest)


def _loss(outputs: Sequence[Tensor]) -> Tensor:
    return sum((place + 1.5) * output.float().sin().sum() for place, output in enumerate(outputs))  # type: ignore[return-value]


Function = Callable[..., Sequence[Tensor]]


def _differentiable(case: Case) -> list[Tensor]:
    return [leaf.clone().requires_grad_() for leaf in case.inputs]


def second_derivatives(case: Case, function: Function) -> Sequence[Tensor]:
    leaves = _differentiable(case)
    first = torch.autograd.grad(_loss(function(*leaves)), leaves, create_graph=True)
    return *first, *torch.autograd.grad(sum(grad.cos().sum() for grad in first), leaves)


def second_derivatives_with_respect_to_an_incoming_gradient(case: Case, function: Function) -> Sequence[Tensor]:
    leaves = _differentiable(case)
    outputs = function(*leaves)
    incoming = [output.detach().cos().requires_grad_() for output in outputs]
    first = torch.autograd.grad(outputs, leaves, incoming, create_graph=True)
    return torch.autograd.grad(sum(grad.cos().sum() for grad in first), incoming)


def gradients_of_a_dual_incoming_gradient_with_their_tangents(case: Case, function: Function) -> Sequence[Tensor]:
    leaves = _differentiable(case)
    outputs = function(*leaves)
    with forward_ad.dual_level():
        incoming = [forward_ad.make_dual(output.detach().sin(), output.detach().cos()) for output in outputs]
        unpacked = [forward_ad.unpack_dual(grad) for grad in torch.autograd.grad(outputs, leaves, incoming)]
        return [part.clone() for pair in unpacked for part in (pair.primal, pair.tangent)]


def gradients_in_batches(case: Case, function: Function) -> Sequence[Tensor]:
    leaves = _differentiable(case)
    outputs = function(*leaves)
    incoming = [torch.stack([output.detach().sin(), output.detach().cos()]) for output in outputs]
    return torch.autograd.grad(outputs, leaves, incoming, is_grads_batched=True)


def functional_transforms(case: Case, function: Function) -> Sequence[Tensor]:
    places = tuple(range(len(case.inputs)))

    def loss(*inputs: Tensor) -> Tensor:
        return _loss(function(*inputs))

    gradients = torch.func.grad(loss, places)(*case.inputs)
    several = torch.func.vmap(torch.func.grad(loss), in_dims=(0, *[None] * (len(places) - 1)))
    (outputs, tangents) = torch.func.jvp(function, case.inputs, case.inputs)
    jacobian = torch.func.jacrev(loss)(*case.inputs)
    hessian = torch.func.jvp(torch.func.grad(loss), case.inputs, case.inputs)
    stacked = torch.stack([case.inputs[0], case.inputs[0].sin()])
    return *gradients, several(stacked, *case.inputs[1:]), *outputs, *tangents, jacobian, *hessian


def _adapter_of_a_row(device: str) -> Case:
    x, a = torch.randn(8, device=device).bfloat16(), torch.randn(3, 8, device=device)
    b, base = torch.randn(5, 3, device=device), torch.randn(5, device=device).bfloat16()
    return Case("lora_add", (base, x, a, b), (0.7,))


def _tolerance(case: Case) -> float:
    """Return the tolerance of second derivatives, which round as the narrowest tensor does."""
    return 1e-4 if all(tensor.dtype == FP32 for tensor in case.inputs) else 0.05


@pytest.mark.parametrize("written", ["llama", "gemma", "factors"])
def test_weights_that_are_written_between_have_the_second_derivatives_of_their_forward(
    written: Any, device: str
) -> None:
    case, first = _adapter_of_a_row(device), 2
    if written != "factors":
        x, w = torch.randn(3, 8, device=device), torch.randn(8, device=device)
        case, first = Case("rms_norm", (x, w), (NormSpec(written, True, eps=1e-3), None)), 1

    def second_derivatives_after_a_write(function: Function) -> Sequence[Tensor]:
        leaves = _differentiable(case)
        loss = _loss(function(*leaves))
        with torch.no_grad():
            for leaf in leaves[first:]:
                leaf.mul_(-3)
        gradients = torch.autograd.grad(loss, leaves, create_graph=True)
        return *gradients, *torch.autograd.grad(sum(gradient.float().cos().sum() for gradient in gradients), leaves)

    results = [second_derivatives_after_a_write(by) for by in (case.kernel_backward, case.by_formula)]
    _assert_close(*results, _tolerance(case))


TRANSFORMED = (
    second_derivatives,
    second_derivatives_with_respect_to_an_incoming_gradient,
    gradients_of_a_dual_incoming_gradient_with_their_tangents,
    gradients_in_batches,
    functional_transforms,
)


@pytest.mark.parametrize(
    ("transformed", "case"),
    [*itertools.product(TRANSFORMED[:1], [*NAMES, "glu by erf", *OF_A_ROW]), *itertools.product(TRANSFORMED[1:], EACH)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_kernels_and_formula_agree_in(transformed: Callable[..., Sequence[Tensor]], case: str, device: str) -> None:
    call = _case(case, device)
    ours = transformed(call, call.kernel_backward)
    if case == "conv" and transformed is gradients_of_a_dual_incoming_gradient_with_their_tangents:
        return  # PyTorch's own SiLU, whose bits the formula has, does not support this
    _assert_close(ours, transformed(call, call.by_formula), _tolerance(call))


@pytest.mark.parametrize("used", [(True, False), (False, True)])
@pytest.mark.parametrize("case", ["add in gemma", "sandwich", "heads rotated in part"])
def test_second_derivatives_where_one_output_is_unused(case: str, used: tuple[bool, bool], device: str) -> None:
    call = _case(case, device)

    def derivatives(function: Callable[..., Sequence[Tensor]]) -> Sequence[Tensor | None]:
        leaves = [leaf.clone().requires_grad_() for leaf in call.inputs]
        outputs = [output for output, keep in zip(function(*leaves), used, strict=True) if keep]
        first = torch.autograd.grad(_loss(outputs), leaves, create_graph=True, allow_unused=True)
        total = sum(grad.square().sum() for grad in first if grad is not None)
        return *first, *torch.autograd.grad(total, leaves, allow_unused=True)

    _assert_close(derivatives(call.kernel_backward), derivatives(call.by_formula))


@pytest.mark.parametrize("casting", ["llama", "gemma", "none"])
def test_second_derivatives_in_bf16_have_the_dtypes_of_their_tensors(casting: str, device: str) -> None:
    x, w = (
        torch.randn(5, 64, device=device).bfloat16().requires_grad_(),
        torch.randn(64, device=device).requires_grad_(),
    )
    case = Case("rms_norm", (x, w), (NormSpec(casting, eps=1e-3), None))  # type: ignore[arg-type]
    first = torch.autograd.grad(_loss(case.kernel_backward(x, w)), (x, w), create_graph=True)
    plain = torch.autograd.grad(_loss(case.kernel_backward(x, w)), (x, w))
    second = torch.autograd.grad(sum(grad.float().square().sum() for grad in first), (x, w))
    for a, b in zip((*first, *second), (*plain, *plain), strict=True):
        assert a.dtype == b.dtype
    _assert_close(first, plain, 2**-6)
    exact = [leaf.detach().double().requires_grad_() for leaf in (x, w)]
    firsts = torch.autograd.grad(_loss(case.by_formula(*exact)), exact, create_graph=True)
    expected = torch.autograd.grad(sum(grad.square().sum() for grad in firsts), exact)
    for ours, exact_grad in zip(second, expected, strict=True):
        assert (ours.double() - exact_grad).norm() <= 0.03 * exact_grad.norm()


def _negated(tensor: Tensor) -> Tensor:
    """Return equal values as a view with the negative bit."""
    view = torch.complex(torch.zeros_like(tensor.float()), -tensor.float()).conj().imag
    assert view.is_neg()
    return view


@CASES
def test_a_tensor_with_the_negative_bit_is_read_with_its_sign(case: str, launches: list[Launch], device: str) -> None:
    call = _case(case, device)
    expected = call.by_formula(*call.inputs)
    incoming = [output.cos() for output in expected]
    for place in range(len(call.inputs)):
        leaves = [leaf.clone().requires_grad_() for leaf in call.inputs]
        inputs = [_negated(leaf) if at == place else leaf for at, leaf in enumerate(leaves)]
        with torch.no_grad():
            _assert_close(call.kernel_backward(*inputs), expected)
        outputs = call.kernel_backward(*inputs)
        _assert_close(outputs, expected)
        gradients = torch.autograd.grad(outputs, leaves, [_negated(dy) for dy in incoming])
        plain = torch.autograd.grad(call.by_formula(*leaves), leaves, incoming)
        _assert_close(gradients, plain)
    assert not any(tensor is not None and tensor.is_neg() for launch in launches for tensor in launch.tensors)
