"""Operators under PyTorch's transforms: second derivatives, torch.func, batched and dual gradients, torch.jit.trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from fused_norm.kernels.operator import Operator
from fused_norm.kernels.triton.launch import Launch
from fused_norm.spec import NormSpec

from .conftest import OPERATORS

LLAMA, GEMMA, NONE = NormSpec("llama", eps=1e-3), NormSpec("gemma", True, eps=1e-3), NormSpec("none", True, eps=1e-3)


class Case(NamedTuple):
    """An operator and the arguments of a call; the last tensors, ``constants`` of them, are never differentiated."""

    operator: Operator
    spec: NormSpec | None
    tensors: Sequence[Tensor | None]
    options: tuple[Any, ...] = ()
    constants: int = 0

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What can be differentiated."""
        return tuple(t for t in self.tensors[: len(self.tensors) - self.constants] if t is not None)

    def by_kernels(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs for other tensors in the place of ``inputs``."""
        return self._outputs(self.operator.checked, inputs)

    def by_formula(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self._outputs(self.operator.reference, inputs)

    def _outputs(self, call: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        left = list(inputs)
        differentiated = len(self.tensors) - self.constants
        tensors = [
            left.pop(0) if tensor is not None and place < differentiated else tensor
            for place, tensor in enumerate(self.tensors)
        ]
        outputs = call(self.spec, *tensors, *self.options)
        return (outputs,) if isinstance(outputs, Tensor) else tuple(one for one in outputs if one is not None)


def _cases(device: str = "cpu") -> dict[str, Case]:
    torch.manual_seed(0)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    x, r, w, inner = made(3, 2, 5, 8), made(3, 2, 5, 8), made(8), made(8)
    cos, sin = made(3, 5, 8), made(3, 5, 8)
    qk, add = OPERATORS["qk_norm"], OPERATORS["add_rms_norm"]
    k = made(3, 1, 5, 8)
    return {
        "rms_norm": Case(OPERATORS["rms_norm"], LLAMA, (x, w), (None,)),
        "rms_norm of one row": Case(OPERATORS["rms_norm"], GEMMA, (made(8), w), (None,)),
        "rms_norm without a weight": Case(OPERATORS["rms_norm"], LLAMA, (x, None), (None,)),
        "add_rms_norm": Case(add, NONE, (x, r, w), (None, 0.5)),
        "norm_add": Case(OPERATORS["norm_add"], GEMMA, (x, r, w)),
        "norm_add_norm": Case(OPERATORS["norm_add_norm"], GEMMA, (x, r, inner, w)),
        "qk_norm": Case(qk, LLAMA, (x, k, w, inner, None, None), (1,), constants=2),
        "qk_norm_rope": Case(qk, LLAMA, (x, k, w, inner, cos, sin), (1,), constants=2),
        "qk_norm_rope of a part": Case(qk, LLAMA, (x, k, w, inner, cos[..., :4], sin[..., :4]), (1,), constants=2),
        "rope": Case(OPERATORS["rope"], None, (x, k, cos, sin), (1, False), constants=2),
        "rope of a part of one": Case(
            OPERATORS["rope"], None, (x, None, cos[..., :4], sin[..., :4]), (1, True), constants=2
        ),
        "glu": Case(OPERATORS["glu"], None, (x, r), ("silu",)),
        "glu by erf": Case(OPERATORS["glu"], None, (x, r), ("gelu",)),
        "glu of halves": Case(OPERATORS["glu"], None, (x, None), ("gelu_tanh",)),
        "gated_rms_norm": Case(OPERATORS["gated_rms_norm"], LLAMA, (x, r, w), ("silu", True, 2)),
        "gated_rms_norm of a product": Case(OPERATORS["gated_rms_norm"], GEMMA, (x, r, w), ("sigmoid", False, 1)),
    }


CASES = pytest.mark.parametrize("name", _cases())


def _assert_close(ours: Sequence[Tensor | None], expected: Sequence[Tensor | None], tolerance: float = 1e-4) -> None:
    for one, other in zip(ours, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            largest = max(1.0, other.abs().max().item())
            torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=tolerance * largest)


def _loss(outputs: Sequence[Tensor]) -> Tensor:
    return sum((place + 1.5) * output.float().sin().sum() for place, output in enumerate(outputs))  # type: ignore[return-value]


@CASES
def test_second_derivatives(name: str, device: str) -> None:
    case = _cases(device)[name]

    def hessian_vector_product(function: Callable[..., Sequence[Tensor]]) -> Sequence[Tensor]:
        leaves = [leaf.clone().requires_grad_() for leaf in case.inputs]
        first = torch.autograd.grad(_loss(function(*leaves)), leaves, create_graph=True)
        return *first, *torch.autograd.grad(sum(one.cos().sum() for one in first), leaves)

    _assert_close(hessian_vector_product(case.by_kernels), hessian_vector_product(case.by_formula))


@CASES
def test_second_derivatives_with_respect_to_an_incoming_gradient(name: str, device: str) -> None:
    case = _cases(device)[name]

    def found(function: Callable[..., Sequence[Tensor]]) -> Sequence[Tensor]:
        leaves = [leaf.clone().requires_grad_() for leaf in case.inputs]
        outputs = function(*leaves)
        incoming = [output.detach().cos().requires_grad_() for output in outputs]
        first = torch.autograd.grad(outputs, leaves, incoming, create_graph=True)
        return torch.autograd.grad(sum(one.cos().sum() for one in first), incoming)

    _assert_close(found(case.by_kernels), found(case.by_formula))


@pytest.mark.parametrize("used", [(True, False), (False, True)])
@pytest.mark.parametrize("name", ["add_rms_norm", "norm_add_norm", "qk_norm_rope", "rope"])
def test_second_derivatives_where_one_output_is_unused(name: str, used: tuple[bool, bool], device: str) -> None:
    case = _cases(device)[name]

    def found(function: Callable[..., Sequence[Tensor]]) -> Sequence[Tensor | None]:
        leaves = [leaf.clone().requires_grad_() for leaf in case.inputs]
        outputs = [output for output, keep in zip(function(*leaves), used, strict=True) if keep]
        first = torch.autograd.grad(_loss(outputs), leaves, create_graph=True, allow_unused=True)
        total = sum(one.square().sum() for one in first if one is not None)
        return *first, *torch.autograd.grad(total, leaves, allow_unused=True)

    _assert_close(found(case.by_kernels), found(case.by_formula))


def test_a_weight_made_from_the_input_is_no_part_of_the_inputs_own_gradient(device: str) -> None:
    case = _cases(device)["rms_norm"]

    def found(function: Callable[..., Sequence[Tensor]]) -> Sequence[Tensor]:
        x = case.inputs[0].clone().requires_grad_()
        (first,) = torch.autograd.grad(_loss(function(x, x.sin().sum((0, 1, 2)))), x, create_graph=True)
        return first, *torch.autograd.grad(first.cos().sum(), x)

    _assert_close(found(case.by_kernels), found(case.by_formula), 1e-3)


@pytest.mark.parametrize("casting", ["llama", "gemma", "none"])
def test_second_derivatives_in_bf16_have_the_dtypes_of_their_tensors(casting: str, device: str) -> None:
    x, w = (
        torch.randn(5, 64, device=device).bfloat16().requires_grad_(),
        torch.randn(64, device=device).requires_grad_(),
    )
    case = Case(OPERATORS["rms_norm"], NormSpec(casting, eps=1e-3), (x, w), (None,))  # type: ignore[arg-type]
    first = torch.autograd.grad(_loss(case.by_kernels(x, w)), (x, w), create_graph=True)
    plain = torch.autograd.grad(_loss(case.by_kernels(x, w)), (x, w))
    second = torch.autograd.grad(sum(one.float().square().sum() for one in first), (x, w))
    for one, other in zip((*first, *second), (*plain, *plain), strict=True):
        assert one.dtype == other.dtype
    _assert_close(first, plain, 2**-6)
    exact = [leaf.detach().double().requires_grad_() for leaf in (x, w)]
    firsts = torch.autograd.grad(_loss(case.by_formula(*exact)), exact, create_graph=True)
    expected = torch.autograd.grad(sum(one.square().sum() for one in firsts), exact)
    for ours, truth in zip(second, expected, strict=True):
        assert (ours.double() - truth).norm() <= 0.03 * truth.norm()


@CASES
def test_a_dual_incoming_gradient_keeps_its_tangent(name: str, device: str) -> None:
    case = _cases(device)[name]

    def found(function: Callable[..., Sequence[Tensor]]) -> Sequence[Tensor]:
        leaves = [leaf.clone().requires_grad_() for leaf in case.inputs]
        outputs = function(*leaves)
        with forward_ad.dual_level():
            incoming = [forward_ad.make_dual(output.detach().sin(), output.detach().cos()) for output in outputs]
            gradients = torch.autograd.grad(outputs, leaves, incoming)
            unpacked = [forward_ad.unpack_dual(gradient) for gradient in gradients]
            return [part.clone() for pair in unpacked for part in (pair.primal, pair.tangent)]

    _assert_close(found(case.by_kernels), found(case.by_formula))


@CASES
def test_gradients_come_in_batches(name: str, device: str) -> None:
    case = _cases(device)[name]

    def found(function: Callable[..., Sequence[Tensor]]) -> Sequence[Tensor]:
        leaves = [leaf.clone().requires_grad_() for leaf in case.inputs]
        outputs = function(*leaves)
        incoming = [torch.stack([output.detach().sin(), output.detach().cos()]) for output in outputs]
        return torch.autograd.grad(outputs, leaves, incoming, is_grads_batched=True)

    _assert_close(found(case.by_kernels), found(case.by_formula))


@CASES
def test_functional_transforms(name: str, device: str) -> None:
    case = _cases(device)[name]
    places = tuple(range(len(case.inputs)))

    def found(function: Callable[..., Sequence[Tensor]]) -> Sequence[Tensor]:
        def loss(*inputs: Tensor) -> Tensor:
            return _loss(function(*inputs))

        gradients = torch.func.grad(loss, places)(*case.inputs)
        several = torch.func.vmap(torch.func.grad(loss), in_dims=(0, *[None] * (len(places) - 1)))
        (outputs, tangents) = torch.func.jvp(function, case.inputs, case.inputs)
        jacobian = torch.func.jacrev(loss)(*case.inputs)
        hessian = torch.func.jvp(torch.func.grad(loss), case.inputs, case.inputs)
        stacked = torch.stack([case.inputs[0], case.inputs[0].sin()])
        return *gradients, several(stacked, *case.inputs[1:]), *outputs, *tangents, jacobian, *hessian

    _assert_close(found(case.by_kernels), found(case.by_formula))


def _negated(tensor: Tensor) -> Tensor:
    """Equal values, their signs in a bit of the tensor."""
    view = torch.complex(torch.zeros_like(tensor.float()), -tensor.float()).conj().imag
    assert view.is_neg()
    return view


@CASES
def test_a_tensor_with_the_negative_bit_is_read_with_its_sign(name: str, launches: list[Launch], device: str) -> None:
    case = _cases(device)[name]
    expected = case.by_formula(*case.inputs)
    incoming = [output.cos() for output in expected]
    for place in range(len(case.inputs)):
        leaves = [leaf.clone().requires_grad_() for leaf in case.inputs]
        given = [_negated(leaf) if at == place else leaf for at, leaf in enumerate(leaves)]
        with torch.no_grad():
            _assert_close(case.by_kernels(*given), expected)
        outputs = case.by_kernels(*given)
        _assert_close(outputs, expected)
        gradients = torch.autograd.grad(outputs, leaves, [_negated(one) for one in incoming])
        plain = torch.autograd.grad(case.by_formula(*leaves), leaves, incoming)
        _assert_close(gradients, plain)
    assert not any(tensor is not None and tensor.is_neg() for launch in launches for tensor in launch.tensors)


@pytest.mark.filterwarnings("ignore")
@CASES
def test_traces_by_torch_jit(name: str, device: str) -> None:
    case = _cases(device)[name]
    traced = torch.jit.trace(case.by_kernels, case.inputs, check_trace=False)
    others = [tensor.sin() for tensor in case.inputs]
    _assert_close(traced(*others), case.by_formula(*others))
