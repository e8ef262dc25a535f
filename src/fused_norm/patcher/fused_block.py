"""The methods that rewritten forwards of layers, attentions and MLPs call: several modules' work in one kernel.

They are called only if no hook, wrapper, sharding or offloading is skipped by it: the guard of the rewritten forward
(``fused_classes.py``) has asked. If a kernel does not take a module's input, the modules are called one after the
other, as in the stock code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..kernels.autocast import autocast_dtype
from ..kernels.glu import GLU, GLU_FOR_CONSUMERS
from ..kernels.norm import (
    ADD_RMS_NORM,
    ADD_RMS_NORM_FOR_CONSUMERS,
    NORM_ADD,
    NORM_ADD_NORM,
    NORM_ADD_NORM_FOR_CONSUMERS,
    RMS_NORM_FOR_CONSUMERS,
)
from ..kernels.qk_norm_rope import QK_NORM, ROPE
from ..kernels.reference import cast_output
from ..kernels.sharded import is_plain
from ..kernels.triton.devices import runs_kernels_on
from ..options import RecomputeLevel
from .activation_recognition import Activation, Formula
from .adapters import adapter_reads_in, is_plain_in_4_bits, linear_reads_in
from .attention_functions import for_values, read_dtype
from .convolution_recognition import ConvolutionFunction, convolve_as_module
from .four_bit import AdapterInput, FusedLinear4bit, Summands
from .fused_norm_module import is_disabled, norm_after_add, run_fused, spec_and_weights, takes_residual, warn_once
from .hooks import Fused, is_idle_dropout, runs_as_compared, short_name
from .linear_inputs import ConsumerSpec, NormOutputs, consumer_spec, fused_norm_inputs
from .recompute import recomputes, recomputes_linears
from .rotation_recognition import Rotation, full_cos_sin


@dataclass(frozen=True)
class Rewrite:
    """A match of a pattern in a forward that is to be fused.

    Attributes:
        pattern: the list in ``Patterns`` that has the match, such as ``adds``.
        index: the match's index in that list.
        parts: the parts of the match that are fused. An add has ``norm``, ``inner``, ``dropout``, ``consumers``, and
            ``called`` if other code sees the call of its norm. A consumed norm has ``consumers`` and ``input``, and a
            gate has ``consumer``. Heads have ``rotation``. A rotation has ``values``, of heads or by itself. Inputs
            have the attributes of the linears.
        activation: that of a gate, or of a module that convolves.
    """

    pattern: str
    index: int
    parts: tuple[str, ...] = ()
    activation: Activation | None = None


class FusedBlock(Fused):
    """Base of the classes put on modules whose forward was rewritten; each derives from the module's own class."""

    fused_norm_rewrites: ClassVar[tuple[Rewrite, ...]]
    fused_norm_rotations: ClassVar[tuple[Rotation, ...]]
    fused_norm_convolutions: ClassVar[tuple[ConvolutionFunction, ...]]
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
        if dropout is not None and self._drops(dropout):
            branch, inner = dropout(inner(branch)), None
        if inner is not None:
            spec, *weights = spec_and_weights(inner, norm)
            tensors = branch, residual, *weights
            consumers = None if spec is None or consumer is None else consumer_spec(consumer, *tensors)
            if consumers is not None:
                outputs, reason = run_fused(NORM_ADD_NORM_FOR_CONSUMERS, *tensors, spec, *consumers)
                if reason is None:
                    *ys, s = outputs
                    return NormOutputs(ys, consumers, norm, s), s
            outputs = None if spec is None else run_fused(NORM_ADD_NORM, *tensors, spec)[0]
            if outputs is not None:
                return outputs
            branch = inner(branch)
        if type(scale) not in (float, int):
            branch, scale = branch * scale, 1.0
        spec, weight = spec_and_weights(norm)
        consumers = None if consumer is None else consumer_spec(consumer, branch, residual, weight)
        if consumers is None:
            outputs, reason = run_fused(ADD_RMS_NORM, branch, residual, weight, spec, None, scale)
            return outputs if reason is None else norm_after_add(norm, branch, residual, scale, reason)
        outputs, reason = run_fused(ADD_RMS_NORM_FOR_CONSUMERS, branch, residual, weight, spec, scale, *consumers)
        if reason is not None:
            return norm_after_add(norm, branch, residual, scale, reason)
        *tensors, s = outputs
        return NormOutputs(tensors, consumers, norm, s), s

    def _drops(self, dropout: Any) -> bool:
        """Return whether a dropout has to be called; the log says so once."""
        if is_idle_dropout(dropout):
            return False
        if not is_disabled():
            warn_once(
                self.fused_norm_origin,
                "a dropout between them is active, or other code sees its call",
                "a norm and its add one by one",
            )
        return True

    def fused_norm_add_by_call(self, norm: Any, residual: Any, branch: Any, *, scale: Any = 1.0) -> tuple[Any, Any]:
        """``(norm(s), s)`` of ``s = residual + scale * branch``, by a call of the norm, with the residual if it may."""
        if type(scale) not in (float, int):
            branch, scale = branch * scale, 1.0
        if takes_residual(norm):
            return norm(branch, residual) if scale == 1.0 else norm(branch, residual, scale)
        total = residual + (branch if scale == 1.0 else branch * scale)
        return norm(total), total

    def fused_norm_passthrough(self, norm: Any, x: Any, consumer: Any = None) -> tuple[Any, Any]:
        """Return ``(norm(x), x)``, for ``consumer`` the norm's outputs; the gradient of this x joins the norm's."""
        if not torch.compiler.is_compiling():
            spec, weight = spec_and_weights(norm)
            consumers = None if consumer is None else consumer_spec(consumer, x, weight)
            outputs, reason = run_fused(RMS_NORM_FOR_CONSUMERS, x, weight, spec, *(consumers or ConsumerSpec()))
            if reason is None:
                *tensors, x = outputs
                return tensors[0] if consumers is None else NormOutputs(tensors, consumers, norm, x), x
        return norm(x), x

    fused_norm_inputs = fused_norm_inputs

    def fused_norm_then_add(self, inner: Any, residual: Any, branch: Any, *, dropout: Any = None) -> Any:
        """``residual + dropout(inner(branch))``."""
        if dropout is not None and self._drops(dropout):
            return residual + dropout(inner(branch))
        spec, weight = spec_and_weights(inner)
        outputs, reason = run_fused(NORM_ADD, branch, residual, weight, spec)
        return outputs if reason is None else residual + inner(branch)

    def fused_norm_pair(self, q_norm: Any, k_norm: Any, q: Any, k: Any) -> tuple[Any, Any]:
        """``q_norm(q), k_norm(k)``."""
        spec, *weights = spec_and_weights(q_norm, k_norm)
        outputs, reason = run_fused(QK_NORM, q, k, *weights, None, None, spec, 1, None)
        return outputs if reason is None else (q_norm(q), k_norm(k))

    fused_norm_read_dtype = read_dtype

    fused_norm_for_values = for_values

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
        tensors = q, k, *weights
        rotated = *tensors, cos, sin, spec, named.get("unsqueeze_dim", 1), dtype
        for rotation in self.fused_norm_rotations:
            is_alike = rotation.angles is full_cos_sin and not rotation.tokens_first and rotation.layout == "half"
            if is_alike and runs_as_compared(rotate, rotation.function, rotation.running):
                key, unless = rotation.key, rotation.unlike_qk_norm
                outputs, reason = run_fused(QK_NORM, *rotated, replaces=key, unless=unless)
                if reason is None:
                    return outputs
        outputs, reason = run_fused(QK_NORM, *tensors, None, None, spec, 1, None)
        q, k = outputs if reason is None else (q_norm(q), k_norm(k))
        return self.fused_norm_rope(rotate, q, k, cos, sin, dtype=dtype, **named)

    def fused_norm_rope(
        self,
        rotate: Any,
        q: Any,
        k: Any,
        cos: Any,
        sin: Any,
        *extra: Any,
        dtype: torch.dtype | None = None,
        **named: Any,
    ) -> tuple[Any, Any]:
        """``rotate(q, k, cos, sin, *extra)``; in ``dtype``, if given, in place of float32."""
        rotated: Any = self._rotated(rotate, (q, k), (cos, sin, *extra), named, dtype)
        if rotated is None:
            rotated = rotate(q, k, cos, sin, *extra, **named)
            if dtype is not None:
                rotated = tuple([cast_output(x, dtype) for x in rotated])
        return rotated

    def fused_norm_rope_one(self, rotate: Any, x: Any, cos: Any, sin: Any, **named: Any) -> Any:
        """``rotate(x, cos, sin)``."""
        rotated = self._rotated(rotate, (x, None), (cos, sin), named, None)
        return rotate(x, cos, sin, **named) if rotated is None else rotated[0]

    def _rotated(
        self, rotate: Any, heads: tuple[Any, Any], angles: tuple[Any, ...], named: dict[str, Any], dtype: Any
    ) -> tuple[Tensor, Tensor | None] | None:
        """q and k rotated by the kernel; None if it may not take them.

        ``angles``: cos, sin, and what tells more of them.
        """
        (q, k), (cos, sin, *extra) = heads, angles
        arguments = (1 if k is None else 2) + len(angles)
        for rotation in self.fused_norm_rotations:
            is_alike = rotation.arguments == arguments and not (rotation.tokens_first and named)
            if is_alike and runs_as_compared(rotate, rotation.function, rotation.running):
                break
        else:
            return None
        if rotation.angles is not full_cos_sin and not is_disabled() and isinstance(q, Tensor) and runs_kernels_on(q):
            if not all(map(is_plain, (q, cos, sin))):
                what = f"{short_name(rotation.function)} is called with tensors of other kinds than the kernel takes"
                warn_once(self.fused_norm_origin, what)
                return None
            cos, sin = rotation.angles(cos, *extra), rotation.angles(sin, *extra)
        heads_dim = named.get("unsqueeze_dim", 1)
        if rotation.tokens_first:
            heads, heads_dim = (_with_batch(q, 3), _with_batch(k, 3)), 2
            cos, sin = _with_batch(cos, 2), _with_batch(sin, 2)
        single = bool(rotation.single_rounding_dtypes) and (
            (getattr(q, "dtype", None), getattr(cos, "dtype", None)) in rotation.single_rounding_dtypes
        )
        options = heads_dim, single, rotation.layout, rotation.angles_by_pair, dtype
        outputs, reason = run_fused(
            ROPE, *heads, cos, sin, *options, replaces=rotation.key, unless=rotation.unlike_rope
        )
        if reason is not None:
            warn_once(self.fused_norm_origin, reason)
        if outputs is None or not rotation.tokens_first:
            return outputs
        return _like(outputs[0], q), None if k is None else _like(outputs[1], k)

    def fused_norm_gate(self, activation: Formula, act: Any, *, gate: Any, up: Any) -> Any:
        """``act(gate) * up``; ``activation`` is the formula of ``act``."""
        if activation == "gelu_new" and gate.device.type != "cpu" and autocast_dtype(gate) is not None:
            gate = gate.float()  # as autocast casts the argument of ``pow``, with which all else is in float32
        outputs, reason = run_fused(GLU, gate, up, activation)
        if reason is None:
            return outputs
        warn_once(self.fused_norm_origin, reason)
        return act(gate) * up

    def fused_norm_gated(self, activation: Formula, act: Any, linear: Any, **factors: Any) -> Any:
        """``linear(act(gate) * up)``; ``activation`` is the formula of ``act``.

        If the linear has 4 bits, or is a LoRA layer around one, it casts the product, which is written in the 16 bits
        that it reads. If such linears compute gate and up as well, they return what they add up in 16 bits, and not the
        sum in float32, so that gradients are of 16 bits, too.

        ``factors``: gate and up in their order in stock code; each is a tensor, or a pair of a linear and its input.
        """
        read = factors["gate"][1] if type(factors["gate"]) is tuple else factors["gate"]
        read = read.x if type(read) is AdapterInput else read
        products = None if torch.compiler.is_compiling() or type(read) is not Tensor else autocast_dtype(read)
        dtype, wide = _dtype_read_by(linear, products)
        summands = None if recomputes_linears() else products
        computed = {name: _computed(factor, summands) for name, factor in factors.items()}
        gate, up = computed["gate"], computed["up"]
        tensors: tuple[Any, Any, Any, Any] | None = None
        if type(gate) is type(up) is Summands and (gate.added is None) == (up.added is None):
            tensors = gate.base, up.base, gate.added, up.added
        else:
            gate, up = _sum(gate), _sum(up)
            if dtype is not None and getattr(gate, "dtype", None) == getattr(up, "dtype", None) == torch.float32:
                tensors = gate, up, None, None
        if tensors is not None and not is_disabled():
            consumers = 1 if dtype is None or isinstance(linear, FusedLinear4bit) else 2
            outputs = self.fused_norm_product(activation, act, *tensors, consumers, dtype or torch.float32, wide)
            if outputs is not None:
                y, own = (outputs, outputs) if isinstance(outputs, Tensor) else (outputs[0], outputs[-1])
                return linear(y if dtype is None else AdapterInput(y, own, torch.float32))
        return linear(self.fused_norm_gate(activation, act, gate=_sum(gate), up=_sum(up)))

    def fused_norm_product(
        self,
        activation: Formula,
        act: Any,
        gate: Tensor,
        up: Tensor,
        gate_added: Tensor | None,
        up_added: Tensor | None,
        consumers: int,
        dtype: torch.dtype,
        wide: int,
    ) -> Any:
        """``act(gate + gate_added) * (up + up_added)`` in float32, cast to ``dtype``: a tensor, or one per consumer.

        Consumers whose bits are set in ``wide`` get float32. None if kernels do not take it; inside ``disabled()``,
        where nothing calls it but to compare, the formula.
        """
        tensors = gate, up, gate_added, up_added
        outputs, reason = run_fused(GLU_FOR_CONSUMERS, *tensors, activation, consumers, dtype, wide)
        if reason is None:
            return outputs
        if not is_disabled():
            return None
        gate, up = (_sum(Summands(*summands)) for summands in ((gate, gate_added), (up, up_added)))
        y = act(gate) * up
        return y if wide else y.to(dtype)

    def fused_norm_gate_packed(self, activation: Formula, act: Any, packed: Any) -> Any:
        """``act(gate) * up`` of the two halves of a tensor; ``activation`` is the formula of ``act``."""
        if activation == "gelu_new":  # of which autocast makes another dtype than up has
            gate, up = packed.chunk(2, dim=-1)
            return self.fused_norm_gate(activation, act, gate=gate, up=up)
        outputs, reason = run_fused(GLU, packed, None, activation)
        if reason is None:
            return outputs
        warn_once(self.fused_norm_origin, reason)
        gate, up = packed.chunk(2, dim=-1)
        return act(gate) * up

    def fused_norm_conv(self, convolve: Any, *args: Any, **named: Any) -> Any:
        """``convolve(*given, **named)``, a causal convolution."""
        for convolution in self.fused_norm_convolutions:
            if runs_as_compared(convolve, convolution.function, convolution.running):
                y, reason = convolution.convolve(*args, **named)
                if reason is None:
                    return y
                warn_once(self.fused_norm_origin, reason)
        return convolve(*args, **named)

    def fused_norm_conv_module(self, act: Any, conv: Any, x: Any, length: Any) -> Any:
        """``act(conv(x)[..., :length])``, where ``conv`` is an ``nn.Conv1d`` and ``act`` is SiLU, or None."""
        y, reason = convolve_as_module(conv, x, length, None if act is None else "silu")
        if reason is None:
            return y
        warn_once(self.fused_norm_origin, reason)
        y = conv(x)[..., :length]
        return y if act is None else act(y)


def _with_batch(x: Any, without: int) -> Any:
    """A tensor of so many dimensions with one of the batch in front; anything else as it is."""
    return x.unsqueeze(0) if isinstance(x, Tensor) and x.dim() == without else x


def _like(x: Tensor, other: Tensor) -> Tensor:
    """``x`` without the dimension of the batch if ``other`` has none."""
    return x if x.dim() == other.dim() else x.squeeze(0)


def _dtype_read_by(linear: Any, dtype: torch.dtype | None) -> tuple[torch.dtype | None, int]:
    """The 16 bits that a 4-bit linear, perhaps in a LoRA layer, casts a float32 input to; None if unknown.

    Also ``wide``, as ``GLU_FOR_CONSUMERS`` takes it: 2 if the layer's adapter, its second consumer, drops some of it.

    ``dtype``: autocast's.
    """
    if dtype is None or not getattr(linear, "fused_norm_is_quantised", False):
        return None, 0
    if not is_plain_in_4_bits(linear) or not linear_reads_in(linear, dtype):
        return None, 0
    if isinstance(linear, FusedLinear4bit) or adapter_reads_in(linear, dtype):
        return dtype, 0
    return (None, 0) if recomputes() else (dtype, 2)


def _computed(factor: Any, dtype: torch.dtype | None) -> Any:
    """A factor, or its summands if a 4-bit linear or its LoRA layer returns these.

    ``dtype``: that of products; None if the sum is wanted.
    """
    if type(factor) is not tuple:
        return factor
    linear, x = factor
    if dtype is None or not getattr(linear, "fused_norm_is_quantised", False):
        return linear(x)
    adapter_input = x if type(x) is AdapterInput else AdapterInput(x, x, None)
    # The guard of the layer has asked whether the calls of linears that get an ``AdapterInput`` are plain.
    if type(adapter_input.x) is not Tensor or (adapter_input is not x and not is_plain_in_4_bits(linear)):
        return linear(x)
    if (adapter_input.dtype or adapter_input.x.dtype) != torch.float32:
        return linear(x)
    return linear(AdapterInput(adapter_input.x, adapter_input.own, adapter_input.dtype, returns_summands=True))


def _sum(factor: Any) -> Any:
    """A factor as it is in stock code."""
    if type(factor) is not Summands:
        return factor
    return factor.base.float() if factor.added is None else factor.base.float() + factor.added
