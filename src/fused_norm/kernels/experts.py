"""The operators of a mixture of experts around its products: rows to experts, biases, the gate, rows back to tokens.

A token goes to K experts. ``position`` [M, K] has, for each token and each of its experts, the row of the tensor in
which the rows of one expert follow each other. ``absent`` marks the rows of that tensor whose expert is on another
device: memory of these rows holds anything, and is read as zeros. A row of 2 N numbers has the gate and what it is
multiplied by, up, as halves or, INTERLEAVED, in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .arguments import Unsupported, check_choice, check_flag
from .backward import BackwardArguments
from .glu import GLU, _share, _slope
from .operator import Operator, Results
from .plans import TilePlan, tile_plan
from .reference import ActivationName, gradients_of, split_pairs
from .triton.call import Call
from .triton.devices import device_props
from .triton.language import TRITON_DTYPES, as_mask, load_tile, round_to, rows_of, store_tile
from .triton.memory import INT32_LIMIT, promoted


@triton.jit
def _tile(M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr, INT64: tl.constexpr):
    """This program's rows [ROWS], its block of columns, and the columns [BLOCK]."""
    blocks = tl.cdiv(N, BLOCK)
    row = rows_of(tl.program_id(0) // blocks, ROWS, INT64)
    block = tl.program_id(0) % blocks
    return row, block, block * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _is_present(absent_ptr, row, live):
    """Which of the ``live`` rows have their expert on this device."""
    present = live
    if absent_ptr is not None:
        present = live & (tl.load(absent_ptr + row, mask=live, other=0) == 0)
    return present


@triton.jit
def _load_pair(x, row, present, block, N, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The gate and up of a tile, zero if not ``present``."""
    if INTERLEAVED:
        col = block * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        both = load_tile(x, row, col, present[:, None] & (col < 2 * N)[None, :])
        gate, up = tl.split(tl.reshape(both, [both.shape[0], BLOCK, 2]))
    else:
        ptr, stride = x
        col = block * BLOCK + tl.arange(0, BLOCK)
        live = present[:, None] & (col < N)[None, :]
        gate = load_tile(x, row, col, live)
        up = load_tile((ptr + N, stride), row, col, live)
    return gate, up


@triton.jit
def _store_pair(x, row, live, block, N, gate, up, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        col = block * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        both = tl.reshape(tl.join(gate, up), [gate.shape[0], 2 * BLOCK])
        store_tile(x, row, col, live[:, None] & (col < 2 * N)[None, :], both)
    else:
        ptr, stride = x
        col = block * BLOCK + tl.arange(0, BLOCK)
        inside = live[:, None] & (col < N)[None, :]
        store_tile(x, row, col, inside, gate)
        store_tile((ptr + N, stride), row, col, inside, up)


@triton.jit
def _clamped(gate, up, limit, dtype: tl.constexpr):
    """The gate up to the limit, and up within it on both sides; a NaN stays one."""
    if limit is not None:
        gate = round_to(tl.where(gate > limit, limit, gate), dtype)
        up = round_to(tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)), dtype)
    return gate, up


@triton.jit
def _activated(gate, alpha, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """The activation of a gate, rounded as stock code rounds it: with ``alpha`` it consists of operations."""
    if alpha is None:
        share = _share(gate, ACTIVATION)
    else:
        share = round_to(_share(round_to(gate * alpha, dtype), ACTIVATION), dtype)
    return round_to(gate * share, dtype)


@triton.jit(do_not_specialize=["M"])
def _expert_gate_forward_kernel(
    x_ptr,  # [M, 2 N]
    absent_ptr,  # [M] or None
    y_ptr,  # [M, N]
    M,
    N, x_stride, y_stride, limit, alpha,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, INT64: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    row, block, col = _tile(M, N, ROWS, BLOCK, INT64)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    present = _is_present(absent_ptr, row, row < M)
    gate, up = _load_pair((x_ptr, x_stride), row, present, block, N, BLOCK, INTERLEAVED)
    gate, up = _clamped(gate, up, limit, dtype)
    if alpha is not None:
        up = round_to(up + 1.0, dtype)
    activated = _activated(gate, alpha, dtype, ACTIVATION)
    store_tile((y_ptr, y_stride), row, col, (row < M)[:, None] & (col < N)[None, :], activated * up)


@triton.jit(do_not_specialize=["M"])
def _expert_gate_backward_kernel(
    x_ptr,  # [M, 2 N]
    absent_ptr,  # [M] or None
    dy_ptr,  # [M, N]
    dx_ptr,  # [M, 2 N]
    M,
    N, x_stride, dy_stride, dx_stride, limit, alpha,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, INT64: tl.constexpr, ACTIVATION: tl.constexpr,
    AT_LIMIT: tl.constexpr,
):  # fmt: skip
    """AT_LIMIT: a number that is the limit itself has a gradient."""
    row, block, col = _tile(M, N, ROWS, BLOCK, INT64)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    present = _is_present(absent_ptr, row, row < M)
    dy = load_tile((dy_ptr, dy_stride), row, col, present[:, None] & (col < N)[None, :])
    given_gate, given_up = _load_pair((x_ptr, x_stride), row, present, block, N, BLOCK, INTERLEAVED)
    gate, up = _clamped(given_gate, given_up, limit, dtype)
    if alpha is None:
        slope = _slope(gate, ACTIVATION)
    else:
        slope = _slope(gate * alpha, ACTIVATION)
        up = up + 1.0
    dgate = dy * up * slope
    dup = dy * _activated(gate, alpha, dtype, ACTIVATION)
    if limit is not None:
        if AT_LIMIT:
            dgate = tl.where(given_gate <= limit, dgate, 0.0)
            dup = tl.where((given_up <= limit) & (given_up >= -limit), dup, 0.0)
        else:
            dgate = tl.where(given_gate < limit, dgate, 0.0)
            dup = tl.where((given_up < limit) & (given_up > -limit), dup, 0.0)
    _store_pair((dx_ptr, dx_stride), row, row < M, block, N, dgate, dup, BLOCK, INTERLEAVED)


@triton.jit(do_not_specialize=["M"])
def _expert_permute_forward_kernel(
    x_ptr,  # [M, N]
    position_ptr,  # [M, K]
    absent_ptr,  # [M K] or None
    y_ptr,  # [M K, N]
    M,
    N, x_stride, y_stride,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    row, _, col = _tile(M, N, ROWS, BLOCK, INT64)
    inside = (row < M)[:, None] & (col < N)[None, :]
    x = load_tile((x_ptr, x_stride), row, col, inside)
    for k in tl.static_range(K):
        place = tl.load(position_ptr + row * K + k, mask=row < M, other=0)
        present = _is_present(absent_ptr, place, row < M)
        store_tile((y_ptr, y_stride), place, col, inside, tl.where(present[:, None], x, 0.0))


@triton.jit(do_not_specialize=["M"])
def _expert_sum_kernel(
    x_ptr,  # [M K, N]
    weights_ptr,  # [M, K] or None
    position_ptr,  # [M, K]
    absent_ptr,  # [M K] or None
    y_ptr,  # [M, N]
    M,
    N, x_stride, y_stride,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, INT64: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Sum each token's rows in fp32, in the order of its experts; weighted rows and the sum are rounded to DTYPE."""
    row, _, col = _tile(M, N, ROWS, BLOCK, INT64)
    inside = (row < M)[:, None] & (col < N)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for k in tl.static_range(K):
        place = tl.load(position_ptr + row * K + k, mask=row < M, other=0)
        present = _is_present(absent_ptr, place, row < M)
        value = load_tile((x_ptr, x_stride), place, col, inside & present[:, None])
        if weights_ptr is not None:
            weight = tl.load(weights_ptr + row * K + k, mask=row < M, other=0.0).to(tl.float32)
            value = round_to(value * weight[:, None], DTYPE)
        total += value
    store_tile((y_ptr, y_stride), row, col, inside, round_to(total, DTYPE))


@triton.jit
def _expert_unpermute_backward_kernel(
    dy_ptr,  # [M, N]
    x_ptr,  # [M K, N]
    weights_ptr,  # [M, K]
    position_ptr,  # [M, K]
    absent_ptr,  # [M K] or None
    dx_ptr,  # [M K, N] or None
    dweights_ptr,  # [M, K] or None
    dy_stride, x_stride, dx_stride,
    N: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """One program for each token."""
    row = tl.program_id(0)
    if INT64:
        row = row.to(tl.int64)
    for k in tl.static_range(K):
        place = tl.load(position_ptr + row * K + k)
        weight = tl.load(weights_ptr + row * K + k).to(tl.float32)
        is_present = True
        if absent_ptr is not None:
            is_present = tl.load(absent_ptr + place) == 0
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, N, BLOCK):
            col = start + tl.arange(0, BLOCK)
            live = as_mask((col < N) & is_present)
            dy = tl.load(dy_ptr + row * dy_stride + col, mask=live, other=0.0).to(tl.float32)
            if dx_ptr is not None:
                dx = round_to(dy * weight, dx_ptr.dtype.element_ty)
                tl.store(dx_ptr + place * dx_stride + col, tl.where(live, dx, 0.0), mask=col < N)
            if dweights_ptr is not None:
                x = tl.load(x_ptr + place * x_stride + col, mask=live, other=0.0).to(tl.float32)
                total += dy * x
        if dweights_ptr is not None:
            dweight = tl.sum(total, axis=0)
            tl.store(dweights_ptr + row * K + k, round_to(dweight, dweights_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["M"])
def _expert_bias_forward_kernel(
    bias_ptr,  # [E, N]
    expert_ptr,  # [M]
    ends_ptr,  # [E]
    y_ptr,  # [M, N]
    M,
    E, N, bias_stride, y_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    row, _, col = _tile(M, N, ROWS, BLOCK, INT64)
    present, inside = row < tl.load(ends_ptr + E - 1), col < N
    expert = tl.load(expert_ptr + row, mask=present, other=0)
    bias = load_tile((bias_ptr, bias_stride), expert, col, present[:, None] & inside[None, :])
    store_tile((y_ptr, y_stride), row, col, (row < M)[:, None] & inside[None, :], bias)


@triton.jit
def _expert_bias_backward_kernel(
    dy_ptr,  # [M, N]
    ends_ptr,  # [E]
    dbias_ptr,  # [E, N]
    N, dy_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """One program for an expert and a block of columns."""
    expert = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        live = (row < end)[:, None] & (col < N)[None, :]
        if INT64:
            row = row.to(tl.int64)
        total += load_tile((dy_ptr, dy_stride), row, col, live)
    dtype: tl.constexpr = dbias_ptr.dtype.element_ty
    tl.store(dbias_ptr + expert * N + col, round_to(tl.sum(total, axis=0), dtype), mask=col < N)


_GATE_TILE = 1024, 256
"""Elements of a tile of gates, and its columns at most: of 768, 1408 and 2880 columns few lanes stay idle."""

_ROWS_TILE = 1024, 512
"""Elements and columns at most of a tile in kernels that copy or sum the rows of each token's experts."""

_PRODUCTS_TILE = 1, 4096
"""Rows and columns of a chunk in the kernel whose programs sum over all columns of a row."""


def launch_expert_gate(
    call: Call,
    x: Tensor,
    absent: Tensor | None,
    gate: Sequence[Any],
    written: Tensor,
    dy: Tensor | None = None,
    *,
    at_limit: bool = False,
) -> None:
    """Write the output for x [..., 2 N] or, given the gradient of the output, that of x, from ``empty_rows_like(x)``.

    ``gate``: the options of ``expert_gate``. ``at_limit``: in a backward, a number that is the limit itself has a
    gradient.
    """
    if x.numel() == 0:
        return
    activation, interleaved, limit, alpha = gate
    (lead, *others), spacing = call.as_strided_rows(x, *(() if dy is None else (dy,)), written)
    width = x.shape[-1] // 2
    rows = x.numel() // (2 * width)
    kernel, constants = _expert_gate_forward_kernel, {"INTERLEAVED": interleaved, "ACTIVATION": activation}
    if dy is not None:
        kernel, constants = _expert_gate_backward_kernel, constants | {"AT_LIMIT": at_limit}
    tensors, numbers = (lead, call.contiguous(absent), *others), (rows, width, *spacing, limit, alpha)
    plan = tile_plan(_GATE_TILE, width, device_props(x.device))
    _launch_tiles(call, kernel, tensors, numbers, (rows, width), plan, rows * max(spacing), constants)


def _launch_tiles(
    call: Call,
    kernel: Any,
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[float | None, ...],
    shape: Sequence[int],
    plan: TilePlan,
    extent: int,
    constants: dict[str, Any],
) -> None:
    """Launch a kernel on tiles of a matrix of this shape; ``extent``: elements up to the end of the largest tensor."""
    (rows, width), tile = shape, {"ROWS": plan.rows, "BLOCK": plan.block, "INT64": extent >= INT32_LIMIT}
    grid = -(-rows // plan.rows) * -(-width // plan.block), 1
    call.launch(kernel, grid, tensors, numbers, {**tile, **constants}, warps=plan.warps, fuse=False)


def launch_expert_permute(call: Call, x: Tensor, position: Tensor, absent: Tensor | None, y: Tensor) -> None:
    """Write ``y`` [M K, N], the rows of ``x`` [M, N] in the order of experts."""
    if y.numel() == 0:
        return
    (x_rows, x_stride), (y_rows, y_stride) = _rows_of(call, x), _rows_of(call, y)
    plan, extent = tile_plan(_ROWS_TILE, x.shape[1], device_props(x.device)), y.shape[0] * max(x_stride, y_stride)
    tensors, numbers = (
        (x_rows, call.contiguous(position), call.contiguous(absent), y_rows),
        (*x.shape, x_stride, y_stride),
    )
    constants = {"K": position.shape[1]}
    _launch_tiles(call, _expert_permute_forward_kernel, tensors, numbers, x.shape, plan, extent, constants)


def launch_expert_sum(
    call: Call,
    x: Tensor,
    weights: Tensor | None,
    position: Tensor,
    absent: Tensor | None,
    y: Tensor,
    dtype: torch.dtype,
) -> None:
    """Write ``y`` [M, N], for each token the sum of its rows in ``x`` [M K, N], times ``weights`` if given.

    ``dtype``: each weighted row and the sum are rounded to it.
    """
    if y.numel() == 0:
        return
    (x_rows, x_stride), (y_rows, y_stride) = _rows_of(call, x), _rows_of(call, y)
    plan, extent = tile_plan(_ROWS_TILE, y.shape[1], device_props(x.device)), x.shape[0] * max(x_stride, y_stride)
    tensors = x_rows, call.contiguous(weights), call.contiguous(position), call.contiguous(absent), y_rows
    constants = {"K": position.shape[1], "DTYPE": TRITON_DTYPES[dtype]}
    _launch_tiles(call, _expert_sum_kernel, tensors, (*y.shape, x_stride, y_stride), y.shape, plan, extent, constants)


def launch_expert_unpermute_backward(
    call: Call,
    dy: Tensor,
    x: Tensor,
    weights: Tensor,
    position: Tensor,
    absent: Tensor | None,
    dx: Tensor | None,
    dweights: Tensor | None,
) -> None:
    """Write ``dx`` [M K, N] and ``dweights`` [M, K], both contiguous; one of them may be None, and is skipped."""
    if x.numel() == 0:
        return
    tokens, width = dy.shape
    (dy_rows, dy_stride), (x_rows, x_stride) = _rows_of(call, dy), _rows_of(call, x)
    plan = tile_plan(_PRODUCTS_TILE, width, device_props(dy.device))
    is_long = x.shape[0] * max(dy_stride, x_stride) >= INT32_LIMIT
    constants = {"N": width, "K": position.shape[1], "BLOCK": plan.block, "INT64": is_long}
    routing = call.contiguous(weights), call.contiguous(position), call.contiguous(absent)
    read = dy_rows, None if dweights is None else x_rows, *routing
    tensors, numbers, kernel = (*read, dx, dweights), (dy_stride, x_stride, width), _expert_unpermute_backward_kernel
    call.launch(kernel, (tokens, 1), tensors, numbers, constants, warps=plan.warps, fuse=False)


def launch_expert_bias_forward(call: Call, bias: Tensor, expert: Tensor, ends: Tensor, y: Tensor) -> None:
    """Write ``y`` [M, N]: rows of ``bias`` [E, N] by ``expert`` [M], and zeros from the last of ``ends`` [E] on."""
    if y.numel() == 0:
        return
    rows, width = y.shape
    (bias_rows, bias_stride), (y_rows, y_stride) = _rows_of(call, bias), _rows_of(call, y)
    plan = tile_plan(_ROWS_TILE, width, device_props(y.device))
    extent = max(rows * y_stride, bias.shape[0] * bias_stride)
    tensors = bias_rows, call.contiguous(expert), call.contiguous(ends), y_rows
    numbers = rows, len(ends), width, bias_stride, y_stride
    _launch_tiles(call, _expert_bias_forward_kernel, tensors, numbers, y.shape, plan, extent, {})


def launch_expert_bias_backward(call: Call, dy: Tensor, ends: Tensor, dbias: Tensor) -> None:
    """Write ``dbias`` [E, N], contiguous: the sums over the rows of ``dy`` [M, N] up to each of ``ends`` [E]."""
    if dbias.numel() == 0:
        return
    dy_rows, dy_stride = _rows_of(call, dy)
    constants = {"ROWS": 32, "BLOCK": 128, "INT64": dy.shape[0] * dy_stride >= INT32_LIMIT}
    grid = dbias.shape[0], -(-dbias.shape[1] // constants["BLOCK"])
    tensors, numbers = (dy_rows, call.contiguous(ends), dbias), (dbias.shape[1], dy_stride)
    call.launch(_expert_bias_backward_kernel, grid, tensors, numbers, constants, warps=4, fuse=False)


def _rows_of(call: Call, x: Tensor) -> tuple[Tensor, int]:
    """A matrix whose rows are contiguous, and its row stride."""
    (rows,), (stride,) = call.as_strided_rows(x)
    assert rows is not None
    return rows, stride


EXPERT_ACTIVATIONS: tuple[ActivationName, ...] = ("silu", "gelu", "gelu_tanh")
"""The activations of an MLP's gate that experts may have."""

_ROWS = "Tensor position, Tensor? absent"


def _clamp_has_gradient_at_limit() -> bool:
    """Return whether ``clamp`` gives a gradient to a number that is the limit itself: until PyTorch 2.14 it does."""
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        x = torch.ones((), device="cpu", requires_grad=True)
        (dx,) = torch.autograd.grad(x.clamp(max=1.0), x)
    return bool(dx)


_CLAMP_HAS_GRADIENT_AT_LIMIT = _clamp_has_gradient_at_limit()


def _present_rows(x: Tensor, absent: Tensor | None) -> Tensor:
    """x with zeros in rows that are ``absent``."""
    return x if absent is None else x.masked_fill(absent.unsqueeze(-1), 0.0)


class ExpertGate(Operator):
    """``expert_gate`` as an operator."""

    name = "expert_gate"
    tensors = "Tensor x, Tensor? absent"
    options = "str activation, bool interleaved, float? limit, float? alpha"
    outputs = ("y",)
    other_rules = ("absent",)
    takes_dtensors = False
    saved = tensors
    saved_scalars = options
    gradients = ("dx",)
    recomputed_by_itself = True

    def check_options(self, *arguments: Any) -> Unsupported | None:
        x, absent, activation, interleaved, limit, alpha = arguments
        if x.shape[-1] % 2:
            reason = f"x must have an even last dimension, gates and what they multiply, not shape {tuple(x.shape)}"
            return Unsupported(reason, ValueError)
        if absent is not None and x.dim() != 2:
            return Unsupported(f"x must have 2 dimensions if absent is given, not shape {tuple(x.shape)}", ValueError)
        for name, value in (("limit", limit), ("alpha", alpha)):
            if value is not None and (not isinstance(value, (int, float)) or not value > 0):
                return Unsupported(f"{name} must be a positive number or None, not {value!r}", ValueError)
        if alpha is not None and activation != "silu":
            return Unsupported(f"alpha is a factor inside silu, and activation is {activation!r}", ValueError)
        return (
            check_choice("activation", activation, EXPERT_ACTIVATIONS)
            or check_flag("interleaved", interleaved)
            or _check_absent(absent, x.shape[0], x.device)
        )

    def reference(self, *arguments: Any, act: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The gate as transformers writes it; ``act``: the activation as a function, if not that of this name."""
        x, absent, activation, interleaved, limit, alpha = arguments
        gate, up = split_pairs(_present_rows(x, absent), side_by_side=interleaved)
        if limit is not None:
            gate, up = gate.clamp(min=None, max=limit), up.clamp(min=-limit, max=limit)
        if alpha is None:
            return GLU.reference(gate, up, activation) if act is None else act(gate) * up
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))

    def forward(self, call: Call, *arguments: Any, training: bool) -> Results:
        x, absent, *gate = arguments
        y = call.empty_rows_like(x, width=x.shape[-1] // 2)
        call.then(launch_expert_gate, x, absent, gate, y)
        return (y,)

    def backward(self, call: Call, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (dy,), (x, absent) = given.incoming, given.saved
        dx = call.empty_rows_like(x)
        call.then(launch_expert_gate, x, absent, given.saved_scalars, dx, dy, at_limit=_CLAMP_HAS_GRADIENT_AT_LIMIT)
        return (dx,)


class ExpertPermute(Operator):
    """``expert_permute`` as an operator."""

    name = "expert_permute"
    tensors = f"Tensor x, {_ROWS}"
    outputs = ("y",)
    other_rules = ("position", "absent")
    takes_dtensors = False
    saved = _ROWS
    gradients = ("dx",)

    def check_options(self, *arguments: Any) -> Unsupported | None:
        x, position, absent = arguments
        if x.dim() != 2:
            return Unsupported(f"x must have shape [tokens, N], not {tuple(x.shape)}", ValueError)
        refusal = _check_index("position", position, torch.int64, (x.shape[0], "K"), x.device)
        return refusal or _check_absent(absent, position.numel(), x.device)

    def reference(self, *arguments: Any) -> Tensor:
        x, position, absent = arguments
        order = torch.empty_like(position).view(-1)
        order[position.view(-1)] = torch.arange(position.numel(), device=position.device)
        return _present_rows(x[order // position.shape[1]], absent)

    def forward(self, call: Call, *arguments: Any, training: bool) -> Results:
        x, position, absent = arguments
        y = call.empty(x, (position.shape[0] * position.shape[1], x.shape[1]))
        call.then(launch_expert_permute, x, position, absent, y)
        return (y,)

    def backward(self, call: Call, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (dy,), (position, absent) = given.incoming, given.saved
        dx = call.empty(dy, (position.shape[0], dy.shape[1]))
        call.then(launch_expert_sum, dy, None, position, absent, dx, dy.dtype)
        return (dx,)

    def reference_backward(self, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (dy,), (position, absent) = given.incoming, given.saved
        return (_present_rows(dy, absent)[position].sum(1),)


class ExpertUnpermute(Operator):
    """``expert_unpermute`` as an operator."""

    name = "expert_unpermute"
    tensors = f"Tensor x, Tensor weights, {_ROWS}"
    options = "ScalarType dtype"
    outputs = ("y",)
    other_rules = ("position", "absent")
    takes_dtensors = False
    saved = tensors
    gradients = ("dx", "dweights")

    def check_options(self, *arguments: Any) -> Unsupported | None:
        x, weights, position, absent, dtype = arguments
        if x.dim() != 2 or weights.dim() != 2 or x.shape[0] != weights.shape[0] * weights.shape[1]:
            return Unsupported(
                "x and weights must have shapes [tokens * K, N] and [tokens, K], not"
                f" {tuple(x.shape)} and {tuple(weights.shape)}",
                ValueError,
            )
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            return Unsupported(f"dtype must be a floating point dtype, not {dtype!r}", TypeError)
        refusal = _check_index("position", position, torch.int64, (weights.shape[0], "K"), weights.device)
        return refusal or _check_absent(absent, x.shape[0], x.device)

    def reference(self, *arguments: Any) -> Tensor:
        """Every product, the sum and the result are rounded."""
        x, weights, position, absent, dtype = arguments
        weighted: Tensor = _present_rows(x, absent)[position.view(-1)] * weights.reshape(-1, 1)
        return weighted.view(*position.shape, x.shape[-1]).sum(dim=1).to(dtype)

    def forward(self, call: Call, *arguments: Any, training: bool) -> Results:
        x, weights, position, absent, dtype = arguments
        y = call.empty(x, (position.shape[0], x.shape[1]), dtype=dtype)
        call.then(launch_expert_sum, x, weights, position, absent, y, promoted(x.dtype, weights.dtype))
        return (y,)

    def backward(self, call: Call, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (dy,), (x, weights, position, absent), (need_dx, need_dweights) = given.incoming, given.saved, given.needed
        dx = call.empty(x, x.shape) if need_dx else None
        dweights = call.empty(weights, weights.shape) if need_dweights else None
        call.then(launch_expert_unpermute_backward, dy, x, weights, position, absent, dx, dweights)
        return dx, dweights


class ExpertBias(Operator):
    """``expert_bias`` as an operator."""

    name = "expert_bias"
    tensors = "Tensor bias, Tensor expert, Tensor ends"
    outputs = ("y",)
    other_rules = ("expert", "ends")
    takes_dtensors = False
    saved = "Tensor expert, Tensor ends"
    gradients = ("dbias",)

    def check_options(self, *arguments: Any) -> Unsupported | None:
        bias, expert, ends = arguments
        if bias.dim() != 2:
            return Unsupported(f"bias must have shape [experts, N], not {tuple(bias.shape)}", ValueError)
        refusal = _check_index("expert", expert, torch.int64, ("rows",), bias.device)
        return refusal or _check_index("ends", ends, torch.int32, bias.shape[:1], bias.device)

    def reference(self, *arguments: Any) -> Tensor:
        bias, expert, ends = arguments
        is_after = torch.arange(len(expert), device=ends.device) >= ends[-1:]
        return _present_rows(bias[expert], is_after)

    def forward(self, call: Call, *arguments: Any, training: bool) -> Results:
        bias, expert, ends = arguments
        y = call.empty(bias, (len(expert), bias.shape[1]))
        call.then(launch_expert_bias_forward, bias, expert, ends, y)
        return (y,)

    def backward(self, call: Call, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (dy,), (_, ends) = given.incoming, given.saved
        dbias = call.empty(dy, (len(ends), dy.shape[1]))
        call.then(launch_expert_bias_backward, dy, ends, dbias)
        return (dbias,)

    def reference_backward(self, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (dy,), (expert, ends) = given.incoming, given.saved
        # A bias is added: its gradient does not depend on it.
        bias = torch.zeros((len(ends), dy.shape[1]), dtype=dy.dtype, device=dy.device)
        return gradients_of(self.reference, (bias, expert, ends), (dy,), (True,))


EXPERT_BIAS = ExpertBias()

EXPERT_GATE = ExpertGate()

EXPERT_PERMUTE = ExpertPermute()

EXPERT_UNPERMUTE = ExpertUnpermute()


def _check_absent(absent: Any, rows: int, device: torch.device) -> Unsupported | None:
    """Refuse an ``absent`` that is no bool for each of as many rows, on this device."""
    return None if absent is None else _check_index("absent", absent, torch.bool, (rows,), device)


def _check_index(
    name: str, tensor: Any, dtype: torch.dtype, shape: Sequence[int | str], device: torch.device
) -> Unsupported | None:
    """Refuse what is no tensor of this dtype, device and shape, in which a string stands for any length."""
    if not isinstance(tensor, Tensor) or tensor.dtype != dtype:
        kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        return Unsupported(f"{name} must be a tensor of {dtype}, not {kind}", TypeError)
    fits = [isinstance(size, str) or size == actual for size, actual in zip(shape, tensor.shape, strict=False)]
    if tensor.dim() == len(shape) and all(fits) and tensor.device == device:
        return None
    sizes = f"{shape[0]}," if len(shape) == 1 else ", ".join(map(str, shape))
    return Unsupported(
        f"{name} must have shape ({sizes}) on {device}, not {tuple(tensor.shape)} on {tensor.device}", ValueError
    )


def expert_gate(
    x: Tensor,
    absent: Tensor | None = None,
    activation: ActivationName = "silu",
    *,
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
) -> Tensor:
    """The gate between the two products of experts: ``y = act(gate) * up``, from one tensor with both.

    With ``limit`` the gate is at most that, and up within it on both sides. With ``alpha`` it is the gate of gpt-oss,
    ``y = (up + 1) * (gate * sigmoid(alpha * gate))``. Each operation but those inside of an activation is rounded
    to x's dtype. The backward keeps x, and returns one gradient of it.

    Args:
        x: [..., 2 I], float32, bfloat16 or float16; float64 is computed by the PyTorch reference.
        absent: [S] of an x of shape [S, 2 I], bool: rows that are not read, the result of which is zero; for experts of
            other devices.
        activation: ``silu``, ``gelu`` (by erf), or ``gelu_tanh``.
        interleaved: gate and up take turns in a row; otherwise they are its halves.
        limit: a positive number, or None.
        alpha: a positive number, or None; only with ``silu``.

    Returns:
        y, [..., I] in x's memory order, of x's dtype.

    Raises:
        TypeError: for anything but dense tensors of these dtypes.
        ValueError: for another activation, rows of an odd length, and shapes or numbers that do not fit.
    """
    limit, alpha = (float(number) if isinstance(number, int) else number for number in (limit, alpha))
    return EXPERT_GATE.checked(x, absent, activation, interleaved, limit, alpha)


def expert_bias(bias: Tensor, expert: Tensor, ends: Tensor) -> Tensor:
    """The bias of each row's expert, for rows in the order of experts: ``y[s] = bias[expert[s]]``.

    Rows after the last of ``ends`` are zero, and their gradients are not read. The backward sums the gradients of an
    expert's rows in fp32, in a fixed order, and rounds once.

    Args:
        bias: [E, N], float32, bfloat16 or float16; float64 is computed by the PyTorch reference.
        expert: [S], int64: numbers below E that do not fall.
        ends: [E], int32: how many rows the experts up to each one have.

    Returns:
        y, [S, N], contiguous, of bias's dtype.

    Raises:
        TypeError: for anything but dense tensors of these dtypes.
        ValueError: for shapes and devices that do not fit.
    """
    return EXPERT_BIAS.checked(bias, expert, ends)


def expert_permute(x: Tensor, position: Tensor, absent: Tensor | None = None) -> Tensor:
    """The rows of tokens in the order of experts: ``y[position[t, k]] = x[t]``.

    The backward sums the gradients of a token's K rows in fp32, in the order of k, and rounds once.

    Args:
        x: [T, N], float32, bfloat16 or float16; float64 is computed by the PyTorch reference.
        position: [T, K], int64: each of the numbers from 0 to T K - 1 once.
        absent: [T K], bool: the rows of y that are zero, whose gradients are not read.

    Returns:
        y, [T K, N], contiguous, of x's dtype.

    Raises:
        TypeError: for anything but dense tensors of these dtypes.
        ValueError: for shapes and devices that do not fit.
    """
    return EXPERT_PERMUTE.checked(x, position, absent)


def expert_unpermute(
    x: Tensor,
    weights: Tensor,
    position: Tensor,
    absent: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The weighted sum of what a token's experts return: ``y[t] = sum over k of x[position[t, k]] * weights[t, k]``.

    Each product is rounded to the dtype that x and weights promote to, and so is the sum, which is taken in fp32, in
    the order of k. Gradients are computed in fp32 and rounded once. The backward keeps all arguments.

    Args:
        x: [T K, N], float32, bfloat16 or float16; float64 is computed by the PyTorch reference.
        weights: [T, K], a dtype of its own.
        position: [T, K], int64: each of the numbers from 0 to T K - 1 once.
        absent: [T K], bool: rows of x that are not read, and count as zero.
        dtype: of the result; x's unless given.

    Returns:
        y, [T, N], contiguous.

    Raises:
        TypeError: for anything but dense tensors of these dtypes.
        ValueError: for shapes and devices that do not fit.
    """
    dtype = x.dtype if dtype is None and isinstance(x, Tensor) else dtype
    return EXPERT_UNPERMUTE.checked(x, weights, position, absent, dtype)
