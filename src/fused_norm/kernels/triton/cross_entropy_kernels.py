"""The losses of rows of logits and the gradient of these logits in Triton: kernels and their launchers.

A row of V logits has one loss: the log of the sum of exponentials, less the logit at the row's label, which is the
label's log-probability with the other sign. On request a row has its entropy and other statistics of its
probabilities. The row is read twice, once for the maximum and the sums, once more for the gradient, which is written
over it. In between, a row of capped logits holds their tanh.

``m`` and ``s`` are a lane's maximum so far and its sum of exp(x - m); ``top`` and ``total`` are those of the row.
``weighted`` is the sum of exp(x - m) * (x - m), ``squares`` that of exp(x - m)^2, and ``total_x`` that of x.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..plans import next_power_of_2
from .call import Call
from .devices import INTERPRETED, device_props
from .language import interpreted, round_to

_LANES, _WARPS = 1024, 32
"""Lanes of a program, each with ``_VECTOR`` logits at a time: 16 bytes of 16-bit logits. On an H200 the kernel moves
2.7 TB/s, one read and one write counted."""

_VECTOR = 8

_REGISTERS = 32
"""Of a lane, so that a processor of NVIDIA's with 65536 of them runs two programs. 16-bit logits need no more, but for
capped ones; left alone, the compiler takes up to 53 for a gradient beside an entropy, and one program runs."""

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
    """Logits times the scale, capped, over the temperature, and the tanh; each operation is rounded to ``dtype``."""
    scale, _, inverse_cap, _, _ = options
    tanh = x
    if scale is not None:
        x = round_to(x * scale, dtype)
    if inverse_cap is not None:
        tanh = round_to(_tanh(round_to(x * inverse_cap, dtype)), dtype)
        x = tanh
    return _after_tanh(x, options, dtype), tanh


@triton.jit
def _after_tanh(x, options, dtype: tl.constexpr):
    """What ``_transformed`` makes of a tanh, or of logits without a cap."""
    _, cap, _, inverse_temperature, _ = options
    if cap is not None:
        x = round_to(x * cap, dtype)
    if inverse_temperature is not None:
        x = round_to(x * inverse_temperature, dtype)
    return x


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
    row_ptr, col, V, lanes, options, statistics, dtype: tl.constexpr, KEEPS_TANH: tl.constexpr, MASKED: tl.constexpr
):
    """The statistics of each lane, ``lanes``, with one more block of logits; those that nobody wants stay 0.

    KEEPS_TANH: the tanh of the logits is written over them, for ``_gradient_step``.
    """
    m, s, total_x, weighted, squares = lanes
    HAS_MEAN, HAS_ENTROPY, HAS_SQUARES = statistics
    x, tanh = _transformed(_load(row_ptr, col, V, 0.0, MASKED), options, dtype)
    if KEEPS_TANH:
        _store(row_ptr, col, V, tanh, MASKED)
    if HAS_MEAN:
        total_x += tl.sum(tl.where(col < V, x, 0.0), 1)
    if MASKED:
        x = tl.where(col < V, x, -1e38)  # finite: a lane without logits computes no inf - inf
    m_new = tl.maximum(m, tl.max(x, 1))
    shift, x = m - m_new, x - m_new[:, None]
    shrink, e = tl.exp(shift), tl.exp(x)
    if HAS_ENTROPY:
        # A logit of -inf adds nothing: 0 * inf is no number.
        weighted = shrink * (weighted + shift * s) + tl.sum(e * tl.where(e > 0, x, 0.0), 1)
    if HAS_SQUARES:
        squares = squares * (shrink * shrink) + tl.sum(e * e, 1)
    s = s * shrink + tl.sum(e, 1)
    return m_new, s, total_x, weighted, squares


@triton.jit
def _gradient_step(
    row_ptr, col, V, label, top, total, share, of_entropy, options,
    dtype: tl.constexpr, KEEPS_TANH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block of logits over it; ``share`` is the gradient of the row's loss over ``total``.

    of_entropy: the gradient of the row's entropy over ``total``, and the entropy less the log of ``total``; or None.
    """
    scale, cap, inverse_cap, inverse_temperature, smoothing = options
    x = _load(row_ptr, col, V, 0.0, MASKED)
    if KEEPS_TANH:
        tanh = x
        x = _after_tanh(x, options, dtype)
    else:
        x, tanh = _transformed(x, options, dtype)
    e = tl.exp(x - top)
    if smoothing is None:
        d = tl.where(col == label, e - total, e) * share
    else:
        at_label = tl.where(col == label, 1.0 - smoothing, 0.0)
        d = (e - total * (at_label + smoothing / V)) * share
    entropy_share, excess = of_entropy
    if entropy_share is not None:
        # The log of a probability is x - top - log(total). A probability of 0 has no gradient.
        d -= e * tl.where(e > 0, x - top + excess, 0.0) * entropy_share
    d = round_to(d, dtype)
    if inverse_temperature is not None:
        d = round_to(d * inverse_temperature, dtype)
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
def _store_if_wanted(ptr, row, value):
    if ptr is not None:
        tl.store(ptr + row, value)


@triton.jit
def _cross_entropy_kernel(
    logits_ptr,  # [M, V]; with GRAD their gradient is written over them
    labels_ptr,  # [M] int64
    losses_ptr,  # [M] fp32
    gradient_ptr,  # fp32, the gradients of the losses: [M] with BY_ROW, else one for all rows; None without GRAD
    entropy_gradient_ptr,  # [M] fp32, or None
    entropies_ptr, largest_ptr, means_ptr, squares_ptr,  # [M] fp32 each, or None
    V, stride, ignored,
    scale, cap, inverse_cap, inverse_temperature, smoothing,
    GRAD: tl.constexpr, BY_ROW: tl.constexpr, IN_FP32: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = LANES * VECTOR
    # With IN_FP32 scale, cap and temperature are operations on logits that were cast to fp32 before.
    dtype: tl.constexpr = tl.float32 if IN_FP32 else logits_ptr.dtype.element_ty
    options = scale, cap, inverse_cap, inverse_temperature, smoothing
    # To write a tanh and read it again is faster than to compute it twice: 3.0 ms instead of 4.3 for 4096 x 262144.
    KEEPS_TANH: tl.constexpr = GRAD and cap is not None and dtype == logits_ptr.dtype.element_ty
    HAS_MEAN: tl.constexpr = smoothing is not None or means_ptr is not None
    HAS_ENTROPY: tl.constexpr = entropies_ptr is not None or entropy_gradient_ptr is not None
    HAS_LARGEST: tl.constexpr = largest_ptr is not None
    statistics = HAS_MEAN, HAS_ENTROPY, squares_ptr is not None
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    tile = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    whole = V // BLOCK
    label = tl.load(labels_ptr + row)
    if label == ignored:
        tl.store(losses_ptr + row, 0.0)
        _store_if_wanted(entropies_ptr, row, 0.0)
        _store_if_wanted(largest_ptr, row, 0.0)
        _store_if_wanted(means_ptr, row, 0.0)
        _store_if_wanted(squares_ptr, row, 0.0)
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
        column = tl.where(is_valid, label, -1).to(tl.int32)
        zeros = tl.zeros([LANES], tl.float32)
        lanes = tl.full([LANES], -1e38, tl.float32), zeros, zeros, zeros, zeros
        begin = 0
        if HAS_LARGEST:
            begin = tl.maximum(column, 0) // BLOCK
            for block in range(begin):
                col = block * BLOCK + tile
                lanes = _statistics_step(row_ptr, col, V, lanes, options, statistics, dtype, KEEPS_TANH, False)
            # The largest logit before the label: argmax takes the first of equal ones.
            col = begin * BLOCK + tile
            x, _ = _transformed(_load(row_ptr, col, V, 0.0, True), options, dtype)
            before = tl.maximum(tl.max(lanes[0], 0), tl.max(tl.max(tl.where(col < column, x, -1e38), 1), 0))
            if KEEPS_TANH:
                tl.debug_barrier()
        for block in range(begin, whole):
            col = block * BLOCK + tile
            lanes = _statistics_step(row_ptr, col, V, lanes, options, statistics, dtype, KEEPS_TANH, False)
        if whole * BLOCK < V:
            col = whole * BLOCK + tile
            lanes = _statistics_step(row_ptr, col, V, lanes, options, statistics, dtype, KEEPS_TANH, True)
        m, s, total_x, weighted, squares = lanes
        top = tl.max(m, 0)
        shift = m - top
        shrink = tl.exp(shift)
        total = tl.sum(s * shrink, 0)
        log_total = tl.log(total)
        mean_x = tl.sum(total_x, 0) / V
        if smoothing is None:
            loss = log_total + (top - at_label)
        else:
            loss = log_total + (1.0 - smoothing) * (top - at_label) + smoothing * (top - mean_x)
        tl.store(losses_ptr + row, loss)
        _store_if_wanted(means_ptr, row, mean_x)
        if HAS_ENTROPY:
            # A lane without logits adds nothing: its shift times s may be inf.
            inside = tl.sum(shrink * (weighted + tl.where(shrink > 0, shift, 0.0) * s), 0) / total
            _store_if_wanted(entropies_ptr, row, log_total - inside)
        if squares_ptr is not None:
            tl.store(squares_ptr + row, tl.log(tl.sum(squares * (shrink * shrink), 0)) - 2 * log_total)
        if HAS_LARGEST:  # of a row with NaN or inf, none is
            is_largest = (at_label >= top) & (before < at_label) & (total == total)
            tl.store(largest_ptr + row, tl.where(is_largest, 1.0, 0.0))
        if GRAD:
            share = tl.load(gradient_ptr + (row if BY_ROW else 0)) / total
            of_entropy = None, None
            if entropy_gradient_ptr is not None:
                of_entropy = tl.load(entropy_gradient_ptr + row) / total, -inside
            # From the end: what was read last is still in the L2 cache.
            if whole * BLOCK < V:
                col = whole * BLOCK + tile
                _gradient_step(row_ptr, col, V, column, top, total, share, of_entropy, options, dtype, KEEPS_TANH, True)
            for block in range(whole):
                col = (whole - 1 - block) * BLOCK + tile
                _gradient_step(
                    row_ptr, col, V, column, top, total, share, of_entropy, options, dtype, KEEPS_TANH, False
                )


@triton.jit
def _multiply_kernel(x_ptr, factor_ptr, size, BLOCK: tl.constexpr):
    """``x *= factor``; nothing is read if the factor is 1. 0 stays 0: rows without a label have no gradient."""
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
        x = tl.where(x == 0.0, x, x * factor)
        tl.store(x_ptr + at, round_to(x, x_ptr.dtype.element_ty).to(x_ptr.dtype.element_ty), mask=at < size)


class Statistics(NamedTuple):
    """Where to write what a row has besides its loss, [M] float32 each, or None; rows that are ignored have 0."""

    entropies: Tensor | None = None
    are_largest: Tensor | None = None  # 1 if argmax of the row is its label, else 0
    means: Tensor | None = None  # of the logits
    log_squares: Tensor | None = None  # the log of the sum of squared probabilities


def launch_cross_entropy(
    call: Call,
    logits: Tensor,
    labels: Tensor,
    losses: Tensor,
    gradient: Tensor | None,
    *,
    ignored: int,
    scale: float | None = None,
    cap: float | None = None,
    temperature: float | None = None,
    smoothing: float | None = None,
    in_fp32: bool = False,
    statistics: Statistics | None = None,
    entropy_gradient: Tensor | None = None,
) -> None:
    """Write the losses [M] of rows of logits [M, V], and with ``gradient`` the gradient of logits over them.

    Args:
        call: the call that launches.
        logits: rows of one stride, elements side by side.
        labels: [M], int64, side by side.
        losses: [M], float32.
        gradient: float32, the gradient of the losses, [M] or, if it is the same for all, []; None leaves the logits as
            they are.
        ignored: the label of rows whose loss is 0, and has no gradient.
        scale: what logits are multiplied by; None is 1.
        cap: of the logits, after the scale: ``cap * tanh(logits / cap)``.
        temperature: what logits are divided by in the end; None is 1.
        smoothing: the share of the target that all labels have in common, in place of the row's own.
        in_fp32: scale, cap and temperature are not rounded to the dtype of the logits.
        statistics: what to write besides; None is nothing.
        entropy_gradient: [M], float32, that of the entropies, if ``gradient`` is given too; None is 0.
    """
    rows, vocabulary = logits.shape
    lanes, device = _LANES, device_props(logits.device)
    if INTERPRETED:  # which takes its time for a step, not for the numbers in it
        lanes = max(1, min(_LANES, next_power_of_2(-(-vocabulary // _VECTOR))))
    inverses = [None if number is None else 1 / number for number in (cap, temperature)]
    has_gradient, by_row = gradient is not None, gradient is not None and gradient.dim() > 0
    call.launch(
        _cross_entropy_kernel,
        (rows, 1),
        (logits, labels, losses, gradient, entropy_gradient, *(statistics or Statistics())),
        (vocabulary, logits.stride(0), ignored, scale, cap, *inverses, smoothing),
        {"GRAD": has_gradient, "BY_ROW": by_row, "IN_FP32": in_fp32, "LANES": lanes, "VECTOR": _VECTOR},
        warps=device.warps(_WARPS),
        registers=_REGISTERS if logits.element_size() == 2 and cap is None and device.limits_registers else None,
        fuse=cap is None,  # the square in the slope of tanh is rounded before 1 takes it away
    )


def launch_multiply(call: Call, x: Tensor, factor: Tensor) -> None:
    """``x *= factor``, a float32 tensor of one element on x's device, which the host never looks at."""
    blocks, warps = -(-x.numel() // _MULTIPLIED), device_props(x.device).warps(8)
    call.launch(_multiply_kernel, (blocks, 1), (x, factor), (x.numel(),), {"BLOCK": _MULTIPLIED}, warps=warps)
