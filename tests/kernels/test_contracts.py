"""The contracts of every operator, whatever it computes and however its kernels read a row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_norm.kernels import recording
from fused_norm.kernels.triton.launch import Launch

from ..conftest import slow
from .calls import CALLS, HEADS, IN_PART, NAMES, ONE_OF_EACH, ROWS, SEQUENCES, Call, every_call, present
from .conftest import OPERATORS
from .numerics import FAR, ROW_LAYOUTS, WEIGHT_LAYOUTS, Guarded, assert_same_row, far_apart, in_layout

SIZES = {"held": (3, 16), "two pieces": (3, 47), "in chunks": (1, 145), "both norms apart": (3, 63)}
"""Ways to read a row, each with rows and a width; other held rows are named by rows and width."""
FIXTURES = {"two pieces": "in_two_pieces", "in chunks": "in_chunks", "both norms apart": "sandwich_limits"}
READ = [
    *((case, "held") for case in NAMES),
    *(("add in gemma", "two pieces"), ("norm", "in chunks"), ("add in gemma", "in chunks")),
    *(("norm and add", "both norms apart"), ("sandwich", "both norms apart")),
]


@pytest.fixture
def call(request: pytest.FixtureRequest, device: str) -> Call:
    """A call of an operator, with rows that are read in one of the ways."""
    case, way = request.param
    if way in FIXTURES:
        request.getfixturevalue(FIXTURES[way])
    rows, width = SIZES.get(way) or map(int, way.split("x"))
    return every_call(device, rows=rows, width=width)[case]


def every_way(*extra: Any, held: bool = True) -> pytest.MarkDecorator:
    ways = [(case, way) for case, way in READ if held or way != "held"]
    return pytest.mark.parametrize("call", [*ways, *extra], indirect=True, ids=" ".join)


EVERY_WAY = every_way()


def incoming(call: Call) -> list[Tensor]:
    """Return gradients for the outputs of a call, the same ones every time."""
    with torch.no_grad():
        outputs = call.outputs()
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(y.shape, generator=generator).to(y.device, y.dtype) for y in outputs]


def run(
    call: Call, gradients: Sequence[Tensor], frozen: Sequence[int] = (), operator: Callable[..., object] | None = None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the outputs and the gradient of each tensor; None for an absent or ``frozen`` tensor."""
    leaves = call.leaves()
    for place in frozen:
        leaves[place] = call.tensors[place]
    outputs = call.outputs(leaves, operator)
    with_grad = [leaf if leaf is not None and leaf.requires_grad else None for leaf in leaves[: call.differentiated]]
    pairs = [(y, dy) for y, dy in zip(outputs, gradients, strict=True) if y.requires_grad]
    ys, dys = zip(*pairs, strict=True)
    grads = iter(torch.autograd.grad(ys, present(with_grad), dys))
    return [output.detach() for output in outputs], [None if leaf is None else next(grads) for leaf in with_grad]


def assert_equal(
    ours: Sequence[Tensor | None],
    expected: Sequence[Tensor | None],
    *,
    but_for_order: bool = False,
    at_other_strides: bool = False,
) -> None:
    """Assert equal bits. ``but_for_order``: sums over rows, as in weight gradients, may have another order.

    ``at_other_strides``: so may these, and on a GPU sums within rows that are not held in one piece.
    """
    for a, b in zip(ours, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            if (but_for_order or at_other_strides) and a.dim() < 3:
                torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7)
            elif at_other_strides and a.shape[-1] != SIZES["held"][1]:
                assert_same_row(a, b)
            else:
                assert torch.equal(a, b)


HANDED_ON = {("add_rms_norm", 1), ("norm_add", 1), ("lora_add", 0)}
"""The gradients that an operator passes through, as PyTorch's add does."""


@EVERY_WAY
def test_repeats_are_equal_and_have_memory_of_their_own_and_nothing_handed_over_changes(call: Call) -> None:
    gradients = incoming(call)
    before = [tensor.clone() for tensor in (*present(call.tensors), *gradients)]
    first, second = run(call, gradients), run(call, gradients)
    assert_equal((*present(call.tensors), *gradients), before)
    for ours, again in zip(first, second, strict=True):
        assert_equal(again, ours)
    leaves = call.leaves()
    inputs, outputs = present(leaves[: call.differentiated]), call.outputs(leaves)
    for retain_graph in (True, False):
        assert_equal(torch.autograd.grad(outputs, inputs, gradients, retain_graph=retain_graph), present(first[1]))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(outputs, inputs, gradients)
    results = [*first[0], *(grad for place, grad in enumerate(first[1]) if (call.name, place) not in HANDED_ON)]
    memory = [tensor.untyped_storage().data_ptr() for tensor in (*present(results), *present(call.tensors), *gradients)]
    assert len(set(memory)) == len(memory), "two of these share memory"


@every_way(
    *itertools.product(NAMES, ["17x3"]),
    *itertools.product(ONE_OF_EACH, ["3x81"]),
    *slow(*itertools.product(("sandwich", "heads rotated in part", "glu packed", "conv"), ["1x2500"])),
    held=False,
)
def test_every_element_is_written_and_nothing_beside(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """All memory of a call, workspace included, lies between guard bands and starts as NaN."""
    gradients = incoming(call)
    expected = run(call, gradients)
    guarded = Guarded()
    empty_strided, empty_like = torch.empty_strided, torch.empty_like
    monkeypatch.setattr(torch, "empty_strided", lambda *args, **kwargs: guarded(empty_strided(*args, **kwargs)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: guarded(empty_like(*args, **kwargs)))
    new_empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **kwargs: guarded(new_empty(*args, **kwargs)))
    recording.forget_all()
    actual = run(call, gradients)
    assert guarded.count >= len(present([*actual[0], *actual[1]])) - 1, "an add hands on a gradient"
    assert guarded.intact()
    for ours, theirs in zip(actual, expected, strict=True):
        assert_equal(ours, theirs)


@pytest.mark.parametrize("case", [*ONE_OF_EACH, "norm uncast", "heads rotated"])
def test_outputs_need_a_gradient_if_the_references_do(case: str, device: str) -> None:
    call = every_call(device, rows=1)[case]
    places = [place for place, tensor in enumerate(call.tensors[: call.differentiated]) if tensor is not None]
    for needed in itertools.product((False, True), repeat=len(places)):
        leaves = [None if tensor is None else tensor.detach() for tensor in call.tensors]
        for place, is_needed in zip(places, needed, strict=True):
            leaves[place] = leaves[place].requires_grad_(is_needed)
        ours, stock = call.outputs(leaves), call.outputs(leaves, OPERATORS[call.name].reference)
        assert [output.requires_grad for output in ours] == [output.requires_grad for output in stock], needed
        with torch.no_grad():
            assert not any(output.requires_grad for output in call.outputs(leaves))


@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_what_a_backward_reads_must_not_change_before_a_second_one(
    case: str, is_recorded: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = every_call(device)[case]
    operator = OPERATORS[call.name]
    if device == "cpu":
        monkeypatch.setattr(Launch, "run", lambda launch: None)  # the values do not matter

    read = 0
    for place in range(len(call.tensors) + len(operator.outputs)):
        leaves = call.converted(torch.clone).leaves()
        outputs = call.outputs(leaves, None if is_recorded else operator._launched)
        tensor = dict(enumerate([*leaves, *outputs])).get(place)
        if tensor is None or not is_among(tensor, outputs[0].grad_fn.saved_tensors):
            continue
        read += 1
        inputs = present(leaves[: call.differentiated])
        torch.autograd.grad(outputs, inputs, incoming(call), retain_graph=True)
        with torch.no_grad():
            tensor.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(outputs, inputs, incoming(call))
    assert read


EACH_WAY: dict[str, tuple[str, Sequence[int], int, int]] = {
    "rms_norm": ("_{}_kernel", (0, 1), 0, 1),
    "add_rms_norm": ("_{}_kernel", (2,), 1, 1),
    "norm_add": ("_{}_kernel", (0, 2), 0, 1),
    "norm_add_norm": ("_{}_kernel", (0, 2, 3), 1, 2),
    "qk_norm": ("qk_{}_kernel", range(6), 0, 0),
    "rope": ("qk_forward_kernel", (2, 3), 0, 0),
    "glu": ("_glu_{}_kernel", (0, 1), 0, 0),
    "expert_gate": ("_expert_gate_{}_kernel", (0,), 0, 0),
    "gated_rms_norm": ("_gated_{}_kernel", (0, 1, 2), 0, 1),
    "causal_conv1d": ("_conv_{}_kernel", (0, 1, 2), 0, 0),
}
"""The kernel of each direction, and what is saved: arguments by place, numbers of outputs and of scalars per row."""


def is_among(tensor: Tensor, tensors: Sequence[Tensor | None]) -> bool:
    return tensor.data_ptr() in {saved.data_ptr() for saved in present(tensors)}


@pytest.mark.parametrize("case", [case for case in NAMES if case != "adapter"])
def test_one_launch_each_way_keeps_no_more_than_the_backward_reads(
    case: str, launches: list[Launch], device: str
) -> None:
    call = every_call(device)[case]
    kernel, places, outputs_kept, numbers_kept = EACH_WAY[call.name]
    gradients, leaves = incoming(call), call.leaves()
    launches.clear()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        outputs = call.outputs(leaves)
    assert [launch.name for launch in launches] == [kernel.format("forward")]
    torch.autograd.grad(outputs, present(leaves[: call.differentiated]), gradients)
    weights = [tensor for tensor in call.inputs if tensor.dim() < 3]  # weights of norms have equal widths
    sums = ["_reduce_kernel"] * len({tensor.numel() for tensor in weights})
    assert [launch.name for launch in launches[1:]] == [kernel.format("backward"), *sums]

    expected = present([leaves[place] for place in places])
    assert all(is_among(tensor, saved) for tensor in expected if tensor.dim() > 2), "weights may be copied"
    assert len(saved) == len(expected) + outputs_kept + numbers_kept
    assert sum(is_among(tensor, outputs) for tensor in saved) == outputs_kept
    numbers = [tensor for tensor in saved if tensor.shape[:-1] == outputs[0].shape[:-1] and tensor.shape[-1] <= 2]
    assert len(numbers) == numbers_kept


@pytest.mark.gpu
@pytest.mark.parametrize("case", ROWS)
def test_another_number_of_rows_compiles_no_kernel_again(case: str, launches: list[Launch], device: str) -> None:
    def compiled(rows: int) -> int:
        call = every_call(device, rows=rows, width=96)[case]
        call = call.converted(lambda tensor: tensor[:1, :, :1].contiguous() if tensor.dim() == 4 else tensor)
        run(call, incoming(call))
        kernels = {launch.kernel for launch in launches}
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    before = compiled(64)
    for rows in (1, 5, 16, 1000, 4096):
        assert compiled(rows) == before


@EVERY_WAY
def test_frozen_arguments_get_no_gradient_cost_nothing_and_change_no_other(
    call: Call, launches: list[Launch], device: str
) -> None:
    gradients = incoming(call)
    launches.clear()
    outputs, whole = run(call, gradients)

    def read_and_written() -> int:
        count = sum(tensor is not None for launch in launches for tensor in launch.tensors)
        launches.clear()
        return count

    everything = read_and_written()
    places = [place for place in range(call.differentiated) if call.tensors[place] is not None]
    for place in places if len(places) > 1 else ():
        others = [index for index in places if index != place]
        for frozen in ([place], others):
            same, part = run(call, gradients, frozen)
            costs_nothing = all((call.name, index) in HANDED_ON | {("add_rms_norm", 0)} for index in frozen)
            assert read_and_written() < everything + costs_nothing
            assert_equal(same, outputs)
            rest = [None if index in frozen else gradient for index, gradient in enumerate(whole)]
            # Kernels without weight gradients are compiled separately, on a GPU with other multiply-adds.
            assert_equal(part, rest, but_for_order=device == "cuda")


@pytest.mark.parametrize("shape", [(16,), (1, 3, 1, 2, 16)], ids=str)
@pytest.mark.parametrize("case", ROWS)
def test_rows_have_any_leading_dimensions(case: str, shape: tuple[int, ...], device: str) -> None:
    call = every_call(device)[case]
    gradients = incoming(call)
    rows = torch.Size(shape[:-1]).numel()

    def shaped(tensor: Tensor) -> Tensor:
        return tensor if tensor.dim() < 4 else tensor.flatten(0, -2)[:rows].reshape(*shape[:-1], tensor.shape[-1])

    actual, expected = run(call.converted(shaped), [shaped(gradient) for gradient in gradients]), run(call, gradients)
    assert_equal(actual[0], [shaped(y) for y in expected[0]])
    for tensor, ours, whole in zip(call.tensors, actual[1], expected[1], strict=False):
        if tensor is not None and tensor.dim() == 4:
            assert_equal([ours], [shaped(whole)])


@EVERY_WAY
def test_arguments_are_read_in_any_layout(call: Call) -> None:
    """Each argument and gradient has another layout, and each of them goes through all layouts."""
    gradients = incoming(call)
    dense = run(call, gradients)

    def turned(turn: int, tensor: Tensor) -> Tensor:
        layouts = ROW_LAYOUTS if tensor.dim() == 4 else WEIGHT_LAYOUTS if tensor.dim() == 1 else ("padded rows",)
        return in_layout(layouts[turn % len(layouts)], tensor)

    for turn in range(len(ROW_LAYOUTS)):
        tensors = [
            tensor if tensor is None else turned(turn + place, tensor) for place, tensor in enumerate(call.tensors)
        ]
        spread = [turned(turn + 1 + place, gradient) for place, gradient in enumerate(gradients)]
        for ours, expected in zip(run(call._replace(tensors=tensors), spread), dense, strict=True):
            assert_equal(ours, expected, at_other_strides=True)


@pytest.mark.parametrize("case", [case for case in NAMES if case not in SEQUENCES])
def test_results_lie_in_the_memory_order_of_their_tensor(case: str, device: str) -> None:
    call = every_call(device, "transposed heads")[case]
    gradients = [in_layout("columns first", dy) for dy in incoming(call)]
    outputs, grads = run(call, gradients)
    if case in (*IN_PART, "adapter"):  # stock allocates a new tensor for rows rotated in part and for products
        assert all(output.is_contiguous() for output in outputs)
    else:
        assert all(output.transpose(1, 2).is_contiguous() for output in outputs)
    for place, grad in enumerate(grads):
        if grad is not None and grad.dim() > 2 and (call.name, place) not in HANDED_ON:
            assert (grad if case == "adapter" else grad.transpose(1, 2)).is_contiguous()


@CALLS
def test_gradients_of_a_sum_are_read_where_all_elements_are_one(case: str, device: str) -> None:
    """``.sum().backward()`` passes such gradients."""
    call = every_call(device)[case]
    ones = [torch.ones_like(dy) for dy in incoming(call)]
    expanded = [tensor.new_ones(()).expand(tensor.shape) for tensor in ones]
    for ours, expected in zip(run(call, expanded), run(call, ones), strict=True):
        assert_equal(ours, expected, but_for_order=True)


@EVERY_WAY
def test_rows_beyond_32_bits(call: Call, device: str, launches: list[Launch]) -> None:
    if device != "cpu" and call.tensors[0].shape[-1] == SIZES["held"][1]:
        pytest.skip("a GPU's memory is not made of untouched pages")
    # Kernels of rows take one stride for all leading dimensions, and a copy of tensors that have several.
    inner = slice(None) if call.name in ("qk_norm", "rope", "causal_conv1d") else slice(1)
    call = call.converted(lambda tensor: tensor if tensor.dim() < 3 else tensor[[0, 1, 0]][:, inner, inner])
    gradients = incoming(call)
    outputs, grads = run(call, gradients)
    for place, tensor in enumerate(call.tensors):
        if tensor is not None and tensor.dim() > 2:
            launches.clear()
            ours = run(call.placed(place, far_apart(tensor)), gradients)
            is_added_by_pytorch = (call.name, place, tensor.shape[-1]) == ("norm_add", 1, SIZES["both norms apart"][1])
            assert is_added_by_pytorch or any(FAR in launch.numbers for launch in launches), "the kernels read a copy"
            assert_equal(ours[0], outputs, at_other_strides=True)
            assert_equal(ours[1], grads, at_other_strides=True)
    launches.clear()
    assert_equal(run(call, [far_apart(gradient) for gradient in gradients])[1], grads, at_other_strides=True)
    assert any(FAR in launch.numbers for launch in launches), "the kernels read a copy"


@EVERY_WAY
def test_what_is_not_finite_stays_in_its_row_as_in_stock(call: Call) -> None:
    if call.name == "causal_conv1d":
        pytest.skip("it reaches the rows behind it")
    gradients = incoming(call)
    healthy = run(call, gradients), run(call, gradients, operator=OPERATORS[call.name].reference)
    assert_stays_in_its_row(call, gradients, float("nan"), *healthy)
    if call.name not in ("glu", "expert_gate", "gated_rms_norm"):  # infinity times zero: see the tests of these
        assert_stays_in_its_row(call, gradients, float("inf"), *healthy)


Run = tuple[list[Tensor], list[Tensor | None]]
"""What ``run`` returns."""


def assert_stays_in_its_row(call: Call, gradients: list[Tensor], value: float, clean: Run, healthy: Run) -> None:
    """Compare runs with ``value`` in some rows; ``clean`` and ``healthy`` are kernel and stock runs without it."""
    reference = OPERATORS[call.name].reference

    def infected(place: int, tensor: Tensor) -> Tensor:
        sick = tensor.clone()
        sick[place // 2, 0, place % 2, 2] = value
        return sick

    sick = call
    for place, tensor in enumerate(call.tensors[:2]):
        sick = sick if tensor is None or tensor.dim() < 4 else sick.placed(place, infected(place, tensor))
    incoming_sick = [infected(2, gradient) for gradient in gradients]
    ours, stock = run(sick, incoming_sick), run(sick, incoming_sick, operator=reference)
    assert all(torch.equal(a.isinf(), b.isinf()) for a, b in zip(ours[0], stock[0], strict=True))
    for actual, whole, expected, well in zip(
        *(present([*result[0], *result[1]]) for result in (ours, clean, stock, healthy)), strict=True
    ):
        assert torch.equal(actual.isnan(), expected.isnan())
        if actual.dim() == 4:
            same = (expected == well).all(-1)
            assert same.any()
            assert torch.equal(actual[same], whole[same])


@pytest.mark.parametrize("empty", ["batch", "rows", "width"])
@pytest.mark.parametrize("case", [*ONE_OF_EACH, "heads rotated", "rotation cast"])
def test_empty_tensors_give_empty_results_and_zero_gradients(case: str, empty: str, device: str) -> None:
    call = every_call(device, rows=0 if empty == "rows" else 3, width=0 if empty == "width" else 16)[case]
    if empty == "batch":
        call = call.converted(lambda tensor: tensor[:0] if tensor.dim() > 2 else tensor)
    if empty == "width" and (case == "gated in groups" or (case in HEADS and case != "heads")):
        pytest.skip("nothing to rotate, or to group")
    outputs, grads = run(call, incoming(call), operator=OPERATORS[call.name].checked)
    assert all(output.numel() == 0 for output in outputs)
    for tensor, gradient in zip(call.tensors, grads, strict=False):
        assert (tensor is None) == (gradient is None)
        assert tensor is None or torch.equal(gradient, torch.zeros_like(tensor))


@CALLS
def test_float64_takes_the_reference(case: str, launches: list[Launch], device: str) -> None:
    call = every_call(device, dtype=torch.float64)[case].converted(Tensor.double)
    operator = OPERATORS[call.name]
    for ours, expected in zip(call.results(operator.checked), call.results(operator.reference), strict=True):
        assert ours.dtype == torch.float64
        assert torch.equal(ours, expected)
    # Clones, because each is moved separately.
    small = every_call(device, rows=1, width=4, dtype=torch.float64)[case].converted(Tensor.clone)
    leaves = small.leaves()
    places = [place for place in range(small.differentiated) if leaves[place] is not None]

    def outputs(*tensors: Tensor) -> tuple[Tensor, ...]:
        by_place = dict(zip(places, tensors, strict=True))
        return tuple(small.outputs([by_place.get(place, leaf) for place, leaf in enumerate(leaves)], operator.checked))

    assert torch.autograd.gradcheck(outputs, [leaves[place] for place in places])
    assert not launches
