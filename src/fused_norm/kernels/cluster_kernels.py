"""Rows too wide for one program, held by the blocks of a thread-block cluster: read once, forward and backward.

Launched with ``num_ctas`` = ``CTAS`` > 1. A row is a tile of [CTAS, WIDTH] columns, one of its rows in the registers of
each block. A reduction along columns stays inside a block; Triton has none across blocks, so ``_cluster_sum`` exchanges
what each block found. Other names are those of ``norm_forward`` and ``norm_backward``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .norm_forward import _add, _gamma, normalised, rstd_from, square
from .triton_utils import _interpreted, round_to


@triton.constexpr_function
def _exchange(ctas, final):
    """PTX: the sum over a cluster's blocks of one number of each, in the same order in every block.

    The first thread of a block leaves its number in a slot of shared memory, of which there are two: whoever writes a
    slot again has passed the barrier of the sum in between, which every block reaches when it has read the former. No
    block may end while others read its slot: with ``final``, the blocks also announce that they have read.
    """
    lines = [
        ".shared .align 8 .b32 slots[2];",
        ".reg .pred first;",
        ".reg .b32 thread, own, slot;",
        ".reg .f32 sum, part;",
        "mov.u32 thread, %tid.x;",
        "setp.eq.u32 first, thread, 0;",
        "mov.u32 own, slots;",
        "add.u32 own, own, $2;",
        "@first st.shared.f32 [own], $1;",
        "barrier.cluster.arrive.release.aligned;",
        "barrier.cluster.wait.acquire.aligned;",
        "mov.f32 sum, 0f00000000;",
    ]
    for block in range(ctas):
        lines += [
            f"mapa.shared::cluster.u32 slot, own, {block};",
            "ld.shared::cluster.f32 part, [slot];",
            "add.f32 sum, sum, part;",
        ]
    if final:
        lines.append("barrier.cluster.arrive.release.aligned;")
    return "{\n" + "\n".join(lines) + "\nmov.f32 $0, sum;\n}"


@triton.constexpr_function
def _opening(ctas):
    """PTX: two boxes of shared memory, with a barrier each, that the other blocks write to; their address."""
    return f"""{{
.shared .align 16 .b8 boxes[{16 + 8 * ctas}];
.reg .pred first;
.reg .b32 thread, box;
mov.u32 thread, %tid.x;
setp.eq.u32 first, thread, 0;
mov.u32 box, boxes;
@first mbarrier.init.shared::cta.b64 [box], 1;
@first mbarrier.init.shared::cta.b64 [box+8], 1;
@first fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.release.aligned;
mov.u32 $0, box;
}}"""


@triton.constexpr_function
def _posting(ctas):
    """PTX: the sum as of ``_exchange``, by asynchronous stores; it waits for no other memory access of a block.

    A block's first threads send its number to one block each, whose barrier counts the bytes. Whoever writes a box
    again has had the number of the sum in between, which a block sends when all of it has read the former.
    """
    lines = [
        ".reg .pred first, sends, there;",
        ".reg .b32 thread, rank, turn, bar, box, phase, theirs, ring;",
        ".reg .f32 sum, part;",
        "mov.u32 thread, %tid.x;",
        "mov.u32 rank, %cluster_ctarank;",
        "and.b32 turn, $3, 1;",
        "shr.u32 phase, $3, 1;",
        "and.b32 phase, phase, 1;",
        "mad.lo.u32 bar, turn, 8, $2;",
        f"mad.lo.u32 box, turn, {4 * ctas}, $2;",
        "add.u32 box, box, 16;",
        "setp.eq.u32 first, thread, 0;",
        f"setp.lt.u32 sends, thread, {ctas};",
        f"@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {4 * ctas};",
        "mad.lo.u32 theirs, rank, 4, box;",
        "@sends mapa.shared::cluster.u32 theirs, theirs, thread;",
        "@sends mapa.shared::cluster.u32 ring, bar, thread;",
        "@sends st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [theirs], $1, [ring];",
        "again:",
        "mbarrier.try_wait.parity.shared::cta.b64 there, [bar], phase;",
        "@!there bra again;",
        "mov.f32 sum, 0f00000000;",
    ]
    for block in range(ctas):
        lines += [f"ld.shared.f32 part, [box+{4 * block}];", "add.f32 sum, sum, part;"]
    return "{\n" + "\n".join(lines) + "\nmov.f32 $0, sum;\n}"


@triton.jit
def _open_boxes(CTAS: tl.constexpr, POSTED: tl.constexpr):
    """The address of this block's boxes; ``_cluster_wait`` must follow before the first sum."""
    if POSTED and CTAS > 1 and not _interpreted:
        return tl.inline_asm_elementwise(_opening(CTAS), "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    return 0


@triton.jit
def _cluster_sum(parts, boxes, turn, CTAS: tl.constexpr, POSTED: tl.constexpr, FINAL: tl.constexpr = False):
    """The sum of ``parts`` [CTAS], of which each block holds one, for each block; ``turn`` counts a kernel's sums."""
    if _interpreted or CTAS == 1:
        return tl.broadcast_to(tl.sum(parts, axis=0)[None], [CTAS])
    if POSTED:
        return tl.inline_asm_elementwise(
            _posting(CTAS), "=f,r,r,r", [parts.to(tl.int32, bitcast=True), boxes, turn], dtype=tl.float32,
            is_pure=False, pack=1,
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        _exchange(CTAS, FINAL), "=f,f,r", [parts, (turn & 1) * 4], dtype=tl.float32, is_pure=False, pack=1
    )


@triton.jit
def _cluster_arrive(CTAS: tl.constexpr):
    """Announces that this block has read what it wanted of the others'."""
    if not _interpreted and CTAS > 1:
        tl.inline_asm_elementwise(
            "barrier.cluster.arrive.release.aligned; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _cluster_wait(CTAS: tl.constexpr):
    """Waits until every block has announced it."""
    if not _interpreted and CTAS > 1:
        tl.inline_asm_elementwise(
            "barrier.cluster.wait.acquire.aligned; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _columns(CTAS: tl.constexpr, WIDTH: tl.constexpr):
    """The columns of a row, a row of them for each block."""
    return tl.arange(0, CTAS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _load_row(ptr, row, stride, col, N: tl.constexpr):
    return tl.load(ptr + row * stride + col, mask=col < N, other=0.0).to(tl.float32)


@triton.jit
def _prefetch(ptr, row, stride, rows, CTAS: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr):
    """Asks for a row in L2, a line of 128 bytes at a time."""
    LINE: tl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth
    col = tl.arange(0, CTAS)[:, None] * WIDTH + tl.arange(0, WIDTH // LINE)[None, :] * LINE
    if not _interpreted:
        tl.inline_asm_elementwise(
            "{\n.reg .pred wanted;\nsetp.ne.s32 wanted, $2, 0;\n@wanted prefetch.global.L2 [$1];\nmov.b32 $0, 0;\n}",
            "=r,l,r",
            [ptr + row * stride + col, ((row < rows) & (col < N)).to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _load_weight(w_ptr, col, N: tl.constexpr, CASTING: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    w = tl.load(w_ptr + col, mask=col < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
    return _gamma(w, w_ptr.dtype.element_ty, CASTING, ZERO_CENTERED)


@triton.jit(do_not_specialize=["M"])
def _forward_cluster_kernel(
    x_ptr,  # [M, N]
    r_ptr,  # [M, N] or None
    w_ptr,  # [N] or None
    y_ptr,  # [M, N]
    s_ptr,  # [M, N] where there is a residual
    rstd_ptr,  # [M] fp32 or None
    M,
    x_stride,
    r_stride,
    y_stride,
    s_stride,
    eps,
    scale,
    N: tl.constexpr,
    CTAS: tl.constexpr,
    WIDTH: tl.constexpr,
    POSTED: tl.constexpr,
    CASTING: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    boxes = _open_boxes(CTAS, POSTED)
    row = tl.program_id(0).to(tl.int64)
    col = _columns(CTAS, WIDTH)
    s = _load_row(x_ptr, row, x_stride, col, N)
    s_dtype: tl.constexpr = x_ptr.dtype.element_ty if r_ptr is None else s_ptr.dtype.element_ty
    if r_ptr is not None:
        s = _add(s, _load_row(r_ptr, row, r_stride, col, N), scale, x_ptr.dtype.element_ty, s_dtype)
        tl.store(s_ptr + row * s_stride + col, s, mask=col < N)
    SUMS: tl.constexpr = 2 if CASTING == "none" and rstd_ptr is not None else 1
    squares = tl.sum(square(s, s_dtype, CASTING), axis=1)
    if POSTED:
        _cluster_wait(CTAS)
    squares = _cluster_sum(squares, boxes, 0, CTAS, POSTED, SUMS == 1)
    rstd = rstd_from(squares, eps, s_dtype, N, CASTING)
    if rstd_ptr is not None:
        exact = rstd
        if CASTING == "none":
            exact = tl.rsqrt(_cluster_sum(tl.sum(s * s, axis=1), boxes, 1, CTAS, POSTED, True) * (1.0 / N) + eps)
        tl.store(rstd_ptr + row + 0 * tl.arange(0, CTAS), exact)
    y = normalised(s, rstd[:, None], s_dtype, CASTING)
    if w_ptr is not None:
        y = y * _load_weight(w_ptr, col, N, CASTING, ZERO_CENTERED)
    tl.store(y_ptr + row * y_stride + col, round_to(y, y_ptr.dtype.element_ty), mask=col < N)
    if not POSTED:
        _cluster_wait(CTAS)


@triton.jit(do_not_specialize=["M"])
def _backward_cluster_kernel(
    dy_ptr,  # [M, N]
    ds_ptr,  # [M, N] or None: what else flows into the sum
    s_ptr,  # [M, N]
    w_ptr,  # [N] or None
    rstd_ptr,  # [M] fp32
    dx_ptr,  # [M, N] or None
    dr_ptr,  # [M, N] or None
    dw_ptr,  # [programs, N] fp32 or None: each program's share
    M,
    dy_stride,
    ds_stride,
    s_stride,
    dx_stride,
    dr_stride,
    scale,
    N: tl.constexpr,
    CTAS: tl.constexpr,
    WIDTH: tl.constexpr,
    RELOAD: tl.constexpr,
    AHEAD: tl.constexpr,
    POSTED: tl.constexpr,
    LONG: tl.constexpr,
    CASTING: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    program = tl.program_id(0)
    col = _columns(CTAS, WIDTH)
    dw = tl.zeros([CTAS, WIDTH], tl.float32)
    gamma = tl.full([CTAS, WIDTH], 1.0, tl.float32)
    if w_ptr is not None and not RELOAD:
        gamma = _load_weight(w_ptr, col, N, CASTING, ZERO_CENTERED)
    boxes = _open_boxes(CTAS, POSTED)
    if POSTED:
        _cluster_wait(CTAS)
    turn = 0
    for tile in tl.range(program, M, tl.num_programs(0), num_stages=1):
        row = tile.to(tl.int64) if LONG else tile
        s = _load_row(s_ptr, row, s_stride, col, N)
        dy = _load_row(dy_ptr, row, dy_stride, col, N)
        rstd = tl.load(rstd_ptr + row)
        if AHEAD:
            _prefetch(s_ptr, row + tl.num_programs(0), s_stride, M, CTAS, WIDTH, N)
            _prefetch(dy_ptr, row + tl.num_programs(0), dy_stride, M, CTAS, WIDTH, N)
        if dw_ptr is not None:
            dw += dy * (s * rstd)
        if dx_ptr is not None or dr_ptr is not None:
            if w_ptr is not None and RELOAD:
                gamma = _load_weight(w_ptr, col, N, CASTING, ZERO_CENTERED)
            g = dy * gamma
            products = _cluster_sum(tl.sum(g * s, axis=1), boxes, turn, CTAS, POSTED)
            turn += 1
            grad = rstd * (g - s * (products[:, None] * (rstd * rstd) * (1.0 / N)))
            if ds_ptr is not None:
                grad += _load_row(ds_ptr, row, ds_stride, col, N)
            if dx_ptr is not None:
                dx = grad if scale is None else grad * scale
                tl.store(dx_ptr + row * dx_stride + col, round_to(dx, dx_ptr.dtype.element_ty), mask=col < N)
            if dr_ptr is not None:
                tl.store(dr_ptr + row * dr_stride + col, round_to(grad, dr_ptr.dtype.element_ty), mask=col < N)
    if not POSTED:
        _cluster_arrive(CTAS)
    if dw_ptr is not None:
        tl.store(dw_ptr + program.to(tl.int64) * N + col, dw, mask=col < N)
    if not POSTED:
        _cluster_wait(CTAS)
