"""Records what an operator allocates and launches, as a program that can be replayed without Python.

While a recording is active on a thread, kernels are not launched, only noted. Allocations are noted by ``allocated``.
Whatever else happens to a tensor cannot be replayed: a tensor that was neither given, allocated nor declared a
constant, and one that something else wrote to, end the recording.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor


class NotRecordableError(Exception):
    """What happened cannot be replayed; the operator stays with Python for tensors like these."""


class Kernel(NamedTuple):
    """A compiled kernel as the driver launches it."""

    function: int
    """The driver's handle."""
    threads: int
    shared_bytes: int
    types: tuple[str, ...]
    """Triton's names for the types of all arguments; ``constexpr`` for those that were compiled in."""
    scratch: int
    """Null pointers that follow the arguments."""
    overlaps: bool = False
    """Whether it may begin before the launch in front of it has ended (programmatic dependent launch)."""


Program = tuple[Sequence[Any], ...]
"""Constants, allocations, launches, results and the slots of what is saved, as ``replay.cpp`` reads them."""

_FORMATS = {"i32": "<i", "u32": "<I", "i64": "<q", "u64": "<Q", "fp32": "<f"}


class Recording:
    """Tensors have slots: the inputs, then constants, then what is allocated."""

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        self._inputs = list(inputs)
        self._constants: list[Tensor] = []
        self._allocated: list[Tensor] = []
        self._clones: list[tuple[Tensor, Tensor]] = []
        self._launches: list[tuple[Kernel, tuple[int, int], tuple[Any, ...]]] = []

    def launch(self, kernel: Kernel, grid: tuple[int, int], arguments: tuple[Any, ...]) -> None:
        """Notes a launch; the arguments are those of Triton's launch without the compile-time constants."""
        self._launches.append((kernel, grid, arguments))

    def program(self, results: Sequence[Tensor | None], saved: Sequence[Tensor | None] = ()) -> Program:
        """What was recorded.

        Raises:
            NotRecordableError: where it makes use of a tensor of unknown origin.
        """
        if any(tensor._version for tensor in self._allocated):
            raise NotRecordableError("something other than a kernel wrote to a tensor")
        launched = [one for *_, arguments in self._launches for one in arguments if isinstance(one, Tensor)]
        sources = [source for _, source in self._clones]
        needed = {address_of(one) for one in (*launched, *sources, *results, *saved) if one is not None}
        allocated = [tensor for tensor in self._allocated if address_of(tensor) in needed]
        known = [*self._inputs, *self._constants, *allocated]
        slots: dict[int, int] = {}
        for slot, tensor in enumerate(known):
            if tensor is not None:
                slots.setdefault(address_of(tensor), slot)

        def slot_of(tensor: Tensor | None) -> int:
            if tensor is None:
                return -1
            slot = slots.get(address_of(tensor))
            if slot is None:
                raise NotRecordableError("a tensor is neither an input nor allocated for it")
            return slot

        def whole(tensor: Tensor | None) -> int:
            slot = slot_of(tensor)
            if tensor is not None and not _same_layout(tensor, known[slot]):
                raise NotRecordableError("a tensor is a view of another")
            return slot

        def result(tensor: Tensor | None) -> tuple[int, bool]:
            for clone, source in self._clones:
                if clone is tensor:
                    return whole(source), True
            for slot, given in enumerate(self._inputs):
                if given is tensor and tensor is not None:
                    return slot, False
            if tensor is not None and all(tensor is not one for one in self._allocated):
                raise NotRecordableError("a result is neither given nor allocated")
            return whole(tensor), False

        launches = [
            (
                kernel.function,
                *grid,
                kernel.threads,
                kernel.shared_bytes,
                kernel.overlaps,
                _parameters(kernel, arguments, slot_of),
            )
            for kernel, grid, arguments in self._launches
        ]
        allocations = [(tuple(t.shape), t.stride(), t.dtype) for t in allocated]
        return self._constants, allocations, launches, [result(t) for t in results], [whole(t) for t in saved]


class _Active(threading.local):
    recording: Recording | None = None


_active = _Active()


@contextmanager
def recording(inputs: Sequence[Tensor | None]) -> Iterator[Recording]:
    """Records this thread's launches and allocations."""
    before = _active.recording
    _active.recording = Recording(inputs)
    try:
        yield _active.recording
    finally:
        _active.recording = before


def active() -> Recording | None:
    """What records this thread, if it is recorded."""
    return _active.recording


def allocated(tensor: Tensor) -> Tensor:
    """``tensor``, just allocated and not yet written, noted where it is recorded."""
    if _active.recording is not None:
        _active.recording._allocated.append(tensor)
    return tensor


def constant(tensor: Tensor) -> Tensor:
    """``tensor``, which every run on this stream shares."""
    if _active.recording is not None:
        _active.recording._constants.append(tensor)
    return tensor


def lazy_clone(tensor: Tensor) -> Tensor:
    """A copy of ``tensor`` that is made when either of them is first written to."""
    clone = torch._lazy_clone(tensor)
    if _active.recording is not None:
        _active.recording._clones.append((clone, tensor))
    return clone


def address_of(tensor: Tensor) -> int:
    """Where the tensor's data are; asking must not make a real copy of a lazily cloned gradient."""
    base: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    return base + int(tensor.storage_offset()) * tensor.element_size()


def _parameters(kernel: Kernel, arguments: Sequence[Any], slot_of: Any) -> list[tuple[int, int]]:
    """A slot and nothing, or no slot and the bits of a value, for each parameter of the compiled kernel."""
    parameters = []
    for kind, argument in zip(kernel.types, arguments, strict=False):
        if kind == "constexpr":
            continue
        if kind.startswith("*") and isinstance(argument, Tensor):
            parameters.append((slot_of(argument), 0))
        elif kind in _FORMATS and isinstance(argument, (int, float)):
            packed = struct.pack(_FORMATS[kind], argument)
            parameters.append((-1, int.from_bytes(packed.ljust(8, b"\0"), "little", signed=True)))
        else:
            raise NotRecordableError(f"a kernel takes a {type(argument).__name__} as {kind}")
    if any(kind != "constexpr" for kind in kernel.types[len(arguments) :]):
        raise NotRecordableError("a kernel takes more than it was given")
    return parameters + [(-1, 0)] * kernel.scratch


def _same_layout(one: Tensor, other: Tensor | None) -> bool:
    return (
        other is not None and one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
    )
