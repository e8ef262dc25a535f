"""Numbers times a mask and a scale in Triton, in one dtype after another."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .language import round_to
from .launch import launch
from .memory import is_long

_TILE = 1024
"""Elements of a program: 16 bytes a load of 16-bit numbers."""


@triton.jit(do_not_specialize=["n"])
def _masked_scale_kernel(
    x_ptr,  # [n * GRAIN]
    mask_ptr,  # [n * GRAIN] bool
    y_ptr,  # [n * GRAIN]
    n,
    scale,
    BLOCK: tl.constexpr, LONG: tl.constexpr, GRAIN: tl.constexpr,
):  # fmt: skip
    """n counts pieces of GRAIN elements, so that loads and stores of a mask's edge are wide."""
    block = tl.program_id(0)
    if LONG:
        block, n = block.to(tl.int64), n.to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    live = at < n * GRAIN
    x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    kept = tl.load(mask_ptr + at, mask=live, other=0).to(tl.float32)
    tl.store(y_ptr + at, round_to(x * kept * scale, y_ptr.dtype.element_ty), mask=live)


def launch_masked_scale(x: Tensor, mask: Tensor, scale: float, y: Tensor) -> None:
    """Write ``y = x * mask * scale``, computed in fp32; all three are contiguous, the mask is bool."""
    n = y.numel()
    if n == 0:
        return
    grain = 1 if n % 16 else 16
    constants = {"BLOCK": _TILE, "LONG": is_long([x, y]), "GRAIN": grain}
    launch(_masked_scale_kernel, (-(-n // _TILE), 1), (x, mask, y), (n // grain, scale), constants, warps=4)
