"""The inputs of linears that read a norm, at the time of a call: what the norm is asked for, and who gets which.

A linear that anything else could see reading, a hook or a wrapper, is none of them: it gets the tensor that it would
get from a stock norm, and so do all that read that norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Linear, Parameter

from ..kernels.autocast import autocast_dtype, set_autocast
from ..kernels.triton.memory import norm_dtype
from ..kernels.triton.norm_backward import MOST_CONSUMERS
from .adapters import FusedAdapter, is_lora_layer, keep_for_adapter, reads_in, returns_in, why_stock, why_unfused
from .four_bit import why_unreadable
from .fused_norm_module import explain, is_disabled, spec_and_weights

_OUTPUTS = "fused_norm_outputs"
"""The attribute of a norm's result with its ``_Outputs``."""

Wanted = tuple[int, torch.dtype | None]
"""What is asked of a norm: a number of outputs, and the dtype that all their consumers cast them to, or None."""

ONE_OUTPUT: Wanted = 1, None

_SINCE = (
    "they have come since the model was patched; apply_fused_norm once more fuses them, if its options do not leave"
    " them out"
)


class _Outputs(NamedTuple):
    """The further outputs of a norm, and how to compute the norm again, kept with its result for the linears.

    Attributes:
        further: the outputs of the other linears.
        dtype: the one that autocast would have cast the result to; None if the result has the dtype of stock code.
        norm: the module.
        x: what the norm is of.
    """

    further: tuple[Tensor, ...]
    dtype: torch.dtype | None
    norm: Any
    x: Tensor


def wanted_by(block: Any, *tensors: Any) -> Wanted | None:
    """Return what a block's linears ask of a norm that the block alone is given; None for one that is as in stock code.

    The guard of the layer has asked whether the linears are plain (``called_by``).

    ``tensors``: those that the norm's dtype depends on, x first; None for one that is not there.
    """
    if torch.compiler.is_compiling() or type(tensors[0]) is not Tensor:
        return None
    dtype = autocast_dtype(tensors[0])
    if dtype is None and not torch.is_grad_enabled():
        return None
    consumers = list(map(block._modules.get, block.fused_norm_linears))
    count = len(consumers)
    for linear in consumers:
        count += type(linear) is not Linear
    if count > MOST_CONSUMERS:
        return None
    return count, dtype if dtype is not None and _are_cast(consumers, tensors, dtype) else None


def called_by(linears: Iterable[Any], *, adapter: type[nn.Module] = FusedAdapter) -> list[nn.Module] | None:
    """Return the modules, one for each tensor that linears read as their input, whose calls have to be plain.

    A linear reads one tensor, and another for its adapter. None if it is unknown what they read. Whether other code has
    replaced all linears is another question, ``replaced_linear``.

    Args:
        linears: the linears, or what is there in their place.
        adapter: the class of LoRA layers.
    """
    called: list[nn.Module] = []
    for linear in linears:
        if type(linear) is not Linear:
            base: Any = linear._modules.get("base_layer") if isinstance(linear, adapter) else None
            is_read = type(base) is Linear or why_unreadable(base) is None
            if not is_read or why_stock(linear) is not None:
                return None
            called.append(base)
        called.append(linear)
    return called


def explain_consumers(block: Any) -> None:
    """Log if LoRA layers that no kernel takes are why a block's linears get the result of a norm as it is in stock."""
    for linear in map(block._modules.get, getattr(block, "fused_norm_linears", ())):
        if is_lora_layer(linear) and not isinstance(linear, FusedAdapter) and not is_disabled():
            explain(block.fused_norm_origin, why_unfused(linear) or _SINCE, "LoRA layers as PEFT has them")


def _are_cast(consumers: Sequence[Any], tensors: Sequence[Any], dtype: torch.dtype) -> bool:
    """Return whether a norm may be float32, and all consumers cast it to autocast's dtype and to no other before it."""
    if not any(one is not None and one.dtype == torch.float32 for one in tensors):
        return False
    for linear in consumers:
        if type(linear) is not Linear:
            if not reads_in(linear, dtype):
                return False
            linear = linear.base_layer
            if type(linear) is not Linear:  # a 4-bit one, which casts to a dtype of its own
                if linear.compute_dtype is not dtype:
                    return False
                continue
        if type(linear.weight) not in (Parameter, Tensor):
            return False
    return True


def for_consumers(found: tuple[Tensor, ...], wanted: Wanted, norm: Any) -> tuple[Tensor, Tensor]:
    """Return the result of a norm, and its input, from what the operator has returned.

    The result has the outputs for all linears as an attribute, which ``fused_norm_inputs`` takes off.
    """
    y, *further, s = found
    if wanted is not ONE_OUTPUT:
        y.__dict__[_OUTPUTS] = _Outputs(tuple(further), wanted[1], norm, s)
    return y, s


def outputs_of(y: Tensor) -> tuple[Tensor, ...]:
    """Return all outputs of the norm that has returned ``y``, that one first, before a block has taken them."""
    outputs = vars(y).get(_OUTPUTS)
    return (y,) if outputs is None else (y, *outputs.further)


def fused_norm_inputs(block: Any, x: Any) -> Sequence[Any]:
    """The inputs of the linears that read ``x``, an argument of a block's forward: those that the norm made, or x."""
    linears = block.fused_norm_linears
    is_asked = type(x) is Tensor and not torch.compiler.is_compiling()
    outputs = x.__dict__.pop(_OUTPUTS, None) if is_asked else None
    if outputs is None:
        return (x,) * len(linears)
    further, dtype, norm, s = outputs
    if dtype is not None and autocast_dtype(x) is not dtype:
        with set_autocast(x.device.type, dtype):  # as it was where the norm was called
            return (norm(s),) * len(linears)
    if dtype is not None and any(getattr(block._modules[name], "fused_norm_is_quantised", False) for name in linears):
        spec, weight = spec_and_weights(norm)
        in_stock = norm_dtype(spec, s.dtype, weight)
        for tensor in (x, *further):
            returns_in(tensor, in_stock)
    if not further:  # without gradients one output serves all
        return (x,) * len(linears)
    if len(further) + 1 == len(linears):
        return (x, *further)
    every, inputs = iter((x, *further)), []
    for name in linears:
        inputs.append(next(every))
        if isinstance(block._modules[name], FusedAdapter):
            keep_for_adapter(inputs[-1], next(every))
    return inputs
