"""Operators that return one alias of an output per consumer, and take the gradients of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from .backward import BackwardImpl, KernelBackward


def for_each_consumer(consumers: int, wide: int, y: Tensor, narrow: Tensor) -> tuple[Tensor, ...]:
    """y for consumers whose bits are set in ``wide``, and ``narrow`` for others."""
    return tuple([y if wide >> consumer & 1 else narrow for consumer in range(consumers)])


def joined_grads(impl: BackwardImpl, dys: Sequence[Tensor | None], dtype: torch.dtype) -> Any:
    """The gradients of an output's consumers as one: a tuple of them for kernels, their sum in ``dtype`` for others."""
    present = tuple([dy for dy in dys if dy is not None])
    if len(present) < 2:
        return present[0] if present else None
    return present if isinstance(impl, KernelBackward) else reduce(add, [dy.to(dtype) for dy in present])
