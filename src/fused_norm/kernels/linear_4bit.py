"""Linears whose weight has 4 bits, alone or with a LoRA adapter, each as one operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import reference
from .arguments import Unsupported
from .lora_linear import LoraLinear, Options, cast, product, why_copied_first, why_dtype_unsupported
from .operator import BackwardArguments, BackwardImpl, Operator, Results, Tensors
from .triton.call import Call
from .triton.dequantize_kernels import PackedWeight, launch_dequantize

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

    def why_reference_only(self, *arguments: Any) -> Unsupported | None:
        x, *weight, bias, features, block, dtype, _ = arguments
        if not x.numel() or not features:
            return Unsupported("")
        if features * x.shape[-1] % 2:  # the backward gets the width of x from the size of the weight
            return Unsupported("its weight is packed otherwise")
        return why_dtype_unsupported(dtype, {"x": x}) or _why_packing_unsupported((*weight, bias), block)

    def why_unlike_eager(self, *arguments: Any) -> str | None:
        return why_copied_first([("x", arguments[0])])

    def forward(self, call: Call, *arguments: Any, training: bool) -> Results:
        x, *weight, bias, features, block, dtype, y_dtype = arguments
        narrow = cast(call, x, dtype)
        return (self.output_of(call, narrow, weight, bias, features, block, y_dtype),)

    def output_of(
        self,
        call: Call,
        x: Tensor,
        weight: Tensors,
        bias: Tensor | None,
        features: int,
        block: int,
        y_dtype: torch.dtype,
    ) -> Tensor:
        """Return the output for rows of x, which are of the dtype of products."""
        w = _dequantized(call, weight, block, (features, x.shape[-1]), x)
        return cast(call, product(call, x, w, bias), y_dtype)

    def backward(self, call: Call, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (dy,), (*weight, _), (features, block, dtype, x_dtype) = given.incoming, given.saved, given.saved_scalars
        width = 2 * _count(weight) // features
        narrow = cast(call, dy, dtype)
        w = _dequantized(call, weight, block, (features, width), narrow)
        return (cast(call, product(call, narrow, w, None, transposed=False), x_dtype),)

    def reference_backward(self, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (dy,), (*weight, _), (features, block, dtype, x_dtype) = given.incoming, given.saved, given.saved_scalars
        width = 2 * _count(weight) // features
        return ((dy.to(dtype) @ reference.dequantize(weight, block, (features, width), dtype)).to(x_dtype),)


class LoraLinear4bit(LoraLinear):
    """``lora_linear`` of a weight of 4 bits, dequantised in each pass; the sum is rounded to ``y_dtype``."""

    name = "lora_linear_4bit"
    weight_names = WEIGHT
    tensors = f"Tensor adapter_x, Tensor x, Tensor a, Tensor b, {WEIGHT_SCHEMA}, Tensor? bias, Tensor? mask"
    options = f"{LoraLinear.options}, ScalarType y_dtype, int block"
    other_shapes, other_rules = ("x", "a", "b"), (*WEIGHT, "bias", "mask")
    sums_gradients = True
    unhooked = (*WEIGHT, "bias")
    saved = f"Tensor adapter_x, Tensor? mask, Tensor a, Tensor b, Tensor h, {WEIGHT_SCHEMA}, Tensor? bias"
    saved_scalars = f"{LoraLinear.saved_scalars}, int block"

    def options_of(self, arguments: Sequence[Any]) -> Options:
        return Options(*arguments[self.tensor_count :])

    def has_shape(self, weight: Tensors, shape: tuple[int, int]) -> bool:
        return _count(weight) == -(-shape[0] * shape[1] // 2)

    def why_weight_unsupported(self, weight: Tensors, options: Options) -> Unsupported | None:
        return _why_packing_unsupported(weight, options.block)

    def matrix(self, call: Call, weight: Tensors, block: int, shape: tuple[int, int], like: Tensor) -> Tensor:
        return _dequantized(call, weight, block, shape, like)

    def reference_matrix(self, weight: Tensors, block: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return reference.dequantize(weight, block, shape, dtype)


class LoraSummands4bit(LoraLinear4bit):
    """The two summands of ``lora_linear_4bit``, the output of the linear and that of the adapter, both of ``dtype``.

    A consumer that adds them up has their sum in float32, from half of the memory; ``y_dtype`` is unused.
    """

    name = "lora_summands_4bit"
    plain_name = "lora_linear_4bit"
    outputs: ClassVar[tuple[str, ...]] = ("base", "added")

    def compute_grads(self, impl: BackwardImpl, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        dbase, dadded = given.incoming
        if dbase is None and dadded is not None:
            dbase = torch.zeros_like(dadded)
        elif dadded is None and dbase is not None:
            dadded = torch.zeros_like(dbase)
        return super().compute_grads(impl, given._replace(incoming=(dbase, dadded)))


LINEAR_4BIT, LORA_LINEAR_4BIT, LORA_SUMMANDS_4BIT = Linear4bit(), LoraLinear4bit(), LoraSummands4bit()


def _count(weight: Tensors) -> int:
    packed = weight[1]
    assert packed is not None
    return packed.numel()


def _why_packing_unsupported(linear: Tensors, block: int) -> Unsupported | None:
    """Refuse a weight that kernels cannot read, or one with its bias; ``block``: the weights that share a scale."""
    if block & (block - 1) or not all(tensor is None or tensor.is_contiguous() for tensor in linear):
        return Unsupported("its weight is packed otherwise")
    return None


def _dequantized(call: Call, weight: Tensors, block: int, shape: tuple[int, int], like: Tensor) -> Tensor:
    """The weight as a matrix of this shape, of the dtype of ``like``."""
    w = call.empty(like, shape)
    call.then(launch_dequantize, PackedWeight(*weight), block, w)  # type: ignore[arg-type]
    return w
