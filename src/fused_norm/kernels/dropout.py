"""The part of a dropout after its mask is drawn, with the casts before and after it, as one operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .arguments import Unsupported
from .operator import BackwardCall, Operator
from .triton.dropout_kernels import launch_masked_scale


class MaskedScale(Operator):
    """``y = x * mask * scale`` in float32, rounded to ``dtype``.

    The gradient of x is that of y times the mask and ``scale_back``, which PyTorch rounds otherwise than ``scale``.
    """

    name = "masked_scale"
    tensors = "Tensor x, Tensor mask"
    options = "float scale, float scale_back, ScalarType dtype"
    outputs = ("y",)
    other_rules = ("mask",)
    takes_dtensors = False
    saved = "Tensor mask"
    saved_scalars = "float scale_back, ScalarType x_dtype"
    gradients = ("dx",)

    def check_options(self, *arguments: Any) -> Unsupported | None:
        x, mask, *_ = arguments
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            return Unsupported("mask must be a tensor of torch.bool", TypeError)
        if mask.shape != x.shape or mask.device != x.device:
            return Unsupported(f"mask must have x's shape {tuple(x.shape)}, not {tuple(mask.shape)}", ValueError)
        return None

    def needs_reference(self, *arguments: Any) -> Unsupported | None:
        x, mask, *_ = arguments
        return None if x.is_contiguous() and mask.is_contiguous() else Unsupported("")

    def forward(self, *arguments: Any, training: bool, launch: bool = True) -> tuple[Any, ...]:
        x, mask, scale, _, dtype = arguments
        y = x.new_empty(x.shape, dtype=dtype)
        if launch:
            launch_masked_scale(x, mask, scale, y)
        return (y,)

    def backward(self, call: BackwardCall, *, launch: bool = True) -> tuple[Tensor | None, ...]:
        (dy,), (mask,), (scale, dtype) = call.incoming, call.saved, call.saved_scalars
        dx = dy.new_empty(dy.shape, dtype=dtype)
        if launch:
            launch_masked_scale(dy.contiguous(), mask, scale, dx)
        return (dx,)


MASKED_SCALE = MaskedScale()
