"""The norm of q's and k's heads in Triton, with or without RoPE behind it, forward and backward, and their launchers.

One launch takes both: its programs are split between the tiles of q and those of k. Names in the kernels: ``x`` is q or
k, T tokens (of ``LENGTH`` in a sequence) times H heads, rows of N columns; a tile is TOKENS by HEADS rows. ``n`` is the
normalised row. Where RoPE turns whole rows (R is N) they are held as halves ``a`` and ``b``. Elsewhere all of a row is
``a``; of its first R columns, if there are any, each has its ``partner`` half of R away, which is loaded once more.
``d`` is the gradient of the output, ``dn`` that of n; ``pull``, ``gamma`` and ``rstd`` are as in ``norm_forward`` and
``norm_backward``. Strides go by batch, token and head. Arithmetic is fp32 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import INT32_LIMIT, Launch
from .native.recording import allocated
from .norm_backward import SHARE_COLUMNS, SMALL, SMALL_SHARES, arrivals, sum_of_shares
from .norm_forward import load_gamma, normalised, rstd_from, square
from .plans import HeadsPlan, HeadsTile, heads_backward_plan, heads_forward_plan, next_power_of_2
from .triton_utils import (
    against_heads,
    await_previous,
    empty,
    empty_rows_like,
    facts_of,
    let_next_begin,
    memory_order,
    round_to,
)


@triton.jit
def _token_of(tile, H, TOKENS: tl.constexpr, HEADS: tl.constexpr, LONG: tl.constexpr):
    """The tokens of a tile, [TOKENS, 1, 1]; a token's blocks of heads follow each other."""
    token = (tile // tl.cdiv(H, HEADS)) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    return token.to(tl.int64) if LONG else token


@triton.jit
def _head_of(tile, H, HEADS: tl.constexpr, LONG: tl.constexpr):
    """The heads of a tile, [1, HEADS, 1]."""
    head = (tile % tl.cdiv(H, HEADS)) * HEADS + tl.arange(0, HEADS)[None, :, None]
    return head.to(tl.int64) if LONG else head


@triton.jit
def _angles_of(angles_ptr, batch, position, batch_stride, token_stride, HEADS: tl.constexpr):
    """Where the tokens' rows of cos or sin begin, for each head: read again from cache, they need no other layout."""
    rows = angles_ptr + (batch * batch_stride + position * token_stride)
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
def _gamma_at(w_ptr, start: tl.constexpr, col, end: tl.constexpr, CASTING: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    return load_gamma(w_ptr + start, col, col < end - start, CASTING, ZERO_CENTERED)[:, None, :]


@triton.jit
def _partner_of(col, HALF: tl.constexpr, GRAIN: tl.constexpr):
    """The column that RoPE mixes with ``col``; runs of GRAIN, which divides HALF, stay together."""
    partner = tl.where(col < HALF, col + HALF, col - HALF)
    return tl.max_contiguous(tl.multiple_of(partner, GRAIN), GRAIN)


@triton.jit
def _normed(
    x,
    rstd,
    w_ptr,
    start: tl.constexpr,
    col,
    end: tl.constexpr,
    x_dtype: tl.constexpr,
    NORMED: tl.constexpr,
    CASTING: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    """n, rounded to its dtype, of columns that are loaded."""
    n = normalised(x, rstd, x_dtype, CASTING)
    if w_ptr is not None:
        n = n * _gamma_at(w_ptr, start, col, end, CASTING, ZERO_CENTERED)
    return round_to(n, NORMED)


@triton.jit
def _forward_tile(
    x_ptr,
    w_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    tile,
    T,
    LENGTH,
    H,
    x_batch,
    x_token,
    x_head,
    y_batch,
    y_token,
    y_head,
    cos_batch,
    cos_token,
    sin_batch,
    sin_token,
    eps,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    GRAIN: tl.constexpr,
    LONG: tl.constexpr,
    NORMED: tl.constexpr,
    CASTING: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    token, head = _token_of(tile, H, TOKENS, HEADS, LONG), _head_of(tile, H, HEADS, LONG)
    batch = token // LENGTH
    position = token - batch * LENGTH
    live = (token < T) & (head < H)
    col = tl.arange(0, BLOCK)
    HALVES: tl.constexpr = R == N
    HALF: tl.constexpr = R // 2
    WIDTH: tl.constexpr = HALF if HALVES else N
    x_dtype: tl.constexpr = x_ptr.dtype.element_ty
    y_dtype: tl.constexpr = y_ptr.dtype.element_ty
    x_rows = x_ptr + (batch * x_batch + position * x_token + head * x_head)
    y_rows = y_ptr + (batch * y_batch + position * y_token + head * y_head)

    a = _load(x_rows, 0, col, WIDTH, live)
    squares = square(a, x_dtype, CASTING)
    if R:
        # In flight together with x: behind its sum they would be a second wait.
        cos_rows = _angles_of(cos_ptr, batch, position, cos_batch, cos_token, HEADS)
        sin_rows = _angles_of(sin_ptr, batch, position, sin_batch, sin_token, HEADS)
        present = token < T
        if HALVES:
            b = _load(x_rows, HALF, col, R, live)
            squares += square(b, x_dtype, CASTING)
            cos_a, cos_b = _load(cos_rows, 0, col, HALF, present), _load(cos_rows, HALF, col, R, present)
            sin_a, sin_b = _load(sin_rows, 0, col, HALF, present), _load(sin_rows, HALF, col, R, present)
        else:
            partner = _partner_of(col, HALF, GRAIN)
            b = _load(x_rows, 0, partner, R, live & (col < R)[None, None, :])
            cos_a, sin_a = _load(cos_rows, 0, col, R, present), _load(sin_rows, 0, col, R, present)
    rstd = rstd_from(tl.sum(squares, axis=2), eps, x_dtype, N, CASTING)[:, :, None]

    a = _normed(a, rstd, w_ptr, 0, col, WIDTH, x_dtype, NORMED, CASTING, ZERO_CENTERED)
    if not R:
        _store(y_rows, 0, col, N, live, a)
    elif HALVES:
        b = _normed(b, rstd, w_ptr, HALF, col, R, x_dtype, NORMED, CASTING, ZERO_CENTERED)
        _store(y_rows, 0, col, HALF, live, round_to(a * cos_a, y_dtype) - round_to(b * sin_a, y_dtype))
        _store(y_rows, HALF, col, R, live, round_to(b * cos_b, y_dtype) + round_to(a * sin_b, y_dtype))
    else:
        b = _normed(b, rstd, w_ptr, 0, partner, R, x_dtype, NORMED, CASTING, ZERO_CENTERED)
        across = round_to(b * sin_a, y_dtype)
        turned = round_to(a * cos_a, y_dtype) + tl.where((col < HALF)[None, None, :], -across, across)
        _store(y_rows, 0, col, N, live, tl.where((col < R)[None, None, :], turned, a))


@triton.jit(do_not_specialize=["q_T", "q_LENGTH", "q_H", "k_T", "k_LENGTH", "k_H", "q_programs"])
def _qk_forward_kernel(
    q_ptr,  # [q_T, q_H, N]
    k_ptr,  # [k_T, k_H, N]
    q_w_ptr,  # [N] or None
    k_w_ptr,  # [N] or None
    cos_ptr,  # [T, R] or None
    sin_ptr,  # [T, R] or None
    q_y_ptr,  # [q_T, q_H, N]
    k_y_ptr,  # [k_T, k_H, N]
    q_T,
    q_LENGTH,
    q_H,
    k_T,
    k_LENGTH,
    k_H,
    q_programs,
    q_batch,
    q_token,
    q_head,
    q_y_batch,
    q_y_token,
    q_y_head,
    k_batch,
    k_token,
    k_head,
    k_y_batch,
    k_y_token,
    k_y_head,
    cos_batch,
    cos_token,
    sin_batch,
    sin_token,
    eps,
    Q_TOKENS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_TOKENS: tl.constexpr,
    K_HEADS: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    GRAIN: tl.constexpr,
    LONG: tl.constexpr,
    Q_NORMED: tl.constexpr,
    K_NORMED: tl.constexpr,
    CASTING: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    program = tl.program_id(0)
    if program < q_programs:
        _forward_tile(
            q_ptr, q_w_ptr, cos_ptr, sin_ptr, q_y_ptr, program, q_T, q_LENGTH, q_H,
            q_batch, q_token, q_head, q_y_batch, q_y_token, q_y_head, cos_batch, cos_token, sin_batch, sin_token, eps,
            Q_TOKENS, Q_HEADS, N, R, BLOCK, GRAIN, LONG, Q_NORMED, CASTING, ZERO_CENTERED,
        )  # fmt: skip
    else:
        _forward_tile(
            k_ptr, k_w_ptr, cos_ptr, sin_ptr, k_y_ptr, program - q_programs, k_T, k_LENGTH, k_H,
            k_batch, k_token, k_head, k_y_batch, k_y_token, k_y_head, cos_batch, cos_token, sin_batch, sin_token, eps,
            K_TOKENS, K_HEADS, N, R, BLOCK, GRAIN, LONG, K_NORMED, CASTING, ZERO_CENTERED,
        )  # fmt: skip


@triton.jit
def _store_share(share_ptr, start: tl.constexpr, col, end: tl.constexpr, dw):
    tl.store(share_ptr + start + col, tl.sum(tl.sum(dw, axis=0), axis=0), mask=col < end - start)


@triton.jit
def _backward_tiles(
    x_ptr,
    d_ptr,
    w_ptr,
    cos_ptr,
    sin_ptr,
    dx_ptr,
    share_ptr,
    program,
    programs,
    T,
    LENGTH,
    H,
    x_batch,
    x_token,
    x_head,
    d_batch,
    d_token,
    d_head,
    dx_batch,
    dx_token,
    dx_head,
    cos_batch,
    cos_token,
    sin_batch,
    sin_token,
    eps,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    STAGES: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    GRAIN: tl.constexpr,
    LONG: tl.constexpr,
    CASTING: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    HAS_DW: tl.constexpr,
):
    """Every ``programs``-th tile; the share of dw, where one is wanted, goes to the N floats at ``share_ptr``."""
    HALVES: tl.constexpr = R == N
    HALF: tl.constexpr = R // 2
    WIDTH: tl.constexpr = HALF if HALVES else N
    col = tl.arange(0, BLOCK)
    gamma_a = tl.full([1, 1, BLOCK], 1.0, tl.float32)
    dw_a = tl.zeros([TOKENS, HEADS, BLOCK], tl.float32)
    if w_ptr is not None:
        gamma_a = _gamma_at(w_ptr, 0, col, WIDTH, CASTING, ZERO_CENTERED)
    if HALVES:
        gamma_b = tl.full([1, 1, BLOCK], 1.0, tl.float32)
        dw_b = tl.zeros([TOKENS, HEADS, BLOCK], tl.float32)
        if w_ptr is not None:
            gamma_b = _gamma_at(w_ptr, HALF, col, R, CASTING, ZERO_CENTERED)

    for tile in tl.range(program, tl.cdiv(T, TOKENS) * tl.cdiv(H, HEADS), programs, num_stages=STAGES):
        token, head = _token_of(tile, H, TOKENS, HEADS, LONG), _head_of(tile, H, HEADS, LONG)
        batch = token // LENGTH
        position = token - batch * LENGTH
        live = (token < T) & (head < H)
        x_rows = x_ptr + (batch * x_batch + position * x_token + head * x_head)
        d_rows = d_ptr + (batch * d_batch + position * d_token + head * d_head)

        a = _load(x_rows, 0, col, WIDTH, live)
        dn_a = _load(d_rows, 0, col, WIDTH, live)
        if R:
            cos_rows = _angles_of(cos_ptr, batch, position, cos_batch, cos_token, HEADS)
            sin_rows = _angles_of(sin_ptr, batch, position, sin_batch, sin_token, HEADS)
            present = token < T
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
                partner, in_turn = _partner_of(col, HALF, GRAIN), (col < R)[None, None, :]
                across = _load(d_rows, 0, partner, R, live & in_turn)
                across *= _load(sin_rows, 0, partner, R, present & in_turn)
                turned = dn_a * _load(cos_rows, 0, col, R, present)
                dn_a = tl.where(in_turn, turned + tl.where((col < HALF)[None, None, :], across, -across), dn_a)
            g_a = dn_a * gamma_a
            squares = tl.sum(a * a, axis=2)
            products = tl.sum(g_a * a, axis=2)
        rstd = tl.rsqrt(squares * (1.0 / N) + eps)
        pull = (products * (rstd * rstd) * (1.0 / N))[:, :, None]
        rstd = rstd[:, :, None]
        if HAS_DW:
            dw_a += dn_a * (a * rstd)
            if HALVES:
                dw_b += dn_b * (b * rstd)
        if dx_ptr is not None:
            dx_rows = dx_ptr + (batch * dx_batch + position * dx_token + head * dx_head)
            _store(dx_rows, 0, col, WIDTH, live, rstd * (g_a - a * pull))
            if HALVES:
                _store(dx_rows, HALF, col, R, live, rstd * (g_b - b * pull))

    if HAS_DW:
        _store_share(share_ptr, 0, col, WIDTH, dw_a)
        if HALVES:
            _store_share(share_ptr, HALF, col, R, dw_b)


@triton.jit(do_not_specialize=["q_T", "q_LENGTH", "q_H", "k_T", "k_LENGTH", "k_H", "q_programs"])
def _qk_backward_kernel(
    q_ptr,  # [q_T, q_H, N]
    q_d_ptr,  # [q_T, q_H, N], or None: no gradient for q
    k_d_ptr,  # [k_T, k_H, N], or None: no gradient for k
    k_ptr,  # [k_T, k_H, N]
    q_w_ptr,  # [N] or None
    k_w_ptr,  # [N] or None
    cos_ptr,  # [T, R] or None
    sin_ptr,  # [T, R] or None
    q_dx_ptr,  # [q_T, q_H, N] or None
    k_dx_ptr,  # [k_T, k_H, N] or None
    shares_ptr,  # [programs, N] fp32 or None: each program's share of dw, first those of q
    arrived_ptr,  # [1] int32, zero before and after, or None: how many programs have stored their share
    q_dw_ptr,  # [N], or None: no dw for q
    k_dw_ptr,  # [N], or None: no dw for k
    q_T,
    q_LENGTH,
    q_H,
    k_T,
    k_LENGTH,
    k_H,
    q_programs,
    q_batch,
    q_token,
    q_head,
    q_d_batch,
    q_d_token,
    q_d_head,
    q_dx_batch,
    q_dx_token,
    q_dx_head,
    k_batch,
    k_token,
    k_head,
    k_d_batch,
    k_d_token,
    k_d_head,
    k_dx_batch,
    k_dx_token,
    k_dx_head,
    cos_batch,
    cos_token,
    sin_batch,
    sin_token,
    eps,
    Q_TOKENS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_TOKENS: tl.constexpr,
    K_HEADS: tl.constexpr,
    STAGES: tl.constexpr,
    SHARE_ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
    OVERLAPS: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    GRAIN: tl.constexpr,
    LONG: tl.constexpr,
    CASTING: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    share_ptr = shares_ptr
    if shares_ptr is not None:
        share_ptr = shares_ptr + program.to(tl.int64) * N
    if program < q_programs:
        if q_d_ptr is not None:
            _backward_tiles(
                q_ptr, q_d_ptr, q_w_ptr, cos_ptr, sin_ptr, q_dx_ptr, share_ptr, program, q_programs,
                q_T, q_LENGTH, q_H, q_batch, q_token, q_head, q_d_batch, q_d_token, q_d_head,
                q_dx_batch, q_dx_token, q_dx_head, cos_batch, cos_token, sin_batch, sin_token, eps,
                Q_TOKENS, Q_HEADS, STAGES, N, R, BLOCK, GRAIN, LONG, CASTING, ZERO_CENTERED,
                q_dw_ptr is not None,
            )  # fmt: skip
    else:
        if k_d_ptr is not None:
            _backward_tiles(
                k_ptr, k_d_ptr, k_w_ptr, cos_ptr, sin_ptr, k_dx_ptr, share_ptr,
                program - q_programs, programs - q_programs,
                k_T, k_LENGTH, k_H, k_batch, k_token, k_head, k_d_batch, k_d_token, k_d_head,
                k_dx_batch, k_dx_token, k_dx_head, cos_batch, cos_token, sin_batch, sin_token, eps,
                K_TOKENS, K_HEADS, STAGES, N, R, BLOCK, GRAIN, LONG, CASTING, ZERO_CENTERED,
                k_dw_ptr is not None,
            )  # fmt: skip
    let_next_begin(OVERLAPS)
    if arrived_ptr is not None:
        tl.debug_barrier()  # all of this program's share is stored before it counts as arrived
        if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == programs - 1:
            col = tl.arange(0, WHOLE)
            if q_dw_ptr is not None:
                dw = sum_of_shares(shares_ptr, q_programs, col, N, SHARE_ROWS)
                tl.store(q_dw_ptr + col, round_to(dw, q_dw_ptr.dtype.element_ty), mask=col < N)
            if k_dw_ptr is not None:
                dw = sum_of_shares(shares_ptr + q_programs * N, programs - q_programs, col, N, SHARE_ROWS)
                tl.store(k_dw_ptr + col, round_to(dw, k_dw_ptr.dtype.element_ty), mask=col < N)
            tl.store(arrived_ptr, 0)


@triton.jit
def _sum_part(shares_ptr, dw_ptr, first, last, col, N: tl.constexpr, ROWS: tl.constexpr):
    program = first + tl.arange(0, ROWS)
    live = (program < last)[:, None] & (col < N)[None, :]
    dw = tl.sum(tl.load(shares_ptr + program[:, None] * N + col[None, :], mask=live, other=0.0), axis=0)
    tl.store(dw_ptr + col, round_to(dw, dw_ptr.dtype.element_ty), mask=col < N)


@triton.jit(do_not_specialize=["P", "q_programs"])
def _sum_qk_shares_kernel(
    shares_ptr,  # [P, N] fp32, the first q_programs of them q's
    q_dw_ptr,  # [N] or None
    k_dw_ptr,  # [N] or None
    P,
    q_programs,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """dw of q and of k from the programs' shares: each in one tile, in a fixed order, rounded once."""
    await_previous(OVERLAPS)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        if q_dw_ptr is not None:
            _sum_part(shares_ptr, q_dw_ptr, 0, q_programs, col, N, ROWS)
    else:
        if k_dw_ptr is not None:
            _sum_part(shares_ptr, k_dw_ptr, q_programs, P, col, N, ROWS)


Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""q, k, q's weight, k's weight, cos, sin: the last two without RoPE None, the weights both or neither."""


class _Layout(NamedTuple):
    """The rows of some tensors of one shape as batches of tokens of heads."""

    tokens: int
    length: int
    heads: int
    strides: tuple[int, ...]
    """Of batch, token and head, for each tensor."""
    long: bool
    """Whether an offset could pass 2^31."""

    def tiles(self, tile: HeadsTile) -> int:
        """How many tiles they make."""
        return -(-self.tokens // tile.tokens) * -(-self.heads // tile.heads)


_ABSENT = _Layout(0, 1, 1, (0,) * 9, False)
"""What has no gradient."""


def _layout(tensors: Sequence[Tensor], heads_dim: int | None) -> _Layout | None:
    """The layout of ``tensors``, the first of which gives the order; None where three strides each do not tell it.

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
    return _Layout(tokens, max(length, 1), max(heads, 1), strides, _is_long(tensors))


def _is_long(tensors: Sequence[Tensor]) -> bool:
    extents = (sum(n * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) for tensor in tensors)
    return max(extents) >= INT32_LIMIT


def heads_dim_of(cos: Tensor, unsqueeze_dim: int) -> int | None:
    """The dimension, 1 or 2, along which cos does not vary, which is then that of the heads; None where it has none."""
    shape, _ = against_heads(cos, unsqueeze_dim)
    return next((dim for dim in (unsqueeze_dim, 3 - unsqueeze_dim) if shape[dim] == 1), None)


def empty_outputs(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor | None, casting: str
) -> tuple[Tensor, Tensor]:
    """The forward's outputs, not yet written, with the dtype and the memory order that the stock code gives them."""
    return _empty_output(q, q_weight, cos, casting), _empty_output(k, k_weight, cos, casting)


def _empty_output(x: Tensor, weight: Tensor | None, cos: Tensor | None, casting: str) -> Tensor:
    dtype = _normed_dtype(x, weight, casting)
    if cos is None:
        return empty_rows_like(x, dtype)
    dtype = torch.promote_types(dtype, cos.dtype)
    # Stock code concatenates what is rotated and what is not, and the result of that is contiguous.
    return empty_rows_like(x, dtype) if cos.shape[-1] == x.shape[-1] else empty(x.shape, x, dtype)


def _normed_dtype(x: Tensor, weight: Tensor | None, casting: str) -> torch.dtype:
    """What the norm returns, in front of RoPE."""
    return x.dtype if weight is None or casting == "gemma" else torch.promote_types(x.dtype, weight.dtype)


def empty_gradients(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, needed: tuple[bool, bool, bool, bool]
) -> tuple[Tensor | None, ...]:
    """dq, dk and the two dw, not yet written, each None where it is not needed."""
    need_dq, need_dk, need_dq_weight, need_dk_weight = needed
    return (
        empty_rows_like(q) if need_dq else None,
        empty_rows_like(k) if need_dk else None,
        empty(q_weight.shape, q_weight) if need_dq_weight and q_weight is not None else None,
        empty(k_weight.shape, k_weight) if need_dk_weight and k_weight is not None else None,
    )


class _Empty(NamedTuple):
    """A tensor to be allocated."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def like(cls, tensor: Tensor) -> _Empty:
        return cls(tensor.shape, tensor.stride(), tensor.dtype)

    def on(self, device: torch.device) -> Tensor:
        return allocated(torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device))


class _Forward(NamedTuple):
    """A forward worked out for tensors of certain shapes, strides and dtypes."""

    launch: Launch
    programs: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]
    q_out: _Empty
    k_out: _Empty


class _Backward(NamedTuple):
    """The same for a backward; ``summing`` is the launch after it, or None where the kernel sums dw's shares itself."""

    launch: Launch
    summing: Launch | None
    programs: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]
    dq: _Empty
    dk: _Empty


_PLANNED_LIMIT = 4096
"""Sets of shapes and strides that are remembered; a program that goes through more of them starts anew."""

_forwards: dict[Any, _Forward] = {}
_backwards: dict[Any, _Backward] = {}
_launches: dict[Any, Launch] = {}


def launch_forward(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    casting: str,
    zero_centered: bool,
    unsqueeze_dim: int,
) -> tuple[Tensor, Tensor]:
    """Launches the forward for validated tensors: q and k normalised and, with cos and sin, rotated."""
    inputs = (q, k, q_weight, k_weight, cos, sin)
    device = q.device
    key = device, _signature(inputs), casting, zero_centered, unsqueeze_dim
    planned = _forwards.get(key)
    if planned is None:
        readable: Any = _readable(inputs, unsqueeze_dim)
        if readable is not None:
            q, k, q_weight, k_weight, cos, sin = readable
            return launch_forward(q, k, q_weight, k_weight, cos, sin, eps, casting, zero_centered, unsqueeze_dim)
        planned = _plan_forward(inputs, casting, zero_centered, unsqueeze_dim)
        _remember(_forwards, key, planned)
    launch, programs, counts, strides, q_empty, k_empty = planned
    q_out, k_out = q_empty.on(device), k_empty.on(device)
    if programs:
        launch((programs, 1), (*inputs, q_out, k_out), counts[0], strides, (float(eps),), counts[1:])
    return q_out, k_out


def launch_backward(
    dq_out: Tensor | None,
    dk_out: Tensor | None,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    casting: str,
    zero_centered: bool,
    unsqueeze_dim: int,
    *,
    needed: tuple[bool, bool, bool, bool],
) -> tuple[Tensor | None, ...]:
    """The gradients ``(dq, dk, dq_weight, dk_weight)``, each None unless it is ``needed``.

    A gradient of the output that is None needs nothing of its side; one that is there needs something.
    """
    inputs = (q, k, q_weight, k_weight, cos, sin)
    device = q.device
    small = q.numel() + k.numel() <= SMALL and not (q.is_cuda and torch.cuda.is_current_stream_capturing())
    key = device, _signature((dq_out, dk_out, *inputs)), casting, zero_centered, unsqueeze_dim, needed, small
    planned = _backwards.get(key)
    if planned is None:
        readable: Any = _readable(inputs, unsqueeze_dim, (dq_out, dk_out))
        if readable is not None:
            q, k, q_weight, k_weight, cos, sin, dq_out, dk_out = readable
            return launch_backward(
                dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, eps, casting, zero_centered, unsqueeze_dim,
                needed=needed,
            )  # fmt: skip
        planned = _plan_backward(inputs, (dq_out, dk_out), casting, zero_centered, unsqueeze_dim, needed, small)
        _remember(_backwards, key, planned)
    launch, summing, programs, counts, strides, q_empty, k_empty = planned
    need_dq, need_dk, need_dq_weight, need_dk_weight = needed
    dq = q_empty.on(device) if need_dq else None
    dk = k_empty.on(device) if need_dk else None
    dq_weight = empty(q_weight.shape, q_weight) if need_dq_weight and q_weight is not None else None
    dk_weight = empty(k_weight.shape, k_weight) if need_dk_weight and k_weight is not None else None
    shares = arrived = None
    if dq_weight is not None or dk_weight is not None:
        shares = empty((programs, q.shape[-1]), q, torch.float32)
        if summing is None:
            arrived = arrivals(q)
    if programs:
        tensors = (q, dq_out, dk_out, *inputs[1:], dq, dk, shares, arrived, dq_weight, dk_weight)
        launch((programs, 1), tensors, counts[0], strides, (float(eps),), counts[1:])
    if summing is not None and q.shape[-1]:
        blocks = -(-q.shape[-1] // SHARE_COLUMNS)
        summing((blocks, 2), (shares, dq_weight, dk_weight), programs, (), (), counts[-1:])
    return dq, dk, dq_weight, dk_weight


def _signature(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """All of the tensors that plans depend on."""
    return tuple([None if tensor is None else (tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors])


def _readable(inputs: Inputs, unsqueeze_dim: int, gradients: Sequence[Tensor | None] = ()) -> tuple[Any, ...] | None:
    """Inputs and gradients, copied where kernels cannot read them in place; None where all can be read."""
    heads_dim = _heads_dim(inputs, unsqueeze_dim)
    heads = [x if _layout((x,), heads_dim) else empty_rows_like(x).copy_(x) for x in inputs[:2]]
    others = [x if x is None or x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous() for x in inputs[2:]]
    arranged = [
        d if d is None or _layout((x, d), heads_dim) else empty_rows_like(x, d.dtype).copy_(d)
        for x, d in zip(heads, gradients, strict=False)
    ]
    readable = (*heads, *others, *arranged)
    return None if all(a is b for a, b in zip(readable, (*inputs, *gradients), strict=True)) else readable


def _heads_dim(inputs: Inputs, unsqueeze_dim: int) -> int | None:
    return None if inputs[4] is None else heads_dim_of(inputs[4], unsqueeze_dim)


def _remember(plans: dict[Any, Any], key: Any, planned: Any) -> None:
    if len(plans) >= _PLANNED_LIMIT:
        plans.clear()
    plans[key] = planned


def _plan_forward(inputs: Inputs, casting: str, zero_centered: bool, unsqueeze_dim: int) -> _Forward:
    q, k, q_weight, k_weight, cos, _ = inputs
    heads_dim = _heads_dim(inputs, unsqueeze_dim)
    q_out, k_out = empty_outputs(q, k, q_weight, k_weight, cos, casting)
    layouts = _known(_layout((q, q_out), heads_dim)), _known(_layout((k, k_out), heads_dim))
    rotary = 0 if cos is None else cos.shape[-1]
    plan = heads_forward_plan(*(layout.heads for layout in layouts), q.shape[-1], rotary, facts_of(q.device))
    constants = _constants(plan, inputs, layouts, casting, zero_centered)
    constants["Q_NORMED"] = _TRITON_DTYPES[_normed_dtype(q, q_weight, casting)]
    constants["K_NORMED"] = _TRITON_DTYPES[_normed_dtype(k, k_weight, casting)]
    q_tiles, k_tiles = layouts[0].tiles(plan.q), layouts[1].tiles(plan.k)
    return _Forward(
        _launch_of(_qk_forward_kernel, inputs, plan.warps, constants, fuse=cos is None),
        q_tiles + k_tiles,
        _counts(layouts, q_tiles),
        _strides(layouts, inputs, unsqueeze_dim),
        _Empty.like(q_out),
        _Empty.like(k_out),
    )


def _plan_backward(
    inputs: Inputs,
    gradients: Sequence[Tensor | None],
    casting: str,
    zero_centered: bool,
    unsqueeze_dim: int,
    needed: tuple[bool, bool, bool, bool],
    small: bool,
) -> _Backward:
    heads_dim = _heads_dim(inputs, unsqueeze_dim)
    dx = [empty_rows_like(x) for x in inputs[:2]]
    layouts = [
        _ABSENT if d is None else _known(_layout((x, d, grad), heads_dim))
        for x, d, grad in zip(inputs[:2], gradients, dx, strict=True)
    ]
    q, cos = inputs[0], inputs[4]
    width, rotary = q.shape[-1], 0 if cos is None else cos.shape[-1]
    loads = 2 if 0 < rotary < width else 1  # of d: partners are loaded by themselves
    column_bytes = max(
        x.element_size() + loads * d.element_size() for x, d in zip(inputs[:2], gradients, strict=True) if d is not None
    )
    device = facts_of(q.device)
    angle_bytes = 0 if cos is None else 2 * cos.element_size()
    plan = heads_backward_plan(*(layout.heads for layout in layouts), width, rotary, column_bytes, angle_bytes, device)
    q_tiles, k_tiles = layouts[0].tiles(plan.q), layouts[1].tiles(plan.k)
    q_programs, programs = q_tiles, q_tiles + k_tiles
    summing = None
    if any(needed[2:]):
        limit = min(plan.programs, max(2, SMALL_SHARES // width)) if small else plan.programs
        if programs > limit:
            # Each side its part of the programs, and at least one where there is anything to do.
            q_programs = min(max(round(limit * q_tiles / programs), min(1, q_tiles)), limit - min(1, k_tiles))
            programs = limit
        if not small or programs == 0:
            rows = next_power_of_2(plan.programs)
            overlaps = device.overlaps and programs > 0
            constants = {"N": width, "ROWS": rows, "BLOCK": SHARE_COLUMNS, "OVERLAPS": overlaps}
            warps = device.warps(max(1, min(16, rows // 64)))
            summing = _launch_of(
                _sum_qk_shares_kernel, (*inputs[2:4], *needed[2:]), warps, constants, overlaps=overlaps
            )
    constants = _constants(plan, inputs, layouts, casting, zero_centered)
    whole = next_power_of_2(width)
    constants |= {"STAGES": plan.stages, "SHARE_ROWS": max(1, 8192 // whole), "WHOLE": whole}
    constants["OVERLAPS"] = summing is not None and device.overlaps
    return _Backward(
        _launch_of(_qk_backward_kernel, (*inputs, *gradients, *needed, summing is None), plan.warps, constants, lazy=3),
        summing,
        programs,
        _counts(layouts, q_programs),
        _strides(layouts, inputs, unsqueeze_dim),
        *(_Empty.like(grad) for grad in dx),
    )


_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _known(layout: _Layout | None) -> _Layout:
    assert layout is not None, "what has no layout was copied before"
    return layout


def _constants(
    plan: HeadsPlan, inputs: Inputs, layouts: Sequence[_Layout], casting: str, zero_centered: bool
) -> dict[str, Any]:
    cos, sin = inputs[4:]
    rotary = 0 if cos is None else cos.shape[-1]
    angles_long = cos is not None and sin is not None and _is_long((cos, sin))
    return {
        "Q_TOKENS": plan.q.tokens,
        "Q_HEADS": plan.q.heads,
        "K_TOKENS": plan.k.tokens,
        "K_HEADS": plan.k.heads,
        "N": inputs[0].shape[-1],
        "R": rotary,
        "BLOCK": plan.block,
        "GRAIN": math.gcd(rotary // 2, 16) if rotary else 1,
        "LONG": angles_long or any(layout.long for layout in layouts),
        "CASTING": casting,
        "ZERO_CENTERED": zero_centered,
    }


def _counts(layouts: Sequence[_Layout], q_programs: int) -> tuple[int, ...]:
    return (*(count for layout in layouts for count in layout[:3]), q_programs)


def _strides(layouts: Sequence[_Layout], inputs: Inputs, unsqueeze_dim: int) -> tuple[int, ...]:
    """Of q and its like, of k and its like, of cos and of sin, which do not vary along the heads."""
    strides = [step for layout in layouts for step in layout.strides]
    heads_dim = _heads_dim(inputs, unsqueeze_dim)
    for angles in inputs[4:]:
        steps = [0] * 4 if angles is None else against_heads(angles, unsqueeze_dim)[1]
        strides += [steps[0], 0 if heads_dim is None else steps[3 - heads_dim]]
    return tuple(strides)


def _launch_of(
    kernel: Any,
    arguments: Sequence[Any],
    warps: int,
    constants: dict[str, Any],
    lazy: int = 0,
    fuse: bool = True,
    overlaps: bool = False,
) -> Launch:
    """The launch of a kernel with these constants, for arguments of the same dtypes and the same ones of them None.

    ``fuse`` and ``overlaps``: see ``Launch``.
    """
    present = tuple(x.dtype if isinstance(x, Tensor) else x for x in arguments)
    key = kernel, present, warps, tuple(constants.values())
    launch = _launches.get(key)
    if launch is None:
        launch = _launches[key] = Launch(kernel, warps, constants, lazy, fuse=fuse, overlaps=overlaps)
    return launch
