"""Outputs recomputed from what the backward saves, bit for bit and in their layout, without other tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fused_norm.spec import NormSpec

from .calls import CALLS, Call, every_call
from .conftest import OPERATORS
from .numerics import BF16, STOCK

KEPT = ("norm_add", "rope", "gated_rms_norm", "lora_add")
"""The operators whose outputs are not recomputed."""


def recompute_of(call: Call) -> tuple[list[Tensor], Any]:
    """The outputs of a call, and its operator's recompute of them."""
    operator, recomputes = OPERATORS[call.name], []

    def observed(*arguments: Any) -> Any:
        outputs = operator(*arguments)
        results = outputs if isinstance(outputs, tuple) else (outputs,)
        saved = results[0].grad_fn.saved_tensors[-len(operator.extra_saved) :] if operator.extra_saved else ()
        recomputes.append(operator.recompute(arguments, (*results, *saved)))
        return outputs

    return call.outputs(call.leaves(), observed), recomputes[0]


def assert_recomputed_or_kept(call: Call) -> None:
    """Assert equal bits; outputs are kept if another operator computes them or the saved rstd is not the used one."""
    outputs, recompute = recompute_of(call)
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
        assert torch.equal(recomputed, output), call.name


@CALLS
def test_outputs_are_recomputed_bit_for_bit_or_kept(case: str, device: str) -> None:
    assert_recomputed_or_kept(every_call(device, "transposed heads")[case])


@pytest.mark.parametrize("casting", STOCK)
@pytest.mark.parametrize("dtype", [None, BF16], ids=str)
def test_norms_are_recomputed_with_the_roundings_of_their_casting(
    casting: str, dtype: torch.dtype | None, device: str
) -> None:
    for case, width in (("norm", 16), ("add", 16), ("add in gemma", 16), ("sandwich", 16), ("norm", 5000)):
        call = every_call(device, rows=1, width=width, dtype=dtype)[case]
        assert_recomputed_or_kept(call.with_spec(casting=casting, eps=1e-6))


def test_the_rows_of_an_output_recomputed_come_from_the_rstd(device: str) -> None:
    recomputed, gemma = recompute_of(every_call(device)["norm"])[1].operator, NormSpec("gemma", True)
    weight = torch.randn(40, device=device).to(BF16)
    for rows in (6, 0):
        x, rstd = torch.randn(rows, 40, device=device).to(BF16), torch.rand(rows, 1, device=device)
        expected = (x.float() * rstd * (1 + weight.float())).to(BF16)
        assert torch.equal(recomputed(x, weight, rstd, gemma, None), expected)
    x = torch.randn(6, 40, device=device).to(BF16)
    for wrong in (torch.rand(6, device=device), torch.rand(5, 1, device=device)):
        with pytest.raises(ValueError, match="rstd has shape"):
            recomputed.checked(x, weight, wrong, gemma, None)
    with pytest.raises(ValueError, match="'none'"):
        recomputed.checked(x, weight, torch.rand(6, 1, device=device), NormSpec("none"), None)
