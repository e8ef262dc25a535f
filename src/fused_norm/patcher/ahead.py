"""Norms computed ahead of their call: the add that ends a layer is fused with the norm that begins the next one.

A layer cannot hand two tensors to the next. So it returns the sum, as ever, and leaves the norm of that sum here; the
norm, called with that very tensor, takes it. A stream that anybody has touched in between is another tensor or another
version of it, and is normalised again. Hidden states, hooks and outputs are the tensors that stock code makes.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn


class Successor:
    """Where a layer's successor is to be found: in the model's list of layers, or after it.

    It is looked up at every call, because layers are wrapped, replaced and copied. In a copy of the model it is the
    copy's own; a copy of a layer alone has none.
    """

    def __init__(
        self, stack: nn.Module | None, layers: str, index: int, first_norm: str | None, final_norm: str | None
    ) -> None:
        """``stack.<layers>[index]`` is the layer; the norm after it is the next one's ``first_norm``, or the stack's
        ``final_norm``."""
        self._stack = None if stack is None else weakref.ref(stack)
        self._where = layers, index, first_norm, final_norm

    def of(self, layer: nn.Module) -> tuple[nn.Module | None, Any] | None:
        """The layer after ``layer``, None after the last, and the norm that takes its output; None if not in place."""
        stack = None if self._stack is None else self._stack()
        if stack is None:
            return None
        name, index, first_norm, final_norm = self._where
        layers = stack._modules.get(name)
        found = layers._modules if layers is not None else {}
        if found.get(str(index)) is not layer:
            return None
        if index + 1 == len(found):
            return None, None if final_norm is None else stack._modules.get(final_norm)
        following = found.get(str(index + 1))
        if following is None or first_norm is None:
            return None
        return following, following._modules.get(first_norm)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Successor) and (self._stack, self._where) == (other._stack, other._where)

    def __hash__(self) -> int:
        return hash(self._where)

    def __deepcopy__(self, memo: dict[int, Any]) -> Successor:
        stack = None if self._stack is None else self._stack()
        return Successor(memo.get(id(stack)), *self._where)

    def __reduce__(self) -> Any:
        return Successor, (None if self._stack is None else self._stack(), *self._where)


class _Entry:
    """A norm's result, which is dropped as soon as the tensor that it is the norm of is gone."""

    __slots__ = ("mode", "norm", "total", "version", "y")

    def __init__(self, norm: nn.Module, total: Tensor, y: Tensor) -> None:
        self.norm, self.version, self.mode = norm, total._version, _mode()
        self.y: Tensor | None = y
        self.total = weakref.ref(total, self._drop)

    def _drop(self, _: object) -> None:
        self.y = None


class _Left(threading.local):
    entry: _Entry | None = None


_left = _Left()


def leave(norm: nn.Module, total: Tensor, y: Tensor) -> None:
    """Leaves ``y``, the norm of ``total``, for ``norm`` to take."""
    _left.entry = _Entry(norm, total, y)


def take(norm: nn.Module, x: Tensor) -> Tensor | None:
    """What was left for ``norm`` called with ``x``, if it was; what was left for others is dropped."""
    entry = _left.entry
    if entry is None:
        return None
    _left.entry = None
    y, entry.y = entry.y, None  # the entry itself is in a cycle, and lives as long as the sum
    if entry.norm is not norm or entry.total() is not x or entry.version != x._version:
        return None
    return y if entry.mode == _mode() else None


def saved_tensors_are_hooked() -> bool:
    """Whether somebody keeps account of what autograd saves, as non-reentrant checkpointing does."""
    return torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _mode() -> tuple[bool, bool]:
    """What must not change in between: reentrant checkpointing runs a layer without autograd and what follows it with
    it; the other kind counts on the same tensors being saved when it runs a layer again."""
    return torch.is_grad_enabled(), saved_tensors_are_hooked()
