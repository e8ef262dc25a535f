"""Records what an operator allocates and launches, as a program that can be replayed without Python.

While a recorder is active on a thread, kernels are not launched, only noted. Everything else that happens to a tensor
there is seen by the dispatcher: an allocation is noted, and anything but an allocation cannot be replayed.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..triton.devices import INTERPRETED
from ..triton.launch import Launch, launches
from ..triton.memory import INT32_LIMIT

_ALLOCATIONS = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
_WITHOUT_WORK = ("detach", "promote_types")
"""Operators that do nothing to memory; ``detach`` is how the dispatcher hands a tensor on."""
_INTEGERS = {"i32": "<i", "u32": "<I", "i64": "<q", "u64": "<Q"}
# The parameters of a kernel in PTX, and the bits of each.
_ENTRY = re.compile(r"\.entry\s+\w+\s*\(([^)]*)\)")
_PARAMETER = re.compile(r"\.param\s+\.[a-z](\d+)")

Program = tuple[Sequence[Any], ...]
"""Allocations, launches, the slots of results and of what is saved, as ``replay.cpp`` reads them."""


class NotRecordableError(Exception):
    """The call does something that cannot be replayed; the operator stays with Python for tensors like these."""


class DriverKernel(NamedTuple):
    """A compiled kernel as the driver launches it.

    Attributes:
        function: the driver's handle.
        threads: of a block.
        shared_bytes: of a block.
        types: Triton's names for the types of all arguments; ``constexpr`` for those that were compiled in.
        scratch: null pointers that follow the arguments.
        overlaps: whether it may begin before the launch in front of it has ended (programmatic dependent launch).
    """

    function: int
    threads: int
    shared_bytes: int
    types: tuple[str, ...]
    scratch: int
    overlaps: bool = False


class Recorder(TorchDispatchMode):
    """Notes the launches and allocations of its thread inside a ``with``.

    Tensors have slots: first the inputs, then what is allocated.
    """

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self._inputs = list(inputs)
        self._allocated: list[Tensor] = []
        self._launches: list[tuple[Launch, tuple[int, int], tuple[Any, ...], tuple[int, ...]]] = []
        self._observing = contextlib.ExitStack()

    def __enter__(self) -> Recorder:
        self._observing.enter_context(launches.by(self))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._observing.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__ if func.namespace == "aten" else None
        if name not in (*_ALLOCATIONS, *_WITHOUT_WORK):
            raise NotRecordableError(f"{func} is no allocation")
        made = func(*args, **(kwargs or {}))
        if name in _ALLOCATIONS:
            self._allocated.append(made)
        return made

    def launched(self, launch: Launch, grid: tuple[int, int], arguments: tuple[Any, ...], strides: Any) -> None:
        """Note a launch."""
        self._launches.append((launch, grid, arguments, strides))

    def program(self, results: Sequence[Tensor | None], saved: Sequence[Tensor | None] = ()) -> Program:
        """The program, once the recorder is not active any more.

        Raises:
            NotRecordableError: where it makes use of a tensor of unknown origin.
        """
        launched = [one for _, _, arguments, _ in self._launches for one in arguments if isinstance(one, Tensor)]
        needed = {one.data_ptr() for one in (*launched, *results, *saved) if one is not None}
        allocated = [tensor for tensor in self._allocated if tensor.data_ptr() in needed]
        known = [*self._inputs, *allocated]
        slots: dict[int, int] = {}
        for slot, tensor in enumerate(known):
            if tensor is not None:
                slots.setdefault(tensor.data_ptr(), slot)

        def slot_of(tensor: Tensor) -> int:
            slot = slots.get(tensor.data_ptr())
            if slot is None:
                raise NotRecordableError("a tensor is neither an input nor allocated for it")
            return slot

        def whole(tensor: Tensor | None) -> int:
            if tensor is None:
                return -1
            for slot, one in enumerate(known):
                if one is tensor:
                    return slot
            slot = slot_of(tensor)
            if not _same_layout(tensor, known[slot]):
                raise NotRecordableError("a tensor is a view of another")
            return slot

        programs = []
        for launch, grid, arguments, strides in self._launches:
            kernel = _kernel_of(launch, grid, arguments, strides)
            parameters = _parameters(kernel, arguments, slot_of)
            programs.append((kernel.function, *grid, kernel.threads, kernel.shared_bytes, kernel.overlaps, parameters))
        allocations = [(tuple(t.shape), t.stride(), t.dtype) for t in allocated]
        return allocations, programs, [whole(t) for t in results], [whole(t) for t in saved]


def _kernel_of(
    launch: Launch, grid: tuple[int, int], arguments: tuple[Any, ...], strides: tuple[int, ...]
) -> DriverKernel:
    """The kernel that a launch gets; the first one with these strides is launched as well, to have it compiled."""
    tensors = [one for one in arguments if isinstance(one, Tensor)]
    numbers = [one for one in arguments if isinstance(one, int)]
    if any(tensor.data_ptr() % 16 for tensor in tensors) or max(numbers, default=0) >= INT32_LIMIT:
        raise NotRecordableError(f"{launch.name} is compiled anew for tensors like these")
    if INTERPRETED or not tensors[0].is_cuda:
        raise NotRecordableError("nothing is compiled")
    return driver_kernel(launch.compiled(grid, arguments, strides))


def driver_kernel(compiled: Any) -> DriverKernel:
    """The kernel that the driver launches for one that Triton has compiled.

    Raises:
        NotRecordableError: where there is more to its launch than a grid and arguments.
    """
    metadata = compiled.metadata
    types = tuple(compiled.src.signature.values())
    passed = ["8" if t.startswith("*") or t.endswith("64") else "4" for t in types if t != "constexpr"]
    entry = _ENTRY.search(compiled.asm.get("ptx", ""))
    taken = [str(int(bits) // 8) for bits in _PARAMETER.findall(entry[1])] if entry else []
    scratch = len(taken) - len(passed)
    # Newer releases of Triton pass the addresses of scratch memory behind the arguments, null where there is none.
    if (
        metadata.num_ctas != 1
        or getattr(metadata, "global_scratch_size", 0)
        or getattr(metadata, "profile_scratch_size", 0)
        or getattr(metadata, "launch_cooperative_grid", False)
        or not 0 <= scratch <= 2
        or taken != passed + ["8"] * scratch
    ):
        raise NotRecordableError(f"{metadata.name} is launched in a way of its own")
    overlaps = bool(getattr(metadata, "launch_pdl", False))
    return DriverKernel(compiled.function, 32 * metadata.num_warps, metadata.shared, types, scratch, overlaps)


def _parameters(kernel: DriverKernel, arguments: Sequence[Any], slot_of: Any) -> list[tuple[int, int]]:
    """A slot and nothing, or no slot and the bits of a value, for each parameter of the compiled kernel."""
    parameters = []
    for kind, argument in zip(kernel.types, arguments, strict=False):
        if kind == "constexpr":
            continue
        if kind.startswith("*") and isinstance(argument, Tensor):
            parameters.append((slot_of(argument), 0))
        elif kind in _INTEGERS and isinstance(argument, int):
            parameters.append((-1, _word(struct.pack(_INTEGERS[kind], argument))))
        elif kind == "fp32" and isinstance(argument, (int, float)):
            # As C converts it, and Triton's own launch: to 0 or infinity where float32 ends.
            parameters.append((-1, _word(bytes(ctypes.c_float(argument)))))
        else:
            raise NotRecordableError(f"a kernel takes a {type(argument).__name__} as {kind}")
    if any(kind != "constexpr" for kind in kernel.types[len(arguments) :]):
        raise NotRecordableError("a kernel takes more than it was given")
    return parameters + [(-1, 0)] * kernel.scratch


def _word(packed: bytes) -> int:
    return int.from_bytes(packed.ljust(8, b"\0"), "little", signed=True)


def _same_layout(one: Tensor, other: Tensor | None) -> bool:
    return (
        other is not None and one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
    )
