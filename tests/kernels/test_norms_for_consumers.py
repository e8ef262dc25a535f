"""Norms with an output for each consumer have the bits of one output that all consumers read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fused_norm.spec import NormSpec

from .conftest import OPERATORS
from .numerics import BF16, FP16, FP32, assert_same

GEMMA, LLAMA = NormSpec("gemma", True), NormSpec("llama")
PLAIN: dict[str, tuple[Any, ...]] = {"rms_norm": (None,), "add_rms_norm": (None, 0.5), "norm_add_norm": ()}
"""The operators with a form for consumers, and the options of a call."""
DTYPES = {"bf16": (BF16, BF16, None), "autocast": (FP32, FP32, BF16), "mixed": (BF16, FP32, FP16)}
"""The dtypes of the rows, of the weight, and of the casts of consumers, which are of float32 alone."""


def tensors_of(name: str, device: str, rows: torch.dtype, weight: torch.dtype) -> list[Tensor]:
    """Draw leaves: rows of x and of a residual, and a weight for each norm."""
    tensors = [torch.randn(3, 5, 48, device=device).to(rows) for _ in range(1 + (name != "rms_norm"))]
    tensors += [torch.randn(48, device=device).to(weight) for _ in range(1 + (name == "norm_add_norm"))]
    return [tensor.requires_grad_() for tensor in tensors]


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


def fused(
    name: str, spec: NormSpec, tensors: Sequence[Tensor], consumers: int, dtype: torch.dtype | None, wide: int = 0
) -> Any:
    operator = OPERATORS[f"{name}_for_consumers"]
    *ys, s = operator(tensors[0] * 1, *tensors[1:], spec, *PLAIN[name][1:], consumers, dtype, wide)
    return ys, s


def results(call: Callable[..., Any], tensors: Sequence[Tensor], *args: Any, unread: Sequence[int] = ()) -> list[Any]:
    """Return all outputs and the gradients of the tensors."""
    ys, s = call(*args)
    gradients = torch.autograd.grad(read(ys, s, unread), tensors, allow_unused=True)
    return [*(y.detach() for y in ys), s.detach(), *gradients]


def assert_same_results(actual: Sequence[Any], expected: Sequence[Any], tensors: Sequence[Tensor]) -> None:
    """On a GPU kernels sum alike for all dtypes of gradients only if all tensors have 16 bits."""
    assert [result is None for result in actual] == [result is None for result in expected]
    present = [[result for result in group if result is not None] for group in (actual, expected)]
    assert_same(*present, exact=not tensors[0].is_cuda or all(tensor.dtype == BF16 for tensor in tensors))


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize(
    ("consumers", "spec", "unread"),
    [(1, GEMMA, ()), (3, GEMMA, (0, 1)), (3, LLAMA, (0, 1, 2)), (6, LLAMA, ())],
    ids=str,
)
def test_every_bit_is_that_of_one_output_that_all_read(
    name: str, dtypes: str, consumers: int, spec: NormSpec, unread: tuple[int, ...], device: str
) -> None:
    rows, weight, dtype = DTYPES[dtypes]
    tensors = tensors_of(name, device, rows, weight)
    args = name, spec, tensors, consumers, dtype
    expected = results(stock, tensors, *args, unread=unread)
    modes = nullcontext(), nullcontext(), FlopCounterMode(display=False)  # recorded, repeated, and registered
    for mode in modes if consumers > 3 else modes[:1]:
        with mode:
            assert_same_results(results(fused, tensors, *args, unread=unread), expected, tensors)


def test_gradients_can_be_differentiated(device: str) -> None:
    name = "norm_add_norm"
    tensors = tensors_of(name, device, FP32, FP32)
    seconds = []
    for call in (stock, fused):
        ys, s = call(name, LLAMA, tensors, 3, None)
        (first,) = torch.autograd.grad(read(ys, s), tensors[:1], create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), tensors[1:]))
    for a, b in zip(*seconds, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "wide"), [("rms_norm", 0b101), ("norm_add_norm", 0b10)])
def test_some_consumers_read_float32(name: str, wide: int, device: str) -> None:
    tensors = tensors_of(name, device, FP32, FP32)
    of_one = [bool(wide >> place & 1) for place in range(3)]

    def gradients(ys: Sequence[Tensor], s: Tensor, unread: int | None) -> tuple[Tensor, ...]:
        total = read([], s)
        for place, y in enumerate(ys):
            if place != unread:
                total = total + read([y if of_one[place] else y.to(BF16)], torch.zeros(1, device=device))
        return torch.autograd.grad(total, tensors)

    for unread in (None, 0, 2):
        (y,), s = stock(name, LLAMA, tensors, 1, None)
        expected = gradients([y] * 3, s, unread)
        for _ in range(2):  # recorded, and repeated
            actual, handed_on = fused(name, LLAMA, tensors, 3, BF16, wide)
            assert [mine.dtype for mine in actual] == [FP32 if is_wide else BF16 for is_wide in of_one]
            assert len({id(mine) for mine in actual}) == 3
            for mine, theirs in zip(gradients(actual, handed_on, unread), expected, strict=True):
                assert mine.dtype == theirs.dtype
                # A GPU sums rows in another order, after which a number may be rounded the other way.
                assert (mine.double() - theirs.double()).norm() <= (1e-3 if y.is_cuda else 0) * theirs.double().norm()
    with torch.no_grad():
        ys, _ = fused(name, LLAMA, tensors, 3, BF16, wide)
    assert len(ys) == 3
    assert not any(y.requires_grad for y in ys)


def test_outputs_are_one_tensor_in_memory_that_is_not_written_into_unnoticed(device: str) -> None:
    tensors = tensors_of("rms_norm", device, BF16, BF16)
    ys, _ = fused("rms_norm", LLAMA, tensors, 3, None)
    assert len({y.data_ptr() for y in ys}) == 1
    total = (ys[0] @ ys[1].detach().mT.requires_grad_()).sum()  # a product that saves the first output
    with torch.no_grad():
        ys[2].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
