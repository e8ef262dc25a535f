"""The values that rewritten forwards pass to LoRA layers and 4-bit linears, and get from them, in place of a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(slots=True)
class AdapterInput:
    """The input of a fused LoRA layer or 4-bit linear, in place of one tensor.

    Only a rewritten forward passes it, to a module whose call nothing else sees.

    Attributes:
        x: [..., K], read by the linear.
        own: equal to x but for its dtype, read by the adapter, with a gradient of its own; or x.
        dtype: that of x in stock code, in which a quantised linear, or a layer around one, returns its result; None if
            x is of it, or if no linear in the block is quantised.
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
