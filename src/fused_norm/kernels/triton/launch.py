"""One launch of a kernel."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

from torch import Tensor

from .devices import INTERPRETED, on
from .interpreter import one_launch


class Launch(NamedTuple):
    """One launch of a kernel: ``kernel[grid](*tensors, *numbers, **constants)``."""

    kernel: Any  # the function that ``triton.jit`` returned
    grid: tuple[int, int]  # programs along two axes
    tensors: tuple[Tensor | None, ...]  # the first arguments, the first of which is present; None for absent ones
    numbers: tuple[float | None, ...]  # counts, strides, then floats; None, for absent ones, becomes a constexpr
    constants: dict[str, Any]  # the compile-time arguments, by name
    options: dict[str, Any]  # of Triton's compiler, such as the number of warps

    @property
    def name(self) -> str:
        """The name of the kernel."""
        return self.kernel.__name__

    def run(self) -> Any:
        """Launch on the tensors' device, and return the compiled kernel, None in the interpreter."""
        lead = self.tensors[0]
        assert lead is not None
        with one_launch() if INTERPRETED else nullcontext(), on(lead.device):
            return self.kernel[self.grid](*self.tensors, *self.numbers, **self.options, **self.constants)
