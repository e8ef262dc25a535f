"""Operators by PyTorch's formulas, which are faster than interpreted kernels and have stock's bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fused_norm.kernels.operator import Operator, calls


class _ByReference(list[str]):
    """The names of the operators that are called."""

    def called(self, operator: Operator, arguments: tuple[Any, ...]) -> Any:
        self.append(operator.name)
        outputs = operator.reference(*arguments)
        if not operator.plain_name:
            return outputs
        y, s = outputs
        consumers = arguments[-3] if torch.is_grad_enabled() else 1
        return (y, *(y.view_as(y) for _ in range(consumers - 1)), s.view_as(s))


@contextmanager
def by_reference() -> Iterator[list[str]]:
    """Yield a list of the names of the operators that are called in the block, and computed by their references."""
    with calls.by(called := _ByReference()), torch.autograd.set_multithreading_enabled(False):
        yield called
