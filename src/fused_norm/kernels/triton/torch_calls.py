"""Steps of a program that PyTorch computes between its launches: products of matrices, and casts.

An interceptor takes them as it takes launches, so a recorded call repeats them in their places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .launch import launches


class Product(NamedTuple):
    """``y = x @ w``, or ``x @ w.t()``, plus a bias if there is one: x [..., K], y [..., N], all of one dtype.

    The last three are contiguous. ``transposed``: w is [N, K] and not [K, N].
    """

    x: Tensor
    w: Tensor
    y: Tensor
    bias: Tensor | None
    transposed: bool

    def run(self) -> None:
        """Compute it."""
        x, y = (tensor.view(-1, tensor.shape[-1]) for tensor in (self.x, self.y))
        w = self.w.t() if self.transposed else self.w
        if self.bias is None:
            torch.mm(x, w, out=y)
        else:
            torch.addmm(self.bias, x, w, out=y)

    def line(self, name_of: Callable[[Tensor], str]) -> tuple[str, dict[str, Any]]:
        """The line that computes it, of tensors by their names, and the global names that the line has."""
        rows = self.x.shape[:-1].numel()
        x, y = (f"{name_of(tensor)}.view({rows}, {tensor.shape[-1]})" for tensor in (self.x, self.y))
        w = name_of(self.w) + ".t()" * self.transposed
        if self.bias is None:
            return f"mm({x}, {w}, out={y})", {"mm": torch.mm}
        return f"addmm({name_of(self.bias)}, {x}, {w}, out={y})", {"addmm": torch.addmm}


class Cast(NamedTuple):
    """``y = x`` in y's dtype; both have one shape."""

    x: Tensor
    y: Tensor

    def run(self) -> None:
        """Compute it."""
        self.y.copy_(self.x)

    def line(self, name_of: Callable[[Tensor], str]) -> tuple[str, dict[str, Any]]:
        """The line that computes it, of tensors by their names, and the global names that the line has."""
        return f"{name_of(self.y)}.copy_({name_of(self.x)})", {}


TorchCall = Product | Cast


def perform(step: TorchCall) -> None:
    """Compute a step, or hand it to an interceptor."""
    if launches.interceptor is None:
        step.run()
    else:
        launches.interceptor.launched(step)
