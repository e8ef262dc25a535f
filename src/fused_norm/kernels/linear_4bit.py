"""Linears whose weight has 4 bits, as bitsandbytes packs them, alone or with a LoRA adapter, each as one operator.

A byte holds two codes, that of the first weight in its high half. A code is an index into 16 values (nf4 or fp4), and
``BLOCK`` weights side by side share a scale, the largest magnitude among them. With double quantisation a scale is an
index into 256 values, which 256 scales multiply by a number of their own, and to which one offset is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import Unsupported
from .backward import BackwardArguments, BackwardImpl, Tensors
from .lora import LoraLinear, Options, cast, product, why_copied_first, why_dtype_unsupported
from .operator import Operator, Results
from .triton.call import Call
from .triton.language import round_to
from .triton.memory import is_long


@triton.jit(do_not_specialize=["n"])
def _dequantize_kernel(
    code_ptr,  # [16] fp32
    packed_ptr,  # [ceil(n / 2)] uint8
    scale_ptr,  # [blocks] fp32; with double quantisation uint8
    scale_code_ptr,  # [256] fp32, or None without double quantisation
    outer_scale_ptr,  # [ceil(blocks / 256)] fp32, or None
    offset_ptr,  # one fp32, or None
    w_ptr,  # [n]
    n,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, TOGETHER: tl.constexpr, LONG: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """``w = code[packed] * scale``, each scale in fp32, the product rounded to w's dtype.

    WHOLE: the last block is complete. Its mask is then the same for a whole block, so that loads and stores are wide.
    """
    HALF: tl.constexpr = BLOCK // 2
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    if LONG:
        block = block.to(tl.int64)
    live = block * BLOCK < n
    scale = tl.load(scale_ptr + block, mask=live, other=0)
    if scale_code_ptr is not None:
        outer = tl.load(outer_scale_ptr + block // TOGETHER, mask=live, other=0.0)
        scale = tl.load(scale_code_ptr + scale.to(tl.int32)) * outer + tl.load(offset_ptr)
    at = block[:, None] * HALF + tl.arange(0, HALF)[None, :]
    place = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    packed_live, place_live = (live[:, None], live[:, None]) if WHOLE else (at * 2 < n, place < n)
    packed = tl.load(packed_ptr + at, mask=packed_live, other=0).to(tl.int32)
    first = tl.load(code_ptr + (packed >> 4)) * scale[:, None]
    second = tl.load(code_ptr + (packed & 15)) * scale[:, None]
    tl.store(w_ptr + place, round_to(tl.interleave(first, second), w_ptr.dtype.element_ty), mask=place_live)


SCALES_TOGETHER = 256
"""Scales that share a number in double quantisation; bitsandbytes knows no other count."""

_TILE = 2048
"""Weights that a program writes, if a block has no more of them."""


class PackedWeight(NamedTuple):
    """The tensors of a weight [N, K] of 4 bits, all contiguous; the last three with double quantisation alone."""

    code: Tensor  # [16] fp32
    packed: Tensor  # [ceil(N K / 2)] uint8, of any shape
    scale: Tensor  # [blocks], fp32 or uint8
    scale_code: Tensor | None = None  # [256] fp32
    outer_scale: Tensor | None = None  # [ceil(blocks / 256)] fp32
    offset: Tensor | None = None  # [] fp32


def launch_dequantize(call: Call, weight: PackedWeight, block: int, w: Tensor) -> None:
    """Write the weight, contiguous, in w's dtype; ``block``: the weights that share a scale, a power of 2."""
    n = w.numel()
    tile = {"BLOCK": block, "BLOCKS": max(1, _TILE // block), "TOGETHER": SCALES_TOGETHER, "LONG": is_long([w])}
    tile["WHOLE"] = n % block == 0
    grid = -(-n // (block * tile["BLOCKS"])), 1
    # Scales are rounded, then added.
    call.launch(_dequantize_kernel, grid, (*weight, w), (n,), tile, warps=2, fuse=False)


def _reference_matrix(weight: Any, block: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """A weight of 4 bits, by the tensors of a ``PackedWeight`` and the number of weights that share a scale."""
    code, packed, scale, scale_code, outer_scale, offset = weight
    if scale_code is not None:
        outer = outer_scale.repeat_interleave(256)[: scale.numel()]
        scale = scale_code[scale.long()] * outer + offset
    count, bytes_ = shape[0] * shape[1], packed.reshape(-1).long()
    values = code[torch.stack([bytes_ >> 4, bytes_ & 15], dim=1).view(-1)[:count]]
    dequantized: Tensor = (values * scale.repeat_interleave(block)[:count]).to(dtype).view(shape)
    return dequantized


WEIGHT = PackedWeight._fields
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

    def reference(self, *arguments: Any) -> Tensor:
        x, *weight, bias, features, block, dtype, y_dtype = arguments
        w = _reference_matrix(weight, block, (features, x.shape[-1]), dtype)
        return torch.nn.functional.linear(x.to(dtype), w, bias).to(y_dtype)

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
        return ((dy.to(dtype) @ _reference_matrix(weight, block, (features, width), dtype)).to(x_dtype),)


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
        return _reference_matrix(weight, block, shape, dtype)


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
