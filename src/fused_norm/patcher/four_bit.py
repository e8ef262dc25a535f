"""4-bit linears of bitsandbytes: their packed weight as kernels read it, and linears that dequantise it in one kernel.

Names of bitsandbytes that are not public are asked for each time, and if one is missing, or a weight is packed in
another way, the linear's own code runs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.autocast import autocast_dtype
from ..kernels.linear_4bit import LINEAR_4BIT, SCALES_TOGETHER, PackedWeight
from ..kernels.switch import switch
from .fused_norm_module import warn_once
from .hooks import Fused, are_plain_calls, is_genuine, stock_class, why_forward_replaced, why_linears_replaced
from .module_features import FusedModule, ModuleFeature
from .probe import UnrecognisedError

_MOST_ROWS = 4096
"""Up to so many rows a release whose own rule is unknown may multiply by a kernel of its own."""


@dataclass(slots=True)
class AdapterInput:
    """The input of a fused LoRA layer or 4-bit linear, in place of one tensor.

    Only a rewritten forward passes it, to a module whose call nothing else sees.

    Attributes:
        x: [..., K], read by the linear.
        own: equal to x but for its dtype, read by the adapter, with a gradient of its own; or x.
        dtype: the dtype that the stock layer would return; None if it is x.dtype, or if no linear in the block is
            quantised.
        y_dtype: that of products, if the only consumer of the output casts it to that at once.
        returns_summands: the consumer takes ``Summands`` in place of the output; a layer may return the output still.
    """

    x: Tensor
    own: Tensor
    dtype: torch.dtype | None
    y_dtype: torch.dtype | None = None
    returns_summands: bool = False

    def as_in_stock(self) -> Tensor:
        """The one tensor that the layer reads in stock code."""
        if self.dtype is None:
            return self.x
        return self.own if self.own.dtype == self.dtype else self.x.to(self.dtype)


class Summands(NamedTuple):
    """The output of a 4-bit linear, or of a LoRA layer around one, in 16 bits; in float32 their sum is that of stock.

    Attributes:
        base: the output of the linear.
        added: that of the adapter; None for a linear without one.
    """

    base: Tensor
    added: Tensor | None


class FusedLinear4bit(Fused):
    """Base of the classes put on 4-bit linears without an adapter; a subclass also derives from bitsandbytes' class."""

    fused_norm_is_quantised: ClassVar[bool]
    fused_norm_what = "dequantisation+linear"

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Multiply by the weight, dequantised in one kernel, if that computes what bitsandbytes' linear does.

        ``x`` is [..., K], or an ``AdapterInput``; the result is [..., N], or ``Summands``.
        """
        adapter_input = x if type(x) is AdapterInput else None
        x = x if adapter_input is None else adapter_input.x
        if switch.depth or torch.compiler.is_compiling() or type(x) is not Tensor or args or kwargs:
            return self._in_stock(
                x if adapter_input is None else adapter_input.as_in_stock(), adapter_input, *args, **kwargs
            )
        linear, dtype = vars(self), autocast_dtype(x)
        products = linear["compute_dtype"]
        weight = packed_weight(self, x, products, is_readable=adapter_input is not None, is_called=True)
        reason = weight if isinstance(weight, str) else None
        # The guard of the forward that passes an AdapterInput has asked.
        if reason is None and adapter_input is None:
            reason = why_linears_replaced() or _why_changed(self)
        if reason is None and dtype not in (None, products):
            reason = f"autocast is to {dtype}, and it computes in {products}"
        if reason is None:
            parts, is_sum = self._parameters, adapter_input is None or not adapter_input.returns_summands
            y_dtype = (adapter_input and (adapter_input.y_dtype or adapter_input.dtype)) or x.dtype
            options = linear["out_features"], weight[1], products, y_dtype if is_sum else products
            y, reason = LINEAR_4BIT.try_fused(x, *weight[0], parts["bias"], *options)
            if y is not None:
                return y if is_sum else Summands(y, None)
        warn_once(self.fused_norm_origin, reason, "bitsandbytes' code")
        return self._in_stock(x, adapter_input)

    def _in_stock(self, x: Any, adapter_input: AdapterInput | None, *args: Any, **kwargs: Any) -> Any:
        """Run bitsandbytes' forward, and cast its result to the dtype that the caller asks for."""
        y = self.fused_norm_origin.forward(self, x, *args, **kwargs)
        dtype = adapter_input and (adapter_input.y_dtype or adapter_input.dtype)
        return y if dtype is None else y.to(dtype)


def why_linear_is_stock(linear: Any) -> str | None:
    """Return the reason why a 4-bit linear, as it is now, has to run bitsandbytes' forward; None if it has not.

    Whether other code has replaced all linears is another question, ``why_linears_replaced``.
    """
    if isinstance(linear, FusedLinear4bit) and (reason := _why_changed(linear)):
        return reason
    reason = why_unreadable(linear, is_called=True)
    return why_forward_replaced(stock_class(linear)) or "" if reason == "" else reason


def _why_changed(linear: FusedLinear4bit) -> str | None:
    if are_plain_calls(inside=type(linear)):
        return None
    return "the forward of its class has changed since it was patched"


def is_linear_4bit(module: Any) -> bool:
    """Return whether a module is a 4-bit linear of bitsandbytes, fused or not."""
    layers = sys.modules.get("bitsandbytes.nn.modules")
    return layers is not None and stock_class(module) is layers.Linear4bit


def why_overridden(origin: Any) -> str | None:
    """The reason, for a report, that other code has put a forward on linears or on this class of them, or None."""
    return why_forward_replaced(origin) or why_linears_replaced()


def _fused(linear: Any, origin: Any) -> FusedModule:
    if reason := why_linear_is_stock(linear):
        raise UnrecognisedError(reason)
    return FusedModule(FusedLinear4bit, {"fused_norm_is_quantised": True})


LINEARS_4BIT = ModuleFeature("linear_4bit", is_linear_4bit, why_overridden, _fused)


def why_unreadable(linear: Any, *, is_called: bool = False) -> str | None:
    """Return why kernels do not read the weight of a linear, empty for other linears; None if they do.

    ``is_called``: this is a call of the linear, so that hooks have run. Otherwise it is not called.
    """
    layers = sys.modules.get("bitsandbytes.nn.modules")
    origin = getattr(linear, "fused_norm_origin", type(linear))
    if layers is None or origin is not layers.Linear4bit or not is_genuine(layers.Linear4bit):
        return ""
    if not is_called and not are_plain_calls(linear):
        return "other code sees the calls of its linear"
    weight = linear._parameters["weight"]
    # FSDP gathers a parameter without its state, which the module keeps for that.
    state = getattr(weight, "quant_state", None)
    state = linear.quant_state if state is None else state
    if type(weight) not in (layers.Params4bit, nn.Parameter) or state is None or weight.requires_grad:
        return "its weight is not quantised, or not frozen"
    dtype, bias = linear.compute_dtype, linear._parameters["bias"]
    if bias is not None and (bias.dtype is not dtype or bias.requires_grad):
        return "its bias is trained, or of another dtype than its products"
    if getattr(state, "packing_format_for_cpu", False) or len(state.shape) != 2:
        return "its weight is packed for a CPU, or no matrix"
    if weight.device.type == "cpu" and state.shape[1] % state.blocksize:
        return "bitsandbytes reads its scales in another way on a CPU"
    if weight.device.type == "cpu" and _rounds_values_on_cpu():
        return "this release of bitsandbytes dequantises in 16 bits on a CPU"
    if state.dtype not in (dtype, torch.float32):  # the backward rounds to it first
        return f"its weight is dequantised to {state.dtype}, and its products are of {dtype}"
    if state.nested and (state.state2.blocksize != SCALES_TOGETHER or state.state2.absmax.dtype is not torch.float32):
        return "its scales are quantised in another way"
    return None


@cache
def _rounds_values_on_cpu() -> bool:
    """Return whether bitsandbytes rounds the 16 values of a code before it scales them on a CPU, as until 0.48."""
    functional: Any = sys.modules["bitsandbytes.functional"]
    codes, state = functional.quantize_4bit(torch.linspace(-0.7, 0.7, 64, dtype=torch.bfloat16), quant_type="nf4")
    high, low = codes.flatten() >> 4, codes.flatten() & 15
    values = state.code[torch.stack((high, low), dim=1).flatten().int()]
    return not torch.equal(
        (values * state.absmax).to(torch.bfloat16), functional.dequantize_4bit(codes, state).flatten()
    )


def packed_weight(
    linear: Any, x: Tensor, dtype: torch.dtype, *, is_readable: bool = False, is_called: bool = False
) -> tuple[PackedWeight, int] | str:
    """Return the weight of a ``Linear4bit``, and how many weights share a scale; or why its own code has to run.

    The reason is empty if it is not worth a log.

    Args:
        linear: any module.
        x: its input.
        dtype: of products.
        is_readable: the caller knows that ``why_unreadable`` is None.
        is_called: as ``why_unreadable`` takes it.
    """
    weight = linear._parameters.get("weight")
    state: Any = getattr(weight, "quant_state", None)
    state = getattr(linear, "quant_state", None) if state is None else state
    # First, as each token of a generation is a call; whatever else is asked, its own code runs.
    if state is not None and _multiplies_itself(state, x, dtype):
        return ""
    reason = None if is_readable else why_unreadable(linear, is_called=is_called)
    if reason is not None:
        return reason
    if linear.compute_dtype is not dtype:
        return f"its linear computes in {linear.compute_dtype}, and its adapter in {dtype}"
    packed = Tensor._make_subclass(Tensor, weight)
    if packed.dtype is not torch.uint8:
        packed = packed.view(torch.uint8)
    if not state.nested:
        return PackedWeight(state.code, packed, state.absmax), state.blocksize
    inner = state.state2
    return PackedWeight(state.code, packed, state.absmax, inner.code, inner.absmax, state.offset), state.blocksize


def _multiplies_itself(state: Any, x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether bitsandbytes would multiply x by a kernel of its own, without the weight dequantised in memory."""
    if x.device.type != "cuda" or len(state.shape) != 2:
        return False
    (n, k), rows = state.shape, x.shape[:-1].numel()
    if not hasattr(torch.ops.bitsandbytes, "gemm_4bit"):  # until 0.49, without gradients and for one row
        return rows == 1 and not x.requires_grad
    backend = sys.modules.get("bitsandbytes.backends.cuda.ops")
    most, rule = (getattr(backend, f"_gemm_4bit_{name}", None) for name in ("custom_max_m", "use_custom_fn"))
    if most is None or rule is None:
        return rows <= _MOST_ROWS
    return rows <= most and k % state.blocksize == 0 and bool(rule(x.device.index, dtype, rows, n, k))
