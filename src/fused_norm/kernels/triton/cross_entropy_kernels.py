"""The loss of rows of logits and the gradient of these logits in Triton: kernels and their launchers.

A row of V logits has one loss: the log of the sum of exponentials, less the logit at the row's label. The row is read
twice, once for the maximum and the sum, once more for the gradient, which is written over it. In between, a row of
capped logits holds their tanh.

``m`` and ``s`` are a lane's maximum so far and its sum of exp(x - m); ``top`` and ``total`` are those of the row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..plans import next_power_of_2
from .devices import INTERPRETED, device_props
from .language import interpreted, round_to
from .launch import launch

_LANES, _WARPS = 1024, 32
"""Lanes of a program, each with ``_VECTOR`` logits at a time: 16 bytes of 16-bit logits. On an H200 the kernel moves
2.7 TB/s, one read and one write counted."""

_VECTOR = 8

_MULTIPLIED = 8192
"""Elements that one program multiplies."""


@triton.jit
def _tanh(x):
    """tanh in fp32: a polynomial near 0, where ``1 - 2 / (e^2x + 1)`` cancels; relative error below 4e-7.

    Nothing bounds x: e^2x may be inf, and ``tl.minimum`` makes a number of NaN on a GPU.
    """
    u = x * x
    p = -0.05379083380103111 + u * (0.02081829123198986 - u * 0.005919910501688719)
    near = x + x * u * (-0.33333301544189453 + u * (0.13332012295722961 + u * p))
    size = tl.abs(x)
    far = 1 - 2 / (tl.exp(2 * size) + 1)
    return tl.where(size < 0.6, near, tl.where(x < 0, -far, far))


@triton.jit
def _load(row_ptr, col, V, fill, MASKED: tl.constexpr):
    x = tl.load(row_ptr + col, mask=col < V, other=fill) if MASKED else tl.load(row_ptr + col)
    return x.to(tl.float32)


@triton.jit
def _transformed(x, options, dtype: tl.constexpr):
    """Logits times the scale, then capped, and the tanh in between; every operation is rounded to ``dtype``."""
    scale, cap, inverse_cap, _ = options
    tanh = x
    if scale is not None:
        x = round_to(x * scale, dtype)
    if cap is not None:
        tanh = round_to(_tanh(round_to(x * inverse_cap, dtype)), dtype)
        x = round_to(tanh * cap, dtype)
    return x, tanh


@triton.jit
def _store(row_ptr, col, V, value, MASKED: tl.constexpr):
    """Write numbers that are rounded to the dtype of the row already."""
    value = value.to(row_ptr.dtype.element_ty)
    if MASKED:
        tl.store(row_ptr + col, value, mask=col < V)
    else:
        tl.store(row_ptr + col, value)


@triton.jit
def _statistics_step(
    row_ptr, col, V, m, s, total_x, options, dtype: tl.constexpr, KEEPS_TANH: tl.constexpr, MASKED: tl.constexpr
):
    """``m``, ``s`` and the sum of logits of each lane with one more block of logits.

    KEEPS_TANH: the tanh of the logits is written over them, for ``_gradient_step``.
    """
    x, tanh = _transformed(_load(row_ptr, col, V, 0.0, MASKED), options, dtype)
    if KEEPS_TANH:
        _store(row_ptr, col, V, tanh, MASKED)
    _, _, _, smoothing = options
    if smoothing is not None:
        total_x += tl.sum(tl.where(col < V, x, 0.0), 1)
    if MASKED:
        x = tl.where(col < V, x, -1e38)  # finite: a lane without logits computes no inf - inf
    m_new = tl.maximum(m, tl.max(x, 1))
    s = s * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new[:, None]), 1)
    return m_new, s, total_x


@triton.jit
def _gradient_step(
    row_ptr, col, V, label, top, total, share, options,
    dtype: tl.constexpr, KEEPS_TANH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block of logits over it; ``share`` is the gradient of the row's loss over ``total``."""
    scale, cap, inverse_cap, smoothing = options
    x = _load(row_ptr, col, V, 0.0, MASKED)
    if KEEPS_TANH:
        tanh = x
        x = round_to(tanh * cap, dtype)
    else:
        x, tanh = _transformed(x, options, dtype)
    e = tl.exp(x - top)
    if smoothing is None:
        d = tl.where(col == label, e - total, e) * share
    else:
        at_label = tl.where(col == label, 1.0 - smoothing, 0.0)
        d = (e - total * (at_label + smoothing / V)) * share
    d = round_to(d, dtype)
    if cap is not None:
        d = round_to(d * cap, dtype)
        # PyTorch rounds the slope, and the square in it, on a GPU and not on a CPU.
        slope = 1 - tanh * tanh if interpreted else round_to(1 - round_to(tanh * tanh, dtype), dtype)
        d = round_to(d * slope, dtype)
        d = round_to(d * inverse_cap, dtype)
    if scale is not None:
        d = round_to(d * scale, dtype)
    _store(row_ptr, col, V, round_to(d, row_ptr.dtype.element_ty), MASKED)


@triton.jit
def _cross_entropy_kernel(
    logits_ptr,  # [M, V]; with GRAD their gradient is written over them
    labels_ptr,  # [M] int64
    losses_ptr,  # [M] fp32
    gradient_ptr,  # [1] fp32: the gradient of a row's loss, or None without GRAD
    V, stride, ignored,
    scale, cap, inverse_cap, smoothing,
    GRAD: tl.constexpr, IN_FP32: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = LANES * VECTOR
    # With IN_FP32 scale and cap are operations on logits that were cast to fp32 before.
    dtype: tl.constexpr = tl.float32 if IN_FP32 else logits_ptr.dtype.element_ty
    options = scale, cap, inverse_cap, smoothing
    # To write a tanh and read it again is faster than to compute it twice: 3.0 ms instead of 4.3 for 4096 x 262144.
    KEEPS_TANH: tl.constexpr = GRAD and cap is not None and dtype == logits_ptr.dtype.element_ty
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    tile = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    whole = V // BLOCK
    label = tl.load(labels_ptr + row)
    if label == ignored:
        tl.store(losses_ptr + row, 0.0)
        if GRAD:
            zero = tl.zeros([LANES, VECTOR], logits_ptr.dtype.element_ty)
            for block in range(whole):
                tl.store(row_ptr + (block * BLOCK + tile), zero)
            tl.store(row_ptr + (whole * BLOCK + tile), zero, mask=whole * BLOCK + tile < V)
    else:
        # Before the gradient overwrites it. An invalid label makes the loss NaN.
        is_valid = (label >= 0) & (label < V)
        at_label = tl.load(row_ptr + label, mask=is_valid, other=float("nan")).to(tl.float32)
        if KEEPS_TANH:  # all warps read it before one of them writes a tanh over it
            tl.debug_barrier()
        at_label, _ = _transformed(at_label, options, dtype)
        m = tl.full([LANES], -1e38, tl.float32)
        s = tl.zeros([LANES], tl.float32)
        total_x = tl.zeros([LANES], tl.float32)
        for block in range(whole):
            col = block * BLOCK + tile
            m, s, total_x = _statistics_step(row_ptr, col, V, m, s, total_x, options, dtype, KEEPS_TANH, False)
        if whole * BLOCK < V:
            col = whole * BLOCK + tile
            m, s, total_x = _statistics_step(row_ptr, col, V, m, s, total_x, options, dtype, KEEPS_TANH, True)
        top = tl.max(m, 0)
        total = tl.sum(s * tl.exp(m - top), 0)
        if smoothing is None:
            loss = tl.log(total) + (top - at_label)
        else:
            mean_x = tl.sum(total_x, 0) / V
            loss = tl.log(total) + (1.0 - smoothing) * (top - at_label) + smoothing * (top - mean_x)
        tl.store(losses_ptr + row, loss)
        if GRAD:
            share = tl.load(gradient_ptr) / total
            column = tl.where(is_valid, label, -1).to(tl.int32)
            # From the end: what was read last is still in the L2 cache.
            if whole * BLOCK < V:
                col = whole * BLOCK + tile
                _gradient_step(row_ptr, col, V, column, top, total, share, options, dtype, KEEPS_TANH, True)
            for block in range(whole):
                col = (whole - 1 - block) * BLOCK + tile
                _gradient_step(row_ptr, col, V, column, top, total, share, options, dtype, KEEPS_TANH, False)


@triton.jit
def _multiply_kernel(x_ptr, factor_ptr, size, BLOCK: tl.constexpr):
    """``x *= factor``; nothing is read if the factor is 1. 0 stays 0: rows without a label have no gradient."""
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
        x = tl.where(x == 0.0, x, x * factor)
        tl.store(x_ptr + at, round_to(x, x_ptr.dtype.element_ty).to(x_ptr.dtype.element_ty), mask=at < size)


def launch_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    losses: Tensor,
    gradient: Tensor | None,
    *,
    ignored: int,
    scale: float | None,
    cap: float | None,
    smoothing: float | None,
    in_fp32: bool,
) -> None:
    """Write the losses [M] of rows of logits [M, V], and with ``gradient`` the gradient of logits over them.

    Args:
        logits: rows of one stride, elements side by side.
        labels: [M], int64, side by side.
        losses: [M], float32.
        gradient: one float32, the gradient of each row's loss; None leaves the logits as they are.
        ignored: the label of rows whose loss is 0, and has no gradient.
        scale: what logits are multiplied by; None is 1.
        cap: of the logits, after the scale: ``cap * tanh(logits / cap)``.
        smoothing: the share of the target that all labels have in common, in place of the row's own.
        in_fp32: scale and cap are not rounded to the dtype of the logits.
    """
    rows, vocabulary = logits.shape
    lanes = _LANES
    if INTERPRETED:  # which takes its time for a step, not for the numbers in it
        lanes = max(1, min(_LANES, next_power_of_2(-(-vocabulary // _VECTOR))))
    launch(
        _cross_entropy_kernel,
        (rows, 1),
        (logits, labels, losses, gradient),
        (vocabulary, logits.stride(0), ignored, scale, cap, None if cap is None else 1 / cap, smoothing),
        {"GRAD": gradient is not None, "IN_FP32": in_fp32, "LANES": lanes, "VECTOR": _VECTOR},
        warps=device_props(logits.device).warps(_WARPS),
        fuse=cap is None,  # the square in the slope of tanh is rounded before 1 takes it away
    )


def launch_multiply(x: Tensor, factor: Tensor) -> None:
    """``x *= factor``, a float32 tensor of one element on x's device, which the host never looks at."""
    blocks, warps = -(-x.numel() // _MULTIPLIED), device_props(x.device).warps(8)
    launch(_multiply_kernel, (blocks, 1), (x, factor), (x.numel(),), {"BLOCK": _MULTIPLIED}, warps=warps)
