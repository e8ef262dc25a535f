"""The linear after a gated MLP's product, if it is a LoRA layer around a 4-bit linear, which casts the product.

The product is written in the 16 bits that the layer reads. If LoRA layers around 4-bit linears compute gate and up as
well, they return their two summands in 16 bits, and not the sum in float32, so that gradients are of 16 bits, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.autocast import autocast_dtype
from ..kernels.glu import GLU_FOR_CONSUMERS
from .activation_recognition import Formula
from .adapters import AdapterInput, Summands, is_plain_in_4_bits, reads_in
from .fused_norm_module import run_fused
from .recompute import recomputes_linears


def fused_norm_gated(block: Any, activation: Formula, act: Any, linear: Any, **factors: Any) -> Any:
    """``linear(act(gate) * up)``; ``activation`` is the formula of ``act``.

    ``factors``: gate and up in their order in stock code; each is a tensor, or a pair of a linear and what it reads.
    """
    dtype = _dtype_read_by(linear, factors)
    summands = dtype if dtype is not None and not recomputes_linears() else None
    computed = {name: _computed(factor, summands) for name, factor in factors.items()}
    gate, up = computed["gate"], computed["up"]
    if dtype is not None:
        tensors: tuple[Any, ...]
        if type(gate) is type(up) is Summands:
            tensors = gate.base, up.base, gate.added, up.added
        else:
            gate, up = _sum(gate), _sum(up)
            tensors = gate, up, None, None
        y, reason = run_fused(GLU_FOR_CONSUMERS, None, *tensors, activation, 2, dtype)
        if reason is None:
            y, own = (y, y) if isinstance(y, Tensor) else y
            return linear(AdapterInput(y, own, torch.float32))
    return linear(block.fused_norm_gate(activation, act, gate=_sum(gate), up=_sum(up)))


def _dtype_read_by(linear: Any, factors: dict[str, Any]) -> torch.dtype | None:
    """The 16 bits that a 4-bit LoRA layer, as it is now, casts a float32 input to before all else; None if unknown."""
    if torch.compiler.is_compiling() or not getattr(linear, "fused_norm_is_quantised", False):
        return None
    lead = factors["gate"]
    lead = lead[1] if type(lead) is tuple else lead
    lead = lead.x if type(lead) is AdapterInput else lead
    dtype = autocast_dtype(lead) if type(lead) is Tensor else None
    if dtype is None or not is_plain_in_4_bits(linear) or not reads_in(linear, dtype):
        return None
    return dtype if linear.base_layer.compute_dtype is dtype else None


def _computed(factor: Any, dtype: torch.dtype | None) -> Any:
    """A factor, or its summands if a LoRA layer around a 4-bit linear returns these.

    ``dtype``: that of products; None if the sum is wanted.
    """
    if type(factor) is not tuple:
        return factor
    linear, x = factor
    if dtype is None or not getattr(linear, "fused_norm_is_quantised", False):
        return linear(x)
    given = x if type(x) is AdapterInput else AdapterInput(x, x, None)
    # The guard of the layer has asked whether the calls of linears that get an ``AdapterInput`` are plain.
    if type(given.x) is not Tensor or (given is not x and not is_plain_in_4_bits(linear)):
        return linear(x)
    if (given.dtype or given.x.dtype) != torch.float32:
        return linear(x)
    return linear(AdapterInput(given.x, given.own, given.dtype, returns_summands=True))


def _sum(factor: Any) -> Any:
    """A factor as it is in stock code."""
    return factor.base.float() + factor.added if type(factor) is Summands else factor
