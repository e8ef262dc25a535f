"""Outputs recomputed from what the backward saves, bit for bit and in their layout, without other tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fused_norm.kernels.norm import RECOMPUTED_NORM
from fused_norm.kernels.operator import calls, norm_spec
from fused_norm.spec import CASTINGS, Casting

from .calls import CALLS, Call, every_call
from .conftest import OPERATORS
from .numerics import BF16, FP16

LLAMA, GEMMA = norm_spec("llama", False, 1e-6), norm_spec("gemma", True, 1e-6)


def randn(device: str, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


KEPT = ("norm_add", "rope", "gated_rms_norm", "lora_add")
"""The operators whose outputs are not recomputed."""


class Observer:
    """Calls operators as usual and collects their recomputes."""

    def __init__(self) -> None:
        self.recomputes: list[Any] = []

    def called(self, operator: Any, arguments: tuple[Any, ...]) -> Any:
        outputs = operator.results_of(*arguments)
        results = outputs if isinstance(outputs, tuple) else (outputs,)
        saved = results[0].grad_fn.saved_tensors[-len(operator.extra_saved) :] if operator.extra_saved else ()
        self.recomputes.append(operator.recompute(arguments, (*results, *saved)))
        return outputs


def assert_recomputed_or_kept(call: Call) -> None:
    """Assert equal bits; outputs are kept if another operator computes them or the saved rstd is not the used one."""
    operator, observer = OPERATORS[call.name], Observer()
    with calls.by(observer):
        outputs = call.outputs(call.leaves())
    (recompute,) = observer.recomputes
    is_kept = call.name in KEPT or (call.name != "qk_norm" and call.spec is not None and call.spec.casting == "none")
    assert (recompute is None) == is_kept
    if recompute is None:
        return
    again = recompute.outputs()
    assert len(again) == len(recompute.operator.outputs) == (2 if call.name == "qk_norm" else 1)
    for output, recomputed in zip(outputs, again, strict=False):
        assert recomputed is not output
        assert not recomputed.requires_grad
        assert (recomputed.stride(), recomputed.dtype) == (output.stride(), output.dtype)
        assert torch.equal(recomputed, output), operator.name


@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_kept_is_what_an_operator_saves_last(name: str) -> None:
    operator = OPERATORS[name]
    saved = [declaration.split()[-1] for declaration in operator.saved.split(",")] if operator.saved else []
    saved = saved[: len(saved) - len(operator.unhooked)]
    if operator.extra_saved and saved:
        assert saved[-len(operator.extra_saved) :] == list(operator.extra_saved)


@CALLS
@pytest.mark.parametrize("layout", ["contiguous", "transposed heads"])
def test_outputs_are_recomputed_bit_for_bit_or_kept(layout: str, case: str, device: str) -> None:
    assert_recomputed_or_kept(every_call(device, layout)[case])


@pytest.mark.parametrize("casting", CASTINGS)
@pytest.mark.parametrize("dtype", [None, BF16, FP16], ids=str)
def test_norms_are_recomputed_with_the_roundings_of_their_casting(
    casting: Casting, dtype: torch.dtype | None, device: str
) -> None:
    for case in ("norm", "add", "add in gemma", "sandwich"):
        call = every_call(device, dtype=dtype)[case]
        assert_recomputed_or_kept(call.with_spec(casting=casting, eps=1e-6))


@pytest.mark.parametrize(("case", "width"), [("norm", 5000), ("sandwich", 2100)])
def test_wide_rows_are_recomputed(case: str, width: int, device: str) -> None:
    assert_recomputed_or_kept(every_call(device, rows=1, width=width, dtype=BF16)[case])


def test_the_rows_of_an_output_recomputed_come_from_the_rstd(device: str) -> None:
    x, weight = randn(device, 6, 40), randn(device, 40)
    rstd = torch.rand(6, 1, device=device)
    with torch.no_grad():
        y = RECOMPUTED_NORM(x, weight, rstd, GEMMA, None)
        expected = (x.float() * rstd * (1 + weight.float())).to(BF16)
    assert torch.equal(y, expected)
    for wrong in (torch.rand(6, device=device), torch.rand(5, 1, device=device)):
        with pytest.raises(ValueError, match="rstd has shape"):
            RECOMPUTED_NORM.checked(x, weight, wrong, GEMMA, None)
    with pytest.raises(ValueError, match="'none'"):
        RECOMPUTED_NORM.checked(x, weight, rstd, norm_spec("none", False, 1e-6), None)


def test_an_empty_output_is_recomputed(device: str) -> None:
    x, weight = randn(device, 0, 40), randn(device, 40)
    with torch.no_grad():
        assert RECOMPUTED_NORM(x, weight, torch.empty(0, 1, device=device), LLAMA, None).shape == (0, 40)


def test_an_observer_is_left_with_its_block() -> None:
    def fail() -> None:
        with calls.by(Observer()):
            assert calls.interceptor is not None
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert calls.interceptor is None
