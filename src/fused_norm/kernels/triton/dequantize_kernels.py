"""Weights of 4 bits, as bitsandbytes packs them, turned into numbers again: the kernel and its launcher.

A byte holds two codes, that of the first weight in its high half. A code is an index into 16 values (nf4 or fp4), and
``BLOCK`` weights side by side share a scale, the largest magnitude among them. With double quantisation a scale is an
index into 256 values, which 256 scales multiply by a number of their own, and to which one offset is added.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .call import Call
from .language import round_to
from .memory import is_long

SCALES_TOGETHER = 256
"""Scales that share a number in double quantisation; bitsandbytes knows no other count."""

_TILE = 2048
"""Weights that a program writes, if a block has no more of them."""


@triton.jit(do_not_specialize=["n"])
def _dequantize_kernel(
    code_ptr,  # [16] fp32
    packed_ptr,  # [ceil(n / 2)] uint8
    scale_ptr,  # [blocks] fp32; with double quantisation uint8
    scale_code_ptr,  # [256] fp32, or None without double quantisation
    outer_scale_ptr,  # [ceil(blocks / 256)] fp32, or None
    offset_ptr,  # one fp32, or None
    w_ptr,  # [n]
    n,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, TOGETHER: tl.constexpr, LONG: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """``w = code[packed] * scale``, each scale in fp32, the product rounded to w's dtype.

    WHOLE: the last block is complete. Its mask is then the same for a whole block, so that loads and stores are wide.
    """
    HALF: tl.constexpr = BLOCK // 2
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    if LONG:
        block = block.to(tl.int64)
    live = block * BLOCK < n
    scale = tl.load(scale_ptr + block, mask=live, other=0)
    if scale_code_ptr is not None:
        outer = tl.load(outer_scale_ptr + block // TOGETHER, mask=live, other=0.0)
        scale = tl.load(scale_code_ptr + scale.to(tl.int32)) * outer + tl.load(offset_ptr)
    at = block[:, None] * HALF + tl.arange(0, HALF)[None, :]
    place = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    packed_live, place_live = (live[:, None], live[:, None]) if WHOLE else (at * 2 < n, place < n)
    packed = tl.load(packed_ptr + at, mask=packed_live, other=0).to(tl.int32)
    first = tl.load(code_ptr + (packed >> 4)) * scale[:, None]
    second = tl.load(code_ptr + (packed & 15)) * scale[:, None]
    tl.store(w_ptr + place, round_to(tl.interleave(first, second), w_ptr.dtype.element_ty), mask=place_live)


class PackedWeight(NamedTuple):
    """The tensors of a weight [N, K] of 4 bits, all contiguous; the last three with double quantisation alone."""

    code: Tensor  # [16] fp32
    packed: Tensor  # [ceil(N K / 2)] uint8, of any shape
    scale: Tensor  # [blocks], fp32 or uint8
    scale_code: Tensor | None = None  # [256] fp32
    outer_scale: Tensor | None = None  # [ceil(blocks / 256)] fp32
    offset: Tensor | None = None  # [] fp32


def launch_dequantize(call: Call, weight: PackedWeight, block: int, w: Tensor) -> None:
    """Write the weight, contiguous, in w's dtype; ``block``: the weights that share a scale, a power of 2."""
    n = w.numel()
    tile = {"BLOCK": block, "BLOCKS": max(1, _TILE // block), "TOGETHER": SCALES_TOGETHER, "LONG": is_long([w])}
    tile["WHOLE"] = n % block == 0
    grid = -(-n // (block * tile["BLOCKS"])), 1
    call.launch(
        _dequantize_kernel, grid, (*weight, w), (n,), tile, warps=2, fuse=False
    )  # scales are rounded, then added
