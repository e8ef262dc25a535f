"""Outputs recomputed from what the backward keeps: bit for bit, in the layout they had, and of what was kept alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_norm.kernels.norm import RECOMPUTED_NORM
from fused_norm.kernels.operator import calls, norm_spec
from fused_norm.spec import NormSpec

from .conftest import OPERATORS
from .numerics import BF16, FP16, FP32

LLAMA, GEMMA = norm_spec("llama", False, 1e-6), norm_spec("gemma", True, 1e-6)
CENTERED = norm_spec("llama", True, 1e-3)


def made(device: str, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


def _norm(
    name: str, shape: tuple[int, ...], x: torch.dtype, w: torch.dtype | None, r: torch.dtype | None = None
) -> Any:
    def arguments(device: str) -> tuple[Any, ...]:
        weight = None if w is None else made(device, shape[-1], dtype=w)
        if name == "rms_norm":
            return made(device, *shape, dtype=x), weight, None
        residual = made(device, *shape, dtype=r or x)
        if name == "add_rms_norm":
            return made(device, *shape, dtype=x), residual, weight, None, 0.5
        return made(device, *shape, dtype=x), residual, made(device, shape[-1], dtype=w or x), weight

    return name, arguments


def _transposed(device: str) -> tuple[Any, ...]:
    return made(device, 2, 3, 5, 40).transpose(1, 2), made(device, 40), None


def _heads(device: str, dtype: torch.dtype | None = None) -> tuple[Any, ...]:
    """Written in ``dtype``, if given, in the place of float32."""
    q, k = made(device, 2, 5, 4, 16).transpose(1, 2), made(device, 2, 5, 2, 16).transpose(1, 2)
    angles = BF16 if dtype is None else FP32
    cos, sin = (made(device, 2, 5, 16, dtype=angles).detach() for _ in range(2))
    return q, k, made(device, 16), made(device, 16), cos, sin, 1, dtype


CASES: list[tuple[str, NormSpec | None, Callable[[str], tuple[Any, ...]]]] = [
    (name, spec, arguments)
    for spec, (name, arguments) in [
        (LLAMA, _norm("rms_norm", (3, 5, 40), BF16, BF16)),
        (LLAMA, _norm("rms_norm", (3, 5, 40), BF16, FP32)),
        (LLAMA, _norm("rms_norm", (7, 40), FP16, None)),
        (LLAMA, _norm("rms_norm", (2, 5000), BF16, BF16)),
        (GEMMA, _norm("rms_norm", (3, 5, 40), FP32, BF16)),
        (CENTERED, ("rms_norm", _transposed)),
        (LLAMA, _norm("add_rms_norm", (3, 5, 40), BF16, BF16)),
        (norm_spec("weight_dtype", False, 1e-6), _norm("add_rms_norm", (3, 5, 40), BF16, FP32)),
        (norm_spec("rounded_rstd", False, 1e-6), _norm("rms_norm", (3, 5, 40), BF16, BF16)),
        (GEMMA, _norm("add_rms_norm", (3, 5, 40), BF16, BF16, FP32)),
        (GEMMA, _norm("norm_add_norm", (3, 5, 40), BF16, BF16)),
        (LLAMA, _norm("norm_add_norm", (2, 2100), BF16, BF16, FP32)),
        (LLAMA, ("qk_norm", _heads)),
        (LLAMA, ("qk_norm", partial(_heads, dtype=FP16))),
        (None, ("glu", lambda device: (made(device, 3, 5, 40), made(device, 3, 5, 40), "silu"))),
        (None, ("glu", lambda device: (made(device, 3, 5, 80), None, "gelu_tanh"))),
    ]
]


class Observer:
    """Calls operators as they are called without it, and keeps their recomputes."""

    def __init__(self) -> None:
        self.recomputes: list[Any] = []

    def called(self, operator: Any, spec: NormSpec, arguments: tuple[Any, ...]) -> Any:
        outputs = operator.results_of(spec, *arguments)
        results = outputs if isinstance(outputs, tuple) else (outputs,)
        kept = results[0].grad_fn.saved_tensors[-len(operator.kept) :] if operator.kept else ()
        self.recomputes.append(operator.recompute(spec, arguments, (*results, *kept)))
        return outputs


def _check(name: str, spec: NormSpec, arguments: tuple[Any, ...]) -> Any:
    observer = Observer()
    with calls.by(observer):
        results = OPERATORS[name](spec, *arguments)
    outputs = results if isinstance(results, tuple) else (results,)
    (recompute,) = observer.recomputes
    again = recompute.outputs()
    for output, recomputed in zip(outputs, again, strict=False):
        assert recomputed is not output
        assert not recomputed.requires_grad
        assert recomputed.stride() == output.stride()
        assert recomputed.dtype == output.dtype
        assert torch.equal(recomputed, output)
    return recompute


@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_kept_is_what_an_operator_saves_last(name: str) -> None:
    operator = OPERATORS[name]
    saved = [one.split()[-1] for one in operator.saved.split(",")] if operator.saved else []
    if operator.kept and saved:
        assert saved[-len(operator.kept) :] == list(operator.kept)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_outputs_are_recomputed_bit_for_bit(case: Any, device: str) -> None:
    name, spec, arguments = case
    recompute = _check(name, spec, arguments(device))
    assert len(recompute.operator.outputs) == (2 if name == "qk_norm" else 1)


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "norm_add_norm"])
def test_a_norm_that_uses_another_rstd_than_it_keeps_is_not_recomputed(name: str, device: str) -> None:
    _, arguments = _norm(name, (3, 40), FP16, FP16)
    observer = Observer()
    with calls.by(observer):
        OPERATORS[name](norm_spec("none", False, 1e-6), *arguments(device))
    assert observer.recomputes == [None]


def test_sums_and_rotations_without_a_norm_and_adapters_are_not_recomputed(device: str) -> None:
    x, residual, weight = made(device, 3, 40), made(device, 3, 40), made(device, 40)
    q, k, _, _, cos, sin, heads_dim, dtype = _heads(device)
    observer = Observer()
    with calls.by(observer):
        OPERATORS["norm_add"](LLAMA, x, residual, weight)
        OPERATORS["rope"](None, q, k, cos, sin, heads_dim, False, dtype)
        OPERATORS["lora_add"](None, residual, x, made(device, 4, 40), made(device, 40, 4), 2.0)
    assert observer.recomputes == [None, None, None]


def test_the_rows_of_an_output_recomputed_come_from_the_rstd(device: str) -> None:
    x, weight = made(device, 6, 40), made(device, 40)
    rstd = torch.rand(6, 1, device=device)
    with torch.no_grad():
        y = RECOMPUTED_NORM(GEMMA, x, weight, rstd, None)
        expected = (x.float() * rstd * (1 + weight.float())).to(BF16)
    assert torch.equal(y, expected)
    for wrong in (torch.rand(6, device=device), torch.rand(5, 1, device=device)):
        with pytest.raises(ValueError, match="rstd has shape"):
            RECOMPUTED_NORM.checked(GEMMA, x, weight, wrong, None)
    with pytest.raises(ValueError, match="'none'"):
        RECOMPUTED_NORM.checked(norm_spec("none", False, 1e-6), x, weight, rstd, None)


def test_an_empty_output_is_recomputed(device: str) -> None:
    x, weight = made(device, 0, 40), made(device, 40)
    with torch.no_grad():
        assert RECOMPUTED_NORM(LLAMA, x, weight, torch.empty(0, 1, device=device), None).shape == (0, 40)


def test_an_observer_is_left_with_its_block() -> None:
    def fail() -> None:
        with calls.by(Observer()):
            assert calls.observer is not None
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert calls.observer is None
