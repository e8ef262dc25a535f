"""The methods that rewritten forwards of layers, attentions and MLPs call: several modules' work in one kernel.

They are called only if no hook, wrapper, sharding or offloading is skipped by it: the guard of the rewritten forward
(``guard.py``) has asked. Where a kernel does not take a module's input, the modules are called one after the other, as
in the stock code.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..kernels.glu import GLU
from ..kernels.norm import NORM_ADD, NORM_ADD_NORM, NORM_ADD_NORM_FOR_CONSUMERS, RMS_NORM_FOR_CONSUMERS
from ..kernels.qk_norm_rope import QK_NORM, ROPE
from ..kernels.reference import written
from ..kernels.sharded import is_plain
from ..kernels.triton.devices import runs_kernels_on
from ..options import RecomputeLevel
from .activation_recognition import Formula
from .attention_functions import read_dtype
from .fused_norm_module import (
    explain,
    is_disabled,
    norm_of_sum,
    run_fused,
    spec_and_weights,
)
from .hooks import is_idle_dropout
from .linear_inputs import ConsumerSpec, consumer_spec, for_consumers, fused_norm_inputs
from .rewrite import Rewrite
from .rotation_recognition import Rotation, full_cos_sin, function_name


class FusedBlock(nn.Module):
    """Base of the classes put on modules whose forward was rewritten; each derives from the module's own class."""

    fused_norm_origin: ClassVar[type[nn.Module]]
    fused_norm_origin_forward: ClassVar[Any]
    fused_norm_rewrites: ClassVar[tuple[Rewrite, ...]]
    fused_norm_rotations: ClassVar[tuple[Rotation, ...]]
    fused_norm_recompute: ClassVar[RecomputeLevel]
    fused_norm_linears: ClassVar[tuple[str, ...]]

    def fused_norm_add(
        self,
        norm: Any,
        residual: Any,
        branch: Any,
        *,
        inner: Any = None,
        dropout: Any = None,
        scale: Any = 1.0,
        consumer: Any = None,
    ) -> tuple[Any, Any]:
        """``(norm(s), s)`` of ``s = residual + scale * dropout(inner(branch))``; ``consumer`` gets the norm."""
        if dropout is not None and not is_idle_dropout(dropout):
            branch, inner = dropout(inner(branch)), None
        if inner is not None:
            together = _norm_add_norm(norm, residual, branch, inner, consumer)
            if together is not None:
                return together
            branch = inner(branch)
        if type(scale) not in (float, int):
            branch, scale = branch * scale, 1.0
        consumers = None
        if consumer is not None:
            consumers = consumer_spec(consumer, branch, residual, spec_and_weights(norm)[1])
        outputs = norm_of_sum(norm, branch, residual, scale, consumers)
        return outputs if consumers is None else for_consumers(outputs, consumers, norm)

    def fused_norm_add_by_call(self, norm: Any, residual: Any, branch: Any, *, scale: Any = 1.0) -> tuple[Any, Any]:
        """``(norm(s), s)`` of ``s = residual + scale * branch``, by a call of the norm (``takes_residual``)."""
        if type(scale) not in (float, int):
            branch, scale = branch * scale, 1.0
        return norm(branch, residual) if scale == 1.0 else norm(branch, residual, scale)

    def fused_norm_passthrough(self, norm: Any, x: Any, consumer: Any = None) -> tuple[Any, Any]:
        """Return ``(norm(x), x)``, for ``consumer`` the norm's outputs; the gradient of this x joins the norm's."""
        if not torch.compiler.is_compiling():
            spec, weight = spec_and_weights(norm)
            consumers = (None if consumer is None else consumer_spec(consumer, x, weight)) or ConsumerSpec()
            outputs, reason = run_fused(RMS_NORM_FOR_CONSUMERS, spec, x, weight, *consumers)
            if reason is None:
                return for_consumers(outputs, consumers, norm)
        return norm(x), x

    fused_norm_inputs = fused_norm_inputs

    def fused_norm_then_add(self, inner: Any, residual: Any, branch: Any, *, dropout: Any = None) -> Any:
        """``residual + dropout(inner(branch))``."""
        if dropout is not None and not is_idle_dropout(dropout):
            return residual + dropout(inner(branch))
        spec, weight = spec_and_weights(inner)
        found, reason = run_fused(NORM_ADD, spec, branch, residual, weight)
        return found if reason is None else residual + inner(branch)

    def fused_norm_pair(self, q_norm: Any, k_norm: Any, q: Any, k: Any) -> tuple[Any, Any]:
        """``q_norm(q), k_norm(k)``."""
        spec, *weights = spec_and_weights(q_norm, k_norm)
        found, reason = run_fused(QK_NORM, spec, q, k, *weights, None, None, 1, None)
        return found if reason is None else (q_norm(q), k_norm(k))

    fused_norm_read_dtype = read_dtype

    def fused_norm_rotated(
        self,
        q_norm: Any,
        k_norm: Any,
        rotate: Any,
        q: Any,
        k: Any,
        cos: Any,
        sin: Any,
        *,
        dtype: torch.dtype | None = None,
        **named: Any,
    ) -> tuple[Any, Any]:
        """``rotate(q_norm(q), k_norm(k), cos, sin)``; ``dtype`` is as in ``fused_norm_rope``."""
        spec, *weights = spec_and_weights(q_norm, k_norm)
        tensors, heads_dim = (q, k, *weights), named.get("unsqueeze_dim", 1)
        for rotation in self.fused_norm_rotations:
            if rotation.fits_qk_norm and rotation.is_now(rotate):
                found, reason = run_fused(
                    QK_NORM,
                    spec,
                    *tensors,
                    cos,
                    sin,
                    heads_dim,
                    dtype,
                    programs=rotation.programs_with_norms,
                    unless=rotation.unlike_qk_norm,
                )
                if reason is None:
                    return found
        found, reason = run_fused(QK_NORM, spec, *tensors, None, None, 1, None)
        q, k = found if reason is None else (q_norm(q), k_norm(k))
        return self.fused_norm_rope(rotate, q, k, cos, sin, dtype=dtype, **named)

    def fused_norm_rope(
        self,
        rotate: Any,
        q: Any,
        k: Any,
        cos: Any,
        sin: Any,
        *further: Any,
        dtype: torch.dtype | None = None,
        **named: Any,
    ) -> tuple[Any, Any]:
        """``rotate(q, k, cos, sin, *further)``; in ``dtype``, if given, where that would be float32."""
        rotated = self._rotated(rotate, (q, k), (cos, sin, *further), named, dtype)
        return _written(rotate(q, k, cos, sin, *further, **named), dtype) if rotated is None else rotated

    def fused_norm_rope_one(self, rotate: Any, x: Any, cos: Any, sin: Any, **named: Any) -> Any:
        """``rotate(x, cos, sin)``."""
        rotated = self._rotated(rotate, (x, None), (cos, sin), named, None)
        return rotate(x, cos, sin, **named) if rotated is None else rotated[0]

    def _rotated(
        self, rotate: Any, heads: tuple[Any, Any], angles: tuple[Any, ...], named: dict[str, Any], dtype: Any
    ) -> tuple[Tensor, Tensor | None] | None:
        """q and k rotated by the kernel; None where it may not take them.

        ``angles``: cos, sin, and what tells more of them.
        """
        (q, k), (cos, sin, *further) = heads, angles
        arguments = (1 if k is None else 2) + len(angles)
        for rotation in self.fused_norm_rotations:
            if rotation.is_now(rotate) and rotation.arguments == arguments and not (rotation.tokens_first and named):
                break
        else:
            return None
        if rotation.angles is not full_cos_sin and not is_disabled() and isinstance(q, Tensor) and runs_kernels_on(q):
            if not all(map(is_plain, (q, cos, sin))):
                what = f"{function_name(rotation.function)} is called with tensors of other kinds than the kernel takes"
                explain(self.fused_norm_origin, what)
                return None
            cos, sin = rotation.angles(cos, *further), rotation.angles(sin, *further)
        heads_dim = named.get("unsqueeze_dim", 1)
        if rotation.tokens_first:
            heads, heads_dim = (_with_batch(q, 3), _with_batch(k, 3)), 2
            cos, sin = _with_batch(cos, 2), _with_batch(sin, 2)
        single = bool(rotation.single_rounding_dtypes) and (
            (getattr(q, "dtype", None), getattr(cos, "dtype", None)) in rotation.single_rounding_dtypes
        )
        options = heads_dim, single, rotation.layout, rotation.angles_by_pair, dtype
        found, reason = run_fused(
            ROPE, None, *heads, cos, sin, *options, programs=rotation.programs, unless=rotation.unlike_rope
        )
        if reason is not None:
            explain(self.fused_norm_origin, reason)
        if found is None or not rotation.tokens_first:
            return found
        return _like(found[0], q), None if k is None else _like(found[1], k)

    def fused_norm_gate(self, activation: Formula, act: Any, *, gate: Any, up: Any) -> Any:
        """``act(gate) * up``; ``activation`` is the formula of ``act``."""
        found, reason = run_fused(GLU, None, gate, up, activation)
        if reason is None:
            return found
        explain(self.fused_norm_origin, reason)
        return act(gate) * up

    def fused_norm_gate_packed(self, activation: Formula, act: Any, packed: Any) -> Any:
        """``act(gate) * up`` of the two halves of a tensor; ``activation`` is the formula of ``act``."""
        found, reason = run_fused(GLU, None, packed, None, activation)
        if reason is None:
            return found
        explain(self.fused_norm_origin, reason)
        gate, up = packed.chunk(2, dim=-1)
        return act(gate) * up


def _norm_add_norm(norm: Any, residual: Any, x: Any, inner: Any, consumer: Any) -> tuple[Tensor, Tensor] | None:
    spec, *weights = spec_and_weights(inner, norm)
    if spec is None:
        return None
    arguments = x, residual, *weights
    consumers = None if consumer is None else consumer_spec(consumer, *arguments)
    if consumers is not None:
        outputs, reason = run_fused(NORM_ADD_NORM_FOR_CONSUMERS, spec, *arguments, *consumers)
        if reason is None:
            return for_consumers(outputs, consumers, norm)
    outputs, _ = run_fused(NORM_ADD_NORM, spec, *arguments)
    return outputs


def _written(rotated: Any, dtype: torch.dtype | None) -> Any:
    """Cast what stock code has rotated from float32 to ``dtype``, if that is given."""
    return rotated if dtype is None else tuple([written(one, dtype) for one in rotated])


def _with_batch(x: Any, without: int) -> Any:
    """A tensor of so many dimensions with one of the batch in front; anything else as it is."""
    return x.unsqueeze(0) if isinstance(x, Tensor) and x.dim() == without else x


def _like(x: Tensor, given: Tensor) -> Tensor:
    """``x`` without the dimension of the batch that ``given`` had not."""
    return x if x.dim() == given.dim() else x.squeeze(0)
