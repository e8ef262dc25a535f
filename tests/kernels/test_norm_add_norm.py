"""norm_add_norm and norm_add: the sum, the norms and all gradients, held against the stock code and float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fused_norm.kernels import norm_add, rms_norm

from .conftest import Planned
from .numerics import BF16, FP16, FP32, assert_same_row, called, in_layout, run
from .sandwich import Sandwich, assert_rounded_as_stock

GEMMA = Sandwich("gemma", True, BF16, BF16, BF16, BF16)
MIXED = Sandwich("llama", True, BF16, FP16, FP32, BF16)
ONE_NUMBER = Sandwich("gemma", False, FP32, FP32, FP32, FP32)


def _limits(*directions: str) -> pytest.MarkDecorator:
    """Run a test once for each direction in which its rows are too wide, see ``sandwich_limits``."""
    return pytest.mark.parametrize("sandwich_limits", directions, indirect=True)


@pytest.mark.parametrize(("width", "forwards"), [(16384, 1), (16385, 2)])
def test_forwards_at_and_beyond_what_a_program_holds(
    width: int, forwards: int, launched: Callable[[], list[str]], device: str
) -> None:
    inputs = GEMMA.inputs((2, width), device)
    ours = called(GEMMA.fused, inputs)
    assert launched().count("_forward_kernel") == forwards
    assert_rounded_as_stock(GEMMA, inputs, ours)
    assert torch.equal(ours.s, norm_add(inputs.x, inputs.r, inputs.inner, casting="gemma", zero_centered=True))


@pytest.mark.parametrize(
    "sandwich",
    [GEMMA, Sandwich("gemma", False, FP32, BF16, FP32, FP32), Sandwich("none", False, BF16, FP32, None, BF16)],
    ids=str,
)
@_limits("forward", "backward", "both")
@pytest.mark.usefixtures("sandwich_limits")
def test_too_wide_rows_are_as_accurate_as_the_stock_code(sandwich: Sandwich, device: str) -> None:
    sandwich.assert_right(sandwich.inputs((7, 130), device))


@pytest.mark.parametrize("sandwich", [MIXED.opened, Sandwich("none", False, BF16, FP32, None).opened], ids=str)
@_limits("forward")
@pytest.mark.usefixtures("sandwich_limits")
def test_too_wide_rows_of_norm_add_are_one_launch_each_way(
    sandwich: Sandwich, device: str, launched: Callable[[], list[str]]
) -> None:
    inputs = sandwich.inputs((2, 3, 4, 130), device)
    inputs.x = in_layout("transposed heads", inputs.x)
    ours = sandwich.assert_right(inputs)
    sums = [] if sandwich.inner is None else ["_reduce_kernel"]
    assert launched() == ["_forward_kernel", "_backward_kernel", *sums]
    assert ours.s.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(
    ("sandwich", "width"), [(GEMMA, 64), (MIXED, 1000), (Sandwich("none", True, FP16, BF16, FP16, BF16), 1000)], ids=str
)
def test_it_is_the_single_operators_one_after_the_other(sandwich: Sandwich, width: int, device: str) -> None:
    inputs = sandwich.inputs((19, width), device)
    y, s = sandwich.fused(inputs.x, inputs.r, inputs.inner, inputs.w)
    semantics = {"casting": sandwich.casting, "zero_centered": sandwich.zero_centered}
    branch = rms_norm(inputs.x, inputs.inner, **semantics)
    expected = inputs.r + branch
    if device == "cpu":
        assert torch.equal(s, expected)
    else:  # a sum in another order, or a fused multiply-add, may move the branch by a unit
        moved = torch.finfo(branch.dtype).eps * branch.abs() + torch.finfo(s.dtype).eps * expected.abs()
        assert ((s - expected).abs() <= 2 * moved).all()
    assert_same_row(y, rms_norm(s, inputs.w, **semantics))
    assert torch.equal(s, norm_add(inputs.x, inputs.r, inputs.inner, **semantics))


@pytest.mark.parametrize(("width", "frozen"), [(64, ()), (64, ("inner",)), (64, ("w",)), (1100, ())], ids=str)
def test_weights_are_summed_over_several_programs(width: int, frozen: tuple[str, ...], device: str) -> None:
    MIXED.assert_right(MIXED.inputs((200 if width == 64 else 9, width), device), frozen)


@pytest.mark.parametrize(("width", "rows", "frozen"), [(64, 4, False), (64, 4, True), (1100, 1, False)])
def test_a_grid_smaller_than_the_work_strides_over_all_of_it(
    width: int, rows: int, frozen: bool, device: str, planned: Planned
) -> None:
    inputs = ONE_NUMBER.inputs((37 if width == 64 else 11, width), device)
    expected = run(ONE_NUMBER.fused, inputs)
    planned("forward", rows=rows)
    planned("backward", rows=rows, programs=3)
    actual = run(ONE_NUMBER.fused, inputs, ("inner", "w") if frozen else ())
    for name in ("y", "s", "dx", "dr"):
        assert_same_row(getattr(actual, name), getattr(expected, name))
    for name in () if frozen else ("dinner", "dw"):
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name), rtol=1e-5, atol=1e-5)
