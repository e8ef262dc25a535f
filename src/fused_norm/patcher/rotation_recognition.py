"""The recognition of a rotary embedding by what it computes, bit for bit, over pairs of dtypes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ..kernels import reference
from .norm_recognition import UnrecognisedError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PAIRS = (*((dtype, dtype) for dtype in _DTYPES), (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
          (torch.float32, torch.bfloat16), (torch.float32, torch.float16))  # fmt: skip
_HEADS, _TOKENS, _WIDTH, _ROTARY = 2, 3, 16, 8


@dataclass(frozen=True)
class Rotation:
    """A function ``rotate(q, k, cos, sin, unsqueeze_dim=1)`` that makes the half rotation.

    Attributes:
        function: the function.
        dtypes: pairs of dtypes, of the heads and of cos and sin, for which it rounds as the half rotation does.
        partial: it takes cos and sin narrower than a head, and leaves the rest of the head as it is.
    """

    function: Callable[..., Any]
    dtypes: tuple[tuple[torch.dtype, torch.dtype], ...]
    partial: bool


def recognise_rotation(function: Any) -> Rotation:
    """Return what is known of a rotary embedding that computes the half rotation.

    Raises:
        UnrecognisedError: where it is another function than the half rotation.
    """
    if not isinstance(function, FunctionType):
        raise UnrecognisedError(f"the rotation is a {type(function).__name__}, not a function")
    return _recognise(function)


@cache
def _recognise(function: FunctionType) -> Rotation:
    dtypes = tuple(pair for pair in _PAIRS if _agrees(function, *pair, _WIDTH))
    if not dtypes:
        raise UnrecognisedError(f"{function.__name__} does not compute the half rotation of q and k")
    return Rotation(function, dtypes, all(_agrees(function, *pair, _ROTARY) for pair in dtypes))


def _agrees(function: Callable[..., Any], dtype: torch.dtype, cos_dtype: torch.dtype, rotary: int) -> bool:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    with torch.device("cpu"), torch.no_grad(), torch.autocast("cpu", enabled=False):
        q = random(2, _HEADS, _TOKENS, _WIDTH).to(dtype)
        k = random(2, 1, _TOKENS, _WIDTH).to(dtype)
        cos, sin = (random(2, _TOKENS, rotary).to(cos_dtype) for _ in range(2))
        for heads_dim, named in ((1, {}), (2, {"unsqueeze_dim": 2})):
            try:
                rotated = function(q, k, cos, sin, **named)
            except Exception:  # a foreign function may raise anything
                return False
            expected = [reference.rope(x, cos.unsqueeze(heads_dim), sin.unsqueeze(heads_dim)) for x in (q, k)]
            if not isinstance(rotated, tuple) or len(rotated) != 2:
                return False
            for actual, wanted in zip(rotated, expected, strict=True):
                if actual.dtype != wanted.dtype or not torch.equal(actual, wanted):
                    return False
            q, k = q.transpose(1, 2), k.transpose(1, 2)
    return True
