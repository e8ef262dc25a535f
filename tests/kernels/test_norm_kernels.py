"""The launchers: what they write, and that they write nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fused_norm.kernels import norm_kernels, triton_utils

from .numerics import BF16, CHUNKED, FP32, Norm, make_inputs, run

GUARD = 4096
SENTINEL = 1234.0


class Guarded:
    """Allocates tensors with guard bands on both sides, and tells whether anything was written there."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None, width: int | None = None) -> Tensor:
        plain = triton_utils.empty_rows_like(x, dtype, width)
        buffer = torch.full((plain.numel() + 2 * GUARD,), SENTINEL, dtype=plain.dtype, device=plain.device)
        buffer[GUARD:-GUARD] = float("nan")
        self.buffers.append(buffer)
        return buffer.as_strided(plain.shape, plain.stride(), GUARD)

    def intact(self) -> bool:
        return all((b[:GUARD] == SENTINEL).all() and (b[-GUARD:] == SENTINEL).all() for b in self.buffers)


@pytest.mark.parametrize("r", [None, BF16], ids=["alone", "residual"])
@pytest.mark.parametrize("shape", [(67, 3), (67, 80), (19, 409), (3, 1023), (3, 2500), (5, CHUNKED)], ids=str)
def test_kernels_write_every_element_and_nothing_beside(
    shape: tuple[int, int], r: torch.dtype | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = Norm("llama", x=BF16, w=BF16, r=r)
    inputs = make_inputs(norm, shape, device)
    guarded = Guarded()
    monkeypatch.setattr(norm_kernels, "empty_rows_like", guarded)
    y, s, rstd = norm_kernels.launch_forward(inputs.x, inputs.r, inputs.w, 1e-6, "llama", False, True)
    dx = guarded(s)
    dr = None if r is None else guarded(s)
    dw_buffer = torch.full((shape[-1] + 2 * GUARD,), SENTINEL, dtype=BF16, device=device)
    dw = dw_buffer[GUARD:-GUARD].fill_(float("nan"))
    norm_kernels.launch_backward(inputs.dy, inputs.ds, s, inputs.w, rstd, "llama", False, dx, dr, dw)
    assert guarded.intact()
    assert len(guarded.buffers) == (3 if r is None else 5)
    assert (dw_buffer[:GUARD] == SENTINEL).all()
    assert (dw_buffer[-GUARD:] == SENTINEL).all()
    monkeypatch.undo()
    expected = run(norm.fused, inputs)
    for name, value in {"y": y, "s": None if r is None else s, "dx": dx, "dr": dr, "dw": dw}.items():
        assert value is None or torch.equal(value, getattr(expected, name)), name


def test_a_grid_may_be_smaller_than_the_rows_need(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = Norm("llama", x=BF16, w=BF16)
    inputs = make_inputs(norm, (13, CHUNKED), device)
    whole = run(norm.fused, inputs, frozen="w")
    monkeypatch.setattr(norm_kernels, "_GRID_LIMIT", 2)
    assert torch.equal(run(norm.fused, inputs, frozen="w").dx, whole.dx)


@pytest.mark.parametrize("width", [80, CHUNKED])
def test_rstd_is_saved_for_the_backward_alone(width: int, device: str) -> None:
    inputs = make_inputs(Norm("none", x=BF16, w=BF16), (5, width), device)
    _, _, rstd = norm_kernels.launch_forward(inputs.x, None, inputs.w, 1e-6, "none", False, True)
    exact = (inputs.x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert rstd.dtype == FP32
    torch.testing.assert_close(rstd.double(), exact, rtol=8 * torch.finfo(FP32).eps, atol=0)
    _, _, none = norm_kernels.launch_forward(inputs.x, None, inputs.w, 1e-6, "none", False, False)
    assert none.numel() == 0
