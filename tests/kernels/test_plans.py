"""Launch plans: what every row of the tables guarantees, and that the tests of the kernels reach all rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from fused_norm.kernels.plans import (
    MODES,
    RULES,
    TABLES,
    WIDEST_BACKWARD,
    WIDEST_FORWARD,
    WIDEST_GATED,
    WIDEST_SANDWICH_BACKWARD,
    WIDEST_SANDWICH_FORWARD,
    BackwardPlan,
    Device,
    ForwardPlan,
    HeadsTile,
    Mode,
    PlanTable,
    Rule,
    backward_plan,
    conv_plan,
    forward_plan,
    glu_plan,
    heads_backward_plan,
    heads_forward_plan,
    next_power_of_2,
    table_of,
)

from .numerics import WIDE, WIDTHS

H200 = Device(processors=132, shared_memory=232_448)
SMALL = Device(processors=46, shared_memory=101_376)
WIDE_WARPS = Device(processors=304, warp_size=64, shared_memory=65_536)
EVERY_DEVICE = pytest.mark.parametrize("device", [H200, SMALL, WIDE_WARPS], ids=["H200", "small", "wide warps"])
ALL_WIDTHS = [*range(1100), *(limit + step for limit in range(1152, 2 * WIDEST_FORWARD, 64) for step in (-1, 0, 1))]
"""All narrow widths, and those around every width that could be a limit."""
TESTED = (*WIDTHS, *WIDE)
TOO_WIDE = WIDE[-1]


def _kinds(plans: Iterable[ForwardPlan | BackwardPlan]) -> set[ForwardPlan | BackwardPlan]:
    """Return the distinct plans without their block, which is the next power of two of a width."""
    return {replace(plan, block=0) for plan in plans}


@pytest.mark.parametrize("plan", [forward_plan, backward_plan, partial(backward_plan, section="add_backward")])
def test_the_widths_of_the_kernel_tests_reach_every_row_of_the_tables(plan: Callable[..., Any]) -> None:
    everything = _kinds(plan(width, device=H200) for width in ALL_WIDTHS)
    assert _kinds(plan(width, device=H200) for width in TESTED) == everything
    assert len(everything) > 6


@EVERY_DEVICE
@pytest.mark.parametrize("section", ["norm_backward", "add_backward"])
def test_blocks_hold_a_row_unless_it_is_read_in_chunks(section: str, device: Device) -> None:
    for width in ALL_WIDTHS:
        forward = forward_plan(width, device)
        backward = backward_plan(width, 8, device, section)
        assert backward.chunked == (width > WIDEST_BACKWARD)
        assert (forward.mode == "multi_wave_reload") == (width > WIDEST_FORWARD)
        assert width <= forward.block or forward.mode == "multi_wave_reload"
        assert width <= backward.columns or backward.chunked
        assert backward.tail in (0, next_power_of_2(backward.tail))
        for plan in (forward, backward):
            assert plan.block == next_power_of_2(plan.block)
            assert plan.rows == next_power_of_2(plan.rows)
            assert plan.rows * plan.block <= WIDEST_FORWARD
            assert 1 <= plan.warps * device.warp_size <= 1024


def test_plans_do_not_depend_on_the_number_of_rows_or_on_the_dtype_but_for_stages() -> None:
    for width in TESTED:
        narrow, wide = backward_plan(width, 6, H200), backward_plan(width, 16, H200)
        assert replace(wide, stages=narrow.stages) == narrow


@EVERY_DEVICE
@pytest.mark.parametrize("column_bytes", [4, 8, 12, 16, 24])
def test_tiles_in_flight_fit_in_shared_memory(column_bytes: int, device: Device) -> None:
    """The number of stages is that of the table, or smaller if one more would not fit."""
    plans = [("norm_backward", width) for width in TESTED]
    plans += [("sandwich_backward", width) for width in TESTED if width <= WIDEST_SANDWICH_BACKWARD]
    for section, width in plans:
        unlimited_memory = replace(device, shared_memory=2**30)
        plan, unlimited = (backward_plan(width, column_bytes, d, section) for d in (device, unlimited_memory))
        tile_bytes = plan.rows * plan.columns * column_bytes
        assert plan.stages >= 1
        assert (plan.stages - 1) * tile_bytes < device.shared_memory
        assert plan.stages == unlimited.stages or plan.stages * tile_bytes > device.shared_memory - 16_384
        assert replace(plan, stages=unlimited.stages) == unlimited


def test_a_second_piece_counts_as_columns_and_as_shared_memory() -> None:
    plan = backward_plan(5120, 6, H200)
    assert plan.columns == plan.block + plan.tail == 5120
    just_enough = replace(H200, shared_memory=2 * 5120 * 6 + 10_240)
    assert backward_plan(5120, 6, just_enough).stages == 3
    assert backward_plan(5120, 6, replace(just_enough, shared_memory=just_enough.shared_memory - 1)).stages == 2


@EVERY_DEVICE
@pytest.mark.parametrize(
    ("section", "widest", "column_bytes"),
    [
        ("sandwich_forward", WIDEST_SANDWICH_FORWARD, ()),
        ("sandwich_backward", WIDEST_SANDWICH_BACKWARD, (8, 12, 24)),
        ("gated_forward", WIDEST_GATED, ()),
        ("gated_backward", WIDEST_GATED, (6, 16)),
    ],
)
def test_sandwiches_and_gated_norms_hold_their_rows_in_few_enough_registers_and_in_shared_memory(
    section: str, widest: int, column_bytes: Sequence[int], device: Device
) -> None:
    for width in (width for width in ALL_WIDTHS if width <= widest):
        plans = [backward_plan(width, size, device, section) for size in column_bytes]
        for plan in plans or [forward_plan(width, device, section=section)]:
            assert width <= plan.block == next_power_of_2(plan.block)
            assert plan.rows == next_power_of_2(plan.rows)
            if section == "sandwich_forward":
                assert plan.mode == "multi_wave_cached"
            else:
                assert plan.rows * plan.block <= 32 * plan.warps * device.warp_size
        if section == "gated_backward":
            assert (plan.stages - 1) * plan.rows * plan.block * 16 < device.shared_memory
            assert plan.stages >= 1


def test_fp32_rows_of_a_sandwich_are_held_by_twice_the_warps() -> None:
    wide, narrow = (backward_plan(4096, column_bytes, H200, "sandwich_backward") for column_bytes in (24, 12))
    assert wide.warps == 2 * narrow.warps


def test_two_programs_of_a_sandwich_share_a_processor() -> None:
    """bf16 rows of 2560: four tensors and both weights, two tiles ahead, twice."""
    plan = backward_plan(2560, 12, H200, "sandwich_backward")
    assert plan.programs == 2 * H200.processors
    assert 2 * (plan.stages - 1) * plan.block * 12 <= H200.shared_memory


@EVERY_DEVICE
@pytest.mark.parametrize("width_and_rotary", [(1, 0), (64, 0), (80, 0), (64, 64), (96, 96), (256, 256)], ids=str)
@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
def test_heads_fit_their_device(width_and_rotary: tuple[int, int], part: bool, device: Device) -> None:
    width, rotary = width_and_rotary
    if part:
        width, rotary = 4 * width + 2, 2 * max(rotary, 1)
    for q_heads, k_heads in ((1, 1), (14, 2), (32, 8), (40, 8), (64, 4), (5, 3)):
        forward = heads_forward_plan(q_heads, k_heads, width, rotary, device)
        backward = heads_backward_plan(q_heads, k_heads, width, rotary, 4, 4, device)
        for plan in (forward, backward):
            assert 1 <= plan.warps * device.warp_size <= 1024
            assert plan.block * (2 if rotary == width else 1) >= width
            assert plan.block == next_power_of_2(plan.block)
            for tile, heads in ((plan.q, q_heads), (plan.k, k_heads)):
                assert tile.tokens == next_power_of_2(tile.tokens)
                assert tile.heads == next_power_of_2(tile.heads) < 2 * heads
        assert backward.stages >= 1
        assert backward.programs >= 2 * device.processors


@pytest.mark.parametrize(
    ("heads", "tile"),
    [
        (32, HeadsTile(1, 16)),
        (16, HeadsTile(1, 16)),
        (8, HeadsTile(2, 8)),
        (40, HeadsTile(2, 8)),
        (14, HeadsTile(1, 16)),
        (1, HeadsTile(16, 1)),
        (128, HeadsTile(1, 16)),
    ],
)
def test_tiles_of_heads_waste_little(heads: int, tile: HeadsTile) -> None:
    assert heads_forward_plan(heads, heads, 64, 64).q == heads_backward_plan(heads, heads, 128, 128).k == tile


def test_stages_of_heads_are_cut_where_shared_memory_is_short() -> None:
    assert heads_backward_plan(32, 8, 128, 128, 4, 4, H200).stages == 3
    assert heads_backward_plan(32, 8, 128, 128, 16, 16, WIDE_WARPS).stages == 1


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("width", [None, 1, 7, 64, 1000, 14336])
def test_tiles_of_a_gate_have_as_many_elements_in_every_width(width: int | None, backward: bool) -> None:
    plan = glu_plan(width, backward)
    assert plan.rows * plan.block == (1024 if backward else 2048)
    assert width is not None or plan.rows == 1
    assert glu_plan(width, backward, Device(warp_size=64)).warps * 64 == plan.warps * 32


@pytest.mark.parametrize("channels", [1, 7, 200, 6144, 100_000])
@pytest.mark.parametrize("taps", [2, 3, 4])
def test_pieces_of_a_convolution_are_walked_through_in_steps_of_four_rows(taps: int, channels: int) -> None:
    forward, backward = conv_plan(channels, taps), conv_plan(channels, taps, True)
    assert forward.rows % 4 == 0
    assert (backward.rows + taps - 1) % 4 == 0, "with the rows behind, which it reads"
    assert 1 <= backward.programs <= 512, "one tile sums all of them"
    assert backward.block <= forward.block
    assert conv_plan(channels, taps, True, Device(processors=1)).programs <= 16
    assert conv_plan(channels, taps, True, Device(warp_size=64)).warps == 1


@pytest.mark.parametrize(("value", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (1024, 1024), (1025, 2048)])
def test_next_power_of_2(value: int, power: int) -> None:
    assert next_power_of_2(value) == power


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_asked_for_is_the_mode_planned_or_a_clear_error(mode: Mode) -> None:
    for width in TESTED[:-1]:
        assert forward_plan(width, H200, mode).mode == mode
    if mode == "multi_wave_reload":
        assert forward_plan(TOO_WIDE, H200, mode).mode == mode
        assert forward_plan(80, H200, mode).block == 128
    else:
        with pytest.raises(ValueError, match=f"holds rows of up to 32768 elements, not {TOO_WIDE}; use multi_wave_rel"):
            forward_plan(TOO_WIDE, H200, mode)


def test_an_unknown_mode_is_an_error() -> None:
    with pytest.raises(ValueError, match="mode must be one of static_persistent, multi_wave_cached, multi_wave_reload"):
        forward_plan(80, H200, "static")


def test_rows_of_tables_are_those_of_sections_that_exist() -> None:
    for table in TABLES:
        for section, rules in table.rows.items():
            assert section in RULES
            assert len({rule.widest for rule in rules}) == len(rules)


@pytest.mark.parametrize("table", [table for table in TABLES if table.rows], ids=lambda table: table.device)
def test_a_row_of_a_table_goes_before_the_rules_at_its_width_alone(table: PlanTable) -> None:
    device = replace(H200, table=table)
    (rule, *_) = table.rows["norm_backward"]
    plan = backward_plan(rule.widest, 6, device)
    assert (plan.rows * plan.block, plan.warps) == (rule.elements, rule.warps)
    assert plan != backward_plan(rule.widest, 6, H200)
    assert backward_plan(rule.widest + 1, 6, device) == backward_plan(rule.widest + 1, 6, H200)


def test_a_measured_forward_is_that_of_norms_with_adds_too() -> None:
    device = replace(H200, table=PlanTable("", "", "", {"forward": (Rule(1152, 4096, 8),)}))
    assert forward_plan(1152, device, section="sandwich_forward") == forward_plan(1152, device)
    assert forward_plan(1152, device).warps == 8


def test_a_device_takes_its_own_table_or_the_rules() -> None:
    for table in TABLES:
        assert table_of(table.device, table.capability) == (table, "measured on this device")
    assert table_of("NVIDIA GH200 480GB", "9.0")[0] is TABLES[0]
    assert "same architecture (9.0)" in table_of("NVIDIA GH200 480GB", "9.0")[1]
    assert "nothing was measured" in table_of("cpu", "")[1]
