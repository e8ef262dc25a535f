"""A LoRA adapter, whose output is added to that of its linear, and a linear together with its adapter.

An adapter takes rows of K elements to rows of r, ``h = x @ a^T``, and those to rows of N, ``h @ b^T``. Products are of
numbers in h's dtype, to which wider ones are rounded first, and are summed in fp32 and rounded to it. All that is
written is contiguous.

To the alphabet of ``triton.language`` come the gradients ``dh``, ``da`` and ``db``, and R, which is r, or the next size
above it that tiles can have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import Unsupported, check_rows, check_scale, why_other_dtype
from .backward import BackwardArguments, BackwardImpl, Scalars, Tensors
from .operator import Operator, Results
from .plain_calls import is_grad_needed
from .plans import Device, TilePlan, next_power_of_2
from .reference import wide_dtype
from .triton.call import Call
from .triton.devices import device_props
from .triton.language import interpreted, round_to, rows_of
from .triton.memory import is_long, promoted
from .triton.torch_calls import Copy, Product


@triton.jit
def _load(memory, row, col, live, scale, dtype: tl.constexpr):
    """A tile rounded to ``dtype``, then times the scale and rounded again, to be multiplied with another tile."""
    ptr, row_stride, col_stride = memory
    value = tl.load(ptr + row[:, None] * row_stride + col[None, :] * col_stride, mask=live, other=0.0)
    value = _operand(value, dtype)
    if scale is not None:
        value = _operand(value.to(tl.float32) * scale, dtype)
    return value


@triton.jit
def _load_dropped(x_ptr, x_stride, mask_ptr, row, col, live, scale, N, dtype: tl.constexpr):
    """A tile of x times the scale and the mask [M, N], rounded once; a number that is not finite gives NaN."""
    if mask_ptr is None:
        value = _load((x_ptr, x_stride, 1), row, col, live, scale, dtype)
    else:
        value = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=live, other=0.0).to(tl.float32)
        value *= tl.load(mask_ptr + row[:, None] * N + col[None, :], mask=live, other=0).to(tl.float32)
        if scale is not None:
            value *= scale
        value = _operand(value, dtype)
    return value


@triton.jit
def _operand(value, dtype: tl.constexpr):
    """Values rounded to ``dtype`` as ``tl.dot`` takes them; Triton's interpreter multiplies no bf16."""
    if interpreted:
        return round_to(value.to(tl.float32), dtype)
    return value.to(dtype)


@triton.jit
def _copy_rounded(w_ptr, w_row_stride, w_col_stride, copy_ptr, K, r, SIZE: tl.constexpr, dtype: tl.constexpr):
    """Write a factor [K, r] to [r, K], rounded to ``dtype``; each program of the grid's first axis copies a part.

    K is the factor's first dimension and r its second, whatever they mean.
    """
    for start in range(tl.program_id(0) * SIZE, K * r, tl.num_programs(0) * SIZE):
        at = start + tl.arange(0, SIZE)
        value = tl.load(w_ptr + at % K * w_row_stride + at // K * w_col_stride, mask=at < K * r, other=0.0)
        tl.store(copy_ptr + at, _operand(value, dtype), mask=at < K * r)


@triton.jit(do_not_specialize=["M"])
def _narrow_kernel(
    x_ptr,  # [M, K]
    w_ptr,  # [K, r], by its strides
    h_ptr,  # [M, r]
    copy_ptr,  # [r, K] or None: w, rounded to h's dtype
    mask_ptr,  # [M, K] bool, or None
    kept_ptr,  # [M, K] or None: x times the mask and the scale, in h's dtype
    M,
    K, r, x_stride, w_row_stride, w_col_stride,
    scale,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, INT64: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """``h = round(x * mask * scale) @ w``."""
    dtype: tl.constexpr = h_ptr.dtype.element_ty
    row = rows_of(tl.program_id(0), ROWS, INT64)
    rank = tl.arange(0, R)
    h = tl.zeros([ROWS, R], tl.float32)
    for start in range(0, K, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x_live = (row < M)[:, None] & (col < K)[None, :]
        x = _load_dropped(x_ptr, x_stride, mask_ptr, row, col, x_live, scale, K, dtype)
        if kept_ptr is not None:
            tl.store(kept_ptr + row[:, None] * K + col[None, :], x, mask=x_live)
        live = (col < K)[:, None] & (rank < r)[None, :]
        h = tl.dot(x, _load((w_ptr, w_row_stride, w_col_stride), col, rank, live, None, dtype), h)
    tl.store(
        h_ptr + row[:, None] * r + rank[None, :], round_to(h, dtype), mask=(row < M)[:, None] & (rank < r)[None, :]
    )
    if copy_ptr is not None:
        _copy_rounded(w_ptr, w_row_stride, w_col_stride, copy_ptr, K, r, COPIED, dtype)


@triton.jit(do_not_specialize=["M"])
def _widen_kernel(
    h_ptr,  # [M, r]
    w_ptr,  # [r, N], by its strides
    base_ptr,  # [M, N] or None
    y_ptr,  # [M, N]
    copy_ptr,  # [N, r] or None: w, rounded to h's dtype
    mask_ptr,  # [M, N] bool, or None
    M,
    N, r, w_row_stride, w_col_stride, base_stride,
    scale,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, INT64: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """``y = base + (h @ w) * scale * mask``, the product rounded, and what follows too: with a mask, to y's dtype."""
    dtype: tl.constexpr = h_ptr.dtype.element_ty
    row = rows_of(tl.program_id(0), ROWS, INT64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rank = tl.arange(0, R)
    live = (row < M)[:, None] & (col < N)[None, :]
    h = _load((h_ptr, r, 1), row, rank, (row < M)[:, None] & (rank < r)[None, :], None, dtype)
    w = _load((w_ptr, w_row_stride, w_col_stride), rank, col, (rank < r)[:, None] & (col < N)[None, :], None, dtype)
    y = round_to(tl.dot(h, w), dtype)
    if mask_ptr is not None:
        y *= tl.load(mask_ptr + row[:, None] * N + col[None, :], mask=live, other=0).to(tl.float32)
        if scale is not None:
            y *= scale
        y = round_to(y, y_ptr.dtype.element_ty)
    elif scale is not None:
        y = round_to(y * scale, dtype)
    if base_ptr is not None:
        y += tl.load(base_ptr + row[:, None] * base_stride + col[None, :], mask=live, other=0.0).to(tl.float32)
    tl.store(y_ptr + row[:, None] * N + col[None, :], round_to(y, y_ptr.dtype.element_ty), mask=live)
    if copy_ptr is not None:
        block = tl.program_id(1)
        if block == 0:
            _copy_rounded(w_ptr, w_row_stride, w_col_stride, copy_ptr, r, N, COPIED, dtype)


@triton.jit(do_not_specialize=["M", "share"])
def _partials_kernel(
    h_ptr,  # [M, r]
    dy_ptr,  # [M, N] or None
    db_ptr,  # [programs, N, r] fp32: partials; None if dy is None, and N is 0 then
    dh_ptr,  # [M, r] or None
    x_ptr,  # [M, K] or None, as dh
    da_ptr,  # [programs, K, r] fp32: partials; None if x is None, and K is 0 then
    mask_ptr,  # [M, K] bool, or None
    M, share,
    N, K, r, dy_stride, x_stride,
    scale, x_scale,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """Partials of ``db = round(dy * scale)^T @ h`` and ``da^T = round(x * mask * x_scale)^T @ dh``, each of ``share``
    rows."""
    start = tl.program_id(0) * share
    block, blocks = tl.program_id(1), tl.cdiv(N, BLOCK)
    if block < blocks:
        if db_ptr is not None:
            _share(dy_ptr, None, h_ptr, db_ptr, start, share, block, M, N, r, dy_stride, scale, ROWS, BLOCK, R, INT64)
    else:
        if da_ptr is not None:
            _share(
                x_ptr, mask_ptr, dh_ptr, da_ptr, start, share, block - blocks, M, K, r, x_stride, x_scale,
                ROWS, BLOCK, R, INT64,
            )  # fmt: skip


@triton.jit
def _share(
    wide_ptr, mask_ptr, narrow_ptr, share_ptr, start, share, block, M, N, r, stride, scale,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = narrow_ptr.dtype.element_ty
    col = block * BLOCK + tl.arange(0, BLOCK)
    rank = tl.arange(0, R)
    total = tl.zeros([BLOCK, R], tl.float32)
    for first in range(start, tl.minimum(start + share, M), ROWS):
        row = rows_of(first // ROWS, ROWS, INT64)
        live = (row < M)[:, None] & (col < N)[None, :]
        wide = _load_dropped(wide_ptr, stride, mask_ptr, row, col, live, scale, N, dtype)
        narrow = _load((narrow_ptr, r, 1), row, rank, (row < M)[:, None] & (rank < r)[None, :], None, dtype)
        total = tl.dot(tl.trans(wide), narrow, total)
    at = share_ptr + tl.program_id(0) * N * r + col[:, None] * r + rank[None, :]
    tl.store(at, total, mask=(col < N)[:, None] & (rank < r)[None, :])


@triton.jit(do_not_specialize=["programs"])
def _sum_kernel(
    h_ptr,  # of the dtype that products are rounded to
    db_partials_ptr,  # [programs, N, r] fp32, or None
    db_ptr,  # [N, r], or None
    da_partials_ptr,  # [programs, K, r] fp32, or None
    da_ptr,  # [r, K], or None
    programs,
    N, K, r,
    BLOCK: tl.constexpr,
):  # fmt: skip
    block, blocks = tl.program_id(0), tl.cdiv(N * r, BLOCK)
    dtype: tl.constexpr = h_ptr.dtype.element_ty
    if block < blocks:
        if db_ptr is not None:
            at = block * BLOCK + tl.arange(0, BLOCK)
            total = _sum(db_partials_ptr, at, N * r, programs, BLOCK)
            tl.store(db_ptr + at, round_to(round_to(total, dtype), db_ptr.dtype.element_ty), mask=at < N * r)
    else:
        if da_ptr is not None:
            at = (block - blocks) * BLOCK + tl.arange(0, BLOCK)
            total = _sum(da_partials_ptr, at, K * r, programs, BLOCK)
            place = at % r * K + at // r
            tl.store(da_ptr + place, round_to(round_to(total, dtype), da_ptr.dtype.element_ty), mask=at < K * r)


@triton.jit
def _sum(partials_ptr, at, size, programs, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for program in range(programs):
        total += tl.load(partials_ptr + program * size + at, mask=at < size, other=0.0)
    return total


HIGHEST_RANK = 256
"""The rank up to which tiles fit into registers and shared memory."""

_MAX_PARTIALS = 16
"""Parts at most that rows are cut into for the gradients of weights: a partial is as large as the gradient."""

_COPIED = 1024
"""Elements of a factor that a program copies at a time."""

_SUMMED = 256
"""Elements of those that one program sums over all parts."""

_FEW_ROWS = 4096
"""Up to so many rows tiles of products with an adapter's factors have fewer of them: more programs run at once."""

_TWO_TILES = 96 * 1024
"""Bytes of two tiles of x and of a factor in fp32: while one is multiplied, the next is loaded."""


def _padded_rank(rank: int) -> int:
    """The rank of tiles that hold ``rank``."""
    return max(16, next_power_of_2(rank))


def _lora_plan(
    product: Literal["narrow", "widen", "gradients"],
    rows: int,
    rank: int,
    device: Device,
    h_bytes: int,
    x_bytes: int = 2,
) -> TilePlan:
    """The launch of a product: to rows of the rank, from these to rows of outputs, or the gradients of the factors.

    ``h_bytes`` and ``x_bytes`` are those of an element of h and of x. The other side of a tile of ``block`` columns is
    the rank; rows are cut into parts for about ``programs`` programs.

    GPUs for data centres multiply 16 bits from shared memory, of which they have more than 200 KiB, and keep their
    registers for large tiles: on an H200 rank 128 at 16384 x 4096 takes 70 us instead of 138, the gradients of rank 256
    take 175 instead of 272. On other GPUs such tiles spill.
    """
    padded = _padded_rank(rank)
    is_large = h_bytes == 2 and device.shared_memory > 200 * 1024
    if product == "narrow" and is_large:
        tile_rows = 32 if rows <= _FEW_ROWS else 64 if rows <= 2 * _FEW_ROWS or rank <= 32 else 128
        widest = 256 if rows <= 2 * _FEW_ROWS else 128
        fitting = _TWO_TILES // (2 * (tile_rows * x_bytes + padded * 4))
        block = max(16, min(widest, next_power_of_2(fitting + 1) // 2))
        return TilePlan(tile_rows, block, 8 if tile_rows == 128 or tile_rows * padded > 8192 else 4)
    if product == "narrow":
        return TilePlan(64 if rows > _FEW_ROWS else 16, min(128, max(16, 2048 // padded)), 4)
    if product == "widen":
        block = 128 if rank <= 64 else 64
        return TilePlan(128, block, 8) if rank > 64 and is_large else TilePlan(64, block, 4)
    if rank > 32 and is_large:
        return TilePlan(64, 128, 8, programs=256)
    return TilePlan(max(16, min(64, 4096 // padded)), 64, 4, programs=1024)


def launch_narrow(
    call: Call,
    x: Tensor,
    w: Tensor,
    strides: tuple[int, ...],
    h: Tensor,
    scale: float = 1,
    copy: Tensor | None = None,
    mask: Tensor | None = None,
    kept: Tensor | None = None,
) -> None:
    """Write ``h`` [..., r]: ``x`` [..., K] times the scale and the mask, and that times ``w`` [K, r] of these strides.

    ``copy`` [r, K] gets w, rounded to h's dtype. ``mask``: of x's shape, bool, contiguous. ``kept`` [..., K] gets x
    times the scale and the mask, in h's dtype.
    """
    (_, arranged), (_, stride) = call.as_strided_rows(h, x)
    rows, rank, width = h.shape[:-1].numel(), h.shape[-1], x.shape[-1]
    plan = _lora_plan("narrow", rows, rank, device_props(h.device), h.element_size(), x.element_size())
    tile = _tile(plan, rank, arranged, h) | {"COPIED": _COPIED}
    numbers = rows, width, rank, stride, *strides, _factor(scale)
    call.launch(
        _narrow_kernel, (-(-rows // plan.rows), 1), (arranged, w, h, copy, mask, kept), numbers, tile, warps=plan.warps
    )


def launch_widen(
    call: Call,
    h: Tensor,
    w: Tensor,
    strides: tuple[int, ...],
    base: Tensor | None,
    y: Tensor,
    scale: float = 1,
    copy: Tensor | None = None,
    mask: Tensor | None = None,
) -> None:
    """Write ``y`` [..., N]: ``h`` [..., r] times ``w`` [r, N] of these strides, the scale and the mask, and ``base``.

    ``copy`` [N, r] gets w, rounded to h's dtype. ``mask``: of y's shape, bool, contiguous.
    """
    (_, arranged), (_, base_stride) = call.as_strided_rows(h, base)
    rows, rank, width = h.shape[:-1].numel(), h.shape[-1], y.shape[-1]
    plan = _lora_plan("widen", rows, rank, device_props(h.device), h.element_size())
    tile = _tile(plan, rank, arranged, y, h) | {"COPIED": _COPIED}
    numbers = rows, width, rank, *strides, base_stride, _factor(scale)
    grid = -(-rows // plan.rows), -(-width // plan.block)
    call.launch(_widen_kernel, grid, (h, w, arranged, y, copy, mask), numbers, tile, warps=plan.warps)


def launch_weights(
    call: Call,
    h: Tensor,
    of_b: tuple[Tensor, Tensor | None],
    of_a: tuple[Tensor, Tensor | None, Tensor | None],
    scale: float,
    x_scale: float = 1,
    mask: Tensor | None = None,
) -> None:
    """Write the gradients of one weight or both, which are contiguous; h is [..., r].

    ``of_b``: dy [..., N], and db [N, r], of it times the scale and h, or None. ``of_a``: x [..., K], and dh [..., r]
    and da [r, K], of both, or None for these. ``x_scale``: that of x. ``mask``: of x's shape, bool, contiguous; x is
    multiplied by it.
    """
    (dy, db), (x, dh, da) = of_b, of_a
    arranged, (_, dy_stride, x_stride) = call.as_strided_rows(h, None if db is None else dy, None if da is None else x)
    _, dy_rows, x_rows = arranged
    rows, rank = h.shape[:-1].numel(), h.shape[-1]
    width, inputs = 0 if db is None else len(db), 0 if da is None else da.shape[1]
    plan = _lora_plan("gradients", rows, rank, device_props(h.device), h.element_size())
    blocks = -(-width // plan.block) + -(-inputs // plan.block)
    parts = max(1, min(_MAX_PARTIALS, plan.programs // blocks))
    share = plan.rows * -(-rows // (parts * plan.rows))
    programs = -(-rows // share)
    db_partials, da_partials = (
        None if dw is None else call.empty(h, (programs, dw.numel()), dtype=torch.float32) for dw in (db, da)
    )
    numbers = rows, share, width, inputs, rank, dy_stride, x_stride, _factor(scale), _factor(x_scale)
    read = h, dy_rows, db_partials, None if da is None else dh, x_rows, da_partials, None if da is None else mask
    tile = _tile(plan, rank, dy_rows, x_rows, h)
    call.launch(_partials_kernel, (programs, blocks), read, numbers, tile, warps=plan.warps)
    grid = -(-width * rank // _SUMMED) + -(-inputs * rank // _SUMMED), 1
    tensors, sizes = (h, db_partials, db, da_partials, da), (programs, width, inputs, rank)
    call.launch(_sum_kernel, grid, tensors, sizes, {"BLOCK": _SUMMED}, warps=4)


def _tile(plan: TilePlan, rank: int, *tensors: Tensor | None) -> dict[str, int]:
    """The constants of a kernel's tiles."""
    is_far = is_long([t for t in tensors if t is not None])
    return {"R": _padded_rank(rank), "ROWS": plan.rows, "BLOCK": plan.block, "INT64": is_far}


def _factor(scale: float) -> float | None:
    return None if scale == 1 else float(scale)


class LoraAdd(Operator):
    """``lora_add`` as an operator."""

    name = "lora_add"
    tensors = "Tensor base, Tensor x, Tensor a, Tensor b"
    options = "float scale"
    outputs = ("y",)
    other_shapes = ("x", "a", "b")
    takes_dtensors = False
    extra_saved = ("h",)
    copies: ClassVar[Mapping[str, Sequence[str]]] = {"a": ("x",), "b": ("x", "a")}
    saved = "Tensor x, Tensor a, Tensor b, Tensor h"
    saved_scalars = f"{options}, ScalarType a_dtype, ScalarType b_dtype"
    has_products = True
    gradients = ("dbase", "dx", "da", "db")

    def check_options(self, *arguments: Any) -> Unsupported | None:
        base, x, a, b, scale = arguments
        refusal = check_rows("x", x) or check_scale(scale)
        have_same_rows, are_matrices = base.shape[:-1] == x.shape[:-1], a.dim() == b.dim() == 2
        if refusal is not None or (
            have_same_rows and are_matrices and (a.shape[1], *b.shape) == (x.shape[-1], base.shape[-1], len(a))
        ):
            return refusal
        shapes = ", ".join(str(tuple(t.shape)) for t in (base, x, a, b))
        return Unsupported(
            f"base, x, a and b must have shapes [..., N], [..., K], [r, K] and [N, r], not {shapes}", ValueError
        )

    def why_reference_only(self, *arguments: Any) -> Unsupported | None:
        *tensors, scale = arguments
        _, x, a, b = tensors
        if not all(t.numel() for t in tensors):
            return Unsupported("")
        if x.dtype == torch.float32:
            return Unsupported("the input is float32; only 16-bit products are fused: use bf16 autocast")
        return why_adapter_unsupported(a, b, scale)

    def why_unlike_eager(self, *arguments: Any) -> str | None:
        base, x, *_ = arguments
        if base.dtype not in (x.dtype, torch.float32):
            return why_other_dtype("x", "base", x, base)
        return None if base.is_contiguous() else "base is not contiguous"

    def reads_copy(self, weight: Tensor, arguments: Sequence[Any]) -> bool:
        x = arguments[1]
        return x is not None and weight.dtype != x.dtype

    def reference(self, *arguments: Any) -> Tensor:
        base, x, a, b, scale = arguments
        added: Tensor = (x @ a.to(x.dtype).t()) @ b.to(x.dtype).t() * scale
        return added if base is None else base + added  # the backward has no base

    def forward(self, call: Call, *arguments: Any, training: bool, copied: Sequence[str] = ()) -> Results:
        base, x, a, b, scale = arguments
        h = call.empty(x, (*x.shape[:-1], len(a)))
        copies = [call.empty_weight_like(w, name in copied, x.dtype) for name, w in (("a", a), ("b", b))]
        call.then(launch_narrow, x, a, a.stride()[::-1], h, 1.0, copies[0])
        y = self.output_of(call, base, h, b, scale, copy=copies[1])
        return y, h if training else None, *copies

    def output_of(
        self, call: Call, base: Tensor, h: Tensor, b: Tensor, scale: float, *, copy: Tensor | None = None
    ) -> Tensor:
        """The output for rows of ``h = x @ a^T``; ``copy``: b, rounded to h's dtype, is written there."""
        y = call.empty(base, base.shape, dtype=promoted(base.dtype, h.dtype))
        call.then(launch_widen, h, b, b.stride()[::-1], base, y, scale, copy)
        return y

    def compute_grads(self, impl: BackwardImpl, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (dy,), (need_dbase, *others) = given.incoming, given.needed
        grads = super().compute_grads(impl, given._replace(needed=(False, *others)))
        return (dy if need_dbase else None, *grads[1:])

    def backward(self, call: Call, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (dy,), (x, a, b, h), (scale, a_dtype, b_dtype) = given.incoming, given.saved, given.saved_scalars
        _, need_dx, need_da, need_db = given.needed
        dh = call.empty(h, h.shape) if need_dx or need_da else None
        dx = call.empty(x, x.shape) if need_dx else None
        da, db = call.empty_weight_like(a, need_da, a_dtype), call.empty_weight_like(b, need_db, b_dtype)
        if dh is not None:
            call.then(launch_narrow, dy, b, b.stride(), dh, scale)
        if dh is not None and dx is not None:
            call.then(launch_widen, dh, a, a.stride(), None, dx, 1.0)
        if need_da or need_db:
            call.then(launch_weights, h, (dy, db), (x, dh, da), scale)
        return None, dx, da, db


def check_mask(mask: Any, x: Tensor) -> Unsupported | None:
    """Check the mask of the dropout of x."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        return Unsupported("mask must be a tensor of torch.bool", TypeError)
    if mask.shape != x.shape or mask.device != x.device:
        return Unsupported(f"mask must have x's shape {tuple(x.shape)}, not {tuple(mask.shape)}", ValueError)
    return None


def why_adapter_unsupported(a: Tensor, b: Tensor, scale: float) -> Unsupported | None:
    """Refuse the factors and the scale of an adapter that kernels cannot compute."""
    if len(a) > HIGHEST_RANK:
        return Unsupported(f"a rank of {len(a)} is more than {HIGHEST_RANK}")
    if not abs(scale) <= torch.finfo(torch.float32).max:
        return Unsupported(f"a scale of {scale} is no finite float32")
    if is_long([a, b]):
        return Unsupported("a or b has more elements than 32 bits count")
    return None


class Options(NamedTuple):
    """The options of a call of ``LoraLinear``, or of an operator that derives from it.

    Attributes:
        factor: that of the adapter's output.
        drop_factor, drop_factor_back: those of dropout, of numbers and of gradients.
        dtype: that of products.
        y_dtype: that of the sum.
        block: how many weights share a scale, if they have 4 bits.
    """

    factor: float
    drop_factor: float
    drop_factor_back: float
    dtype: torch.dtype
    y_dtype: torch.dtype
    block: int = 0


class LoraLinear(Operator):
    """``y = x @ w^T + bias + (adapter_x @ a^T @ b^T) * factor``, the weight w [N, K] and the bias [N] frozen.

    All products are of ``dtype``, of 16 bits, to which float32 is rounded first. The first product, what the factor
    makes of the second, and the sum are rounded as PyTorch's linears and PEFT's layers round them. ``adapter_x`` is
    what the adapter reads: x itself, or one with a gradient of its own. With a mask, dropout is applied to it first,
    ``adapter_x * mask * drop_factor``, and its gradient is multiplied by the mask and ``drop_factor_back``, which
    PyTorch rounds otherwise than ``drop_factor``.
    """

    name = "lora_linear"
    weight_names: ClassVar[Sequence[str]] = ("w",)
    """The tensors that the weight is made of."""
    tensors = "Tensor adapter_x, Tensor x, Tensor a, Tensor b, Tensor w, Tensor? bias, Tensor? mask"
    options = "float factor, float drop_factor, float drop_factor_back, ScalarType dtype"
    outputs: ClassVar[tuple[str, ...]] = ("y",)
    other_shapes: ClassVar[tuple[str, ...]] = ("x", "a", "b", "w", "bias")
    other_rules: ClassVar[tuple[str, ...]] = ("mask",)
    takes_dtensors = False
    extra_saved = ("h",)
    copies: ClassVar[Mapping[str, Sequence[str]]] = {
        "adapter_x": ("a",),
        "a": ("adapter_x",),
        "b": ("adapter_x", "a"),
        "w": ("x",),
    }
    unhooked: ClassVar[tuple[str, ...]] = ("bias",)
    saved = "Tensor adapter_x, Tensor? mask, Tensor a, Tensor b, Tensor w, Tensor h, Tensor? bias"
    saved_scalars = (
        "float factor, float drop_factor, float drop_factor_back, ScalarType x_dtype, ScalarType? adapter_x_dtype,"
        " ScalarType a_dtype, ScalarType b_dtype"
    )
    has_products = True
    gradients = ("dadapter_x", "dx", "da", "db")
    sums_gradients: ClassVar[bool] = False
    """If the adapter reads x itself, the backward sums both of its gradients; otherwise autograd does.

    Other linears may read x, and autograd sums all in the order of stock code, which differs in 16 bits.
    """

    def options_of(self, arguments: Sequence[Any]) -> Options:
        """The options among the arguments of a call."""
        factor, drop_factor, drop_factor_back, dtype = arguments[self.tensor_count :]
        return Options(factor, drop_factor, drop_factor_back, dtype, dtype)

    def has_shape(self, weight: Tensors, shape: tuple[int, int]) -> bool:
        """Return whether a weight, by the tensors that it is made of, is a matrix of this shape."""
        (w,) = weight
        return w is not None and w.shape == shape

    def why_weight_unsupported(self, weight: Tensors, options: Options) -> Unsupported | None:
        """Refuse a weight that kernels cannot read."""
        (w,) = weight
        assert w is not None
        return (
            why_dtype_unsupported(options.dtype, {"w": w}) if w.is_contiguous() else Unsupported("w is not contiguous")
        )

    def matrix(self, call: Call, weight: Tensors, block: int, shape: tuple[int, int], like: Tensor) -> Tensor:
        """The weight as a matrix of this shape, of the dtype of ``like``."""
        (w,) = weight
        assert w is not None
        return cast(call, w, like.dtype)

    def reference_matrix(self, weight: Tensors, block: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """As ``matrix``, by PyTorch's own operators."""
        (w,) = weight
        assert w is not None
        return w.to(dtype)

    def check_options(self, *arguments: Any) -> Unsupported | None:
        adapter_x, x, a, b, *weight, bias, mask = arguments[: self.tensor_count]
        fit = x.shape == adapter_x.shape and a.dim() == b.dim() == 2 and len(a) == b.shape[-1]
        fit = fit and a.shape[1] == x.shape[-1] and (bias is None or bias.shape == b.shape[:1])
        if not fit or not self.has_shape(weight, (len(b), a.shape[1])):
            shapes = ", ".join(str(tuple(t.shape)) for t in (adapter_x, x, a, b, *weight, bias) if t is not None)
            return Unsupported(
                "adapter_x, x, a, b, weight and bias must have shapes [..., K], [..., K], [r, K], [N, r], [N, K]"
                f" and [N], not {shapes}",
                ValueError,
            )
        return check_scale(self.options_of(arguments).factor) or (None if mask is None else check_mask(mask, adapter_x))

    def why_reference_only(self, *arguments: Any) -> Unsupported | None:
        adapter_x, x, a, b, *weight, bias, mask = arguments[: self.tensor_count]
        options = self.options_of(arguments)
        if not all(tensor.numel() for tensor in (x, a, b)) or not (mask is None or mask.is_contiguous()):
            return Unsupported("")
        if is_grad_needed((*weight, bias)):
            return Unsupported("its weight or bias is trained")
        factors = {"x": x, "adapter_x": adapter_x, "a": a, "b": b, **({} if bias is None else {"bias": bias})}
        refusal = why_dtype_unsupported(options.dtype, factors) or self.why_weight_unsupported(weight, options)
        return refusal or why_adapter_unsupported(a, b, options.factor)

    def why_unlike_eager(self, *arguments: Any) -> str | None:
        return why_copied_first(zip(("adapter_x", "x"), arguments, strict=False))

    def reads_copy(self, weight: Tensor, arguments: Sequence[Any]) -> bool:
        return weight.dtype == torch.float32  # products are of 16 bits

    def sources(self, arguments: Sequence[Any], saved: Tensors) -> list[tuple[int, int]]:
        # A context that held x itself would keep it from being freed: see ``reference_backward``.
        x = self.tensor_names.index("adapter_x")
        return [(at, source) for at, source in super().sources(arguments, saved) if source != x]

    def save(self, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[Tensors, Scalars]:
        """As ``Operator.save``; if x gets the sum of both gradients, the dtype of adapter_x is None."""
        saved, scalars = super().save(arguments, results)
        is_summed = self.sums_gradients and arguments[0] is arguments[1]
        return (saved, (*scalars[:4], None, *scalars[5:])) if is_summed else (saved, scalars)

    def reference(self, *arguments: Any) -> Any:
        adapter_x, x, a, b, *weight, bias, mask = arguments[: self.tensor_count]
        options = self.options_of(arguments)
        dtype = options.dtype
        w = self.reference_matrix(weight, options.block, (len(b), a.shape[1]), dtype)
        base = torch.nn.functional.linear(x.to(dtype), w, None if bias is None else bias.to(dtype))
        read = adapter_x if mask is None else apply_dropout(adapter_x, mask, options.drop_factor)
        added = LORA_ADD.reference(None, read.to(dtype), a, b, options.factor)
        return base.to(options.y_dtype) + added if len(self.outputs) == 1 else (base, added)

    def forward(self, call: Call, *arguments: Any, training: bool, copied: Sequence[str] = ()) -> Results:
        adapter_x, x, a, b, *weight, bias, mask = arguments[: self.tensor_count]
        options = self.options_of(arguments)
        dtype = options.dtype
        h = call.empty(x, (*x.shape[:-1], len(a)), dtype=dtype)
        copies = [call.empty_weight_like(w, name in copied, dtype) for name, w in (("a", a), ("b", b))]
        narrow = cast(call, x, dtype)
        read, adapter_copy = adapter_x, None
        if adapter_x is x and mask is None:
            read = narrow
            if "adapter_x" in copied and narrow is not x:
                adapter_copy = narrow
        elif "adapter_x" in copied and adapter_x.dtype != dtype:
            adapter_copy = call.empty(x, x.shape, dtype=dtype)
        kept = None if adapter_copy is narrow else adapter_copy
        drop_factor = 1.0 if mask is None else options.drop_factor
        call.then(launch_narrow, read, a, a.stride()[::-1], h, drop_factor, copies[0], mask, kept)
        w = self.matrix(call, weight, options.block, (len(b), x.shape[-1]), narrow)
        outputs = self.outputs_of(call, narrow, h, b, w, bias, options, copy=copies[1])
        if "w" in self.tensor_names:
            copies.append(w if "w" in copied and w is not weight[0] else None)
        return *outputs, h if training else None, adapter_copy, *copies

    def outputs_of(
        self,
        call: Call,
        x: Tensor,
        h: Tensor,
        b: Tensor,
        w: Tensor,
        bias: Tensor | None,
        options: Options,
        *,
        copy: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the outputs for rows of x [..., K] and of ``h = adapter_x @ a^T``.

        Both are of the dtype of products, as ``w``, the matrix, is. ``copy``: b, rounded to h's dtype, is written
        there.
        """
        base = product(call, x, w, None if bias is None else cast(call, bias, x.dtype))
        adds = len(self.outputs) == 1
        dtype = options.y_dtype if adds else base.dtype
        y = base if adds and dtype == base.dtype else call.empty(x, base.shape, dtype=dtype)
        call.then(launch_widen, h, b, b.stride()[::-1], base if adds else None, y, options.factor, copy)
        return (y,) if adds else (base, y)

    def _parts_of(self, given: BackwardArguments) -> tuple[Sequence[Any], list[Any], list[Tensor | None], int]:
        """The gradients of outputs; adapter_x, mask, a, b and h; the tensors of the weight; and ``block``."""
        args = self.backward_by_name(given)
        saved = [args[name] for name in ("adapter_x", "mask", "a", "b", "h")]
        return given.incoming, saved, [args[name] for name in self.weight_names], args.get("block", 0)

    def compute_grads(self, impl: BackwardImpl, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        if given.saved_scalars[4] is None:
            given = given._replace(needed=(False, *given.needed[1:]))
        return super().compute_grads(impl, given)

    def backward(self, call: Call, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (dy, *others), (adapter_x, mask, a, b, h), weight, block = self._parts_of(given)
        factor, drop_factor, drop_factor_back, x_dtype, adapter_dtype, a_dtype, b_dtype, *_ = given.saved_scalars
        dadded = others[0] if others else dy  # the gradients of both summands, which are those of the sum
        need_dadapter, need_dx, need_da, need_db = given.needed
        dtype, shape = h.dtype, adapter_x.shape
        has_one_gradient = need_dx and adapter_dtype is None
        narrow = cast(call, dy, dtype)
        added = narrow if dadded is dy else dadded
        dh = call.empty(h, h.shape) if has_one_gradient or need_dadapter or need_da else None
        dadapter = call.empty(adapter_x, shape, dtype=adapter_dtype) if need_dadapter else None
        da, db = call.empty_weight_like(a, need_da, a_dtype), call.empty_weight_like(b, need_db, b_dtype)
        dx = dx_narrow = None
        if need_dx:
            w = self.matrix(call, weight, block, (len(b), shape[-1]), narrow)
            dx_narrow = product(call, narrow, w, None, transposed=False)
            dx = dx_narrow if x_dtype == dtype else call.empty(h, shape, dtype=x_dtype)
        back = 1.0 if mask is None else drop_factor_back
        if dh is not None:
            call.then(launch_narrow, added, b, b.stride(), dh, factor)
            if dadapter is not None:
                call.then(launch_widen, dh, a, a.stride(), None, dadapter, back, None, mask)
        if dx is not None and dx_narrow is not None:
            if has_one_gradient and dh is not None:
                call.then(launch_widen, dh, a, a.stride(), dx_narrow, dx, back, None, mask)
            elif dx is not dx_narrow:
                call.then(Call.perform, Copy(dx_narrow, dx))
        if need_da or need_db:
            dropout = () if mask is None or _was_dropped(given) else (drop_factor, mask)
            call.then(launch_weights, h, (added, db), (adapter_x, dh, da), factor, *dropout)
        return dadapter, dx, da, db

    def reference_backward(self, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (dy, *others), (adapter_x, mask, a, b, h), weight, block = self._parts_of(given)
        factor, drop_factor, drop_factor_back, x_dtype, adapter_dtype, a_dtype, b_dtype, *_ = given.saved_scalars
        dtype, has_one_gradient = h.dtype, adapter_dtype is None
        given_dtype, is_needed = (x_dtype, given.needed[1]) if has_one_gradient else (adapter_dtype, given.needed[0])
        if given_dtype != dtype and is_needed and torch.is_grad_enabled():
            raise RuntimeError(
                f"{self.plain_name or self.name}: x is {given_dtype} and was kept in {dtype}, so its gradient cannot be"
                " differentiated again; run the forward inside fused_norm.disabled() for that"
            )
        w = self.reference_matrix(weight, block, (len(b), a.shape[1]), dtype)
        if mask is not None and not _was_dropped(given):
            adapter_x = apply_dropout(adapter_x, mask, drop_factor)
        saved, scalars = (adapter_x.to(dtype), a, b, h), (factor, a_dtype, b_dtype)
        dadded, needed = others[0] if others else dy, (False, True, *given.needed[2:])
        _, dadapter, da, db = LORA_ADD.reference_backward(BackwardArguments((dadded,), saved, scalars, needed))
        assert dadapter is not None
        dadapter = dadapter.to(given_dtype)
        if mask is not None:
            dadapter = apply_dropout(dadapter, mask, drop_factor_back)
        dx = (dy.to(dtype) @ w).to(x_dtype)
        if has_one_gradient:
            return None, dx + dadapter, da, db
        return dadapter, dx, da, db


def _was_dropped(given: BackwardArguments) -> bool:
    """Return whether dropout was applied to the adapter_x that a call has saved: to a copy, of one in float32."""
    x_dtype, adapter_dtype = given.saved_scalars[3:5]
    return (x_dtype if adapter_dtype is None else adapter_dtype) == torch.float32


def apply_dropout(x: Tensor, mask: Tensor, factor: float) -> Tensor:
    """``x * mask * factor`` in float32, rounded to x's dtype."""
    return (x.to(wide_dtype(x.dtype)) * mask * factor).to(x.dtype)


_DTYPES = (torch.bfloat16, torch.float16)


def why_copied_first(factors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return why a product would differ from stock code's: one of its factors is copied first; or None."""
    return next((f"{name} is not contiguous" for name, tensor in factors if not tensor.is_contiguous()), None)


def why_dtype_unsupported(dtype: torch.dtype, factors: Mapping[str, Tensor]) -> Unsupported | None:
    """Refuse products of another dtype than one of 16 bits, and factors that are neither of it nor float32."""
    if dtype not in _DTYPES:
        return Unsupported(f"its products are of {dtype}, which are left to PyTorch")
    for name, tensor in factors.items():
        if tensor.dtype not in (dtype, torch.float32):
            return Unsupported(f"{name} is {tensor.dtype}, and products are of {dtype}")
    return None


def cast(call: Call, x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in this dtype, contiguous; x itself if it is so already."""
    if x.dtype == dtype and x.is_contiguous():
        return x
    y = call.empty(x, x.shape, dtype=dtype)
    call.then(Call.perform, Copy(x, y))
    return y


def product(call: Call, x: Tensor, w: Tensor, bias: Tensor | None, *, transposed: bool = True) -> Tensor:
    """``x @ w^T + bias``, or without ``transposed`` ``x @ w``, of contiguous tensors of one dtype."""
    y = call.empty(x, (*x.shape[:-1], w.shape[0 if transposed else 1]))
    call.then(Call.perform, Product(x, w, y, bias, transposed))
    return y


LORA_ADD, LORA_LINEAR = LoraAdd(), LoraLinear()


def lora_add(base: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """The output of a linear with that of its LoRA adapter (Hu et al. 2021, arXiv 2106.09685) added to it.

    ``y = base + (x @ a^T @ b^T) * scale``. Products are computed in x's dtype, to which a and b are rounded first; each
    product, what the scale makes of the second, and the sum are rounded, as PEFT's layers round them. The backward
    keeps x, a, b and the r numbers of each row between the products.

    Args:
        base: [..., N], float32, bfloat16 or float16, any strides; the output of the linear for x.
        x: [..., K], base's rows, bfloat16 or float16; float32 and float64 are computed by the PyTorch reference, and so
            are DTensors.
        a: [r, K], float32 or of 16 bits, r up to 256; beyond, the PyTorch reference computes.
        b: [N, r].
        scale: a Python number.

    Returns:
        y, [..., N], contiguous, of the dtype that base and x promote to. It shares no memory with base.

    Raises:
        TypeError: for anything but dense tensors of floating point, and a scale that is not a Python number.
        ValueError: for incompatible shapes and devices.
    """
    return LORA_ADD.checked(base, x, a, b, scale)
