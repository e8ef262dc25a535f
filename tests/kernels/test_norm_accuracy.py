"""Norms of every meaning, dtype and width, with an add and without, are as near to float64 as the stock code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fused_norm.spec import CASTINGS

from ..conftest import slow_rows
from .numerics import BASE_CASTINGS, BF16, DTYPES, FP16, FP32, WIDE, WIDTHS, Norm, called, run, run_true, scales
from .sandwich import Sandwich
from .sandwich import scales as sandwich_scales

LLAMA, ADDED = Norm("llama", x=BF16, w=BF16), Norm("llama", x=BF16, w=BF16, r=BF16)
GEMMA = Norm("gemma", zero_centered=True, x=FP32, w=FP32)
ADDED_GEMMA = Norm("gemma", zero_centered=True, x=BF16, w=FP32, r=FP32)
CLOSED = Sandwich("gemma", True, BF16, BF16, BF16, BF16)
MIXED = Sandwich("llama", True, BF16, FP16, FP32, BF16)

NORMS = [
    *(Norm(c, z, x=x, w=w) for c in CASTINGS for z in (False, True) for x in DTYPES for w in DTYPES),
    *(Norm(c, x=x, w=None) for c in CASTINGS for x in DTYPES),
]
# Every pair of dtypes of x and residual; each dtype of the weight goes with a third of them.
PAIRS = [(x, r, DTYPES[(i + j) % 3]) for i, x in enumerate(DTYPES) for j, r in enumerate(DTYPES)]
SUMS = [
    *(Norm(c, z, x=x, w=w, r=r) for c in BASE_CASTINGS for z in (False, True) for x, r, w in PAIRS),
    *(Norm(c, z, x=BF16, w=BF16, r=BF16) for c in BASE_CASTINGS for z in (False, True)),
    *(Norm(c, x=x, w=None, r=x) for c in BASE_CASTINGS for x in DTYPES),
    Norm("rounded_gamma", True, x=FP32, w=BF16, r=BF16),
    *(Norm("weight_dtype", x=x, w=w, r=r) for x, r, w in ((BF16, BF16, FP32), (BF16, FP32, BF16), (FP32, FP16, BF16))),
    *(Norm("rounded_rstd", x=x, w=w, r=r) for x, r, w in ((BF16, BF16, None), (FP16, FP16, FP32), (BF16, FP32, FP16))),
    *(
        Norm(c, x=x, w=BF16, r=r, scale=0.22)
        for c in BASE_CASTINGS
        for x, r in ((BF16, BF16), (FP32, FP32), (BF16, FP32))
    ),
    *(
        Norm("gemma", True, x=x, w=FP32, r=r, scale=scale)
        for scale in (2, -1.5)
        for x, r in ((BF16, FP16), (FP32, BF16))
    ),
]
SANDWICHED = [
    (FP32, FP32, FP32, FP32),
    (BF16, BF16, BF16, BF16),
    (FP16, FP16, FP16, FP16),
    (BF16, BF16, FP32, FP32),
    (BF16, FP32, BF16, BF16),
    (FP32, BF16, BF16, FP16),
    (BF16, FP16, FP16, BF16),
]
"""The dtypes of x, the residual, the inner weight and the weight."""
SANDWICHES = [
    *(Sandwich(c, z, *dtypes) for c in BASE_CASTINGS for z in (False, True) for dtypes in SANDWICHED),
    *(Sandwich(c, False, BF16, BF16, *weights) for c in BASE_CASTINGS for weights in ((None, BF16), (FP32, None))),
    *(Sandwich(c, False, BF16, BF16, None, None) for c in BASE_CASTINGS),
    *(Sandwich("weight_dtype", False, *dtypes) for dtypes in SANDWICHED[3:]),
    Sandwich("weight_dtype", True, BF16, BF16, None, FP32),
    Sandwich("rounded_gamma", True, BF16, FP32, BF16, BF16),
    Sandwich("rounded_gamma", True, FP32, BF16, BF16, FP16),
    Sandwich("rounded_rstd", False, BF16, BF16, None, BF16),
    Sandwich("rounded_rstd", True, FP16, FP32, FP16, BF16),
    *(Sandwich(c, z, *dtypes).opened for c in BASE_CASTINGS for z in (False, True) for dtypes in SANDWICHED),
    *(Sandwich(c, False, BF16, r, None).opened for c in BASE_CASTINGS for r in (BF16, FP32)),
    Sandwich("weight_dtype", False, FP32, FP32, BF16).opened,
    Sandwich("rounded_rstd", False, BF16, FP32, None).opened,
    Sandwich("rounded_gamma", True, FP32, BF16, BF16).opened,
    replace(CLOSED, eps=3.0),
]


@pytest.mark.parametrize("norm", [*NORMS, *SUMS, *SANDWICHES], ids=str)
def test_every_meaning_is_as_accurate_as_the_stock_code(norm: Norm | Sandwich, device: str) -> None:
    norm.assert_right(norm.inputs((35, 130), device))


# Below, at and above every limit of the plans of sandwiches up to 8192.
SANDWICH_WIDTHS = (1, 7, 64, 123, 130, 513, 640, 1024, 1025, 2048, 2304, 3840, 4097, 5376)
WITH_WEIGHTS = [
    *((norm, width) for norm in (LLAMA, GEMMA) for width in WIDTHS),
    *((CLOSED.opened, width) for width in (1, 7, 64, 123, 513, 1024, 1025, 3840, 5376)),
    *slow_rows(*((norm, width) for norm in (LLAMA, GEMMA) for width in WIDE)),
    *slow_rows(*((ADDED_GEMMA, width) for width in (*WIDTHS, *WIDE))),
    *slow_rows(*((sandwich, width) for sandwich in (CLOSED, MIXED) for width in SANDWICH_WIDTHS)),
]


@pytest.mark.parametrize(("norm", "width"), WITH_WEIGHTS, ids=str)
def test_every_width_is_as_accurate_as_the_stock_code(norm: Norm | Sandwich, width: int, device: str) -> None:
    """``test_norm_kernels`` has another spec beside every limit of the plans."""
    rows = 67 if width <= 130 else 19 if width <= 512 else 3
    norm.assert_right(norm.inputs((rows, width), device))


@pytest.mark.parametrize(
    ("norm", "width"),
    [
        *((norm, width) for norm in (LLAMA, ADDED) for width in WIDE),
        *((CLOSED, width) for width in (2304, 3840, 4097, 5376)),
    ],
    ids=str,
)
def test_wide_rows_are_as_accurate_as_the_stock_code(norm: Norm | Sandwich, width: int, device: str) -> None:
    """Weights are frozen, because their gradients take the interpreter most of its time."""
    norm.assert_right(norm.inputs((3, width), device), frozen=("inner", "w"))


@pytest.mark.parametrize(
    "norm",
    [
        *(LLAMA, GEMMA, Norm(x=FP16, w=None), Norm("none", True, BF16, BF16), Norm("none", x=FP16, w=FP32)),
        *(Norm("weight_dtype", x=FP32, w=BF16), Norm("rounded_rstd", x=BF16, w=BF16), ADDED, ADDED_GEMMA),
        *(Norm("none", True, x=BF16, w=BF16, r=FP16), Norm(x=BF16, w=BF16, r=BF16, scale=0.22)),
        Norm(r=FP32, scale=0.22),
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
