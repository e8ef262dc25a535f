"""The dtype that an attention function casts queries and keys to before all else, so that they can be written in it.

Under autocast, transformers' functions for PyTorch's attention and for flash attention cast float32 q and k to 16 bits
first. Written in 16 bits at once, they are the same numbers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.autocast import autocast_dtype, is_any_autocast_on
from ..kernels.operator import dispatch_modes, is_dynamo_compiling
from . import hooks
from .adapters import is_plain_in_4_bits
from .four_bit import AdapterInput
from .fused_norm_module import switch
from .hooks import defined_function

HARMLESS = frozenset({"dropout", "scaling", "is_causal", "sliding_window", "softcap"})
"""Arguments of attention functions that do not depend on the dtype of q and k."""

_POSITIONAL = frozenset({"module", "query", "key", "value", "attention_mask", "kwargs"})
_SDPA = "transformers.integrations.sdpa_attention"
_FLASH = "transformers.integrations.flash_attention"
_FLASH_UTILS = "transformers.modeling_flash_attention_utils"


class _Reader(NamedTuple):
    """An attention function that casts q and k under autocast.

    Attributes:
        unless: names of extra arguments with which it does something else first.
        calls: functions that it leaves the cast to: the namespace it looks each up in, the name, the function, and the
            code of the function.
        use_gqa: of PyTorch's attention, what decides that keys are not repeated for the heads that share them; None for
            flash attention, which never repeats them.
    """

    unless: frozenset[str]
    calls: tuple[tuple[Mapping[str, Any], str, Any, Any], ...]
    use_gqa: Callable[..., bool] | None


def read_dtype(
    attention: Any, attend: Any, cache: Any, mask: Any, key: Any, value: Any, extra: Any
) -> torch.dtype | None:
    """The dtype of 16 bits that q and k may be written in, in the place of float32; None for their own.

    If there is no value yet, it is that of a value with k's shape, beside q and k in float32.

    Args:
        attention: the module.
        attend: the function ``attend(attention, q, k, value, mask, **extra)`` that nothing but reads them.
        cache: what would keep k, None if nothing does.
        mask: of the attention.
        key: k before its rotation.
        value: the values; None if there are none yet.
        extra: arguments by names that the module's caller has given.
    """
    states = key if value is None else value
    if cache is not None or is_dynamo_compiling() or type(states) is not Tensor:
        return None
    dtype = autocast_dtype(states) if is_any_autocast_on() else None
    if dtype is None or dispatch_modes() or switch.depth:
        return None
    if (hooks.latest_mode is not None or hooks.modes()) and hooks.function_mode():
        return None
    reader = _reader_of(attend, attend.__code__) if type(attend) is FunctionType else None
    if reader is None or not reader.unless.isdisjoint(extra):
        return None
    for namespace, name, expected, code in reader.calls:
        if namespace[name] is not expected or getattr(expected, "__code__", None) is not code:
            return None
    if reader.use_gqa is None:
        # It casts v if q is float32; transformers 4 asks for autocast on CUDA alone.
        casts = states.is_cuda and (value is None or value.dtype is dtype)
    else:
        # Gradients of repeated keys are summed in the dtype of k.
        casts = getattr(attention, "num_key_value_groups", 1) == 1 or (
            mask is None and _is_not_repeated(reader.use_gqa, key.shape[-1], states.shape[-1])
        )
    return dtype if casts and dtype.itemsize == 2 else None


def for_values(attention: Any, linear: Any, x: Any, attend: Any, cache: Any, mask: Any, key: Any, extra: Any) -> Any:
    """Return what to call the linear of the values with: x, or x and the 16 bits that attention casts its output to.

    The other arguments are those of ``read_dtype``; k is float32, and has as many numbers as the values.
    """
    if not getattr(linear, "fused_norm_is_quantised", False) or type(key) is not Tensor or key.dtype != torch.float32:
        return x
    adapter_input = x if type(x) is AdapterInput else AdapterInput(x, x, None)
    dtype = read_dtype(attention, attend, cache, mask, key, None, extra)
    if dtype is None or type(adapter_input.x) is not Tensor:
        return x
    if linear.out_features * adapter_input.x.shape[:-1].numel() != key.numel():
        return x
    if adapter_input is not x and not is_plain_in_4_bits(linear):
        return x
    return AdapterInput(adapter_input.x, adapter_input.own, adapter_input.dtype, dtype)


@lru_cache(maxsize=64)
def _is_not_repeated(use_gqa: Callable[..., bool], key: int, value: int) -> bool:
    """Return whether keys and values of such widths are not repeated if there is no mask."""
    arguments = None, torch.empty(1, 1, 1, key), torch.empty(1, 1, 1, value)
    return use_gqa(*arguments[: len(inspect.signature(use_gqa).parameters)])


@lru_cache(maxsize=64)
def _reader_of(attend: FunctionType, code: CodeType) -> _Reader | None:
    """Look up an attention function among those of transformers that cast q and k; None if it is none of them.

    ``code``: what it runs now, which may be swapped; it is a part of what the result is remembered by.
    """
    own: Mapping[str, Any] = attend.__globals__
    calls: list[tuple[Mapping[str, Any], str, Any]]
    if attend is defined_function(_SDPA, "sdpa_attention_forward"):
        names = {"use_gqa_in_sdpa": _SDPA}
        calls = [(vars(torch.nn.functional), "scaled_dot_product_attention", torch._C._nn.scaled_dot_product_attention)]
    elif attend is defined_function(_FLASH, "flash_attention_forward"):
        names = {"_flash_attention_forward": _FLASH_UTILS}
        if "get_target_dtype" in own:  # else transformers 4, in which it asks by itself
            names["get_target_dtype"] = _FLASH
        utils = vars(sys.modules[_FLASH_UTILS])
        calls = [(utils, "fa_peft_integration_check", defined_function(_FLASH_UTILS, "fa_peft_integration_check"))]
    else:
        return None
    calls += [(own, name, defined_function(module, name)) for name, module in names.items()]
    if any(function is None for _, _, function in calls):
        return None
    unless = frozenset(inspect.signature(attend).parameters) - HARMLESS - _POSITIONAL
    with_code = tuple((*call, getattr(call[2], "__code__", None)) for call in calls)
    return _Reader(unless, with_code, own.get("use_gqa_in_sdpa"))
