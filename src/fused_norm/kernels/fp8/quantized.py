"""A quantised tensor, and its place in autograd's graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..triton.devices import is_transformed
from .formats import FP8Format


@dataclass(frozen=True)
class Quantized:
    """A tensor y [..., N] as FP8 codes and scales; M is the number of its rows, over all leading dimensions.

    Attributes:
        q: the codes, contiguous in y's shape.
        scale: the multiplier that turns codes into numbers again. fp32: [] of a tensor, [..., 1] of rows, and of groups
            as the format lays them out: [..., N / group], or [M, N / group] with strides (1, M). E8M0 and swizzled:
            [32 * ceil(M / 128), 16 * ceil(N / group / 4)].
        fp8_format: how they were made.
        placeholder: a tensor of y's shape and dtype without storage of its own, one NaN expanded. It is y's place in
            autograd's graph: code that reads the codes gives it the gradient of y, because codes can carry none. Under
            transforms of ``torch.func`` it is y. None if nothing can be differentiated.
        rstd: fp32 [..., 1] if a norm has made y, which can be computed again from it.
    """

    q: Tensor
    scale: Tensor
    fp8_format: FP8Format
    placeholder: Tensor | None = None
    rstd: Tensor | None = None


class _WithGradientTo(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, source: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, grads[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[1].to(torch.float32)


def with_gradient_to(values: Tensor, source: Tensor) -> Tensor:
    """The values of one tensor with the history of ``source``: their gradient goes to the source."""
    return _WithGradientTo.apply(values, source)


def placeholder_of(y: Tensor) -> Tensor:
    """A placeholder that hands its gradient to y; under transforms, which look at its numbers, y itself."""
    return y if is_transformed() else with_gradient_to(y.new_full((), float("nan")).expand(y.shape), y)
