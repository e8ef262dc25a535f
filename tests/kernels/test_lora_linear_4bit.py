"""lora_linear_4bit: the bits of a product with the dequantised weight and of ``lora_add``, in each form of a call."""

from __future__ import annotations

import itertools
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from fused_norm.kernels.lora_add import LORA_ADD
from fused_norm.kernels.lora_linear_4bit import LORA_LINEAR_4BIT, LORA_SUMMANDS_4BIT

from .numerics import BF16, FP16, FP32, slow
from .test_dequantize import parts_of

FACTOR, K, N, RANK = 0.7, 64, 96, 4


class FourBit:
    """A weight in 4 bits with a bias, and its adapter."""

    def __init__(self, device: str, dtype: torch.dtype, factors: torch.dtype, *, bias: bool = False) -> None:
        self.dtype = dtype
        self.codes, self.state = bnb.quantize_4bit(
            torch.randn(N, K, device=device).to(dtype), quant_type="nf4", compress_statistics=True
        )
        self.bias = torch.randn(N, device=device).to(dtype) if bias else None
        self.a = (torch.randn(RANK, K, device=device) / 8).to(factors)
        self.b = torch.randn(N, RANK, device=device).to(factors)

    def fused(self, x: Tensor, adapter_x: Tensor, a: Tensor, b: Tensor, y_dtype: torch.dtype) -> Tensor:
        options = self.bias, self.state.blocksize, FACTOR, self.dtype, y_dtype
        return LORA_LINEAR_4BIT(x, adapter_x, a, b, *parts_of(self.codes, self.state), *options)

    def stock(self, x: Tensor, adapter_x: Tensor, a: Tensor, b: Tensor, y_dtype: torch.dtype) -> Tensor:
        weight = bnb.dequantize_4bit(self.codes, self.state).to(self.dtype)
        base = linear(x.to(self.dtype), weight, self.bias).to(y_dtype)
        return LORA_ADD(base, adapter_x.to(self.dtype), a, b, FACTOR)


def results(way: Any, layer: FourBit, x: Tensor, y_dtype: torch.dtype, dropped: bool, needed: str) -> list[Any]:
    """The output and the gradients of x, a and b, if their letters are among the ``needed``."""
    leaves = [
        one.clone().requires_grad_(name in needed) for name, one in zip("xab", (x, layer.a, layer.b), strict=True)
    ]
    wide, a, b = leaves
    y = way(wide, wide * 0.5 if dropped else wide, a, b, y_dtype)
    dy = torch.linspace(-1, 2, y.numel(), device=y.device).view_as(y).to(y.dtype)
    return [y, *torch.autograd.grad(y, [one for one in leaves if one.requires_grad], dy)]


FORMS = [(FP32, FP32, BF16), (BF16, BF16, BF16), (BF16, FP32, BF16), *slow((FP32, FP32, FP16), (FP16, FP16, FP16))]
"""The dtypes of x, of the output and of products."""


@pytest.mark.parametrize("needed", ["xab", "ab", "a"])
@pytest.mark.parametrize("dtypes", FORMS, ids=str)
def test_a_call_has_the_bits_of_a_product_and_of_lora_add(
    dtypes: tuple[torch.dtype, ...], needed: str, device: str
) -> None:
    x_dtype, y_dtype, dtype = dtypes
    for bias, dropped, factors in itertools.product((False, True), (False, True), (FP32, dtype)):
        layer = FourBit(device, dtype, factors, bias=bias)
        x = torch.randn(2, 5, K, device=device).to(x_dtype)
        expected = results(layer.stock, layer, x, y_dtype, dropped, needed)
        for _ in range(2):  # recorded, and repeated
            computed = results(layer.fused, layer, x, y_dtype, dropped, needed)
            for name, one, other in zip(("y", *needed), computed, expected, strict=True):
                assert one.dtype == other.dtype
                assert torch.equal(one, other), (name, bias, dropped, factors)


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP32, FP32)], ids=str)
def test_a_gradient_may_have_any_strides(dtypes: tuple[torch.dtype, torch.dtype], device: str) -> None:
    x_dtype, y_dtype = dtypes
    layer = FourBit(device, BF16, FP32)
    incoming = {
        "transposed": torch.randn(5, 3, N, device=device).to(y_dtype).transpose(0, 1),
        "expanded": torch.randn(N, device=device).to(y_dtype).expand(3, 5, N),
        "columns": torch.randn(3, 5, 2 * N, device=device).to(y_dtype)[..., ::2],
    }
    x = torch.randn(3, 5, K, device=device).to(x_dtype).requires_grad_()
    leaves = [x, layer.a.requires_grad_(), layer.b.requires_grad_()]
    for name, dy in incoming.items():
        y = layer.fused(x, x, *leaves[1:], y_dtype)
        gradients = torch.autograd.grad(y, leaves, dy, retain_graph=True)
        for one, other in zip(gradients, torch.autograd.grad(y, leaves, dy.contiguous()), strict=True):
            assert torch.equal(one, other), name


@pytest.mark.parametrize("used", ["both", "base", "added"])
@pytest.mark.parametrize("dropped", [False, True])
def test_summands_have_the_bits_of_the_sum(dropped: bool, used: str, device: str) -> None:
    """Their sum in float32, and the gradients; a summand that nothing depends on has a gradient of zeros."""
    layer, x = FourBit(device, BF16, FP32, bias=True), torch.randn(2, 5, K, device=device)
    dy = torch.linspace(-1, 2, 10 * N, device=device).view(2, 5, N)
    ways = []
    for operator in (LORA_LINEAR_4BIT, LORA_SUMMANDS_4BIT):
        leaves = [one.clone().requires_grad_() for one in (x, layer.a, layer.b)]
        wide, a, b = leaves
        parts = *parts_of(layer.codes, layer.state), layer.bias, layer.state.blocksize, FACTOR, BF16, FP32
        for _ in range(2):  # recorded, and repeated
            y = operator(wide, wide * 0.5 if dropped else wide, a, b, *parts)
            if operator is LORA_SUMMANDS_4BIT:
                assert [one.dtype for one in y] == [BF16, BF16]
                total = {"both": y[0].float() + y[1], "base": y[0].float(), "added": y[1].float()}[used]
            else:
                total = y
            gradients = torch.autograd.grad(total, leaves, dy)
        ways.append([total, *gradients])
    same = [torch.equal(one, other) for one, other in zip(*ways, strict=True)]
    assert same == {"both": [True] * 4, "base": [False] * 4, "added": [False, False, True, True]}[used]
    assert used != "base" or not any(one.any() for one in ways[1][2:]), "factors have no gradient but zeros"


class Watched(TorchDispatchMode):
    """Sees the operators of PyTorch, so that calls go by the registered ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dropped", [False, True])
def test_registered_operators_make_the_same_gradients(dropped: bool, device: str) -> None:
    layer, x = FourBit(device, BF16, FP32), torch.randn(5, K, device=device)
    expected = results(layer.fused, layer, x, FP32, dropped, "xab")
    with Watched():
        computed = results(layer.fused, layer, x, FP32, dropped, "xab")
    assert all(torch.equal(one, other) for one, other in zip(computed, expected, strict=True))


def test_an_input_that_both_products_read_has_one_gradient(device: str) -> None:
    """PyTorch adds nothing up: its node hands on one gradient, and none for the adapter's input."""
    layer, x = FourBit(device, BF16, FP32), torch.randn(5, K, device=device, requires_grad=True)
    y, seen = layer.fused(x, x, layer.a, layer.b, FP32), []
    y.grad_fn.register_hook(lambda dinputs, _: seen.append([dx for dx in dinputs if dx is not None]))
    y.sum().backward()
    assert [(dx.shape, dx.dtype) for dx in seen[0]] == [(x.shape, FP32)]


def test_saved_tensor_hooks_see_what_they_see_of_stock_and_no_weight(device: str) -> None:
    layer, seen = FourBit(device, BF16, FP32), []
    x = torch.randn(5, K, device=device, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: (seen.append(one.shape), one)[1], lambda one: one):
        layer.fused(x, x, layer.a.requires_grad_(), layer.b.requires_grad_(), FP32)
    assert sorted(seen) == sorted([(5, K), (RANK, K), (N, RANK), (5, RANK)])


@pytest.mark.parametrize("x_dtype", [FP32, BF16])
def test_a_gradient_is_differentiated_again_or_refused(x_dtype: torch.dtype, device: str) -> None:
    layer = FourBit(device, BF16, FP32)
    seconds = []
    for way in (layer.stock, layer.fused):
        x = torch.linspace(-1, 1, 5 * K, device=device).view(5, K).to(x_dtype).requires_grad_()
        a, b = (one.clone().requires_grad_() for one in (layer.a, layer.b))
        y = way(x, x, a, b, x_dtype)

        def second(y: Tensor = y, x: Tensor = x, a: Tensor = a) -> Tensor:
            (da,) = torch.autograd.grad(y.float().square().sum(), a, create_graph=True)
            return torch.autograd.grad(da.square().sum(), x)[0]

        if way == layer.fused and x_dtype == FP32:  # its copy in 16 bits was kept, and not x
            with pytest.raises(RuntimeError, match="cannot be differentiated again"):
                second()
            return
        seconds.append(second().double())
    assert (seconds[0] - seconds[1]).norm() < 2e-2 * seconds[0].norm()


def test_tensors_that_do_not_go_together_are_named(device: str) -> None:
    layer = FourBit(device, BF16, FP32)
    parts, x = parts_of(layer.codes, layer.state), torch.randn(5, K + 2, device=device)
    with pytest.raises(ValueError, match="must have shapes"):
        LORA_LINEAR_4BIT.checked(x, x, layer.a, layer.b, *parts, None, 64, FACTOR, BF16, FP32)
