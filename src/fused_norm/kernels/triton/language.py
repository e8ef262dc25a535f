"""Functions that all kernels share: rounding, the norm's formula, tiles of rows, and launches that overlap.

The alphabet of all kernels: M rows of N columns; ``row`` and ``col`` index them, ``live`` masks what is inside, a tile
is ROWS rows of BLOCK columns. ``x`` is the branch, ``scale`` what it is multiplied by (None is one), ``r`` the
residual, ``s`` their sum (or x itself if there is no residual), ``w`` the weight, ``gamma`` what a row is multiplied
by, ``x_hat`` the normalised row, ``rstd`` = 1/sqrt(mean(s^2) + eps), ``y`` the norm. In a backward ``dy``, ``ds``,
``dx``, ``dr`` and ``dw`` are gradients, ``g`` the gradient of x_hat, and ``correction`` what is taken off g for each
element of s, because rstd depends on it too. SPEC is a ``NormSpec`` without its eps. A tensor in memory is a pair of
pointer and row stride. Arithmetic is fp32 throughout.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .devices import INTERPRETED

interpreted = tl.constexpr(INTERPRETED)

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""The names of dtypes inside of kernels."""


@triton.jit
def round_to(value, dtype: tl.constexpr):
    """fp32 values rounded to nearest even in ``dtype``, still as fp32.

    Triton's interpreter truncates fp32 to bf16; there the bits are rounded by hand, so a later store is exact (but for
    subnormal bf16, below 1.2e-38, which the interpreter's stores mangle).
    """
    if dtype == tl.float32:
        return value
    if interpreted and dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(value == value, bits.to(tl.float32, bitcast=True), value)
    return value.to(dtype).to(tl.float32)


@triton.jit
def as_mask(condition):
    """A condition as loads and stores take it: Triton's interpreter keeps one of a block and a number as integers."""
    if interpreted:
        return condition != 0
    return condition


@triton.jit
def _round_in_range(value, dtype: tl.constexpr):
    """Values rounded to ``dtype``; those that would overflow, as squares in fp16 do, are left as they are."""
    rounded = round_to(value, dtype)
    return tl.where(tl.abs(rounded) == float("inf"), value, rounded)


@triton.jit
def square(s, dtype: tl.constexpr, SPEC: tl.constexpr):
    """s^2, rounded only if the casting says so."""
    if SPEC.casting == "none":
        return _round_in_range(s * s, dtype)
    return s * s


@triton.jit
def rstd_from(sum_of_squares, eps, dtype: tl.constexpr, N: tl.constexpr, SPEC: tl.constexpr):
    """The factor the forward uses: rounded at each step if the casting says so."""
    mean = sum_of_squares * (1.0 / N)
    if SPEC.casting == "none":
        return round_to(tl.rsqrt(_round_in_range(_round_in_range(mean, dtype) + eps, dtype)), dtype)
    return tl.rsqrt(mean + eps)


@triton.jit
def rstd_of(s, rstd_ptr, row, M, eps, dtype: tl.constexpr, N: tl.constexpr, SPEC: tl.constexpr):
    """The forward's rstd for each row of ``s``, [ROWS, 1]; the exact one is stored for the backward."""
    rstd = rstd_from(tl.sum(square(s, dtype, SPEC), axis=1), eps, dtype, N, SPEC)
    if rstd_ptr is not None:
        exact = rstd
        if SPEC.casting == "none":
            exact = tl.rsqrt(tl.sum(s * s, axis=1) * (1.0 / N) + eps)
        tl.store(rstd_ptr + row, exact, mask=row < M)
    return rstd[:, None]


@triton.jit
def normalised(s, rstd, w_ptr, dtype: tl.constexpr, SPEC: tl.constexpr):
    """x_hat, which gemmas leave unrounded. ``dtype`` is that of s; of the weight only its dtype counts."""
    if SPEC.casting == "rounded_rstd":
        rstd = round_to(rstd, dtype)
    x_hat = s * rstd
    if SPEC.casting == "weight_dtype" and w_ptr is not None:
        x_hat = round_to(x_hat, w_ptr.dtype.element_ty)
    elif SPEC.casting != "gemma" and SPEC.casting != "rounded_gamma":
        x_hat = round_to(x_hat, dtype)
    return x_hat


@triton.jit
def load_gamma(w_ptr, col, in_row, SPEC: tl.constexpr):
    """gamma for columns ``col``, [1, columns] fp32, from the weight; only gemma adds the one without rounding it."""
    w = tl.load(w_ptr + col, mask=in_row, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if SPEC.zero_centered:
        w = w + 1.0
        if SPEC.casting != "gemma":
            w = round_to(w, w_ptr.dtype.element_ty)
    return w[None, :]


@triton.jit
def copy_weight(w_ptr, copy_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a weight of N elements, if a copy is wanted: the first program along the grid's first axis writes it."""
    if copy_ptr is not None:
        program = tl.program_id(0)
        if program == 0:
            for start in range(0, N, BLOCK):
                col = start + tl.arange(0, BLOCK)
                tl.store(copy_ptr + col, tl.load(w_ptr + col, mask=col < N, other=0.0), mask=col < N)


@triton.jit
def input_grad(g, s, rstd, N: tl.constexpr):
    """The gradient of a norm's input."""
    correction = tl.sum(g * s, axis=1)[:, None] * (rstd * rstd) * (1.0 / N)
    return rstd * (g - s * correction)


@triton.jit
def rows_of(tile, ROWS: tl.constexpr, INT64: tl.constexpr):
    """The row numbers of a tile; 64-bit if an offset computed from them could pass 2^31."""
    if INT64:
        tile = tile + tl.zeros([1], tl.int64)
    return tile * ROWS + tl.arange(0, ROWS)


@triton.jit
def columns_of(BLOCK: tl.constexpr, dtype: tl.constexpr):
    """The column numbers of a tile whose rows are summed in ``dtype``; a lane holds 16 bytes of it side by side.

    By default the compiler gives a lane 16 bytes of the narrowest tensor. A row would then be added up in another
    order if x or y is narrower than what is summed: in a norm with an add, or one that writes single bytes.
    """
    return tl.max_contiguous(tl.arange(0, BLOCK), 128 // dtype.primitive_bitwidth)


@triton.jit
def load_tile(memory, row, col, live):
    """Load the tile of rows ``row`` [ROWS] and columns ``col`` [columns] as fp32, zero where it is not live."""
    ptr, stride = memory
    return tl.load(ptr + row[:, None] * stride + col[None, :], mask=live, other=0.0).to(tl.float32)


@triton.jit
def store_tile(memory, row, col, live, value):
    """Round a tile to the dtype of what is in memory and write what is live of it."""
    ptr, stride = memory
    tl.store(ptr + row[:, None] * stride + col[None, :], round_to(value, ptr.dtype.element_ty), mask=live)


@triton.jit
def let_next_begin(OVERLAPS: tl.constexpr):
    """Let the next launch, if it may overlap with this one, begin once all programs have come here.

    Kernels call it after their loop: before it, the programs of the next launch would wait on the GPU all the time,
    which profilers would count as theirs.
    """
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def await_previous(OVERLAPS: tl.constexpr):
    """Wait until the launch that this one overlaps with has ended, and all that it wrote can be read."""
    if OVERLAPS:
        gdc_wait()
