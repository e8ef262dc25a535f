"""How each shape is launched: pure functions from a row's width and bytes and the device's facts to a plan.

Nothing here depends on the number of rows except the size of a grid, so one compilation serves every batch, and a row's
result does not depend on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

Mode = Literal["static_persistent", "multi_wave_cached", "multi_wave_reload"]
"""How a forward goes through its rows: a grid of one wave strides over them (``static_persistent``); each program takes
one tile and keeps it in registers (``multi_wave_cached``); or each reads one row twice, in chunks of columns
(``multi_wave_reload``)."""

MODES: tuple[Mode, ...] = get_args(Mode)

WIDEST_ROW = 16384
"""Elements of a row that one program can hold: beyond, the registers spill."""

_REDUCTION_BYTES = 2048
"""Shared memory set aside for exchanging sums between warps."""


@dataclass(frozen=True)
class Device:
    """What a plan needs to know of a device."""

    processors: int = 132
    warp_size: int = 32
    shared_memory: int = 232_448
    """Bytes that one program may use at most."""

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
    """

    rows: int
    block: int
    warps: int
    stages: int
    programs: int
    reload: bool = False
    chunked: bool = False


@lru_cache(maxsize=1024)
def forward_plan(width: int, device: Device = Device(), mode: Mode | None = None) -> ForwardPlan:
    """The forward's launch for rows of ``width`` elements, in the best mode or the one asked for.

    Raises:
        ValueError: for a mode that is none, or that cannot hold a row this wide.
    """
    if mode is None:
        mode = "multi_wave_reload" if next_power_of_2(width) > WIDEST_ROW else "multi_wave_cached"
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)} or None, not {mode!r}")
    block = next_power_of_2(width)
    if mode == "multi_wave_reload":
        # Two passes; the second runs backwards, so that it begins with the chunk still in cache.
        return ForwardPlan(mode, rows=1, block=min(block, 8192), warps=device.warps(8))
    if block > WIDEST_ROW:
        raise ValueError(f"mode {mode!r} holds rows of up to {WIDEST_ROW} elements, not {width}; use multi_wave_reload")
    programs = 8 * device.processors if mode == "static_persistent" else 0
    if block <= 512:
        # A tile of 4096 elements: 16 bytes a lane and reductions inside a warp.
        return ForwardPlan(mode, 4096 // max(block, 64), block, device.warps(8), programs)
    if block == 1024:
        return ForwardPlan(mode, 2, block, device.warps(4), programs)
    if block <= 4096:
        return ForwardPlan(mode, 1, block, device.warps(4), programs)
    return ForwardPlan(mode, 1, block, device.warps(8 if width <= 6144 else 16), programs // 2)


@lru_cache(maxsize=1024)
def backward_plan(
    width: int, column_bytes: int = 8, device: Device = Device(), *, summed: bool = False
) -> BackwardPlan:
    """The backward's launch for rows of ``width`` elements.

    ``column_bytes``: what the loop reads for one element of a row, over all tensors it reads. Every stage beyond the
    first holds a tile of each in shared memory; where they do not fit, fewer are in flight. ``summed``: the gradient of
    a residual sum is read and added as well.
    """
    plan = _backward_plan(width, device, summed)
    tile_bytes = plan.rows * plan.block * column_bytes
    fitting = 1 + (device.shared_memory - _REDUCTION_BYTES) // tile_bytes
    return replace(plan, stages=min(plan.stages, fitting))


def _backward_plan(width: int, device: Device, summed: bool) -> BackwardPlan:
    """The table of ``backward_plan``, shared memory aside."""
    block = next_power_of_2(width)
    sms = device.processors
    if block > WIDEST_ROW:
        # x and dy are read twice and dw stays in registers: a row in registers would spill.
        return BackwardPlan(4, 2048, device.warps(8), stages=2, programs=4 * sms, chunked=True)
    if block <= 512:
        # The forward's tile: 16 elements a lane leave room for dw's accumulator of the same shape.
        return BackwardPlan(4096 // max(block, 64), block, device.warps(8), stages=3, programs=2 * sms)
    if block == 1024:
        return BackwardPlan(2, block, device.warps(4), stages=3, programs=4 * sms)
    if block == 2048:
        return BackwardPlan(1, block, device.warps(4), stages=3, programs=4 * sms)
    if block == 4096:
        return BackwardPlan(1, block, device.warps(8), stages=3, programs=2 * sms)
    if block == 8192:
        # At full width one program a processor; narrower rows leave the registers for two.
        programs, warps = (sms, 16) if width > 6144 else (2 * sms, 8)
        return BackwardPlan(1, block, device.warps(warps), stages=3, programs=programs, reload=True)
    return BackwardPlan(1, block, device.warps(32), stages=1, programs=sms, reload=True)


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is at least ``value`` (1 for 0)."""
    return 1 << max(value - 1, 0).bit_length()
