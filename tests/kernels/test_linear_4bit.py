"""4-bit weights are dequantised to bitsandbytes' bits; products with them have those of PyTorch and ``lora_add``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode

from ..conftest import slow_rows
from .conftest import ALL
from .numerics import BF16, FP16, FP32, Tensors, assert_same, same_products
from .test_lora_linear import Dropout

LINEAR_4BIT, LORA_LINEAR_4BIT = ALL["linear_4bit"], ALL["lora_linear_4bit"]
LORA_SUMMANDS_4BIT, LORA_ADD = ALL["lora_summands_4bit"], ALL["lora_add"]
SCALE, K, N, RANK = 0.7, 64, 96, 4
FACTORS = SCALE, 1 / 0.95, 1 / 0.9
SHAPES = [(64, 128), (7, 33), (300, 64)]
"""Whole blocks, an odd number of weights and an incomplete last block, more than 256 scales."""


def parts_of(codes: Tensor, state: bnb.QuantState) -> tuple[Tensor | None, ...]:
    """Return the tensors of the weight as operators take them."""
    outer = (state.state2.code, state.state2.absmax, state.offset) if state.nested else (None, None, None)
    return state.code, codes, state.absmax, *outer


def formula(weight: tuple[Any, ...], block: int, like: Tensor) -> Tensor:
    """Dequantise the weight by PyTorch's operators."""
    code, packed, scale, scale_code, outer_scale, offset = weight
    if scale_code is not None:
        scale = scale_code[scale.long()] * outer_scale.repeat_interleave(256)[: len(scale)] + offset
    packed = packed.flatten().long()
    values = code[torch.stack([packed >> 4, packed & 15], dim=1).flatten()[: like.numel()]]
    return (values * scale.repeat_interleave(block)[: like.numel()]).to(like.dtype).view_as(like)


@pytest.mark.parametrize(("kind", "double"), [("nf4", True), ("fp4", False)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_weight_has_the_bits_that_bitsandbytes_gives(
    shape: tuple[int, int], kind: str, double: bool, device: str
) -> None:
    """The output of an identity is the weight, and so is the gradient of an identity; the adapter adds nothing."""
    for dtype, block in itertools.product((BF16, FP16), (64, 4096)):
        weight = torch.randn(shape, device=device).to(dtype) * torch.linspace(0.1, 3, shape[1], device=device).to(dtype)
        codes, state = bnb.quantize_4bit(weight, blocksize=block, quant_type=kind, compress_statistics=double)
        parts = parts_of(codes, state)
        rows = torch.eye(shape[1], dtype=dtype, device=device, requires_grad=True)
        factors = rows.new_zeros(1, shape[1]), rows.new_zeros(shape[0], 1)
        arguments = rows, rows, *factors, *parts, None, None, *FACTORS, dtype, dtype, block
        y, why_not = LORA_LINEAR_4BIT.try_fused(*arguments)
        assert why_not is None
        columns = torch.eye(shape[1], shape[0], dtype=dtype, device=device)
        (dx,) = torch.autograd.grad(y, rows, columns)
        references = [formula(parts, block, weight)]
        if weight.is_cuda or shape[1] % block == 0:  # bitsandbytes is wrong on a CPU if a block has parts of two rows
            references.append(bnb.dequantize_4bit(codes, state))
        for expected in references:
            different = (y.t() != expected).sum().item()
            assert different == 0, f"{dtype}, blocks of {block}: {different} of {y.numel()} differ"
            assert torch.equal(dx, columns @ expected)


class FourBit:
    """A 4-bit weight, with or without a bias, and with an adapter if its factors have a dtype."""

    def __init__(
        self,
        device: str,
        dtype: torch.dtype = BF16,
        factors: torch.dtype | None = None,
        *,
        bias: bool = False,
        features: int = N,
        rank: int = RANK,
    ) -> None:
        self.dtype, self.features = dtype, features
        weight = torch.randn(features, K, device=device).to(dtype)
        self.codes, self.state = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        self.parts = parts_of(self.codes, self.state)
        self.bias = torch.randn(features, device=device).to(dtype) if bias else None
        self.factors: list[Tensor] = []
        if factors is not None:
            a, b = torch.randn(rank, K, device=device) / 8, torch.randn(features, rank, device=device)
            self.factors = [a.to(factors), b.to(factors)]

    def fused(self, x: Tensor, own: Tensor, *factors: Tensor, y_dtype: torch.dtype, mask: Tensor | None = None) -> Any:
        """Call the operator; the adapter reads ``own``."""
        weight, dtypes = (*self.parts, self.bias), (self.dtype, y_dtype)
        if not factors:
            return LINEAR_4BIT(x, *weight, self.features, self.state.blocksize, *dtypes)
        return LORA_LINEAR_4BIT(own, x, *factors, *weight, mask, *FACTORS, *dtypes, self.state.blocksize)

    def stock(
        self, x: Tensor, own: Tensor, *factors: Tensor, y_dtype: torch.dtype, mask: Tensor | None = None
    ) -> Tensor:
        weight = bnb.dequantize_4bit(self.codes, self.state).to(self.dtype)
        base = linear(x.to(self.dtype), weight, self.bias).to(y_dtype)
        own = own if mask is None else Dropout.apply(own, mask)
        return LORA_ADD(base, own.to(self.dtype), *factors, SCALE) if factors else base

    def leaves(self, x: Tensor, needed: str = "xab") -> list[Tensor]:
        """Return x and the factors; ``needed`` has the letters of those that require a gradient."""
        return [
            factor.clone().requires_grad_(name in needed)
            for name, factor in zip("xab", (x, *self.factors), strict=False)
        ]

    def results(
        self,
        way: Callable[..., Tensor],
        x: Tensor,
        y_dtype: torch.dtype,
        own: torch.dtype | None = None,
        needed: str = "xab",
        **masked: Any,
    ) -> Tensors:
        """Return the output and the gradients by name; the adapter reads x, or numbers of its own of this dtype."""
        leaves = self.leaves(x, needed)
        wide, *factors = leaves
        y = way(wide, wide if own is None else (wide * 0.5).to(own), *factors, y_dtype=y_dtype, **masked)
        dy = torch.linspace(-1, 2, y.numel(), device=y.device).view_as(y).to(y.dtype)
        inputs = {name: leaf for name, leaf in zip("xab", leaves, strict=False) if leaf.requires_grad}
        return Tensors(y=y, **dict(zip(inputs, torch.autograd.grad(y, [*inputs.values()], dy), strict=True)))


@pytest.mark.parametrize(
    ("x_dtype", "y_dtype", "dtype"),
    [(FP32, FP32, BF16), (BF16, BF16, BF16), *slow_rows((FP32, BF16, BF16), (FP16, FP16, FP16))],
    ids=str,
)
def test_a_call_has_the_bits_of_a_product_of_dropout_and_of_lora_add(
    x_dtype: torch.dtype, y_dtype: torch.dtype, dtype: torch.dtype, device: str
) -> None:
    for factors, bias, own, masked, needed, shape in (
        (None, False, None, False, "x", (2, 5, K)),
        (None, True, None, False, "x", (K,)),
        (FP32, False, x_dtype, False, "xab", (2, 5, K)),
        (dtype, True, None, False, "a", (1, K)),
        (FP32, True, x_dtype, False, "ab", (2, 5, K)),
        (FP32, True, None, True, "xab", (2, 5, K)),
        (FP32, True, FP32, True, "xab", (130, K)),
        (FP32, True, dtype, True, "b", (2, 5, K)),
    ):
        layer, x = FourBit(device, dtype, factors, bias=bias), torch.randn(shape, device=device).to(x_dtype)
        rest = {"own": own, "needed": needed, "mask": torch.rand(shape, device=device) < 0.9 if masked else None}
        expected = layer.results(layer.stock, x, y_dtype, **rest).present()
        same = same_products if masked else torch.equal
        for mode in (nullcontext(), nullcontext(), FlopCounterMode(display=False)):  # recorded, repeated, registered
            with mode:
                actual = layer.results(layer.fused, x, y_dtype, **rest).present()
            assert [value.dtype for value in actual.values()] == [value.dtype for value in expected.values()]
            assert all(same(actual[name], expected[name]) for name in expected), (factors, bias, own, masked)


@pytest.mark.parametrize("factors", [None, FP32], ids=["without an adapter", "with one"])
def test_a_gradient_may_have_any_strides(factors: torch.dtype | None, device: str) -> None:
    layer = FourBit(device, BF16, factors)
    leaves = layer.leaves(torch.randn(3, 5, K, device=device))
    y = layer.fused(leaves[0], *leaves, y_dtype=FP32)
    wide = torch.randn(5, 3, 2 * N, device=device)
    for dy in (wide[..., :N].transpose(0, 1), wide[0, 0, :N].expand(3, 5, N), wide.view(3, 5, 2 * N)[..., ::2]):
        gradients = [torch.autograd.grad(y, leaves, grad_y, retain_graph=True) for grad_y in (dy, dy.contiguous())]
        assert_same(*gradients, where=dy.stride())


@pytest.mark.parametrize("used", ["both", "base", "added"])
def test_summands_have_the_bits_of_the_sum(used: str, device: str) -> None:
    """Their sum is computed in float32; a summand that is unused has a gradient of zeros."""
    layer, x = FourBit(device, BF16, FP32, bias=True), torch.randn(2, 5, K, device=device)

    def way(x: Tensor, own: Tensor, *factors: Tensor, y_dtype: torch.dtype) -> Tensor:
        rest = *layer.parts, layer.bias, None, *FACTORS, BF16, y_dtype, layer.state.blocksize
        base, added = LORA_SUMMANDS_4BIT(own, x, *factors, *rest)
        assert (base.dtype, added.dtype) == (BF16, BF16)
        return {"both": base.float() + added, "base": base.float(), "added": added.float()}[used]

    for _ in range(2):  # recorded, and repeated
        actual = layer.results(way, x, FP32, own=FP32)
    if used == "base":
        assert not actual.a.any()
        assert not actual.b.any()
        return
    names = "yxab" if used == "both" else "ab"
    expected = layer.results(layer.fused, x, FP32, own=FP32)
    assert [name for name in names if not torch.equal(getattr(actual, name), getattr(expected, name))] == []


KEPT = [(5, K), (RANK, K), (N, RANK), (5, RANK)]


@pytest.mark.parametrize(("factors", "masked", "shapes"), [(None, False, []), (FP32, False, KEPT), (FP32, True, KEPT)])
def test_saved_tensor_hooks_see_what_they_see_of_stock_and_no_weight(
    factors: torch.dtype | None, masked: bool, shapes: list[tuple[int, ...]], device: str
) -> None:
    """bitsandbytes' product saves its weight, and not its input; what dropout returns is kept in 16 bits."""
    layer, x, saved = FourBit(device, BF16, factors), torch.randn(5, K, device=device), []
    leaves = layer.leaves(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (saved.append(tensor), tensor)[1], lambda t: t):
        for _ in range(2):
            layer.fused(leaves[0], *leaves, y_dtype=FP32, mask=x > 0 if masked else None).sum().backward()
    assert [tensor.shape for tensor in saved if tensor.dtype == BF16] == 2 * shapes
    assert [tensor.shape for tensor in saved if tensor.dtype != BF16] == [(5, K)] * 2 * masked


def test_a_gradient_is_differentiated_again(device: str) -> None:
    layer, x = FourBit(device), torch.randn(2, 5, K, device=device).requires_grad_()
    dy = torch.randn(2, 5, N, device=device).requires_grad_()
    (dx,) = torch.autograd.grad(layer.fused(x, x, y_dtype=FP32), [x], dy, create_graph=True)
    direction = torch.randn_like(dx)
    (ddy,) = torch.autograd.grad(dx, [dy], direction)
    torch.testing.assert_close(ddy, layer.stock(direction, direction, y_dtype=FP32), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("x_dtype", [FP32, BF16])
def test_with_an_adapter_a_gradient_is_differentiated_again_or_refused(x_dtype: torch.dtype, device: str) -> None:
    layer, rows, seconds = FourBit(device, BF16, FP32), torch.randn(5, K, device=device).to(x_dtype), []
    is_kept = x_dtype == BF16  # else its copy in 16 bits was saved, and not x
    for way in (layer.stock, layer.fused):
        x, a, b = layer.leaves(rows)
        y = way(x, x, a, b, y_dtype=x_dtype).float()
        refused = pytest.raises(RuntimeError, match="cannot be differentiated again")
        with nullcontext() if is_kept or way == layer.stock else refused:
            (da,) = torch.autograd.grad(y.square().sum(), a, create_graph=True)
            seconds.append(torch.autograd.grad(da.square().sum(), x)[0].double())
    assert not is_kept or (seconds[1] - seconds[0]).norm() < 2e-2 * seconds[0].norm()


def test_what_kernels_do_not_take_is_named_or_left_to_the_reference(device: str) -> None:
    layer, x = FourBit(device, BF16, FP32), torch.randn(5, K + 2, device=device)
    with pytest.raises(ValueError, match="must have shapes"):
        LORA_LINEAR_4BIT.checked(x, x, *layer.factors, *layer.parts, None, None, *FACTORS, BF16, FP32, 64)
    refusal = LINEAR_4BIT.why_unsupported(x, *layer.parts, None, N, 64, BF16, FP32)
    assert refusal.reason == f"packed must have {N} * {K + 2} / 2 elements, not {N * K // 2}"
    x, weight, dtypes = x[:, :K], (*layer.factors, *layer.parts, None), (BF16, FP32)
    for mask, reason in (
        (x, "mask must be a tensor of torch.bool"),
        (x[1:] > 0, f"mask must have x's shape (5, {K}), not (4, {K})"),
        ((x > 0).t().contiguous().t(), ""),  # which the reference computes
        ((x > 0).contiguous(), None),
    ):
        refusal = LORA_LINEAR_4BIT.why_unsupported(x, x, *weight, mask, *FACTORS, *dtypes, 64)
        assert (refusal and refusal.reason) == reason
    layer = FourBit(device, BF16, FP32, rank=257)
    arguments = x, x, *layer.factors, *layer.parts, None, None, *FACTORS, *dtypes, 64
    assert LORA_LINEAR_4BIT.try_fused(*arguments) == (None, "a rank of 257 is more than 256")
    layer = FourBit(device, features=1)
    parts = layer.state.code, layer.codes.flatten()[: K // 2], layer.state.absmax.float(), None, None, None
    refusal = LINEAR_4BIT.why_unsupported(x[:, : K - 1], *parts, None, 1, 64, BF16, FP32)
    assert refusal.reason == "its weight is packed otherwise"
