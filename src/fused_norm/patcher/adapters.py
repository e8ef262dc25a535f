"""LoRA layers whose adapter reads its input without the cast that autocast takes back, or an input of its own.

PEFT's LoRA layer casts its input to the dtype of its adapter, float32 beside a 16-bit model. Under autocast the
adapter's first product casts it back at once, so it gets the same numbers without either cast.

It multiplies what the adapter's second product returns, as wide as the layer, by a scale. That is a power of two most
of the time, and then what the second product reads, as wide as the rank, is multiplied instead.
"""

from __future__ import annotations

import math
import sys
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .fused_norm_module import has_hooks, has_origin_forward, is_disabled

_FOR_ADAPTER = "fused_norm_for_adapter"
"""The attribute of a layer's input with the tensor that its adapter reads, equal and with a gradient of its own."""


class FusedAdapter(nn.Module):
    """Base of the classes put on LoRA layers; a subclass also derives from PEFT's class."""

    fused_norm_origin: ClassVar[Any]
    fused_norm_origin_forward: ClassVar[Any]

    def fused_norm_scaled(self, second: Any, x: Any, scale: Any) -> Any:
        """``second(x) * scale``; of the smaller x, the product of x and the scale, where that gives the same bits."""
        if not _may_scale_input(second, x, scale):
            return second(x) * scale
        return second(x if scale == 1 else x * scale)

    def _cast_input_dtype(self, x: Any, dtype: torch.dtype) -> Any:
        """``x`` in ``dtype``; in its own where autocast takes that cast back and nothing else sees its result."""
        if type(x) is Tensor and not torch.compiler.is_compiling():
            x = vars(x).pop(_FOR_ADAPTER, x)
        if _is_taken_back(x, dtype) and has_origin_forward(type(self)) and why_cast(self) is None:
            return x
        return self.fused_norm_origin._cast_input_dtype(self, x, dtype)


def keep_for_adapter(x: Tensor, own: Tensor) -> None:
    """Have the adapter of the LoRA layer that gets ``x`` read a tensor of its ``own``."""
    vars(x)[_FOR_ADAPTER] = own


def is_lora_layer(module: nn.Module) -> bool:
    """Return whether a module is PEFT's LoRA layer around a linear, fused or not; PEFT is not imported for it."""
    layers = sys.modules.get("peft.tuners.lora.layer")
    origin = _origin_of(module)
    # Older ones cast in their forward.
    return layers is not None and origin is layers.Linear and hasattr(origin, "_cast_input_dtype")


def is_quantised_lora_layer(module: nn.Module) -> bool:
    """Return whether a module is PEFT's LoRA layer around a linear of bitsandbytes, fused or not."""
    layers = sys.modules.get("peft.tuners.lora.bnb")
    origin = _origin_of(module)
    return any(origin is getattr(layers, name, None) for name in ("Linear4bit", "Linear8bitLt"))


def _origin_of(module: nn.Module) -> Any:
    return module.fused_norm_origin if isinstance(module, FusedAdapter) else type(module)


def casts_input(layer: Any) -> bool:
    """Return whether a LoRA layer casts 16-bit inputs: PEFT's own switch is on, and an adapter is of float32."""
    switched_on = getattr(layer, "cast_input_dtype_enabled", True)
    return switched_on and any(one.weight.dtype == torch.float32 for one in layer.lora_A.values())


def casts_input_to(layer: Any, dtype: torch.dtype) -> bool:
    """Return whether the adapters of a LoRA layer read a float32 input in ``dtype`` or wider, under autocast to it.

    Those of the other 16 bits round it to these first.
    """
    if not getattr(layer, "cast_input_dtype_enabled", True):
        return True
    return all(
        layer.lora_A[name].weight.dtype in (torch.float32, dtype)
        for name in layer.active_adapters
        if name in layer.lora_A
    )


def scales_input(layer: Any) -> bool:
    """Return whether an active adapter of a LoRA layer may be scaled before its second product."""
    variants = layer.__dict__.get("lora_variant", ())
    plain = [name for name in layer.active_adapters if name in layer.lora_B and name not in variants]
    return any(_may_be_scaled(layer.lora_B[name], layer.scaling[name]) for name in plain)


def why_cast(layer: Any, *, training: bool = False) -> str | None:
    """The reason why a LoRA layer has to cast its input; None where no active adapter could tell.

    ``training``: judge its dropout as if the layer were in training mode.
    """
    parts = layer._modules
    for name in layer.active_adapters:
        first = parts["lora_A"]._modules.get(name)
        if first is None:
            continue
        if name in layer.__dict__.get("lora_variant", ()):
            return f"{type(layer.lora_variant[name]).__name__} may compute more with its input"
        dropout = parts["lora_dropout"]._modules[name]
        if type(first) is not nn.Linear or type(dropout) not in (nn.Identity, nn.Dropout):
            return f"its adapter has a {type(first).__name__} behind a {type(dropout).__name__}"
        if any("forward" in vars(one) or has_hooks(one) for one in (first, dropout)):
            return "other code sees the input of its adapter"
        if isinstance(dropout, nn.Dropout) and dropout.p > 0 and (training or dropout.training):
            return "its dropout may draw other numbers for another dtype"
    return None


def _may_scale_input(second: Any, x: Any, scale: Any) -> bool:
    """Return whether a linear gives the bits of its product times the scale, and the same gradients, for a scaled x.

    A power of two changes exponents alone, and every rounding stays. float16 has few exponents.
    """
    if type(x) is not Tensor or is_disabled() or torch.compiler.is_compiling() or not _may_be_scaled(second, scale):
        return False
    device = "cuda" if x.is_cuda else x.device.type
    computed_in = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    return {x.dtype, computed_in} <= {torch.bfloat16, torch.float32}


def _may_be_scaled(second: Any, scale: Any) -> bool:
    if type(second) is not nn.Linear or second._parameters["bias"] is not None:
        return False
    if "forward" in second.__dict__ or has_hooks(second):
        return False
    return type(scale) in (float, int) and abs(math.frexp(scale)[0]) == 0.5 and 2**-16 <= abs(scale) <= 2**16


def _is_taken_back(x: Any, dtype: torch.dtype) -> bool:
    """Return whether autocast would cast ``x``, cast to ``dtype``, back in front of a product."""
    if dtype != torch.float32 or not isinstance(x, Tensor) or is_disabled() or torch.compiler.is_compiling():
        return False
    device = x.device.type
    return torch.is_autocast_enabled(device) and x.dtype == torch.get_autocast_dtype(device)
