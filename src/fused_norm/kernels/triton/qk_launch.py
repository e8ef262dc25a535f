"""Launches the q and k kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ...spec import NormSpec
from ..plans import HeadsPlan, HeadsTile, heads_backward_plan, heads_forward_plan
from .devices import device_facts
from .launch import launch
from .memory import (
    against_heads,
    empty_rows_like,
    heads_dim_of,
    is_long,
    memory_order,
    norm_dtype,
)
from .qk_kernels import qk_backward_kernel, qk_forward_kernel
from .weight_grad import sum_shares

Inputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""q, k, q's weight, k's weight, cos and sin. Without RoPE cos and sin are None; of the weights both or neither are
None; k is None only where one tensor is rotated without a norm."""

NormedInputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""``Inputs`` with a k."""

Sides = tuple[Tensor | None, Tensor | None]
"""A tensor of q's side and one of k's."""

_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class _TileShape:
    """Compile-time constants that all tiles share.

    Attributes:
        N: elements of a row.
        R: elements of it that RoPE turns.
        BLOCK: columns that are loaded at once.
        GRAIN: elements that stay together when RoPE swaps halves.
        LONG: whether offsets need 64 bits.
    """

    N: int
    R: int
    BLOCK: int
    GRAIN: int
    LONG: bool


class _Layout(NamedTuple):
    """The rows of some tensors of one shape, as heads of tokens of batches.

    Attributes:
        tokens: in all batches.
        length: tokens of a batch.
        heads: of a token.
        strides: of batch, token and head, for each tensor.
        long: whether an offset could pass 2^31.
    """

    tokens: int
    length: int
    heads: int
    strides: tuple[int, ...]
    long: bool

    def tiles(self, tile: HeadsTile) -> int:
        """The number of tiles that the rows make."""
        return -(-self.tokens // tile.tokens) * -(-self.heads // tile.heads)


def _absent(tensors: int) -> _Layout:
    """The layout of a side that is not there."""
    return _Layout(0, 1, 1, (0,) * 3 * tensors, False)


def takes_angles(cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> bool:
    """Return whether kernels take these angles: the same for all heads, and without a gradient."""
    learned = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    return not learned and heads_dim_of(cos, unsqueeze_dim) is not None


def empty_heads(spec: NormSpec, x: Tensor, weight: Tensor | None, cos: Tensor | None) -> Tensor:
    """The forward's output for q or k, not yet written, with the dtype and memory order that stock code gives it."""
    dtype = norm_dtype(spec, x.dtype, weight)
    return empty_rows_like(x, dtype) if cos is None else empty_rotated(x, cos, dtype)


def empty_rotated(x: Tensor, cos: Tensor, dtype: torch.dtype | None = None, *, single_rounding: bool = False) -> Tensor:
    """The output of a rotation, not yet written, of x, or of what was made of it in ``dtype``."""
    dtype = x.dtype if single_rounding else torch.promote_types(x.dtype if dtype is None else dtype, cos.dtype)
    # Stock code concatenates what is rotated and what is not, and the result of that is contiguous.
    return empty_rows_like(x, dtype) if cos.shape[-1] == x.shape[-1] else x.new_empty(x.shape, dtype=dtype)


def launch_qk_forward(
    spec: NormSpec | None,
    inputs: Inputs,
    outputs: Sides,
    unsqueeze_dim: int,
    *,
    single_rounding: bool = False,
    inverse: bool = False,
) -> None:
    """Write q and k normalised and, with cos and sin, rotated to ``outputs``.

    Without a ``spec`` they are rotated alone; then with ``single_rounding`` nothing but the result is rounded, and
    ``inverse`` turns the other way, with a single rounding.
    """
    inputs, _ = _readable(inputs, unsqueeze_dim)
    q, k, q_weight, k_weight, cos, _ = inputs
    heads_dim = _heads_dim(inputs, unsqueeze_dim)
    layouts = [
        _absent(2) if x is None or y is None else _known(_layout((x, y), heads_dim))
        for x, y in zip((q, k), outputs, strict=True)
    ]
    rotary = 0 if cos is None else cos.shape[-1]
    heads = (layout.heads for layout in layouts)
    plan = heads_forward_plan(*heads, q.shape[-1], rotary, device_facts(q.device))
    q_tiles, k_tiles = layouts[0].tiles(plan.q), layouts[1].tiles(plan.k)
    if not q_tiles + k_tiles:
        return
    constants = _constants(spec, plan, inputs, layouts)
    for side, x, weight in (("Q", q, q_weight), ("K", k, k_weight)):
        normed = None if spec is None or x is None else _TRITON_DTYPES[norm_dtype(spec, x.dtype, weight)]
        constants[f"{side}_NORMED"] = normed
    constants |= {"SINGLE_ROUNDING": single_rounding or inverse, "INVERSE": inverse}
    eps = 0.0 if spec is None else spec.eps
    numbers = *_counts(layouts, q_tiles), *_strides(layouts, inputs, unsqueeze_dim), eps
    grid, tensors = (q_tiles + k_tiles, 1), (*inputs, *outputs)
    launch(qk_forward_kernel, grid, tensors, numbers, constants, warps=plan.warps, fuse=cos is None)


def launch_qk_backward(
    spec: NormSpec, inputs: NormedInputs, incoming: Sides, dx: Sides, dw: Sides, unsqueeze_dim: int
) -> None:
    """Write the gradients of q and k (``dx``, from ``empty_rows_like``) and of their weights (``dw``).

    None is written where one is None; a side without ``incoming`` gradient has none.
    """
    inputs, incoming = _readable(inputs, unsqueeze_dim, incoming)
    q, device, needs_dw = inputs[0], device_facts(inputs[0].device), [gradient is not None for gradient in dw]
    layouts = _backward_layouts(inputs, incoming, dx, unsqueeze_dim)
    plan = _backward_plan(inputs, incoming, layouts)
    q_tiles, k_tiles = layouts[0].tiles(plan.q), layouts[1].tiles(plan.k)
    q_programs, programs = q_tiles, q_tiles + k_tiles
    if any(needs_dw) and programs > plan.programs:
        # Each side its part of the programs, and at least one where there is anything to do.
        most = plan.programs - min(1, k_tiles)
        q_programs = min(max(round(plan.programs * q_tiles / programs), min(1, q_tiles)), most)
        programs = plan.programs
    shares = None
    if any(needs_dw):
        shares = q.new_empty((programs, q.shape[-1]), dtype=torch.float32)
    if programs:
        constants = _constants(spec, plan, inputs, layouts)
        constants |= {"STAGES": plan.stages, "OVERLAPS": any(needs_dw) and device.overlaps}
        constants |= {"Q_HAS_DW": needs_dw[0], "K_HAS_DW": needs_dw[1]}
        numbers = *_counts(layouts, q_programs), *_strides(layouts, inputs, unsqueeze_dim), spec.eps
        tensors = *inputs, *incoming, *dx, shares
        launch(qk_backward_kernel, (programs, 1), tensors, numbers, constants, warps=plan.warps)
    if shares is not None and q.shape[-1]:
        sum_shares(shares, *dw, q_programs, plan.programs, device)


def _readable(inputs: Inputs, unsqueeze_dim: int, gradients: Sides = (None, None)) -> tuple[Any, Any]:
    """Inputs and gradients, copied where kernels cannot read them in place."""
    heads_dim = _heads_dim(inputs, unsqueeze_dim)
    heads = [x if x is None or _layout((x,), heads_dim) else empty_rows_like(x).copy_(x) for x in inputs[:2]]
    others = [x if x is None or x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous() for x in inputs[2:]]
    arranged = [
        d if x is None or d is None or _layout((x, d), heads_dim) else empty_rows_like(x, d.dtype).copy_(d)
        for x, d in zip(heads, gradients, strict=True)
    ]
    return (*heads, *others), tuple(arranged)


def _heads_dim(inputs: Inputs, unsqueeze_dim: int) -> int | None:
    return None if inputs[4] is None else heads_dim_of(inputs[4], unsqueeze_dim)


def _layout(tensors: Sequence[Tensor], heads_dim: int | None) -> _Layout | None:
    """The layout of ``tensors``, the first of which gives the order; None where three strides each do not tell it.

    ``heads_dim``: of four dimensions, the one of the heads. Without RoPE (None) any rows will do: with as few strides
    as possible, in the order of memory.
    """
    lead = tensors[0]
    if lead.shape[-1] > 1 and any(tensor.stride(-1) != 1 for tensor in tensors):
        return None
    groups: list[list[int]] = []
    if heads_dim is not None:
        groups = [[0], [3 - heads_dim], [heads_dim]]
    else:
        for dim in memory_order(lead):
            if lead.shape[dim] == 1:
                continue
            if groups and all(t.stride(groups[-1][-1]) == t.stride(dim) * t.shape[dim] for t in tensors):
                groups[-1].append(dim)
            else:
                groups.append([dim])
        if len(groups) > 3:
            return None
        if len(groups) < 2:
            groups = [*groups, []]  # evenly spaced rows are tokens of one head
        groups = [[]] * (3 - len(groups)) + groups
    batch, length, heads = (math.prod(lead.shape[dim] for dim in group) for group in groups)
    strides = tuple(tensor.stride(group[-1]) if group else 0 for tensor in tensors for group in groups)
    tokens = batch * length if lead.numel() else 0
    return _Layout(tokens, max(length, 1), max(heads, 1), strides, is_long(tensors))


def _known(layout: _Layout | None) -> _Layout:
    assert layout is not None, "a tensor without a layout was copied before"
    return layout


def _backward_layouts(inputs: NormedInputs, incoming: Sides, dx: Sides, unsqueeze_dim: int) -> list[_Layout]:
    """The layouts of q's and of k's side, each for the input, the incoming gradient, and the gradient to write."""
    heads_dim = _heads_dim(inputs, unsqueeze_dim)
    return [
        _absent(3) if d is None else _known(_layout((x, d, empty_rows_like(x) if grad is None else grad), heads_dim))
        for x, d, grad in zip(inputs[:2], incoming, dx, strict=True)
    ]


def _backward_plan(inputs: NormedInputs, incoming: Sides, layouts: Sequence[_Layout]) -> HeadsPlan:
    q, cos = inputs[0], inputs[4]
    width, rotary = q.shape[-1], 0 if cos is None else cos.shape[-1]
    loads = 2 if 0 < rotary < width else 1  # of d: partners are loaded by themselves
    column_bytes = max(
        x.element_size() + loads * d.element_size() for x, d in zip(inputs[:2], incoming, strict=True) if d is not None
    )
    angle_bytes = 0 if cos is None else 2 * cos.element_size()
    heads = (layout.heads for layout in layouts)
    return heads_backward_plan(*heads, width, rotary, column_bytes, angle_bytes, device_facts(q.device))


def _constants(spec: NormSpec | None, plan: HeadsPlan, inputs: Inputs, layouts: Sequence[_Layout]) -> dict[str, Any]:
    cos, sin = inputs[4:]
    rotary = 0 if cos is None else cos.shape[-1]
    angles_long = cos is not None and sin is not None and is_long((cos, sin))
    grain = math.gcd(rotary // 2, 16) if rotary else 1
    long = angles_long or any(layout.long for layout in layouts)
    return {
        "Q_TOKENS": plan.q.tokens,
        "Q_HEADS": plan.q.heads,
        "K_TOKENS": plan.k.tokens,
        "K_HEADS": plan.k.heads,
        "SHAPE": _TileShape(inputs[0].shape[-1], rotary, plan.block, grain, long),
        "SPEC": None if spec is None else spec.without_eps(),
    }


def _counts(layouts: Sequence[_Layout], q_programs: int) -> tuple[int, ...]:
    return (*(count for layout in layouts for count in layout[:3]), q_programs)


def _strides(layouts: Sequence[_Layout], inputs: Inputs, unsqueeze_dim: int) -> tuple[int, ...]:
    """The strides of q's side, of k's side, and of cos and sin, which do not vary along the heads."""
    strides = [step for layout in layouts for step in layout.strides]
    heads_dim = _heads_dim(inputs, unsqueeze_dim)
    for angles in inputs[4:]:
        steps = [0] * 4 if angles is None else against_heads(angles, unsqueeze_dim)[1]
        strides += [steps[0], 0 if heads_dim is None else steps[3 - heads_dim]]
    return tuple(strides)
