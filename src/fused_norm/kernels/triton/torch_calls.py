"""Steps of a call that PyTorch computes between its launches: products of matrices, copies, sums and zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


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
        """The line of source code that computes it, tensors named by ``name_of``, and the globals that it uses."""
        rows = self.x.shape[:-1].numel()
        x, y = (f"{name_of(tensor)}.view({rows}, {tensor.shape[-1]})" for tensor in (self.x, self.y))
        w = name_of(self.w) + ".t()" * self.transposed
        if self.bias is None:
            return f"mm({x}, {w}, out={y})", {"mm": torch.mm}
        return f"addmm({name_of(self.bias)}, {x}, {w}, out={y})", {"addmm": torch.addmm}


class Copy(NamedTuple):
    """``y = x`` in y's dtype and layout; both have one shape."""

    x: Tensor
    y: Tensor

    def run(self) -> None:
        """Compute it."""
        self.y.copy_(self.x)

    def line(self, name_of: Callable[[Tensor], str]) -> tuple[str, dict[str, Any]]:
        """The line of source code that computes it, tensors named by ``name_of``, and the globals that it uses."""
        return f"{name_of(self.y)}.copy_({name_of(self.x)})", {}


class Sum(NamedTuple):
    """``out = x + y``, all of one shape, as PyTorch adds."""

    x: Tensor
    y: Tensor
    out: Tensor

    def run(self) -> None:
        """Compute it."""
        torch.add(self.x, self.y, out=self.out)

    def line(self, name_of: Callable[[Tensor], str]) -> tuple[str, dict[str, Any]]:
        """The line of source code that computes it, tensors named by ``name_of``, and the globals that it uses."""
        return f"add({name_of(self.x)}, {name_of(self.y)}, out={name_of(self.out)})", {"add": torch.add}


class Zero(NamedTuple):
    """``x = 0``."""

    x: Tensor

    def run(self) -> None:
        """Compute it."""
        self.x.zero_()

    def line(self, name_of: Callable[[Tensor], str]) -> tuple[str, dict[str, Any]]:
        """The line of source code that computes it, tensors named by ``name_of``, and the globals that it uses."""
        return f"{name_of(self.x)}.zero_()", {}


TorchCall = Product | Copy | Sum | Zero
