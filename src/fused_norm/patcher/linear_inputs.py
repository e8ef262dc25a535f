"""The inputs of linears that read a norm, at the time of a call: what the norm is asked for, and who gets which.

A linear that anything else could see reading, a hook or a wrapper, is none of them: it gets the tensor that it would
get from a stock norm, and so do all that read that norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Linear, Parameter

from ..kernels.triton.norm_backward import MOST_READERS
from .adapters import FusedAdapter, is_lora_layer, keep_for_adapter, reads_in, why_stock
from .fused_norm_module import explain, has_hooks, has_origin_forward, is_disabled

FURTHER = "fused_norm_further_outputs"
"""The attribute of a norm's result with the outputs for all readers but the first."""

Wanted = tuple[int, torch.dtype | None]
"""What is asked of a norm: a number of outputs, and the dtype that all their readers cast them to, or None."""

ONE_OUTPUT: Wanted = 1, None

_SINCE = "they have come since the model was patched; apply_fused_norm once more, with the same options, fuses them"


def wanted_by(block: Any, *tensors: Any) -> Wanted | None:
    """Return what a block's linears ask of a norm that the block alone is given; None for one that is as in stock code.

    ``tensors``: those that the norm's dtype depends on, x first; None for one that is not there.
    """
    linears = getattr(block, "fused_norm_linears", ())
    if not linears or torch.compiler.is_compiling() or is_disabled() or type(tensors[0]) is not Tensor:
        return None
    device = "cuda" if tensors[0].is_cuda else tensors[0].device.type
    is_cast = torch.is_autocast_enabled(device)
    if not is_cast and not torch.is_grad_enabled():
        return None
    own, fused = block.__dict__, type(block)
    if "forward" in own or own.get("_compiled_call_impl") is not None or has_hooks(block):
        return None
    if fused.forward is not fused.fused_norm_forward or not has_origin_forward(fused):
        return None
    readers = [own["_modules"].get(name) for name in linears]
    count = 0
    for linear in readers:
        reads = reads_of(linear)
        if not reads:
            if is_lora_layer(linear) and not isinstance(linear, FusedAdapter):
                explain(fused.fused_norm_origin, _SINCE, "LoRA layers as PEFT has them")
            return None
        count += reads
    if count > MOST_READERS:
        return None
    dtype = torch.get_autocast_dtype(device) if is_cast else None
    return count, dtype if dtype is not None and _are_cast(readers, tensors, dtype) else None


def reads_of(linear: Any, *, adapter: type[nn.Module] = FusedAdapter) -> int:
    """Return the number of tensors that a linear reads as its input: one, and one for its adapter; 0 where unknown.

    ``adapter``: the class of LoRA layers.
    """
    if type(linear) is Linear:
        return 1 if _is_unseen(linear) else 0
    if not isinstance(linear, adapter) or not _is_unseen(linear):
        return 0
    base = linear._modules.get("base_layer")
    return 2 if type(base) is Linear and _is_unseen(base) and why_stock(linear) is None else 0


def _is_unseen(module: nn.Module) -> bool:
    """Return whether a call of the module runs its class's forward, and no hook of its own."""
    own = module.__dict__
    return not (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
    )


def _are_cast(readers: Sequence[Any], tensors: Sequence[Any], dtype: torch.dtype) -> bool:
    """Return whether a norm may be float32, and all readers cast it to autocast's dtype and to no other before it."""
    if not any(one is not None and one.dtype == torch.float32 for one in tensors):
        return False
    for linear in readers:
        if type(linear) is not Linear:
            if not reads_in(linear, dtype):
                return False
            linear = linear.base_layer
        if type(linear.weight) not in (Parameter, Tensor):
            return False
    return True


def for_readers(found: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return a norm, with the outputs for its other readers on it, and the sum, from what its operator has returned."""
    y, *further, s = found
    if further:
        y.__dict__[FURTHER] = further
    return y, s


def inputs_of(x: Any, block: Any) -> Sequence[Any]:
    """The input of each of a block's linears: one that the norm has made for it, or ``x`` for all."""
    linears = block.fused_norm_linears
    further = x.__dict__.pop(FURTHER, None) if type(x) is Tensor else None
    if further is None:
        return (x,) * len(linears)
    if len(further) + 1 == len(linears):
        return (x, *further)
    every, inputs = iter((x, *further)), []
    for name in linears:
        inputs.append(next(every))
        if isinstance(block._modules[name], FusedAdapter):
            keep_for_adapter(inputs[-1], next(every))
    return inputs
