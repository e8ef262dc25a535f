"""lora_add_dropped: the bits of dropout and of ``lora_add``, and on a GPU a mask that PyTorch's dropout would draw."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fused_norm.kernels import reference
from fused_norm.kernels.lora_add import LORA_ADD, LORA_ADD_DROPPED
from fused_norm.patcher.adapters import dropout_factors, mask_of_dropout

from .numerics import BF16, FP16, FP32, same_products

SCALE, FACTORS = 0.7, (1 / 0.95, 1 / 0.9)
"""The scale of an adapter, and the dropout factors of values and gradients, which differ more than PyTorch's."""


def tensors(device: str, *rows: int, k: int = 64, n: int = 48, r: int = 4, dtype: torch.dtype = BF16) -> list[Tensor]:
    """Draw base, x, a, b, the mask, and the gradient of the output."""
    shapes = ((*rows, n), dtype), ((*rows, k), dtype), ((r, k), FP32), ((n, r), FP32)
    leaves = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape, dtype in shapes]
    return [*leaves, torch.rand(*rows, k, device=device) < 0.9, torch.randn(*rows, n, device=device).to(dtype)]


def results(y: Tensor, leaves: list[Tensor], dy: Tensor) -> list[Tensor]:
    return [y, *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("sizes", [{}, {"k": 77, "n": 130, "r": 5}, {"k": 1024, "n": 8, "r": 33}], ids=str)
@pytest.mark.parametrize("rows", [(2, 5), (7,), (130,)])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_it_has_the_bits_of_dropout_and_of_lora_add(
    dtype: torch.dtype, rows: tuple[int, ...], sizes: dict[str, int], device: str
) -> None:
    *leaves, mask, dy = tensors(device, *rows, **sizes, dtype=dtype)
    base, x, a, b = leaves
    dropped = reference.dropped(x.detach(), mask, FACTORS[0]).requires_grad_()
    y, dbase, d, da, db = results(LORA_ADD(base, dropped, a, b, SCALE), [base, dropped, a, b], dy)
    expected = y, dbase, reference.dropped(d, mask, FACTORS[1]), da, db
    for _ in range(2):  # recorded, and repeated
        actual = results(LORA_ADD_DROPPED(base, x, a, b, mask, SCALE, *FACTORS), leaves, dy)
        for name, result, expected_result in zip(("y", "dbase", "dx", "da", "db"), actual, expected, strict=True):
            assert result.dtype == expected_result.dtype, name
            assert same_products(result, expected_result), name


def test_rows_apart_in_memory_are_read_where_they_are(device: str) -> None:
    base, x, a, b, mask, dy = tensors(device, 6)
    spaced = torch.zeros(6, 100, device=device, dtype=BF16)[:, :64].copy_(x.detach()).requires_grad_()
    actual = results(LORA_ADD_DROPPED(base, spaced, a, b, mask, SCALE, *FACTORS), [base, spaced, a, b], dy)
    expected = results(LORA_ADD_DROPPED(base, x, a, b, mask, SCALE, *FACTORS), [base, x, a, b], dy)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_what_is_dropped_is_not_hidden_if_it_is_nan(device: str) -> None:
    base, x, a, b, mask, _ = tensors(device, 3)
    x = x.detach().clone()
    x[0, 0], x[2, 0] = float("nan"), float("inf")
    mask[:, 0] = False
    y = LORA_ADD_DROPPED(base, x, a, b, mask, SCALE, *FACTORS)
    assert y.isnan().all(dim=1).tolist() == [True, False, True]


def test_a_gradient_is_differentiated_again(device: str) -> None:
    *leaves, mask, dy = tensors(device, 4)
    dy.requires_grad_()
    _, dx, *_ = torch.autograd.grad(LORA_ADD_DROPPED(*leaves, mask, SCALE, *FACTORS), leaves, dy, create_graph=True)
    actual = torch.autograd.grad(dx.float().square().sum(), [leaves[2], leaves[3], dy])
    *again, _, dy = (tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in (*leaves, mask, dy))
    dx = reference.dropped(dy * SCALE @ again[3].to(BF16) @ again[2].to(BF16), mask, FACTORS[1])
    expected = torch.autograd.grad(dx.float().square().sum(), [again[2], again[3], dy])
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05 * b.abs().max().item())


def test_registered_operators_make_the_same_gradients(device: str) -> None:
    *leaves, mask, dy = tensors(device, 3, k=77)
    by_mode = []
    for mode in (nullcontext(), FlopCounterMode(display=False)):
        with mode:
            by_mode.append(results(LORA_ADD_DROPPED(*leaves, mask, SCALE, *FACTORS), leaves, dy))
    assert all(torch.equal(a, b) for a, b in zip(*by_mode, strict=True))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (None, "mask must be a tensor of torch.bool"),
        (torch.ones(2, 64), "mask must be a tensor of torch.bool"),
        (torch.ones(64, 2) > 0, "mask must have x's shape (2, 64), not (64, 2)"),
        ((torch.ones(64, 2) > 0).t(), ""),  # computed by the reference
    ],
)
def test_a_wrong_mask_is_named(mask: Any, message: str, device: str) -> None:
    *leaves, _, _ = tensors(device, 2)
    refusal = LORA_ADD_DROPPED.unsupported(*leaves, mask if mask is None else mask.to(device), SCALE, *FACTORS)
    assert refusal is not None
    assert refusal.reason == message


@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch draws in another way on a CPU")
@pytest.mark.parametrize("p", [0.05, 0.1, 1 / 3, 0.5, 0.99])
@pytest.mark.parametrize("drawn_in", [FP32, None], ids=str)
@pytest.mark.parametrize("shape", [(2, 5, 64), (4, 1000, 1024), (1, 7), (16384, 1024), (3, 333, 77)])
def test_on_a_gpu_a_mask_is_the_one_that_dropout_between_casts_draws(
    shape: tuple[int, ...], drawn_in: torch.dtype | None, p: float
) -> None:
    """Between no casts too, of an x that is not aligned as a whole tensor is."""
    dropout, dtype = nn.Dropout(p), BF16 if p < 0.5 else FP16
    x, dy = torch.randn((2, *shape), device="cuda").to(dtype)
    if drawn_in is None:
        x = x.new_empty(x.numel() + 1)[1:].view(shape).copy_(x)
    x.requires_grad_()

    def by_mask() -> list[Tensor]:
        mask = mask_of_dropout(dropout, x, drawn_in or dtype)
        assert mask is not None
        return [
            reference.dropped(tensor, mask, factor) for tensor, factor in zip((x, dy), dropout_factors(p), strict=True)
        ]

    def by_dropout() -> list[Tensor]:
        y = dropout(x.to(drawn_in or dtype)).to(dtype)
        return [y, *torch.autograd.grad(y, [x], dy)]

    results = []
    for way in (by_mask, by_dropout):
        torch.manual_seed(3)
        results.append([*way(), *way(), torch.rand(4, device="cuda")])
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_on_a_cpu_pytorchs_dropout_runs() -> None:
    assert mask_of_dropout(nn.Dropout(0.5), torch.ones(2, 8, dtype=BF16), FP32) is None
