"""Adds the output of a LoRA adapter to that of its linear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from .arguments import Unsupported, check_rows, check_scale, why_other_dtype
from .operator import BackwardCall, BackwardImpl, Operator, Results
from .triton.lora_kernels import HIGHEST_RANK, launch_narrow, launch_weights, launch_widen
from .triton.memory import empty_weight_like, is_long, promoted


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
            return Unsupported("x is torch.float32, products of which are left to PyTorch")
        return why_adapter_unsupported(a, b, scale)

    def why_unlike_eager(self, *arguments: Any) -> str | None:
        base, x, *_ = arguments
        if base.dtype not in (x.dtype, torch.float32):
            return why_other_dtype("x", "base", x, base)
        return None if base.is_contiguous() else "base is not contiguous"

    def reads_copy(self, weight: Tensor, arguments: Sequence[Any]) -> bool:
        x = arguments[1]
        return x is not None and weight.dtype != x.dtype

    def forward(self, *arguments: Any, training: bool, launch: bool = True, copied: Sequence[str] = ()) -> Results:
        base, x, a, b, scale = arguments
        h = x.new_empty((*x.shape[:-1], len(a)))
        copies = [empty_weight_like(w, name in copied, x.dtype) for name, w in (("a", a), ("b", b))]
        if launch:
            launch_narrow(x, a, a.stride()[::-1], h, 1.0, copies[0])
        y = self.output_of(base, h, b, scale, launch=launch, copy=copies[1])
        return y, h if training else None, *copies

    def output_of(
        self, base: Tensor, h: Tensor, b: Tensor, scale: float, *, launch: bool = True, copy: Tensor | None = None
    ) -> Tensor:
        """The output for rows of ``h = x @ a^T``; ``copy``: b, rounded to h's dtype, is written there."""
        y = base.new_empty(base.shape, dtype=promoted(base.dtype, h.dtype))
        if launch:
            launch_widen(h, b, b.stride()[::-1], base, y, scale, copy)
        return y

    def compute_grads(self, impl: BackwardImpl, call: BackwardCall) -> tuple[Tensor | None, ...]:
        (dy,), (need_dbase, *others) = call.incoming, call.needed
        grads = super().compute_grads(impl, call._replace(needed=(False, *others)))
        return (dy if need_dbase else None, *grads[1:])

    def backward(self, call: BackwardCall, *, launch: bool = True) -> tuple[Tensor | None, ...]:
        (dy,), (x, a, b, h), (scale, a_dtype, b_dtype) = call.incoming, call.saved, call.saved_scalars
        _, need_dx, need_da, need_db = call.needed
        dh = h.new_empty(h.shape) if need_dx or need_da else None
        dx = x.new_empty(x.shape) if need_dx else None
        da, db = empty_weight_like(a, need_da, a_dtype), empty_weight_like(b, need_db, b_dtype)
        if launch:
            if dh is not None:
                launch_narrow(dy, b, b.stride(), dh, scale)
            if dh is not None and dx is not None:
                launch_widen(dh, a, a.stride(), None, dx, 1.0)
            if need_da or need_db:
                launch_weights(h, (dy, db), (x, dh, da), scale)
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
