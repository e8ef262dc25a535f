"""A linear whose weight has 4 bits, and its LoRA adapter, as one operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import reference
from .arguments import Unsupported, check_scale
from .linear_4bit import WEIGHT, WEIGHT_SCHEMA, layout_obstacle, product_obstacle, weight_obstacle
from .lora_add import LORA_ADD, adapter_obstacle, check_mask
from .operator import BackwardCall, BackwardImpl, Operator, Scalars, Tensors
from .triton.dequantize_kernels import PackedWeight, launch_dequantize
from .triton.lora_kernels import launch_narrow, launch_weights, launch_widen
from .triton.memory import empty_weight_like
from .triton.torch_calls import Cast, Product, perform


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
        return (
            product_obstacle(dtype, {"x": x, "adapter_x": adapter_x, "a": a, "b": b})
            or adapter_obstacle(a, b, factor)
            or weight_obstacle(block, (*weight, bias))
        )

    def differs_from_eager(self, *arguments: Any) -> str | None:
        x, adapter_x, *_ = arguments
        return layout_obstacle({"x": x, "adapter_x": adapter_x})

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

    def forward(
        self, *arguments: Any, training: bool, launch: bool = True, copied: Sequence[str] = ()
    ) -> tuple[Any, ...]:
        x, adapter_x, a, b, *weight, bias, mask, block, factor, drop_factor, _, dtype, y_dtype = arguments
        h = x.new_empty((*x.shape[:-1], len(a)), dtype=dtype)
        copies = [empty_weight_like(w, name in copied, dtype) for name, w in (("a", a), ("b", b))]
        narrow = x if x.dtype == dtype and x.is_contiguous() else x.new_empty(x.shape, dtype=dtype)
        drop_factor = 1.0 if mask is None else drop_factor
        read, adapter_copy = adapter_x, None
        if adapter_x is x and mask is None:
            read = narrow
            if "adapter_x" in copied and narrow is not x:
                adapter_copy = narrow
        elif "adapter_x" in copied and (mask is not None or adapter_x.dtype != dtype):
            adapter_copy = x.new_empty(x.shape, dtype=dtype)
        if launch:
            if narrow is not x:
                perform(Cast(x, narrow))
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
        w, base = x.new_empty((len(b), x.shape[-1])), x.new_empty((*x.shape[:-1], len(b)))
        adds = len(self.outputs) == 1
        dtype = y_dtype if adds else base.dtype
        y = base if adds and dtype == base.dtype else x.new_empty(base.shape, dtype=dtype)
        if launch:
            launch_dequantize(PackedWeight(*weight), block, w)  # type: ignore[arg-type]
            perform(Product(x, w, base, bias, transposed=True))
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
        dtype, shape, n = h.dtype, adapter_x.shape, len(b)
        has_one_gradient = need_dx and adapter_dtype is None
        narrow = dy if dy.dtype == dtype and dy.is_contiguous() else dy.new_empty(dy.shape, dtype=dtype)
        added = narrow if dadded is dy else dadded
        dh = h.new_empty(h.shape) if has_one_gradient or need_dadapter or need_da else None
        dadapter = adapter_x.new_empty(shape, dtype=adapter_dtype) if need_dadapter else None
        da, db = empty_weight_like(a, need_da, a_dtype), empty_weight_like(b, need_db, b_dtype)
        dx = dx_narrow = w = None
        if need_dx:
            w, dx_narrow = h.new_empty((n, shape[-1])), h.new_empty(shape)
            dx = dx_narrow if x_dtype == dtype else h.new_empty(shape, dtype=x_dtype)
        if launch:
            if narrow is not dy:
                perform(Cast(dy, narrow))
            if w is not None and dx_narrow is not None:
                launch_dequantize(PackedWeight(*weight), block, w)
                perform(Product(narrow, w, dx_narrow, None, transposed=False))
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

    def reference(self, *arguments: Any) -> Any:
        x, adapter_x, a, b, *weight, bias, mask, block, factor, drop_factor, _, dtype, _ = arguments
        w = reference.dequantize(weight, block, (len(b), a.shape[1]), dtype)
        adapter_x = adapter_x if mask is None else reference.dropped(adapter_x, mask, drop_factor)
        h = torch.nn.functional.linear(adapter_x.to(dtype), a.to(dtype))
        base = torch.nn.functional.linear(x.to(dtype), w, bias)
        return base, torch.nn.functional.linear(h, b.to(dtype)) * factor

    def compute_grads(self, impl: BackwardImpl, call: BackwardCall) -> tuple[Tensor | None, ...]:
        dbase, dadded = call.incoming
        if dbase is None and dadded is not None:
            dbase = torch.zeros_like(dadded)
        elif dadded is None and dbase is not None:
            dadded = torch.zeros_like(dbase)
        return super().compute_grads(impl, call._replace(incoming=(dbase, dadded)))


LORA_LINEAR_4BIT, LORA_SUMMANDS_4BIT = LoraLinear4bit(), LoraSummands4bit()
