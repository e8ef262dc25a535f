"""Launch plans: pure functions from a row's width and bytes and the properties of a device to a launch.

The number of rows decides the size of a grid alone, so one compilation serves every batch, and a row's result does not
depend on the rows beside it. Products with the factors of an adapter are the exception: they have tiles for few rows
and others for many, which add the same products in the same order. ``RULES`` has a plan for every width; they were
measured on an NVIDIA H200, in bf16, on data larger than its L2, and the reasons stand beside them. ``TABLES`` has
measurements on other devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, get_args

Mode = Literal["static_persistent", "multi_wave_cached", "multi_wave_reload"]
"""The ways in which a forward goes through its rows. ``static_persistent``: as many programs as run at once stride over
all tiles. ``multi_wave_cached``: each program takes one tile and keeps it in registers. ``multi_wave_reload``: each
program takes one row and reads it twice, in chunks of columns."""

MODES: tuple[Mode, ...] = get_args(Mode)

WIDEST_FORWARD = 32768
"""Elements of a row that a program of the forward can hold: beyond, the registers spill."""

WIDEST_BACKWARD = 16384
"""Elements of a row that a program of the backward can hold; wider rows are read twice."""

WIDEST_SANDWICH_FORWARD = 16384
"""Elements of a row that the forward of a norm, an add and a norm can hold; fp32 rows of 32768 spill 80 bytes."""

WIDEST_SANDWICH_BACKWARD = 8192
"""Elements of a row that the backward of these can hold; rows of 16384 spill 200 bytes and more in 16 and 32 warps."""


_OTHER_SHARED_BYTES = 10_240
"""Shared memory set aside for what is not a tile in flight: sums exchanged between warps, conversions of layout."""


@dataclass(frozen=True)
class Rule:
    """The way to launch one kernel on rows that are no wider than ``widest``."""

    widest: int  # elements; rules of a section are tried in their order
    elements: int  # of a tile, which has one row at least; of a chunk, if rows are read in chunks
    warps: int  # of a program, of 32 lanes
    programs: int = 0  # on each processor, if a backward's programs stride over tiles
    stages: int = 3  # tiles in flight in such a backward, including the current one
    reload: bool = False  # read the weight again for every tile instead of keeping it in registers
    tail: int = 0  # columns in a second piece of each tile (see ``BackwardPlan``)
    why: str = ""  # what was measured, and what else was tried


ANY_WIDTH = 2**62
"""Wider than any row."""

RULES: dict[str, tuple[Rule, ...]] = {
    "forward": (
        Rule(512, 2048, 4, why="16 elements a lane, reductions inside a warp; 4096 elements are 1 to 3 % slower"),
        Rule(1024, 2048, 2),
        Rule(5120, 2048, 4, why="8 warps at 2560 and 5120 wide: up to 3 % slower, of results in bytes 15 % and more"),
        Rule(8192, 2048, 8, why="16 warps are within 1 %, and 15 % slower if bytes are written"),
        Rule(16384, 2048, 16),
        Rule(WIDEST_FORWARD, 2048, 32),
    ),
    "chunked_forward": (
        Rule(8192, 16384, 8),
        Rule(32768, 16384, 16),
        Rule(
            ANY_WIDTH, 32768, 32, why="reads less twice: at 65536 wide 12 % faster than 16384, and that 9 % than 8192"
        ),
    ),
    "sandwich_forward": (
        Rule(512, 2048, 4),
        Rule(1024, 2048, 2),
        Rule(2048, 2048, 2, why="32 elements a lane: .95 of a copy's bandwidth at 1152 wide, with half as many .94"),
        Rule(4096, 2048, 4, why="32 elements a lane: .91 at 2560 and .93 at 3840 wide, with half as many .89 and .94"),
        Rule(8192, 2048, 8, why="32 elements a lane: .94 at 5376 wide"),
        Rule(WIDEST_SANDWICH_FORWARD, 2048, 16),
    ),
    "norm_backward": (
        Rule(512, 4096, 4, 2, why="32 elements a lane, as many for dw; 4 % faster than 16 at 128 wide, 13 % at 256"),
        Rule(1024, 4096, 4, 2),
        Rule(2048, 4096, 4, 2, why="two rows a tile hide the reduction's latency"),
        Rule(3072, 4096, 4, 3, why="at 2560 a third program makes up for the unused lanes: 8 % faster than two"),
        Rule(4096, 4096, 4, 2, reload=True, why="5 % faster than weights in registers at 32768x4096"),
        Rule(5120, 4096, 4, 2, reload=True, tail=1024, why="two pieces leave room for a second program: 8 % faster"),
        Rule(6144, 4096, 8, 2, reload=True, tail=2048, why="two pieces: 7 % faster at 5376, as fast at 6144"),
        Rule(8192, 4096, 8, 1, why="one program fills a processor with the weight in registers"),
        Rule(12288, 4096, 16, 1, why="unused lanes leave room for more rows in flight: 6 % faster at 4096x12288"),
        Rule(WIDEST_BACKWARD, 4096, 16, 1, stages=1, reload=True),
        Rule(
            ANY_WIDTH, 4096, 4, 4, stages=2, why="in chunks of two rows: x and dy are read twice, dw stays in registers"
        ),
    ),
    "add_backward": (
        Rule(512, 4096, 4, 2),
        Rule(1024, 4096, 4, 2),
        Rule(2048, 2048, 4, 2, why="reading the residual's gradient hides as much latency as a second row: within 1 %"),
        Rule(4096, 4096, 4, 2),
        Rule(8192, 4096, 8, 1, why="with a residual's gradient enough is in flight without a second piece"),
        Rule(WIDEST_BACKWARD, 4096, 32, 1, stages=1, reload=True),
        Rule(ANY_WIDTH, 4096, 4, 4, stages=2, why="as without a residual"),
    ),
    "sandwich_backward": (
        # Rows of 1024 and less were not measured; compiled for sm_90 and sm_120 they spill up to 56 bytes.
        Rule(2048, 4096, 4, 2, reload=True, why=".94 of a copy's bandwidth at 1152 wide, half a tile: .75 to .91"),
        Rule(3072, 4096, 4, 2, reload=True, why="two accumulators, 32 elements a lane, 250 registers: .88 at 2560"),
        # From 3840 wide on one program keeps enough in flight.
        Rule(4096, 4096, 4, 1, why="it has room for the weights in registers: .94; two programs of eight warps: .84"),
        Rule(WIDEST_SANDWICH_BACKWARD, 4096, 16, 1, reload=True, why="16 elements a lane, 128 registers: .94 at 5376"),
    ),
    "fp32_sandwich_backward": (
        Rule(1024, 2048, 4, 2, reload=True, why="not measured; twice as many elements spill 152 bytes on sm_100"),
        Rule(2048, 4096, 4, 2, reload=True),
        Rule(4096, 4096, 8, 2, reload=True, why="16 elements a lane, 128 registers"),
        Rule(WIDEST_SANDWICH_BACKWARD, 4096, 16, 1, reload=True),
    ),
}
"""The rules of each section, the narrowest rows first; a section is a kind of kernels that has rules of its own.

They stand in the file of these kernels; importing it adds them.
"""

_ROWS_OF = {"sandwich_forward": "forward", "rotated_heads_forward": "heads_forward"}
"""The sections for which rows of another one are measured: so a norm has the same bits alone and fused."""


@dataclass(frozen=True, eq=False)
class PlanTable:
    """The plans that were measured on one kind of device; widths that have no row follow ``RULES``."""

    device: str  # as its driver names it
    capability: str  # of its architecture
    measured: str  # the versions and the day
    rows: Mapping[str, Sequence[Rule]] = field(default_factory=dict)  # by section, each for ``widest`` elements exactly


H200 = PlanTable("NVIDIA H200", "9.0", "fused_norm 0.1.0, torch 2.11.0, triton 3.6.0, 2026-11-20")
"""No rows: the rules are the plans of this device."""

H100 = PlanTable(
    "NVIDIA H100 80GB HBM3",
    "9.0",
    "fused_norm 0.1.0, torch 2.11.0, triton 3.6.0, 2026-11-22",
    # Why: the time with this row, and that by the rules, in us, of bf16 rows of 33.5 million elements.
    {
        "norm_backward": (
            Rule(128, 1024, 2, 4, reload=True, why="72.3, by the rules 75.2"),
            Rule(1024, 8192, 8, 1, reload=True, why="72.2, by the rules 74.7"),
            Rule(2048, 8192, 8, 1, why="71.6, by the rules 75.3"),
            Rule(4096, 8192, 8, 1, reload=True, why="71.9, by the rules 75.6"),
            Rule(5120, 8192, 8, 1, why="73.6, by the rules 77.4"),
        ),
        "add_backward": (
            Rule(128, 1024, 2, 4, reload=True, why="92.3, by the rules 94.7"),
            Rule(4096, 4096, 8, 1, why="92.4, by the rules 94.6"),
        ),
        "sandwich_backward": (
            Rule(128, 512, 2, 3, stages=4, why="139.9, by the rules 153.5"),
            Rule(1024, 1024, 4, 2, why="144.3, by the rules 152.2"),
            Rule(2048, 8192, 8, 1, reload=True, why="141.6, by the rules 147.0"),
            Rule(4096, 8192, 8, 1, stages=2, why="142.7, by the rules 147.7"),
            Rule(5120, 8192, 8, 1, stages=4, why="142.6, by the rules 154.5"),
        ),
        "qk_backward": (Rule(128, 2048, 4, 3, why="73.2, by the rules 75.0 (32 + 8 heads)"),),
    },
)

TABLES = (H200, H100)


def table_of(name: str, capability: str) -> tuple[PlanTable, str]:
    """The table of plans for a device of this name and capability, and why it is that one, in words."""
    for table in TABLES:
        if name == table.device:
            return table, "measured on this device"
    if capability and capability == H200.capability:
        return H200, f"this device's own were not measured; it has the same architecture ({capability})"
    return H200, "nothing was measured on this device or its architecture; `python -m benchmarks tune` does"


@dataclass(frozen=True)
class Device:
    """The properties of a device that plans depend on."""

    processors: int = 132
    warp_size: int = 32
    shared_memory: int = 232_448
    """Bytes that one program may use at most."""
    overlaps: bool = False
    """A launch may begin before the previous one has ended (programmatic dependent launch)."""
    limits_registers: bool = False
    """A launch may say how many registers a lane has at most: on NVIDIA's."""
    table: PlanTable = H200
    """The device's own plans, which go before the rules."""

    def warps(self, count: int) -> int:
        """The warps with as many lanes as ``count`` warps of 32 lanes have: half as many if a warp has 64."""
        return max(1, count * 32 // self.warp_size)

    def rule(self, section: str, width: int) -> Rule:
        """The row of the device's table for just ``width`` elements; else the section's first rule that is for them."""
        measured = (row for row in self.table.rows.get(_ROWS_OF.get(section, section), ()) if row.widest == width)
        return next(measured, None) or next(rule for rule in RULES[section] if width <= rule.widest)

    def stages(self, most: int, tile_bytes: int) -> int:
        """The tiles in flight: ``most``, or fewer if shared memory does not hold all of them but the first."""
        return max(1, min(most, 1 + (self.shared_memory - _OTHER_SHARED_BYTES) // tile_bytes))


@dataclass(frozen=True)
class ForwardPlan:
    """One launch of the forward of a norm."""

    mode: Mode
    rows: int  # in a tile
    block: int  # columns in a tile: all of a row, or a chunk of it under ``multi_wave_reload``
    warps: int  # of a program
    programs: int = 0  # at most, under ``static_persistent``; otherwise there is one for each tile


@dataclass(frozen=True)
class BackwardPlan:
    """One launch of the backward: a persistent grid that strides over tiles of rows.

    ``tail``: columns in a second piece of each tile, if ``block`` alone does not hold a row: a power of two, so that
    5120 = 4096 + 1024 leaves no lane idle. 0 is none.
    """

    rows: int  # in a tile
    block: int  # columns in a tile
    warps: int  # of a program
    stages: int  # tiles in flight, including the current one
    programs: int  # at most; each sums its partial dw in registers. A frozen weight gets one for each tile
    reload: bool = False  # read the weight again for every tile instead of keeping it in registers
    chunked: bool = False  # a row is too wide to hold: one launch sums over it, another goes by blocks of columns
    tail: int = 0

    @property
    def columns(self) -> int:
        """All columns in a tile."""
        return self.block + self.tail


@lru_cache(maxsize=1024)
def forward_plan(
    width: int, device: Device = Device(), mode: Mode | None = None, section: str = "forward"
) -> ForwardPlan:
    """The forward's launch for rows of ``width`` elements, in ``mode`` or the best one.

    Args:
        width: of a row or, in a gated norm, of a group.
        device: the properties of its device.
        mode: None is the best one.
        section: ``forward`` for a norm with or without a residual, so that both add up a row in the same order;
            ``sandwich_forward`` for two norms with an add between them, of rows up to ``WIDEST_SANDWICH_FORWARD``;
            ``gated_forward`` for a gated norm, up to ``WIDEST_GATED``. The last two have one mode.

    Raises:
        ValueError: for an unknown mode, or one that cannot hold a row this wide.
    """
    block = next_power_of_2(width)
    if mode is None:
        # At 32768 wide a norm is 3 % faster in two halves, and 4 % slower so with a residual.
        mode = "multi_wave_cached" if block <= WIDEST_FORWARD else "multi_wave_reload"
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)} or None, not {mode!r}")
    if mode == "multi_wave_reload":
        rule = device.rule("chunked_forward", block)
        return ForwardPlan(mode, rows=1, block=min(block, rule.elements), warps=device.warps(rule.warps))
    if block > WIDEST_FORWARD:
        raise ValueError(
            f"mode {mode!r} holds rows of up to {WIDEST_FORWARD} elements, not {width}; use multi_wave_reload"
        )
    rule = device.rule(section, width)
    programs = (8 if block <= 4096 else 4) * device.processors if mode == "static_persistent" else 0
    return ForwardPlan(mode, max(1, rule.elements // max(block, 32)), block, device.warps(rule.warps), programs)


@lru_cache(maxsize=1024)
def backward_plan(
    width: int, column_bytes: int = 8, device: Device = Device(), section: str = "norm_backward"
) -> BackwardPlan:
    """The backward's launch for rows of ``width`` elements.

    Args:
        width: of a row or, in a gated norm, of a group.
        column_bytes: what the loop reads for one element of a row, over all tensors. Every stage beyond the first holds
            a tile of each in shared memory; if they do not fit, fewer are in flight.
        device: the properties of its device.
        section: ``norm_backward``; ``add_backward`` if the gradient of a residual sum is read and added as well;
            ``sandwich_backward`` for two norms, of rows up to ``WIDEST_SANDWICH_BACKWARD``; or ``gated_backward``, up
            to ``WIDEST_GATED``, whose programs are those of all groups together.
    """
    if section == "sandwich_backward" and column_bytes > 12:
        section = "fp32_sandwich_backward"
    rule, chunked = device.rule(section, width), width > WIDEST_BACKWARD
    columns = rule.elements // 2 if chunked else next_power_of_2(width)
    rows = max(1, rule.elements // max(columns, 64))
    block = columns // 2 if rule.tail else columns
    stages = device.stages(rule.stages, rows * (block + rule.tail) * column_bytes)
    programs = rule.programs * device.processors
    return BackwardPlan(rows, block, device.warps(rule.warps), stages, programs, rule.reload, chunked, rule.tail)


@dataclass(frozen=True)
class TilePlan:
    """One launch over tiles of ``rows`` by ``block`` columns."""

    rows: int
    block: int
    warps: int  # of a program
    programs: int = 0  # at most, along the rows, if partial sums over rows are written


@lru_cache(maxsize=1024)
def tile_plan(tile: tuple[int, int], width: int, device: Device) -> TilePlan:
    """The launch over rows of ``width`` elements; ``tile`` has its elements, and its columns at most."""
    elements, widest = tile
    block = min(widest, next_power_of_2(width))
    return TilePlan(max(1, elements // block), block, device.warps(4))


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is at least ``value`` (1 for 0)."""
    return 1 << max(value - 1, 0).bit_length()
