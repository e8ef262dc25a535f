"""linear_4bit: the bits of a product with the dequantised weight, in each form of a call."""

from __future__ import annotations

import itertools
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from fused_norm.kernels.linear_4bit import LINEAR_4BIT

from .numerics import BF16, FP16, FP32, slow
from .test_dequantize import parts_of

K, N = 64, 96


class FourBit:
    """A weight in 4 bits, with a bias or without."""

    def __init__(self, device: str, dtype: torch.dtype, *, bias: bool = False, features: int = N) -> None:
        self.dtype, self.features = dtype, features
        weight = torch.randn(features, K, device=device).to(dtype)
        self.codes, self.state = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        self.bias = torch.randn(features, device=device).to(dtype) if bias else None

    def fused(self, x: Tensor, y_dtype: torch.dtype) -> Any:
        options = self.features, self.state.blocksize, self.dtype, y_dtype
        return LINEAR_4BIT(x, *parts_of(self.codes, self.state), self.bias, *options)

    def stock(self, x: Tensor, y_dtype: torch.dtype) -> Tensor:
        weight = bnb.dequantize_4bit(self.codes, self.state).to(self.dtype)
        return linear(x.to(self.dtype), weight, self.bias).to(y_dtype)


def results(way: Any, x: Tensor, y_dtype: torch.dtype) -> list[Tensor]:
    """The output and the gradient of x."""
    leaf = x.clone().requires_grad_()
    y = way(leaf, y_dtype)
    dy = torch.linspace(-1, 2, y.numel(), device=y.device).view_as(y).to(y.dtype)
    return [y, *torch.autograd.grad(y, [leaf], dy)]


@pytest.mark.parametrize(
    "dtypes",
    [(FP32, FP32, BF16), (BF16, BF16, BF16), (FP32, BF16, BF16), *slow((FP32, FP32, FP16), (FP16,) * 3)],
    ids=str,
)
def test_a_call_has_the_bits_of_a_product(dtypes: tuple[torch.dtype, ...], device: str) -> None:
    x_dtype, y_dtype, dtype = dtypes
    for bias, shape in itertools.product((False, True), ((2, 5, K), (K,), (1, K))):
        layer, x = FourBit(device, dtype, bias=bias), torch.randn(shape, device=device).to(x_dtype)
        expected = results(layer.stock, x, y_dtype)
        for _ in range(2):  # recorded, and repeated
            for one, other in zip(results(layer.fused, x, y_dtype), expected, strict=True):
                assert one.dtype == other.dtype
                assert torch.equal(one, other), (bias, shape)
        with torch.no_grad():
            assert torch.equal(layer.fused(x, y_dtype), expected[0])


def test_a_gradient_may_have_any_strides(device: str) -> None:
    layer, x = FourBit(device, BF16), torch.randn(3, 5, K, device=device).requires_grad_()
    y = layer.fused(x, FP32)
    for dy in (
        torch.randn(5, 3, N, device=device).transpose(0, 1),
        torch.randn(N, device=device).expand(3, 5, N),
        torch.randn(3, 5, 2 * N, device=device)[..., ::2],
    ):
        gradients = [torch.autograd.grad(y, [x], one, retain_graph=True)[0] for one in (dy, dy.contiguous())]
        assert torch.equal(*gradients)


class Everything(TorchDispatchMode):
    """A mode that sees the registered operators."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_registered_operators_make_the_same_gradients(device: str) -> None:
    layer, x = FourBit(device, BF16, bias=True), torch.randn(2, 5, K, device=device)
    expected = results(layer.fused, x, FP32)
    with Everything():
        for one, other in zip(results(layer.fused, x, FP32), expected, strict=True):
            assert torch.equal(one, other)


def test_nothing_is_saved_through_hooks(device: str) -> None:
    """As bitsandbytes' product, which keeps its weight, and not what it reads."""
    layer, x, saved = FourBit(device, BF16), torch.randn(2, 5, K, device=device).requires_grad_(), []
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda one: (saved.append(one), one)[1], lambda one: one):
            layer.fused(x, FP32).sum().backward()
    assert not saved


def test_a_gradient_is_differentiated_again(device: str) -> None:
    layer, x = FourBit(device, BF16), torch.randn(2, 5, K, device=device).requires_grad_()
    dy = torch.randn(2, 5, N, device=device).requires_grad_()
    (dx,) = torch.autograd.grad(layer.fused(x, FP32), [x], dy, create_graph=True)
    direction = torch.randn_like(dx)
    (ddy,) = torch.autograd.grad(dx, [dy], direction)
    torch.testing.assert_close(ddy, layer.stock(direction, FP32), rtol=2e-2, atol=2e-2)


def test_a_weight_of_another_size_is_named(device: str) -> None:
    layer = FourBit(device, BF16)
    x = torch.randn(2, K + 2, device=device)
    refusal = LINEAR_4BIT.unsupported(x, *parts_of(layer.codes, layer.state), None, N, 64, BF16, FP32)
    assert refusal is not None
    assert refusal.reason == f"packed must have {N} * {K + 2} / 2 elements, not {N * K // 2}"


def test_an_odd_number_of_weights_is_left_to_the_reference(device: str) -> None:
    layer = FourBit(device, BF16, features=1)
    x = torch.randn(2, K - 1, device=device)
    packed = layer.codes.flatten()[: K // 2]
    parts = layer.state.code, packed, layer.state.absmax.float(), None, None, None
    refusal = LINEAR_4BIT.unsupported(x, *parts, None, 1, 64, BF16, FP32)
    assert refusal is not None
    assert refusal.reason == "its weight is packed otherwise"
