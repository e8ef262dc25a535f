"""Launches the q and k kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...spec import NormSpec, RotaryLayout
from ..plans import HeadsPlan, heads_backward_plan, heads_forward_plan
from .call import Call
from .devices import device_props
from .language import TRITON_DTYPES
from .memory import angles_layout, heads_dim_of, is_long, memory_order, norm_dtype, out_dtype, promoted
from .qk_kernels import qk_backward_kernel, qk_forward_kernel
from .weight_grad import reduce_partials

QkTensors = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""q, k, q's weight, k's weight, cos and sin. Without RoPE cos and sin are None; of the weights both or neither are
None; k is None only if one tensor is rotated without a norm."""

Sides = tuple[Tensor | None, Tensor | None]
"""A tensor of q's side and one of k's."""


@dataclass(frozen=True)
class _TileShape:
    """Compile-time constants that all tiles share."""

    N: int  # elements of a row
    R: int  # elements of it that RoPE turns
    BLOCK: int  # columns that are loaded at once
    GRAIN: int  # elements that stay together when RoPE swaps halves
    LONG: bool  # offsets need 64 bits
    LAYOUT: RotaryLayout
    BY_PAIR: bool  # the first halves of cos and sin have the angles of pairs


class _Layout(NamedTuple):
    """The rows of some tensors of one shape, as heads of tokens of batches."""

    tokens: int  # in all batches
    length: int  # tokens of a batch
    heads: int  # of a token
    strides: tuple[int, ...]  # of batch, token and head, for each tensor
    long: bool  # an offset could pass 2^31


def empty_heads(
    call: Call,
    x: Tensor,
    dtype: torch.dtype,
    cos: Tensor | None,
    narrow_dtype: torch.dtype | None,
    *,
    single_rounding: bool = False,
    layout: RotaryLayout = "half",
) -> Tensor:
    """The forward's output for q or k, not yet written, with the memory order that stock code gives it.

    It has stock code's dtype, or ``narrow_dtype`` if ``out_dtype`` says so. ``dtype``: that of the normalised
    x, or of x itself without a norm.
    """
    if cos is None:
        return call.empty_rows_like(x, out_dtype(dtype, narrow_dtype))
    dtype = out_dtype(dtype if single_rounding else promoted(dtype, cos.dtype), narrow_dtype)
    # Stock code concatenates what is rotated and what is not, or two halves, and the result of that is contiguous.
    concatenates = cos.shape[-1] != x.shape[-1] or layout == "deinterleaved"
    return call.empty(x, x.shape, dtype=dtype) if concatenates else call.empty_rows_like(x, dtype)


def launch_qk_forward(
    call: Call,
    spec: NormSpec | None,
    inputs: QkTensors,
    outputs: Sides,
    unsqueeze_dim: int,
    layout: RotaryLayout = "half",
    angles_by_pair: bool = False,
    *,
    single_rounding: bool = False,
    inverse: bool = False,
    copies: Sides = (None, None),
) -> None:
    """Write q and k normalised and, with cos and sin, rotated to ``outputs``, and their weights to ``copies``.

    Without a ``spec`` they are rotated alone; then with ``single_rounding`` nothing but the result is rounded, and
    ``inverse`` turns the other way, with a single rounding. A ``layout`` other than ``half`` takes no norm.
    """
    both = _Heads(call, inputs, [(x,) for x in inputs[:2]], outputs, unsqueeze_dim, layout, angles_by_pair)
    # Pairs of neighbours are loaded as halves are: two elements of a row, of those behind ``rotary`` too.
    planned = both.rotary if layout == "half" else both.width
    plan = heads_forward_plan(*both.heads, both.width, planned, device_props(inputs[0].device))
    q_tiles, k_tiles = both.tiles(plan)
    if not q_tiles + k_tiles:
        return
    numbers, constants = both.arguments(spec, plan, q_tiles)
    cos = inputs[4]
    for side, x, weight in zip("QK", inputs[:2], inputs[2:4], strict=True):
        normed = step = None  # the dtypes that normalised rows, and the products of their rotation, are rounded to
        if x is not None:
            dtype = x.dtype if spec is None else norm_dtype(spec, x.dtype, weight)
            normed = None if spec is None else TRITON_DTYPES[dtype]
            if cos is not None:
                step = TRITON_DTYPES[torch.float32 if single_rounding or inverse else promoted(dtype, cos.dtype)]
        constants |= {f"{side}_NORMED": normed, f"{side}_STEP": step}
    constants["INVERSE"] = inverse
    ((q,), (k,)), grid = both.sides, (q_tiles + k_tiles, 1)
    tensors = q, k, *both.shared, *outputs, *copies
    call.launch(qk_forward_kernel, grid, tensors, numbers, constants, warps=plan.warps, fuse=not both.rotary)


def launch_qk_backward(
    call: Call, spec: NormSpec, inputs: QkTensors, incoming: Sides, dx: Sides, dw: Sides, unsqueeze_dim: int
) -> None:
    """Write the gradients of q and k (``dx``, from ``empty_rows_like``) and of their weights (``dw``).

    An output that is None is skipped; a side without ``incoming`` gradient gets no gradient.
    """
    both = _Heads(call, inputs, list(zip(inputs[:2], incoming, strict=True)), dx, unsqueeze_dim)
    (q, q_d), (k, k_d) = both.sides
    cos, device = inputs[4], device_props(inputs[0].device)
    loads = 2 if 0 < both.rotary < both.width else 1  # of d: partners are loaded by themselves
    column_bytes = max(x.element_size() + loads * d.element_size() for x, d in both.sides if d is not None)
    angle_bytes = 0 if cos is None else 2 * cos.element_size()
    plan = heads_backward_plan(*both.heads, both.width, both.rotary, column_bytes, angle_bytes, device)
    q_tiles, k_tiles = both.tiles(plan)
    q_programs, programs, shares = q_tiles, q_tiles + k_tiles, None
    if any(grad is not None for grad in dw):
        if programs > plan.programs:
            # Each side its part of the programs, and at least one if there is anything to do.
            most = plan.programs - min(1, k_tiles)
            q_programs = min(max(round(plan.programs * q_tiles / programs), min(1, q_tiles)), most)
            programs = plan.programs
        shares = call.empty(inputs[0], (programs, both.width), dtype=torch.float32)
    if programs:
        numbers, constants = both.arguments(spec, plan, q_programs)
        constants |= {"STAGES": plan.stages, "OVERLAPS": shares is not None and device.overlaps}
        constants |= {"Q_HAS_DW": dw[0] is not None, "K_HAS_DW": dw[1] is not None}
        tensors = q, k, *both.shared, q_d, k_d, *dx, shares
        call.launch(qk_backward_kernel, (programs, 1), tensors, numbers, constants, warps=plan.warps)
    if shares is not None and both.width:
        reduce_partials(call, shares, *dw, q_programs, plan.programs, device)


class _Heads:
    """The rows of both sides, the weights and the angles, copied if kernels cannot read them in place.

    ``read`` are a side's tensors, x first; one with a None has no rows. ``written`` is as evenly spaced as x is.
    """

    def __init__(
        self,
        call: Call,
        inputs: QkTensors,
        read: Sequence[Any],
        written: Sides,
        unsqueeze_dim: int,
        layout: RotaryLayout = "half",
        angles_by_pair: bool = False,
    ) -> None:
        cos = inputs[4]
        self._pairs = layout, angles_by_pair
        self.width, self.rotary = inputs[0].shape[-1], 0 if cos is None else cos.shape[-1]
        self._heads_dim = None if cos is None else heads_dim_of(cos, unsqueeze_dim)
        self.shared = [x if x is None or x.stride(-1) == 1 else call.contiguous(x) for x in inputs[2:]]
        """Weights, cos and sin."""
        arranged = [self._arranged(call, *side) for side in zip(read, written, strict=True)]
        self.sides, self._layouts = [side for side, _ in arranged], [layout for _, layout in arranged]
        self.heads = [layout.heads for layout in self._layouts]
        self._strides = [step for layout in self._layouts for step in layout.strides]
        for angles in self.shared[2:]:  # which have no stride by head
            steps = [0] * 4 if angles is None else angles_layout(angles, unsqueeze_dim)[1]
            self._strides += [steps[0], 0 if self._heads_dim is None else steps[3 - self._heads_dim]]
        self._long = is_long([x for x in self.shared[2:] if x is not None]) or any(
            layout.long for layout in self._layouts
        )

    def _arranged(self, call: Call, read: tuple[Any, ...], written: Tensor | None) -> tuple[tuple[Any, ...], _Layout]:
        if any(x is None for x in read):
            return read, _Layout(0, 1, 1, (0,) * 3 * (1 + len(read)), False)
        arranged: list[Tensor] = []
        for x in read:
            lead = arranged[0] if arranged else x
            fits = _layout((*arranged, x), self._heads_dim)
            arranged.append(x if fits else call.copied_like(lead, x))
        outputs = call.empty_rows_like(arranged[0]) if written is None else written
        layout = _layout((*arranged, outputs), self._heads_dim)
        assert layout is not None, "a tensor without a layout was copied before"
        return tuple(arranged), layout

    def tiles(self, plan: HeadsPlan) -> list[int]:
        """The number of tiles of each side."""
        pairs = zip(self._layouts, (plan.q, plan.k), strict=True)
        return [-(-rows.tokens // tile.tokens) * -(-rows.heads // tile.heads) for rows, tile in pairs]

    def arguments(self, spec: NormSpec | None, plan: HeadsPlan, q_programs: int) -> tuple[Any, dict[str, Any]]:
        """The numbers and the compile-time constants that both kernels have."""
        counts = [count for layout in self._layouts for count in layout[:3]]
        grain = math.gcd(self.rotary // 2, 16) if self.rotary else 1
        constants = {
            "Q_TOKENS": plan.q.tokens,
            "Q_HEADS": plan.q.heads,
            "K_TOKENS": plan.k.tokens,
            "K_HEADS": plan.k.heads,
            "SHAPE": _TileShape(self.width, self.rotary, plan.block, grain, self._long, *self._pairs),
            "SPEC": None if spec is None else spec.without_eps(),
        }
        return (*counts, q_programs, *self._strides, 0.0 if spec is None else spec.eps), constants


def _layout(tensors: Sequence[Tensor], heads_dim: int | None) -> _Layout | None:
    """The layout of ``tensors``, the first of which gives the order; None if three strides each do not tell it.

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
