"""Norms of every meaning, dtype and width, with an add and without, are as near to float64 as the stock code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ..conftest import slow_rows
from .numerics import BASE_CASTINGS, BF16, FP16, FP32, STOCK, WIDE, WIDTHS, Norm, called, run, run_true, scales
from .sandwich import Sandwich
from .sandwich import scales as sandwich_scales

LLAMA, ADDED = Norm("llama", x=BF16, w=BF16), Norm("llama", x=BF16, w=BF16, r=BF16)
GEMMA = Norm("gemma", zero_centered=True, x=FP32, w=FP32)
ADDED_GEMMA = Norm("gemma", zero_centered=True, x=BF16, w=FP32, r=FP32)
CLOSED = Sandwich("gemma", True, BF16, BF16, BF16, BF16)
MIXED = Sandwich("llama", True, BF16, FP16, FP32, BF16)

# The dtypes of x and the weight: one fp16, which rounds as bf16 does.
WEIGHTED = [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP32, BF16), (FP16, BF16)]
NORMS = [
    *(Norm(c, z, x=x, w=w) for c in STOCK for z in (False, True) for x, w in WEIGHTED),
    *(Norm(c, x=x, w=None) for c in STOCK for x in (BF16, FP32)),
]
SUMS = [
    *(Norm(c, c == "gemma", x=x, w=w, r=r) for c in STOCK for x, r, w in ((BF16, BF16, BF16), (FP32, BF16, BF16))),
    *(
        Norm(c, c != "gemma", x=x, w=w, r=r)
        for c in BASE_CASTINGS
        for x, r, w in ((BF16, FP32, BF16), (BF16, FP16, FP32))
    ),
    *(Norm(c, x=BF16, w=None, r=BF16) for c in BASE_CASTINGS),
    *(Norm(c, x=BF16, w=BF16, r=r, scale=0.22) for c in BASE_CASTINGS for r in (BF16, FP32)),
    Norm(x=FP32, r=FP32, scale=0.22),
    Norm("gemma", True, x=FP32, w=FP32, r=BF16, scale=-1.5),
]
SANDWICHED = [(FP32, FP32, FP32, FP32), (BF16, BF16, BF16, BF16), (BF16, FP32, BF16, BF16), (FP32, BF16, BF16, FP16)]
"""The dtypes of x, the residual, the inner weight and the weight."""
SANDWICHES = [
    *(Sandwich(c, c == "gemma", *dtypes) for c in STOCK for dtypes in SANDWICHED[1:3]),
    *(
        Sandwich(c, c != "gemma", *dtypes)
        for c in BASE_CASTINGS
        for dtypes in (*SANDWICHED[::3], (BF16, FP16, FP16, BF16))
    ),
    *(Sandwich(c, False, BF16, BF16, *ws) for c in BASE_CASTINGS for ws in ((None, BF16), (FP32, None), (None, None))),
    *(Sandwich(c, c == "gemma", *dtypes).opened for c in STOCK for dtypes in SANDWICHED[2:]),
    *(Sandwich(c, False, BF16, BF16, None).opened for c in BASE_CASTINGS),
    replace(CLOSED, eps=3.0),
]


@pytest.mark.parametrize("norm", [*NORMS, *SUMS, *SANDWICHES], ids=str)
def test_every_meaning_is_as_accurate_as_the_stock_code(norm: Norm | Sandwich, device: str) -> None:
    norm.assert_right(norm.inputs((35, 130), device))


WITH_WEIGHTS = [
    *((LLAMA, width) for width in WIDTHS),
    *((norm, width) for norm in (GEMMA, CLOSED.opened) for width in (3, 513, 1025)),
    *slow_rows(*((ADDED_GEMMA, width) for width in (1, 1023, *WIDE))),
    *slow_rows(*((CLOSED, width) for width in (1, 7, 123, 513, 1025, 2304, 4097, 5376))),
]


@pytest.mark.parametrize(("norm", "width"), WITH_WEIGHTS, ids=str)
def test_every_width_is_as_accurate_as_the_stock_code(norm: Norm | Sandwich, width: int, device: str) -> None:
    """``test_norm_kernels`` has another spec beside every limit of the plans."""
    rows = 67 if width <= 130 else 19 if width <= 512 else 3
    norm.assert_right(norm.inputs((rows, width), device))


@pytest.mark.parametrize(
    ("norm", "width"), [*((ADDED, width) for width in WIDE), (LLAMA, WIDE[-1]), (MIXED, 2304), (CLOSED, 5376)], ids=str
)
def test_wide_rows_are_as_accurate_as_the_stock_code(norm: Norm | Sandwich, width: int, device: str) -> None:
    """Weights are frozen, because their gradients take the interpreter most of its time."""
    norm.assert_right(norm.inputs((3, width), device), frozen=("inner", "w"))


@pytest.mark.parametrize(
    "norm",
    [
        *(LLAMA, GEMMA, Norm("none", x=FP16, w=FP32), Norm("rounded_rstd", x=BF16, w=None), ADDED_GEMMA),
        *(Norm("none", True, x=BF16, w=BF16, r=FP16), Norm(r=FP32, scale=0.22)),
    ],
    ids=str,
)
@pytest.mark.usefixtures("in_chunks")
def test_rows_in_chunks_are_as_accurate_as_the_stock_code(norm: Norm, device: str) -> None:
    norm.assert_right(norm.inputs((13, 145), device))


@pytest.mark.parametrize(
    ("norm", "names"),
    [
        (Norm("gemma", True, x=BF16, w=BF16), ("dx", "dw")),
        (Norm("gemma", x=FP32, r=FP32, w=BF16), ("dw",)),
        (Sandwich("gemma", False, FP32, FP32, BF16, BF16), ("dinner", "dw")),
    ],
    ids=["norm", "sum", "sandwich"],
)
def test_gradients_are_summed_in_fp32_and_rounded_once(
    norm: Norm | Sandwich, names: Sequence[str], device: str
) -> None:
    """So the error of an element is half a unit of it; a sum of a thousand rows in bf16 would be off by several."""
    inputs = norm.inputs((1030, 33), device)
    s = called(norm.true, inputs.mapped(Tensor.double)).s
    inputs.dy = inputs.dy.abs() * (inputs.x if s is None else s).sign().to(inputs.dy)
    if isinstance(norm, Sandwich):
        inputs.ds = 8 * inputs.ds.abs() * inputs.x.sign()
    ours, reference = run(norm.fused, inputs), run_true(norm, inputs)
    units = sandwich_scales(norm, inputs) if isinstance(norm, Sandwich) else scales(norm, inputs, reference)
    for name in names:
        exact = getattr(reference, name)
        allowed = torch.finfo(BF16).eps / 2 * exact.abs() + 16 * torch.finfo(FP32).eps * units[name]
        assert ((getattr(ours, name).double() - exact).abs() <= allowed).all(), name


@pytest.mark.parametrize("norm", [ADDED, Sandwich(x=BF16, r=BF16, inner=BF16, w=BF16)], ids=["sum", "sandwich"])
def test_one_tensor_as_branch_and_residual_and_one_weight_for_both_norms(norm: Norm | Sandwich, device: str) -> None:
    inputs = norm.inputs((5, 130), device)
    inputs = inputs.but(r=inputs.x, w=inputs.inner if isinstance(norm, Sandwich) else inputs.w)
    separate = run(norm.fused, inputs)
    x, w = (tensor.detach().requires_grad_() for tensor in (inputs.x, inputs.w))
    weights = (w, w) if isinstance(norm, Sandwich) else (w,)
    torch.autograd.backward(norm.fused(x, x, *weights), (inputs.dy, inputs.ds))
    assert torch.equal(x.grad, separate.dx + separate.dr)
    assert torch.equal(w.grad, separate.dw if separate.dinner is None else separate.dinner + separate.dw)
