"""rms_norm: results, layouts, gradients and robustness of the kernels, held against the stock code and float64."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from fused_norm.kernels import rms_norm

from .numerics import (
    BASE_CASTINGS,
    BF16,
    FP16,
    FP32,
    Norm,
    assert_same,
    assert_same_rounding,
    in_layout,
    none_rounded_once,
    run,
    run_true,
    scales,
    squares_that_round_up,
)

LLAMA = Norm("llama", x=BF16, w=BF16)
GEMMA = Norm("gemma", zero_centered=True, x=FP32, w=FP32)


@pytest.mark.parametrize(("units", "dtype"), [(0, FP16), (0.4, BF16)])
@pytest.mark.usefixtures("held_or_in_chunks")
def test_casting_none_rounds_the_squares_and_their_mean(units: float, dtype: torch.dtype, device: str) -> None:
    """An eps below half a unit is lost if the mean is rounded before, and changes an unrounded mean."""
    x, eps = squares_that_round_up((24, 145), dtype, device), units * torch.finfo(dtype).eps
    ours, expected = rms_norm(x, None, eps, casting="none"), none_rounded_once(x, None, eps, False)
    assert_same_rounding(Norm("none", x=dtype, w=None), ours, expected)


@pytest.mark.parametrize(
    "norm",
    [
        *(Norm("gemma", x=FP32, w=FP32, eps=eps) for eps in (0.5, 1, 1e-12)),
        *(LLAMA, Norm("gemma", True, BF16, BF16), Norm("none", x=BF16, w=BF16)),
    ],
    ids=str,
)
def test_eps_is_added_to_the_mean_of_squares_and_weights_and_rows_have_any_size(norm: Norm, device: str) -> None:
    inputs = norm.inputs((9, 130), device)
    inputs.w *= 1000 if norm.x == BF16 else 1
    inputs.x *= torch.logspace(-6 if norm.x == FP32 else -4, 4, 9, device=device)[:, None].to(norm.x)
    norm.assert_right(inputs)


def test_what_is_saved_is_looked_at_once(device: str) -> None:
    """Checkpoints allow saved tensors to be unpacked once, which must suffice for a differentiable backward too."""
    x = torch.randn(3, 7, device=device, requires_grad=True)
    w = torch.randn(7, device=device, requires_grad=True)
    for create_graph in (False, True):
        y = torch.utils.checkpoint.checkpoint(lambda x: rms_norm(x, w) * 1.0, x, use_reentrant=False)
        grads = torch.autograd.grad(y, (x, w), torch.ones_like(y), create_graph=create_graph)
        expected = torch.autograd.grad(rms_norm(x, w), (x, w), torch.ones_like(y), create_graph=create_graph)
        assert_same(grads, expected)


@pytest.mark.parametrize("eps", [1e-6, 0.0])
@pytest.mark.parametrize("casting", BASE_CASTINGS)
def test_zero_rows(casting: str, eps: float, device: str) -> None:
    norm = Norm(casting, x=FP32, w=FP32, eps=eps)
    inputs = norm.inputs((5, 130), device)
    inputs.x[2] = 0
    ours, stock = run(norm.fused, inputs), run(norm.stock, inputs)
    for name, value in ours.present().items():
        torch.testing.assert_close(value, getattr(stock, name), rtol=1e-4, atol=1e-4, equal_nan=True)
    assert ours.y[2].isnan().all() if eps == 0 else (ours.y[2] == 0).all()


@pytest.mark.usefixtures("held_or_in_chunks")
def test_casting_none_does_not_overflow_in_fp16(device: str) -> None:
    """Stock squares to inf beyond 255 and returns zeros; here such a square goes on in fp32.

    What is left is the rounding of rstd, near 2^-15 and so below fp16's normal numbers, and of x_hat and y.
    """
    norm = Norm("none", x=FP16, w=FP16)
    inputs = norm.inputs((4, 145), device)
    inputs.x = ((2 * torch.rand(4, 145, generator=torch.Generator().manual_seed(1)) - 1) * 6e4).to(device, FP16)
    assert (run(norm.stock, inputs).y == 0).all()
    ours, reference = run(norm.fused, inputs), run_true(norm, inputs)
    half_step = 2.0**-25
    rstd = inputs.x.double().square().mean(-1, keepdim=True).rsqrt()
    allowed = (half_step / rstd + 2 * torch.finfo(FP16).eps) * reference.y.abs() + half_step
    assert ((ours.y.double() - reference.y).abs() <= allowed).all()
    assert ((ours.dx.double() - reference.dx).abs() <= torch.finfo(FP16).eps * reference.dx.abs() + 2 * half_step).all()
    error = (ours.dw.double() - reference.dw).abs()
    assert (error <= torch.finfo(FP16).eps * scales(norm, inputs, reference)["dw"]).all()


@pytest.mark.slow
def test_a_cpu_without_the_interpreter_takes_the_reference() -> None:
    """And imports what it needs for that without a GPU."""
    program = """
import torch
from fused_norm.kernels import reference, rms_norm
from fused_norm.spec import NormSpec
x, w = torch.randn(3, 7, requires_grad=True), torch.randn(7)
y = rms_norm(x, w, casting="gemma")
assert torch.equal(y, reference.rms_norm(NormSpec("gemma"), x, w))
assert "Function" not in type(y.grad_fn).__name__
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


def test_saved_tensors_may_come_back_in_another_layout(device: str) -> None:
    """Hooks that offload saved tensors do this: a transposed input comes back contiguous."""
    inputs = LLAMA.inputs((2, 3, 5, 64), device)
    inputs.x = in_layout("transposed heads", inputs.x)
    expected = run(LLAMA.fused, inputs)
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.contiguous, torch.clone):
        ours = run(LLAMA.fused, inputs)
    assert torch.equal(ours.dx, expected.dx)
    torch.testing.assert_close(ours.dw, expected.dw, rtol=torch.finfo(BF16).eps, atol=0)


@pytest.mark.gpu(2)
def test_tensors_on_another_than_the_current_device() -> None:
    inputs = LLAMA.inputs((5, 130), "cuda:0")
    expected = run(LLAMA.fused, inputs)
    assert torch.cuda.current_device() == 0
    ours = run(LLAMA.fused, inputs.mapped(lambda tensor: tensor.to("cuda:1")))
    assert torch.cuda.current_device() == 0
    for name, value in ours.present().items():
        assert value.device == torch.device("cuda:1")
        assert torch.equal(value.to("cuda:0"), getattr(expected, name))
