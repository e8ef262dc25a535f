"""Launching kernels: what Triton works out at every launch is worked out once per kernel and shape."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs

from .native.recording import Kernel, NotRecordableError, Recording, active, address_of

INTERPRETED: bool = bool(knobs.runtime.interpret)
"""Whether Triton interprets kernels on the CPU: TRITON_INTERPRET=1 was set before this import."""

INT32_LIMIT = 2**31
# The parameters of a kernel in PTX, and the bits of each.
_ENTRY = re.compile(r"\.entry\s+\w+\s*\(([^)]*)\)")
_PARAMETER = re.compile(r"\.param\s+\.[a-z](\d+)")
_PREPARED_LIMIT = 4096
"""Sets of strides that a kernel remembers; a program that goes through more of them starts anew."""


class Launch:
    """One kernel with its compile-time constants fixed.

    Triton's own launch binds every argument and works out its specialisation anew each time. Here that happens once for
    each device and set of strides; later launches whose pointers are all aligned to 16 bytes, as Triton then assumed,
    go straight to the compiled kernel. All others, and all while a launch hook is set, take Triton's own way.
    """

    __slots__ = ("_constants", "_kernel", "_lazy", "_options", "_prepared", "_values")

    def __init__(
        self,
        kernel: Any,
        warps: int,
        constants: dict[str, Any],
        lazy: int = 0,
        *,
        fuse: bool = True,
        overlaps: bool = False,
        **options: int,
    ) -> None:
        """``lazy``: how many of the tensors, the first ones, are only read and may be lazily cloned gradients.

        ``fuse``: a product that is added to may become one multiply-add, which does not round the product.
        ``overlaps``: the kernel may begin before the launch in front of it has ended, and waits for it itself
        (``await_previous``). ``options``: further ones of Triton's.
        """
        self._kernel = kernel
        self._options: dict[str, int] = {"num_warps": warps, **options}
        if not fuse:
            self._options["enable_fp_fusion"] = False
        if overlaps:
            self._options["launch_pdl"] = True
        self._lazy = lazy
        self._constants = constants
        self._values = tuple(constants.values())
        self._prepared: dict[Any, tuple[Any, Any, Any, Kernel | None]] = {}

    @property
    def name(self) -> str:
        """The kernel's."""
        return self._kernel.__name__

    def __call__(
        self,
        grid: tuple[int, int],
        tensors: tuple[Tensor | None, ...],
        rows: int,
        strides: tuple[int, ...] = (),
        floats: tuple[float | None, ...] = (),
        counts: tuple[int, ...] = (),
    ) -> None:
        """Launches ``kernel[grid](*tensors, rows, *counts, *strides, *floats, **constants)`` on the tensors' device.

        A tensor must have the dtype, and it or a float be present or None, as on the first call; the first tensor is
        always present. The kernel does not specialise on ``rows`` and ``counts``, 32 bits each: they may change freely.
        """
        lead = tensors[0]
        assert lead is not None
        recording = active()
        if recording is not None:
            self._record(recording, grid, tensors, (rows, *counts), strides, floats)
            return
        if not INTERPRETED and lead.is_cuda and rows < INT32_LIMIT:
            lazy = self._lazy
            addresses = [None if tensor is None else address_of(tensor) for tensor in tensors[:lazy]]
            addresses += [None if tensor is None else tensor.data_ptr() for tensor in tensors[lazy:]]
            joint = 0
            for address in addresses:
                if address:
                    joint |= address
            if not joint & 15:
                index = lead.get_device()
                prepared = self._prepared.get((index, strides))
                if prepared is None:
                    self._prepare(index, grid, tensors, (rows, *counts), strides, floats)
                    return
                if index == torch._C._cuda_getDevice() and not _hooked():
                    run, function, metadata, _ = prepared
                    stream = torch._C._cuda_getCurrentRawStream(index)
                    run(
                        grid[0], grid[1], 1, stream, function, metadata, None, None, None,
                        *addresses, rows, *counts, *strides, *floats, *self._values,
                    )  # fmt: skip
                    return
        self._launch(grid, tensors, (rows, *counts), strides, floats)

    def compiled(
        self,
        device: torch.device,
        dtypes: tuple[torch.dtype | None, ...],
        strides: tuple[int, ...],
        floats: tuple[float | None, ...],
    ) -> Any:
        """The kernel that aligned tensors of these dtypes get, loaded on a GPU but not launched."""
        with on(device):
            found = self._kernel.warmup(*dtypes, 1, *strides, *floats, grid=(1,), **self._options, **self._constants)
            found.run  # noqa: B018 - Triton loads it here
        return found

    def _prepare(self, index: int, grid: Any, tensors: Any, counts: Any, strides: Any, floats: Any) -> None:
        compiled = self._launch(grid, tensors, counts, strides, floats)
        if len(self._prepared) >= _PREPARED_LIMIT:
            self._prepared.clear()
        kernel = _kernel_of(compiled)
        self._prepared[index, strides] = _runner(compiled), compiled.function, compiled.packed_metadata, kernel

    def _record(self, recording: Recording, grid: Any, tensors: Any, counts: Any, strides: Any, floats: Any) -> None:
        """Notes a launch instead of making it; the first one with these strides is made as well, to have a kernel."""
        aligned = all(tensor is None or address_of(tensor) % 16 == 0 for tensor in tensors)
        if not aligned or counts[0] >= INT32_LIMIT:
            raise NotRecordableError(f"{self.name} is compiled anew for tensors like these")
        recording.launch(
            self._kernel_for(grid, tensors, counts, strides, floats), grid, (*tensors, *counts, *strides, *floats)
        )

    def _kernel_for(self, grid: Any, tensors: Any, counts: Any, strides: Any, floats: Any) -> Kernel:
        """The compiled kernel that tensors aligned to 16 bytes get."""
        lead = tensors[0]
        if INTERPRETED or not lead.is_cuda:
            raise NotRecordableError("nothing is compiled")
        index = lead.get_device()
        if (index, strides) not in self._prepared:
            self._prepare(index, grid, tensors, counts, strides, floats)
        kernel = self._prepared[index, strides][3]
        if kernel is None:
            raise NotRecordableError(f"{self.name} is launched in a way of its own")
        return kernel

    def _launch(self, grid: Any, tensors: Any, counts: Any, strides: Any, floats: Any) -> Any:
        with on(tensors[0].device):
            return self._kernel[grid](*tensors, *counts, *strides, *floats, **self._options, **self._constants)


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes ``device`` current for a launch, where it is not already (Triton launches on the current device)."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    module = torch.get_device_module(device)
    if device.index is None or module.current_device() == device.index:
        return contextlib.nullcontext()
    return module.device(device)


def _kernel_of(compiled: Any) -> Kernel | None:
    """How the driver launches a compiled kernel; None where there is more to it than a grid and arguments."""
    metadata = compiled.metadata
    if (
        metadata.num_ctas != 1
        or getattr(metadata, "global_scratch_size", 0)
        or getattr(metadata, "profile_scratch_size", 0)
        or getattr(metadata, "launch_cooperative_grid", False)
    ):
        return None
    types = tuple(compiled.src.signature.values())
    passed = ["8" if t.startswith("*") or t.endswith("64") else "4" for t in types if t != "constexpr"]
    entry = _ENTRY.search(compiled.asm.get("ptx", ""))
    if entry is None:
        return None
    taken = [str(int(bits) // 8) for bits in _PARAMETER.findall(entry[1])]
    scratch = len(taken) - len(passed)
    # Newer releases of Triton pass the addresses of scratch memory behind the arguments, null where there is none.
    if not 0 <= scratch <= 2 or taken != passed + ["8"] * scratch:
        return None
    overlaps = bool(getattr(metadata, "launch_pdl", False))
    return Kernel(compiled.function, 32 * metadata.num_warps, metadata.shared, types, scratch, overlaps)


def _runner(compiled: Any) -> Any:
    """What launches a compiled kernel; for the Triton whose launcher is known, without the Python inside it."""
    launcher = compiled.run
    if not triton.__version__.startswith("3.6.") or type(launcher).__name__ != "CudaLauncher":
        return launcher
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return launcher
    launch, cooperative, pdl = launcher.launch, launcher.launch_cooperative_grid, launcher.launch_pdl

    def run(x: int, y: int, z: int, stream: int, function: int, *arguments: Any) -> None:
        launch(x, y, z, stream, function, cooperative, pdl, None, None, *arguments)

    return run


def _hooked() -> bool:
    """Whether somebody (a profiler) wants to see every launch."""
    for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False
