"""The launchers: what they write, and that they write nothing else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import triton
from torch import Tensor

from fused_norm.kernels import MODES, norm_backward, norm_backward_cluster, norm_forward, triton_utils
from fused_norm.kernels import clusters as cluster_tools
from fused_norm.kernels.launch import Launch
from fused_norm.kernels.plans import WIDEST_BACKWARD, WIDEST_FORWARD, BackwardPlan, Device, backward_plan, forward_plan

from .numerics import (
    BF16,
    CHUNKED,
    FP16,
    FP32,
    IN_CLUSTERS,
    Norm,
    assert_same_row,
    assert_within_budget,
    in_layout,
    make_inputs,
    run,
    run_true,
)

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
    monkeypatch.setattr(norm_forward, "empty_rows_like", guarded)
    y, s, rstd = norm_forward.launch_forward(inputs.x, inputs.r, inputs.w, 1e-6, "llama", False, True)
    dx = guarded(s)
    dr = None if r is None else guarded(s)
    dw_buffer = torch.full((shape[-1] + 2 * GUARD,), SENTINEL, dtype=BF16, device=device)
    dw = dw_buffer[GUARD:-GUARD].fill_(float("nan"))
    norm_backward.launch_backward(inputs.dy, inputs.ds, s, inputs.w, rstd, "llama", False, dx, dr, dw)
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
    monkeypatch.setattr(norm_backward, "_GRID_LIMIT", 2)
    assert torch.equal(run(norm.fused, inputs, frozen="w").dx, whole.dx)


@pytest.mark.parametrize("width", [80, CHUNKED])
def test_rstd_is_saved_for_the_backward_alone(width: int, device: str) -> None:
    inputs = make_inputs(Norm("none", x=BF16, w=BF16), (5, width), device)
    _, _, rstd = norm_forward.launch_forward(inputs.x, None, inputs.w, 1e-6, "none", False, True)
    exact = (inputs.x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert rstd.dtype == FP32
    torch.testing.assert_close(rstd.double(), exact, rtol=8 * torch.finfo(FP32).eps, atol=0)
    _, _, none = norm_forward.launch_forward(inputs.x, None, inputs.w, 1e-6, "none", False, False)
    assert none is None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", [80, 1000, 5120])
@pytest.mark.parametrize("norm", [Norm("llama", x=BF16, w=BF16), Norm("none", x=FP32, w=BF16, r=BF16)], ids=str)
def test_every_mode_computes_the_same_and_is_followed_by_the_same_backward(
    norm: Norm, width: int, mode: str, device: str
) -> None:
    rows = 9 if width > 1000 else 70
    inputs = make_inputs(norm, (rows, width), device)
    assert_within_budget(replace(norm, mode=mode), inputs)


@pytest.mark.parametrize("mode", MODES)
def test_a_wave_smaller_than_the_work_strides_over_all_of_it(mode: str, device: str) -> None:
    inputs = make_inputs(Norm("llama", x=BF16, w=BF16), (37, 130), device)
    plan = replace(forward_plan(130, mode=mode), rows=2 if mode != "multi_wave_reload" else 1, programs=3)
    y, _, _ = norm_forward.launch_forward(inputs.x, None, inputs.w, 1e-6, "llama", False, False, plan=plan)
    assert_same_row(y, norm_forward.launch_forward(inputs.x, None, inputs.w, 1e-6, "llama", False, False)[0])


@pytest.mark.parametrize("width", [80, 1000, CHUNKED])
def test_64_bit_offsets_compute_the_same(width: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = Norm("gemma", x=BF16, w=BF16, r=BF16)
    inputs = make_inputs(norm, (11, width), device)
    expected = run(norm.fused, inputs)
    for module in (norm_forward, norm_backward):
        monkeypatch.setattr(module, "INT32_LIMIT", 1)
    for name, value in run(norm.fused, inputs).present().items():
        assert_same_row(value, getattr(expected, name))


def test_a_lazily_cloned_gradient_is_a_copy_of_its_own_once_written_to(device: str) -> None:
    norm = Norm("llama", x=BF16, w=BF16, r=BF16)
    ours = run(norm.fused, make_inputs(norm, (5, 64), device))
    kept = ours.dx.clone()
    ours.dr.mul_(2)
    assert torch.equal(ours.dx, kept)
    assert torch.equal(ours.dr, kept * 2)
    assert ours.dx.data_ptr() != ours.dr.data_ptr()


IN_TWO_PIECES = BackwardPlan(2, 32, 1, stages=2, programs=2, tail=16)
"""Rows of 33 to 48 elements in tiles of two rows, the last one half empty where the rows are odd."""


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Callable[[BackwardPlan], None]:
    """Makes every backward of the test take one plan."""

    def force(plan: BackwardPlan) -> None:
        monkeypatch.setattr(norm_backward, "backward_plan", lambda *_, **__: plan)
        monkeypatch.setattr(norm_backward, "_backwards", {})

    return force


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("reload", [True, False])
@pytest.mark.parametrize("width", [33, 40, 47, 48])
@pytest.mark.parametrize(
    "norm",
    [
        Norm("gemma", True, x=BF16, w=BF16),
        Norm("llama", x=BF16, w=FP32, r=BF16),
        Norm("llama", x=FP16, w=None, r=FP32, scale=0.22),
    ],
    ids=str,
)
def test_rows_in_two_pieces_have_all_their_gradients(
    norm: Norm, width: int, reload: bool, small: bool, device: str, planned: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(replace(IN_TWO_PIECES, reload=reload))
    if not small:
        monkeypatch.setattr(norm_backward, "SMALL", 0)
    assert_within_budget(norm, make_inputs(norm, (9, width), device))


@pytest.mark.parametrize(("width", "plan"), [(5120, BackwardPlan(1, 4096, 4, stages=3, programs=2, tail=1024))])
def test_a_wide_row_in_two_pieces(width: int, plan: BackwardPlan, device: str, planned: Callable) -> None:
    planned(plan)
    norm = Norm("llama", x=BF16, w=BF16, r=BF16)
    assert_within_budget(norm, make_inputs(norm, (5, width), device))


def _assert_frozen_change_no_gradient(width: int, frozen: str, device: str) -> None:
    norm = Norm("llama", x=BF16, w=BF16, r=BF16)
    inputs = make_inputs(norm, (9, width), device)
    whole, part = run(norm.fused, inputs), run(norm.fused, inputs, frozen)
    for name in "xrw":
        gradient = getattr(part, f"d{name}")
        assert gradient is None if name in frozen else torch.equal(gradient, getattr(whole, f"d{name}")), name


def _assert_rows_repeat_alone(width: int, device: str) -> None:
    """Bit for bit, and without the rows beside them."""
    norm = Norm("llama", x=BF16, w=BF16, r=BF16)
    inputs = make_inputs(norm, (9, width), device)
    first, again = run(norm.fused, inputs), run(norm.fused, inputs)
    assert all(torch.equal(value, getattr(first, name)) for name, value in again.present().items())
    part = replace(inputs, **{name: getattr(inputs, name)[3:6] for name in ("x", "r", "dy", "ds")})
    assert torch.equal(run(norm.fused, part).dx, first.dx[3:6])


@pytest.mark.parametrize("frozen", ["w", "x", "xr"])
def test_frozen_arguments_change_no_gradient_of_rows_in_two_pieces(frozen: str, device: str, planned: Callable) -> None:
    planned(IN_TWO_PIECES)
    _assert_frozen_change_no_gradient(47, frozen, device)


def test_rows_in_two_pieces_repeat_and_do_not_know_their_neighbours(device: str, planned: Callable) -> None:
    planned(IN_TWO_PIECES)
    _assert_rows_repeat_alone(47, device)


def test_rows_in_two_pieces_get_all_planned_programs(
    device: str, planned: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(replace(IN_TWO_PIECES, programs=3))
    launch, grids = Launch.__call__, []

    def recorded(self: Launch, grid: tuple[int, int], *arguments: object) -> None:
        grids.append((self.name, grid))
        launch(self, grid, *arguments)

    monkeypatch.setattr(Launch, "__call__", recorded)
    norm = Norm("llama", x=BF16, w=BF16)
    run(norm.fused, make_inputs(norm, (9, 48), device))
    assert grids[-1] == ("_backward_kernel", (3, 1))


def _assert_all_that_is_written(plan: BackwardPlan, width: int, device: str) -> None:
    """Every element of the gradients is written, and nothing beside them."""
    norm = Norm("llama", x=BF16, w=BF16, r=FP32)
    inputs = make_inputs(norm, (9, width), device)
    _, s, rstd = norm_forward.launch_forward(inputs.x, inputs.r, inputs.w, 1e-6, "llama", False, True)
    guarded = Guarded()
    dx, dr, dw = guarded(s, BF16), guarded(s), guarded(inputs.w)
    norm_backward.launch_backward(inputs.dy, inputs.ds, s, inputs.w, rstd, "llama", False, dx, dr, dw, plan=plan)
    assert guarded.intact()
    for gradient, expected in zip((dx, dr, dw), ("dx", "dr", "dw"), strict=True):
        exact = getattr(run_true(norm, inputs), expected)
        torch.testing.assert_close(gradient.double(), exact, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("width", [33, 47, 48])
def test_rows_in_two_pieces_are_all_that_is_written(width: int, device: str) -> None:
    _assert_all_that_is_written(IN_TWO_PIECES, width, device)


IN_A_CLUSTER = BackwardPlan(1, 512, 2, stages=1, programs=3, reload=True, ctas=4)
"""Rows of up to 2048 elements, in three clusters of four blocks of two warps, the fewest there may be."""


@pytest.fixture
def clusters(device: str) -> None:
    """Skips where a GPU has no thread-block clusters; interpreted, they are arithmetic like any other."""
    if device == "cuda" and not triton_utils.facts_of(torch.device("cuda", 0)).clusters:
        pytest.skip("this GPU has no thread-block clusters, or none that were measured")


@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("width", [1537, 2000, 2048])
@pytest.mark.parametrize(
    "norm",
    [
        Norm("gemma", True, x=BF16, w=BF16),
        Norm("llama", x=BF16, w=FP32, r=BF16),
        Norm("llama", x=FP16, w=None, r=FP32, scale=0.22),
        Norm("none", True, x=FP32, w=FP32),
    ],
    ids=str,
)
def test_rows_in_a_cluster_have_all_their_gradients(
    norm: Norm, width: int, ahead: bool, device: str, planned: Callable
) -> None:
    planned(replace(IN_A_CLUSTER, ahead=ahead))
    assert_within_budget(norm, make_inputs(norm, (19, width), device))


@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 64])
def test_any_number_of_rows_in_clusters(rows: int, device: str, planned: Callable) -> None:
    planned(IN_A_CLUSTER)
    norm = Norm("llama", x=BF16, w=BF16)
    assert_within_budget(norm, make_inputs(norm, (rows, 1600), device))


@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize("frozen", ["w", "x", "r", "xr", "xw"])
def test_frozen_arguments_change_no_gradient_of_rows_in_a_cluster(frozen: str, device: str, planned: Callable) -> None:
    planned(IN_A_CLUSTER)
    _assert_frozen_change_no_gradient(1999, frozen, device)


@pytest.mark.usefixtures("clusters")
def test_rows_in_a_cluster_repeat_and_do_not_know_their_neighbours(device: str, planned: Callable) -> None:
    planned(IN_A_CLUSTER)
    _assert_rows_repeat_alone(2000, device)


@pytest.mark.usefixtures("clusters")
def test_a_nan_in_a_cluster_stays_in_its_row(device: str, planned: Callable) -> None:
    planned(IN_A_CLUSTER)
    norm = Norm("llama", x=BF16, w=BF16)
    inputs = make_inputs(norm, (9, 2000), device)
    clean = run(norm.fused, inputs)
    inputs.dy[4, 7] = float("nan")
    ours = run(norm.fused, inputs)
    healthy = [row for row in range(9) if row != 4]
    assert torch.equal(ours.dx[healthy], clean.dx[healthy])
    assert ours.dx[4].isnan().all()
    assert ours.dw.isnan().nonzero().flatten().tolist() == [7]


@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize("layout", ["half of a chunk", "offset by one", "transposed heads"])
def test_rows_in_a_cluster_are_read_in_any_layout(layout: str, device: str, planned: Callable) -> None:
    planned(IN_A_CLUSTER)
    norm = Norm("llama", x=BF16, w=FP32)
    inputs = make_inputs(norm, (2, 3, 2, 1600), device)
    dense = run(norm.fused, inputs)
    inputs.x, inputs.dy = in_layout(layout, inputs.x), in_layout("padded rows", inputs.dy)
    for name, value in run(norm.fused, inputs).present().items():
        if name == "dw":  # The rows may be taken in another order.
            torch.testing.assert_close(value, dense.dw, rtol=1e-5, atol=1e-5)
        else:
            assert_same_row(value, getattr(dense, name))


@pytest.mark.usefixtures("clusters")
def test_64_bit_offsets_compute_the_same_in_a_cluster(
    device: str, planned: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(replace(IN_A_CLUSTER, ahead=True))
    norm = Norm("gemma", x=BF16, w=BF16, r=BF16)
    inputs = make_inputs(norm, (11, 1600), device)
    expected = run(norm.fused, inputs)
    monkeypatch.setattr(norm_backward, "INT32_LIMIT", 1)
    for name, value in run(norm.fused, inputs).present().items():
        assert_same_row(value, getattr(expected, name))


@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize("width", [1537, 2000, 2048])
def test_rows_in_a_cluster_are_all_that_is_written(width: int, device: str) -> None:
    _assert_all_that_is_written(IN_A_CLUSTER, width, device)


@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize("frozen", ["", "w"])
def test_there_are_no_more_clusters_than_planned_and_shares_are_summed_apart(
    frozen: str, device: str, planned: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small the backward."""
    planned(IN_A_CLUSTER)
    launch, grids = Launch.__call__, []

    def recorded(self: Launch, grid: tuple[int, int], *arguments: object) -> None:
        grids.append((self.name, grid))
        launch(self, grid, *arguments)

    monkeypatch.setattr(Launch, "__call__", recorded)
    norm = Norm("llama", x=BF16, w=BF16)
    for rows in (2, 9):
        grids.clear()
        run(norm.fused, make_inputs(norm, (rows, 1600), device), frozen)
        summed = [] if frozen else [("_sum_shares_kernel", (100, 1))]
        assert grids[1:] == [("_backward_cluster_kernel", (min(rows, 3), 1)), *summed]


def _one_read(width: int) -> BackwardPlan:
    """The plan that the next aligned row gets in a cluster; a row of this width is as good, if slower."""
    return backward_plan(width + -width % 16, device=Device(clusters=True))


ON_A_GPU = pytest.mark.gpu
WIDE = [
    *(20480, 33_393),
    *(pytest.param(width, marks=ON_A_GPU) for width in (16385, 32767, 32768, 40001, 65536, 131_071, 131_072)),
]


@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize("width", WIDE)
@pytest.mark.parametrize(
    "norm",
    [
        Norm("llama", x=BF16, w=BF16),
        Norm("gemma", True, x=FP32, w=FP32, r=FP32, scale=0.22),
        pytest.param(Norm("llama", x=FP16, w=FP32, r=FP16), marks=ON_A_GPU),
        pytest.param(Norm("none", True, x=BF16, w=FP32, r=BF16), marks=ON_A_GPU),
        pytest.param(Norm("llama", x=FP32, w=None), marks=ON_A_GPU),
    ],
    ids=str,
)
def test_wide_rows_read_once_have_all_their_gradients(norm: Norm, width: int, device: str, planned: Callable) -> None:
    planned(_one_read(width))
    assert_within_budget(norm, make_inputs(norm, (2 if device == "cpu" else 5, width), device))


@pytest.mark.parametrize("width", [20480, *(pytest.param(width, marks=ON_A_GPU) for width in (65536, 131_088))])
@pytest.mark.parametrize("norm", [Norm("llama", x=BF16, w=BF16, r=BF16), Norm("gemma", True)], ids=str)
def test_wide_rows_read_twice_have_all_their_gradients(norm: Norm, width: int, device: str, planned: Callable) -> None:
    """As on devices without clusters, and beyond what a cluster holds."""
    planned(backward_plan(width, device=Device()))
    assert_within_budget(norm, make_inputs(norm, (3, width), device))


def test_where_the_driver_does_not_say_some_processors_are_left_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """One cluster more than fits costs more than one fewer."""
    answer: list[int | None] = [None]
    monkeypatch.setattr(Launch, "compiled", lambda *_: None)
    monkeypatch.setattr(norm_backward_cluster, "on", lambda _: nullcontext())
    monkeypatch.setattr(norm_backward_cluster, "resident_clusters", lambda _: answer[0])
    plan = replace(IN_A_CLUSTER, programs=66)
    for answer[0], programs in ((None, 57), (62, 62), (70, 66), (0, 0)):
        found = norm_backward_cluster.plan_clusters(plan, torch.device("meta"), (FP32,) * 7, 2048, None, {})
        assert (found and found[0]) == (replace(plan, programs=programs) if programs else None)


def test_where_no_cluster_runs_rows_are_read_twice(
    device: str, monkeypatch: pytest.MonkeyPatch, launched: list[str]
) -> None:
    monkeypatch.setattr(norm_backward, "facts_of", lambda _: Device(processors=4, clusters=True))
    monkeypatch.setattr(norm_backward, "plan_clusters", lambda *_: None)
    monkeypatch.setattr(norm_backward, "_backwards", {})
    norm = Norm("llama", x=BF16, w=BF16)
    assert_within_budget(norm, make_inputs(norm, (3, 2 * WIDEST_BACKWARD), device))
    assert "_backward_columns_kernel" in launched


def test_a_driver_that_is_not_there_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    class Compiled:
        function = 0

        class metadata:  # noqa: N801
            num_ctas, num_warps, shared = 8, 4, 128

    class Driver:
        def cuOccupancyMaxActiveClusters(self, found: object, function: object, config: object) -> int:  # noqa: N802
            return 1

    def missing(name: str) -> object:
        raise OSError(name)

    for library in (missing, lambda name: object(), lambda name: Driver()):
        monkeypatch.setattr(cluster_tools.ctypes, "CDLL", library)
        assert cluster_tools.resident_clusters(Compiled) is None


@pytest.mark.gpu
@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize("width", IN_CLUSTERS)
def test_the_driver_says_how_many_clusters_run_at_once(width: int, device: str) -> None:
    norm = Norm("llama", x=BF16, w=BF16)
    run(norm.fused, make_inputs(norm, (3, width), device))
    plan = next(reversed(norm_backward._backwards.values()))[0]
    most = backward_plan(width, device=triton_utils.facts_of(torch.device("cuda", 0))).programs
    assert plan.ctas == 8
    assert 0.8 * most <= plan.programs <= most


@pytest.mark.gpu
@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize("r", [None, BF16], ids=["alone", "residual"])
@pytest.mark.parametrize("width", IN_CLUSTERS)
def test_many_more_rows_than_clusters_repeat_bit_for_bit(width: int, r: torch.dtype | None, device: str) -> None:
    """Dozens of sums in each cluster, one after the other; a number that came late or early would show."""
    norm = Norm("llama", x=BF16, w=BF16, r=r)
    inputs = make_inputs(norm, (1501 if width < 100_000 else 401, width), device)
    first = run(norm.fused, inputs)
    for _ in range(20):
        again = run(norm.fused, inputs)
        assert all(torch.equal(value, getattr(first, name)) for name, value in again.present().items())
    rows = {name: value[::97] for name, value in vars(inputs).items() if value is not None and name != "w"}
    assert torch.equal(assert_within_budget(norm, replace(inputs, **rows)).dx, first.dx[::97])
    total = inputs.x if inputs.r is None else inputs.r + inputs.x
    exact = torch.zeros(width, dtype=torch.float64, device=device)
    for s, dy in zip(total.double().split(100), inputs.dy.double().split(100), strict=True):
        exact += (dy * s * (s.square().mean(-1, keepdim=True) + norm.eps).rsqrt()).sum(0)
    torch.testing.assert_close(first.dw.double(), exact, rtol=2**-8, atol=1e-4 * len(total) ** 0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [4096, 20480])
def test_a_prepared_launch_serves_only_what_it_was_prepared_for(
    width: int, device: str, request: pytest.FixtureRequest
) -> None:
    """Aligned and unaligned pointers, other strides and row counts, another stream, and a launch hook in between."""
    if width > WIDEST_BACKWARD:
        request.getfixturevalue("clusters")
    norm = Norm("llama", x=BF16, w=BF16)
    wide = make_inputs(norm, (300, width + 8), device)
    inputs = make_inputs(norm, (300, width), device)
    expected = run_true(norm, inputs)
    seen: list[object] = []

    def check(rows: int) -> None:
        part = replace(inputs, x=inputs.x[:rows], dy=inputs.dy[:rows])
        ours = run(norm.fused, part)
        torch.testing.assert_close(ours.y.double(), expected.y[:rows], rtol=2**-7, atol=2**-9)
        torch.testing.assert_close(ours.dx.double(), expected.dx[:rows], rtol=2**-6, atol=2**-8)

    for rows in (1, 2, 16, 17, 300, 1):
        check(rows)
    for offset in (1, 2, 8):
        shifted = wide.x[:, offset : offset + width].copy_(inputs.x)
        ours = run(norm.fused, replace(inputs, x=shifted))
        torch.testing.assert_close(ours.y.double(), expected.y, rtol=2**-7, atol=2**-9)
        torch.testing.assert_close(ours.dx.double(), expected.dx, rtol=2**-6, atol=2**-8)
    with torch.cuda.stream(torch.cuda.Stream()):
        check(300)
        torch.cuda.current_stream().synchronize()
    triton.knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        check(300)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(seen.append)
    assert len(seen) == 3
    check(300)
    assert len(seen) == 3


BOUNDARIES = sorted(
    limit + step
    for limit in (32, 64, 128, 256, 512, 1024, 2048, 3072, 4096, 6144, WIDEST_BACKWARD, WIDEST_FORWARD)
    for step in (-1, 0, 1)
)


@pytest.mark.parametrize("r", [None, BF16], ids=["alone", "residual"])
@pytest.mark.parametrize("width", BOUNDARIES)
def test_one_below_at_and_one_above_every_limit_of_the_plans(width: int, r: torch.dtype | None, device: str) -> None:
    norm = Norm("llama", x=BF16, w=BF16, r=r)
    assert_within_budget(norm, make_inputs(norm, (5, width), device))


def test_an_eps_that_is_a_whole_number_prepares_no_launch_of_integers(device: str) -> None:
    inputs = make_inputs(Norm("llama", x=BF16, w=BF16), (5, 96), device)
    for eps in (1, 0, 1e-6, 1):
        norm = Norm("llama", x=BF16, w=BF16, eps=eps)
        torch.testing.assert_close(run(norm.fused, inputs).y.double(), run_true(norm, inputs).y, rtol=2**-6, atol=2**-8)
