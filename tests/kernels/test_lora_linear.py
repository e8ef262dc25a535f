"""lora_linear has the bits of PyTorch's linear, of dropout and of ``lora_add``, and keeps what stock code keeps."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode

from fused_norm.patcher.adapters import dropout_factors, mask_of_dropout

from .conftest import ALL
from .numerics import BF16, FP16, FP32, assert_same, same_products

LORA_ADD, LORA_LINEAR = ALL["lora_add"], ALL["lora_linear"]
SCALE, DROP, DROP_BACK = FACTORS = 0.7, 1 / 0.95, 1 / 0.9
"""The scale of an adapter, and the factors of dropout of values and gradients, which differ more than PyTorch's."""


def dropped(x: Tensor, mask: Tensor, factor: float) -> Tensor:
    """Return ``x * mask * factor`` as PyTorch rounds it on a GPU."""
    return (x.float() * mask * factor).to(x.dtype)


class Dropout(torch.autograd.Function):
    """Dropout by a given mask, as PyTorch computes it on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        ctx.mask = mask
        return dropped(x, mask, DROP)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dropped(dy, ctx.mask, DROP_BACK), None


class Layer:
    """A frozen linear and an adapter; products are of ``dtype``."""

    def __init__(
        self,
        device: str,
        dtype: torch.dtype = BF16,
        *,
        rows: tuple[int, ...] = (2, 5),
        k: int = 64,
        n: int = 48,
        rank: int = 4,
        weight: torch.dtype | None = None,
        bias: bool = False,
        factors: torch.dtype = FP32,
    ) -> None:
        self.dtype, self.rows = dtype, rows
        draw = partial(torch.randn, device=device)
        self.w = draw(n, k).mul(k**-0.5).to(weight or dtype)
        self.bias = draw(n).to(weight or dtype) if bias else None
        self.a, self.b = draw(rank, k).mul(k**-0.5).to(factors), draw(n, rank).to(factors)
        self.x, self.dy = draw(*rows, k), draw(*rows, n).to(dtype)
        self.mask = torch.rand(*rows, k, device=device) < 0.9

    def fused(self, x: Tensor, own: Tensor, a: Tensor, b: Tensor, mask: Tensor | None = None) -> Any:
        return LORA_LINEAR(own, x, a, b, self.w, self.bias, mask, *FACTORS, self.dtype)

    def stock(self, x: Tensor, own: Tensor, a: Tensor, b: Tensor, mask: Tensor | None = None) -> Any:
        read = own if mask is None else Dropout.apply(own, mask)
        base = linear(x.to(self.dtype), self.w.to(self.dtype), None if self.bias is None else self.bias.to(self.dtype))
        return LORA_ADD(base, read.to(self.dtype), a, b, SCALE)

    def leaves(self, x: torch.dtype, own: torch.dtype | None = None, needed: str = "xoab") -> list[Tensor]:
        """Return x, what the adapter reads and the factors; without ``own``, the adapter reads x."""
        tensors = [self.x.to(x), self.x.to(own or x), self.a, self.b]
        leaves = [t.clone().requires_grad_(name in needed) for name, t in zip("xoab", tensors, strict=True)]
        return leaves if own is not None else [leaves[0], *leaves[:1], *leaves[2:]]

    def results(self, way: Any, leaves: list[Tensor], mask: Tensor | None = None) -> list[Tensor]:
        """Return the output, and the gradients of the leaves that require one."""
        y = way(*leaves, mask)
        needed = dict.fromkeys(leaf for leaf in leaves if leaf.requires_grad)
        return [y, *torch.autograd.grad(y, [*needed], self.dy)]


@pytest.mark.parametrize(
    ("x", "own", "drops", "needed"),
    [
        (BF16, None, True, "xoab"),
        (FP32, None, False, "xoab"),
        (BF16, FP32, True, "ab"),
        (FP32, FP32, True, "x"),
        (BF16, BF16, False, "xob"),
    ],
    ids=str,
)
def test_a_call_has_the_bits_of_a_linear_of_dropout_and_of_lora_add(
    x: torch.dtype, own: torch.dtype | None, drops: bool, needed: str, device: str
) -> None:
    for bias, weight, factors in ((False, BF16, FP32), (True, FP32, BF16)):
        layer = Layer(device, bias=bias, weight=weight, factors=factors)
        leaves, mask = layer.leaves(x, own, needed), layer.mask if drops else None
        expected = layer.results(layer.stock, leaves, mask)
        for mode in (nullcontext(), nullcontext(), FlopCounterMode(display=False)):  # recorded, repeated, registered
            with mode:
                results = layer.results(layer.fused, leaves, mask)
            assert [actual.dtype for actual in results] == [right.dtype for right in expected]
            assert all(map(same_products, results, expected)), (bias, weight, factors)


@pytest.mark.parametrize(("dtype", "rows", "k", "n", "rank"), [(BF16, (130,), 77, 130, 5), (FP16, (), 1024, 8, 33)])
def test_calls_of_any_shape_do(
    dtype: torch.dtype, rows: tuple[int, ...], k: int, n: int, rank: int, device: str
) -> None:
    layer = Layer(device, dtype, rows=rows, k=k, n=n, rank=rank, bias=True)
    for mask in (None, layer.mask):
        leaves = layer.leaves(dtype)
        results, expected = (layer.results(way, leaves, mask) for way in (layer.fused, layer.stock))
        assert all(map(same_products, results, expected))


@pytest.mark.parametrize(
    ("x", "drops", "weight"), [(BF16, True, BF16), (FP32, False, FP32), (FP32, True, BF16)], ids=str
)
def test_what_stock_code_keeps_is_kept(x: torch.dtype, drops: bool, weight: torch.dtype, device: str) -> None:
    """The parameter of 16 bits itself, and a copy of a wider one; x in 16 bits, and a mask."""
    layer, saved = Layer(device, weight=weight, bias=True), []
    leaves, mask = layer.leaves(x), layer.mask if drops else None
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (saved.append(tensor), tensor)[1], lambda t: t):
        for _ in range(2):
            saved.clear()
            layer.fused(*leaves, mask)
    shapes = [(*layer.rows, 64), *[(*layer.rows, 64)] * drops, (4, 64), (48, 4), (48, 64), (*layer.rows, 4)]
    assert [tuple(tensor.shape) for tensor in saved] == shapes
    assert {tensor.dtype for tensor in saved} == {BF16} | ({torch.bool} if drops else set())
    assert (saved[-2].data_ptr() == layer.w.data_ptr()) == (weight == BF16)
    assert (saved[0].data_ptr() == leaves[0].data_ptr()) == (x == BF16)
    if weight == BF16:  # it is kept itself
        y = layer.fused(*leaves, mask)
        layer.w.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_weight_that_is_written_between_is_in_the_next_call(device: str) -> None:
    layer = Layer(device, weight=FP32)
    leaves = layer.leaves(BF16)
    for _ in range(3):
        expected, y = layer.results(layer.stock, leaves), layer.fused(*leaves)
        layer.w.mul_(2.0)  # stock code keeps what it was rounded to
        assert_same([y, *torch.autograd.grad(y, [leaves[0], *leaves[2:]], layer.dy)], expected)


def test_what_is_dropped_is_not_hidden_if_it_is_nan(device: str) -> None:
    layer = Layer(device, rows=(3,))
    x, own, a, b = (leaf.detach() for leaf in layer.leaves(BF16, BF16))
    own[0, 0], own[2, 0] = float("nan"), float("inf")
    layer.mask[:, 0] = False
    y = layer.fused(x, own, a, b, layer.mask)
    assert y.isnan().all(dim=1).tolist() == [True, False, True]


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("x", [BF16, FP32], ids=str)
def test_a_gradient_is_differentiated_again_or_refused(x: torch.dtype, drops: bool, device: str) -> None:
    layer = Layer(device)

    def second(way: Any) -> Tensor:
        leaves = layer.leaves(x)
        y = way(*leaves, layer.mask if drops else None)
        (da,) = torch.autograd.grad(y.float().square().sum(), leaves[2], create_graph=True)
        return torch.autograd.grad(da.square().sum(), leaves[3])[0].double()

    if x == FP32:  # its copy in 16 bits was saved, and not x
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            second(layer.fused)
    else:
        expected = second(layer.stock)
        assert (second(layer.fused) - expected).norm() < 2e-2 * expected.norm()


def test_only_a_frozen_linear_that_fits_is_taken(device: str) -> None:
    layer = Layer(device, bias=True)
    _, own, a, b = layer.leaves(BF16)
    given = {"a": a, "b": b, "w": layer.w, "bias": layer.bias, "mask": None, "dtype": BF16}
    for changed, reason in (
        ({}, None),
        ({"w": layer.w.clone().requires_grad_()}, "its weight or bias is trained"),
        ({"bias": layer.b[:, 0].clone().requires_grad_()}, "its weight or bias is trained"),
        ({"w": layer.w.t().contiguous().t()}, "w is not contiguous"),
        ({"w": layer.w.half()}, "w is torch.float16, and products are of torch.bfloat16"),
        ({"bias": layer.b[:, 0].half().contiguous()}, "bias is torch.float16, and products are of torch.bfloat16"),
        ({"dtype": FP32}, "its products are of torch.float32, which are left to PyTorch"),
        ({"a": a.new_zeros(257, 64), "b": b.new_zeros(48, 257)}, "a rank of 257 is more than 256"),
        ({"mask": layer.x}, "mask must be a tensor of torch.bool"),
        ({"mask": layer.mask[1:]}, "mask must have x's shape (2, 5, 64), not (1, 5, 64)"),
        ({"mask": layer.mask.mT.contiguous().mT}, ""),  # computed by the reference
        ({"w": layer.w[1:]}, "must have shapes"),
    ):
        *tensors, dtype = (given | changed).values()
        refusal = LORA_LINEAR.why_unsupported(own, layer.x.bfloat16(), *tensors, *FACTORS, dtype)
        assert (refusal and refusal.reason) == reason or (reason and reason in str(refusal.reason)), changed.keys()


def test_arguments_that_kernels_do_not_take_are_computed_by_the_formula(device: str) -> None:
    layer = Layer(device, FP32, bias=True)
    x, own, a, b = layer.leaves(FP32)
    y = LORA_LINEAR.checked(own, x, a, b, layer.w, layer.bias, layer.mask, *FACTORS, FP32)
    read = dropped(x, layer.mask, DROP)
    assert torch.equal(y, linear(x, layer.w, layer.bias) + read @ a.t() @ b.t() * SCALE)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch draws in another way on a CPU")
@pytest.mark.parametrize("p", [0.1, 1 / 3, 0.5])
@pytest.mark.parametrize("drawn_in", [FP32, None], ids=str)
@pytest.mark.parametrize("shape", [(1, 7), (16384, 1024), (3, 333, 77)])
def test_on_a_gpu_a_mask_is_the_one_that_dropout_between_casts_draws(
    shape: tuple[int, ...], drawn_in: torch.dtype | None, p: float
) -> None:
    """Between no casts too, of an x that is not aligned as a whole tensor is."""
    dropout, dtype = nn.Dropout(p), BF16 if p < 0.5 else FP16
    x, dy = torch.randn((2, *shape), device="cuda").to(dtype)
    if drawn_in is None:
        x = x.new_empty(x.numel() + 1)[1:].view(shape).copy_(x)
    x.requires_grad_()
    torch.manual_seed(3)
    mask = mask_of_dropout(dropout, x, drawn_in or dtype)
    after_mask = torch.rand(4, device="cuda")
    torch.manual_seed(3)
    y = dropout(x.to(drawn_in or dtype)).to(dtype)
    assert torch.equal(torch.rand(4, device="cuda"), after_mask)
    factor, factor_back = dropout_factors(p)
    assert torch.equal(dropped(x, mask, factor), y)
    assert torch.equal(dropped(dy, mask, factor_back), torch.autograd.grad(y, x, dy)[0])


def test_on_a_cpu_pytorchs_dropout_runs() -> None:
    assert mask_of_dropout(nn.Dropout(0.5), torch.ones(2, 8, dtype=BF16), FP32) is None
