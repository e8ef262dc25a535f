"""The recognition of a rotary embedding by what it computes, bit for bit, over pairs of dtypes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import reference
from .fused_norm_module import has_hooks
from .norm_recognition import UnrecognisedError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PAIRS = (*((dtype, dtype) for dtype in _DTYPES), (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
          (torch.float32, torch.bfloat16), (torch.float32, torch.float16))  # fmt: skip
_HEADS, _TOKENS, _WIDTH, _ROTARY = 2, 3, 16, 8


@dataclass(frozen=True)
class Rotation:
    """A function ``rotate(q, k, cos, sin, unsqueeze_dim=1)`` that makes the half rotation, or ``rotate(x, cos, sin)``.

    Attributes:
        function: the function, or the module that Hugging Face's ``kernels`` makes of it where it is installed.
        dtypes: pairs of dtypes, of the heads and of cos and sin, for which it rounds as the half rotation does.
        partial: it takes cos and sin narrower than a head, and leaves the rest of the head as it is.
    """

    function: Any
    dtypes: tuple[tuple[torch.dtype, torch.dtype], ...]
    partial: bool

    def is_now(self, value: Any) -> bool:
        """Return whether ``value`` is this rotation, and no hook or other code would see it called."""
        return value is self.function and (
            type(value) is FunctionType or (_runs_its_own_forward(value) and not has_hooks(value))
        )


def recognise_rotation(function: Any, tensors: int = 2) -> Rotation:
    """Return what is known of a rotary embedding that computes the half rotation of so many tensors, one or two.

    Raises:
        UnrecognisedError: where it is another function than the half rotation.
    """
    if not isinstance(function, FunctionType) and not _is_function_as_module(function):
        raise UnrecognisedError(f"the rotation is a {type(function).__name__}, not a function")
    rotation = _recognise(function, tensors)
    if rotation is None:
        what = "q and k" if tensors == 2 else "one tensor"
        raise UnrecognisedError(f"{name_of(function)} does not compute the half rotation of {what}")
    return rotation


def name_of(rotation: Any) -> str:
    """The name of a rotation's function, or of the module's class."""
    return getattr(rotation, "__name__", type(rotation).__name__)


def _is_function_as_module(value: Any) -> bool:
    return isinstance(value, nn.Module) and next(value.parameters(), None) is None and _runs_its_own_forward(value)


def _runs_its_own_forward(module: nn.Module) -> bool:
    """Return whether a module's forward is its class's; ``kernelize`` binds even that to the instance."""
    forward = vars(module).get("forward")
    return forward is None or getattr(forward, "__func__", None) is type(module).forward


@cache
def _recognise(function: Any, tensors: int) -> Rotation | None:
    # No hook is to see the samples.
    rotate = partial(type(function).forward, function) if isinstance(function, nn.Module) else function
    dtypes = tuple(pair for pair in _PAIRS if _agrees(rotate, tensors, *pair, _WIDTH))
    if not dtypes:
        return None
    return Rotation(function, dtypes, all(_agrees(rotate, tensors, *pair, _ROTARY) for pair in dtypes))


def _agrees(
    function: Callable[..., Any], tensors: int, dtype: torch.dtype, cos_dtype: torch.dtype, rotary: int
) -> bool:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    with torch.device("cpu"), torch.no_grad(), torch.autocast("cpu", enabled=False):
        heads = [random(2, number, _TOKENS, _WIDTH).to(dtype) for number in (_HEADS, 1)[:tensors]]
        cos, sin = (random(2, _TOKENS, rotary).to(cos_dtype) for _ in range(2))
        for heads_dim, named in ((1, {}), (2, {"unsqueeze_dim": 2})):
            try:
                rotated = function(*heads, cos, sin, **named)
            except Exception:  # a foreign function may raise anything
                return False
            if tensors == 1:
                rotated = (rotated,)
            if not isinstance(rotated, tuple) or len(rotated) != tensors:
                return False
            expected = [reference.rope(x, cos.unsqueeze(heads_dim), sin.unsqueeze(heads_dim)) for x in heads]
            for actual, wanted in zip(rotated, expected, strict=True):
                if not isinstance(actual, Tensor) or actual.dtype != wanted.dtype or not torch.equal(actual, wanted):
                    return False
            heads = [x.transpose(1, 2) for x in heads]
    return True
