"""LoRA layers of PEFT that compute their linear and their adapter as one operator.

PEFT casts a layer's input to the dtype of its adapter, float32 beside a 16-bit model, and autocast casts it back before
the adapter's first product. PEFT multiplies the output of the second product by a scale, and adds that to what the
linear returns. If other code would miss a call of the linear, or if it is trained, of 8 bits or reads float32, it is
called as PEFT calls it, and an operator computes the adapter and adds.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..kernels.autocast import autocast_dtype
from ..kernels.linear_4bit import LORA_LINEAR_4BIT, LORA_SUMMANDS_4BIT
from ..kernels.lora import HIGHEST_RANK, LORA_ADD, LORA_LINEAR, apply_dropout
from ..kernels.operator import Operator
from ..kernels.plain_calls import dispatch_modes
from ..kernels.switch import switch
from ..kernels.triton.devices import is_transformed
from .four_bit import (
    AdapterInput,
    FusedLinear4bit,
    Summands,
    is_linear_4bit,
    packed_weight,
    why_linear_is_stock,
    why_overridden,
    why_unreadable,
)
from .fused_norm_module import warn_once
from .hooks import (
    Fused,
    are_plain_calls,
    is_genuine,
    is_idle_dropout,
    name_of,
    stock_class,
    why_forward_replaced,
    why_linears_replaced,
)
from .module_features import FusedModule, ModuleFeature
from .probe import UnrecognisedError

_DROPOUT = functional.dropout
PEFTS = "PEFT's LoRA code"

SCALED = "its scale is a tensor, as prepare_model_for_compiled_hotswap leaves it"


class FusedAdapter(Fused):
    """Base of the classes put on LoRA layers; a subclass also derives from PEFT's class."""

    fused_norm_is_quantised: ClassVar[bool]
    fused_norm_what = "linear+lora"

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the linear and add its adapter's output, by kernels if they compute what PEFT's layer does.

        ``x`` is [..., K], or an ``AdapterInput``; the result is [..., N].
        """
        layer: Any = self
        adapter_input = x if type(x) is AdapterInput else None
        own = x
        if adapter_input is not None:
            x, own = adapter_input.x, adapter_input.own
        if switch.depth or torch.compiler.is_compiling() or type(x) is not Tensor or args or kwargs:
            return self._in_stock(x, adapter_input, *args, **kwargs)
        # The guard of the forward that passes an AdapterInput has asked.
        reason, is_plain = None, adapter_input is not None
        if not is_plain:
            called = [layer._modules["base_layer"]]
            reason = why_stock(layer, called)
            is_plain = reason is None and are_plain_calls(*called, inside=type(self), linears=True)
            if not is_plain:
                reason = why_linears_replaced() or why_stock(layer)
        dtype = None if reason is not None else autocast_dtype(x)
        if reason is not None and not adds_something(layer):
            reason = ""
        elif reason is None and dtype is None and self.fused_norm_is_quantised:
            reason = "its linear is quantised, and autocast is off"
        if reason is not None:
            warn_once(self.fused_norm_origin, reason, PEFTS)
            return self._in_stock(x, adapter_input)
        (name,), parts = layer.active_adapters, layer._modules
        first, second = parts["lora_A"]._modules[name], parts["lora_B"]._modules[name]
        dropout = parts["lora_dropout"]._modules[name]
        a, b, scale = first.weight, second.weight, layer.scaling[name]
        linear, mask, factors, dropped = parts["base_layer"], None, (1.0, 1.0), None
        # A plain one as ``is_idle_dropout`` tells it, without its frames.
        is_idle = type(dropout) is nn.Identity or (type(dropout) is nn.Dropout and not (dropout.training and dropout.p))
        is_idle = is_idle and (is_plain or is_idle_dropout(dropout))
        operator: Operator | None = None
        options: tuple[Any, ...]
        if self.fused_norm_is_quantised:
            assert dtype is not None
            drops_in, y_dtype = own.dtype, adapter_input and adapter_input.y_dtype
            if y_dtype is None:
                y_dtype = torch.promote_types((adapter_input and adapter_input.dtype) or x.dtype, dtype)
            packed = packed_weight(linear, x, dtype, is_readable=adapter_input is not None)
            if isinstance(packed, str):
                warn_once(self.fused_norm_origin, packed, "its linear by bitsandbytes' code")
            else:
                is_sum = adapter_input is None or not adapter_input.returns_summands
                operator = LORA_LINEAR_4BIT if is_sum else LORA_SUMMANDS_4BIT
                weight, options = [*packed[0]], (dtype, y_dtype, packed[1])
        else:
            drops_in = a.dtype if getattr(layer, "cast_input_dtype_enabled", True) else own.dtype
            if type(linear) is nn.Linear and (is_plain or are_plain_calls(linear)):
                w, products = linear.weight, x.dtype
                is_uncast = dtype is None and a.dtype == b.dtype == w.dtype == products
                # An input in float32 would be kept in 16 bits, and a gradient could not be differentiated again.
                is_narrow = products == own.dtype and products.itemsize == 2
                if is_narrow and not w.requires_grad and (dtype == products or is_uncast):
                    operator, weight, options = LORA_LINEAR, [w], (products,)
        if operator is not None:
            rounds_once = drops_in in (torch.float32, options[0])  # kernels round what they read, or drop, once
            # A caller that passes an adapter's input in another dtype than stock's has checked ``adapter_reads_in``.
            is_known = adapter_input is not None and adapter_input.dtype not in (None, own.dtype)
            if not is_known and not (rounds_once and is_idle):
                if rounds_once and own.dtype in (drops_in, options[0]):
                    mask = mask_of_dropout(dropout, own, drops_in)
                if mask is not None:
                    factors = dropout_factors(dropout.p)
                elif self.fused_norm_is_quantised:
                    # A node before that of dropout: x gets the gradient of its adapter first, as in stock.
                    x = x.view_as(x)
                    dropped = dropout(self._cast_for_adapter(own, a.dtype))
                else:  # x would get the gradient of its linear before that of its adapter, which stock adds first
                    operator = None
        if operator is not None:
            read = own if dropped is None else dropped
            y, _ = operator.try_fused(read, x, a, b, *weight, linear.bias, mask, scale, *factors, *options)
            if y is not None:
                return Summands(*y) if operator is LORA_SUMMANDS_4BIT else y
            if mask is not None:
                dropped = apply_dropout(own, mask, factors[0])
        base = linear(x)
        if adapter_input is not None and self.fused_norm_is_quantised:
            base = base.to(adapter_input.y_dtype or adapter_input.dtype or base.dtype)
        # PEFT's cast to float32 is taken back.
        if dropped is None and own.dtype == dtype and a.dtype == torch.float32 and is_idle:
            dropped = own
        if dropped is None:
            dropped = dropout(self._cast_for_adapter(own, a.dtype))
        x = dropped if dtype is None or dropped.dtype == torch.float64 else dropped.to(dtype)
        y = None
        if dtype is not None or a.dtype == b.dtype == x.dtype:
            y, reason = LORA_ADD.try_fused(base, x, a, b, scale)
        if y is not None:
            return y
        warn_once(self.fused_norm_origin, SCALED if isinstance(scale, Tensor) else reason, PEFTS)
        added = second(first(x)) * scale
        if not self.fused_norm_is_quantised:
            return (base + added).to(base.dtype)
        return base + (added if torch.is_autocast_enabled() else added.to(base.dtype))

    def _in_stock(self, x: Any, adapter_input: AdapterInput | None, *args: Any, **kwargs: Any) -> Any:
        """What PEFT's forward returns of the tensor that the layer reads in stock, in the dtype that is asked for."""
        if adapter_input is None:
            return self.fused_norm_origin.forward(self, x, *args, **kwargs)
        y = self.fused_norm_origin.forward(self, adapter_input.as_in_stock(), *args, **kwargs)
        return y if adapter_input.y_dtype is None else y.to(adapter_input.y_dtype)

    def _cast_for_adapter(self, x: Tensor, dtype: torch.dtype) -> Any:
        """``x`` as PEFT gives it to dropout: around a quantised linear PEFT casts nothing under CUDA's autocast."""
        if self.fused_norm_is_quantised and torch.is_autocast_enabled():
            return x
        return self.fused_norm_origin._cast_input_dtype(self, x, dtype)


def is_lora_layer(module: nn.Module) -> bool:
    """Return whether a module is PEFT's LoRA layer around a linear, fused or not; PEFT is not imported for it."""
    layers = sys.modules.get("peft.tuners.lora.layer")
    return layers is not None and stock_class(module) is layers.Linear and _is_recent(module)


def is_quantised_lora_layer(module: nn.Module) -> bool:
    """Return whether a module is PEFT's LoRA layer around a linear of bitsandbytes, fused or not."""
    layers, origin = sys.modules.get("peft.tuners.lora.bnb"), stock_class(module)
    if layers is None:
        return False
    is_known = any(origin is getattr(layers, name, None) for name in ("Linear4bit", "Linear8bitLt"))
    return is_known and _is_recent(module)


def _is_recent(layer: nn.Module) -> bool:
    # Older ones cast in their forward, and have no variants.
    return hasattr(layer, "_cast_input_dtype") and "lora_variant" in vars(layer)


def why_stock(layer: Any, called: list[Any] | None = None) -> str | None:
    """Return the reason why a LoRA layer, as it is now, has to run PEFT's forward; None if it has not.

    Whether other code has replaced all linears is another question, ``why_linears_replaced``.

    ``called``: gets the parts of a fused layer whose calls have to be plain, as the layer's has, for the caller to ask.
    """
    is_known = isinstance(layer, FusedAdapter) and (called is not None or are_plain_calls(inside=type(layer)))
    if reason := None if is_known else why_forward_replaced(stock_class(layer)):
        return reason
    own, parts, active = layer.__dict__, layer._modules, layer.active_adapters
    if own["_disable_adapters"] or own["merged_adapters"]:
        return "its adapter is merged, or switched off"
    if len(active) != 1:
        return f"it has {len(active)} active adapters"
    (name,) = active
    if name in own["lora_variant"]:
        variant = type(own["lora_variant"][name]).__name__.removesuffix("LinearVariant")
        return f"{variant.replace('Dora', 'DoRA').replace('Lora', 'LoRA')} is not fused"
    products: list[Any] = []
    for part in ("lora_A", "lora_B"):
        product = parts[part]._modules.get(name)
        if product is None:
            return "its active adapter has no products"
        if type(product) is not nn.Linear:
            return f"its adapter has a {name_of(type(product))}"
        if product.bias is not None:
            return "its adapter has a bias"
        products.append(product)
    if called is None:
        return None if are_plain_calls(*products) else "other code sees the products of its adapter"
    called += [*products, parts["lora_dropout"]._modules[name]]
    return None


def why_unfused(layer: Any) -> str | None:
    """Return the reason why a LoRA layer, as it is now, runs PEFT's code at every call; None if kernels may take some.

    It is asked when a model is patched. A call asks for the same, and the kernels refuse the rest.
    """
    if reason := why_linears_replaced() or why_stock(layer):
        return reason
    (name,) = layer.active_adapters
    if isinstance(layer.scaling[name], Tensor):
        return SCALED
    rank = len(layer.lora_A[name].weight)
    return f"a rank of {rank} is more than {HIGHEST_RANK}" if rank > HIGHEST_RANK else None


def adds_something(layer: Any) -> bool:
    """Return whether a LoRA layer, as it is now, adds anything to what its linear returns."""
    is_off = layer.disable_adapters or layer.merged
    return not is_off and any(name in layer.lora_A for name in layer.active_adapters)


def _fused(layer: Any, origin: Any) -> FusedModule:
    if reason := why_unfused(layer):
        raise UnrecognisedError(reason)
    return FusedModule(FusedAdapter, {"fused_norm_is_quantised": is_quantised_lora_layer(layer)})


ADAPTERS = ModuleFeature(
    "lora",
    lambda module: is_lora_layer(module) or is_quantised_lora_layer(module),
    why_overridden,
    _fused,
    reads=lambda layer: [layer._modules.get("base_layer")],
)


def is_quantised(module: nn.Module) -> bool:
    """Return whether a module is a 4-bit linear, or a LoRA layer around a quantised linear, fused or not."""
    return is_linear_4bit(module) or is_quantised_lora_layer(module)


def is_plain_in_4_bits(layer: Any) -> bool:
    """Return whether kernels read the 4-bit weight of a fused layer or linear, and nothing sees its call now."""
    if why_linears_replaced() is not None:
        return False
    if isinstance(layer, FusedLinear4bit):
        return why_linear_is_stock(layer) is None and are_plain_calls(layer)
    if why_stock(layer) is not None:
        return False
    base = layer._modules["base_layer"]
    return why_unreadable(base) is None and are_plain_calls(layer, base)


def linear_reads_in(layer: Any, dtype: torch.dtype) -> bool:
    """Return whether the linear of a fused layer, if it is quantised, computes in ``dtype``."""
    if not layer.fused_norm_is_quantised:
        return True
    linear = layer if isinstance(layer, FusedLinear4bit) else layer.base_layer
    return getattr(linear, "compute_dtype", None) is dtype


def adapter_reads_in(layer: Any, dtype: torch.dtype) -> bool:
    """Return whether a LoRA layer's adapter casts a float32 input to ``dtype`` before all else, under autocast.

    One of the other 16 bits has it rounded to those first. Dropout scales float32, which is rounded after that: a
    product of rounded numbers has other bits, and on a GPU other numbers may be drawn for another dtype.
    """
    (name,) = layer.active_adapters
    weight, dropout = layer.lora_A[name].weight, layer.lora_dropout[name]
    is_cast = getattr(layer, "cast_input_dtype_enabled", True)
    return is_idle_dropout(dropout) and (not is_cast or weight.dtype in (torch.float32, dtype))


def mask_of_dropout(dropout: Any, x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Draw the mask of ``dropout(x.to(dtype))`` of an x on a GPU; it depends on the dtype, but not on the numbers.

    None, and nothing is drawn, if PyTorch would draw it in another way, or if something sees the call.
    """
    if type(dropout) is not nn.Dropout or not (dropout.training and 0 < dropout.p < 1 and not dropout.inplace):
        return None
    if not x.is_cuda or not x.is_contiguous() or not x.numel() or dispatch_modes() or is_transformed():
        return None
    if not are_plain_calls(dropout) or not is_genuine(nn.Dropout) or functional.dropout is not _DROPOUT:
        return None
    # PyTorch draws by the dtype of what it drops, and by how far that is aligned in memory.
    dropped = x.detach() if x.dtype == dtype else torch.empty(x.shape, dtype=dtype, device=x.device)
    _, mask = torch.native_dropout(dropped, dropout.p, True)
    return mask


@lru_cache
def dropout_factors(p: float) -> tuple[float, float]:
    """Return the factors of numbers and of gradients in PyTorch's dropout on a GPU.

    For the first one PyTorch rounds the share that it keeps to float32.
    """
    kept = torch.tensor(1.0 - p, dtype=torch.float32, device="cpu").item()
    return 1.0 / kept, 1.0 / (1.0 - p)
