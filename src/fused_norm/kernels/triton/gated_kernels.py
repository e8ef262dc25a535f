"""RMSNorm with a gate in Triton, forward and backward: kernels and their launchers.

``language`` has the names that kernels use. A row is ``groups`` groups of N columns, normalised separately:
a program has rows of one group, which is the second axis of the grid. ``z`` is the gate, ``act`` its activation and
``slope`` the derivative of that; ``dy``, ``dx``, ``dgate`` and ``dw`` are gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...spec import NormSpec
from ..plans import BackwardPlan, ForwardPlan, backward_plan, forward_plan
from .call import Call
from .devices import device_props
from .language import (
    copy_weight,
    let_next_begin,
    load_gamma,
    load_tile,
    normalised,
    round_to,
    rows_of,
    rstd_from,
    store_tile,
)
from .memory import INT32_LIMIT, bytes_of
from .weight_grad import empty_partials, reduce_partials


@triton.jit
def _activated(z, ACTIVATION: tl.constexpr):
    """The activation, with the steps that it has in PyTorch."""
    if ACTIVATION == "silu":
        return z / (1.0 + tl.exp(-z))
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def _activated_and_slope(z, ACTIVATION: tl.constexpr):
    """The activation and its derivative. Of logistic(z) and 1 - logistic(z) the smaller is computed, not subtracted."""
    power = tl.exp(-tl.abs(z))
    more = 1.0 / (1.0 + power)
    less = power * more
    share = tl.where(z < 0.0, less, more)
    if ACTIVATION == "silu":
        return z * share, share + z * (less * more)
    return share, less * more


@triton.jit(do_not_specialize=["M"])
def _gated_forward_kernel(
    x_ptr,  # [M, groups * N]
    z_ptr,  # [M, groups * N]
    w_ptr,  # [groups * N] or None
    y_ptr,  # [M, groups * N]
    rstd_ptr,  # [M, groups] fp32 or None
    w_copy_ptr,  # [groups * N] or None: a copy of the weight
    M,
    x_stride, z_stride, y_stride,
    eps,
    N: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, INT64: tl.constexpr,
    SPEC: tl.constexpr, ACTIVATION: tl.constexpr, NORM_FIRST: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    first = group * N
    row = rows_of(tl.program_id(0), ROWS, INT64)
    col = tl.arange(0, BLOCK)
    in_row = col < N
    live = (row < M)[:, None] & in_row[None, :]
    x_dtype: tl.constexpr = x_ptr.dtype.element_ty
    s = load_tile((x_ptr + first, x_stride), row, col, live)
    act = _activated(load_tile((z_ptr + first, z_stride), row, col, live), ACTIVATION)
    if not NORM_FIRST:
        s = s * act
    rstd = rstd_from(tl.sum(s * s, axis=1), eps, x_dtype, N, SPEC)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row * GROUPS + group, rstd, mask=row < M)
    out = normalised(s, rstd[:, None], w_ptr, x_dtype, SPEC)
    if w_ptr is not None:
        out = out * load_gamma(w_ptr + first, col, in_row, SPEC)
        # Two dtypes that differ promote to fp32; gemma rounds at the end alone.
        if NORM_FIRST and SPEC.casting != "gemma" and w_ptr.dtype.element_ty == x_dtype:
            out = round_to(out, x_dtype)
    if NORM_FIRST:
        out = out * act
    store_tile((y_ptr + first, y_stride), row, col, live, out)
    if w_copy_ptr is not None:
        copy_weight(w_ptr + first, w_copy_ptr + first, N, BLOCK)


@triton.jit(do_not_specialize=["M"])
def _gated_backward_kernel(
    dy_ptr,  # [M, groups * N]
    x_ptr,  # [M, groups * N]
    z_ptr,  # [M, groups * N]
    w_ptr,  # [groups * N] or None
    rstd_ptr,  # [M, groups] fp32
    dx_ptr,  # [M, groups * N] or None
    dgate_ptr,  # [M, groups * N] or None
    partials_ptr,  # [programs along rows, groups * N] fp32 or None: each program's partial dw
    M,
    dy_stride, x_stride, z_stride, dx_stride, dgate_stride,
    N: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    RELOAD: tl.constexpr, OVERLAPS: tl.constexpr, INT64: tl.constexpr, SPEC: tl.constexpr, ACTIVATION: tl.constexpr,
    NORM_FIRST: tl.constexpr,
):  # fmt: skip
    program, group = tl.program_id(0), tl.program_id(1)
    first = group * N
    col = tl.arange(0, BLOCK)
    in_row = col < N
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    gamma = tl.full([1, BLOCK], 1.0, tl.float32)
    if w_ptr is not None and not RELOAD:
        gamma = load_gamma(w_ptr + first, col, in_row, SPEC)
    for tile in tl.range(program, tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = rows_of(tile, ROWS, INT64)
        live = (row < M)[:, None] & in_row[None, :]
        x = load_tile((x_ptr + first, x_stride), row, col, live)
        z = load_tile((z_ptr + first, z_stride), row, col, live)
        dy = load_tile((dy_ptr + first, dy_stride), row, col, live)
        rstd = tl.load(rstd_ptr + row * GROUPS + group, mask=row < M, other=0.0)[:, None]
        act, slope = _activated_and_slope(z, ACTIVATION)
        if NORM_FIRST:
            x_hat = x * rstd
            g = dy * act
        else:
            x_hat = x * act * rstd
            g = dy
        if partials_ptr is not None:
            dw += g * x_hat
        if w_ptr is not None and RELOAD:
            gamma = load_gamma(w_ptr + first, col, in_row, SPEC)
        if NORM_FIRST and dgate_ptr is not None:
            store_tile((dgate_ptr + first, dgate_stride), row, col, live, dy * (x_hat * gamma) * slope)
        if dx_ptr is not None or (dgate_ptr is not None and not NORM_FIRST):
            g = g * gamma
            correction = tl.sum(g * x_hat, axis=1)[:, None] * (1.0 / N)
            g = rstd * (g - x_hat * correction)
            if NORM_FIRST:
                store_tile((dx_ptr + first, dx_stride), row, col, live, g)
            else:
                if dx_ptr is not None:
                    store_tile((dx_ptr + first, dx_stride), row, col, live, g * act)
                if dgate_ptr is not None:
                    store_tile((dgate_ptr + first, dgate_stride), row, col, live, g * x * slope)
    let_next_begin(OVERLAPS)
    if partials_ptr is not None:
        partial = partials_ptr + program.to(tl.int64) * (GROUPS * N) + first
        tl.store(partial + col, tl.sum(dw, axis=0), mask=in_row)


class Gating(NamedTuple):
    """How norm and gate are combined."""

    activation: str  # silu or sigmoid
    norm_first: bool  # the norm comes before the gate
    groups: int  # equal parts of a row, each normalised separately

    def constants(self, spec: NormSpec, plan: ForwardPlan | BackwardPlan, width: int, long: bool) -> dict[str, Any]:
        """The compile-time arguments that both kernels have; ``width`` is that of a group."""
        tile = {"N": width, "GROUPS": self.groups, "ROWS": plan.rows, "BLOCK": plan.block, "INT64": long}
        return tile | {"SPEC": spec.without_eps(), "ACTIVATION": self.activation, "NORM_FIRST": self.norm_first}


def launch_gated_forward(
    call: Call,
    spec: NormSpec,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    outputs: tuple[Tensor, Tensor | None, Tensor | None],
    gating: Gating,
) -> None:
    """Write the ``outputs`` y, rstd and copy of the weight; for groups up to ``WIDEST_GATED``."""
    if x.numel() == 0:
        return
    rows, width = x.numel() // x.shape[-1], x.shape[-1] // gating.groups
    *outputs_of_rows, copy = outputs
    (x, gate, y, rstd), spacing = call.as_strided_rows(x, gate, *outputs_of_rows)  # type: ignore[assignment]
    plan = forward_plan(width, device_props(x.device), None, "gated_forward")
    constants = gating.constants(spec, plan, width, rows * max(spacing) >= INT32_LIMIT)
    grid, numbers = (-(-rows // plan.rows), gating.groups), (rows, *spacing[:3], spec.eps)
    tensors = x, gate, call.contiguous(weight), y, rstd, copy
    call.launch(_gated_forward_kernel, grid, tensors, numbers, constants, warps=plan.warps)


def launch_gated_backward(
    call: Call,
    spec: NormSpec,
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
    gating: Gating,
) -> None:
    """Write the ``gradients`` (dx, dgate, dw) that are not None, the first two from ``empty_rows_like(x)``.

    For groups up to ``WIDEST_GATED``.
    """
    dx, dgate, dw = gradients
    if x.numel() == 0:
        if dw is not None:
            call.zero(dw)
        return
    groups, device = gating.groups, device_props(x.device)
    rows, width = x.numel() // x.shape[-1], x.shape[-1] // groups
    (x, dy, gate, dx, dgate, rstd), spacing = call.as_strided_rows(x, dy, gate, dx, dgate, rstd)  # type: ignore[assignment]
    read = dy, x, gate, call.contiguous(weight)
    plan = backward_plan(width, bytes_of(*read), device, "gated_backward")
    constants = gating.constants(spec, plan, width, rows * max(spacing) >= INT32_LIMIT)
    constants |= {"STAGES": plan.stages, "RELOAD": plan.reload, "OVERLAPS": dw is not None and device.overlaps}
    programs, most = -(-rows // plan.rows), -(-plan.programs // groups)
    programs = programs if dw is None else min(programs, most)
    partials = empty_partials(call, programs, dw)
    tensors, numbers = (*read, rstd, dx, dgate, partials), (rows, spacing[1], spacing[0], *spacing[2:5])
    call.launch(_gated_backward_kernel, (programs, groups), tensors, numbers, constants, warps=plan.warps)
    if partials is not None:
        reduce_partials(call, partials, dw, None, programs, most, device)
