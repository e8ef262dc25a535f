"""Runtime of ``shared_inputs``: one alias of the norm's output per linear that reads it, made at the time of a call.

The rewritten forward of a layer passes what a norm returns on to the attention or MLP that consumes it, in place of the
one tensor that stock code passes. If other code may see what is passed there, because of a hook or a wrapper on the
block or on a linear in it, the norm returns the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Linear, Parameter

from ..kernels.autocast import autocast_dtype, is_any_autocast_on, set_autocast
from ..kernels.norm_kernels import MOST_CONSUMERS
from ..kernels.triton.memory import norm_dtype
from .adapters import FusedAdapter, adapter_reads_in, is_lora_layer, linear_reads_in, why_stock, why_unfused
from .four_bit import AdapterInput, FusedLinear4bit, why_linear_is_stock, why_unreadable
from .fused_block import runtime
from .fused_norm_module import spec_and_weights, warn_once
from .hooks import are_plain_calls
from .recompute import recomputes

_SINCE = "LoRA layers were added after apply_fused_norm; call it again to fuse them"


class ConsumerSpec(NamedTuple):
    """The options of an operator for consumers: the number of outputs, and the dtype that consumers cast them to.

    The dtype is None if the outputs are of that of stock code. Those whose bits are set in ``wide`` are of it anyway:
    dropout reads them.
    """

    outputs: int = 1
    dtype: torch.dtype | None = None
    wide: int = 0


@dataclass(slots=True)
class ConsumerOutputs:
    """What a norm returns to a block whose linears consume it, in place of one tensor.

    Attributes:
        tensors: an output for each consumer, in order, all of one memory; without gradients one output.
        consumers: what the norm was asked for.
        norm: the module.
        x: what the norm is of.
    """

    tensors: Sequence[Tensor]
    consumers: ConsumerSpec
    norm: Any
    x: Tensor

    def as_in_stock(self) -> Tensor:
        """The one tensor that the block reads in stock code."""
        if self.consumers.dtype is None:
            return self.tensors[0]
        with set_autocast(self.x.device.type, self.consumers.dtype):  # the autocast of the norm's call
            return self.norm(self.x)


def consumer_spec(block: Any, *tensors: Any) -> ConsumerSpec | None:
    """Return the spec for a norm whose only consumer is ``block``; None for one output as in stock code.

    It is None too if other code sees what the block or a linear in it is called with.

    ``tensors``: those that the norm's dtype depends on, x first; None for one that is not there.
    """
    if torch.compiler.is_compiling() or type(tensors[0]) is not Tensor:
        return None
    dtype = autocast_dtype(tensors[0]) if is_any_autocast_on() else None
    if dtype is None and not torch.is_grad_enabled():
        return None
    kind: Any = type(block)  # a wrapper may forward the attributes of what is inside
    names = getattr(kind, "fused_norm_linears", ())
    if not names or kind.forward is not kind.fused_norm_forward:
        return None
    consumers, called = list(map(block._modules.get, names)), [block]
    read_by = consumers if set(map(type, consumers)) == {Linear} else called_by(consumers, called)
    if read_by is None or not are_plain_calls(*called, *read_by, linears=True):
        _warn_about(consumers, block)
        return None
    count = len(read_by)
    if count > MOST_CONSUMERS:
        return None
    for tensor in tensors:
        if dtype is not None and tensor is not None and tensor.dtype == torch.float32:  # and so the norm
            wide = _wide_consumers(consumers, dtype)
            return ConsumerSpec(count) if wide is None else ConsumerSpec(count, dtype, wide)
    return ConsumerSpec(count)


def called_by(
    linears: Iterable[Any],
    others: list[Any] | None = None,
    *,
    fused: tuple[type[nn.Module], ...] = (FusedAdapter, FusedLinear4bit),
) -> list[nn.Module] | None:
    """Return the modules, one for each tensor that linears read as their input, whose calls have to be plain.

    A linear reads one tensor, and another for its adapter. None if it is unknown what they read. Whether other code has
    replaced all linears is another question, ``why_linears_replaced``.

    Args:
        linears: the linears, or what is there in their place.
        others: gets the other modules whose calls have to be plain; None if these are asked at once.
        fused: the classes of LoRA layers and of 4-bit linears.
    """
    called: list[nn.Module] = []
    for linear in linears:
        if type(linear) is not Linear:
            if not isinstance(linear, fused):
                return None
            base: Any = linear._modules.get("base_layer")
            if base is None:  # a 4-bit linear
                reason = why_linear_is_stock(linear)
            else:
                reason = None if type(base) is Linear else why_unreadable(base)
                reason = why_stock(linear, others) if reason is None else reason
                called.append(base)
            if reason is not None:
                return None
        called.append(linear)
    return called


def _warn_about(consumers: Sequence[Any], block: Any) -> None:
    """Log if LoRA layers that no kernel takes are why a block's linears get the result of a norm as it is in stock."""
    for linear in consumers:
        if is_lora_layer(linear) and not isinstance(linear, FusedAdapter):
            warn_once(block.fused_norm_origin, why_unfused(linear) or _SINCE, "LoRA layers as PEFT has them")


def _wide_consumers(linears: Sequence[Any], dtype: torch.dtype) -> int | None:
    """The adapters, as bits, that drop some of a norm in float32; all else casts it to autocast's dtype first.

    None if something casts it to another dtype.
    """
    wide = consumer = 0
    for linear in linears:
        base: Any = linear
        if type(linear) is not Linear and not linear_reads_in(linear, dtype):
            return None
        if isinstance(linear, FusedAdapter):
            base = linear.base_layer
            consumer += 1
            if not adapter_reads_in(linear, dtype):
                if recomputes():  # of a norm in two dtypes nothing is
                    return None
                wide |= 1 << consumer
        if type(base) is Linear and type(base.weight) not in (Parameter, Tensor):
            return None
        consumer += 1
    return wide


def tensors_of(value: Any) -> Sequence[Any]:
    """Return the tensors of what a rewritten forward passes to a block or a LoRA layer; anything else is one itself."""
    if type(value) is ConsumerOutputs:
        return value.tensors
    return (value.x if type(value) is AdapterInput else value,)


def taking_tensors(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A stock forward that is called with what a norm returns to its consumers, too."""

    def tensor(value: Any) -> Any:
        return value.as_in_stock() if type(value) is ConsumerOutputs else value

    @wraps(forward)
    def taking(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *map(tensor, args), **{name: tensor(value) for name, value in kwargs.items()})

    return taking


@runtime
def fused_norm_inputs(block: Any, x: Any) -> tuple[Any, Sequence[Any]]:
    """Return the tensor that an argument of a block's forward is, and the inputs of the linears that read it.

    ``x``: a tensor, which all linears read, or the outputs of a norm.
    """
    linears = block.fused_norm_linears
    if type(x) is not ConsumerOutputs:
        return x, (x,) * len(linears)
    (_, dtype, wide), tensors = x.consumers, x.tensors
    y = tensors[0]
    if dtype is not None and autocast_dtype(y) is not dtype:
        y = x.as_in_stock()
        return y, (y,) * len(linears)
    in_stock = None
    for name in () if dtype is None else linears:
        if wide or getattr(block._modules[name], "fused_norm_is_quantised", False):
            spec, weight = spec_and_weights(x.norm)
            in_stock = norm_dtype(spec, x.x.dtype, weight)
            break
    if in_stock is None and len(tensors) in (1, len(linears)):
        return y, tensors if len(tensors) > 1 else (y,) * len(linears)
    outputs = iter(tensors if len(tensors) > 1 else ())
    inputs: list[Tensor | AdapterInput] = []
    for name in linears:
        own = base = next(outputs, y)
        linear = block._modules[name]
        if isinstance(linear, FusedAdapter):
            own = next(outputs, base)
        is_fused = isinstance(linear, FusedAdapter | FusedLinear4bit)
        inputs.append(AdapterInput(base, own, in_stock) if is_fused else base)
    return y, inputs
