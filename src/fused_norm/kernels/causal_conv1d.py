"""The causal depthwise convolution of a short filter with the activation after it.

A sequence is L rows of C channels. A program takes BLOCK channels of one piece of a sequence and walks through its
rows, four at a time: what the rows before them held stays in registers, so that each row is read once.

To the alphabet of ``triton.language`` come ``x1``, the row before ``x0``, ``a1``, the tap that it is multiplied by,
``c``, the convolution, ``g``, the gradient of c, and ``dw1``, the gradient of ``a1``. Of the four taps the first WIDTH
are there.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import forward_ad

from .arguments import Unsupported, check_choice, why_other_dtype
from .backward import BackwardArguments
from .operator import Operator, Results
from .plans import ANY_WIDTH, RULES, Device, Rule, TilePlan, next_power_of_2
from .reference import silu, wide_dtype
from .triton.call import Call
from .triton.devices import device_props
from .triton.language import as_mask, let_next_begin, round_to
from .triton.weight_grad import reduce_partials

WIDTHS = (2, 3, 4)
"""The numbers of taps that kernels have."""


@triton.jit
def _load_row(ptr, t, stride, first, end, live):
    """Row ``t`` as fp32; zeros if ``t`` is not from ``first`` to ``end``."""
    return tl.load(ptr + t * stride, mask=as_mask(live & (t >= first) & (t < end)), other=0.0).to(tl.float32)


@triton.jit
def _load_taps(w_ptr, bias_ptr, col, live, WIDTH: tl.constexpr):
    """The taps of each channel, that of the latest row first, zero beyond WIDTH; and the bias."""
    at = w_ptr + col * WIDTH + (WIDTH - 1)
    a0 = tl.load(at, mask=live, other=0.0).to(tl.float32)
    a1 = tl.load(at - 1, mask=live, other=0.0).to(tl.float32)
    a2 = tl.zeros_like(a0)
    a3 = tl.zeros_like(a0)
    bias = tl.zeros_like(a0)
    if WIDTH > 2:
        a2 = tl.load(at - 2, mask=live, other=0.0).to(tl.float32)
    if WIDTH > 3:
        a3 = tl.load(at - 3, mask=live, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + col, mask=live, other=0.0).to(tl.float32)
    return a0, a1, a2, a3, bias


@triton.jit
def _convolve(taps, x0, x1, x2, x3, dtype: tl.constexpr, WIDTH: tl.constexpr):
    """The convolution at ``x0``, rounded: as PyTorch's kernel, from the bias on and from the oldest row to the latest.

    An absent tap is left out, for zero times what is not finite is not zero.
    """
    a0, a1, a2, a3, c = taps
    if WIDTH > 3:
        c += a3 * x3
    if WIDTH > 2:
        c += a2 * x2
    c += a1 * x1
    c += a0 * x0
    return round_to(c, dtype)


@triton.jit
def _activated(c, SILU: tl.constexpr):
    """SiLU with the steps that it has in PyTorch; c itself without it."""
    return c / (1.0 + tl.exp(-c)) if SILU else c


@triton.jit
def _conv_grad(dy, c, live, SILU: tl.constexpr):
    """The gradient of ``c``, zero if not live. The smaller of logistic(c) and its complement is not subtracted."""
    if SILU:
        power = tl.exp(-tl.abs(c))
        more = 1.0 / (1.0 + power)
        less = power * more
        share = tl.where(c < 0.0, less, more)
        dy = dy * (share + c * (less * more))
    return tl.where(live, dy, 0.0)


@triton.jit
def _store_row(ptr, t, stride, first, end, live, value):
    mask = as_mask(live & (t >= first) & (t < end))
    tl.store(ptr + t * stride, round_to(value, ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["L", "pieces"])
def _conv_forward_kernel(
    x_ptr,  # [batch, L, C]
    w_ptr,  # [C, WIDTH]
    bias_ptr,  # [C] or None
    y_ptr,  # [batch, L, C]
    L, pieces,
    x_batch, x_stride, y_batch, y_stride,
    C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0).to(tl.int64)
    batch, start = piece // pieces, piece % pieces * ROWS
    end = tl.minimum(start + ROWS, L)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = col < C
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x, y = x_ptr + batch * x_batch + col, y_ptr + batch * y_batch + col
    taps = _load_taps(w_ptr, bias_ptr, col, live, WIDTH)
    x1 = _load_row(x, start - 1, x_stride, 0, end, live)
    x2 = _load_row(x, start - 2, x_stride, 0, end, live)
    x3 = _load_row(x, start - 3, x_stride, 0, end, live)
    for t in range(start, end, 4):
        # All loads come before the stores, which they could not pass.
        xa = _load_row(x, t, x_stride, 0, end, live)
        xb = _load_row(x, t + 1, x_stride, 0, end, live)
        xc = _load_row(x, t + 2, x_stride, 0, end, live)
        xd = _load_row(x, t + 3, x_stride, 0, end, live)
        ya = _activated(_convolve(taps, xa, x1, x2, x3, dtype, WIDTH), SILU)
        yb = _activated(_convolve(taps, xb, xa, x1, x2, dtype, WIDTH), SILU)
        yc = _activated(_convolve(taps, xc, xb, xa, x1, dtype, WIDTH), SILU)
        yd = _activated(_convolve(taps, xd, xc, xb, xa, dtype, WIDTH), SILU)
        _store_row(y, t, y_stride, start, end, live, ya)
        _store_row(y, t + 1, y_stride, start, end, live, yb)
        _store_row(y, t + 2, y_stride, start, end, live, yc)
        _store_row(y, t + 3, y_stride, start, end, live, yd)
        x1, x2, x3 = xd, xc, xb


@triton.jit
def _input_grad(taps, g0, g1, g2, g3, WIDTH: tl.constexpr):
    """The gradient of the row that is WIDTH - 1 before that of ``g0``."""
    a0, a1, a2, a3, _ = taps
    if WIDTH == 4:
        dx = a3 * g0 + a2 * g1 + a1 * g2 + a0 * g3
    elif WIDTH == 3:
        dx = a2 * g0 + a1 * g1 + a0 * g2
    else:
        dx = a1 * g0 + a0 * g1
    return dx


@triton.jit
def _add_weight_grads(dw, g, x0, x1, x2, x3, own, WIDTH: tl.constexpr):
    """The gradients of the taps and the bias with those of one row, if it is the program's own."""
    dw0, dw1, dw2, dw3, dbias = dw
    g = tl.where(own, g, 0.0)
    dw0 += g * x0
    dw1 += g * x1
    if WIDTH > 2:
        dw2 += g * x2
    if WIDTH > 3:
        dw3 += g * x3
    return dw0, dw1, dw2, dw3, dbias + g


@triton.jit(do_not_specialize=["L", "pieces", "count"])
def _conv_backward_kernel(
    x_ptr,  # [batch, L, C]
    w_ptr,  # [C, WIDTH]
    bias_ptr,  # [C] or None
    dy_ptr,  # [batch, L, C]
    dx_ptr,  # [batch, L, C] or None
    dw_ptr,  # [programs along rows, C, WIDTH] fp32 or None: each program's part of the gradient
    dbias_ptr,  # [programs along rows, C] fp32 or None
    L, pieces, count,
    x_batch, x_stride, dy_batch, dy_stride, dx_batch, dx_stride,
    C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, SILU: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = col < C
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    taps = _load_taps(w_ptr, bias_ptr, col, live, WIDTH)
    zero = tl.zeros([BLOCK], tl.float32)
    dw = (zero, zero, zero, zero, zero)
    for number in range(program, count, tl.num_programs(0)):
        piece = tl.zeros([], tl.int64) + number
        batch, start = piece // pieces, piece % pieces * ROWS
        end = tl.minimum(start + ROWS, L)
        x, dy, dx = x_ptr + batch * x_batch + col, dy_ptr + batch * dy_batch + col, dx_ptr
        if dx_ptr is not None:
            dx = dx_ptr + batch * dx_batch + col
        x1 = _load_row(x, start - 1, x_stride, 0, L, live)
        x2 = _load_row(x, start - 2, x_stride, 0, L, live)
        x3 = _load_row(x, start - 3, x_stride, 0, L, live)
        g1, g2, g3 = zero, zero, zero
        for t in range(start, end + (WIDTH - 1), 4):
            xa = _load_row(x, t, x_stride, 0, L, live)
            xb = _load_row(x, t + 1, x_stride, 0, L, live)
            xc = _load_row(x, t + 2, x_stride, 0, L, live)
            xd = _load_row(x, t + 3, x_stride, 0, L, live)
            ga = _load_row(dy, t, dy_stride, 0, L, live)
            gb = _load_row(dy, t + 1, dy_stride, 0, L, live)
            gc = _load_row(dy, t + 2, dy_stride, 0, L, live)
            gd = _load_row(dy, t + 3, dy_stride, 0, L, live)
            ga = _conv_grad(ga, _convolve(taps, xa, x1, x2, x3, dtype, WIDTH), t < L, SILU)
            gb = _conv_grad(gb, _convolve(taps, xb, xa, x1, x2, dtype, WIDTH), t + 1 < L, SILU)
            gc = _conv_grad(gc, _convolve(taps, xc, xb, xa, x1, dtype, WIDTH), t + 2 < L, SILU)
            gd = _conv_grad(gd, _convolve(taps, xd, xc, xb, xa, dtype, WIDTH), t + 3 < L, SILU)
            if dx_ptr is not None:
                before = t - (WIDTH - 1)
                _store_row(dx, before, dx_stride, start, end, live, _input_grad(taps, ga, g1, g2, g3, WIDTH))
                _store_row(dx, before + 1, dx_stride, start, end, live, _input_grad(taps, gb, ga, g1, g2, WIDTH))
                _store_row(dx, before + 2, dx_stride, start, end, live, _input_grad(taps, gc, gb, ga, g1, WIDTH))
                _store_row(dx, before + 3, dx_stride, start, end, live, _input_grad(taps, gd, gc, gb, ga, WIDTH))
            if dw_ptr is not None or dbias_ptr is not None:
                dw = _add_weight_grads(dw, ga, xa, x1, x2, x3, t < end, WIDTH)
                dw = _add_weight_grads(dw, gb, xb, xa, x1, x2, t + 1 < end, WIDTH)
                dw = _add_weight_grads(dw, gc, xc, xb, xa, x1, t + 2 < end, WIDTH)
                dw = _add_weight_grads(dw, gd, xd, xc, xb, xa, t + 3 < end, WIDTH)
            x1, x2, x3 = xd, xc, xb
            g1, g2, g3 = gd, gc, gb
    let_next_begin(OVERLAPS)
    dw0, dw1, dw2, dw3, dbias = dw
    if dw_ptr is not None:
        at = dw_ptr + program.to(tl.int64) * (C * WIDTH) + col * WIDTH + (WIDTH - 1)
        tl.store(at, dw0, mask=live)
        tl.store(at - 1, dw1, mask=live)
        if WIDTH > 2:
            tl.store(at - 2, dw2, mask=live)
        if WIDTH > 3:
            tl.store(at - 3, dw3, mask=live)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + program.to(tl.int64) * C + col, dbias, mask=live)


# Four taps, bf16, 4x4096 rows of 6144 channels: .132 ms forward and .260 backward; a copy takes .102. Of 128,
# 256 and 512 channels by 1, 2 and 4 warps in pieces of 32, 64 and 128 rows none is faster; 512 by 1 spills.
RULES["conv_forward"] = (Rule(ANY_WIDTH, 128, 1),)
RULES["conv_backward"] = (Rule(ANY_WIDTH, 128, 1, 16),)

_CONV_ROWS = {False: 64, True: 128}
"""Rows that a program of a convolution walks through, forward and backward; the three before them are read twice."""

_MOST_CONV_PROGRAMS = 512
"""Programs of a convolution's backward along the rows: the sum over them holds all in one tile."""


@lru_cache(maxsize=1024)
def conv_plan(channels: int, width: int, device: Device, backward: bool = False) -> TilePlan:
    """The launch of a causal convolution with ``width`` taps.

    A program walks through ``rows`` of a sequence, in ``block`` of its channels; with the rows that a backward reads
    after them these are a multiple of four.
    """
    rule = device.rule("conv_backward" if backward else "conv_forward", 0)
    block = min(rule.elements, next_power_of_2(channels))
    programs = rule.programs * device.processors // -(-channels // block)
    rows = _CONV_ROWS[backward] - (width - 1) * backward
    return TilePlan(rows, block, device.warps(rule.warps), max(1, min(programs, _MOST_CONV_PROGRAMS)))


def _rows_in_place(call: Call, x: Tensor) -> Tensor:
    """``x`` [batch, L, C], copied if the channels of a row do not follow each other in memory."""
    in_place: Tensor | None = x if x.stride(2) == 1 or x.shape[2] == 1 else call.contiguous(x)
    assert in_place is not None
    return in_place


def launch_conv_forward(
    call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, activation: str | None
) -> None:
    """Write ``y`` [batch, L, C], from ``empty_rows_like(x)``."""
    if x.numel() == 0:
        return
    x, (batch, length, channels), width = _rows_in_place(call, x), x.shape, weight.shape[1]
    plan = conv_plan(channels, width, device_props(x.device))
    pieces = -(-length // plan.rows)
    numbers = length, pieces, *x.stride()[:2], *y.stride()[:2]
    constants = {"C": channels, "ROWS": plan.rows, "BLOCK": plan.block, "WIDTH": width, "SILU": activation is not None}
    tensors, grid = (x, call.contiguous(weight), call.contiguous(bias), y), (batch * pieces, -(-channels // plan.block))
    call.launch(_conv_forward_kernel, grid, tensors, numbers, constants, warps=plan.warps)


def launch_conv_backward(
    call: Call,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dy: Tensor,
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
    activation: str | None,
) -> None:
    """Write the ``gradients`` that are not None: of x, from ``empty_rows_like(x)``, of the weight and of the bias."""
    dx, *sums = gradients
    if x.numel() == 0:
        for gradient in sums:
            if gradient is not None:
                call.zero(gradient)
        return
    x, dy, (batch, length, channels), width = (
        _rows_in_place(call, x),
        _rows_in_place(call, dy),
        x.shape,
        weight.shape[1],
    )
    device = device_props(x.device)
    plan = conv_plan(channels, width, device, True)
    pieces = -(-length // plan.rows)
    programs = batch * pieces
    if any(total is not None for total in sums):
        programs = min(programs, plan.programs)
    partials = [
        None if total is None else call.empty(x, (programs, total.numel()), dtype=torch.float32) for total in sums
    ]
    overlaps = device.overlaps and any(total is not None for total in sums)
    dx_strides = (None, None) if dx is None else dx.stride()[:2]
    numbers = length, pieces, batch * pieces, *x.stride()[:2], *dy.stride()[:2], *dx_strides
    constants = {"C": channels, "ROWS": plan.rows, "BLOCK": plan.block, "WIDTH": width, "SILU": activation is not None}
    tensors = x, call.contiguous(weight), call.contiguous(bias), dy, dx, *partials
    grid = programs, -(-channels // plan.block)
    call.launch(_conv_backward_kernel, grid, tensors, numbers, {**constants, "OVERLAPS": overlaps}, warps=plan.warps)
    for partial, gradient in zip(partials, sums, strict=True):
        if partial is not None:
            reduce_partials(call, partial, gradient, None, programs, plan.programs, device)


class CausalConv1d(Operator):
    """``causal_conv1d`` as an operator."""

    name = "causal_conv1d"
    tensors = "Tensor x, Tensor weight, Tensor? bias"
    options = "str? activation"
    outputs = ("y",)
    other_shapes = ("weight", "bias")
    takes_dtensors = False
    saved = tensors
    saved_scalars = options
    gradients = ("dx", "dweight", "dbias")
    recomputed_by_itself = True

    def check_options(self, *arguments: Any) -> Unsupported | None:
        x, weight, bias, activation = arguments
        differs = why_other_dtype("weight", "x", weight, x) or why_other_dtype(
            "bias", "x", x if bias is None else bias, x
        )
        if x.dim() != 3:
            reason = f"x must have 3 dimensions, batch, length and channels, not shape {tuple(x.shape)}"
        elif weight.dim() != 2 or weight.shape[0] != x.shape[2] or not weight.shape[1]:
            reason = f"weight must have shape ({x.shape[2]}, taps), not {tuple(weight.shape)}"
        elif bias is not None and bias.shape != weight.shape[:1]:
            reason = f"bias must have shape ({x.shape[2]},), not {tuple(bias.shape)}"
        elif differs is not None:
            reason = f"{differs}; cast it first"  # PyTorch's convolution refuses it too
        else:
            return None if activation is None else check_choice("activation", activation, ("silu",))
        return Unsupported(reason, ValueError)

    def why_reference_only(self, *arguments: Any) -> Unsupported | None:
        weight = arguments[1]
        if weight.shape[1] in WIDTHS:
            return None
        return Unsupported(f"a convolution of {weight.shape[1]} taps, kernels have {', '.join(map(str, WIDTHS))}")

    def reference(self, *arguments: Any) -> Tensor:
        """The convolution as an ``nn.Conv1d`` computes it, then the activation."""
        x, weight, bias, activation = arguments
        width, length = weight.shape[1], x.shape[1]
        padded = torch.nn.functional.conv1d(
            x.transpose(1, 2), weight.unsqueeze(1), bias, padding=width - 1, groups=len(weight)
        )
        y = padded[..., :length]
        if activation is not None:
            # PyTorch's own, whose bits stock code has, has no derivative of its gradient in forward mode.
            is_dual = forward_ad._current_level >= 0
            y = silu(y.to(wide_dtype(y.dtype))).to(y.dtype) if is_dual else torch.nn.functional.silu(y)
        return y.transpose(1, 2)

    def forward(self, call: Call, *arguments: Any, training: bool) -> Results:
        x, weight, bias, activation = arguments
        y = call.empty_rows_like(x)
        call.then(launch_conv_forward, x, weight, bias, y, activation)
        return (y,)

    def backward(self, call: Call, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (dy,), (x, weight, bias), (need_dx, need_dweight, need_dbias) = given.incoming, given.saved, given.needed
        dx = call.empty_rows_like(x) if need_dx else None
        sums = call.empty_weight_like(weight, need_dweight), call.empty_weight_like(bias, need_dbias)
        call.then(launch_conv_backward, x, weight, bias, dy, (dx, *sums), given.saved_scalars[0])
        return dx, *sums


CAUSAL_CONV1D = CausalConv1d()


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Literal["silu"] | None = None
) -> Tensor:
    """A causal depthwise convolution along a sequence, and SiLU of it, its own result never written.

    ``y[t] = act(bias + sum over j of weight[:, taps - 1 - j] * x[t - j])``, with zeros before the first row. Computed
    in fp32, and rounded to x's dtype before the activation. The backward keeps x, weight and bias alone.

    Args:
        x: [batch, length, channels], float32, bfloat16 or float16; float64 is computed by the PyTorch reference. Rows
            of channels are read where they are, at any strides; [batch, channels, length] is passed as
            ``x.transpose(1, 2)``, which is free, and copied if channels do not follow each other in memory.
        weight: [channels, taps], of x's dtype; an ``nn.Conv1d`` has it as ``weight.squeeze(1)``. Kernels have 2 to 4
            taps, the PyTorch reference any number.
        bias: [channels], of x's dtype.
        activation: ``silu``, or None for the convolution alone.

    Returns:
        y, of x's shape and dtype, in x's memory order.

    Raises:
        TypeError: for anything but a dense tensor of floating point.
        ValueError: for other shapes, dtypes or devices, and another activation.
    """
    return CAUSAL_CONV1D.checked(x, weight, bias, activation)
