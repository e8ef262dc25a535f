"""RMSNorm with a gate, which linear attentions and Mamba 2 end with.

A row is ``groups`` groups of N columns, normalised separately: a program has rows of one group, which is the second
axis of the grid.

To the alphabet of ``triton.language`` come ``z``, the gate, ``act``, its activation, ``slope``, the derivative of that,
and ``dgate``, the gradient of the gate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..spec import Casting, NormSpec
from .arguments import GATES, Unsupported, check_choice, check_flag
from .backward import BackwardArguments
from .norm_kernels import BackwardPlan, ForwardPlan, backward_plan, forward_plan
from .norm_spec import norm_spec
from .operator import Operator, Results
from .plans import RULES, Rule
from .reference import NormFunctions, rms_norm, wide_dtype
from .triton.call import Call
from .triton.devices import device_props
from .triton.language import (
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
from .triton.memory import INT32_LIMIT, bytes_of, norm_dtype
from .triton.weight_grad import empty_partials, reduce_partials


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


WIDEST_GATED = 8192
"""Elements of a row, or of a group of one, that a program of a gated norm can hold in either direction."""

RULES["gated_forward"] = (
    Rule(4096, 2048, 4, why=".95 and more of a copy's bandwidth; in 2 warps the same or up to 3 % slower"),
    Rule(WIDEST_GATED, 2048, 8, why="16 elements a lane: .87 to .91 at 8192, with twice as many .79 to .83"),
)
RULES["gated_backward"] = (
    Rule(512, 2048, 4, 3, why="twice as many elements a lane are 4 to 24 % slower at 128 wide"),
    Rule(1024, 4096, 4, 2, why="half as many elements a lane are 12 % slower"),
    Rule(2048, 2048, 4, 3, why="reading the weight again is up to 8 % slower"),
    Rule(WIDEST_GATED, 4096, 16, 1, why="8 warps: up to 8 % slower; two programs of 8: 11 % faster or 8 % slower"),
)


class Gating(NamedTuple):
    """The way that a norm and a gate are combined: activation, order, and groups of a row."""

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


class GatedRMSNorm(Operator):
    """``gated_rms_norm`` as an operator."""

    name = "gated_rms_norm"
    tensors = "Tensor x, Tensor gate, Tensor? weight"
    options = "NormSpec spec, str activation, bool norm_before_gate, int groups"
    outputs = ("y",)
    same_shape = ("gate",)
    extra_saved = ("rstd",)
    saved = "Tensor x, Tensor gate, Tensor? weight, Tensor rstd"
    saved_scalars = options
    gradients = ("dx", "dgate", "dw")
    copies: ClassVar[Mapping[str, Sequence[str]]] = {"weight": ("x", "gate")}

    def check_options(self, *arguments: Any) -> Unsupported | None:
        x, _, _, spec, activation, norm_before_gate, groups = arguments
        if spec.casting not in ("llama", "gemma"):
            return Unsupported(
                f"casting must be llama or gemma, not {spec.casting!r}, which has no rounding points for a gate",
                ValueError,
            )
        if isinstance(groups, bool) or not isinstance(groups, int):
            return Unsupported(f"groups must be an int, not {type(groups).__name__}", TypeError)
        if groups < 1 or x.shape[-1] % groups:
            return Unsupported(
                f"groups must divide x's last dimension, {x.shape[-1]}, into equal parts; {groups} does not", ValueError
            )
        return check_choice("activation", activation, GATES) or check_flag("norm_before_gate", norm_before_gate)

    def why_reference_only(self, *arguments: Any) -> Unsupported | None:
        width, groups = arguments[0].shape[-1], arguments[-1]
        if width // groups <= WIDEST_GATED:
            return None
        return Unsupported(f"rows of {width} in {groups} groups are more than a kernel holds")

    def reference(self, *arguments: Any, functions: NormFunctions | None = None) -> Tensor:
        """``norm(x) * act(gate)``, or ``norm(x * act(gate))``, each group of columns normalised separately."""
        x, gate, weight, spec, activation, norm_before_gate, groups = arguments
        functions, wide = functions or NormFunctions(), wide_dtype(x.dtype)
        gate = (functions.silu if activation == "silu" else torch.sigmoid)(gate.to(wide))
        total, dtype = x, x.dtype
        if not norm_before_gate:
            total = x.to(wide) * gate
        elif spec.casting == "gemma":
            total, dtype = x.to(wide), wide
        weight = None if weight is None else _grouped(weight, groups)
        y = rms_norm(spec, _grouped(total, groups), weight, functions=functions, dtype=dtype).reshape(x.shape)
        return (y * gate).to(x.dtype) if norm_before_gate else y

    def forward(self, call: Call, *arguments: Any, training: bool, copied: Sequence[str] = ()) -> Results:
        x, gate, weight, spec, *how = arguments
        gating = Gating(*how)
        y = call.empty_rows_like(x, x.dtype if gating.norm_first else norm_dtype(spec, x.dtype, weight))
        rstd = call.empty_rows_like(x, torch.float32, width=gating.groups) if training else None
        outputs = y, rstd, call.empty_weight_like(weight, "weight" in copied)
        call.then(launch_gated_forward, spec, x, gate, weight, outputs, gating)
        return outputs

    def backward(self, call: Call, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (dy,), (x, gate, weight, rstd), (spec, *how) = given.incoming, given.saved, given.saved_scalars
        need_dx, need_dgate, need_dw = given.needed
        dx = call.empty_rows_like(x) if need_dx else None
        dgate = call.empty_rows_like(x, gate.dtype) if need_dgate else None
        dw = call.empty_weight_like(weight, need_dw)
        call.then(launch_gated_backward, spec, dy, x, gate, weight, rstd, (dx, dgate, dw), Gating(*how))
        return dx, dgate, dw


GATED_RMS_NORM = GatedRMSNorm()


def _grouped(rows: Tensor, groups: int) -> Tensor:
    """Rows [..., N] as [..., groups, N / groups]."""
    return rows.reshape(*rows.shape[:-1], groups, rows.shape[-1] // groups)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    casting: Casting = "llama",
    zero_centered: bool = False,
    norm_before_gate: bool = True,
    activation: Literal["silu", "sigmoid"] = "silu",
    groups: int = 1,
) -> Tensor:
    """RMSNorm over the last dimension with a gate, as linear attentions and Mamba 2 end with.

    ``y = norm(x) * act(gate)``, or without ``norm_before_gate`` ``y = norm(x * act(gate))``; the norm is that of
    ``rms_norm``, of each group of columns separately. The activation, and its product with x, are computed in fp32 and
    not rounded. The backward keeps x, gate and a number for each group.

    Args:
        x: [..., N], float32, bfloat16 or float16; float64 is computed by the PyTorch reference, and so are groups of
            more than 8192 columns. Any strides; evenly spaced rows are read where they are, others are copied first.
        gate: x's shape and device; its dtype may differ.
        weight: [N], or None.
        eps: added to the mean of squares of a group.
        casting: ``llama``: the normalised row is rounded to x's dtype before gamma, and what gamma makes of it to what
            x and weight promote to. ``gemma``: nothing is rounded but the result. There are no others.
        zero_centered: gamma is ``1 + weight``, as in ``rms_norm``.
        norm_before_gate: the norm comes first (Qwen3-Next), or the gate does (Mamba 2).
        activation: ``silu`` or ``sigmoid``.
        groups: equal parts of a row, each normalised by its own mean of squares.

    Returns:
        y, of x's shape and memory order. Its dtype is x's if the norm comes first and under ``gemma``, else what x
        and weight promote to.

    Raises:
        TypeError: for groups that are not an int, a norm_before_gate that is not a bool, and as ``rms_norm`` does.
        ValueError: for a gate of another shape or device, groups that do not divide a row, an unknown activation, a
            other casting, and as ``rms_norm`` does.
    """
    spec = norm_spec(casting, zero_centered, eps)
    return GATED_RMS_NORM.checked(x, gate, weight, spec, activation, norm_before_gate, groups)
