"""The linear after a gated MLP's product, if it has 4 bits, or is a LoRA layer around one: it casts the product.

The product is written in the 16 bits that it reads. If such linears compute gate and up as well, they return what they
add up in 16 bits, and not the sum in float32, so that gradients are of 16 bits, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.autocast import autocast_dtype
from ..kernels.glu import GLU_FOR_CONSUMERS
from .activation_recognition import Formula
from .adapters import adapter_reads_in, is_plain_in_4_bits, linear_reads_in
from .fused_linear_4bit import FusedLinear4bit
from .fused_norm_module import is_disabled, run_fused
from .linear_values import AdapterInput, Summands
from .recompute import recomputes, recomputes_linears


def fused_norm_gated(block: Any, activation: Formula, act: Any, linear: Any, **factors: Any) -> Any:
    """``linear(act(gate) * up)``; ``activation`` is the formula of ``act``.

    ``factors``: gate and up in their order in stock code; each is a tensor, or a pair of a linear and what it reads.
    """
    read = factors["gate"][1] if type(factors["gate"]) is tuple else factors["gate"]
    read = read.x if type(read) is AdapterInput else read
    products = None if torch.compiler.is_compiling() or type(read) is not Tensor else autocast_dtype(read)
    dtype, wide = _dtype_read_by(linear, products)
    summands = None if recomputes_linears() else products
    computed = {name: _computed(factor, summands) for name, factor in factors.items()}
    gate, up = computed["gate"], computed["up"]
    tensors: tuple[Any, ...] | None = None
    if type(gate) is type(up) is Summands and (gate.added is None) == (up.added is None):
        tensors = gate.base, up.base, gate.added, up.added
    else:
        gate, up = _sum(gate), _sum(up)
        if dtype is not None and getattr(gate, "dtype", None) == getattr(up, "dtype", None) == torch.float32:
            tensors = gate, up, None, None
    if tensors is not None and not is_disabled():
        consumers = 1 if dtype is None or isinstance(linear, FusedLinear4bit) else 2
        written = consumers, dtype or torch.float32, wide
        outputs = block.fused_norm_product(activation, act, *tensors, *written)
        if outputs is not None:
            y, own = (outputs, outputs) if isinstance(outputs, Tensor) else (outputs[0], outputs[-1])
            return linear(y if dtype is None else AdapterInput(y, own, torch.float32))
    return linear(block.fused_norm_gate(activation, act, gate=_sum(gate), up=_sum(up)))


def fused_norm_product(
    block: Any,
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

    Consumers whose bits are set in ``wide`` get float32. None if kernels do not take it; inside ``disabled()``, where
    nothing calls it but to compare, the formula.
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
