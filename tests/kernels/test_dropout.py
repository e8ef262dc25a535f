"""masked_scale: the bits of casts, a mask and a scale, and on a GPU those of PyTorch's dropout between casts."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fused_norm.kernels.dropout import MASKED_SCALE
from fused_norm.patcher.adapter_dropout import dropped_between_casts

from .numerics import BF16, FP16, FP32, assert_same

SCALES = 1 / 0.95, 1 / 0.9


def formula(x: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() * mask * SCALES[0]).to(dtype)


@pytest.mark.parametrize("shape", [(2, 5, 64), (1, 1024), (7,), (3, 2048)])
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP16, FP16), (FP32, BF16), (BF16, FP32)], ids=str)
def test_numbers_and_gradients_are_rounded_once(
    dtypes: tuple[torch.dtype, torch.dtype], shape: tuple[int, ...], device: str
) -> None:
    x_dtype, dtype = dtypes
    x = torch.randn(shape, device=device).to(x_dtype).requires_grad_()
    mask, dy = torch.rand(shape, device=device) < 0.9, torch.randn(shape, device=device).to(dtype)
    for _ in range(2):  # recorded, and repeated
        y = MASKED_SCALE(x, mask, *SCALES, dtype)
        assert y.dtype == dtype
        assert torch.equal(y, formula(x.detach(), mask, dtype))
        (dx,) = torch.autograd.grad(y, [x], dy)
        assert dx.dtype == x_dtype
        assert torch.equal(dx, (dy.float() * mask * SCALES[1]).to(x_dtype))
    assert torch.equal(MASKED_SCALE.reference(x, mask, *SCALES, dtype), formula(x, mask, dtype))


def test_what_is_dropped_is_not_hidden_if_it_is_nan(device: str) -> None:
    x, mask = torch.tensor([float("nan"), 1.0, float("inf")], device=device).to(BF16), torch.zeros(3, device=device) > 0
    y = MASKED_SCALE(x, mask, *SCALES, BF16)
    assert y.isnan().tolist() == [True, False, True]


def test_a_gradient_is_differentiated_again(device: str) -> None:
    x = torch.randn(4, 64, device=device).to(BF16).requires_grad_()
    mask, dy = torch.rand(4, 64, device=device) < 0.5, torch.randn(4, 64, device=device).to(BF16).requires_grad_()
    (dx,) = torch.autograd.grad(MASKED_SCALE(x, mask, *SCALES, BF16), [x], dy, create_graph=True)
    (ddy,) = torch.autograd.grad(dx.float().sum(), [dy])
    assert torch.equal(ddy.bool(), mask)


def test_registered_operators_make_the_same_gradients(device: str) -> None:
    x = torch.randn(3, 77, device=device).to(BF16).requires_grad_()
    mask, dy = torch.rand(3, 77, device=device) < 0.9, torch.randn(3, 77, device=device).to(BF16)
    results = []
    for mode in (nullcontext(), FlopCounterMode(display=False)):
        with mode:
            y = MASKED_SCALE(x, mask, *SCALES, BF16)
            results.append([y, *torch.autograd.grad(y, [x], dy)])
    assert_same(*results)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 3), "mask must be a tensor of torch.bool"),
        (torch.ones(3, 2) > 0, "mask must have x's shape (2, 3), not (3, 2)"),
    ],
)
def test_a_wrong_mask_is_named(mask: Any, message: str, device: str) -> None:
    refusal = MASKED_SCALE.unsupported(torch.ones(2, 3, device=device), mask.to(device), 1.0, 1.0, BF16)
    assert refusal is not None
    assert refusal.reason == message


@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch draws in another way on a CPU")
@pytest.mark.parametrize("p", [0.05, 0.1, 1 / 3, 0.5, 0.99])
@pytest.mark.parametrize("shape", [(2, 5, 64), (4, 1000, 1024), (1, 7), (16384, 1024), (3, 333, 77)])
def test_on_a_gpu_it_has_the_bits_of_dropout_between_casts(shape: tuple[int, ...], p: float) -> None:
    dropout, dtype = nn.Dropout(p), BF16 if p < 0.5 else FP16
    x = torch.randn(shape, device="cuda").to(dtype).requires_grad_()
    dy = torch.randn(shape, device="cuda").to(dtype)
    results = []
    for way in (lambda x: dropout(x.float()).to(dtype), lambda x: dropped_between_casts(dropout, x)):
        torch.manual_seed(3)
        ys = [way(x) for _ in range(2)]
        results.append([*ys, *(torch.autograd.grad(y, [x], dy)[0] for y in ys), torch.rand(4, device="cuda")])
    assert_same(*results)


def test_on_a_cpu_pytorchs_dropout_runs() -> None:
    assert dropped_between_casts(nn.Dropout(0.5), torch.ones(2, 8, dtype=BF16)) is None
