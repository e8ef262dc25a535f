"""The gradient of a weight: each program of a backward writes a partial sum, and a later launch reduces them.

The sum has a fixed order, so the same inputs give the same bits; a partial is fp32, and the sum is rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plans import Device, next_power_of_2
from .call import Call
from .language import await_previous, round_to

_COLUMNS = 16
"""Columns that one program sums, over all partials at once."""


@triton.jit(do_not_specialize=["split", "end"])
def _reduce_kernel(
    partials_ptr,  # [end, N] fp32
    first_ptr,  # [N] or None: the sum of the partials before ``split``
    second_ptr,  # [N] or None: the sum of the others
    split, end,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    await_previous(OVERLAPS)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        if first_ptr is not None:
            _sum_part(partials_ptr, first_ptr, 0, split, col, N, ROWS)
    else:
        if second_ptr is not None:
            _sum_part(partials_ptr, second_ptr, split, end, col, N, ROWS)


@triton.jit
def _sum_part(partials_ptr, dw_ptr, start, end, col, N: tl.constexpr, ROWS: tl.constexpr):
    """Sum the partials from ``start`` to ``end`` in one tile."""
    partial = start + tl.arange(0, ROWS)
    live = (partial < end)[:, None] & (col < N)[None, :]
    partials = tl.load(partials_ptr + partial.to(tl.int64)[:, None] * N + col[None, :], mask=live, other=0.0)
    tl.store(dw_ptr + col, round_to(tl.sum(partials, axis=0), dw_ptr.dtype.element_ty), mask=col < N)


def empty_partials(call: Call, programs: int, *weight_grads: Tensor | None) -> Tensor | None:
    """The partials of that many programs for each gradient that is not None, not yet written; None if there is none."""
    grads = [dw for dw in weight_grads if dw is not None]
    return call.empty(grads[0], (len(grads) * programs, len(grads[0])), dtype=torch.float32) if grads else None


def reduce_partials(
    call: Call, partials: Tensor, first: Tensor | None, second: Tensor | None, split: int, most: int, device: Device
) -> None:
    """Write the sum of ``partials`` [P, N] to ``first`` [N], up to row ``split``, and that of the rest to ``second``.

    ``most``: what P is at most; it decides the order of the sum. ``device``: the properties of their device.
    """
    end, width = partials.shape
    rows = next_power_of_2(most)
    grid = -(-width // _COLUMNS), 1 if second is None else 2
    constants = {"N": width, "ROWS": rows, "BLOCK": _COLUMNS, "OVERLAPS": device.overlaps}
    warps, tensors = device.warps(max(1, min(16, rows // 64))), (partials, first, second)
    call.launch(_reduce_kernel, grid, tensors, (split, end), constants, warps=warps, overlaps=device.overlaps)
