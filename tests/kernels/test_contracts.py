"""What every operator promises, whatever it computes and however its kernels read a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from fused_norm.kernels import program
from fused_norm.kernels.plans import BackwardPlan
from fused_norm.kernels.triton.launch import Launch

from .calls import CALLS, Call, every_call, present
from .conftest import OPERATORS
from .numerics import ROW_LAYOUTS, WEIGHT_LAYOUTS, Guarded, assert_same_row, far_apart, in_layout

IN_TWO_PIECES = BackwardPlan(2, 32, 1, stages=2, programs=2, tail=16)
"""Rows of 33 to 48 elements in tiles of two rows."""

SIZES = {"held": (3, 16), "two pieces": (3, 47), "in chunks": (1, 145), "both norms apart": (3, 63)}
"""Ways to read a row, with rows and a width for each."""
READ = [
    *((index, "held") for index in range(17)),
    *((2, "two pieces"), (0, "in chunks"), (2, "in chunks"), (5, "both norms apart"), (6, "both norms apart")),
]


@pytest.fixture
def call(request: pytest.FixtureRequest, device: str) -> Call:
    """A call of an operator, whose rows are read in one of the ways."""
    index, way = request.param
    if way == "two pieces":
        request.getfixturevalue("planned")(IN_TWO_PIECES)
    elif way == "in chunks":
        request.getfixturevalue("in_chunks")
    elif way == "both norms apart":
        request.getfixturevalue("sandwich_limits")
    rows, width = SIZES[way]
    return every_call(device, rows=rows, width=width)[index]


EVERY_WAY = pytest.mark.parametrize(
    "call", READ, indirect=True, ids=lambda read: f"{every_call('cpu')[read[0]].name}-{read[0]} {read[1]}"
)


def incoming(call: Call) -> list[Tensor]:
    """Gradients for the outputs of a call, the same at every look."""
    with torch.no_grad():
        outputs = call.outputs()
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(y.shape, generator=generator).to(y.device, y.dtype) for y in outputs]


def run(
    call: Call,
    gradients: Sequence[Tensor],
    frozen: Sequence[int] = (),
    operator: Callable[..., object] | None = None,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The outputs, and the gradient of each tensor: None where there is no tensor, or it is among the ``frozen``."""
    leaves = call.leaves()
    for place in frozen:
        leaves[place] = call.tensors[place]
    outputs = call.outputs(leaves, operator)
    wanted = [leaf if leaf is not None and leaf.requires_grad else None for leaf in leaves[: call.differentiated]]
    found = iter(torch.autograd.grad(outputs, present(wanted), gradients))
    return [output.detach() for output in outputs], [None if leaf is None else next(found) for leaf in wanted]


def assert_equal(
    ours: Sequence[Tensor | None],
    expected: Sequence[Tensor | None],
    *,
    but_for_order: bool = False,
    at_other_strides: bool = False,
) -> None:
    """Bit for bit; ``but_for_order``: sums over rows, which weights' gradients are, may be taken in another order.

    ``at_other_strides``: so may these, and on a GPU the sums within rows that are not held in one piece.
    """
    for one, other in zip(ours, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            if (but_for_order or at_other_strides) and one.dim() == 1:
                torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-7)
            elif at_other_strides and one.shape[-1] != SIZES["held"][1]:
                assert_same_row(one, other)
            else:
                assert torch.equal(one, other)


@EVERY_WAY
def test_nothing_handed_over_changes_and_repeats_are_equal(call: Call) -> None:
    gradients = incoming(call)
    before = [tensor.clone() for tensor in (*present(call.tensors), *gradients)]
    first, second = run(call, gradients), run(call, gradients)
    assert_equal((*present(call.tensors), *gradients), before)
    for ours, again in zip(first, second, strict=True):
        assert_equal(again, ours)


HANDED_ON = {("add_rms_norm", 1), ("norm_add", 1)}
"""The gradients of an add are those that arrive, as PyTorch's own hands them on."""


@EVERY_WAY
def test_results_have_memory_of_their_own(call: Call) -> None:
    gradients = incoming(call)
    outputs, found = run(call, gradients)
    results = [*outputs, *(one for place, one in enumerate(found) if (call.name, place) not in HANDED_ON)]
    memory = [one.untyped_storage().data_ptr() for one in (*present(results), *present(call.tensors), *gradients)]
    assert len(set(memory)) == len(memory)


@pytest.mark.parametrize(
    ("rows", "width"), [(17, 3), (3, 81), *(pytest.param(1, width, marks=pytest.mark.slow) for width in (409, 2500))]
)
@CALLS
def test_held_rows_are_written_whole_and_nothing_beside(
    index: int, rows: int, width: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_nothing_is_written_beside(every_call(device, rows=rows, width=width)[index], monkeypatch)


@EVERY_WAY
def test_every_element_is_written_and_nothing_beside(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_nothing_is_written_beside(call, monkeypatch)


def assert_nothing_is_written_beside(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a call allocates, what it shares between launches too, lies between guard bands and begins as NaN."""
    gradients = incoming(call)
    expected = run(call, gradients)
    guarded = Guarded()
    empty_strided, empty_like = torch.empty_strided, torch.empty_like
    monkeypatch.setattr(torch, "empty_strided", lambda *how, **kind: guarded(empty_strided(*how, **kind)))
    monkeypatch.setattr(torch, "empty_like", lambda *how, **kind: guarded(empty_like(*how, **kind)))
    new_empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *how, **kind: guarded(new_empty(*how, **kind)))
    program.forget_all()
    found = run(call, gradients)
    assert guarded.count >= len(present([*found[0], *found[1]])) - 1, "an add hands on a gradient"
    assert guarded.intact()
    for ours, other in zip(found, expected, strict=True):
        assert_equal(ours, other)


@CALLS
def test_a_retained_graph_gives_the_same_gradients_again_and_no_other_does(index: int, device: str) -> None:
    call = every_call(device)[index]
    gradients = incoming(call)
    leaves = call.leaves()
    wanted = present(leaves[: call.differentiated])
    outputs = call.outputs(leaves)
    first = torch.autograd.grad(outputs, wanted, gradients, retain_graph=True)
    assert_equal(torch.autograd.grad(outputs, wanted, gradients), first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(outputs, wanted, gradients)


@EVERY_WAY
def test_frozen_arguments_get_no_gradient_and_change_no_other(call: Call, device: str) -> None:
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
@EVERY_WAY
def test_arguments_are_read_in_any_layout(call: Call, turn: int) -> None:
    """Each argument and gradient has another one, and each comes to all of them."""
    gradients = incoming(call)
    outputs, found = run(call, gradients)
    for place, tensor in enumerate(call.tensors):
        if tensor is not None:
            layouts = ROW_LAYOUTS if tensor.dim() == 4 else WEIGHT_LAYOUTS if tensor.dim() == 1 else ("padded rows",)
            call = call.placed(place, in_layout(layouts[(turn + place) % len(layouts)], tensor))
    spread = [in_layout(ROW_LAYOUTS[(turn + 1 + place) % len(ROW_LAYOUTS)], one) for place, one in enumerate(gradients)]
    ours = run(call, spread)
    assert_equal(ours[0], outputs, at_other_strides=True)
    assert_equal(ours[1], found, at_other_strides=True)


@CALLS
def test_results_lie_in_the_memory_order_of_their_tensor(index: int, device: str) -> None:
    call = every_call(device, "transposed heads")[index]
    gradients = [in_layout("columns first", one) for one in incoming(call)]
    outputs, found = run(call, gradients)
    if index in (9, 10):  # stock puts a row of which a part is rotated together anew
        assert all(one.is_contiguous() for one in outputs)
    else:
        assert all(one.transpose(1, 2).is_contiguous() for one in outputs)
    for place, one in enumerate(found):
        if one is not None and one.dim() > 1 and (call.name, place) not in HANDED_ON:
            assert one.transpose(1, 2).is_contiguous()


@CALLS
def test_gradients_of_a_sum_are_read_where_all_elements_are_one(index: int, device: str) -> None:
    """``.sum().backward()`` hands over such gradients."""
    call = every_call(device)[index]
    ones = [torch.ones_like(one) for one in incoming(call)]
    expanded = [one.new_ones(()).expand(one.shape) for one in ones]
    for ours, expected in zip(run(call, expanded), run(call, ones), strict=True):
        assert_equal(ours, expected, but_for_order=True)


@EVERY_WAY
def test_rows_beyond_32_bits(call: Call, device: str) -> None:
    if device != "cpu" and call.tensors[0].shape[-1] == SIZES["held"][1]:
        pytest.skip("a GPU's memory is not made of untouched pages")
    call = call._replace(tensors=[one if one is None or one.dim() < 3 else one[[0, 1, 0]] for one in call.tensors])
    gradients = incoming(call)
    outputs, found = run(call, gradients)
    for place, tensor in enumerate(call.tensors):
        if tensor is not None and tensor.dim() > 2:
            ours = run(call.placed(place, far_apart(tensor)), gradients)
            assert_equal(ours[0], outputs, at_other_strides=True)
            assert_equal(ours[1], found, at_other_strides=True)
    assert_equal(run(call, [far_apart(one) for one in gradients])[1], found, at_other_strides=True)


def assert_rows_are_alone(call: Call) -> None:
    """The second of two blocks of rows gives by itself what it gives behind the first."""
    gradients = incoming(call)
    whole = run(call, gradients)
    part = call.converted(lambda one: one[1:] if one.dim() > 1 else one)
    for ours, expected in zip(run(part, [one[1:] for one in gradients]), whole, strict=True):
        for one, other in zip(ours, expected, strict=True):
            assert one is None or one.dim() == 1 or torch.equal(one, other[1:])


@EVERY_WAY
def test_a_row_does_not_depend_on_its_neighbours(call: Call) -> None:
    assert_rows_are_alone(call)


@pytest.mark.parametrize(
    ("index", "rows", "width"),
    [*((index, 17, 64) for index in (0, 3, 6, 8)), *((index, 3, 1000) for index in (0, 3, 6))],
)
def test_a_held_row_does_not_depend_on_its_neighbours(index: int, rows: int, width: int, device: str) -> None:
    """Blocks that end in the middle of a tile."""
    assert_rows_are_alone(every_call(device, rows=rows, width=width)[index])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@EVERY_WAY
def test_what_is_not_finite_stays_in_its_row_as_in_stock(call: Call, value: float) -> None:
    if value == float("inf") and call.name in ("glu", "gated_rms_norm"):
        pytest.skip("a gate of infinity times zero: see the tests of these operators")
    gradients = incoming(call)
    reference = OPERATORS[call.name].reference

    def infected(place: int, tensor: Tensor) -> Tensor:
        sick = tensor.clone()
        sick[place // 2, 0, place % 2, 2] = value
        return sick

    sick = call
    for place, tensor in enumerate(call.tensors[:2]):
        sick = sick if tensor is None or tensor.dim() < 4 else sick.placed(place, infected(place, tensor))
    incoming_sick = [infected(2, one) for one in gradients]
    clean, healthy = run(call, gradients), run(call, gradients, operator=reference)
    ours, stock = run(sick, incoming_sick), run(sick, incoming_sick, operator=reference)
    assert all(torch.equal(one.isinf(), other.isinf()) for one, other in zip(ours[0], stock[0], strict=True))
    for one, whole, expected, well in zip(
        *(present([*each[0], *each[1]]) for each in (ours, clean, stock, healthy)), strict=True
    ):
        assert torch.equal(one.isnan(), expected.isnan())
        if one.dim() == 4:
            same = (expected == well).all(-1)
            assert same.any()
            assert torch.equal(one[same], whole[same])


@pytest.mark.parametrize("empty", ["batch", "rows", "width"])
@CALLS
def test_empty_tensors_give_empty_results_and_zero_gradients(index: int, empty: str, device: str) -> None:
    call = every_call(device, rows=0 if empty == "rows" else 3, width=0 if empty == "width" else 16)[index]
    if empty == "batch":
        call = call.converted(lambda one: one[:0] if one.dim() > 1 else one)
    if empty == "width" and index in (9, 10, 12, 14, 16):
        pytest.skip("nothing to rotate, or to group")
    outputs, found = run(call, incoming(call))
    assert all(one.numel() == 0 for one in outputs)
    for tensor, gradient in zip(call.tensors, found, strict=False):
        assert (tensor is None) == (gradient is None)
        assert tensor is None or torch.equal(gradient, torch.zeros_like(tensor))


@CALLS
def test_float64_takes_the_reference(index: int, launches: list[Launch], device: str) -> None:
    call = every_call(device, dtype=torch.float64)[index].converted(Tensor.double)
    operator = OPERATORS[call.name]
    for ours, expected in zip(call.results(operator.checked), call.results(operator.reference), strict=True):
        assert ours.dtype == torch.float64
        assert torch.equal(ours, expected)
    assert not launches
