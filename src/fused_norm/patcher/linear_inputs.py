"""The inputs of linears that read a norm, at the time of a call: what the norm is asked for, and who gets which.

A linear that anything else could see reading, a hook or a wrapper, is none of them: it gets the tensor that it would
get from a stock norm, and so do all that read that norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Linear, Parameter

from ..kernels.autocast import autocast_dtype, set_autocast
from ..kernels.triton.norm_backward import MOST_READERS
from .adapters import FusedAdapter, is_lora_layer, keep_for_adapter, reads_in, why_stock_itself, why_unfused
from .fused_norm_module import explain, has_origin_forward, is_disabled
from .hooks import is_plain_call, replaced_linear

_OUTPUTS = "fused_norm_outputs"
"""The attribute of a norm's result with its ``_Outputs``."""

Wanted = tuple[int, torch.dtype | None]
"""What is asked of a norm: a number of outputs, and the dtype that all their readers cast them to, or None."""

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

    ``tensors``: those that the norm's dtype depends on, x first; None for one that is not there.
    """
    fused: Any = type(block)  # a wrapper may forward the attributes of what is inside
    linears = getattr(fused, "fused_norm_linears", ())
    if not linears or torch.compiler.is_compiling() or is_disabled() or type(tensors[0]) is not Tensor:
        return None
    dtype = autocast_dtype(tensors[0])
    if dtype is None and not torch.is_grad_enabled():
        return None
    if not is_plain_call(block) or fused.forward is not fused.fused_norm_forward or not has_origin_forward(fused):
        return None
    if replaced_linear() is not None:
        return None
    readers = [block._modules.get(name) for name in linears]
    count = 0
    for linear in readers:
        reads = reads_of(linear)
        if not reads:
            if is_lora_layer(linear) and not isinstance(linear, FusedAdapter):
                explain(fused.fused_norm_origin, why_unfused(linear) or _SINCE, "LoRA layers as PEFT has them")
            return None
        count += reads
    if count > MOST_READERS:
        return None
    return count, dtype if dtype is not None and _are_cast(readers, tensors, dtype) else None


def reads_of(linear: Any, *, adapter: type[nn.Module] = FusedAdapter) -> int:
    """Return the number of tensors that a linear reads as its input: one, and one for its adapter; 0 if unknown.

    Whether other code has replaced all linears is another question, ``replaced_linear``.

    ``adapter``: the class of LoRA layers.
    """
    if type(linear) is Linear:
        return 1 if is_plain_call(linear) else 0
    if not isinstance(linear, adapter) or not is_plain_call(linear):
        return 0
    base = linear._modules.get("base_layer")
    return 2 if type(base) is Linear and is_plain_call(base) and why_stock_itself(linear) is None else 0


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


def for_readers(found: tuple[Tensor, ...], wanted: Wanted, norm: Any) -> tuple[Tensor, Tensor]:
    """Return the result of a norm, and its input, from what the operator has returned.

    The result has the outputs for all linears as an attribute, which ``inputs_of`` takes off.
    """
    y, *further, s = found
    if wanted is not ONE_OUTPUT:
        y.__dict__[_OUTPUTS] = _Outputs(tuple(further), wanted[1], norm, s)
    return y, s


def outputs_of(y: Tensor) -> tuple[Tensor, ...]:
    """Return all outputs of the norm that has returned ``y``, that one first, before a block has taken them."""
    outputs = vars(y).get(_OUTPUTS)
    return (y,) if outputs is None else (y, *outputs.further)


def inputs_of(x: Any, block: Any) -> Sequence[Any]:
    """The input of each of a block's linears: one that the norm has made for it, or ``x`` for all."""
    linears = block.fused_norm_linears
    outputs = x.__dict__.pop(_OUTPUTS, None) if type(x) is Tensor else None
    if outputs is None:
        return (x,) * len(linears)
    further, dtype, norm, s = outputs
    if dtype is not None and autocast_dtype(x) is not dtype:
        with set_autocast(x.device.type, dtype):  # as it was where the norm was called
            return (norm(s),) * len(linears)
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
