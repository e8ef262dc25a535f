"""The recognition of causal depthwise convolutions: of a function by what it computes, of a module by its settings.

transformers calls a function, ``causal_conv1d_fn(x, weight, bias, activation=...)``, which is a kernel of another
package if that is installed, and PyTorch's convolution otherwise. Older releases call an ``nn.Conv1d``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import reference
from ..kernels.autocast import autocast_dtype
from ..kernels.causal_conv1d import CAUSAL_CONV1D
from .fused_norm_module import is_disabled, run_fused
from .hooks import are_plain_calls, is_function_as_module, is_genuine, short_name
from .native_code import native_code
from .probe import DTYPES, Case, Recognizer, UnrecognisedError, found_once
from .running_code import Identity, RunningCode

SILU = ("silu", "swish")
"""The names that transformers has for SiLU."""

_IGNORED = (
    "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids", "position_embeddings",
    "attention_mask", "is_causal", "cache", "cache_position", "past_key_values", "use_cache", "output_attentions",
    "output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch", "logits_to_keep", "labels",
    "token_type_ids", "mm_token_type_ids",
)  # fmt: skip
"""Arguments that layers hand on to whatever convolves, and that PyTorch's convolution may ignore."""

_PAIRS = (*((dtype, dtype) for dtype in DTYPES), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16))
_BATCH, _CHANNELS, _LENGTH = 2, 3, 7


@dataclass(frozen=True)
class ConvolutionFunction:
    """A function that computes a causal convolution, and SiLU of it if it is given that name.

    Attributes:
        function: the function, or the module that Hugging Face's ``kernels`` makes of it if it is installed.
        running: the code of the function, or of the module's forward, that was compared.
        ignored: the arguments that it ignores; newer releases of transformers raise for packed sequences.
    """

    function: Any
    running: RunningCode
    ignored: frozenset[str]

    def convolve(
        self, x: Any = None, weight: Any = None, bias: Any = None, activation: Any = None, **extra: Any
    ) -> tuple[Any, str | None]:
        """What it makes of these arguments, and None; or None, and why stock code has to run."""
        heeded = [
            name
            for name, value in extra.items()
            if name not in self.ignored and (value is not None or name not in _IGNORED)
        ]
        if activation is not None and activation not in SILU:
            return None, f"the activation of its convolution is {activation}"
        if heeded or not isinstance(x, Tensor) or not isinstance(weight, Tensor) or x.dim() != 3:
            return None, f"its convolution is given other arguments: {', '.join(heeded)}"
        y, reason = _convolve(x.to(weight.dtype), weight, bias, activation)
        return (None, reason) if reason is not None else (y.to(x.dtype), None)


def recognise_convolution(function: Any) -> ConvolutionFunction:
    """Return what is known of a function that computes a causal convolution by PyTorch's operators.

    Raises:
        UnrecognisedError: if it computes something else, or runs a kernel.
    """
    if not isinstance(function, FunctionType) and not is_function_as_module(function):
        raise UnrecognisedError(f"its convolution is a {type(function).__name__}, not a function")
    if (kernel := native_code(function)) is not None:
        raise UnrecognisedError(f"{short_name(function)} runs {kernel}, a kernel already")
    reason = f"{short_name(function)} computes no causal convolution"
    key = recognise_convolution, Identity(function)
    ignored = found_once(lambda: _ignored_by_convolution(function), *key, reason=reason)
    forward = function if isinstance(function, FunctionType) else type(function).forward
    return ConvolutionFunction(function, RunningCode(forward), ignored)


def convolve_as_module(conv: Any, x: Any, length: Any, activation: str | None) -> tuple[Any, str | None]:
    """``act(conv(x)[..., :length])``, and None; or None, and why stock code has to run."""
    if is_causal_convolution(conv) and are_plain_calls(conv) and is_genuine(nn.Conv1d):
        if isinstance(x, Tensor) and x.dim() == 3 and length == x.shape[2]:
            return _convolve(x, conv.weight.squeeze(1), conv.bias, activation)
        return None, "its convolution is cut to another length than it was given"
    return None, "its convolution is another one by now, or other code sees its call"


def is_causal_convolution(module: Any) -> bool:
    """Return whether a module is an ``nn.Conv1d`` that convolves each channel alone, padded by all taps but one."""
    if type(module) is not nn.Conv1d or module.padding_mode != "zeros":
        return False
    is_depthwise = module.groups == module.in_channels == module.out_channels
    is_dense = (*module.stride, *module.dilation) == (1, 1)
    return is_depthwise and is_dense and module.padding == (module.kernel_size[0] - 1,)


def _convolve(x: Tensor, weight: Tensor, bias: Any, activation: str | None) -> tuple[Any, str | None]:
    """The convolution of x [batch, channels, length], in the dtype that autocast has PyTorch's compute in."""
    if is_disabled():
        return None, ""
    dtype = autocast_dtype(x)
    if dtype is not None and torch.float64 not in (x.dtype, weight.dtype):
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    rows = x.transpose(1, 2)
    y, reason = run_fused(CAUSAL_CONV1D, rows, weight, bias, None if activation is None else "silu")
    return (None, reason) if reason is not None else (y.transpose(1, 2), None)


def _ignored_by_convolution(function: Any) -> frozenset[str]:
    """Compare a function with the convolution on small tensors, and return the arguments that it ignores."""
    call = partial(type(function).forward, function) if isinstance(function, nn.Module) else function
    logger = logging.getLogger("transformers")  # its slow convolution warns of itself, and is what a kernel replaces
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        for activation in (*SILU, None):
            cases, simple = partial(_cases, call, activation), (torch.float32,) * 2
            of_bits = (case for dtypes in _PAIRS for case in cases(dtypes))
            in_bf16 = cases(simple, autocast=torch.bfloat16)
            if not (
                Recognizer[Any](of_bits, _formula).agrees((activation, None))
                and Recognizer[Any](in_bf16, _formula).agrees((activation, torch.bfloat16))
                and Recognizer[Any](cases(simple), _formula, gradients=True).agrees((activation, None))
            ):
                raise UnrecognisedError
        return frozenset(
            name
            for name in _IGNORED
            if Recognizer[Any](_cases(call, "silu", simple, handed_on=(name,)), _formula).agrees(("silu", None))
        )
    finally:
        logger.setLevel(level)


def _cases(
    function: Callable[..., Any],
    activation: str | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    autocast: torch.dtype | None = None,
    handed_on: Sequence[str] = (),
) -> Iterator[Case]:
    """Calls with x in either memory order, with a bias and without; of what layers hand on, all but these is None."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = dtypes[1]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)

    def called(named: Mapping[str, Any], x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            return function(x, weight, bias, **named)

    sequences = dict.fromkeys(handed_on, torch.tensor([[0, 0, 1, 1, 1, 2, 2]]))
    extra = {**dict.fromkeys(_IGNORED), **sequences}
    ways: list[Mapping[str, Any]] = [{"activation": activation, **extra}]
    if not handed_on:
        ways.append({"activation": activation})
    if activation is None:
        ways.append({})
    for taps in (2, 4):
        x, weight, bias = (
            random(_BATCH, _LENGTH, _CHANNELS, dtype=dtypes[0]),
            random(_CHANNELS, taps),
            random(_CHANNELS),
        )
        for turned in (x.transpose(1, 2), x.transpose(1, 2).contiguous()):
            for named in ways:
                for tensors in ([turned, weight, bias], [turned, weight]):
                    yield Case(partial(called, named), tensors)


def _formula(
    how: tuple[str | None, torch.dtype | None], x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """The convolution in the weight's dtype, or in that of autocast, as one of x's."""
    activation, dtype = how
    cast = x.to(weight.dtype)
    if dtype is not None:
        cast, weight, bias = cast.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    y = reference.causal_conv1d(cast.transpose(1, 2), weight, bias, activation)
    return y.transpose(1, 2).to(x.dtype)
