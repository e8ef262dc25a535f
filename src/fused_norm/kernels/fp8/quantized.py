"""A quantised tensor, and its place in autograd's graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..triton.devices import is_transformed
from .recipe import FP8Recipe


@dataclass(frozen=True)
class Quantized:
    """A tensor y [..., N] as FP8 codes and scales; M is the number of its rows, over all leading dimensions.

    Attributes:
        q: the codes, contiguous in y's shape; [M, N] column by column where the recipe's axis is 0.
        scale: the multiplier that turns codes into numbers again. fp32: [] of a tensor, [..., 1] of rows, [1, N] of
            columns, and of groups as the recipe's layout has them: [..., N / group], or [M, N / group] with strides
            (1, M rounded up to ``aligned``), or along rows [ceil(M / group), N] contiguous. E8M0 and swizzled:
            [32 * ceil(M / 128), 16 * ceil(N / group / 4)]; along rows M and N change places.
        recipe: how they were made.
        carrier: a tensor of y's shape and dtype without storage of its own, one element expanded. It holds no numbers:
            it is y's place in autograd's graph, to which whoever reads the codes hands the gradient of y, because codes
            can carry no gradient. Under transforms of ``torch.func`` it is y. None where
            nothing can be differentiated.
        transposed: y's codes once more as [N, M], contiguous; None unless asked for.
        rstd: fp32 [..., 1] where a norm has made y, which can be made again from it (``rms_norm_columns_fp8``).
    """

    q: Tensor
    scale: Tensor
    recipe: FP8Recipe
    carrier: Tensor | None = None
    transposed: Tensor | None = None
    rstd: Tensor | None = None


def empty_carrier(like: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor of that shape on the device of ``like``, of one NaN that is nowhere else in memory."""
    return like.new_full((), float("nan"), dtype=dtype).expand(shape)


class _CarrierOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return empty_carrier(y, y.shape, y.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def carrier_of(y: Tensor) -> Tensor:
    """The carrier of a y that is there, which gets what the carrier gets; transforms, which look inside, have y."""
    return y if is_transformed() else _CarrierOf.apply(y)


class _OnCarrier(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, carrier: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, grads[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[1].to(torch.float32)


def on_carrier(values: Tensor, carrier: Tensor | None) -> Tensor:
    """The values, at the carrier's place in autograd's graph."""
    return values if carrier is None else _OnCarrier.apply(values, carrier)
