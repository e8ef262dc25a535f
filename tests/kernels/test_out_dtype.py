"""q and k written in 16 bits instead of float32: one more rounding in the forward, and no other difference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fused_norm.spec import NormSpec

from .conftest import OPERATORS
from .numerics import BF16, FP16, FP32, assert_same

KINDS = ("norm", "norm and rotation", "rotation", "rotation in fp32")


def arguments(kind: str, device: str, x: torch.dtype, w: torch.dtype, angles: torch.dtype, rotary: int) -> Any:
    """Return an operator and arguments without the dtype; q and k are wide enough for roundings to differ."""
    torch.manual_seed(0)
    q, k = (torch.randn(2, 9, heads, 16, device=device).to(x).transpose(1, 2).requires_grad_() for heads in (4, 2))
    cos, sin = torch.randn(2, 2, 9, rotary, device=device).to(angles)
    if kind.startswith("rotation"):
        return OPERATORS["rope"], (q, k, cos, sin, 1, kind == "rotation in fp32", "half", False)
    weights = [torch.randn(16, device=device).to(w).requires_grad_() for _ in range(2)]
    rotation = (cos, sin) if kind == "norm and rotation" else (None, None)
    return OPERATORS["qk_norm"], (q, k, *weights, *rotation, NormSpec("llama"), 1)


def results(operator: Any, args: tuple[Any, ...], dtype: torch.dtype | None, incoming: Any) -> tuple[Any, Any]:
    """Return the outputs and the gradients of all tensors that require one."""
    outputs = operator(*args, dtype)
    inputs = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
    back = [dy.to(y.dtype) for dy, y in zip(incoming, outputs, strict=True)]
    return outputs, torch.autograd.grad(outputs, inputs, back)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rotary", [16, 8])
@pytest.mark.parametrize(
    ("x", "w", "angles"), [(FP32, FP32, FP32), (BF16, FP32, FP32), (FP32, FP32, BF16), (BF16, BF16, BF16)], ids=str
)
def test_only_float32_is_written_otherwise_and_rounded_once(
    kind: str, rotary: int, x: torch.dtype, w: torch.dtype, angles: torch.dtype, device: str
) -> None:
    operator, args = arguments(kind, device, x, w, angles, rotary)
    for dtype in (BF16, FP16):
        incoming = [torch.randn(arg.shape, device=device).to(dtype) for arg in args[:2]]
        stock, expected = results(operator, args, None, incoming)
        outputs, grads = results(operator, args, dtype, incoming)
        by_formula = operator.reference(*args, dtype)
        for ours, theirs, formula in zip(outputs, stock, by_formula, strict=True):
            expected_dtype = dtype if theirs.dtype == FP32 else theirs.dtype
            assert (ours.dtype, formula.dtype) == (expected_dtype, expected_dtype)
            assert_same([ours], [theirs.to(expected_dtype)], exact=device == "cpu")
            assert ours.stride() == theirs.stride()
            if kind.startswith("rotation"):
                assert_same([ours], [formula], exact=device == "cpu")
        if stock[0].dtype == FP32:  # otherwise their incoming gradients are rounded twice
            assert_same(grads, expected, exact=device == "cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_16_bits_are_differentiated_in_turn(kind: str, device: str) -> None:
    operator, args = arguments(kind, device, FP32, FP32, FP32, 16)
    incoming = [torch.randn(arg.shape, device=device).to(BF16) for arg in args[:2]]
    second = []
    for dtype in (None, BF16):
        outputs = operator(*args, dtype)
        back = [dy.to(y.dtype).requires_grad_() for dy, y in zip(incoming, outputs, strict=True)]
        first = torch.autograd.grad(outputs, args[:2], back, create_graph=True)
        second.append(torch.autograd.grad(sum(grad.sin().sum() for grad in first), back))
    for wide, narrow in zip(*second, strict=True):
        assert torch.equal(wide.to(BF16), narrow)
