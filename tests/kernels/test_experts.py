"""What experts compute around their products: outputs and gradients, held against stock code and float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_norm.kernels import expert_bias, expert_gate, expert_permute, expert_unpermute
from fused_norm.kernels.triton.call import Call

from ..conftest import slow, slow_rows
from .conftest import OPERATORS
from .numerics import ACTIVATIONS, BF16, FP16, FP32, Tensors, assert_near, assert_same, drawn, run

EXPERT_GATE, EXPERT_PERMUTE = OPERATORS["expert_gate"], OPERATORS["expert_permute"]
GATES: list[tuple[Any, ...]] = [
    ("silu", False, None, None),
    ("gelu_tanh", False, None, None),
    ("silu", True, 1.5, 1.702),
    ("gelu", True, None, None),
    ("silu", False, 1.5, None),
    ("silu", False, 1.5, 1.702),
]
EVERY_GATE = pytest.mark.parametrize("gate", [*GATES[:3], *slow(*GATES[3:])], ids=str)


def stock_gate(x: Tensor, absent: Tensor | None, activation: str, interleaved: bool, limit: Any, alpha: Any) -> Tensor:
    """Compute the gate as modelling code does, with the rows of absent experts filled as in transformers."""
    x = x if absent is None else x.masked_fill(absent.unsqueeze(-1), 0.0)
    gate, up = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(min=None, max=limit), up.clamp(min=-limit, max=limit)
    if alpha is None:
        return ACTIVATIONS[activation](gate) * up
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def rows_of_experts(device: str, tokens: int, count: int, num_absent: int = 0) -> tuple[Tensor, Tensor]:
    """Return ``position`` for tokens that go to ``count`` experts each, and ``absent``, which marks the last rows."""
    order = torch.randperm(tokens * count, generator=torch.Generator().manual_seed(3))
    absent = torch.arange(tokens * count) >= tokens * count - num_absent
    return order.view(tokens, count).to(device), absent.to(device)


def sorted_experts(device: str, rows: Sequence[int], num_absent: int = 0) -> tuple[Tensor, Tensor]:
    """Return the expert of each row and ``ends`` for experts with these ``rows``; the last rows belong to no expert."""
    counts = torch.tensor(rows)
    expert = torch.arange(len(rows)).repeat_interleave(counts)
    expert = torch.cat([expert, torch.full((num_absent,), len(rows) - 1)])
    return expert.to(device), counts.cumsum(0).int().to(device)


def poisoned(tensor: Tensor, absent: Tensor) -> Tensor:
    """Return the tensor as a grouped product leaves it: rows of absent experts are undefined."""
    return tensor.masked_fill(absent.unsqueeze(-1), torch.nan)


def gate_inputs(device: str, rows: int, width: int, dtype: torch.dtype) -> Tensors:
    return drawn(device, x=((rows, 2 * width), dtype, 2.0), dy=((rows, width), dtype, 1.0))


def weighted_inputs(device: str, tokens: int, count: int, width: int, x: torch.dtype, weights: torch.dtype) -> Tensors:
    return drawn(
        device,
        x=((tokens * count, width), x, 1.0),
        weights=((tokens, count), weights, 1.0),
        dy=((tokens, width), x, 1.0),
    )


def assert_gate_right(device: str, rows: int, width: int, dtype: torch.dtype, gate: tuple[Any, ...]) -> None:
    inputs = gate_inputs(device, rows, width, dtype)
    activation, interleaved, limit, alpha = gate
    ours = run(lambda x: expert_gate(x, None, activation, interleaved=interleaved, limit=limit, alpha=alpha), inputs)
    theirs, float64 = (
        run(lambda x: stock_gate(x, None, *gate), tensors) for tensors in (inputs, inputs.mapped(Tensor.double))
    )
    assert_near(ours, theirs, float64, {})


@pytest.mark.parametrize(
    ("dtype", "gate"), [*((BF16, gate) for gate in GATES), (FP32, GATES[2]), (FP16, GATES[1])], ids=str
)
def test_a_gate_is_as_accurate_as_stock(dtype: torch.dtype, gate: tuple[Any, ...], device: str) -> None:
    assert_gate_right(device, 5, 40, dtype, gate)


@pytest.mark.parametrize("width", [1, 17, 300, *slow(1023)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_every_width_of_a_gate(width: int, interleaved: bool, device: str) -> None:
    assert_gate_right(device, 3, width, BF16, ("silu", interleaved, 1.5, 1.702))


@pytest.mark.parametrize(
    ("gate", "dtype"), [(GATES[0], FP16), *((gate, BF16) for gate in GATES if gate[0] == "silu")], ids=str
)
def test_each_operation_of_a_gate_is_rounded(gate: tuple[Any, ...], dtype: torch.dtype, device: str) -> None:
    x = gate_inputs(device, 20, 512, dtype).x
    ours = EXPERT_GATE(x, None, *gate)
    assert (ours != stock_gate(x, None, *gate)).double().mean() < 2e-3
    unrounded = stock_gate(x.float(), None, *gate).to(dtype)
    assert (ours != unrounded).double().mean() > 0.05, "one rounding is told from several"
    x.requires_grad_()
    gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (EXPERT_GATE(x, None, *gate), stock_gate(x, None, *gate))]
    dup, expected = (dx[:, 1::2] if gate[1] else dx[:, 512:] for dx in gradients)
    assert (dup != expected).double().mean() < 2e-3


@EVERY_GATE
def test_rows_of_absent_experts_are_not_read(gate: tuple[Any, ...], device: str) -> None:
    inputs = gate_inputs(device, 9, 24, BF16)
    absent = torch.arange(9, device=device) >= 6
    expected = run(lambda x: EXPERT_GATE(x, absent, *gate), inputs)
    sick = inputs.but(x=poisoned(inputs.x, absent), dy=poisoned(inputs.dy, absent))
    ours = run(lambda x: EXPERT_GATE(x, absent, *gate), sick)
    alone = run(lambda x: EXPERT_GATE(x, None, *gate), inputs.mapped(lambda tensor: tensor[:6]))
    assert_same(ours, expected)
    assert_same(ours.mapped(lambda tensor: tensor[:6]), alone)
    assert not any(value[6:].any() for value in ours.present().values())


def test_a_limit_is_inside_and_what_is_beyond_has_no_gradient(device: str) -> None:
    x = torch.tensor([[2.0, 3.0, -9.0, 2.0, -2.0, -2.5]], device=device).requires_grad_()  # gates, then ups
    y = expert_gate(x, limit=2.0)
    (dx,) = torch.autograd.grad(y.sum(), x)
    expected = stock_gate(x, None, "silu", False, 2.0, None)
    (dexpected,) = torch.autograd.grad(expected.sum(), x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(dx, dexpected)
    assert (dx != 0).tolist()[0][1::4] == [False, False]


@pytest.mark.parametrize(
    ("dtype", "tokens", "count", "width"),
    [(BF16, 5, 3, 37), (FP32, 4, 1, 16), (BF16, 2, 8, 130), *slow_rows((FP16, 33, 6, 600))],
    ids=str,
)
def test_rows_go_to_experts_and_their_gradients_are_summed_once(
    dtype: torch.dtype, tokens: int, count: int, width: int, device: str
) -> None:
    position, absent = rows_of_experts(device, tokens, count, num_absent=2)
    inputs = drawn(device, x=((tokens, width), dtype, 1.0), dy=((tokens * count, width), dtype, 1.0))
    inputs = inputs.but(dy=poisoned(inputs.dy, absent))
    ours = run(lambda x: expert_permute(x, position, absent), inputs)
    expected = torch.empty_like(inputs.dy)
    for token, places in enumerate(position.tolist()):
        for place in places:
            expected[place] = 0 if absent[place] else inputs.x[token]
    assert torch.equal(ours.y, expected)
    present, total = inputs.dy.masked_fill(absent.unsqueeze(-1), 0).float(), torch.zeros(tokens, width, device=device)
    for k in range(count):
        total += present[position[:, k]]
    assert torch.equal(ours.dx, total.to(dtype)), "in fp32, in the order of k, rounded once"


@pytest.mark.parametrize(
    ("dtype", "rows", "width"),
    [(BF16, (5, 0, 70, 1), 37), (FP32, (3,), 16), (BF16, (0, 40, 33, 0), 130), *slow_rows((FP16, (200, 9), 600))],
    ids=str,
)
def test_rows_get_the_bias_of_their_expert_whose_gradient_is_summed_once(
    dtype: torch.dtype, rows: tuple[int, ...], width: int, device: str
) -> None:
    expert, ends = sorted_experts(device, rows, num_absent=3)
    inputs = drawn(device, bias=((len(rows), width), dtype, 1.0), dy=((len(expert), width), dtype, 1.0))
    is_after = torch.arange(len(expert), device=device) >= ends[-1]
    ours = run(lambda bias: expert_bias(bias, expert, ends), inputs.but(dy=poisoned(inputs.dy, is_after)))
    assert torch.equal(ours.y, inputs.bias[expert].masked_fill(is_after.unsqueeze(-1), 0))
    whole = inputs.mapped(lambda tensor: tensor.mul(4).round())  # sums in fp32 are exact
    summed = run(lambda bias: expert_bias(bias, expert, ends), whole)
    exact = torch.stack([part.double().sum(0) for part in whole.dy[: sum(rows)].split(rows)])
    assert torch.equal(summed.dbias, exact.to(dtype)), "in fp32, rounded once"
    exact = torch.stack([part.double().sum(0) for part in inputs.dy[: sum(rows)].split(rows)])
    near = {FP32: 1e-5, FP16: 1e-3, BF16: 6e-3}[dtype]
    torch.testing.assert_close(ours.dbias.double(), exact, rtol=near, atol=near)


@pytest.mark.parametrize(
    ("x", "weights", "tokens", "count", "width"),
    [(BF16, FP32, 5, 3, 37), (BF16, BF16, 4, 1, 16), (FP32, FP32, 2, 8, 130), *slow_rows((FP16, FP16, 9, 4, 5000))],
    ids=str,
)
def test_weighted_sums_are_as_accurate_as_stock(
    x: torch.dtype, weights: torch.dtype, tokens: int, count: int, width: int, device: str
) -> None:
    position, absent = rows_of_experts(device, tokens, count, num_absent=2)
    inputs = weighted_inputs(device, tokens, count, width, x, weights)
    clean = inputs.but(x=inputs.x.masked_fill(absent.unsqueeze(-1), 0))

    def stock(x: Tensor, weights: Tensor) -> Tensor:
        present = x.masked_fill(absent.unsqueeze(-1), 0.0)
        weighted = present[position.flatten()] * weights.reshape(-1, 1)
        return weighted.view(tokens, count, width).sum(dim=1).to(x.dtype)

    sick = inputs.but(x=poisoned(inputs.x, absent))
    ours = run(lambda x, weights: expert_unpermute(x, weights, position, absent), sick)
    theirs, float64 = run(stock, clean), run(stock, clean.mapped(Tensor.double))
    terms = (clean.x.double().abs()[position] * inputs.dy.double().abs()[:, None]).sum(-1).amax(-1, keepdim=True)
    assert_near(ours, theirs, float64, {"dweights": terms, "dx": torch.ones_like(float64.dx[:, :1])})


def test_weighted_rows_and_their_sum_are_rounded(device: str) -> None:
    position, _ = rows_of_experts(device, 8, 4)
    inputs = weighted_inputs(device, 8, 4, 64, BF16, BF16)
    ours = expert_unpermute(inputs.x, inputs.weights, position)
    weighted = inputs.x[position] * inputs.weights[..., None]
    total = torch.zeros(8, 64, device=device)
    for k in range(4):
        total += weighted[:, k].float()
    assert torch.equal(ours, total.to(BF16))
    unrounded = (inputs.x.float()[position] * inputs.weights.float()[..., None]).sum(1).to(BF16)
    assert (ours != unrounded).double().mean() > 0.05
    wide = expert_unpermute(inputs.x, inputs.weights, position, dtype=FP32)
    assert wide.dtype == FP32
    assert torch.equal(wide, ours.float()), "the sum is rounded before it is cast"


def calls(device: str, dtype: torch.dtype = FP32) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    position, absent = rows_of_experts(device, 4, 3, num_absent=2)
    x, rows, gate_up = (torch.randn(shape, device=device).to(dtype) for shape in ((4, 10), (12, 10), (12, 20)))
    weights = torch.rand(4, 3, device=device)
    expert, ends = sorted_experts(device, (5, 0, 4, 1), num_absent=2)
    return {
        "bias": (OPERATORS["expert_bias"], (torch.randn(4, 10, device=device).to(dtype), expert, ends)),
        "gate": (EXPERT_GATE, (gate_up, absent, "silu", True, 1.5, 1.702)),
        "permute": (EXPERT_PERMUTE, (x, position, absent)),
        "unpermute": (OPERATORS["expert_unpermute"], (rows, weights, position, absent, dtype)),
    }


EACH = pytest.mark.parametrize("name", ["bias", "gate", "permute", "unpermute"])


def leaves_of(operator: Any, arguments: tuple[Any, ...]) -> tuple[list[Any], list[Tensor]]:
    count = len(operator.gradients)
    leaves = [argument.detach().clone().requires_grad_() for argument in arguments[:count]]
    return [*leaves, *arguments[count:]], leaves


@EACH
def test_each_is_a_registered_operator(name: str, device: str) -> None:
    operator, arguments = calls(device)[name]
    for training in (True, False):
        torch.library.opcheck(operator._forward_op, (*arguments, training))
    result = Call.at_once(operator.forward, *arguments, training=True)
    saved, facts = operator.save(arguments, result)
    needed = [True] * len(operator.gradients)
    torch.library.opcheck(operator._backward_op, (torch.randn_like(result[0]), *saved, *facts, *needed))


@EACH
def test_kernels_and_formula_agree_in_every_form_of_a_call(name: str, device: str) -> None:
    operator, arguments = calls(device)[name]
    (args, leaves), results = leaves_of(operator, arguments), []
    for call in (operator, operator.reference):
        y = call(*args)
        first = torch.autograd.grad(y.sin().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(grad.square().sum() for grad in first), leaves)
        repeated = torch.autograd.grad(call(*args).sin().sum(), leaves)
        incoming = torch.stack([y.detach().sin(), y.detach().cos()])
        batched = torch.autograd.grad(call(*args), leaves, incoming, is_grads_batched=True)
        results.append([y, *first, *second, *repeated, *batched])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    exact = tuple(
        argument.double() if isinstance(argument, Tensor) and argument.is_floating_point() else argument
        for argument in arguments
    )
    assert operator.checked(*exact).dtype in (torch.float64, FP32), "float64 takes the reference"


@EACH
def test_a_call_repeats_its_bits_in_any_layout_and_writes_to_nothing(name: str, device: str) -> None:
    operator, arguments = calls(device, BF16)[name]
    before = [argument.clone() for argument in arguments if isinstance(argument, Tensor)]

    def results(arguments: tuple[Any, ...]) -> list[Tensor]:
        args, leaves = leaves_of(operator, arguments)
        y = operator(*args)
        return [y, *torch.autograd.grad(y, leaves, torch.linspace(-1, 1, y.numel(), device=device).view_as(y).to(y))]

    first, second = results(arguments), results(arguments)

    def spread(argument: Any) -> Any:
        return argument.repeat_interleave(2, -1)[..., ::2] if isinstance(argument, Tensor) else argument

    spaced = results(tuple(map(spread, arguments)))
    for result, *repeats in zip(first, second, spaced, strict=True):
        assert all(torch.equal(result, again) for again in repeats)
    after = [argument for argument in arguments if isinstance(argument, Tensor)]
    assert_same(before, after)


@EACH
def test_no_rows_are_no_launch(name: str, device: str) -> None:
    operator, arguments = calls(device)[name]
    empty = tuple(argument[:0] if isinstance(argument, Tensor) else argument for argument in arguments)
    args, leaves = leaves_of(operator, empty)
    y = operator.checked(*args)
    assert y.shape[0] == 0
    assert all(grad.shape[0] == 0 for grad in torch.autograd.grad(y.sum(), leaves))


def test_the_formula_of_a_permutation_is_stocks(device: str) -> None:
    position, _ = rows_of_experts(device, 6, 2)
    x = torch.randn(6, 24, device=device)
    assert torch.equal(EXPERT_PERMUTE.reference(x, position, None), x[torch.argsort(position.flatten()) // 2])
