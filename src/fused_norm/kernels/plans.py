"""Launch plans: pure functions from a row's width and bytes and the facts of a device to the way to launch a kernel.

Nothing here depends on the number of rows except the size of a grid, so one compilation serves every batch, and a row's
result does not depend on the rows beside it. The rules and the reasons beside them were measured on the device of
``BUILT_IN``, in bf16, on data larger than its L2. A ``PlanTable`` of another device goes before the rules, at the
widths that were measured there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, get_args

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
    """Plans measured on one kind of device; widths that it does not have follow the rules of this module.

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
"""No rows: the rules of this module are the plans of this device. On an H100 the same rules give forwards as fast as
the fastest peer's, and backwards in .61 to .94 of its time."""


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
def forward_plan(
    width: int, device: Device = Device(), mode: Mode | None = None, *, summed: bool = False
) -> ForwardPlan:
    """The forward's launch for rows of ``width`` elements, in the best mode or the one asked for.

    ``summed``: a residual is read and the sum written as well.

    Raises:
        ValueError: for a mode that is none, or that cannot hold a row this wide.
    """
    block = next_power_of_2(width)
    tuned: ForwardPlan | None = device.table.row("forward", width)
    if tuned is not None and (mode is None or mode == tuned.mode):
        return tuned
    if mode is None:
        # At 32768 wide two programs of half a row each in flight beat one that holds all of it, 3 %; with a residual
        # there is enough in flight, and holding it is 4 % faster.
        held = block <= 16384 or (summed and block <= WIDEST_FORWARD)
        mode = "multi_wave_cached" if held else "multi_wave_reload"
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)} or None, not {mode!r}")
    if mode == "multi_wave_reload":
        # The wider the chunk, the less is read twice: at 65536 wide 32768 beats 16384 by 12 %, and that 8192 by 9 %.
        chunk, warps = (32768, 32) if block > 32768 else (16384, 16)
        return ForwardPlan(mode, rows=1, block=min(block, chunk), warps=device.warps(warps if block > 8192 else 8))
    if block > WIDEST_FORWARD:
        raise ValueError(
            f"mode {mode!r} holds rows of up to {WIDEST_FORWARD} elements, not {width}; use multi_wave_reload"
        )
    programs = 8 * device.processors if mode == "static_persistent" else 0
    if tuned is not None:  # A row has the same tile in every mode that holds it, and so the same bits.
        return replace(tuned, mode=mode, programs=programs)
    if block <= 512:
        # A tile of 2048 elements: 16 a lane, reductions inside a warp. 4096 elements are 1 to 3 % slower.
        return ForwardPlan(mode, 2048 // max(block, 32), block, device.warps(4), programs)
    if block == 1024:
        return ForwardPlan(mode, 2, block, device.warps(2), programs)
    if block <= 4096:
        # 2560 wide, the unused lanes want company: 8 warps are 1 % faster there, and no better from 3840 on.
        return ForwardPlan(mode, 1, block, device.warps(8 if 2048 < width <= 3072 else 4), programs)
    warps = 8 if width <= 6144 else 16 if block <= 16384 else 32
    return ForwardPlan(mode, 1, block, device.warps(warps), programs // 2)


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
    block = next_power_of_2(width)
    sms = device.processors
    if block > WIDEST_BACKWARD:
        # x and dy are read twice and dw stays in registers: a row in registers would spill.
        return BackwardPlan(2, 2048, device.warps(4), stages=2, programs=4 * sms, chunked=True)
    if block <= 512:
        # 4096 elements: 32 a lane, with as many more for dw's accumulator. At 131072x128 and x256 4 and 13 % faster
        # than with 16 a lane.
        return BackwardPlan(4096 // max(block, 64), block, device.warps(4), stages=3, programs=2 * sms)
    if block == 1024:
        return BackwardPlan(4, block, device.warps(4), stages=3, programs=2 * sms)
    if block == 2048:
        # Two rows a tile hide the reduction's latency; a residual's gradient does as much with one (1 % apart).
        return BackwardPlan(1 if summed else 2, block, device.warps(4), stages=3, programs=2 * sms)
    if width <= 3072:
        # 2560 wide: a third program a processor makes up for the unused lanes, 8 % over two.
        return BackwardPlan(1, block, device.warps(4), stages=3, programs=(2 if summed else 3) * sms)
    if block == 4096:
        # At 32768x4096 5 % faster than with the weight kept in registers; at 8192x4096 the same.
        return BackwardPlan(1, block, device.warps(4), stages=3, programs=2 * sms, reload=not summed)
    if block == 8192 and width <= 6144 and not summed:
        # Two pieces leave room for a second program: 8 % faster than a piece of 8192 at 8192x5120, 7 % at x5376, the
        # same at x6144. With a residual's gradient there is enough in flight without.
        tail, warps = (1024, 4) if width <= 5120 else (2048, 8)
        return BackwardPlan(1, 4096, device.warps(warps), stages=3, programs=2 * sms, reload=True, tail=tail)
    if block == 8192:
        # One program a processor: 8 warps with the weight in registers fill it.
        return BackwardPlan(1, block, device.warps(8), stages=3, programs=sms)
    if width <= 12288 and not summed:
        # The unused lanes leave room for more rows in flight: at 4096x12288 6 % faster.
        return BackwardPlan(1, block, device.warps(16), stages=3, programs=sms)
    return BackwardPlan(1, block, device.warps(32 if summed else 16), stages=1, programs=sms, reload=True)


@lru_cache(maxsize=1024)
def sandwich_forward_plan(width: int, device: Device = Device()) -> ForwardPlan:
    """The forward of a norm, an add and, in a sandwich, a norm, for rows up to ``WIDEST_SANDWICH_FORWARD``."""
    plan = forward_plan(width, device, "multi_wave_cached", summed=True)
    if plan.block < 2048 or device.table.row("forward", width) is not None:
        return plan
    # 32 elements a lane: .95 of a copy's bandwidth at 1152 wide, .91 at 2560, .93 at 3840, .94 at 5376; with half as
    # many .94 at 1152, .89 at 2560 and .94 at 3840.
    return replace(plan, warps=device.warps(min(plan.block // 1024, 32)))


@lru_cache(maxsize=1024)
def sandwich_backward_plan(width: int, column_bytes: int = 12, device: Device = Device()) -> BackwardPlan:
    """A sandwich's backward, for rows up to ``WIDEST_SANDWICH_BACKWARD``; ``column_bytes`` as in ``backward_plan``."""
    tuned: BackwardPlan | None = device.table.row("sandwich_backward", width)
    if tuned is not None:
        return _fitting(tuned, column_bytes, device)
    block = next_power_of_2(width)
    sms = device.processors
    if block <= 2048:
        # 4096 elements, the weights read again: .94 of a copy's bandwidth at 1152 wide, half a tile .75 to .91. Rows of
        # 1024 and less were not measured, and get as many elements; compiled for sm_90 they spill up to 44 bytes.
        plan = BackwardPlan(4096 // max(block, 64), block, device.warps(4), stages=3, programs=2 * sms, reload=True)
    elif block == 4096 and column_bytes <= 12:
        # Two accumulators and 32 elements a lane, 250 registers. From 3840 wide on one program keeps enough in flight
        # and has room for the weights: .94, two of eight warps .84. At 2560 two of four make .88.
        narrow = width <= 3072
        plan = BackwardPlan(1, block, device.warps(4), stages=3, programs=(1 + narrow) * sms, reload=narrow)
    else:
        # 16 elements a lane, 128 registers: .94 at 5376 wide.
        programs = (2 if block == 4096 else 1) * sms
        plan = BackwardPlan(1, block, device.warps(block // 512), stages=3, programs=programs, reload=True)
    return _fitting(plan, column_bytes, device)


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
