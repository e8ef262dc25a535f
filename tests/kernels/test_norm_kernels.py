"""The launchers of norms under plans of every kind write their results and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fused_norm.kernels import MODES, norm_kernels, recording
from fused_norm.kernels.triton.launch import Launch

from ..conftest import slow_rows
from .conftest import IN_TWO_PIECES, Planned
from .numerics import BF16, FP16, FP32, Norm, assert_same, assert_same_row, run, run_true

LLAMA = Norm("llama", x=BF16, w=BF16)


@pytest.mark.parametrize("way", ["held", "in chunks"])
def test_rstd_is_saved_unrounded_and_for_the_backward_alone(
    way: str, device: str, launches: list[Launch], request: pytest.FixtureRequest
) -> None:
    if way == "in chunks":
        request.getfixturevalue("in_chunks")
    norm = Norm("none", x=BF16, w=BF16)
    inputs = norm.inputs((5, 145), device)
    exact = (inputs.x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    run(norm.fused, inputs)
    (rstd,) = (tensor for tensor in launches[0].tensors if tensor is not None and tensor.shape == exact.shape)
    assert rstd.dtype == FP32
    torch.testing.assert_close(rstd.double(), exact, rtol=8 * torch.finfo(FP32).eps, atol=0)
    launches.clear()
    norm.fused(inputs.x, None, inputs.w)
    assert not any(tensor is not None and tensor.shape == exact.shape for tensor in launches[0].tensors)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("norm", "width"), [(LLAMA, 80), (Norm("none", x=FP32, w=BF16, r=BF16), 1000), *slow_rows((LLAMA, 5120))], ids=str
)
def test_every_mode_computes_the_same_and_is_followed_by_the_same_backward(
    norm: Norm, width: int, mode: str, device: str
) -> None:
    inputs = norm.inputs((9 if width > 80 else 70, width), device)
    replace(norm, mode=mode).assert_right(inputs)


@pytest.mark.parametrize("mode", MODES)
def test_a_wave_smaller_than_the_work_strides_over_all_of_it(mode: str, device: str, planned: Planned) -> None:
    norm = replace(LLAMA, mode=mode)
    inputs = norm.inputs((37, 130), device)
    expected = run(LLAMA.fused, inputs).y
    planned("forward", rows=2 if mode != "multi_wave_reload" else 1, programs=3)
    assert_same_row(run(norm.fused, inputs).y, expected)


@pytest.mark.parametrize(("width", "reload"), [(33, True), (40, False), (47, True), (48, False)])
@pytest.mark.parametrize(
    "norm", [Norm("gemma", True, x=BF16, w=BF16), Norm("llama", x=FP16, w=FP32, r=FP32, scale=0.22)], ids=str
)
def test_rows_in_two_pieces_have_all_their_gradients(
    norm: Norm, width: int, reload: bool, device: str, planned: Planned
) -> None:
    planned("backward", **IN_TWO_PIECES | {"reload": reload})
    norm.assert_right(norm.inputs((9, width), device))


LIMITS = (32, 64, 128, 256, 512, 1024, 2048, 3072, 4096, 6144, 16384, 32768)


@pytest.mark.slow
@pytest.mark.parametrize("width", sorted(limit + step for limit in LIMITS for step in (0, 1)))
def test_at_and_one_above_every_limit_of_the_plans(width: int, device: str) -> None:
    norm = replace(LLAMA, r=BF16 if width % 2 else None)
    norm.assert_right(norm.inputs((3, width), device))


def test_an_eps_that_is_a_whole_number_prepares_no_launch_of_integers(device: str) -> None:
    inputs = LLAMA.inputs((5, 96), device)
    for eps in (1, 0, 1e-6, 1):
        norm = replace(LLAMA, eps=eps)
        torch.testing.assert_close(run(norm.fused, inputs).y.double(), run_true(norm, inputs).y, rtol=2**-6, atol=2**-8)


@pytest.mark.gpu
@pytest.mark.parametrize("r", [None, BF16], ids=["alone", "residual"])
@pytest.mark.parametrize("width", [20480, 40000, 131_072])
def test_many_more_wide_rows_than_programs_repeat_bit_for_bit(width: int, r: torch.dtype | None, device: str) -> None:
    norm = replace(LLAMA, r=r)
    inputs = norm.inputs((1501 if width < 100_000 else 401, width), device)
    first = run(norm.fused, inputs)
    for _ in range(20):
        again = run(norm.fused, inputs)
        assert_same(again, first)
    rows = {name: value[::97] for name, value in vars(inputs).items() if name != "w"}
    assert torch.equal(norm.assert_right(inputs.but(**rows)).dx, first.dx[::97])
    total = inputs.x if inputs.r is None else inputs.r + inputs.x
    exact = torch.zeros(width, dtype=torch.float64, device=device)
    for s, dy in zip(total.double().split(100), inputs.dy.double().split(100), strict=True):
        exact += (dy * s * (s.square().mean(-1, keepdim=True) + norm.eps).rsqrt()).sum(0)
    torch.testing.assert_close(first.dw.double(), exact, rtol=2**-8, atol=1e-4 * len(total) ** 0.5)


def test_a_grid_may_be_smaller_than_the_rows_need(
    in_chunks: None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = LLAMA.inputs((13, 130), device)
    whole = run(LLAMA.fused, inputs, frozen="w")
    monkeypatch.setattr(norm_kernels, "_GRID_LIMIT", 2)
    recording.forget_all()
    assert torch.equal(run(LLAMA.fused, inputs, frozen="w").dx, whole.dx)
