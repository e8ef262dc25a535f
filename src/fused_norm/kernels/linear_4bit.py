"""A linear whose weight has 4 bits, as one operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import reference
from .arguments import Unsupported
from .operator import BackwardCall, Operator, Tensors
from .triton.dequantize_kernels import PackedWeight, launch_dequantize
from .triton.torch_calls import Cast, Product, perform

WEIGHT = ("code", "packed", "scale", "scale_code", "outer_scale", "offset")
"""The tensors of a ``PackedWeight``."""

WEIGHT_SCHEMA = ", ".join(f"Tensor{'?' * (place > 2)} {name}" for place, name in enumerate(WEIGHT))


class Linear4bit(Operator):
    """``y = x @ w^T + bias``, the weight w [features, K] dequantised in each pass.

    ``dtype``, of 16 bits, is that of the product; a wider x is rounded to it first. y is of ``y_dtype``.
    """

    name = "linear_4bit"
    tensors = f"Tensor x, {WEIGHT_SCHEMA}, Tensor? bias"
    options = "int features, int block, ScalarType dtype, ScalarType y_dtype"
    outputs = ("y",)
    other_rules = (*WEIGHT, "bias")
    takes_dtensors = False
    saved = f"{WEIGHT_SCHEMA}, Tensor? bias"
    unhooked = (*WEIGHT, "bias")
    saved_scalars = "int features, int block, ScalarType dtype, ScalarType x_dtype"
    gradients = ("dx",)

    def check_options(self, *arguments: Any) -> Unsupported | None:
        x, _, packed, *_, features, _, _, _ = arguments
        width = x.shape[-1]
        if packed.numel() == -(-features * width // 2):
            return None
        return Unsupported(f"packed must have {features} * {width} / 2 elements, not {packed.numel()}", ValueError)

    def needs_reference(self, *arguments: Any) -> Unsupported | None:
        x, *weight, bias, features, block, dtype, _ = arguments
        if not x.numel() or not features:
            return Unsupported("")
        if features * x.shape[-1] % 2:  # the backward gets the width of x from the size of the weight
            return Unsupported("its weight is packed otherwise")
        return product_obstacle(dtype, {"x": x}) or weight_obstacle(block, (*weight, bias))

    def differs_from_eager(self, *arguments: Any) -> str | None:
        return layout_obstacle({"x": arguments[0]})

    def forward(self, *arguments: Any, training: bool, launch: bool = True) -> tuple[Any, ...]:
        x, *weight, bias, features, block, dtype, y_dtype = arguments
        narrow = x if x.dtype == dtype and x.is_contiguous() else x.new_empty(x.shape, dtype=dtype)
        if launch and narrow is not x:
            perform(Cast(x, narrow))
        return (self.output_of(narrow, weight, bias, features, block, y_dtype, launch=launch),)

    def output_of(
        self,
        x: Tensor,
        weight: Tensors,
        bias: Tensor | None,
        features: int,
        block: int,
        y_dtype: torch.dtype,
        *,
        launch: bool = True,
    ) -> Tensor:
        """Return the output for rows of x, which are of the dtype of products.

        ``launch``: without it the output is only allocated.
        """
        w, base = x.new_empty((features, x.shape[-1])), x.new_empty((*x.shape[:-1], features))
        y = base if y_dtype == x.dtype else x.new_empty(base.shape, dtype=y_dtype)
        if launch:
            launch_dequantize(PackedWeight(*weight), block, w)  # type: ignore[arg-type]
            perform(Product(x, w, base, bias, transposed=True))
            if y is not base:
                perform(Cast(base, y))
        return y

    def backward(self, call: BackwardCall, *, launch: bool = True) -> tuple[Tensor | None, ...]:
        (dy,), (*weight, _), (features, block, dtype, x_dtype) = call.incoming, call.saved, call.saved_scalars
        width = 2 * weight[1].numel() // features
        narrow = dy if dy.dtype == dtype and dy.is_contiguous() else dy.new_empty(dy.shape, dtype=dtype)
        w, dx_narrow = narrow.new_empty((features, width)), narrow.new_empty((*dy.shape[:-1], width))
        dx = dx_narrow if x_dtype == dtype else dy.new_empty(dx_narrow.shape, dtype=x_dtype)
        if launch:
            if narrow is not dy:
                perform(Cast(dy, narrow))
            launch_dequantize(PackedWeight(*weight), block, w)
            perform(Product(narrow, w, dx_narrow, None, transposed=False))
            if dx is not dx_narrow:
                perform(Cast(dx_narrow, dx))
        return (dx,)

    def reference_backward(self, call: BackwardCall) -> tuple[Tensor | None, ...]:
        (dy,), (*weight, _), (features, block, dtype, x_dtype) = call.incoming, call.saved, call.saved_scalars
        width = 2 * weight[1].numel() // features
        return ((dy.to(dtype) @ reference.dequantize(weight, block, (features, width), dtype)).to(x_dtype),)


def product_obstacle(dtype: torch.dtype, factors: dict[str, Tensor]) -> Unsupported | None:
    """Refuse products of another dtype than one of 16 bits, and ``factors`` that are neither of it nor float32."""
    if dtype not in (torch.bfloat16, torch.float16):
        return Unsupported(f"its products are of {dtype}, which are left to PyTorch")
    for name, tensor in factors.items():
        if tensor.dtype not in (dtype, torch.float32):
            return Unsupported(f"{name} is {tensor.dtype}, and products are of {dtype}")
    return None


def layout_obstacle(factors: dict[str, Tensor]) -> str | None:
    """Return why ``factors`` of a product would differ from stock code's: one of them is copied first."""
    for name, tensor in factors.items():
        if not tensor.is_contiguous():
            return f"{name} is not contiguous"
    return None


def weight_obstacle(block: int, tensors: Tensors) -> Unsupported | None:
    """Refuse a weight of 4 bits, and a bias, that kernels cannot read; ``block``: the weights that share a scale."""
    if block & (block - 1) or not all(tensor is None or tensor.is_contiguous() for tensor in tensors):
        return Unsupported("its weight is packed otherwise")
    return None


LINEAR_4BIT = Linear4bit()
