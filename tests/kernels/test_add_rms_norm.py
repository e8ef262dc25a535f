"""add_rms_norm: the sum, its norm and where gradients go, held against the stock code and float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fused_norm.kernels import add_rms_norm
from fused_norm.kernels.triton.launch import Launch

from .numerics import BF16, FP32, Norm, Tensors

LLAMA = Norm("llama", x=BF16, w=BF16, r=BF16)


GRADIENTS_FLOW_IN = pytest.mark.parametrize("used", ["both", "norm", "sum"])
"""Both outputs are used, or one of them; if only the sum is used no kernel runs."""


def _backward(used: str, outputs: tuple[Tensor, Tensor], inputs: Tensors, **options: bool) -> None:
    flows = {"both": (outputs, (inputs.dy, inputs.ds)), "norm": (outputs[0], inputs.dy), "sum": (outputs[1], inputs.ds)}
    torch.autograd.backward(*flows[used], **options)


@GRADIENTS_FLOW_IN
def test_the_grad_of_a_leaf_is_its_own(used: str, device: str) -> None:
    inputs = LLAMA.inputs((5, 64), device)
    x, r, w = (tensor.detach().requires_grad_() for tensor in (inputs.x, inputs.r, inputs.w))
    arrived = inputs.ds.clone()
    _backward(used, LLAMA.fused(x, r, w), inputs)
    once = r.grad.clone()
    assert torch.equal(x.grad, once)
    assert len({tensor.untyped_storage().data_ptr() for tensor in (x.grad, r.grad, inputs.ds)}) == 3
    x.grad.mul_(2)
    assert torch.equal(r.grad, once)
    _backward(used, LLAMA.fused(x, r, w), inputs)
    assert torch.equal(r.grad, 2 * once)
    assert torch.equal(x.grad, 3 * once)
    assert torch.equal(inputs.ds, arrived)


def _leaves(device: str) -> list[Tensor]:
    return [torch.randn(size, device=device, requires_grad=True) for size in ((5, 64), (5, 64), (64,))]


@pytest.mark.gpu
def test_gradients_made_on_another_stream_are_whole(device: str) -> None:
    x, r, w = _leaves(device)
    y, s = add_rms_norm(x, r, w)
    expected = torch.autograd.grad((y, s), (x, r, w), (y.sin(), s.cos()), retain_graph=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        with torch.cuda.stream(side):
            incoming = [torch.randn(5, 64, device=device).mul_(0).add_(dy) for dy in (y.sin(), s.cos())]
            actual = torch.autograd.grad((y, s), (x, r, w), incoming, retain_graph=True)
            doubled = torch._foreach_mul(actual, 2.0)
        torch.cuda.current_stream().wait_stream(side)
        assert all(torch.equal(a, 2 * b) for a, b in zip(doubled, expected, strict=True))


@pytest.mark.usefixtures("held_or_in_chunks")
@pytest.mark.parametrize(("x", "r", "fused"), [(FP32, FP32, False), (BF16, FP32, False), (BF16, BF16, True)])
def test_products_of_fp32_sums_are_rounded_before_they_are_added(
    x: torch.dtype, r: torch.dtype, fused: bool, launches: list[Launch], device: str
) -> None:
    norm = Norm(x=x, r=r, w=None, scale=0.22)
    inputs = norm.inputs((2, 130), device)
    norm.fused(inputs.x, inputs.r, None)
    (launched,) = launches
    assert launched.options["enable_fp_fusion"] == fused
