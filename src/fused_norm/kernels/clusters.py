"""Thread-block clusters: a sum over the blocks of one, which Triton cannot compile, and how many a device holds.

A kernel launched with ``num_ctas`` = CTAS computes tiles of CTAS lines, one of which lies in each block; what Triton
reduces along a line stays inside its block. A cluster is one program, in the grid as in ``tl.program_id``.

A block has two boxes of CTAS numbers, which take turns, and an mbarrier for each. For a sum, its first threads send its
number to one block each by ``st.async``, which writes it into a box there and then counts its bytes on the barrier
there, with release at cluster scope; who has waited for all of the bytes acquires what they count. That acquires shared
memory alone: at cluster scope any other acquire empties the L1 cache, and the weight is in it. Nor does it wait for the
blocks' stores to global memory, as a barrier of the cluster does.

A box is written again two sums later, by a block that has had everybody's number of the sum in between. A block sends
that one when all of its warps have read the box: before it comes the reduction inside the block, where they wait for
each other. Hence at least two warps, and columns of its own for each: 256, in vectors of 16 bytes.

No barrier is needed at the end: nobody reads from another block, and a block has waited for all that is sent to it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import triton
import triton.language as tl

from .triton_utils import interpreted


def opening(ctas: int) -> str:
    """PTX: makes a block's boxes, 16 bytes behind their address, and announces them to the cluster."""
    return f"""{{
.shared .align 16 .b8 boxes[{16 + 8 * ctas}];
.reg .pred first;
.reg .b32 thread;
mov.u32 thread, %tid.x;
setp.eq.u32 first, thread, 0;
mov.u32 $0, boxes;
@first mbarrier.init.shared::cta.b64 [$0], 1;
@first mbarrier.init.shared::cta.b64 [$0+8], 1;
@first fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
}}"""


def exchange(ctas: int) -> str:
    """PTX: the sum of every block's number $1, in the order of the blocks; $2 are the boxes, $3 counts the sums."""
    adding = [f"ld.shared.f32 part, [box+{4 * block}];\nadd.f32 sum, sum, part;" for block in range(ctas)]
    return f"""{{
.reg .pred first, sends, there;
.reg .b32 thread, rank, turn, phase, bar, box, their_box, their_bar;
.reg .f32 sum, part;
mov.u32 thread, %tid.x;
mov.u32 rank, %cluster_ctarank;
and.b32 turn, $3, 1;
shr.u32 phase, $3, 1;
and.b32 phase, phase, 1;
mad.lo.u32 bar, turn, 8, $2;
mad.lo.u32 box, turn, {4 * ctas}, $2;
add.u32 box, box, 16;
setp.eq.u32 first, thread, 0;
setp.lt.u32 sends, thread, {ctas};
@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {4 * ctas};
mad.lo.u32 their_box, rank, 4, box;
@sends mapa.shared::cluster.u32 their_box, their_box, thread;
@sends mapa.shared::cluster.u32 their_bar, bar, thread;
@sends st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [their_box], $1, [their_bar];
again:
mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 there, [bar], phase;
@!there bra again;
fence.acquire.sync_restrict::shared::cluster.cluster;
mov.f32 sum, 0f00000000;
{chr(10).join(adding)}
mov.f32 $0, sum;
}}"""


@triton.jit
def open_boxes(OPENING: tl.constexpr):
    """The address of this block's boxes, once every block of the cluster has some."""
    if interpreted:
        return 0
    return tl.inline_asm_elementwise(OPENING, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def sum_over_blocks(parts, boxes, turn, CTAS: tl.constexpr, EXCHANGE: tl.constexpr):
    """The sum of ``parts`` [CTAS] in every block, [CTAS]; ``turn`` is the number of sums before this one."""
    if interpreted:
        return tl.broadcast_to(tl.sum(parts, axis=0)[None], [CTAS])
    bits = parts.to(tl.int32, bitcast=True)
    return tl.inline_asm_elementwise(EXCHANGE, "=f,r,r,r", [bits, boxes, turn], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def prefetch_row(ptr, row, stride, M, CTAS: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr):
    """Asks for a row, if there is one, to be brought to L2, a line of 128 bytes for each request."""
    LINE: tl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth
    col = tl.arange(0, CTAS)[:, None] * WIDTH + tl.arange(0, WIDTH // LINE)[None, :] * LINE
    if not interpreted:
        tl.inline_asm_elementwise(
            "{\n.reg .pred wanted;\nsetp.ne.s32 wanted, $2, 0;\n@wanted prefetch.global.L2 [$1];\nmov.b32 $0, 0;\n}",
            "=r,l,r",
            [ptr + row * stride + col, ((row < M) & (col < N)).to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


class _Attribute(ctypes.Structure):
    """The driver's ``CUlaunchAttribute``."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """The driver's ``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("number", ctypes.c_uint),
    )


_CLUSTER_DIMENSION = 4
"""CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION."""


def resident_clusters(compiled: Any) -> int | None:
    """How many clusters of a loaded kernel the current device runs at once; None where the driver does not say.

    The blocks of a cluster share a GPC, whose processors need not be a multiple of them: some stay empty.
    """
    metadata = compiled.metadata
    attribute = _Attribute(id=_CLUSTER_DIMENSION)
    attribute.value[:3] = [metadata.num_ctas, 1, 1]
    config = _Config(shared_bytes=metadata.shared, attributes=ctypes.pointer(attribute), number=1)
    config.grid[:] = [metadata.num_ctas, 1, 1]
    config.block[:] = [32 * metadata.num_warps, 1, 1]
    found = ctypes.c_int(0)
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveClusters
    except (OSError, AttributeError):
        return None
    failed = ask(ctypes.byref(found), ctypes.c_void_p(compiled.function), ctypes.byref(config))
    return None if failed else found.value
