"""The launches on the heads of q and k: a norm, RoPE or both, forward and backward. ``qk_norm_rope`` has the operators.

From top to bottom: Triton kernels, plan rules and launchers. One launch takes q and k: its programs are split between
the tiles of q and those of k.

To the alphabet of ``triton.language`` come ``x``, which is q or k, T tokens (of ``LENGTH`` in a sequence) times H
heads, rows of N columns, and ``n``, the normalised row. A tile is TOKENS by HEADS rows. If RoPE turns whole rows (R is
N), they are held as halves ``a`` and ``b``. If not, all of a row is ``a``; of its first R columns, if there are any,
each has its ``partner`` half of R away, which is loaded once more. ``d`` is the gradient of the output, ``dn`` that of
n. A tensor in memory is a tuple of its pointer and its strides by batch, token and head; cos and sin have no stride by
head. SHAPE has what all tiles of a launch share: N, R, BLOCK, GRAIN, LONG, LAYOUT and BY_PAIR. If SPEC is None there is
no norm, and n is x.

LAYOUT says which elements RoPE turns together: ``half``, each with the one half of R away, as above; ``interleaved``,
neighbours; ``deinterleaved``, neighbours of x, which lie half of R apart in the output. The last two have tiles of
their own, without a norm, in which ``a`` and ``b`` are the first and the second elements of pairs. BY_PAIR: the first
halves of cos and sin have the angle of each pair; without it every element of the output has its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..spec import NormSpec, RotaryLayout
from .plans import ANY_WIDTH, RULES, Device, Rule, next_power_of_2
from .triton.call import Call
from .triton.devices import device_props
from .triton.language import (
    TRITON_DTYPES,
    copy_weight,
    let_next_begin,
    load_gamma,
    normalised,
    round_to,
    rstd_from,
    square,
)
from .triton.memory import angles_layout, heads_dim_of, is_long, memory_order, norm_dtype, out_dtype, promoted
from .triton.weight_grad import reduce_partials


@triton.jit
def _place_of(tile, counts, TOKENS: tl.constexpr, HEADS: tl.constexpr, LONG: tl.constexpr):
    """A tile's batches, the positions in them, heads, and which of its tokens and rows there are.

    Those of tokens are [TOKENS, 1, 1], and heads [1, HEADS, 1]; a token's blocks of heads follow each other.
    """
    T, LENGTH, H = counts
    tokens = tile // tl.cdiv(H, HEADS)
    if LONG:
        tokens = tokens + tl.zeros([1, 1, 1], tl.int64)
    token = tokens * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    heads = tile % tl.cdiv(H, HEADS)
    if LONG:
        heads = heads + tl.zeros([1, 1, 1], tl.int64)
    head = heads * HEADS + tl.arange(0, HEADS)[None, :, None]
    batch = token // LENGTH
    position = token - batch * LENGTH
    return batch, position, head, token < T, (token < T) & (head < H)


@triton.jit
def _rows_of(memory, batch, position, head):
    """Pointers to where the rows of a tile begin, [TOKENS, HEADS, 1]."""
    return memory[0] + (batch * memory[1] + position * memory[2] + head * memory[3])


@triton.jit
def _angles_of(memory, batch, position, HEADS: tl.constexpr):
    """Pointers to the tokens' rows of cos or sin, for each head: read again from cache, they need no other layout."""
    rows = memory[0] + (batch * memory[1] + position * memory[2])
    return rows + tl.zeros([1, HEADS, 1], tl.int32)


@triton.jit
def _load(rows, start: tl.constexpr, col, end: tl.constexpr, live):
    """Columns ``start + col`` before ``end`` of the rows that begin at ``rows``, as fp32."""
    return tl.load(rows + start + col[None, None, :], mask=live & (col < end - start)[None, None, :], other=0.0).to(
        tl.float32
    )


@triton.jit
def _store(rows, start: tl.constexpr, col, end: tl.constexpr, live, value):
    rounded = round_to(value, rows.dtype.element_ty)
    tl.store(rows + start + col[None, None, :], rounded, mask=live & (col < end - start)[None, None, :])


@triton.jit
def _gamma_at(w_ptr, start: tl.constexpr, col, end: tl.constexpr, SPEC: tl.constexpr):
    return load_gamma(w_ptr + start, col, col < end - start, SPEC)[:, None, :]


@triton.jit
def _partner_of(col, HALF: tl.constexpr, GRAIN: tl.constexpr):
    """The column that RoPE mixes with ``col``; runs of GRAIN, which divides HALF, stay together."""
    partner = tl.where(col < HALF, col + HALF, col - HALF)
    return tl.max_contiguous(tl.multiple_of(partner, GRAIN), GRAIN)


@triton.jit
def _normed(
    x, rstd, w_ptr, start: tl.constexpr, col, end: tl.constexpr, x_dtype: tl.constexpr, NORMED: tl.constexpr,
    SPEC: tl.constexpr,
):  # fmt: skip
    """n, rounded to its dtype, of columns that are loaded."""
    n = x
    if SPEC is not None:
        n = normalised(x, rstd, w_ptr, x_dtype, SPEC)
        if w_ptr is not None:
            n = n * _gamma_at(w_ptr, start, col, end, SPEC)
        n = round_to(n, NORMED)
    return n


@triton.jit
def _forward_tile(
    x, w_ptr, cos, sin, y, counts, tile, eps, TOKENS: tl.constexpr, HEADS: tl.constexpr, SHAPE: tl.constexpr,
    NORMED: tl.constexpr, STEP: tl.constexpr, SPEC: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the forward. Of a rotation, products are rounded to STEP, and INVERSE turns the other way, as
    the backward of one without a norm does."""
    N: tl.constexpr = SHAPE.N
    R: tl.constexpr = SHAPE.R
    batch, position, head, present, live = _place_of(tile, counts, TOKENS, HEADS, SHAPE.LONG)
    col = tl.arange(0, SHAPE.BLOCK)
    HALVES: tl.constexpr = R == N
    HALF: tl.constexpr = R // 2
    WIDTH: tl.constexpr = HALF if HALVES else N
    x_dtype: tl.constexpr = x[0].dtype.element_ty
    x_rows = _rows_of(x, batch, position, head)
    y_rows = _rows_of(y, batch, position, head)

    a = _load(x_rows, 0, col, WIDTH, live)
    if SPEC is not None:
        squares = square(a, x_dtype, SPEC)
    if R:
        # Loaded together with x: loaded behind the sum of its squares, they would be waited for once more.
        cos_rows = _angles_of(cos, batch, position, HEADS)
        sin_rows = _angles_of(sin, batch, position, HEADS)
        if HALVES:
            b = _load(x_rows, HALF, col, R, live)
            if SPEC is not None:
                squares += square(b, x_dtype, SPEC)
            cos_a, cos_b = _load(cos_rows, 0, col, HALF, present), _load(cos_rows, HALF, col, R, present)
            sin_a, sin_b = _load(sin_rows, 0, col, HALF, present), _load(sin_rows, HALF, col, R, present)
        else:
            partner = _partner_of(col, HALF, SHAPE.GRAIN)
            b = _load(x_rows, 0, partner, R, live & (col < R)[None, None, :])
            cos_a = _load(cos_rows, 0, col, R, present)
            if INVERSE:
                sin_a = _load(sin_rows, 0, partner, R, present & (col < R)[None, None, :])
            else:
                sin_a = _load(sin_rows, 0, col, R, present)
    rstd = 1.0
    if SPEC is not None:
        rstd = rstd_from(tl.sum(squares, axis=2), eps, x_dtype, N, SPEC)[:, :, None]

    a = _normed(a, rstd, w_ptr, 0, col, WIDTH, x_dtype, NORMED, SPEC)
    if not R:
        _store(y_rows, 0, col, N, live, a)
    elif HALVES:
        b = _normed(b, rstd, w_ptr, HALF, col, R, x_dtype, NORMED, SPEC)
        if INVERSE:
            sin_a, sin_b = -sin_b, -sin_a
        _store(y_rows, 0, col, HALF, live, round_to(a * cos_a, STEP) - round_to(b * sin_a, STEP))
        _store(y_rows, HALF, col, R, live, round_to(b * cos_b, STEP) + round_to(a * sin_b, STEP))
    else:
        b = _normed(b, rstd, w_ptr, 0, partner, R, x_dtype, NORMED, SPEC)
        across = round_to(b * sin_a, STEP)
        if INVERSE:
            across = -across
        turned = round_to(a * cos_a, STEP) + tl.where((col < HALF)[None, None, :], -across, across)
        _store(y_rows, 0, col, N, live, tl.where((col < R)[None, None, :], turned, a))


@triton.jit
def _pairs_of_a_lane(BLOCK: tl.constexpr, PAIRS: tl.constexpr):
    """The numbers of pairs; a lane holds PAIRS of them side by side, as many as it gets of what is loaded as one run.

    Left to itself the compiler gives a lane 16 bytes of each tensor, and moves the elements between lanes afterwards.
    """
    return tl.max_contiguous(tl.arange(0, BLOCK), PAIRS)


@triton.jit
def _load_pairs(rows, width: tl.constexpr, live, SIDE_BY_SIDE: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr):
    """The first and the second elements of the pairs in the first ``width`` elements of rows, as fp32.

    Those that lie side by side are loaded as one run, and then parted in registers.
    """
    if SIDE_BY_SIDE:
        run = _load(rows, 0, tl.arange(0, 2 * BLOCK), width, live)
        a, b = tl.split(tl.reshape(run, [run.shape[0], run.shape[1], BLOCK, 2]))
    else:
        pair = _pairs_of_a_lane(BLOCK, PAIRS)
        a = _load(rows, 0, pair, width // 2, live)
        b = _load(rows, width // 2, pair, width, live)
    return a, b


@triton.jit
def _store_pairs(
    rows, width: tl.constexpr, live, a, b, SIDE_BY_SIDE: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr
):
    if SIDE_BY_SIDE:
        run = tl.reshape(tl.join(a, b), [a.shape[0], a.shape[1], 2 * BLOCK])
        _store(rows, 0, tl.arange(0, 2 * BLOCK), width, live, run)
    else:
        pair = _pairs_of_a_lane(BLOCK, PAIRS)
        _store(rows, 0, pair, width // 2, live, a)
        _store(rows, width // 2, pair, width, live, b)


@triton.jit
def _rotate_neighbours(
    x, cos, sin, y, counts, tile, TOKENS: tl.constexpr, HEADS: tl.constexpr, SHAPE: tl.constexpr, STEP: tl.constexpr,
    INVERSE: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the forward of a rotation whose pairs are neighbours; STEP and INVERSE as in a norm's."""
    N: tl.constexpr = SHAPE.N
    R: tl.constexpr = SHAPE.R
    BLOCK: tl.constexpr = SHAPE.BLOCK
    DEINTERLEAVED: tl.constexpr = SHAPE.LAYOUT == "deinterleaved"
    PAIRS: tl.constexpr = 64 // (y[0] if DEINTERLEAVED and INVERSE else x[0]).dtype.element_ty.primitive_bitwidth
    batch, position, head, present, live = _place_of(tile, counts, TOKENS, HEADS, SHAPE.LONG)
    a, b = _load_pairs(_rows_of(x, batch, position, head), N, live, not (DEINTERLEAVED and INVERSE), BLOCK, PAIRS)
    cos_rows, sin_rows = _angles_of(cos, batch, position, HEADS), _angles_of(sin, batch, position, HEADS)
    cos_a, cos_b = _load_pairs(cos_rows, R, present, not (DEINTERLEAVED or SHAPE.BY_PAIR), BLOCK, PAIRS)
    sin_a, sin_b = _load_pairs(sin_rows, R, present, not (DEINTERLEAVED or SHAPE.BY_PAIR), BLOCK, PAIRS)
    if SHAPE.BY_PAIR:
        cos_b, sin_b = cos_a, sin_a
    if INVERSE:
        sin_a, sin_b = -sin_b, -sin_a
    turned_a = round_to(a * cos_a, STEP) - round_to(b * sin_a, STEP)
    turned_b = round_to(b * cos_b, STEP) + round_to(a * sin_b, STEP)
    if R < N:
        in_turn = (tl.arange(0, BLOCK) < R // 2)[None, None, :]
        turned_a, turned_b = tl.where(in_turn, turned_a, a), tl.where(in_turn, turned_b, b)
    y_rows = _rows_of(y, batch, position, head)
    _store_pairs(y_rows, N, live, turned_a, turned_b, INVERSE or not DEINTERLEAVED, BLOCK, PAIRS)


@triton.jit(do_not_specialize=["q_T", "q_LENGTH", "q_H", "k_T", "k_LENGTH", "k_H", "q_programs"])
def qk_forward_kernel(
    q_ptr,  # [q_T, q_H, N]
    k_ptr,  # [k_T, k_H, N] or None
    q_w_ptr,  # [N] or None
    k_w_ptr,  # [N] or None
    cos_ptr,  # [T, R] or None
    sin_ptr,  # [T, R] or None
    q_y_ptr,  # [q_T, q_H, N]
    k_y_ptr,  # [k_T, k_H, N] or None
    q_w_copy_ptr,  # [N] or None: a copy of q's weight
    k_w_copy_ptr,  # [N] or None: a copy of k's weight
    q_T, q_LENGTH, q_H,
    k_T, k_LENGTH, k_H,
    q_programs,
    q_batch, q_token, q_head,
    q_y_batch, q_y_token, q_y_head,
    k_batch, k_token, k_head,
    k_y_batch, k_y_token, k_y_head,
    cos_batch, cos_token,
    sin_batch, sin_token,
    eps,
    Q_TOKENS: tl.constexpr, Q_HEADS: tl.constexpr,
    K_TOKENS: tl.constexpr, K_HEADS: tl.constexpr,
    SHAPE: tl.constexpr,
    SPEC: tl.constexpr,
    Q_NORMED: tl.constexpr,
    K_NORMED: tl.constexpr,
    Q_STEP: tl.constexpr,
    K_STEP: tl.constexpr,
    INVERSE: tl.constexpr,
):  # fmt: skip
    cos, sin = (cos_ptr, cos_batch, cos_token), (sin_ptr, sin_batch, sin_token)
    program = tl.program_id(0)
    if program < q_programs:
        q, q_y = (q_ptr, q_batch, q_token, q_head), (q_y_ptr, q_y_batch, q_y_token, q_y_head)
        q_counts = (q_T, q_LENGTH, q_H)
        if SHAPE.LAYOUT == "half":
            _forward_tile(
                q, q_w_ptr, cos, sin, q_y, q_counts, program, eps, Q_TOKENS, Q_HEADS, SHAPE, Q_NORMED, Q_STEP, SPEC,
                INVERSE,
            )  # fmt: skip
        else:
            _rotate_neighbours(q, cos, sin, q_y, q_counts, program, Q_TOKENS, Q_HEADS, SHAPE, Q_STEP, INVERSE)
    else:
        if k_ptr is not None:
            k, k_y = (k_ptr, k_batch, k_token, k_head), (k_y_ptr, k_y_batch, k_y_token, k_y_head)
            k_counts, tile = (k_T, k_LENGTH, k_H), program - q_programs
            if SHAPE.LAYOUT == "half":
                _forward_tile(
                    k, k_w_ptr, cos, sin, k_y, k_counts, tile, eps, K_TOKENS, K_HEADS, SHAPE, K_NORMED, K_STEP, SPEC,
                    INVERSE,
                )  # fmt: skip
            else:
                _rotate_neighbours(k, cos, sin, k_y, k_counts, tile, K_TOKENS, K_HEADS, SHAPE, K_STEP, INVERSE)
    copy_weight(q_w_ptr, q_w_copy_ptr, SHAPE.N, SHAPE.BLOCK)
    copy_weight(k_w_ptr, k_w_copy_ptr, SHAPE.N, SHAPE.BLOCK)


@triton.jit
def _store_share(share_ptr, start: tl.constexpr, col, end: tl.constexpr, dw):
    tl.store(share_ptr + start + col, tl.sum(tl.sum(dw, axis=0), axis=0), mask=col < end - start)


@triton.jit
def _backward_tiles(
    x, d, w_ptr, cos, sin, dx, share_ptr, counts, program, programs, eps, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    STAGES: tl.constexpr, SHAPE: tl.constexpr, SPEC: tl.constexpr, HAS_DW: tl.constexpr,
):  # fmt: skip
    """Every ``programs``-th tile; the share of dw, if dw is needed, goes to the N floats at ``share_ptr``."""
    T, _, H = counts
    N: tl.constexpr = SHAPE.N
    R: tl.constexpr = SHAPE.R
    BLOCK: tl.constexpr = SHAPE.BLOCK
    HALVES: tl.constexpr = R == N
    HALF: tl.constexpr = R // 2
    WIDTH: tl.constexpr = HALF if HALVES else N
    col = tl.arange(0, BLOCK)
    gamma_a = tl.full([1, 1, BLOCK], 1.0, tl.float32)
    dw_a = tl.zeros([TOKENS, HEADS, BLOCK], tl.float32)
    if w_ptr is not None:
        gamma_a = _gamma_at(w_ptr, 0, col, WIDTH, SPEC)
    if HALVES:
        gamma_b = tl.full([1, 1, BLOCK], 1.0, tl.float32)
        dw_b = tl.zeros([TOKENS, HEADS, BLOCK], tl.float32)
        if w_ptr is not None:
            gamma_b = _gamma_at(w_ptr, HALF, col, R, SPEC)

    for tile in tl.range(program, tl.cdiv(T, TOKENS) * tl.cdiv(H, HEADS), programs, num_stages=STAGES):
        batch, position, head, present, live = _place_of(tile, counts, TOKENS, HEADS, SHAPE.LONG)
        x_rows = _rows_of(x, batch, position, head)
        d_rows = _rows_of(d, batch, position, head)

        a = _load(x_rows, 0, col, WIDTH, live)
        dn_a = _load(d_rows, 0, col, WIDTH, live)
        if R:
            cos_rows = _angles_of(cos, batch, position, HEADS)
            sin_rows = _angles_of(sin, batch, position, HEADS)
        if HALVES:
            b = _load(x_rows, HALF, col, R, live)
            d_a, d_b = dn_a, _load(d_rows, HALF, col, R, live)
            dn_a = d_a * _load(cos_rows, 0, col, HALF, present) + d_b * _load(sin_rows, HALF, col, R, present)
            dn_b = d_b * _load(cos_rows, HALF, col, R, present) - d_a * _load(sin_rows, 0, col, HALF, present)
            g_a, g_b = dn_a * gamma_a, dn_b * gamma_b
            squares = tl.sum(a * a + b * b, axis=2)
            products = tl.sum(g_a * a + g_b * b, axis=2)
        else:
            if R:
                partner, in_turn = _partner_of(col, HALF, SHAPE.GRAIN), (col < R)[None, None, :]
                across = _load(d_rows, 0, partner, R, live & in_turn)
                across *= _load(sin_rows, 0, partner, R, present & in_turn)
                turned = dn_a * _load(cos_rows, 0, col, R, present)
                dn_a = tl.where(in_turn, turned + tl.where((col < HALF)[None, None, :], across, -across), dn_a)
            g_a = dn_a * gamma_a
            squares = tl.sum(a * a, axis=2)
            products = tl.sum(g_a * a, axis=2)
        rstd = tl.where(live, tl.rsqrt(squares * (1.0 / N) + eps)[:, :, None], 0.0)  # without eps a dead row's is inf
        correction = products[:, :, None] * (rstd * rstd) * (1.0 / N)
        if HAS_DW:
            dw_a += dn_a * (a * rstd)
            if HALVES:
                dw_b += dn_b * (b * rstd)
        if dx[0] is not None:
            dx_rows = _rows_of(dx, batch, position, head)
            _store(dx_rows, 0, col, WIDTH, live, rstd * (g_a - a * correction))
            if HALVES:
                _store(dx_rows, HALF, col, R, live, rstd * (g_b - b * correction))

    if HAS_DW:
        _store_share(share_ptr, 0, col, WIDTH, dw_a)
        if HALVES:
            _store_share(share_ptr, HALF, col, R, dw_b)


@triton.jit(do_not_specialize=["q_T", "q_LENGTH", "q_H", "k_T", "k_LENGTH", "k_H", "q_programs"])
def qk_backward_kernel(
    q_ptr,  # [q_T, q_H, N]
    k_ptr,  # [k_T, k_H, N]
    q_w_ptr,  # [N] or None
    k_w_ptr,  # [N] or None
    cos_ptr,  # [T, R] or None
    sin_ptr,  # [T, R] or None
    q_d_ptr,  # [q_T, q_H, N], or None: no gradient for q
    k_d_ptr,  # [k_T, k_H, N], or None: no gradient for k
    q_dx_ptr,  # [q_T, q_H, N] or None
    k_dx_ptr,  # [k_T, k_H, N] or None
    shares_ptr,  # [programs, N] fp32 or None: each program's share of dw, first those of q
    q_T, q_LENGTH, q_H,
    k_T, k_LENGTH, k_H,
    q_programs,
    q_batch, q_token, q_head,
    q_d_batch, q_d_token, q_d_head,
    q_dx_batch, q_dx_token, q_dx_head,
    k_batch, k_token, k_head,
    k_d_batch, k_d_token, k_d_head,
    k_dx_batch, k_dx_token, k_dx_head,
    cos_batch, cos_token,
    sin_batch, sin_token,
    eps,
    Q_TOKENS: tl.constexpr, Q_HEADS: tl.constexpr,
    K_TOKENS: tl.constexpr, K_HEADS: tl.constexpr,
    SHAPE: tl.constexpr,
    SPEC: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
    Q_HAS_DW: tl.constexpr,
    K_HAS_DW: tl.constexpr,
):  # fmt: skip
    cos, sin = (cos_ptr, cos_batch, cos_token), (sin_ptr, sin_batch, sin_token)
    program, programs = tl.program_id(0), tl.num_programs(0)
    share_ptr = shares_ptr
    if shares_ptr is not None:
        share_ptr = shares_ptr + program.to(tl.int64) * SHAPE.N
    if program < q_programs:
        if q_d_ptr is not None:
            q, q_counts = (q_ptr, q_batch, q_token, q_head), (q_T, q_LENGTH, q_H)
            q_d, q_dx = (q_d_ptr, q_d_batch, q_d_token, q_d_head), (q_dx_ptr, q_dx_batch, q_dx_token, q_dx_head)
            _backward_tiles(
                q, q_d, q_w_ptr, cos, sin, q_dx, share_ptr, q_counts, program, q_programs, eps,
                Q_TOKENS, Q_HEADS, STAGES, SHAPE, SPEC, Q_HAS_DW,
            )  # fmt: skip
    else:
        if k_d_ptr is not None:
            k, k_counts = (k_ptr, k_batch, k_token, k_head), (k_T, k_LENGTH, k_H)
            k_d, k_dx = (k_d_ptr, k_d_batch, k_d_token, k_d_head), (k_dx_ptr, k_dx_batch, k_dx_token, k_dx_head)
            _backward_tiles(
                k, k_d, k_w_ptr, cos, sin, k_dx, share_ptr, k_counts, program - q_programs, programs - q_programs, eps,
                K_TOKENS, K_HEADS, STAGES, SHAPE, SPEC, K_HAS_DW,
            )  # fmt: skip
    let_next_begin(OVERLAPS)


RULES["heads_forward"] = (
    Rule(1024, 1024, 2, why="16 elements a lane; 4 warps are up to 2 % slower"),
    Rule(4096, 1024, 4),
    Rule(ANY_WIDTH, 1024, 16),
)
RULES["rotated_heads_forward"] = (
    Rule(128, 1024, 2, why="eight rows share a token's cos and sin in cache: .92 of a copy's bandwidth"),
    Rule(1024, 2048, 2, why=".89 at 256 wide; tiles of 4096 in 8 warps reached .86 at 128 and .84 at 256"),
    Rule(4096, 2048, 4),
    Rule(ANY_WIDTH, 2048, 16),
)
RULES["qk_backward"] = (
    Rule(4096, 4096, 4, 2, why=".95 of a copy's bandwidth at 128 wide, with a third program a processor .84"),
    Rule(ANY_WIDTH, 4096, 16, 2),
)
RULES["qk_rope_backward"] = (
    Rule(4096, 2048, 4, 3, why="smaller, for cos and sin: three programs fit, .93 at 128 wide, .86 at 256"),
    Rule(ANY_WIDTH, 2048, 16, 3),
)


@dataclass(frozen=True)
class HeadsTile:
    """Some heads of some tokens; both numbers are powers of two."""

    tokens: int
    heads: int  # of each token


@dataclass(frozen=True)
class HeadsPlan:
    """One launch over the heads of q and k: a forward has a program for each tile, a backward is one wave."""

    q: HeadsTile
    k: HeadsTile
    block: int  # columns of a tile that are loaded at once: a row, or half of one if RoPE turns all of it
    warps: int  # of a program
    stages: int = 1  # tiles in flight in the backward, including the current one
    programs: int = 0  # of the backward, at most, for q and k together; without a dw there is one for each tile


@lru_cache(maxsize=1024)
def heads_forward_plan(q_heads: int, k_heads: int, width: int, rotary: int, device: Device) -> HeadsPlan:
    """The forward's launch over heads of ``width`` elements, ``rotary`` of which RoPE turns (0: there is no RoPE).

    ``q_heads`` and ``k_heads`` are the rows of a token that follow each other at one stride: 1 if all rows of a
    tensor do. RoPE alone has the plan of a norm with RoPE.
    """
    rule = device.rule("rotated_heads_forward" if rotary else "heads_forward", width)
    return _heads_by(rule, (q_heads, k_heads), width, rotary, device)


@lru_cache(maxsize=1024)
def heads_backward_plan(
    q_heads: int,
    k_heads: int,
    width: int,
    rotary: int,
    column_bytes: int,
    angle_bytes: int,
    device: Device,
) -> HeadsPlan:
    """The backward's launch, for what ``heads_forward_plan`` takes.

    ``column_bytes``: what the loop reads for one element of a row, ``angle_bytes`` of cos and sin for one of a token;
    stages are cut as in ``backward_plan``.
    """
    rule = device.rule("qk_rope_backward" if rotary else "qk_backward", width)
    plan = _heads_by(rule, (q_heads, k_heads), width, rotary, device)
    rows = max(tile.tokens * tile.heads for tile in (plan.q, plan.k))
    stages = device.stages(rule.stages, rows * next_power_of_2(width) * (column_bytes + angle_bytes))
    return replace(plan, stages=stages, programs=rule.programs * device.processors)


def _heads_by(rule: Rule, heads: tuple[int, int], width: int, rotary: int, device: Device) -> HeadsPlan:
    """A plan whose tiles leave few of their rows unused; each block of heads reads cos and sin again."""
    padded = next_power_of_2(width)
    rows = 1 << max(1, (rule.elements // padded).bit_length()) - 1
    tiles = []
    for count in heads:
        blocks = [rows >> halvings for halvings in range(rows.bit_length()) if rows >> halvings < 2 * count]
        costs = [-(-count // block) * block / count * (1 + 0.5 / block if rotary else 1) for block in blocks]
        best = blocks[costs.index(min(costs))]
        tiles.append(HeadsTile(rows // best, best))
    q, k = tiles
    return HeadsPlan(q, k, max(1, padded // 2) if rotary == width else padded, device.warps(rule.warps))


QkTensors = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""q, k, q's weight, k's weight, cos and sin. Without RoPE cos and sin are None; of the weights both or neither are
None; k is None only if one tensor is rotated without a norm."""

Sides = tuple[Tensor | None, Tensor | None]
"""A tensor of q's side and one of k's."""


@dataclass(frozen=True)
class _TileShape:
    """Compile-time constants that all tiles share."""

    N: int  # elements of a row
    R: int  # elements of it that RoPE turns
    BLOCK: int  # columns that are loaded at once
    GRAIN: int  # elements that stay together when RoPE swaps halves
    LONG: bool  # offsets need 64 bits
    LAYOUT: RotaryLayout
    BY_PAIR: bool  # the first halves of cos and sin have the angles of pairs


class _Layout(NamedTuple):
    """The rows of some tensors of one shape, as heads of tokens of batches."""

    tokens: int  # in all batches
    length: int  # tokens of a batch
    heads: int  # of a token
    strides: tuple[int, ...]  # of batch, token and head, for each tensor
    long: bool  # an offset could pass 2^31


def empty_heads(
    call: Call,
    x: Tensor,
    dtype: torch.dtype,
    cos: Tensor | None,
    narrow_dtype: torch.dtype | None,
    *,
    single_rounding: bool = False,
    layout: RotaryLayout = "half",
) -> Tensor:
    """The forward's output for q or k, not yet written, with the memory order that stock code gives it.

    It has stock code's dtype, or ``narrow_dtype`` if ``out_dtype`` says so. ``dtype``: that of the normalised
    x, or of x itself without a norm.
    """
    if cos is None:
        return call.empty_rows_like(x, out_dtype(dtype, narrow_dtype))
    dtype = out_dtype(dtype if single_rounding else promoted(dtype, cos.dtype), narrow_dtype)
    # Stock code concatenates what is rotated and what is not, or two halves, and the result of that is contiguous.
    concatenates = cos.shape[-1] != x.shape[-1] or layout == "deinterleaved"
    return call.empty(x, x.shape, dtype=dtype) if concatenates else call.empty_rows_like(x, dtype)


def launch_qk_forward(
    call: Call,
    spec: NormSpec | None,
    inputs: QkTensors,
    outputs: Sides,
    unsqueeze_dim: int,
    layout: RotaryLayout = "half",
    angles_by_pair: bool = False,
    *,
    single_rounding: bool = False,
    inverse: bool = False,
    copies: Sides = (None, None),
) -> None:
    """Write q and k normalised and, with cos and sin, rotated to ``outputs``, and their weights to ``copies``.

    Without a ``spec`` they are rotated alone; then with ``single_rounding`` nothing but the result is rounded, and
    ``inverse`` turns the other way, with a single rounding. A ``layout`` other than ``half`` takes no norm.
    """
    both = _Heads(call, inputs, [(x,) for x in inputs[:2]], outputs, unsqueeze_dim, layout, angles_by_pair)
    # Pairs of neighbours are loaded as halves are: two elements of a row, of those after ``rotary`` too.
    planned = both.rotary if layout == "half" else both.width
    plan = heads_forward_plan(*both.heads, both.width, planned, device_props(inputs[0].device))
    q_tiles, k_tiles = both.tiles(plan)
    if not q_tiles + k_tiles:
        return
    numbers, constants = both.arguments(spec, plan, q_tiles)
    cos = inputs[4]
    for side, x, weight in zip("QK", inputs[:2], inputs[2:4], strict=True):
        normed = step = None  # the dtypes that normalised rows, and the products of their rotation, are rounded to
        if x is not None:
            dtype = x.dtype if spec is None else norm_dtype(spec, x.dtype, weight)
            normed = None if spec is None else TRITON_DTYPES[dtype]
            if cos is not None:
                step = TRITON_DTYPES[torch.float32 if single_rounding or inverse else promoted(dtype, cos.dtype)]
        constants |= {f"{side}_NORMED": normed, f"{side}_STEP": step}
    constants["INVERSE"] = inverse
    ((q,), (k,)), grid = both.sides, (q_tiles + k_tiles, 1)
    tensors = q, k, *both.shared, *outputs, *copies
    call.launch(qk_forward_kernel, grid, tensors, numbers, constants, warps=plan.warps, fuse=not both.rotary)


def launch_qk_backward(
    call: Call, spec: NormSpec, inputs: QkTensors, incoming: Sides, dx: Sides, dw: Sides, unsqueeze_dim: int
) -> None:
    """Write the gradients of q and k (``dx``, from ``empty_rows_like``) and of their weights (``dw``).

    An output that is None is skipped; a side without ``incoming`` gradient gets no gradient.
    """
    both = _Heads(call, inputs, list(zip(inputs[:2], incoming, strict=True)), dx, unsqueeze_dim)
    (q, q_d), (k, k_d) = both.sides
    cos, device = inputs[4], device_props(inputs[0].device)
    loads = 2 if 0 < both.rotary < both.width else 1  # of d: partners are loaded separately
    column_bytes = max(x.element_size() + loads * d.element_size() for x, d in both.sides if d is not None)
    angle_bytes = 0 if cos is None else 2 * cos.element_size()
    plan = heads_backward_plan(*both.heads, both.width, both.rotary, column_bytes, angle_bytes, device)
    q_tiles, k_tiles = both.tiles(plan)
    q_programs, programs, shares = q_tiles, q_tiles + k_tiles, None
    if any(grad is not None for grad in dw):
        if programs > plan.programs:
            # Each side its part of the programs, and at least one if there is anything to do.
            most = plan.programs - min(1, k_tiles)
            q_programs = min(max(round(plan.programs * q_tiles / programs), min(1, q_tiles)), most)
            programs = plan.programs
        shares = call.empty(inputs[0], (programs, both.width), dtype=torch.float32)
    if programs:
        numbers, constants = both.arguments(spec, plan, q_programs)
        constants |= {"STAGES": plan.stages, "OVERLAPS": shares is not None and device.overlaps}
        constants |= {"Q_HAS_DW": dw[0] is not None, "K_HAS_DW": dw[1] is not None}
        tensors = q, k, *both.shared, q_d, k_d, *dx, shares
        call.launch(qk_backward_kernel, (programs, 1), tensors, numbers, constants, warps=plan.warps)
    if shares is not None and both.width:
        reduce_partials(call, shares, *dw, q_programs, plan.programs, device)


class _Heads:
    """The rows of both sides, the weights and the angles, copied if kernels cannot read them in place.

    ``read`` are a side's tensors, x first; one with a None has no rows. ``written`` is as evenly spaced as x is.
    """

    def __init__(
        self,
        call: Call,
        inputs: QkTensors,
        read: Sequence[Any],
        written: Sides,
        unsqueeze_dim: int,
        layout: RotaryLayout = "half",
        angles_by_pair: bool = False,
    ) -> None:
        cos = inputs[4]
        self._pairs = layout, angles_by_pair
        self.width, self.rotary = inputs[0].shape[-1], 0 if cos is None else cos.shape[-1]
        self._heads_dim = None if cos is None else heads_dim_of(cos, unsqueeze_dim)
        self.shared = [x if x is None or x.stride(-1) == 1 else call.contiguous(x) for x in inputs[2:]]
        """Weights, cos and sin."""
        arranged = [self._arranged(call, *side) for side in zip(read, written, strict=True)]
        self.sides, self._layouts = [side for side, _ in arranged], [layout for _, layout in arranged]
        self.heads = [layout.heads for layout in self._layouts]
        self._strides = [step for layout in self._layouts for step in layout.strides]
        for angles in self.shared[2:]:  # which have no stride by head
            steps = [0] * 4 if angles is None else angles_layout(angles, unsqueeze_dim)[1]
            self._strides += [steps[0], 0 if self._heads_dim is None else steps[3 - self._heads_dim]]
        self._long = is_long([x for x in self.shared[2:] if x is not None]) or any(
            layout.long for layout in self._layouts
        )

    def _arranged(self, call: Call, read: tuple[Any, ...], written: Tensor | None) -> tuple[tuple[Any, ...], _Layout]:
        if any(x is None for x in read):
            return read, _Layout(0, 1, 1, (0,) * 3 * (1 + len(read)), False)
        arranged: list[Tensor] = []
        for x in read:
            lead = arranged[0] if arranged else x
            fits = _layout((*arranged, x), self._heads_dim)
            arranged.append(x if fits else call.copied_like(lead, x))
        outputs = call.empty_rows_like(arranged[0]) if written is None else written
        layout = _layout((*arranged, outputs), self._heads_dim)
        assert layout is not None, "a tensor without a layout was copied before"
        return tuple(arranged), layout

    def tiles(self, plan: HeadsPlan) -> list[int]:
        """The number of tiles of each side."""
        pairs = zip(self._layouts, (plan.q, plan.k), strict=True)
        return [-(-rows.tokens // tile.tokens) * -(-rows.heads // tile.heads) for rows, tile in pairs]

    def arguments(self, spec: NormSpec | None, plan: HeadsPlan, q_programs: int) -> tuple[Any, dict[str, Any]]:
        """The numbers and the compile-time constants that both kernels have."""
        counts = [count for layout in self._layouts for count in layout[:3]]
        grain = math.gcd(self.rotary // 2, 16) if self.rotary else 1
        constants = {
            "Q_TOKENS": plan.q.tokens,
            "Q_HEADS": plan.q.heads,
            "K_TOKENS": plan.k.tokens,
            "K_HEADS": plan.k.heads,
            "SHAPE": _TileShape(self.width, self.rotary, plan.block, grain, self._long, *self._pairs),
            "SPEC": None if spec is None else spec.without_eps(),
        }
        return (*counts, q_programs, *self._strides, 0.0 if spec is None else spec.eps), constants


def _layout(tensors: Sequence[Tensor], heads_dim: int | None) -> _Layout | None:
    """The layout of ``tensors``, the first of which gives the order; None if three strides each do not tell it.

    ``heads_dim``: of four dimensions, the one of the heads. Without RoPE (None) any rows will do: with as few strides
    as possible, in the order of memory.
    """
    lead = tensors[0]
    if lead.shape[-1] > 1 and any(tensor.stride(-1) != 1 for tensor in tensors):
        return None
    groups: list[list[int]] = []
    if heads_dim is not None:
        groups = [[0], [3 - heads_dim], [heads_dim]]
    else:
        for dim in memory_order(lead):
            if lead.shape[dim] == 1:
                continue
            if groups and all(t.stride(groups[-1][-1]) == t.stride(dim) * t.shape[dim] for t in tensors):
                groups[-1].append(dim)
            else:
                groups.append([dim])
        if len(groups) > 3:
            return None
        if len(groups) < 2:
            groups = [*groups, []]  # evenly spaced rows are tokens of one head
        groups = [[]] * (3 - len(groups)) + groups
    batch, length, heads = (math.prod(lead.shape[dim] for dim in group) for group in groups)
    strides = tuple(tensor.stride(group[-1]) if group else 0 for tensor in tensors for group in groups)
    tokens = batch * length if lead.numel() else 0
    return _Layout(tokens, max(length, 1), max(heads, 1), strides, is_long(tensors))
