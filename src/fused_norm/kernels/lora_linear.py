"""A linear together with its LoRA adapter, as one operator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from . import reference
from .arguments import Unsupported, check_scale
from .lora_add import LORA_ADD, check_mask, why_adapter_unsupported
from .operator import BackwardArguments, BackwardImpl, Operator, Results, Scalars, Tensors, is_grad_needed
from .triton.call import Call
from .triton.lora_kernels import launch_narrow, launch_weights, launch_widen
from .triton.torch_calls import Copy, Product

_DTYPES = (torch.bfloat16, torch.float16)


class Options(NamedTuple):
    """The options of a call of ``LoraLinear``, or of an operator that derives from it.

    Attributes:
        factor: that of the adapter's output.
        drop_factor, drop_factor_back: those of dropout, of numbers and of gradients.
        dtype: that of products.
        y_dtype: that of the sum.
        block: how many weights share a scale, if they have 4 bits.
    """

    factor: float
    drop_factor: float
    drop_factor_back: float
    dtype: torch.dtype
    y_dtype: torch.dtype
    block: int = 0


class LoraLinear(Operator):
    """``y = x @ w^T + bias + (adapter_x @ a^T @ b^T) * factor``, the weight w [N, K] and the bias [N] frozen.

    All products are of ``dtype``, of 16 bits, to which float32 is rounded first. The first product, what the factor
    makes of the second, and the sum are rounded as PyTorch's linears and PEFT's layers round them. ``adapter_x`` is
    what the adapter reads: x itself, or one with a gradient of its own. With a mask, dropout is applied to it first,
    ``adapter_x * mask * drop_factor``, and its gradient is multiplied by the mask and ``drop_factor_back``, which
    PyTorch rounds otherwise than ``drop_factor``.
    """

    name = "lora_linear"
    weight_names: ClassVar[Sequence[str]] = ("w",)
    """The tensors that the weight is made of."""
    tensors = "Tensor adapter_x, Tensor x, Tensor a, Tensor b, Tensor w, Tensor? bias, Tensor? mask"
    options = "float factor, float drop_factor, float drop_factor_back, ScalarType dtype"
    outputs: ClassVar[tuple[str, ...]] = ("y",)
    other_shapes: ClassVar[tuple[str, ...]] = ("x", "a", "b", "w", "bias")
    other_rules: ClassVar[tuple[str, ...]] = ("mask",)
    takes_dtensors = False
    extra_saved = ("h",)
    copies: ClassVar[Mapping[str, Sequence[str]]] = {
        "adapter_x": ("a",),
        "a": ("adapter_x",),
        "b": ("adapter_x", "a"),
        "w": ("x",),
    }
    unhooked: ClassVar[tuple[str, ...]] = ("bias",)
    saved = "Tensor adapter_x, Tensor? mask, Tensor a, Tensor b, Tensor w, Tensor h, Tensor? bias"
    saved_scalars = (
        "float factor, float drop_factor, float drop_factor_back, ScalarType x_dtype, ScalarType? adapter_x_dtype,"
        " ScalarType a_dtype, ScalarType b_dtype"
    )
    has_products = True
    gradients = ("dadapter_x", "dx", "da", "db")
    sums_gradients: ClassVar[bool] = False
    """If the adapter reads x itself, the backward sums both of its gradients; otherwise autograd does.

    Other linears may read x, and autograd sums all in the order of stock code, which differs in 16 bits.
    """

    def options_of(self, arguments: Sequence[Any]) -> Options:
        """The options among the arguments of a call."""
        factor, drop_factor, drop_factor_back, dtype = arguments[self.tensor_count :]
        return Options(factor, drop_factor, drop_factor_back, dtype, dtype)

    def has_shape(self, weight: Tensors, shape: tuple[int, int]) -> bool:
        """Return whether a weight, by the tensors that it is made of, is a matrix of this shape."""
        (w,) = weight
        return w is not None and w.shape == shape

    def why_weight_unsupported(self, weight: Tensors, options: Options) -> Unsupported | None:
        """Refuse a weight that kernels cannot read."""
        (w,) = weight
        assert w is not None
        return (
            why_dtype_unsupported(options.dtype, {"w": w}) if w.is_contiguous() else Unsupported("w is not contiguous")
        )

    def matrix(self, call: Call, weight: Tensors, block: int, shape: tuple[int, int], like: Tensor) -> Tensor:
        """The weight as a matrix of this shape, of the dtype of ``like``."""
        (w,) = weight
        assert w is not None
        return cast(call, w, like.dtype)

    def reference_matrix(self, weight: Tensors, block: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """As ``matrix``, by PyTorch's own operators."""
        (w,) = weight
        assert w is not None
        return w.to(dtype)

    def check_options(self, *arguments: Any) -> Unsupported | None:
        adapter_x, x, a, b, *weight, bias, mask = arguments[: self.tensor_count]
        fit = x.shape == adapter_x.shape and a.dim() == b.dim() == 2 and len(a) == b.shape[-1]
        fit = fit and a.shape[1] == x.shape[-1] and (bias is None or bias.shape == b.shape[:1])
        if not fit or not self.has_shape(weight, (len(b), a.shape[1])):
            shapes = ", ".join(str(tuple(t.shape)) for t in (adapter_x, x, a, b, *weight, bias) if t is not None)
            return Unsupported(
                "adapter_x, x, a, b, weight and bias must have shapes [..., K], [..., K], [r, K], [N, r], [N, K]"
                f" and [N], not {shapes}",
                ValueError,
            )
        return check_scale(self.options_of(arguments).factor) or (None if mask is None else check_mask(mask, adapter_x))

    def why_reference_only(self, *arguments: Any) -> Unsupported | None:
        adapter_x, x, a, b, *weight, bias, mask = arguments[: self.tensor_count]
        options = self.options_of(arguments)
        if not all(tensor.numel() for tensor in (x, a, b)) or not (mask is None or mask.is_contiguous()):
            return Unsupported("")
        if is_grad_needed((*weight, bias)):
            return Unsupported("its weight or bias is trained")
        factors = {"x": x, "adapter_x": adapter_x, "a": a, "b": b, **({} if bias is None else {"bias": bias})}
        refusal = why_dtype_unsupported(options.dtype, factors) or self.why_weight_unsupported(weight, options)
        return refusal or why_adapter_unsupported(a, b, options.factor)

    def why_unlike_eager(self, *arguments: Any) -> str | None:
        return why_copied_first(zip(("adapter_x", "x"), arguments, strict=False))

    def reads_copy(self, weight: Tensor, arguments: Sequence[Any]) -> bool:
        return weight.dtype == torch.float32  # products are of 16 bits

    def sources(self, arguments: Sequence[Any], saved: Tensors) -> list[tuple[int, int]]:
        # A context that held x itself would keep it from being freed: see ``reference_backward``.
        x = self.tensor_names.index("adapter_x")
        return [(at, source) for at, source in super().sources(arguments, saved) if source != x]

    def save(self, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[Tensors, Scalars]:
        """As ``Operator.save``; if x gets the sum of both gradients, the dtype of adapter_x is None."""
        saved, facts = super().save(arguments, results)
        is_summed = self.sums_gradients and arguments[0] is arguments[1]
        return (saved, (*facts[:4], None, *facts[5:])) if is_summed else (saved, facts)

    def forward(self, call: Call, *arguments: Any, training: bool, copied: Sequence[str] = ()) -> Results:
        adapter_x, x, a, b, *weight, bias, mask = arguments[: self.tensor_count]
        options = self.options_of(arguments)
        dtype = options.dtype
        h = call.empty(x, (*x.shape[:-1], len(a)), dtype=dtype)
        copies = [call.empty_weight_like(w, name in copied, dtype) for name, w in (("a", a), ("b", b))]
        narrow = cast(call, x, dtype)
        read, adapter_copy = adapter_x, None
        if adapter_x is x and mask is None:
            read = narrow
            if "adapter_x" in copied and narrow is not x:
                adapter_copy = narrow
        elif "adapter_x" in copied and adapter_x.dtype != dtype:
            adapter_copy = call.empty(x, x.shape, dtype=dtype)
        kept = None if adapter_copy is narrow else adapter_copy
        drop_factor = 1.0 if mask is None else options.drop_factor
        call.then(launch_narrow, read, a, a.stride()[::-1], h, drop_factor, copies[0], mask, kept)
        w = self.matrix(call, weight, options.block, (len(b), x.shape[-1]), narrow)
        outputs = self.outputs_of(call, narrow, h, b, w, bias, options, copy=copies[1])
        if "w" in self.tensor_names:
            copies.append(w if "w" in copied and w is not weight[0] else None)
        return *outputs, h if training else None, adapter_copy, *copies

    def outputs_of(
        self,
        call: Call,
        x: Tensor,
        h: Tensor,
        b: Tensor,
        w: Tensor,
        bias: Tensor | None,
        options: Options,
        *,
        copy: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the outputs for rows of x [..., K] and of ``h = adapter_x @ a^T``.

        Both are of the dtype of products, as ``w``, the matrix, is. ``copy``: b, rounded to h's dtype, is written
        there.
        """
        base = product(call, x, w, None if bias is None else cast(call, bias, x.dtype))
        adds = len(self.outputs) == 1
        dtype = options.y_dtype if adds else base.dtype
        y = base if adds and dtype == base.dtype else call.empty(x, base.shape, dtype=dtype)
        call.then(launch_widen, h, b, b.stride()[::-1], base if adds else None, y, options.factor, copy)
        return (y,) if adds else (base, y)

    def _parts_of(self, given: BackwardArguments) -> tuple[Sequence[Any], list[Any], list[Tensor | None], int]:
        """The gradients of outputs; adapter_x, mask, a, b and h; the tensors of the weight; and ``block``."""
        args = self.backward_by_name(given)
        saved = [args[name] for name in ("adapter_x", "mask", "a", "b", "h")]
        return given.incoming, saved, [args[name] for name in self.weight_names], args.get("block", 0)

    def compute_grads(self, impl: BackwardImpl, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        if given.saved_scalars[4] is None:
            given = given._replace(needed=(False, *given.needed[1:]))
        return super().compute_grads(impl, given)

    def backward(self, call: Call, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (dy, *others), (adapter_x, mask, a, b, h), weight, block = self._parts_of(given)
        factor, drop_factor, drop_factor_back, x_dtype, adapter_dtype, a_dtype, b_dtype, *_ = given.saved_scalars
        dadded = others[0] if others else dy  # the gradients of both summands, which are those of the sum
        need_dadapter, need_dx, need_da, need_db = given.needed
        dtype, shape = h.dtype, adapter_x.shape
        has_one_gradient = need_dx and adapter_dtype is None
        narrow = cast(call, dy, dtype)
        added = narrow if dadded is dy else dadded
        dh = call.empty(h, h.shape) if has_one_gradient or need_dadapter or need_da else None
        dadapter = call.empty(adapter_x, shape, dtype=adapter_dtype) if need_dadapter else None
        da, db = call.empty_weight_like(a, need_da, a_dtype), call.empty_weight_like(b, need_db, b_dtype)
        dx = dx_narrow = None
        if need_dx:
            w = self.matrix(call, weight, block, (len(b), shape[-1]), narrow)
            dx_narrow = product(call, narrow, w, None, transposed=False)
            dx = dx_narrow if x_dtype == dtype else call.empty(h, shape, dtype=x_dtype)
        back = 1.0 if mask is None else drop_factor_back
        if dh is not None:
            call.then(launch_narrow, added, b, b.stride(), dh, factor)
            if dadapter is not None:
                call.then(launch_widen, dh, a, a.stride(), None, dadapter, back, None, mask)
        if dx is not None and dx_narrow is not None:
            if has_one_gradient and dh is not None:
                call.then(launch_widen, dh, a, a.stride(), dx_narrow, dx, back, None, mask)
            elif dx is not dx_narrow:
                call.then(Call.perform, Copy(dx_narrow, dx))
        if need_da or need_db:
            dropout = () if mask is None or _was_dropped(given) else (drop_factor, mask)
            call.then(launch_weights, h, (added, db), (adapter_x, dh, da), factor, *dropout)
        return dadapter, dx, da, db

    def reference_backward(self, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (dy, *others), (adapter_x, mask, a, b, h), weight, block = self._parts_of(given)
        factor, drop_factor, drop_factor_back, x_dtype, adapter_dtype, a_dtype, b_dtype, *_ = given.saved_scalars
        dtype, has_one_gradient = h.dtype, adapter_dtype is None
        given_dtype, is_needed = (x_dtype, given.needed[1]) if has_one_gradient else (adapter_dtype, given.needed[0])
        if given_dtype != dtype and is_needed and torch.is_grad_enabled():
            raise RuntimeError(
                f"{self.plain_name or self.name}: x is {given_dtype} and was kept in {dtype}, so its gradient cannot be"
                " differentiated again; run the forward inside fused_norm.disabled() for that"
            )
        w = self.reference_matrix(weight, block, (len(b), a.shape[1]), dtype)
        if mask is not None and not _was_dropped(given):
            adapter_x = reference.dropped(adapter_x, mask, drop_factor)
        saved, scalars = (adapter_x.to(dtype), a, b, h), (factor, a_dtype, b_dtype)
        dadded, needed = others[0] if others else dy, (False, True, *given.needed[2:])
        _, dadapter, da, db = LORA_ADD.reference_backward(BackwardArguments((dadded,), saved, scalars, needed))
        assert dadapter is not None
        dadapter = dadapter.to(given_dtype)
        if mask is not None:
            dadapter = reference.dropped(dadapter, mask, drop_factor_back)
        dx = (dy.to(dtype) @ w).to(x_dtype)
        if has_one_gradient:
            return None, dx + dadapter, da, db
        return dadapter, dx, da, db


def _was_dropped(given: BackwardArguments) -> bool:
    """Return whether dropout was applied to the adapter_x that a call has saved: to a copy, of one in float32."""
    x_dtype, adapter_dtype = given.saved_scalars[3:5]
    return (x_dtype if adapter_dtype is None else adapter_dtype) == torch.float32


LORA_LINEAR = LoraLinear()


def why_copied_first(factors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return why a product would differ from stock code's: one of its factors is copied first; or None."""
    return next((f"{name} is not contiguous" for name, tensor in factors if not tensor.is_contiguous()), None)


def why_dtype_unsupported(dtype: torch.dtype, factors: Mapping[str, Tensor]) -> Unsupported | None:
    """Refuse products of another dtype than one of 16 bits, and factors that are neither of it nor float32."""
    if dtype not in _DTYPES:
        return Unsupported(f"its products are of {dtype}, which are left to PyTorch")
    for name, tensor in factors.items():
        if tensor.dtype not in (dtype, torch.float32):
            return Unsupported(f"{name} is {tensor.dtype}, and products are of {dtype}")
    return None


def cast(call: Call, x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in this dtype, contiguous; x itself if it is so already."""
    if x.dtype == dtype and x.is_contiguous():
        return x
    y = call.empty(x, x.shape, dtype=dtype)
    call.then(Call.perform, Copy(x, y))
    return y


def product(call: Call, x: Tensor, w: Tensor, bias: Tensor | None, *, transposed: bool = True) -> Tensor:
    """``x @ w^T + bias``, or without ``transposed`` ``x @ w``, of contiguous tensors of one dtype."""
    y = call.empty(x, (*x.shape[:-1], w.shape[0 if transposed else 1]))
    call.then(Call.perform, Product(x, w, y, bias, transposed))
    return y
