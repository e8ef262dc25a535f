"""Adds the output of a LoRA adapter to that of its linear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from .arguments import Unsupported, check_rows, check_scale, why_other_dtype
from .operator import BackwardArguments, BackwardImpl, Operator, Results
from .triton.call import Call
from .triton.lora_kernels import HIGHEST_RANK, launch_narrow, launch_weights, launch_widen
from .triton.memory import is_long, promoted


class LoraAdd(Operator):
    """``lora_add`` as an operator."""

    name = "lora_add"
    tensors = "Tensor base, Tensor x, Tensor a, Tensor b"
    options = "float scale"
    outputs = ("y",)
    other_shapes = ("x", "a", "b")
    takes_dtensors = False
    extra_saved = ("h",)
    copies: ClassVar[Mapping[str, Sequence[str]]] = {"a": ("x",), "b": ("x", "a")}
    saved = "Tensor x, Tensor a, Tensor b, Tensor h"
    saved_scalars = f"{options}, ScalarType a_dtype, ScalarType b_dtype"
    has_products = True
    gradients = ("dbase", "dx", "da", "db")

    def check_options(self, *arguments: Any) -> Unsupported | None:
        base, x, a, b, scale = arguments
        refusal = check_rows("x", x) or check_scale(scale)
        have_same_rows, are_matrices = base.shape[:-1] == x.shape[:-1], a.dim() == b.dim() == 2
        if refusal is not None or (
            have_same_rows and are_matrices and (a.shape[1], *b.shape) == (x.shape[-1], base.shape[-1], len(a))
        ):
            return refusal
        shapes = ", ".join(str(tuple(t.shape)) for t in (base, x, a, b))
        return Unsupported(
            f"base, x, a and b must have shapes [..., N], [..., K], [r, K] and [N, r], not {shapes}", ValueError
        )

    def why_reference_only(self, *arguments: Any) -> Unsupported | None:
        *tensors, scale = arguments
        _, x, a, b = tensors
        if not all(t.numel() for t in tensors):
            return Unsupported("")
        if x.dtype == torch.float32:
            return Unsupported("the input is float32; only 16-bit products are fused: use bf16 autocast")
        return why_adapter_unsupported(a, b, scale)

    def why_unlike_eager(self, *arguments: Any) -> str | None:
        base, x, *_ = arguments
        if base.dtype not in (x.dtype, torch.float32):
            return why_other_dtype("x", "base", x, base)
        return None if base.is_contiguous() else "base is not contiguous"

    def reads_copy(self, weight: Tensor, arguments: Sequence[Any]) -> bool:
        x = arguments[1]
        return x is not None and weight.dtype != x.dtype

    def forward(self, call: Call, *arguments: Any, training: bool, copied: Sequence[str] = ()) -> Results:
        base, x, a, b, scale = arguments
        h = call.empty(x, (*x.shape[:-1], len(a)))
        copies = [call.empty_weight_like(w, name in copied, x.dtype) for name, w in (("a", a), ("b", b))]
        call.then(launch_narrow, x, a, a.stride()[::-1], h, 1.0, copies[0])
        y = self.output_of(call, base, h, b, scale, copy=copies[1])
        return y, h if training else None, *copies

    def output_of(
        self, call: Call, base: Tensor, h: Tensor, b: Tensor, scale: float, *, copy: Tensor | None = None
    ) -> Tensor:
        """The output for rows of ``h = x @ a^T``; ``copy``: b, rounded to h's dtype, is written there."""
        y = call.empty(base, base.shape, dtype=promoted(base.dtype, h.dtype))
        call.then(launch_widen, h, b, b.stride()[::-1], base, y, scale, copy)
        return y

    def compute_grads(self, impl: BackwardImpl, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (dy,), (need_dbase, *others) = given.incoming, given.needed
        grads = super().compute_grads(impl, given._replace(needed=(False, *others)))
        return (dy if need_dbase else None, *grads[1:])

    def backward(self, call: Call, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (dy,), (x, a, b, h), (scale, a_dtype, b_dtype) = given.incoming, given.saved, given.saved_scalars
        _, need_dx, need_da, need_db = given.needed
        dh = call.empty(h, h.shape) if need_dx or need_da else None
        dx = call.empty(x, x.shape) if need_dx else None
        da, db = call.empty_weight_like(a, need_da, a_dtype), call.empty_weight_like(b, need_db, b_dtype)
        if dh is not None:
            call.then(launch_narrow, dy, b, b.stride(), dh, scale)
        if dh is not None and dx is not None:
            call.then(launch_widen, dh, a, a.stride(), None, dx, 1.0)
        if need_da or need_db:
            call.then(launch_weights, h, (dy, db), (x, dh, da), scale)
        return None, dx, da, db


def check_mask(mask: Any, x: Tensor) -> Unsupported | None:
    """Check the mask of the dropout of x."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        return Unsupported("mask must be a tensor of torch.bool", TypeError)
    if mask.shape != x.shape or mask.device != x.device:
        return Unsupported(f"mask must have x's shape {tuple(x.shape)}, not {tuple(mask.shape)}", ValueError)
    return None


def why_adapter_unsupported(a: Tensor, b: Tensor, scale: float) -> Unsupported | None:
    """Refuse the factors and the scale of an adapter that kernels cannot compute."""
    if len(a) > HIGHEST_RANK:
        return Unsupported(f"a rank of {len(a)} is more than {HIGHEST_RANK}")
    if not abs(scale) <= torch.finfo(torch.float32).max:
        return Unsupported(f"a scale of {scale} is no finite float32")
    if is_long([a, b]):
        return Unsupported("a or b has more elements than 32 bits count")
    return None


LORA_ADD = LoraAdd()


def lora_add(base: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """The output of a linear with that of its LoRA adapter (Hu et al. 2021, arXiv 2106.09685) added to it.

    ``y = base + (x @ a^T @ b^T) * scale``. Products are computed in x's dtype, to which a and b are rounded first; each
    product, what the scale makes of the second, and the sum are rounded, as PEFT's layers round them. The backward
    keeps x, a, b and the r numbers of each row between the products.

    Args:
        base: [..., N], float32, bfloat16 or float16, any strides; the output of the linear for x.
        x: [..., K], base's rows, bfloat16 or float16; float32 and float64 are computed by the PyTorch reference, and so
            are DTensors.
        a: [r, K], float32 or of 16 bits, r up to 256; beyond, the PyTorch reference computes.
        b: [N, r].
        scale: a Python number.

    Returns:
        y, [..., N], contiguous, of the dtype that base and x promote to. It shares no memory with base.

    Raises:
        TypeError: for anything but dense tensors of floating point, and a scale that is not a Python number.
        ValueError: for incompatible shapes and devices.
    """
    return LORA_ADD.checked(base, x, a, b, scale)
