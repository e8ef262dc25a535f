"""Looks up launch plans: the rule that a device follows for rows of a width, and what was measured on devices.

A plan is a pure function of a row's width and bytes and the properties of a device. The number of rows decides the size
of a grid alone, so one compilation serves every batch, and a row's result does not depend on the rows beside it.
Products with the factors of an adapter are the exception: they have tiles for few rows and others for many, which add
the same products in the same order. ``RULES`` has a plan for every width, ``TABLES`` measurements on other devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

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
    tail: int = 0  # columns in a second piece of each tile (see ``norm_kernels.BackwardPlan``)
    why: str = ""  # what was measured, and what else was tried


ANY_WIDTH = 2**62
"""Wider than any row."""

RULES: dict[str, tuple[Rule, ...]] = {}
"""The rules of each section, the narrowest rows first; a section is a kind of kernels that has rules of its own.

They stand in the file of these kernels; importing it adds them. They were measured on an NVIDIA H200, in bf16, on data
larger than its L2, and the reasons stand beside them.
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
