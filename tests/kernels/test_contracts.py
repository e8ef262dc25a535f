"""What every operator promises, whatever it computes: over all of them, with tensors of several dtypes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fused_norm.kernels.triton.launch import Launch

from .conftest import OPERATORS
from .numerics import ROW_LAYOUTS, WEIGHT_LAYOUTS, far_apart, in_layout
from .test_operators import CALLS, Call, every_call


def present(outputs: Tensor | Sequence[Tensor | None]) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else [output for output in outputs if output is not None]


def incoming(call: Call) -> list[Tensor]:
    """Gradients for the outputs of a call, the same at every look."""
    with torch.no_grad():
        outputs = present(OPERATORS[call.name](call.spec, *call.tensors, *call.options))
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(y.shape, generator=generator).to(y.device, y.dtype) for y in outputs]


def run(
    call: Call, gradients: Sequence[Tensor], frozen: Sequence[int] = ()
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The outputs, and the gradient of each tensor: None where there is no tensor, or it is among the ``frozen``."""
    leaves = call.leaves()
    for place in frozen:
        leaves[place] = call.tensors[place]
    outputs = present(OPERATORS[call.name](call.spec, *leaves, *call.options))
    wanted = [leaf if leaf is not None and leaf.requires_grad else None for leaf in leaves[: call.differentiated]]
    found = iter(torch.autograd.grad(outputs, present(wanted), gradients))
    return [output.detach() for output in outputs], [None if leaf is None else next(found) for leaf in wanted]


def assert_equal(
    ours: Sequence[Tensor | None], expected: Sequence[Tensor | None], *, but_for_order: bool = False
) -> None:
    """Bit for bit; ``but_for_order``: sums over rows, which weights' gradients are, may be taken in another order."""
    for one, other in zip(ours, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            if but_for_order and one.dim() == 1:
                torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-7)
            else:
                assert torch.equal(one, other)


def placed(call: Call, place: int, tensor: Tensor) -> Call:
    return call._replace(tensors=[*call.tensors[:place], tensor, *call.tensors[place + 1 :]])


@CALLS
def test_nothing_handed_over_changes_and_repeats_are_equal(index: int, device: str) -> None:
    call = every_call(device)[index]
    gradients = incoming(call)
    before = [tensor.clone() for tensor in (*present(call.tensors), *gradients)]
    first, second = run(call, gradients), run(call, gradients)
    assert_equal((*present(call.tensors), *gradients), before)
    for ours, again in zip(first, second, strict=True):
        assert_equal(again, ours)


@CALLS
def test_results_have_memory_of_their_own(index: int, device: str) -> None:
    """But for the gradients of an add, which PyTorch's own hands on as well."""
    call = every_call(device)[index]
    gradients = incoming(call)
    outputs, found = run(call, gradients)
    handed_on = {("add_rms_norm", 1), ("norm_add", 1)}
    results = [*outputs, *(one for place, one in enumerate(found) if (call.name, place) not in handed_on)]
    memory = [one.untyped_storage().data_ptr() for one in (*present(results), *present(call.tensors), *gradients)]
    assert len(set(memory)) == len(memory)


@CALLS
def test_a_retained_graph_gives_the_same_gradients_again_and_no_other_does(index: int, device: str) -> None:
    call = every_call(device)[index]
    gradients = incoming(call)
    leaves = call.leaves()
    wanted = present(leaves[: call.differentiated])
    outputs = present(OPERATORS[call.name](call.spec, *leaves, *call.options))
    first = torch.autograd.grad(outputs, wanted, gradients, retain_graph=True)
    assert_equal(torch.autograd.grad(outputs, wanted, gradients), first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(outputs, wanted, gradients)


@CALLS
def test_frozen_arguments_get_no_gradient_and_change_no_other(index: int, device: str) -> None:
    call = every_call(device)[index]
    gradients = incoming(call)
    outputs, whole = run(call, gradients)
    there = [place for place in range(call.differentiated) if call.tensors[place] is not None]
    for place in there if len(there) > 1 else ():
        others = [one for one in there if one != place]
        for frozen in ([place], others):
            same, part = run(call, gradients, frozen)
            assert_equal(same, outputs)
            rest = [None if one in frozen else gradient for one, gradient in enumerate(whole)]
            # A kernel that sums no gradient of a weight is compiled by itself: on a GPU with other multiply-adds.
            assert_equal(part, rest, but_for_order=device == "cuda")


@pytest.mark.parametrize("turn", range(len(ROW_LAYOUTS)))
@CALLS
def test_arguments_are_read_in_any_layout(index: int, turn: int, device: str) -> None:
    """Each argument and gradient has another one, and each comes to all of them."""
    call = every_call(device)[index]
    gradients = incoming(call)
    outputs, found = run(call, gradients)
    for place, tensor in enumerate(call.tensors):
        if tensor is not None:
            layouts = ROW_LAYOUTS if tensor.dim() == 4 else WEIGHT_LAYOUTS if tensor.dim() == 1 else ("padded rows",)
            call = placed(call, place, in_layout(layouts[(turn + place) % len(layouts)], tensor))
    spread = [in_layout(ROW_LAYOUTS[(turn + 1 + place) % len(ROW_LAYOUTS)], one) for place, one in enumerate(gradients)]
    ours = run(call, spread)
    assert_equal(ours[0], outputs)
    assert_equal(ours[1], found, but_for_order=True)


@CALLS
def test_gradients_of_a_sum_are_read_where_all_elements_are_one(index: int, device: str) -> None:
    """``.sum().backward()`` hands over such gradients."""
    call = every_call(device)[index]
    ones = [torch.ones_like(one) for one in incoming(call)]
    expanded = [one.new_ones(()).expand(one.shape) for one in ones]
    for ours, expected in zip(run(call, expanded), run(call, ones), strict=True):
        assert_equal(ours, expected, but_for_order=True)


@CALLS
def test_rows_beyond_32_bits(index: int, device: str) -> None:
    if device != "cpu":
        pytest.skip("a GPU's memory is not made of untouched pages")
    call = every_call(device)[index]
    call = call._replace(tensors=[one if one is None or one.dim() < 3 else one[[0, 1, 0]] for one in call.tensors])
    gradients = incoming(call)
    outputs, found = run(call, gradients)
    for place, tensor in enumerate(call.tensors):
        if tensor is not None and tensor.dim() > 2:
            ours = run(placed(call, place, far_apart(tensor)), gradients)
            assert_equal(ours[0], outputs)
            assert_equal(ours[1], found, but_for_order=True)
    assert_equal(run(call, [far_apart(one) for one in gradients])[1], found, but_for_order=True)


@CALLS
def test_float64_takes_the_reference(index: int, launches: list[Launch], device: str) -> None:
    call = every_call(device)[index]
    call = call._replace(tensors=[None if one is None else one.double() for one in call.tensors])
    operator = OPERATORS[call.name]
    for ours, expected in zip(call.results(operator.checked), call.results(operator.reference), strict=True):
        assert ours.dtype == torch.float64
        assert torch.equal(ours, expected)
    assert not launches
