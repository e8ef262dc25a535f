"""If a weight is written to between a forward and its backward, gradients or the error are stock's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fused_norm.spec import NormSpec

from .calls import Call, every_call, present
from .conftest import OPERATORS
from .numerics import BF16, FP32, STOCK

WEIGHTS = ("weight", "inner_weight", "q_weight", "k_weight", "a", "b")
NEEDED = {"all": lambda name: True, "weights": lambda name: name in WEIGHTS, "others": lambda name: name not in WEIGHTS}
CONSUMERS = 3


def uncast_gemma(x: Tensor, weight: Tensor, spec: NormSpec, _: None) -> Tensor:
    """The norm of OLMo 2: a 16-bit weight meets the row in fp32, and the product casts it."""
    row = x.float()
    return (weight * (row * torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + spec.eps))).to(x.dtype)


def call_of(kind: str, spec: NormSpec | None, x: torch.dtype, w: torch.dtype, device: str) -> Call:
    """Return a call with weights in one dtype and all other tensors in another."""
    calls = every_call(device, width=24)
    norm, add = calls["norm"], calls["add"]
    calls["one dimension"] = norm.placed(0, norm.tensors[0][0, 0, 0])
    calls["add of a half"] = add._replace(options=(spec, None, 0.5))
    calls["consumers"] = norm._replace(name="rms_norm_for_consumers", options=(spec, CONSUMERS, None, 0))
    call = calls[kind]
    if spec is not None:
        call = call._replace(options=(spec, *call.options[1:]))
    dtypes = [w if name in WEIGHTS else x for name in OPERATORS[call.name].tensor_names]
    tensors = zip(call.tensors, dtypes, strict=True)
    return call._replace(tensors=[None if tensor is None else tensor.to(dtype) for tensor, dtype in tensors])


def stock_of(call: Call) -> Callable[..., Any]:
    """Return the stock code of a call: one output for all consumers."""
    reference = OPERATORS[call.name].reference
    if call.name == "rms_norm_for_consumers":
        return lambda *args: [
            y for y, times in zip(reference(*args), (CONSUMERS, 1), strict=True) for _ in range(times)
        ]
    return reference if call.spec is None or call.spec.casts_weight else uncast_gemma


def outcome(function: Callable[..., Any], call: Call, needed: str, is_counted: bool) -> Any:
    """Return the gradients if weights are written to before the backward, or "error" if autograd sees the write."""
    names = OPERATORS[call.name].tensor_names
    leaves = [None if tensor is None else tensor.clone() for tensor in call.tensors]
    for name, leaf in list(zip(names, leaves, strict=True))[: call.differentiated]:
        leaf.requires_grad_(NEEDED[needed](name))
    outputs = [output for output in call.outputs(leaves, function) if output.requires_grad]
    for name, leaf in zip(names, leaves, strict=True):
        if name in WEIGHTS:
            with torch.no_grad():
                (leaf if is_counted else leaf.data).mul_(-3)
    dys = [torch.linspace(-1, 2, output.numel()).view_as(output).to(output) for output in outputs]
    inputs = [leaf for leaf in present(leaves) if leaf.requires_grad]
    try:
        return torch.autograd.grad(outputs, inputs, dys, allow_unused=True)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return "error"


def check(call: Call, needed: Sequence[str] = ("all",)) -> None:
    """Compare the results after writes of both kinds, for the call that is recorded and for one that repeats it."""
    roundoff = max(torch.finfo(tensor.dtype).eps for tensor in present(call.tensors))
    for which, is_counted in itertools.product(needed, (False, True)):
        expected = outcome(stock_of(call), call, which, is_counted)
        for _ in range(2):
            actual = outcome(OPERATORS[call.name], call, which, is_counted)
            assert (actual == "error") == (expected == "error"), (which, is_counted)
            for a, b in zip(actual, expected, strict=True) if actual != "error" else ():
                difference = (a.double() - b.double()).norm() / b.double().norm()
                assert a.dtype == b.dtype
                assert difference < 4 * roundoff, (which, is_counted)


SPECS = [NormSpec(casting, zero_centered) for casting in STOCK for zero_centered in (False, True)]
SPECS.append(NormSpec("gemma", casts_weight=False))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec}, {spec.casts_weight}")
def test_with_any_rounding_a_norms_backward_reads_what_stocks_does(spec: NormSpec, device: str) -> None:
    call = call_of("norm", spec, BF16, BF16, device)
    check(call, tuple(NEEDED))
    with FlopCounterMode(display=False):  # by the registered operator
        check(call)


@pytest.mark.parametrize(
    ("spec", "dtypes"), [(NormSpec("gemma", True), (BF16, BF16)), (NormSpec("llama"), (BF16, FP32))], ids=str
)
@pytest.mark.parametrize(
    "kind",
    [
        *("one dimension", "add of a half", "norm and add", "sandwich", "consumers"),
        *("heads", "heads rotated", "heads rotated in part", "gate first"),
    ],
)
def test_every_operators_backward_reads_what_stocks_does(
    kind: str, spec: NormSpec, dtypes: tuple[torch.dtype, torch.dtype], device: str
) -> None:
    check(call_of(kind, spec, *dtypes, device))


@pytest.mark.parametrize(("x", "weights"), [(BF16, FP32), (BF16, BF16)])
def test_an_adapters_backward_reads_what_stocks_does(x: torch.dtype, weights: torch.dtype, device: str) -> None:
    check(call_of("adapter", None, x, weights, device), tuple(NEEDED))
