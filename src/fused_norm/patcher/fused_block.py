"""The methods that rewritten forwards of layers, attentions and MLPs call: several modules' work in one kernel.

A kernel replaces the call of a module only where no hook, wrapper, sharding or offloading would be skipped
(``may_be_bypassed``), and where it takes the module's input. Elsewhere the modules are called one after the other, as
in the stock code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..kernels.glu import GLU
from ..kernels.norm_add import NORM_ADD
from ..kernels.norm_add_norm import NORM_ADD_NORM
from ..kernels.qk_norm import QK_NORM
from ..kernels.rope import ROPE
from ..kernels.sharded import are_angles_of, is_plain, is_taken, placement_obstacle
from ..spec import NormSpec
from .activation_recognition import Activation, Formula
from .fused_norm_module import (
    explain,
    has_hooks,
    may_be_bypassed,
    may_be_known,
    obstacle,
    same_norms,
    scaled,
    spec_of,
    takes_residual,
    weight_of,
)
from .patterns.calls import Rewrite
from .rotation_recognition import DtypePair, Rotation, name_of, of_each_element


class FusedBlock(nn.Module):
    """Base of the classes put on modules whose forward was rewritten; each derives from the module's own class."""

    fused_norm_origin: ClassVar[type[nn.Module]]
    fused_norm_origin_forward: ClassVar[Any]
    fused_norm_rewrites: ClassVar[tuple[Rewrite, ...]]
    fused_norm_rotations: ClassVar[tuple[Rotation, ...]]
    fused_norm_recompute: ClassVar[bool]
    fused_norm_activations: ClassVar[tuple[Activation, ...]]

    def fused_norm_add(
        self, norm: Any, residual: Any, branch: Any, *, inner: Any = None, dropout: Any = None, scale: Any = 1.0
    ) -> tuple[Any, Any]:
        """``(norm(s), s)`` of ``s = residual + scale * dropout(inner(branch))``."""
        if dropout is not None and not _changes_nothing(dropout):
            branch, inner = dropout(inner(branch)), None
        if inner is not None:
            together = _norm_add_norm(norm, residual, branch, inner)
            if together is not None:
                return together
            branch = inner(branch)
        if type(scale) not in (float, int):
            branch, scale = branch * scale, 1.0
        if takes_residual(norm):
            return norm(branch, residual) if scale == 1.0 else norm(branch, residual, scale)
        # A wrapper around the norm, or a hook on it, expects to see the norm of one tensor and gets just that.
        total = residual + scaled(branch, scale)
        return norm(total), total

    def fused_norm_then_add(self, inner: Any, residual: Any, branch: Any, *, dropout: Any = None) -> Any:
        """``residual + dropout(inner(branch))``."""
        if dropout is not None and not _changes_nothing(dropout):
            return residual + dropout(inner(branch))
        if may_be_bypassed(inner):
            weight, spec = weight_of(inner), spec_of(inner)
            known = NORM_ADD.programs_as_stock
            found = NORM_ADD.known(known, spec, branch, residual, weight) if may_be_known(spec) else None
            if found is not None:
                return found
            if obstacle(branch, weight, residual, spec) is None:
                return NORM_ADD.kept_among(known, spec, branch, residual, weight)
        return residual + inner(branch)

    def fused_norm_may_postpone(self, q_norm: Any, k_norm: Any) -> bool:
        """Return whether the two norms may be computed later, in one call."""
        return may_be_bypassed(q_norm) and may_be_bypassed(k_norm) and same_norms(q_norm, k_norm)

    def fused_norm_unless_postponed(self, postponed: object, norm: Any, x: Any) -> Any:
        """``norm(x)``, or x itself where the norm, or activation, is postponed."""
        return x if postponed else norm(x)

    def fused_norm_pair(self, postponed: bool, q_norm: Any, k_norm: Any, q: Any, k: Any) -> tuple[Any, Any]:
        """``q_norm(q), k_norm(k)``; q and k themselves where their norms were not postponed."""
        if not postponed:
            return q, k
        arguments = spec_of(q_norm), q, k, weight_of(q_norm), weight_of(k_norm), None, None, 1
        known = QK_NORM.programs_as_stock
        found = QK_NORM.known(known, *arguments) if may_be_known(arguments[0]) else None
        if found is not None:
            return found
        if _qk_obstacle(*arguments[1:5], arguments[0]) is not None:
            return q_norm(q), k_norm(k)
        return QK_NORM.kept_among(known, *arguments)

    def fused_norm_rotated(
        self, postponed: bool, q_norm: Any, k_norm: Any, rotate: Any, q: Any, k: Any, cos: Any, sin: Any, **named: Any
    ) -> tuple[Any, Any]:
        """``rotate(q_norm(q), k_norm(k), cos, sin)``; without the norms where they were not postponed."""
        if not postponed:
            return self.fused_norm_rope(rotate, q, k, cos, sin, **named)
        weights, spec = (weight_of(q_norm), weight_of(k_norm)), spec_of(q_norm)
        heads_dim = named.get("unsqueeze_dim", 1)
        rotations = [
            one
            for one in self.fused_norm_rotations
            if one.angles is of_each_element and not one.tokens_first and one.is_now(rotate)
        ]
        for rotation in rotations if may_be_known(spec) else ():
            found = QK_NORM.known(rotation.programs_with_norms, spec, q, k, *weights, cos, sin, heads_dim)
            if found is not None:
                return found
        if _qk_obstacle(q, k, *weights, spec) is not None:
            return rotate(q_norm(q), k_norm(k), cos, sin, **named)
        for rotation in rotations:
            if _kernel_rotates_alike(rotation.dtypes, rotation, q, k, *weights, cos, sin, heads_dim):
                known = rotation.programs_with_norms
                return QK_NORM.kept_among(known, spec, q, k, *weights, cos, sin, heads_dim)
        q, k = QK_NORM(spec, q, k, *weights, None, None, 1)
        return self.fused_norm_rope(rotate, q, k, cos, sin, **named)

    def fused_norm_rope(
        self, rotate: Any, q: Any, k: Any, cos: Any, sin: Any, *further: Any, **named: Any
    ) -> tuple[Any, Any]:
        """``rotate(q, k, cos, sin, *further)``."""
        rotated = self._rotated(rotate, q, k, cos, sin, further, named)
        return rotate(q, k, cos, sin, *further, **named) if rotated is None else rotated

    def fused_norm_rope_one(self, rotate: Any, x: Any, cos: Any, sin: Any, **named: Any) -> Any:
        """``rotate(x, cos, sin)``."""
        rotated = self._rotated(rotate, x, None, cos, sin, (), named)
        return rotate(x, cos, sin, **named) if rotated is None else rotated[0]

    def _rotated(
        self, rotate: Any, q: Any, k: Any, cos: Any, sin: Any, further: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None] | None:
        """q and k rotated by the kernel; None where it may not take them."""
        arguments = (3 if k is None else 4) + len(further)
        for rotation in self.fused_norm_rotations:
            if rotation.is_now(rotate) and rotation.arguments == arguments and not (rotation.tokens_first and named):
                return self._rotated_as(rotation, q, k, cos, sin, further, named.get("unsqueeze_dim", 1))
        return None

    def _rotated_as(
        self, rotation: Rotation, q: Any, k: Any, cos: Any, sin: Any, further: tuple[Any, ...], heads_dim: Any
    ) -> tuple[Tensor, Tensor | None] | None:
        as_it_is = rotation.angles is of_each_element and not rotation.tokens_first and not further
        if as_it_is and may_be_known(None):
            for single_rounding in (False, True):
                found = ROPE.known(rotation.programs, None, q, k, cos, sin, heads_dim, single_rounding)
                if found is not None:
                    return found
        reason = obstacle(q, None, None, None) if k is None else _pair_obstacle("q and k", q, k)
        if reason is None and k is not None and q.shape[-1] != k.shape[-1]:
            reason = "q and k differ in width"
        if reason is None:
            heads = q, k
            if is_plain(cos) and is_plain(sin):
                cos, sin = rotation.angles(cos, *further), rotation.angles(sin, *further)
            if rotation.tokens_first:
                heads, heads_dim = (_with_batch(q, 3), _with_batch(k, 3)), 2
                cos, sin = _with_batch(cos, 2), _with_batch(sin, 2)
            for dtypes, single_rounding in ((rotation.dtypes, False), (rotation.single_rounding_dtypes, True)):
                if _kernel_rotates_alike(dtypes, rotation, *heads, None, None, cos, sin, heads_dim):
                    known = rotation.programs if as_it_is else None
                    q_out, k_out = ROPE.kept_among(known, None, *heads, cos, sin, heads_dim, single_rounding)
                    return _as_given(q_out, q), None if k is None else _as_given(k_out, k)
            reason = f"{name_of(rotation.function)} is called with other shapes or dtypes than the kernel takes"
        if reason:
            explain(self.fused_norm_origin, reason)
        return None

    def fused_norm_activation(self, act: Any) -> Formula | None:
        """The formula of an activation that may be computed later, without its call; None for one that may not."""
        for activation in self.fused_norm_activations:
            if activation.is_now(act):
                return activation.formula
        return None

    def fused_norm_gate(self, activation: Formula | None, act: Any, *, gate: Any, up: Any) -> Any:
        """``act(gate) * up``; ``gate * up`` where the activation was not postponed."""
        if activation is None:
            return gate * up
        found = GLU.known(GLU.programs_as_stock, None, gate, up, activation) if may_be_known(None) else None
        if found is not None:
            return found
        reason = _pair_obstacle("gate and up", gate, up, elementwise=True)
        if reason is None and gate.shape != up.shape:
            reason = "gate and up differ in shape"
        if reason is None:
            return GLU.kept_among(GLU.programs_as_stock, None, gate, up, activation)
        if reason:
            explain(self.fused_norm_origin, reason)
        return act(gate) * up

    def fused_norm_gate_packed(self, act: Any, packed: Any) -> Any:
        """``act(gate) * up`` of the two halves of a tensor."""
        activation = self.fused_norm_activation(act)
        if activation is not None:
            known = GLU.programs_as_stock
            found = GLU.known(known, None, packed, None, activation) if may_be_known(None) else None
            if found is not None:
                return found
            reason = obstacle(packed, None, None, None)
            if reason is None and packed.shape[-1] % 2:
                reason = f"the rows of {packed.shape[-1]} have no two halves"
            if reason is None:
                return GLU.kept_among(known, None, packed, None, activation)
            if reason:
                explain(self.fused_norm_origin, reason)
        gate, up = packed.chunk(2, dim=-1)
        return act(gate) * up


def _changes_nothing(dropout: Any) -> bool:
    """Return whether it is a dropout that returns what it is given, and no hook or other code would see its call."""
    return (
        type(dropout) is nn.Dropout
        and (not dropout.training or dropout.p == 0)
        and "forward" not in dropout.__dict__
        and not has_hooks(dropout)
    )


def _norm_add_norm(norm: Any, residual: Any, x: Any, inner: Any) -> tuple[Tensor, Tensor] | None:
    if not (may_be_bypassed(norm) and may_be_bypassed(inner) and same_norms(norm, inner)):
        return None
    weight, inner_weight, spec = weight_of(norm), weight_of(inner), spec_of(norm)
    known = NORM_ADD_NORM.programs_as_stock
    found = NORM_ADD_NORM.known(known, spec, x, residual, inner_weight, weight) if may_be_known(spec) else None
    if found is not None:
        return found
    if obstacle(x, weight, residual, spec) is not None or obstacle(x, inner_weight, None, spec) is not None:
        return None
    return NORM_ADD_NORM.kept_among(known, spec, x, residual, inner_weight, weight)


def _with_batch(x: Any, without: int) -> Any:
    """A tensor of so many dimensions with one of the batch in front; anything else as it is."""
    return x.unsqueeze(0) if isinstance(x, Tensor) and x.dim() == without else x


def _as_given(x: Tensor, given: Tensor) -> Tensor:
    """``x`` without the dimension of the batch that ``given`` had not."""
    return x if x.dim() == given.dim() else x.squeeze(0)


def _qk_obstacle(q: Any, k: Any, q_weight: Tensor | None, k_weight: Tensor | None, spec: NormSpec) -> str | None:
    reason = obstacle(q, q_weight, None, spec)
    if reason is None:
        reason = obstacle(k, k_weight, None, spec, leads=False)
    if reason is None and (q.dtype != k.dtype or q.shape[-1] != k.shape[-1] or q.device != k.device):
        reason = "q and k differ in dtype, width or device"
    return placement_obstacle((q, k), (q_weight, k_weight)) if reason is None else reason


def _pair_obstacle(names: str, one: Any, other: Any, *, elementwise: bool = False) -> str | None:
    """``obstacle`` for two tensors without a norm, which have to be of one dtype and device."""
    reason = obstacle(one, None, None, None, elementwise=elementwise)
    if reason is None and not is_taken(other):
        reason = f"one of {names} is a {type(other).__name__}"
    if reason is None and (one.dtype != other.dtype or one.device != other.device):
        reason = f"{names} differ in dtype or device"
    return placement_obstacle((one, other), elementwise=elementwise) if reason is None else reason


def _kernel_rotates_alike(
    dtypes: Sequence[DtypePair],
    rotation: Rotation,
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Any,
    sin: Any,
    heads_dim: Any,
) -> bool:
    """Return whether the kernel rotates these tensors as ``rotation`` would, in shapes, and in one of these dtypes."""
    if not (isinstance(cos, Tensor) and isinstance(sin, Tensor)):
        return False
    shape, cos_shape, dtype, cos_dtype = q.shape, cos.shape, q.dtype, cos.dtype
    k_shape = shape if k is None else k.shape
    if len(shape) != 4 or len(k_shape) != 4 or len(cos_shape) != 3 or heads_dim not in (1, 2):
        return False
    batch, tokens, width = shape[0], shape[3 - heads_dim], shape[3]
    angles, length, rotary = cos_shape
    return (
        (k_shape[0], k_shape[3 - heads_dim]) == (batch, tokens)
        and sin.shape == cos_shape
        and angles in (1, batch)
        and length == tokens
        and (rotary == width or (rotation.partial and rotary < width))
        and rotary % 2 == 0
        and cos.device == q.device
        and cos_dtype == sin.dtype
        and (dtype, cos_dtype) in dtypes
        and all(
            weight is None or weight.dtype == dtype or (torch.promote_types(dtype, weight.dtype), cos_dtype) in dtypes
            for weight in (q_weight, k_weight)
        )
        and not (cos.requires_grad or sin.requires_grad)
        and are_angles_of(q, (cos, sin), heads_dim)
    )
