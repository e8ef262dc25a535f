"""Launching kernels: what Triton works out at every launch is worked out once per kernel and shape."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from triton import knobs

from ..observation import Observation
from .devices import INTERPRETED, on
from .interpreter import Turn
from .memory import INT32_LIMIT

_turn: AbstractContextManager[object] = Turn() if INTERPRETED else nullcontext()

_PREPARED_LIMIT = 4096
"""Sets of strides that a kernel remembers; a program that goes through more of them starts anew."""


class LaunchObserver(Protocol):
    """Is told of every launch of its thread instead of the GPU."""

    def launched(self, launch: Launch, grid: tuple[int, int], arguments: tuple[Any, ...], strides: Any) -> None:
        """Take note of a launch; ``arguments`` are the kernel's without its compile-time constants."""


launches = Observation()
"""The launches of a thread, which a ``LaunchObserver`` may take."""


class Launch:
    """One kernel with its compile-time constants fixed.

    Triton's own launch binds every argument and works out its specialisation anew each time. Here that happens once for
    each device and set of strides; later launches whose pointers are all aligned to 16 bytes, as Triton then assumed,
    go straight to the compiled kernel. All others, and all while a launch hook is set, take Triton's own way.
    """

    __slots__ = ("_constants", "_kernel", "_prepared", "_values", "options")

    def __init__(
        self, kernel: Any, warps: int, constants: dict[str, Any], *, fuse: bool = True, overlaps: bool = False
    ) -> None:
        """``fuse``: a product that is added to may become one multiply-add, which does not round the product.

        ``overlaps``: the kernel may begin before the launch in front of it has ended, and waits for it itself
        (``await_previous``).
        """
        self._kernel = kernel
        self.options: dict[str, int] = {"num_warps": warps}
        if not fuse:
            self.options["enable_fp_fusion"] = False
        if overlaps:
            self.options["launch_pdl"] = True
        self._constants = constants
        self._values = tuple(constants.values())
        self._prepared: dict[Any, tuple[Any, Any, Any, Any]] = {}

    @property
    def name(self) -> str:
        """The kernel's."""
        return self._kernel.__name__

    def __call__(
        self,
        grid: tuple[int, int],
        tensors: tuple[Tensor | None, ...],
        counts: tuple[int, ...],
        strides: tuple[int, ...] = (),
        floats: tuple[float | None, ...] = (),
    ) -> None:
        """Launch ``kernel[grid](*tensors, *counts, *strides, *floats, **constants)`` on the tensors' device.

        A tensor must have the dtype, and it or a float be present or None, as on the first call; the first tensor is
        always present. The kernel does not specialise on ``counts``, 32 bits each: they may change freely.
        """
        lead = tensors[0]
        assert lead is not None
        if launches.observer is not None:
            launches.observer.launched(self, grid, (*tensors, *counts, *strides, *floats), strides)
            return
        if not INTERPRETED and lead.is_cuda and counts[0] < INT32_LIMIT:
            addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
            joint = 0
            for address in addresses:
                if address:
                    joint |= address
            if not joint & 15:
                index = lead.get_device()
                prepared = self._prepared.get((index, strides))
                if prepared is None:
                    self._prepare(index, grid, (*tensors, *counts, *strides, *floats), strides)
                    return
                if index == torch._C._cuda_getDevice() and not _hooked():
                    run, function, metadata, _ = prepared
                    stream = torch._C._cuda_getCurrentRawStream(index)
                    run(
                        grid[0], grid[1], 1, stream, function, metadata, None, None, None,
                        *addresses, *counts, *strides, *floats, *self._values,
                    )  # fmt: skip
                    return
        self._launch(grid, (*tensors, *counts, *strides, *floats))

    def compiled(self, grid: tuple[int, int], arguments: tuple[Any, ...], strides: tuple[int, ...]) -> Any:
        """The compiled kernel that CUDA tensors aligned to 16 bytes get; the first such call launches it as well."""
        index = arguments[0].get_device()
        if (index, strides) not in self._prepared:
            self._prepare(index, grid, arguments, strides)
        return self._prepared[index, strides][3]

    def _prepare(self, index: int, grid: tuple[int, int], arguments: tuple[Any, ...], strides: Any) -> None:
        compiled = self._launch(grid, arguments)
        if len(self._prepared) >= _PREPARED_LIMIT:
            self._prepared.clear()
        self._prepared[index, strides] = compiled.run, compiled.function, compiled.packed_metadata, compiled

    def _launch(self, grid: tuple[int, int], arguments: tuple[Any, ...]) -> Any:
        with _turn, on(arguments[0].device):
            return self._kernel[grid](*arguments, **self.options, **self._constants)


def _hooked() -> bool:
    """Return whether somebody (a profiler) wants to see every launch."""
    for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False
