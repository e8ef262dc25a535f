"""Linears whose weight has 4 bits, alone or with a LoRA adapter, each as one operator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import reference
from .arguments import Unsupported, check_scale
from .lora_add import LORA_ADD, adapter_obstacle, check_mask
from .operator import BackwardCall, BackwardImpl, Operator, Results, Scalars, Tensors
from .triton.dequantize_kernels import PackedWeight, launch_dequantize
from .triton.lora_kernels import launch_narrow, launch_weights, launch_widen
from .triton.memory import empty_weight_like
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
        return _obstacle(dtype, {"x": x}, block, (*weight, bias))

    def differs_from_eager(self, *arguments: Any) -> str | None:
        return _copied_first([("x", arguments[0])])

    def forward(self, *arguments: Any, training: bool, launch: bool = True) -> Results:
        x, *weight, bias, features, block, dtype, y_dtype = arguments
        narrow = _cast(x, dtype, launch=launch)
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
        return _cast(_product(x, weight, bias, block, (features, x.shape[-1]), launch=launch), y_dtype, launch=launch)

    def backward(self, call: BackwardCall, *, launch: bool = True) -> tuple[Tensor | None, ...]:
        (dy,), (*weight, _), (features, block, dtype, x_dtype) = call.incoming, call.saved, call.saved_scalars
        width = 2 * weight[1].numel() // features
        narrow = _cast(dy, dtype, launch=launch)
        dx = _product(narrow, weight, None, block, (features, width), transposed=False, launch=launch)
        return (_cast(dx, x_dtype, launch=launch),)

    def reference_backward(self, call: BackwardCall) -> tuple[Tensor | None, ...]:
        (dy,), (*weight, _), (features, block, dtype, x_dtype) = call.incoming, call.saved, call.saved_scalars
        width = 2 * weight[1].numel() // features
        return ((dy.to(dtype) @ reference.dequantize(weight, block, (features, width), dtype)).to(x_dtype),)


class LoraLinear4bit(Operator):
    """``y = x @ w^T + bias + (adapter_x @ a^T @ b^T) * factor``, the weight w [N, K] dequantised in each pass.

    ``dtype``, of 16 bits, is that of all products; wider x are rounded to it first. The first product, what the factor
    makes of the second, and the sum are rounded as bitsandbytes' linears and PEFT's layers round them, the sum to
    ``y_dtype``. ``adapter_x`` is what the adapter reads: x itself, or one with a gradient of its own. With a mask,
    dropout is applied to it first, ``adapter_x * mask * drop_factor``, and its gradient is multiplied by the mask and
    ``drop_factor_back``, which PyTorch rounds otherwise than ``drop_factor``.
    """

    name = "lora_linear_4bit"
    tensors = f"Tensor x, Tensor adapter_x, Tensor a, Tensor b, {WEIGHT_SCHEMA}, Tensor? bias, Tensor? mask"
    options = "int block, float factor, float drop_factor, float drop_factor_back, ScalarType dtype, ScalarType y_dtype"
    outputs: ClassVar[tuple[str, ...]] = ("y",)
    other_shapes, other_rules = ("adapter_x", "a", "b"), (*WEIGHT, "bias", "mask")
    takes_dtensors = False
    extra_saved = ("h",)
    copies: ClassVar[Mapping[str, Sequence[str]]] = {"adapter_x": ("a",), "a": ("adapter_x",), "b": ("adapter_x", "a")}
    unhooked = (*WEIGHT, "bias")
    saved = f"Tensor adapter_x, Tensor? mask, Tensor a, Tensor b, Tensor h, {WEIGHT_SCHEMA}, Tensor? bias"
    saved_scalars = (
        "int block, float factor, float drop_factor_back, ScalarType x_dtype, ScalarType? adapter_x_dtype,"
        " ScalarType a_dtype, ScalarType b_dtype"
    )
    gradients = ("dx", "dadapter_x", "da", "db")

    def check_options(self, *arguments: Any) -> Unsupported | None:
        x, adapter_x, a, b, _, packed, *_, mask, _, factor, _, _, _, _ = arguments
        shapes = x.shape == adapter_x.shape and a.dim() == b.dim() == 2 and len(a) == b.shape[-1]
        if not shapes or a.shape[1] != x.shape[-1] or packed.numel() != -(-len(b) * a.shape[1] // 2):
            tensors = ", ".join(str(tuple(tensor.shape)) for tensor in (x, adapter_x, a, b, packed))
            return Unsupported(
                "x, adapter_x, a, b and packed must have shapes [..., K], [..., K], [r, K], [N, r] and N K / 2"
                f" elements, not {tensors}",
                ValueError,
            )
        return check_scale(factor) or (None if mask is None else check_mask(mask, adapter_x))

    def needs_reference(self, *arguments: Any) -> Unsupported | None:
        x, adapter_x, a, b, *weight, bias, mask, block, factor, _, _, dtype, _ = arguments
        if not all(tensor.numel() for tensor in (x, a, b)) or not (mask is None or mask.is_contiguous()):
            return Unsupported("")
        factors = {"x": x, "adapter_x": adapter_x, "a": a, "b": b}
        return _obstacle(dtype, factors, block, (*weight, bias)) or adapter_obstacle(a, b, factor)

    def differs_from_eager(self, *arguments: Any) -> str | None:
        return _copied_first(zip(("x", "adapter_x"), arguments, strict=False))

    def reads_copy(self, weight: Tensor, arguments: Sequence[Any]) -> bool:
        _, adapter_x, *_, mask, _, _, _, _, _, _ = arguments
        # Products are of 16 bits, and the first one is of what dropout returns.
        return weight.dtype == torch.float32 or (mask is not None and weight is adapter_x)

    def sources(self, arguments: Sequence[Any], saved: Tensors) -> list[tuple[int, int]]:
        # A context that held x itself would keep it from being freed: see ``reference_backward``.
        x = self.tensor_names.index("adapter_x")
        return [(at, source) for at, source in super().sources(arguments, saved) if source != x]

    def save(self, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[Tensors, Scalars]:
        """As ``Operator.save``; if adapter_x is x, its dtype is None, and x gets the sum of both gradients."""
        saved, facts = super().save(arguments, results)
        x, adapter_x, *_ = arguments
        return (saved, (*facts[:4], None, *facts[5:])) if adapter_x is x else (saved, facts)

    def forward(self, *arguments: Any, training: bool, launch: bool = True, copied: Sequence[str] = ()) -> Results:
        x, adapter_x, a, b, *weight, bias, mask, block, factor, drop_factor, _, dtype, y_dtype = arguments
        h = x.new_empty((*x.shape[:-1], len(a)), dtype=dtype)
        copies = [empty_weight_like(w, name in copied, dtype) for name, w in (("a", a), ("b", b))]
        narrow = _cast(x, dtype, launch=launch)
        drop_factor = 1.0 if mask is None else drop_factor
        read, adapter_copy = adapter_x, None
        if adapter_x is x and mask is None:
            read = narrow
            if "adapter_x" in copied and narrow is not x:
                adapter_copy = narrow
        elif "adapter_x" in copied and (mask is not None or adapter_x.dtype != dtype):
            adapter_copy = x.new_empty(x.shape, dtype=dtype)
        if launch:
            kept = None if adapter_copy is narrow else adapter_copy
            launch_narrow(read, a, a.stride()[::-1], h, drop_factor, copies[0], mask, kept)
        linear = *weight, bias
        outputs = self.outputs_of(narrow, h, b, linear, block, factor, y_dtype, launch=launch, copy=copies[1])
        return *outputs, h if training else None, adapter_copy, *copies

    def outputs_of(
        self,
        x: Tensor,
        h: Tensor,
        b: Tensor,
        linear: Tensors,
        block: int,
        factor: float,
        y_dtype: torch.dtype,
        *,
        launch: bool = True,
        copy: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the outputs for rows of x [..., K] and of ``h = adapter_x @ a^T``, both of the dtype of products.

        ``linear``: the tensors of its weight, and its bias. ``y_dtype``: that of the sum, if that is the output.
        ``launch``: without it the outputs are only allocated. ``copy``: b, rounded to h's dtype, is written there.
        """
        *weight, bias = linear
        base = _product(x, weight, bias, block, (len(b), x.shape[-1]), launch=launch)
        adds = len(self.outputs) == 1
        dtype = y_dtype if adds else base.dtype
        y = base if adds and dtype == base.dtype else x.new_empty(base.shape, dtype=dtype)
        if launch:
            launch_widen(h, b, b.stride()[::-1], base if adds else None, y, factor, copy)
        return (y,) if adds else (base, y)

    def compute_grads(self, impl: BackwardImpl, call: BackwardCall) -> tuple[Tensor | None, ...]:
        *_, adapter_dtype, _, _ = call.saved_scalars
        if adapter_dtype is None:  # adapter_x is x
            need_dx, _, *others = call.needed
            call = call._replace(needed=(need_dx, False, *others))
        return super().compute_grads(impl, call)

    def backward(self, call: BackwardCall, *, launch: bool = True) -> tuple[Tensor | None, ...]:
        (dy, *others), (adapter_x, mask, a, b, h, *weight, _) = call.incoming, call.saved
        block, factor, drop_factor_back, x_dtype, adapter_dtype, a_dtype, b_dtype = call.saved_scalars
        dadded = others[0] if others else dy  # the gradients of both summands, which are those of the sum
        drop_factor_back = 1.0 if mask is None else drop_factor_back
        need_dx, need_dadapter, need_da, need_db = call.needed
        dtype, shape = h.dtype, adapter_x.shape
        has_one_gradient = need_dx and adapter_dtype is None
        narrow = _cast(dy, dtype, launch=launch)
        added = narrow if dadded is dy else dadded
        dh = h.new_empty(h.shape) if has_one_gradient or need_dadapter or need_da else None
        dadapter = adapter_x.new_empty(shape, dtype=adapter_dtype) if need_dadapter else None
        da, db = empty_weight_like(a, need_da, a_dtype), empty_weight_like(b, need_db, b_dtype)
        dx = dx_narrow = None
        if need_dx:
            dx_narrow = _product(narrow, weight, None, block, (len(b), shape[-1]), transposed=False, launch=launch)
            dx = dx_narrow if x_dtype == dtype else h.new_empty(shape, dtype=x_dtype)
        if launch:
            if dh is not None:
                launch_narrow(added, b, b.stride(), dh, factor)
                if dadapter is not None:
                    launch_widen(dh, a, a.stride(), None, dadapter, drop_factor_back, None, mask)
            if dx is not None and dx_narrow is not None:
                if has_one_gradient and dh is not None:
                    launch_widen(dh, a, a.stride(), dx_narrow, dx, drop_factor_back, None, mask)
                elif dx is not dx_narrow:
                    perform(Cast(dx_narrow, dx))
            if need_da or need_db:
                launch_weights(h, (added, db), (adapter_x, dh, da), factor)
        return dx, dadapter, da, db

    def reference_backward(self, call: BackwardCall) -> tuple[Tensor | None, ...]:
        (dy, *others), (adapter_x, mask, a, b, h, *weight, _) = call.incoming, call.saved
        block, factor, drop_factor_back, x_dtype, adapter_dtype, a_dtype, b_dtype = call.saved_scalars
        dtype, has_one_gradient = h.dtype, adapter_dtype is None
        given_dtype, is_needed = (x_dtype, call.needed[0]) if has_one_gradient else (adapter_dtype, call.needed[1])
        if (given_dtype != dtype or mask is not None) and is_needed and torch.is_grad_enabled():
            kept = f"is {given_dtype} and was kept in {dtype}" if mask is None else "was kept behind its dropout"
            raise RuntimeError(
                f"lora_linear_4bit: x {kept}, so its gradient cannot be differentiated again; run the forward inside"
                " fused_norm.disabled() for that"
            )
        w = reference.dequantize(weight, block, (len(b), a.shape[1]), dtype)
        saved, scalars = (adapter_x.to(dtype), a, b, h), (factor, a_dtype, b_dtype)
        adapter_call = BackwardCall((others[0] if others else dy,), saved, scalars, (False, True, *call.needed[2:]))
        _, dadapter, da, db = LORA_ADD.reference_backward(adapter_call)
        assert dadapter is not None
        dadapter = dadapter.to(given_dtype)
        if mask is not None:
            dadapter = reference.dropped(dadapter, mask, drop_factor_back)
        dx = (dy.to(dtype) @ w).to(x_dtype)
        if has_one_gradient:
            return dx + dadapter, None, da, db
        return dx, dadapter, da, db


class LoraSummands4bit(LoraLinear4bit):
    """The two summands of ``lora_linear_4bit``, the output of the linear and that of the adapter, both of ``dtype``.

    A consumer that adds them up has their sum in float32, from half of the memory; ``y_dtype`` is unused.
    """

    name = "lora_summands_4bit"
    plain_name = "lora_linear_4bit"
    outputs: ClassVar[tuple[str, ...]] = ("base", "added")

    def compute_grads(self, impl: BackwardImpl, call: BackwardCall) -> tuple[Tensor | None, ...]:
        dbase, dadded = call.incoming
        if dbase is None and dadded is not None:
            dbase = torch.zeros_like(dadded)
        elif dadded is None and dbase is not None:
            dadded = torch.zeros_like(dbase)
        return super().compute_grads(impl, call._replace(incoming=(dbase, dadded)))


LINEAR_4BIT, LORA_LINEAR_4BIT, LORA_SUMMANDS_4BIT = Linear4bit(), LoraLinear4bit(), LoraSummands4bit()


def _copied_first(factors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return why a product would differ from stock code's: one of its factors is copied first; or None."""
    return next((f"{name} is not contiguous" for name, tensor in factors if not tensor.is_contiguous()), None)


def _obstacle(dtype: torch.dtype, factors: dict[str, Tensor], block: int, linear: Tensors) -> Unsupported | None:
    """Refuse products of another dtype than one of 16 bits, ``factors`` that are neither of it nor float32, and linears
    that kernels cannot read: the tensors of a weight and the bias; ``block``: the weights that share a scale."""
    if dtype not in (torch.bfloat16, torch.float16):
        return Unsupported(f"its products are of {dtype}, which are left to PyTorch")
    for name, tensor in factors.items():
        if tensor.dtype not in (dtype, torch.float32):
            return Unsupported(f"{name} is {tensor.dtype}, and products are of {dtype}")
    if block & (block - 1) or not all(tensor is None or tensor.is_contiguous() for tensor in linear):
        return Unsupported("its weight is packed otherwise")
    return None


def _cast(x: Tensor, dtype: torch.dtype, *, launch: bool) -> Tensor:
    """x in this dtype, contiguous; x itself if it is so already."""
    if x.dtype == dtype and x.is_contiguous():
        return x
    y = x.new_empty(x.shape, dtype=dtype)
    if launch:
        perform(Cast(x, y))
    return y


def _product(
    x: Tensor,
    weight: Tensors,
    bias: Tensor | None,
    block: int,
    shape: tuple[int, int],
    *,
    transposed: bool = True,
    launch: bool,
) -> Tensor:
    """``x @ w^T + bias``, or without ``transposed`` ``x @ w``, the weight of this shape dequantised to x's dtype."""
    w, y = x.new_empty(shape), x.new_empty((*x.shape[:-1], shape[0 if transposed else 1]))
    if launch:
        launch_dequantize(PackedWeight(*weight), block, w)  # type: ignore[arg-type]
        perform(Product(x, w, y, bias, transposed))
    return y
