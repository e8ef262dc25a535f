"""Launch plans: every row of the tables is meant, fits its device, and is reached by the tests of the kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from fused_norm.kernels import plans
from fused_norm.kernels.plans import (
    CLUSTER_REGISTERS,
    MODES,
    WIDEST_BACKWARD,
    WIDEST_CLUSTER,
    WIDEST_FORWARD,
    WIDEST_SANDWICH_BACKWARD,
    WIDEST_SANDWICH_FORWARD,
    BackwardPlan,
    Device,
    Mode,
    backward_plan,
    forward_plan,
    heads_backward_plan,
    heads_forward_plan,
    next_power_of_2,
    sandwich_backward_plan,
    sandwich_forward_plan,
)

from .numerics import CHUNKED, IN_CLUSTERS, WIDTHS

H200 = Device(processors=132, shared_memory=232_448, clusters=True)
SMALL = Device(processors=46, shared_memory=101_376)
WIDE_WARPS = Device(processors=304, warp_size=64, shared_memory=65_536)
ALL_WIDTHS = (*range(2 * WIDEST_FORWARD), *range(WIDEST_CLUSTER - 32, WIDEST_CLUSTER + 32))

# What distinguishes one row of a table from another.
FORWARD_ROWS = {
    # mode, rows, warps
    ("multi_wave_cached", 64, 4),
    ("multi_wave_cached", 32, 4),
    ("multi_wave_cached", 16, 4),
    ("multi_wave_cached", 8, 4),
    ("multi_wave_cached", 4, 4),
    ("multi_wave_cached", 2, 2),
    ("multi_wave_cached", 1, 4),
    ("multi_wave_cached", 1, 8),
    ("multi_wave_cached", 1, 16),
    ("multi_wave_reload", 1, 16),
    ("multi_wave_reload", 1, 32),
}
SUMMED_FORWARD_ROWS = FORWARD_ROWS - {("multi_wave_reload", 1, 16)} | {("multi_wave_cached", 1, 32)}
CLUSTER_ROWS = {
    # rows, warps, stages, programs per processor, reload, chunked, tail, blocks of a cluster, ahead
    (1, 4, 1, 66 / 132, True, False, 0, 8, False),
    (1, 8, 1, 33 / 132, True, False, 0, 8, True),
    (1, 16, 1, 16 / 132, True, False, 0, 8, True),
}
BACKWARD_ROWS = {
    # rows, warps, stages, programs per processor, reload, chunked, tail
    (64, 4, 3, 2, False, False, 0),
    (32, 4, 3, 2, False, False, 0),
    (16, 4, 3, 2, False, False, 0),
    (8, 4, 3, 2, False, False, 0),
    (4, 4, 3, 2, False, False, 0),
    (2, 4, 3, 2, False, False, 0),
    (1, 4, 3, 3, False, False, 0),
    (1, 4, 3, 2, True, False, 0),
    (1, 4, 3, 2, True, False, 1024),
    (1, 8, 3, 2, True, False, 2048),
    (1, 8, 3, 1, False, False, 0),
    (1, 16, 3, 1, False, False, 0),
    (1, 16, 1, 1, True, False, 0),
    (2, 4, 2, 4, False, True, 0),
    *CLUSTER_ROWS,
}
SUMMED_BACKWARD_ROWS = {
    (64, 4, 3, 2, False, False, 0),
    (32, 4, 3, 2, False, False, 0),
    (16, 4, 3, 2, False, False, 0),
    (8, 4, 3, 2, False, False, 0),
    (4, 4, 3, 2, False, False, 0),
    (1, 4, 3, 2, False, False, 0),
    (1, 8, 3, 1, False, False, 0),
    (1, 32, 1, 1, True, False, 0),
    (2, 4, 2, 4, False, True, 0),
    *CLUSTER_ROWS,
}


def forward_rows(widths: Iterable[int], summed: bool = False) -> set[tuple[object, ...]]:
    plans = {forward_plan(width, H200, summed=summed) for width in widths}
    return {(plan.mode, plan.rows, plan.warps) for plan in plans}


def backward_rows(widths: Iterable[int], summed: bool = False) -> set[tuple[object, ...]]:
    found = set()
    for p in {backward_plan(width, 6, H200, summed=summed) for width in widths}:
        row = (p.rows, p.warps, p.stages, p.programs / H200.processors, p.reload, p.chunked, p.tail)
        found.add(row if p.ctas == 1 else (*row, p.ctas, p.ahead))
    return found


def test_the_tables_have_exactly_these_rows() -> None:
    assert forward_rows(ALL_WIDTHS) == FORWARD_ROWS
    assert forward_rows(ALL_WIDTHS, summed=True) == SUMMED_FORWARD_ROWS
    assert backward_rows(ALL_WIDTHS) == BACKWARD_ROWS
    assert backward_rows(ALL_WIDTHS, summed=True) == SUMMED_BACKWARD_ROWS


def test_the_widths_of_the_kernel_tests_reach_every_row() -> None:
    assert forward_rows([*WIDTHS, CHUNKED, *IN_CLUSTERS]) == FORWARD_ROWS
    assert forward_rows([*WIDTHS, CHUNKED, *IN_CLUSTERS], summed=True) == SUMMED_FORWARD_ROWS
    assert backward_rows([*WIDTHS, CHUNKED, *IN_CLUSTERS]) == BACKWARD_ROWS
    assert backward_rows([*WIDTHS, CHUNKED, *IN_CLUSTERS], summed=True) == SUMMED_BACKWARD_ROWS


@pytest.mark.parametrize("device", [H200, SMALL, WIDE_WARPS], ids=str)
def test_blocks_hold_a_row_unless_chunked(device: Device) -> None:
    for width in ALL_WIDTHS:
        forward, backward = forward_plan(width, device), backward_plan(width, 8, device)
        split = backward.chunked or backward.ctas > 1
        assert (forward.mode == "multi_wave_reload") == split == (width > WIDEST_BACKWARD)
        for plan in (forward, backward, forward_plan(width, device, summed=True)):
            columns = plan.columns if isinstance(plan, BackwardPlan) else plan.block
            assert width <= columns or width > WIDEST_BACKWARD
            assert plan.block == next_power_of_2(plan.block)
            assert plan.rows == next_power_of_2(plan.rows)
            assert plan.rows * plan.block <= WIDEST_FORWARD
            assert 1 <= plan.warps * device.warp_size <= 1024


def test_clusters_hold_aligned_rows_where_there_are_clusters() -> None:
    for width in ALL_WIDTHS:
        held = backward_plan(width, 6, H200).ctas > 1
        assert held == (WIDEST_BACKWARD < width <= WIDEST_CLUSTER and width % 16 == 0)
        assert backward_plan(width, 6, replace(H200, clusters=False)).ctas == 1


def test_clusters_are_what_their_exchange_and_the_registers_take() -> None:
    """Two warps at least, each with columns of its own; as many blocks on a processor as have registers."""
    for width in (*IN_CLUSTERS, 32768, 65536):
        plan = backward_plan(width, 6, H200)
        assert width <= plan.columns == plan.ctas * plan.block
        assert plan.warps >= 2
        assert plan.block >= 256 * plan.warps
        blocks = 65_536 // (32 * plan.warps * CLUSTER_REGISTERS)
        assert plan.programs == blocks * H200.processors // plan.ctas
    assert backward_plan(131_072, 6, replace(H200, processors=4)).programs == 1


def test_plans_do_not_depend_on_the_number_of_rows_or_on_the_dtype_but_for_stages() -> None:
    for width in (*WIDTHS, CHUNKED):
        narrow, wide = backward_plan(width, 6, H200), backward_plan(width, 16, H200)
        assert replace(wide, stages=narrow.stages) == narrow


@pytest.mark.parametrize("device", [H200, SMALL, WIDE_WARPS], ids=str)
@pytest.mark.parametrize("column_bytes", [4, 8, 16])
def test_tiles_in_flight_fit_in_shared_memory(column_bytes: int, device: Device) -> None:
    for width in (*WIDTHS, CHUNKED):
        plan = backward_plan(width, column_bytes, device)
        assert plan.stages >= 1
        assert (plan.stages - 1) * plan.rows * plan.block * column_bytes < device.shared_memory


def test_a_second_piece_counts_as_columns_and_as_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = BackwardPlan(1, 8192, 8, stages=3, programs=132, tail=4096)
    monkeypatch.setattr(plans, "_backward_plan", lambda *_: pieces)
    backward_plan.cache_clear()
    assert pieces.columns == 12288
    assert backward_plan(12288, 8, H200).stages == 3  # two tiles of 96 KiB ahead of the one computed
    assert backward_plan(12288, 10, H200).stages == 2
    backward_plan.cache_clear()


def test_fp32_rows_of_8192_with_a_residual_lose_a_stage_on_an_h200() -> None:
    """s, dy, ds and the weight in fp32: two tiles ahead would take 256 KiB."""
    assert backward_plan(8192, 8, H200).stages == 3
    assert backward_plan(8192, 16, H200).stages == 2


SANDWICH_BACKWARD_ROWS = {
    # rows, warps, stages, programs per processor, reload
    (64, 4, 3, 2, True),
    (32, 4, 3, 2, True),
    (16, 4, 3, 2, True),
    (8, 4, 3, 2, True),
    (4, 4, 3, 2, True),
    (2, 4, 3, 2, True),
    (1, 4, 3, 2, True),
    (1, 4, 3, 1, False),
    (1, 16, 3, 1, True),
}


def test_a_sandwich_has_exactly_these_backwards() -> None:
    plans = {sandwich_backward_plan(width, 12, H200) for width in range(1, WIDEST_SANDWICH_BACKWARD + 1)}
    rows = {(p.rows, p.warps, p.stages, p.programs / H200.processors, p.reload) for p in plans}
    assert rows == SANDWICH_BACKWARD_ROWS


@pytest.mark.parametrize("device", [H200, SMALL, WIDE_WARPS], ids=str)
@pytest.mark.parametrize("column_bytes", [8, 12, 24])
def test_a_sandwich_holds_its_rows_and_fits_in_shared_memory(column_bytes: int, device: Device) -> None:
    for width in range(WIDEST_SANDWICH_FORWARD + 1):
        forward = sandwich_forward_plan(width, device)
        assert forward.mode == "multi_wave_cached"
        assert width <= forward.block
        if width <= WIDEST_SANDWICH_BACKWARD:
            backward = sandwich_backward_plan(width, column_bytes, device)
            tile_bytes = backward.rows * backward.block * column_bytes
            assert width <= backward.block == next_power_of_2(backward.block)
            assert backward.rows == next_power_of_2(backward.rows)
            assert backward.stages >= 1
            assert (backward.stages - 1) * tile_bytes < device.shared_memory
            assert backward.rows * backward.block <= 32 * backward.warps * device.warp_size


def test_fp32_rows_of_a_sandwich_are_held_by_twice_the_warps() -> None:
    assert sandwich_backward_plan(4096, 12, H200).warps == 4
    assert sandwich_backward_plan(4096, 24, H200).warps == 8


def test_two_programs_of_a_sandwich_share_a_processor() -> None:
    """bf16 rows of 2560: four tensors and both weights, two tiles ahead, twice."""
    plan = sandwich_backward_plan(2560, 12, H200)
    assert plan.programs == 2 * H200.processors
    assert 2 * (plan.stages - 1) * plan.block * 12 <= H200.shared_memory


@pytest.mark.parametrize(("width", "rotary"), [(256, 64), (128, 64), (16, 4), (24, 24), (80, 0)])
def test_tiles_of_heads_are_powers_of_two_when_rope_turns_a_part_of_a_row(width: int, rotary: int) -> None:
    for heads in (1, 2, 3, 16):
        for plan in (heads_forward_plan, heads_backward_plan):
            planned = plan(heads, 2, width, rotary, device=H200)
            for tile in (planned.q, planned.k):
                assert (tile.tokens, tile.heads) == (next_power_of_2(tile.tokens), next_power_of_2(tile.heads))


@pytest.mark.parametrize(("value", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (1024, 1024), (1025, 2048)])
def test_next_power_of_2(value: int, power: int) -> None:
    assert next_power_of_2(value) == power


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_asked_for_is_the_mode_planned_or_a_clear_error(mode: Mode) -> None:
    for width in WIDTHS:
        assert forward_plan(width, H200, mode).mode == mode
    if mode == "multi_wave_reload":
        assert forward_plan(CHUNKED, H200, mode).mode == mode
        assert forward_plan(80, H200, mode).block == 128
    else:
        with pytest.raises(ValueError, match=f"holds rows of up to 32768 elements, not {CHUNKED}; use multi_wave_rel"):
            forward_plan(CHUNKED, H200, mode)


def test_an_unknown_mode_is_an_error() -> None:
    with pytest.raises(ValueError, match="mode must be one of static_persistent, multi_wave_cached, multi_wave_reload"):
        forward_plan(80, H200, "static")


def test_equal_facts_give_equal_plans() -> None:
    for width in (*WIDTHS, CHUNKED):
        for plan in (forward_plan, backward_plan):
            plan.cache_clear()
            first = plan(width, device=H200)
            plan.cache_clear()
            assert plan(width, device=H200) == first
