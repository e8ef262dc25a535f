"""Launch plans: pure functions from a row's width and bytes and the facts of a device to the way to launch a kernel.

Nothing here depends on the number of rows except the size of a grid, so one compilation serves every batch, and a row's
result does not depend on the rows beside it. The tables of rules, and the reasons beside them, were measured on the
device of ``BUILT_IN``, in bf16, on data larger than its L2. The ``PlanTable`` of another device goes before them, at
widths that were measured there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, TypeVar, get_args

Mode = Literal["static_persistent", "multi_wave_cached", "multi_wave_reload"]
"""The ways of a forward through its rows: a grid of one wave strides over them (``static_persistent``); each program
takes one tile and keeps it in registers (``multi_wave_cached``); or each reads one row twice, in chunks of columns
(``multi_wave_reload``)."""

MODES: tuple[Mode, ...] = get_args(Mode)

WIDEST_FORWARD = 32768
"""Elements of a row that a program of the forward can hold: beyond, the registers spill."""

WIDEST_BACKWARD = 16384
"""Elements of a row that a program of the backward can hold; wider rows are read twice."""

WIDEST_SANDWICH_FORWARD = 16384
"""Elements of a row that the forward of a norm, an add and a norm can hold; fp32 rows of 32768 spill 80 bytes."""

WIDEST_SANDWICH_BACKWARD = 8192
"""Elements of a row that its backward can hold; rows of 16384 spill 200 bytes and more, with 16 warps as with 32."""

WIDEST_GATED = 8192
"""Elements of a row, or of a group of one, that a program of a gated norm can hold in either direction."""

_OTHER_SHARED_BYTES = 10_240
"""Shared memory set aside for what is not a tile in flight: sums exchanged between warps, conversions of layout."""


Section = Literal[
    "forward",
    "norm_backward",
    "add_backward",
    "sandwich_backward",
    "heads_forward",
    "qk_backward",
    "qk_rope_backward",
    "rope",
    "glu_forward",
    "glu_backward",
]
"""The parts of a plan table. All forwards that sum hidden rows share ``forward``, and those of heads ``heads_forward``:
so a norm gives the same bits by itself and fused with what is around it, whatever a table says."""

SECTIONS: tuple[Section, ...] = get_args(Section)


@dataclass(frozen=True)
class Provenance:
    """Where, with what and when plans were measured.

    Attributes:
        device: as its driver names it.
        capability: of its architecture; empty where devices have none.
        fused_norm: the version of this package, and so on.
        torch: as above.
        triton: as above.
        date: of the day, year first.
    """

    device: str
    capability: str
    fused_norm: str
    torch: str
    triton: str
    date: str

    def __str__(self) -> str:
        return f"{self.device}, fused_norm {self.fused_norm}, torch {self.torch}, triton {self.triton}, {self.date}"


@dataclass(frozen=True, eq=False)
class PlanTable:
    """Plans measured on one kind of device; widths that it does not have follow the rules below.

    Attributes:
        provenance: of the measurements.
        rows: by section and width: ``ForwardPlan`` in ``forward``, ``BackwardPlan`` in the next three, ``HeadsSize`` in
            those of heads, and ``GluSize`` in the last two, whose width is None.
    """

    provenance: Provenance
    rows: Mapping[Section, Mapping[int | None, Any]] = field(default_factory=dict)

    def row(self, section: Section, width: int | None) -> Any:
        """The row for a width, or None."""
        return self.rows.get(section, {}).get(width)


BUILT_IN = PlanTable(Provenance("NVIDIA H200", "9.0", "0.1.0", "2.11.0", "3.6.0", "2026-11-20"))
"""No rows: the rules below are the plans of this device."""


@dataclass(frozen=True)
class ForwardRule:
    """A row of a table: the forward's plan for widths up to its own that no row above it has.

    Attributes:
        widest: the last width of the row.
        elements: of a tile, which has one row at least; of a chunk, where rows are read in chunks.
        warps: of a program, of 32 lanes.
        why: as measured, beside what was tried.
    """

    widest: int
    elements: int
    warps: int
    why: str = ""


@dataclass(frozen=True)
class BackwardRule:
    """A row of a table: the backward's plan, as ``ForwardRule`` has the forward's.

    Attributes:
        widest: the last width of the row.
        elements: of a tile, which has one row at least.
        warps: of a program, of 32 lanes.
        programs: on each processor.
        stages: as in ``BackwardPlan``, and so are reload and tail.
        reload: as above.
        tail: as above.
        why: as measured, beside what was tried.
    """

    widest: int
    elements: int
    warps: int
    programs: int
    stages: int = 3
    reload: bool = False
    tail: int = 0
    why: str = ""


_ANY = 2**62
"""Wider than any row."""

_FORWARD = (
    ForwardRule(512, 2048, 4, why="16 elements a lane, reductions inside a warp; 4096 elements are 1 to 3 % slower"),
    ForwardRule(1024, 2048, 2),
    ForwardRule(5120, 2048, 4, why="8 warps at 2560 and 5120 wide: up to 3 % slower, FP8 15 % and more"),
    ForwardRule(8192, 2048, 8, why="16 warps are within 1 %, and 15 % slower where codes are written"),
    ForwardRule(16384, 2048, 16),
    ForwardRule(WIDEST_FORWARD, 2048, 32),
)
_CHUNKED_FORWARD = (
    ForwardRule(8192, 16384, 8),
    ForwardRule(32768, 16384, 16),
    ForwardRule(_ANY, 32768, 32, why="less is read twice: 12 % over 16384 at 65536 wide, and that has 9 % over 8192"),
)
_SANDWICH_FORWARD = (
    ForwardRule(512, 2048, 4),
    ForwardRule(1024, 2048, 2),
    ForwardRule(2048, 2048, 2, why="32 elements a lane: .95 of a copy's bandwidth at 1152 wide, with half as many .94"),
    ForwardRule(4096, 2048, 4, why="the same: .91 at 2560 and .93 at 3840 wide, with half as many .89 and .94"),
    ForwardRule(8192, 2048, 8, why="the same: .94 at 5376 wide"),
    ForwardRule(WIDEST_SANDWICH_FORWARD, 2048, 16),
)
_NORM_BACKWARD = (
    BackwardRule(512, 4096, 4, 2, why="32 elements a lane, as many for dw; 4 and 13 % faster than 16 at x128 and x256"),
    BackwardRule(1024, 4096, 4, 2),
    BackwardRule(2048, 4096, 4, 2, why="two rows a tile hide the reduction's latency"),
    BackwardRule(3072, 4096, 4, 3, why="at 2560 a third program makes up for the unused lanes, 8 % over two"),
    BackwardRule(4096, 4096, 4, 2, reload=True, why="5 % faster than weights in registers at 32768x4096"),
    BackwardRule(5120, 4096, 4, 2, reload=True, tail=1024, why="two pieces leave room for a second program: 8 %"),
    BackwardRule(6144, 4096, 8, 2, reload=True, tail=2048, why="the same: 7 % at 5376, none at 6144"),
    BackwardRule(8192, 4096, 8, 1, why="one program fills a processor with the weight in registers"),
    BackwardRule(12288, 4096, 16, 1, why="the unused lanes leave room for more rows in flight: 6 % at 4096x12288"),
    BackwardRule(WIDEST_BACKWARD, 4096, 16, 1, stages=1, reload=True),
)
_ADD_BACKWARD = (
    BackwardRule(512, 4096, 4, 2),
    BackwardRule(1024, 4096, 4, 2),
    BackwardRule(2048, 2048, 4, 2, why="the residual's gradient hides as much as a second row would, 1 % apart"),
    BackwardRule(4096, 4096, 4, 2),
    BackwardRule(8192, 4096, 8, 1, why="with a residual's gradient enough is in flight without a second piece"),
    BackwardRule(WIDEST_BACKWARD, 4096, 32, 1, stages=1, reload=True),
)
_SANDWICH_BACKWARD = (
    # Rows of 1024 and less were not measured; compiled for sm_90 they spill up to 44 bytes.
    BackwardRule(2048, 4096, 4, 2, reload=True, why=".94 of a copy's bandwidth at 1152 wide, half a tile .75 to .91"),
    BackwardRule(3072, 4096, 4, 2, reload=True, why="two accumulators, 32 elements a lane, 250 registers: .88 at 2560"),
    # From 3840 wide on one program keeps enough in flight.
    BackwardRule(4096, 4096, 4, 1, why="it has room for the weights in registers: .94, two of eight warps .84"),
    BackwardRule(WIDEST_SANDWICH_BACKWARD, 4096, 16, 1, reload=True, why="16 a lane, 128 registers: .94 at 5376 wide"),
)
_FP32_SANDWICH_BACKWARD = (
    BackwardRule(2048, 4096, 4, 2, reload=True),
    BackwardRule(4096, 4096, 8, 2, reload=True, why="16 elements a lane, 128 registers"),
    BackwardRule(WIDEST_SANDWICH_BACKWARD, 4096, 16, 1, reload=True),
)
_GATED_FORWARD = (
    ForwardRule(4096, 2048, 4, why=".95 and more of a copy's bandwidth; in 2 warps the same or up to 3 % slower"),
    ForwardRule(WIDEST_GATED, 2048, 8, why="as many elements a lane: .87 to .91 at 8192, twice as many .79 to .83"),
)
_GATED_BACKWARD = (
    BackwardRule(512, 2048, 4, 3, why="twice as many elements a lane are 4 to 24 % slower at 128 wide"),
    BackwardRule(1024, 4096, 4, 2, why="half as many elements a lane are 12 % slower"),
    BackwardRule(2048, 2048, 4, 3, why="reading the weight again is up to 8 % slower"),
    BackwardRule(
        WIDEST_GATED,
        4096,
        16,
        1,
        why="8 warps: to 8 % slower; two such at 4096: 11 % faster or 8 % slower, by order",
    ),
)

Rule = TypeVar("Rule", ForwardRule, BackwardRule)


def _rule(rules: Sequence[Rule], width: int) -> Rule:
    """The first row of a table that takes a width."""
    return next(rule for rule in rules if width <= rule.widest)


@dataclass(frozen=True)
class Device:
    """The facts about a device that plans depend on."""

    processors: int = 132
    warp_size: int = 32
    shared_memory: int = 232_448
    """Bytes that one program may use at most."""
    overlaps: bool = False
    """A launch may begin before the one in front of it has ended (programmatic dependent launch)."""
    table: PlanTable = BUILT_IN
    """The plans that go before the rules."""

    def warps(self, wanted: int) -> int:
        """``wanted`` counts warps of 32 lanes; a 64-lane device gets half as many for the same number of lanes."""
        return max(1, wanted * 32 // self.warp_size)


@dataclass(frozen=True)
class ForwardPlan:
    """One launch of the forward.

    Attributes:
        mode: see ``Mode``.
        rows: in a tile.
        block: columns in a tile: all of a row, or a chunk of it under ``multi_wave_reload``.
        warps: of a program.
        programs: at most, under ``static_persistent``; elsewhere there is one for each tile.
    """

    mode: Mode
    rows: int
    block: int
    warps: int
    programs: int = 0


@dataclass(frozen=True)
class BackwardPlan:
    """One launch of the backward: a persistent grid that strides over tiles of rows.

    Attributes:
        rows: in a tile.
        block: columns in a tile.
        warps: of a program.
        stages: tiles in flight, the one computed included.
        programs: at most; each sums its share of dw in registers. A frozen weight gets one for each tile.
        reload: read the weight again for every tile instead of keeping it in registers.
        chunked: the row does not fit; its sums come first, then blocks of ``block`` columns.
        tail: columns in a second piece of each tile, where ``block`` alone does not hold a row: a power of two, so that
            5120 = 4096 + 1024 leaves no lane idle. 0 is none.
    """

    rows: int
    block: int
    warps: int
    stages: int
    programs: int
    reload: bool = False
    chunked: bool = False
    tail: int = 0

    @property
    def columns(self) -> int:
        """All columns in a tile."""
        return self.block + self.tail


@lru_cache(maxsize=1024)
def forward_plan(width: int, device: Device = Device(), mode: Mode | None = None) -> ForwardPlan:
    """The forward's launch for rows of ``width`` elements, in the best mode or the one asked for.

    With a residual it is the same one, so that rows are added up in the same order.

    Raises:
        ValueError: for a mode that is none, or that cannot hold a row this wide.
    """
    block = next_power_of_2(width)
    tuned: ForwardPlan | None = device.table.row("forward", width)
    if tuned is not None and (mode is None or mode == tuned.mode):
        return tuned
    if mode is None:
        # At 32768 wide a norm is 3 % faster in two halves, and 4 % slower so with a residual.
        mode = "multi_wave_cached" if block <= WIDEST_FORWARD else "multi_wave_reload"
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)} or None, not {mode!r}")
    if mode == "multi_wave_reload":
        rule = _rule(_CHUNKED_FORWARD, block)
        return ForwardPlan(mode, rows=1, block=min(block, rule.elements), warps=device.warps(rule.warps))
    if block > WIDEST_FORWARD:
        raise ValueError(
            f"mode {mode!r} holds rows of up to {WIDEST_FORWARD} elements, not {width}; use multi_wave_reload"
        )
    programs = (8 if block <= 4096 else 4) * device.processors if mode == "static_persistent" else 0
    if tuned is not None:  # A row has the same tile in every mode that holds it, and so the same bits.
        return replace(tuned, mode=mode, programs=programs)
    return _forward_by(_rule(_FORWARD, width), block, mode, programs, device)


def _forward_by(rule: ForwardRule, block: int, mode: Mode, programs: int, device: Device) -> ForwardPlan:
    """The plan of a rule for rows that are held whole."""
    return ForwardPlan(mode, max(1, rule.elements // max(block, 32)), block, device.warps(rule.warps), programs)


@lru_cache(maxsize=1024)
def backward_plan(
    width: int, column_bytes: int = 8, device: Device = Device(), *, summed: bool = False
) -> BackwardPlan:
    """The backward's launch for rows of ``width`` elements.

    ``column_bytes``: what the loop reads for one element of a row, over all tensors it reads. Every stage beyond the
    first holds a tile of each in shared memory; where they do not fit, fewer are in flight. ``summed``: the gradient of
    a residual sum is read and added as well.
    """
    return _fitting(_backward_plan(width, device, summed), column_bytes, device)


def _fitting(plan: BackwardPlan, column_bytes: int, device: Device) -> BackwardPlan:
    """The plan with as many tiles in flight as shared memory holds."""
    tile_bytes = plan.rows * plan.columns * column_bytes
    fitting = 1 + (device.shared_memory - _OTHER_SHARED_BYTES) // tile_bytes
    return replace(plan, stages=min(plan.stages, fitting))


def _backward_plan(width: int, device: Device, summed: bool) -> BackwardPlan:
    """The rules of ``backward_plan``, shared memory aside."""
    tuned: BackwardPlan | None = device.table.row("add_backward" if summed else "norm_backward", width)
    if tuned is not None:
        return tuned
    if width > WIDEST_BACKWARD:
        # x and dy are read twice and dw stays in registers: a row in registers would spill.
        return BackwardPlan(2, 2048, device.warps(4), stages=2, programs=4 * device.processors, chunked=True)
    return _backward_by(_rule(_ADD_BACKWARD if summed else _NORM_BACKWARD, width), width, device)


def _backward_by(rule: BackwardRule, width: int, device: Device) -> BackwardPlan:
    """The plan of a rule, shared memory aside."""
    columns = next_power_of_2(width)
    rows = max(1, rule.elements // max(columns, 64))
    block = columns // 2 if rule.tail else columns
    programs = rule.programs * device.processors
    return BackwardPlan(rows, block, device.warps(rule.warps), rule.stages, programs, rule.reload, tail=rule.tail)


@lru_cache(maxsize=1024)
def sandwich_forward_plan(width: int, device: Device = Device()) -> ForwardPlan:
    """The forward of a norm, an add and, in a sandwich, a norm, for rows up to ``WIDEST_SANDWICH_FORWARD``."""
    if device.table.row("forward", width) is not None:
        return forward_plan(width, device, "multi_wave_cached")
    return _forward_by(_rule(_SANDWICH_FORWARD, width), next_power_of_2(width), "multi_wave_cached", 0, device)


@lru_cache(maxsize=1024)
def sandwich_backward_plan(width: int, column_bytes: int = 12, device: Device = Device()) -> BackwardPlan:
    """A sandwich's backward, for rows up to ``WIDEST_SANDWICH_BACKWARD``; ``column_bytes`` as in ``backward_plan``."""
    plan: BackwardPlan | None = device.table.row("sandwich_backward", width)
    if plan is None:
        rules = _SANDWICH_BACKWARD if column_bytes <= 12 else _FP32_SANDWICH_BACKWARD
        plan = _backward_by(_rule(rules, width), width, device)
    return _fitting(plan, column_bytes, device)


@lru_cache(maxsize=1024)
def gated_forward_plan(width: int, device: Device = Device()) -> ForwardPlan:
    """A gated norm's forward, for groups of up to ``WIDEST_GATED`` elements, ``width`` being those of one group."""
    return _forward_by(_rule(_GATED_FORWARD, width), next_power_of_2(width), "multi_wave_cached", 0, device)


@lru_cache(maxsize=1024)
def gated_backward_plan(width: int, column_bytes: int = 8, device: Device = Device()) -> BackwardPlan:
    """Its backward, for the same; ``column_bytes`` as in ``backward_plan``. The programs are those of all groups."""
    return _fitting(_backward_by(_rule(_GATED_BACKWARD, width), width, device), column_bytes, device)


@dataclass(frozen=True)
class HeadsTile:
    """Some heads of some tokens.

    Attributes:
        tokens: powers of two, both.
        heads: of each token.
    """

    tokens: int
    heads: int


@dataclass(frozen=True)
class HeadsPlan:
    """One launch over the heads of q and k: the forward's grid has a program for each tile, the backward's is one wave.

    Attributes:
        q: a tile of q.
        k: a tile of k.
        block: columns of a tile that are loaded at once: a row, or half of one where RoPE turns all of it.
        warps: of a program.
        stages: tiles in flight in the backward, the one computed included.
        programs: of the backward, at most, for q and k together; without a dw there is one for each tile.
    """

    q: HeadsTile
    k: HeadsTile
    block: int
    warps: int
    stages: int = 1
    programs: int = 0


@dataclass(frozen=True)
class HeadsSize:
    """What a ``HeadsPlan`` is made of for every number of heads.

    Attributes:
        elements: of a tile, or those of one row where that has more.
        warps: of a program.
        stages: as in ``HeadsPlan``, and so are programs.
        programs: as above.
    """

    elements: int
    warps: int
    stages: int = 1
    programs: int = 0


@lru_cache(maxsize=1024)
def heads_forward_plan(
    q_heads: int, k_heads: int, width: int, rotary: int = 0, device: Device = Device(), *, normed: bool = True
) -> HeadsPlan:
    """The forward's launch for rows of ``width`` elements, ``rotary`` of which RoPE turns (0: there is no RoPE).

    ``q_heads`` and ``k_heads``: rows that follow each other at one stride, 1 where all rows of a tensor do. ``normed``:
    there is a norm; else RoPE is all that is done.
    """
    block, padded = _pieces(width, rotary)
    size = heads_forward_size(width, rotary, device, normed=normed)
    q, k = (_heads_tile(heads, size.elements // padded, bool(rotary)) for heads in (q_heads, k_heads))
    return HeadsPlan(q, k, block, size.warps)


def heads_forward_size(width: int, rotary: int, device: Device, *, normed: bool) -> HeadsSize:
    """The size of a tile of ``heads_forward_plan``."""
    tuned: HeadsSize | None = device.table.row("heads_forward" if normed else "rope", width)
    if tuned is not None:
        return tuned
    _, padded = _pieces(width, rotary)
    # 16 elements a lane, in 2 warps up to 2 % faster than in 4. With RoPE eight rows share a token's cos and sin in
    # cache: .92 of a copy's bandwidth at 128 wide, .89 at 256; tiles of 4096 elements in 8 warps made .86 and .84.
    elements = min(max(1024, 8 * padded), 2048) if rotary else 1024
    return HeadsSize(elements, device.warps(2 if padded <= 1024 else 4 if padded <= 4096 else 16))


@lru_cache(maxsize=1024)
def heads_backward_plan(
    q_heads: int,
    k_heads: int,
    width: int,
    rotary: int = 0,
    column_bytes: int = 4,
    angle_bytes: int = 0,
    device: Device = Device(),
) -> HeadsPlan:
    """The backward's launch, for what ``heads_forward_plan`` takes.

    ``column_bytes``: what the loop reads for one element of a row, ``angle_bytes`` of cos and sin for one of a token;
    stages are cut as in ``backward_plan``.
    """
    block, padded = _pieces(width, rotary)
    size = heads_backward_size(width, rotary, device)
    q, k = (_heads_tile(heads, size.elements // padded, bool(rotary)) for heads in (q_heads, k_heads))
    tile_bytes = max(tile.tokens * tile.heads for tile in (q, k)) * padded * (column_bytes + angle_bytes)
    fitting = 1 + (device.shared_memory - _OTHER_SHARED_BYTES) // tile_bytes
    return HeadsPlan(q, k, block, size.warps, max(1, min(size.stages, fitting)), size.programs)


def heads_backward_size(width: int, rotary: int, device: Device) -> HeadsSize:
    """The size of a tile of ``heads_backward_plan``, with as many stages as there are at most."""
    tuned: HeadsSize | None = device.table.row("qk_rope_backward" if rotary else "qk_backward", width)
    if tuned is not None:
        return tuned
    _, padded = _pieces(width, rotary)
    # 4096 elements: .95 of a copy's bandwidth at 128 wide, with a third program a processor .84. RoPE holds cos and sin
    # as well: with half the elements three programs fit, .93 at 128 wide and .86 at 256.
    elements, programs = (2048, 3) if rotary else (4096, 2)
    return HeadsSize(elements, device.warps(4 if padded <= 4096 else 16), 3, programs * device.processors)


def _pieces(width: int, rotary: int) -> tuple[int, int]:
    """Columns in a piece of a row, of which there are two where RoPE turns all of it, and in a row as loaded."""
    if rotary == width:
        half = next_power_of_2(width // 2)
        return half, 2 * half
    return next_power_of_2(width), next_power_of_2(width)


def _heads_tile(heads: int, rows: int, rotated: bool) -> HeadsTile:
    """Up to ``rows`` rows, with as many heads of a token as waste few; each block of heads reads cos and sin again."""

    def cost(block: int) -> float:
        wasted = -(-heads // block) * block / heads
        return wasted * (1 + 0.5 / block) if rotated else wasted

    most = max(1, rows.bit_length()) - 1
    best = min((1 << power for power in range(most, -1, -1) if 1 << power < 2 * heads), key=cost)
    return HeadsTile((1 << most) // best, best)


@dataclass(frozen=True)
class GluPlan:
    """One launch of a gate, forward or backward: a program for each tile.

    Attributes:
        rows: in a tile.
        block: columns in a tile.
        warps: of a program.
    """

    rows: int
    block: int
    warps: int


@dataclass(frozen=True)
class GluSize:
    """What a ``GluPlan`` is made of for every width.

    Attributes:
        elements: of a tile.
        warps: of a program.
    """

    elements: int
    warps: int


@lru_cache(maxsize=1024)
def glu_plan(width: int | None, backward: bool = False, device: Device = Device()) -> GluPlan:
    """The launch for rows of ``width`` elements, None where all rows follow each other and are cut anywhere."""
    size = glu_size(backward, device)
    block = size.elements if width is None else min(size.elements, next_power_of_2(width))
    return GluPlan(size.elements // block, block, size.warps)


def glu_size(backward: bool, device: Device) -> GluSize:
    """The size of a tile of ``glu_plan``."""
    tuned: GluSize | None = device.table.row("glu_backward" if backward else "glu_forward", None)
    if tuned is not None:
        return tuned
    # 8 elements a lane and tensor are one load of 16 bytes in bf16; the forward takes two. On an H200 both directions
    # reach .97 to 1.02 of a copy's bandwidth where all rows follow each other; elsewhere they were not measured.
    return GluSize(1024 if backward else 2048, device.warps(4))


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is at least ``value`` (1 for 0)."""
    return 1 << max(value - 1, 0).bit_length()
