"""Norms with an output for each consumer have the bits of one output that all consumers read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fused_norm.kernels.operator import OPERATORS
from fused_norm.spec import NormSpec

from .numerics import BF16, FP16, FP32, assert_same

MOST_CONSUMERS = 6
GEMMA, LLAMA = NormSpec("gemma", True), NormSpec("llama")
PLAIN: dict[str, tuple[Any, ...]] = {"rms_norm": (None,), "add_rms_norm": (None, 0.5), "norm_add_norm": ()}
"""The operators with a form for consumers, and the options of a call."""
DTYPES = {
    "bf16": (BF16, BF16, None), "bf16, uncast": (BF16, BF16, FP16), "autocast": (FP32, FP32, BF16),
    "mixed": (BF16, FP32, FP16),
}  # fmt: skip
"""The dtypes of the rows, of the weight, and of the casts of consumers, which are of float32 alone."""

NAMES = pytest.mark.parametrize("name", PLAIN)


def tensors_of(name: str, device: str, rows: torch.dtype, weight: torch.dtype, width: int = 48) -> list[Tensor]:
    """Draw leaves: rows of x and of a residual, and a weight for each norm."""
    tensors = [torch.randn(3, 5, width, device=device).to(rows) for _ in range(1 + (name != "rms_norm"))]
    tensors += [torch.randn(width, device=device).to(weight) for _ in range(1 + (name == "norm_add_norm"))]
    return [tensor.requires_grad_() for tensor in tensors]


def is_exact(tensors: Sequence[Tensor]) -> bool:
    """Return whether kernels sum alike for all dtypes of gradients: on a GPU only for 16-bit tensors."""
    return not tensors[0].is_cuda or all(tensor.dtype == BF16 for tensor in tensors)


def for_consumers(name: str) -> Any:
    return OPERATORS[f"{name}_for_consumers"]


def options_of(name: str, consumers: int, dtype: torch.dtype | None, wide: int = 0) -> tuple[Any, ...]:
    return (*PLAIN[name][1:], consumers, dtype, wide)


def read(ys: Sequence[Tensor], s: Tensor, unread: Sequence[int] = ()) -> Tensor:
    """Return a number that depends on y through consumers like linears, and on s."""
    generator = torch.Generator().manual_seed(1)
    total = s.float().square().sum()
    for place, y in enumerate(ys):
        matrix = torch.randn(y.shape[-1], 7, generator=generator).to(y)
        if place not in unread:
            total = total + (y @ matrix).float().sin().sum()
    return total


def stock(name: str, spec: NormSpec, tensors: Sequence[Tensor], consumers: int, dtype: torch.dtype | None) -> Any:
    """Call the plain operator and cast y for each consumer as autocast does; autograd sums the gradients."""
    x = tensors[0] * 1
    result = OPERATORS[name](x, *tensors[1:], spec, *PLAIN[name])
    y, s = (result, x) if name == "rms_norm" else result
    is_cast = dtype is not None and y.dtype == FP32
    return [y.to(dtype) if is_cast else y for _ in range(consumers)], s


def fused(name: str, spec: NormSpec, tensors: Sequence[Tensor], consumers: int, dtype: torch.dtype | None) -> Any:
    *ys, s = for_consumers(name)(tensors[0] * 1, *tensors[1:], spec, *options_of(name, consumers, dtype))
    return ys, s


def results(call: Callable[..., Any], tensors: Sequence[Tensor], *args: Any, unread: Sequence[int] = ()) -> list[Any]:
    """Return all outputs and the gradients of the tensors."""
    ys, s = call(*args)
    gradients = torch.autograd.grad(read(ys, s, unread), tensors, allow_unused=True)
    return [*(y.detach() for y in ys), s.detach(), *gradients]


@NAMES
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize(("consumers", "spec"), [(1, GEMMA), (2, GEMMA), (MOST_CONSUMERS, LLAMA)], ids=str)
def test_every_bit_is_that_of_one_output_that_all_read(
    name: str, dtypes: str, consumers: int, spec: NormSpec, device: str
) -> None:
    rows, weight, dtype = DTYPES[dtypes]
    tensors = tensors_of(name, device, rows, weight)
    args = name, spec, tensors, consumers, dtype
    expected = results(stock, tensors, *args)
    modes = nullcontext(), nullcontext(), FlopCounterMode(display=False)  # recorded, repeated, and registered
    for mode in modes if consumers > 1 else modes[:1]:
        with mode:
            assert_same(results(fused, tensors, *args), expected, exact=is_exact(tensors))
    for _ in range(2):
        with torch.no_grad():
            actual = for_consumers(name)(*tensors, spec, *options_of(name, consumers, dtype))
        assert_same(actual, [expected[0], expected[consumers]], exact=is_exact(tensors))
        assert not any(result.requires_grad for result in actual if result is not tensors[0])


@NAMES
@pytest.mark.parametrize("unread", [(2,), (0, 1), (0, 1, 2)], ids=str)
def test_a_consumer_that_does_not_run_adds_nothing(name: str, unread: tuple[int, ...], device: str) -> None:
    tensors = tensors_of(name, device, BF16, BF16)
    args = name, LLAMA, tensors, 3, None
    expected, actual = (results(call, tensors, *args, unread=unread) for call in (stock, fused))
    assert [result is None for result in actual] == [result is None for result in expected]
    present = [[result for result in group if result is not None] for group in (actual, expected)]
    assert_same(*present, exact=True)


@pytest.mark.parametrize(("way", "width"), [("in_two_pieces", 47), ("in_chunks", 145)])
def test_rows_that_are_read_in_parts(way: str, width: int, request: pytest.FixtureRequest, device: str) -> None:
    request.getfixturevalue(way)
    for rows, weight, dtype in (DTYPES["bf16"], DTYPES["mixed"], DTYPES["autocast"]):
        name = "rms_norm" if dtype is None else "add_rms_norm"
        tensors = tensors_of(name, device, rows, weight, width)
        args = name, LLAMA, tensors, 3, dtype
        assert_same(results(fused, tensors, *args), results(stock, tensors, *args), exact=is_exact(tensors))


@NAMES
def test_gradients_can_be_differentiated(name: str, device: str) -> None:
    tensors = tensors_of(name, device, FP32, FP32)
    for call in (stock, fused):
        ys, s = call(name, LLAMA, tensors, 3, None)
        (first,) = torch.autograd.grad(read(ys, s), tensors[:1], create_graph=True)
        second = torch.autograd.grad(first.square().sum(), tensors[1:])
        if call is stock:
            expected = second
    for a, b in zip(second, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@NAMES
def test_outputs_are_one_tensor_in_memory_and_none_is_a_view(name: str, device: str) -> None:
    tensors = tensors_of(name, device, BF16, BF16)
    for _ in range(2):
        ys, s = fused(name, LLAMA, tensors, 3, None)
        assert len({id(y) for y in ys}) == 3
        assert len({y.data_ptr() for y in ys}) == 1
        assert not any(y._is_view() for y in (*ys, s))
        assert all(y.requires_grad for y in (*ys, s))
    first = torch.autograd.grad(read(ys, s), tensors, retain_graph=True)
    assert_same(torch.autograd.grad(read(ys, s), tensors, retain_graph=True), first)
    total = (ys[0] @ ys[1].detach().mT.requires_grad_()).sum()  # a product that saves the first output
    with torch.no_grad():
        ys[2].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize(
    ("name", "wide", "width"),
    [
        *(("rms_norm", 0b1, 48), ("rms_norm", 0b111, 48), ("add_rms_norm", 0b10, 48), ("norm_add_norm", 0b101, 48)),
        *(("rms_norm", 0b101, 145), ("add_rms_norm", 0b101, 145)),
    ],
)
def test_some_consumers_read_float32(
    name: str, wide: int, width: int, device: str, request: pytest.FixtureRequest
) -> None:
    """The others read 16 bits; all gradients are summed in float32, beginning with the last consumer's."""
    if width > 48:
        request.getfixturevalue("in_chunks")
    tensors = tensors_of(name, device, FP32, FP32, width)
    of_one = [bool(wide >> place & 1) for place in range(3)]

    def results_of(ys: Sequence[Tensor], s: Tensor, unread: int | None) -> list[Tensor]:
        cast = [y.detach().to(FP32 if is_wide else BF16) for y, is_wide in zip(ys, of_one, strict=True)]
        total = read([], s)
        for place, y in enumerate(ys):
            if place != unread:
                total = total + read([y if of_one[place] else y.to(BF16)], torch.zeros(1, device=device))
        return [*cast, s, *torch.autograd.grad(total, tensors)]

    for unread in (None, 0, 2):
        (y,), s = stock(name, LLAMA, tensors, 1, None)
        expected = results_of([y] * 3, s, unread)
        for _ in range(2):  # recorded, and repeated
            *ys, s = for_consumers(name)(tensors[0] * 1, *tensors[1:], LLAMA, *options_of(name, 3, BF16, wide))
            assert [y.dtype for y in ys] == [FP32 if is_wide else BF16 for is_wide in of_one]
            for a, b in zip(results_of(ys, s, unread), expected, strict=True):
                assert a.dtype == b.dtype
                if is_exact(tensors) and width == 48:
                    assert torch.equal(a, b)
                else:  # a GPU sums rows in another order, after which a number may be rounded the other way
                    assert (a.double() - b.double()).norm() < 1e-3 * b.double().norm()
    with torch.no_grad():
        assert len(for_consumers(name)(*tensors, LLAMA, *options_of(name, 3, BF16, wide))) == 4


def test_a_frozen_input_is_handed_on_without_a_gradient(device: str) -> None:
    x, weight = tensors_of("rms_norm", device, BF16, BF16)
    for _ in range(2):
        *ys, s = for_consumers("rms_norm")(x.detach(), weight, LLAMA, 2, None, 0)
        assert not s.requires_grad
        (grad,) = torch.autograd.grad(read(ys, s), [weight])
        ys, s = stock("rms_norm", LLAMA, (x.detach(), weight), 2, None)
        assert torch.equal(grad, torch.autograd.grad(read(ys, s), [weight])[0])


def test_gradients_that_lie_otherwise_are_read_where_they_are(device: str) -> None:
    tensors = tensors_of("add_rms_norm", device, BF16, BF16)
    outgoing = [torch.randn(5, 3, 48, device=device).to(BF16).transpose(0, 1) for _ in range(3)]
    gradients = []
    for call in (stock, fused):
        ys, s = call("add_rms_norm", LLAMA, tensors, 3, None)
        total = sum((y.float() * dy.float()).sum() for y, dy in zip(ys, outgoing, strict=True))
        gradients.append(torch.autograd.grad(total + s.float().sum(), tensors))
    assert_same(gradients[1], gradients[0], exact=True)
