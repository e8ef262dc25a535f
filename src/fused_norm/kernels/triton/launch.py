"""Launches of kernels, and interceptors of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple

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


class Interceptors(threading.local):
    """The interceptor of one sort of event, launches or calls of operators, that each thread has for itself, or None.

    The thread hands it these events instead of making them.
    """

    interceptor: Any = None
    active: ClassVar[int] = 0
    """The number of active interceptors of any sort in all threads; if 0, nothing needs to look for this thread's."""
    _counting: ClassVar[Any] = threading.Lock()

    @contextmanager
    def by(self, interceptor: Any) -> Iterator[None]:
        """Hand this thread's events to ``interceptor``."""
        before, self.interceptor = self.interceptor, interceptor
        with self._counting:
            Interceptors.active += 1
        try:
            yield
        finally:
            self.interceptor = before
            with self._counting:
                Interceptors.active -= 1


launches = Interceptors()
"""The launches of a thread, which an interceptor may take: its ``launched(launch)`` gets each instead of the GPU."""
