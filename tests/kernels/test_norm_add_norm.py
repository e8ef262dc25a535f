"""norm_add_norm: both norms, the sum between them and all gradients, held against the stock code and float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fused_norm.kernels import norm_add, norm_add_norm, rms_norm, sandwich_kernels
from fused_norm.kernels.launch import Launch
from fused_norm.kernels.plans import (
    WIDEST_SANDWICH_BACKWARD,
    WIDEST_SANDWICH_FORWARD,
    sandwich_backward_plan,
    sandwich_forward_plan,
)
from fused_norm.spec import CASTINGS

from .numerics import BF16, FP16, FP32, ROW_LAYOUTS, WEIGHT_LAYOUTS, assert_same_row, in_layout
from .sandwich import Sandwich, Tensors, assert_rounded_as_stock, assert_within_budget, make_inputs, run, scales
from .test_norm_kernels import Guarded

OPS = torch.ops.fused_norm
GEMMA = Sandwich("gemma", True, BF16, BF16, BF16, BF16)
LLAMA = Sandwich("llama", False, BF16, BF16, BF16, BF16)
MIXED = Sandwich("llama", True, BF16, FP16, FP32, BF16)
ONE_NUMBER = Sandwich("gemma", False, FP32, FP32, FP32, FP32)

# x, residual, inner weight, weight
DTYPES = [
    (FP32, FP32, FP32, FP32),
    (BF16, BF16, BF16, BF16),
    (FP16, FP16, FP16, FP16),
    (BF16, BF16, FP32, FP32),
    (BF16, FP32, BF16, BF16),
    (FP32, BF16, BF16, FP16),
    (BF16, FP16, FP16, BF16),
]
MEANINGS = [
    *(Sandwich(c, z, *dtypes) for c in CASTINGS for z in (False, True) for dtypes in DTYPES),
    *(Sandwich(c, False, BF16, BF16, *weights) for c in CASTINGS for weights in ((None, BF16), (FP32, None))),
    *(Sandwich(c, False, BF16, BF16, None, None) for c in CASTINGS),
]
# Below, at and above every limit of the plans up to 8192.
WIDTHS = (1, 7, 64, 123, 130, 513, 640, 1024, 1025, 2048, 2304, 3840, 4097, 5376)
FROZEN = [("inner",), ("w",), ("inner", "w"), ("x",), ("r",), ("x", "inner"), ("x", "r", "inner"), ("x", "r", "w")]


@pytest.fixture
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows count as too wide from a few columns on, in the forward, the backward, or both."""
    monkeypatch.setattr(sandwich_kernels, "WIDEST_SANDWICH_FORWARD", request.param[0])
    monkeypatch.setattr(sandwich_kernels, "WIDEST_SANDWICH_BACKWARD", request.param[1])


@pytest.mark.parametrize("sandwich", MEANINGS, ids=str)
def test_every_meaning_is_as_accurate_as_the_stock_code(sandwich: Sandwich, device: str) -> None:
    assert_within_budget(sandwich, make_inputs(sandwich, (35, 130), device))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("sandwich", [GEMMA, MIXED], ids=str)
def test_every_width_is_as_accurate_as_the_stock_code(sandwich: Sandwich, width: int, device: str) -> None:
    assert_within_budget(sandwich, make_inputs(sandwich, (67 if width <= 130 else 5, width), device))


def test_backwards_at_and_beyond_what_a_program_holds(launched: list[str], device: str) -> None:
    for width in (WIDEST_SANDWICH_BACKWARD, WIDEST_SANDWICH_BACKWARD + 1):
        launched.clear()
        assert_within_budget(GEMMA, make_inputs(GEMMA, (2, width), device))
        assert launched.count("_sandwich_forward_kernel") == 1
        assert launched.count("_sandwich_backward_kernel") == (width == WIDEST_SANDWICH_BACKWARD)


@pytest.mark.parametrize("width", [WIDEST_SANDWICH_FORWARD, WIDEST_SANDWICH_FORWARD + 1])
def test_forwards_at_and_beyond_what_a_program_holds(width: int, launched: list[str], device: str) -> None:
    inputs = make_inputs(GEMMA, (2, width), device)
    y, s = GEMMA.fused(*(inputs[name] for name in ("x", "r", "inner", "w")))
    assert ("_sandwich_forward_kernel" in launched) == (width == WIDEST_SANDWICH_FORWARD)
    assert_rounded_as_stock(GEMMA, inputs, {"y": y, "s": s})
    assert torch.equal(s, norm_add(inputs["x"], inputs["r"], inputs["inner"], casting="gemma", zero_centered=True))


@pytest.mark.parametrize(
    "sandwich",
    [GEMMA, Sandwich("gemma", False, FP32, BF16, FP32, FP32), Sandwich("none", False, BF16, FP32, None, BF16)],
    ids=str,
)
@pytest.mark.parametrize("limits", [(8192, 100), (100, 8192), (100, 100)], ids=str, indirect=True)
@pytest.mark.usefixtures("limits")
def test_too_wide_rows_are_as_accurate_as_the_stock_code(sandwich: Sandwich, device: str) -> None:
    assert_within_budget(sandwich, make_inputs(sandwich, (7, 130), device))


@pytest.mark.parametrize("shape", [(130,), (2, 3, 5, 130), (3, 1), (65, 64)], ids=str)
def test_any_leading_shape(shape: tuple[int, ...], device: str) -> None:
    assert_within_budget(GEMMA, make_inputs(GEMMA, shape, device))


@pytest.mark.parametrize("width", [64, 1000, 2304])
@pytest.mark.parametrize("sandwich", [GEMMA, LLAMA, MIXED, Sandwich("none", True, FP16, BF16, FP16, BF16)], ids=str)
def test_it_is_the_single_operators_one_after_the_other(sandwich: Sandwich, width: int, device: str) -> None:
    inputs = make_inputs(sandwich, (19, width), device)
    y, s = sandwich.fused(*(inputs[name] for name in ("x", "r", "inner", "w")))
    semantics = {"casting": sandwich.casting, "zero_centered": sandwich.zero_centered}
    branch = rms_norm(inputs["x"], inputs["inner"], **semantics)
    expected = inputs["r"] + branch
    if device == "cpu":
        assert torch.equal(s, expected)
    else:  # a sum in another order, or a product and a sum in one instruction, may move the branch by a unit
        moved = torch.finfo(branch.dtype).eps * branch.abs() + torch.finfo(s.dtype).eps * expected.abs()
        assert ((s - expected).abs() <= 2 * moved).all()
    assert_same_row(y, rms_norm(s, inputs["w"], **semantics))
    assert torch.equal(s, norm_add(inputs["x"], inputs["r"], inputs["inner"], **semantics))


@pytest.mark.parametrize("limits", [(8192, 8192), (8192, 100)], ids=str, indirect=True)
@pytest.mark.parametrize("used", ["y", "s"])
@pytest.mark.parametrize("sandwich", [GEMMA, MIXED], ids=str)
@pytest.mark.usefixtures("limits")
def test_only_one_output_is_used(sandwich: Sandwich, used: str, device: str) -> None:
    inputs = make_inputs(sandwich, (5, 123), device)
    ours = run(sandwich.fused, inputs, used=used)
    other = "dy" if used == "s" else "ds"
    unused = inputs | {other: torch.zeros_like(inputs[other])}
    truth = run(sandwich.true, {name: tensor.double() for name, tensor in unused.items()})
    unit = scales(sandwich, unused)
    assert ("dw" in ours) == (used == "y")
    for name in ours.keys() & {"dx", "dr", "dinner", "dw"}:
        assert ours[name].dtype == inputs[name[1:]].dtype
        error = (ours[name].double() - truth[name]).abs().div(unit[name]).amax().item()
        assert error <= 4 * torch.finfo(BF16).eps, name
    if used == "s":
        assert torch.equal(ours["dr"], inputs["ds"].to(sandwich.r))
    pointers = [tensor.untyped_storage().data_ptr() for tensor in (*ours.values(), *inputs.values())]
    assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize("frozen", FROZEN, ids="-".join)
@pytest.mark.parametrize("limits", [(8192, 8192), (8192, 100)], ids=str, indirect=True)
@pytest.mark.usefixtures("limits")
def test_frozen_arguments_get_no_gradient_and_change_no_other(frozen: tuple[str, ...], device: str) -> None:
    inputs = make_inputs(GEMMA, (5, 123), device)
    whole, part = run(GEMMA.fused, inputs), run(GEMMA.fused, inputs, frozen)
    assert part.keys() == whole.keys() - {f"d{name}" for name in frozen}
    for name, value in part.items():
        assert torch.equal(value, whole[name]), name


@pytest.mark.parametrize("frozen", [(), *FROZEN], ids="-".join)
def test_nothing_is_allocated_for_a_gradient_that_is_not_needed(
    frozen: tuple[str, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[torch.Tensor | None, ...]] = []
    launch = Launch.__call__

    def recorded(self: Launch, grid: object, tensors: tuple[torch.Tensor | None, ...], *args: object) -> None:
        seen.append(tensors)
        launch(self, grid, tensors, *args)

    monkeypatch.setattr(Launch, "__call__", recorded)
    run(GEMMA.fused, make_inputs(GEMMA, (5, 123), device), frozen)
    _, backward = seen
    dx, dr, dinner, dw, shares, arrived = backward[8:]
    needed = [name not in frozen for name in ("x", "r", "inner", "w")]
    assert [tensor is not None for tensor in (dx, dr, dinner, dw)] == needed
    assert (0 if shares is None else len(shares)) == needed[2] + needed[3]
    assert (arrived is None) == (shares is None)
    seen.clear()
    with torch.no_grad():
        inputs = make_inputs(GEMMA, (5, 123), device)
        norm_add_norm(*(inputs[name] for name in ("x", "r", "inner", "w")), casting="gemma")
    assert seen[0][6:] == (None, None), "no rstd without a backward"


@pytest.mark.parametrize("frozen", [(), ("inner",), ("w",)], ids="-".join)
@pytest.mark.parametrize("width", [64, 1100])
def test_both_sums_of_shares_are_one_launch_and_right(
    width: int, frozen: tuple[str, ...], device: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(MIXED, (200 if width == 64 else 9, width), device)
    inside = assert_within_budget(MIXED, inputs, frozen)
    assert launched == ["_sandwich_forward_kernel", "_sandwich_backward_kernel"]
    launched.clear()
    monkeypatch.setattr(sandwich_kernels, "SMALL", 0)
    outside = assert_within_budget(MIXED, inputs, frozen)
    assert launched == ["_sandwich_forward_kernel", "_sandwich_backward_kernel", "_sum_both_shares_kernel"]
    for name, value in inside.items():
        torch.testing.assert_close(value, outside[name], rtol=torch.finfo(value.dtype).eps, atol=1e-5)


def test_dw_is_summed_in_fp32(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of a thousand rows in bf16 would be off by several of its units."""
    sandwich = Sandwich("gemma", False, FP32, FP32, BF16, BF16)
    inputs = make_inputs(sandwich, (1030, 17), device)
    s = sandwich.true(*(inputs[name].double() for name in ("x", "r", "inner", "w")))[1]
    inputs["dy"] = inputs["dy"].abs() * s.float().sign()
    inputs["ds"] = 8 * inputs["ds"].abs() * inputs["x"].sign()
    truth = run(sandwich.true, {name: tensor.double() for name, tensor in inputs.items()})
    unit = scales(sandwich, inputs)
    for small in (sandwich_kernels.SMALL, 0):
        monkeypatch.setattr(sandwich_kernels, "SMALL", small)
        ours = run(sandwich.fused, inputs)
        for name in ("dinner", "dw"):
            summing = 16 * torch.finfo(FP32).eps * unit[name]
            allowed = torch.finfo(BF16).eps / 2 * truth[name].abs() + summing
            assert ((ours[name].double() - truth[name]).abs() <= allowed).all(), name


@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (2, 0, 130), (0,), (0, WIDEST_SANDWICH_FORWARD + 1)], ids=str)
def test_empty_tensors(shape: tuple[int, ...], device: str) -> None:
    ours = run(GEMMA.fused, make_inputs(GEMMA, shape, device))
    assert {ours[name].shape for name in ("y", "s", "dx", "dr")} == {shape}
    for name in ("dinner", "dw"):
        assert torch.equal(ours[name], torch.zeros(shape[-1], dtype=BF16, device=device))


@pytest.mark.parametrize("layout", ROW_LAYOUTS)
@pytest.mark.parametrize("argument", ["x", "r", "dy", "ds"])
def test_rows_are_read_in_any_layout(argument: str, layout: str, device: str) -> None:
    inputs = make_inputs(ONE_NUMBER, (2, 3, 5, 64), device)
    dense = run(ONE_NUMBER.fused, inputs)
    inputs[argument] = in_layout(layout, inputs[argument])
    for name, value in run(ONE_NUMBER.fused, inputs).items():
        if name in ("dw", "dinner"):  # sums over rows, which may be taken in another order
            torch.testing.assert_close(value, dense[name], rtol=1e-5, atol=1e-5)
        else:
            assert_same_row(value, dense[name])


@pytest.mark.parametrize("layout", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("argument", ["inner", "w"])
def test_weights_are_read_in_any_layout(argument: str, layout: str, device: str) -> None:
    inputs = make_inputs(GEMMA, (5, 130), device)
    dense = run(GEMMA.fused, inputs)
    inputs[argument] = in_layout(layout, inputs[argument])
    for name, value in run(GEMMA.fused, inputs).items():
        assert_same_row(value, dense[name])


@pytest.mark.parametrize("limits", [(8192, 8192), (100, 50)], ids=str, indirect=True)
@pytest.mark.usefixtures("limits")
def test_arguments_in_different_layouts_and_orders(device: str) -> None:
    inputs = make_inputs(ONE_NUMBER, (2, 2, 3, 64), device)
    dense = run(ONE_NUMBER.fused, inputs)
    inputs["x"] = in_layout("transposed heads", inputs["x"])
    inputs["r"] = in_layout("half of a chunk", inputs["r"])
    inputs["dy"] = in_layout("columns first", inputs["dy"])
    inputs["ds"] = inputs["ds"][:1].expand(2, -1, -1, -1)
    expanded = run(ONE_NUMBER.fused, inputs)
    inputs["ds"] = inputs["ds"].contiguous()
    for name, value in run(ONE_NUMBER.fused, inputs).items():
        assert torch.equal(value, expanded[name]), name
        if name in ("y", "s"):
            assert_same_row(value, dense[name])
        if name in ("y", "s", "dx", "dr"):
            assert value.transpose(1, 2).is_contiguous(), "results have x's memory order"


def test_sums_of_both_outputs(device: str) -> None:
    """``.sum().backward()`` hands over gradients whose elements are all one and the same."""
    inputs = make_inputs(GEMMA, (7, 130), device)
    inputs |= {name: torch.ones_like(inputs[name]) for name in ("dy", "ds")}
    expected = run(GEMMA.fused, inputs)
    leaves = {name: inputs[name].requires_grad_() for name in ("x", "r", "inner", "w")}
    y, s = GEMMA.fused(*leaves.values())
    (y.sum() + s.sum()).backward()
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, expected[f"d{name}"]), name


@pytest.mark.parametrize("limits", [(8192, 8192), (100, 100)], ids=str, indirect=True)
@pytest.mark.parametrize("sandwich", [GEMMA, MIXED], ids=str)
@pytest.mark.usefixtures("limits")
def test_nothing_aliases_and_nothing_handed_over_changes(sandwich: Sandwich, device: str) -> None:
    inputs = make_inputs(sandwich, (5, 130), device)
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    ours = run(sandwich.fused, inputs)
    for name, tensor in before.items():
        assert torch.equal(inputs[name], tensor), name
    pointers = [tensor.untyped_storage().data_ptr() for tensor in (*ours.values(), *inputs.values())]
    assert len(set(pointers)) == len(pointers)


def test_one_tensor_as_branch_and_residual_and_one_weight_for_both_norms(device: str) -> None:
    inputs = make_inputs(LLAMA, (5, 130), device)
    inputs |= {"r": inputs["x"], "w": inputs["inner"]}
    separate = run(LLAMA.fused, inputs)
    x, w = (inputs[name].detach().requires_grad_() for name in ("x", "w"))
    torch.autograd.backward(LLAMA.fused(x, x, w, w), (inputs["dy"], inputs["ds"]))
    assert torch.equal(x.grad, separate["dx"] + separate["dr"])
    assert torch.equal(w.grad, separate["dinner"] + separate["dw"])


def test_a_retained_graph_gives_the_same_gradients_again(device: str) -> None:
    inputs = make_inputs(GEMMA, (5, 130), device)
    leaves = [inputs[name].requires_grad_() for name in ("x", "r", "inner", "w")]
    outputs, gradients = GEMMA.fused(*leaves), (inputs["dy"], inputs["ds"])
    first = torch.autograd.grad(outputs, leaves, gradients, retain_graph=True)
    second = torch.autograd.grad(outputs, leaves, gradients)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_second_differentiation_raises(device: str) -> None:
    x, r, inner, w = (torch.randn(size, device=device, requires_grad=True) for size in ((3, 7), (3, 7), (7,), (7,)))
    y, s = norm_add_norm(x, r, inner, w)
    (dx,) = torch.autograd.grad(y.square().sum() + s.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated again"):
        dx.sum().backward()


@pytest.mark.parametrize("width", [64, 1100])
def test_nan_and_inf_stay_in_their_rows_as_in_stock(width: int, device: str) -> None:
    rows = 66 if width == 64 else 6
    inputs = make_inputs(LLAMA, (rows, width), device)
    clean = run(LLAMA.fused, inputs)
    inputs["x"][1, width // 2] = float("nan")
    inputs["r"][3, width - 1] = float("-inf")
    inputs["x"][4, 0], inputs["r"][4, 0] = float("inf"), float("-inf")
    ours, stock = run(LLAMA.fused, inputs), run(LLAMA.stock, inputs)
    sick = [1, 3, 4]
    healthy = [row for row in range(rows) if row not in sick]
    for name in ("y", "s", "dx", "dr"):
        assert torch.equal(ours[name][healthy], clean[name][healthy]), name
        assert torch.equal(ours[name][sick].isnan(), stock[name][sick].isnan()), name


@pytest.mark.parametrize("width", [64, 1104])
def test_repeats_are_equal_and_a_row_does_not_depend_on_its_neighbours(width: int, device: str) -> None:
    inputs = make_inputs(LLAMA, (67 if width == 64 else 9, width), device)
    whole = run(LLAMA.fused, inputs)
    for _ in range(20 if device == "cuda" else 1):
        again = run(LLAMA.fused, inputs)
        assert all(torch.equal(value, whole[name]) for name, value in again.items())
    part = {name: tensor[3:8] if tensor.dim() == 2 else tensor for name, tensor in inputs.items()}
    ours = run(LLAMA.fused, part)
    for name in ("y", "s", "dx", "dr"):
        assert torch.equal(ours[name], whole[name][3:8]), name


@pytest.mark.parametrize("shape", [(67, 3), (67, 80), (19, 409), (3, 1023), (3, 2500)], ids=str)
def test_kernels_write_every_element_and_nothing_beside(
    shape: tuple[int, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(GEMMA, shape, device)
    guarded = Guarded()
    monkeypatch.setattr(sandwich_kernels, "empty_rows_like", guarded)
    arguments = [inputs[name] for name in ("x", "r", "inner", "w")]
    y, s, inner_rstd, rstd = sandwich_kernels.launch_norm_add_norm_forward(*arguments, 1e-6, "gemma", True, True)
    gradients = dx, dr, dinner, dw = guarded(s), guarded(s), guarded(inputs["inner"]), guarded(inputs["w"])
    x, _, inner, w = arguments
    sandwich_kernels.launch_norm_add_norm_backward(
        inputs["dy"], inputs["ds"], s, x, inner, w, inner_rstd, rstd, "gemma", True, *gradients
    )
    assert guarded.intact()
    assert len(guarded.buffers) == 8
    monkeypatch.undo()
    written = {"y": y, "s": s, "dx": dx, "dr": dr, "dinner": dinner, "dw": dw}
    for name, value in run(GEMMA.fused, inputs).items():
        assert torch.equal(written[name], value), name


@pytest.mark.parametrize("limits", [(8192, 8192), (50, 50)], ids=str, indirect=True)
@pytest.mark.usefixtures("limits")
def test_the_backward_gets_both_rstd_unrounded(device: str) -> None:
    sandwich = Sandwich("none", False, BF16, BF16, BF16, BF16)
    inputs = make_inputs(sandwich, (5, 80), device)
    arguments = [inputs[name] for name in ("x", "r", "inner", "w")]
    _, s, *rstds = sandwich_kernels.launch_norm_add_norm_forward(*arguments, 1e-6, "none", False, True)
    for tensor, rstd in zip((inputs["x"], s), rstds, strict=True):
        exact = (tensor.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        assert rstd.dtype == FP32
        torch.testing.assert_close(rstd.double(), exact, rtol=8 * torch.finfo(FP32).eps, atol=0)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("width", [64, 1100])
def test_a_grid_smaller_than_the_work_strides_over_all_of_it(width: int, frozen: bool, device: str) -> None:
    inputs = make_inputs(ONE_NUMBER, (37, width), device)
    expected = run(ONE_NUMBER.fused, inputs)
    x, r, inner, w, dy, ds = (inputs[name] for name in ("x", "r", "inner", "w", "dy", "ds"))
    forward = replace(sandwich_forward_plan(width), rows=4 if width == 64 else 1)
    y, s, *rstds = sandwich_kernels.launch_norm_add_norm_forward(
        x, r, inner, w, 1e-6, "gemma", False, True, plan=forward
    )
    dx, dr = torch.empty_like(x), torch.empty_like(r)
    sums = (None, None) if frozen else (torch.empty_like(inner), torch.empty_like(w))
    backward = replace(sandwich_backward_plan(width), rows=forward.rows, programs=3)
    sandwich_kernels.launch_norm_add_norm_backward(
        dy, ds, s, x, inner, w, *rstds, "gemma", False, dx, dr, *sums, plan=backward
    )
    for name, value in {"y": y, "s": s, "dx": dx, "dr": dr}.items():
        assert_same_row(value, expected[name])
    for name, value in zip(("dinner", "dw"), sums, strict=True):
        if value is not None:
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5)


def test_64_bit_offsets_compute_the_same(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for width in (80, 1100):
        inputs = make_inputs(GEMMA, (11, width), device)
        expected = run(GEMMA.fused, inputs)
        with monkeypatch.context() as patch:
            patch.setattr(sandwich_kernels, "INT32_LIMIT", 1)
            for name, value in run(GEMMA.fused, inputs).items():
                assert_same_row(value, expected[name])


@pytest.mark.parametrize("layout", ["contiguous", "transposed heads"])
@pytest.mark.parametrize("sandwich", [GEMMA, MIXED, Sandwich("none", False, FP16, FP16, None, FP16)], ids=str)
def test_opcheck(sandwich: Sandwich, layout: str, device: str) -> None:
    inputs = make_inputs(sandwich, (2, 3, 2, 40), device)
    if layout != "contiguous":
        inputs["x"] = in_layout(layout, inputs["x"])
    x, r, inner, w = (inputs.get(name) for name in ("x", "r", "inner", "w"))
    semantics = (sandwich.casting, sandwich.zero_centered)
    for save_rstd in (True, False):
        torch.library.opcheck(OPS.norm_add_norm_forward, (x, r, inner, w, 1e-6, *semantics, save_rstd))
    _, s, *rstds = OPS.norm_add_norm_forward(x, r, inner, w, 1e-6, *semantics, True)
    saved = (s, x, inner, w, *rstds, *semantics)
    wanted = (True, sandwich.r, inner is not None, True)
    torch.library.opcheck(OPS.norm_add_norm_backward, (inputs["dy"], inputs["ds"], *saved, *wanted))
    torch.library.opcheck(OPS.norm_add_norm_backward, (inputs["dy"], None, *saved, False, sandwich.r, False, False))


def test_compiles_as_one_graph_with_equal_results(device: str) -> None:
    torch._dynamo.reset()
    inputs = make_inputs(GEMMA, (6, 40), device)
    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(GEMMA.fused, fullgraph=True, backend=backend)
        for used in ("ys", "s"):
            found = run(compiled, inputs, used=used)
            for name, value in run(GEMMA.fused, inputs, used=used).items():
                assert torch.equal(value, found[name]), name


@pytest.mark.parametrize("layout", ["contiguous", "transposed heads", "columns first", "padded rows"])
def test_meta_tensors_tell_shape_dtype_and_strides(layout: str, device: str) -> None:
    inputs = make_inputs(MIXED, (2, 3, 4, 40), device)
    if layout != "contiguous":
        inputs["x"] = in_layout(layout, inputs["x"])

    def described(tensors: Tensors) -> dict[str, object]:
        return {name: (tensor.shape, tensor.dtype, tensor.stride()) for name, tensor in tensors.items()}

    meta = {
        name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        for name, tensor in inputs.items()
    }
    assert described(run(MIXED.fused, meta)) == described(run(MIXED.fused, inputs))


def test_outputs_require_a_gradient_when_any_argument_does(device: str) -> None:
    inputs = make_inputs(GEMMA, (3, 40), device)
    for wanting in (None, "x", "r", "inner", "w"):
        arguments = [inputs[name].clone().requires_grad_(name == wanting) for name in ("x", "r", "inner", "w")]
        assert all(output.requires_grad == (wanting is not None) for output in GEMMA.fused(*arguments))
        with torch.no_grad():
            assert not any(output.requires_grad for output in GEMMA.fused(*arguments))


def test_float64_takes_the_reference() -> None:
    x, r = (torch.randn(3, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    inner, w = (torch.randn(7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(norm_add_norm, (x, r, inner, w))
    y, s = norm_add_norm(x.float(), r.float(), inner, w.float())
    assert (y.dtype, s.dtype) == (torch.float64, torch.float64)


def test_a_large_eps_counts_in_both_norms(device: str) -> None:
    sandwich = replace(GEMMA, eps=3.0)
    assert_within_budget(sandwich, make_inputs(sandwich, (5, 64), device))
