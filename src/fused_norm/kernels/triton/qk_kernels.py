"""The norm of q's and k's heads in Triton, with or without RoPE behind it, forward and backward; and RoPE alone.

One launch takes both: its programs are split between the tiles of q and those of k. ``language`` has the names that
kernels use; here ``x`` is q or k, T tokens (of ``LENGTH`` in a sequence) times H heads, rows of N columns, and a tile
is TOKENS by HEADS rows. ``n`` is the normalised row. Where RoPE turns whole rows (R is N) they are held as halves ``a``
and ``b``. Elsewhere all of a row is ``a``; of its first R columns, if there are any, each has its ``partner`` half of R
away, which is loaded once more. ``d`` is the gradient of the output, ``dn`` that of n. A tensor in memory is a tuple of
its pointer and its strides by batch, token and head; cos and sin have no stride by head. SHAPE has what all tiles of a
launch share: N, R, BLOCK, GRAIN, LONG, LAYOUT and BY_PAIR. If SPEC is None there is no norm, and n is x.

LAYOUT says which elements RoPE turns together: ``half``, each with the one half of R away, as above; ``interleaved``,
neighbours; ``deinterleaved``, neighbours of x, which lie half of R apart in the output. The last two have tiles of
their own, without a norm, in which ``a`` and ``b`` are the first and the second elements of pairs. BY_PAIR: the first
halves of cos and sin have the angle of each pair; without it every element of the output has its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .language import copy_weight, let_next_begin, load_gamma, normalised, round_to, rstd_from, square


@triton.jit
def _place_of(tile, counts, TOKENS: tl.constexpr, HEADS: tl.constexpr, LONG: tl.constexpr):
    """A tile's batches, the positions in them, heads, and what of its tokens and of its rows there is.

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
