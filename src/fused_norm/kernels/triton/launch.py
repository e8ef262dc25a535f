"""The one function by which every launcher launches kernels, and interceptors of launches."""

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


def launch(
    kernel: Any,
    grid: tuple[int, int],
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[float | None, ...],
    constants: dict[str, Any],
    *,
    warps: int,
    fuse: bool = True,
    overlaps: bool = False,
    registers: int | None = None,
) -> None:
    """Make a ``Launch`` on the tensors' device, or hand it to an interceptor.

    Nothing is remembered here: a recording (``kernels.recording``) remembers the launches of a whole call.

    ``fuse``: a product that is added to may become one multiply-add, which does not round the product. ``overlaps``:
    the kernel may begin before the previous launch has ended, and calls ``await_previous``. ``registers``: the most
    that a lane may have, if the device ``limits_registers``; None leaves it to the compiler.
    """
    options: dict[str, Any] = {"num_warps": warps, "enable_fp_fusion": fuse}  # newer Triton has another default
    if overlaps:
        options["launch_pdl"] = True
    if registers is not None:
        options["maxnreg"] = registers
    call = Launch(kernel, grid, tensors, numbers, constants, options)
    if launches.interceptor is None:
        call.run()
    else:
        launches.interceptor.launched(call)
