"""4-bit linears of bitsandbytes without an adapter, which dequantise their weight in one kernel."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ..kernels.autocast import autocast_dtype
from ..kernels.linear_4bit import LINEAR_4BIT
from .four_bit import packed_weight, why_unreadable
from .fused_norm_module import is_disabled, run_fused, warn_once
from .hooks import Fused, are_plain_calls, replaced_forward, replaced_linear, stock_class
from .linear_values import AdapterInput, Summands


class FusedLinear4bit(Fused):
    """Base of the classes put on 4-bit linears without an adapter; a subclass also derives from bitsandbytes' class."""

    fused_norm_is_quantised: ClassVar[bool] = True

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Multiply by the weight, dequantised in one kernel, if that computes what bitsandbytes' linear does.

        ``x`` is [..., K], or an ``AdapterInput``; the result is [..., N], or ``Summands``.
        """
        adapter_input = x if type(x) is AdapterInput else None
        x = x if adapter_input is None else adapter_input.x
        if torch.compiler.is_compiling() or is_disabled() or type(x) is not Tensor or args or kwargs:
            return self._in_stock(
                x if adapter_input is None else adapter_input.as_in_stock(), adapter_input, *args, **kwargs
            )
        linear, dtype = vars(self), autocast_dtype(x)
        products = linear["compute_dtype"]
        weight = packed_weight(self, x, products, is_readable=adapter_input is not None, is_called=True)
        reason = weight if isinstance(weight, str) else None
        if (
            reason is None and adapter_input is None
        ):  # else the guard of the forward that passes an AdapterInput has asked
            reason = replaced_linear() or _changed_class(self)
        if reason is None and dtype not in (None, products):
            reason = f"autocast is to {dtype}, and it computes in {products}"
        if reason is None:
            parts, is_sum = self._parameters, adapter_input is None or not adapter_input.returns_summands
            y_dtype = (adapter_input and (adapter_input.y_dtype or adapter_input.dtype)) or x.dtype
            options = linear["out_features"], weight[1], products, y_dtype if is_sum else products
            y, reason = run_fused(LINEAR_4BIT, x, *weight[0], parts["bias"], *options)
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

    Whether other code has replaced all linears is another question, ``replaced_linear``.
    """
    reason = _changed_class(linear) if isinstance(linear, FusedLinear4bit) else None
    reason = why_unreadable(linear, is_called=True) if reason is None else reason
    return reason or (None if reason is None else replaced_forward(stock_class(linear)) or "")


def _changed_class(linear: FusedLinear4bit) -> str | None:
    if are_plain_calls(inside=type(linear)):
        return None
    return "the forward of its class has changed since it was patched"
