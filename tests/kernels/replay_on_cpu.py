"""The native library on a CPU: its launches come back to Triton's interpreter.

The library launches by calling the driver. Here a function of ours stands for the driver's: it reads the parameters
from memory as a GPU would, makes tensors of the addresses, and runs the kernel on them. All else is as on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from triton import knobs

from fused_norm.kernels.replay import recorder
from fused_norm.kernels.replay.recorder import DriverKernel, NotRecordableError
from fused_norm.kernels.triton.launch import Launch

_launched: list[tuple[Launch, tuple[Any, ...]]] = []
"""What the handles of kernels stand for: the launch and its arguments."""

_check_and_compile = recorder._kernel_of


def _kernel_of(launch: Launch, grid: Any, arguments: tuple[Any, ...], strides: Any) -> DriverKernel:
    try:
        _check_and_compile(launch, grid, arguments, strides)
    except NotRecordableError as reason:
        if str(reason) != "nothing is compiled":
            raise
    types = tuple(
        "constexpr" if one is None else "*" if isinstance(one, Tensor) else "i64" if isinstance(one, int) else "fp32"
        for one in arguments
    )
    kept = tuple(one.detach().to("meta") if isinstance(one, Tensor) else one for one in arguments)
    _launched.append((launch, kept))
    return DriverKernel(len(_launched), 32, 0, types, 2)


def _bytes_of(like: Tensor) -> int:
    extent = 1 + sum((n - 1) * step for n, step in zip(like.shape, like.stride(), strict=True))
    return extent * like.element_size()


class _Config(ctypes.Structure):
    """What the driver's launch takes, see cuLaunchKernelEx."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


def _launch(config: Any, handle: int, parameters: Any, _extra: Any) -> int:
    launch, arguments = _launched[handle - 1]
    values: list[Any] = []
    sizes: dict[int, int] = {}
    for like in (one for one in arguments if one is not None):
        kind = ctypes.c_float if isinstance(like, float) else ctypes.c_int64
        values.append(ctypes.cast(parameters[len(values)], ctypes.POINTER(kind))[0])
        if isinstance(like, Tensor):
            sizes[values[-1]] = max(_bytes_of(like), sizes.get(values[-1], 0))
    passed = len(values)
    memory = {
        address: torch.frombuffer((ctypes.c_byte * size).from_address(address), dtype=torch.uint8, count=size)
        for address, size in sizes.items()
    }

    def tensor_at(address: int, like: Tensor) -> Tensor:
        return memory[address][: _bytes_of(like)].view(like.dtype).as_strided(like.shape, like.stride())

    rest = iter(values)
    given = [
        None if like is None else tensor_at(next(rest), like) if isinstance(like, Tensor) else next(rest)
        for like in arguments
    ]
    scratch = [ctypes.cast(parameters[passed + i], ctypes.POINTER(ctypes.c_int64))[0] for i in range(2)]
    (grid_x, grid_y, grid_z), block = config[0].grid, tuple(config[0].block)
    assert (grid_z, block, config[0].attribute_count, scratch) == (1, (32, 1, 1), 0, [0, 0])
    launch((grid_x, grid_y), tuple(given), ())
    return 0


def _succeed(*_: Any) -> int:
    return 0


_POINTER = ctypes.c_void_p
_FUNCTIONS = (
    ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, _POINTER)(_succeed),
    ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _POINTER)(_succeed),
    ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_POINTER))(lambda context: context.__setitem__(0, 1) or 0),
    ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, ctypes.c_int)(_succeed),
    ctypes.CFUNCTYPE(ctypes.c_int, _POINTER)(_succeed),
    ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.POINTER(_Config), _POINTER, ctypes.POINTER(_POINTER), ctypes.POINTER(_POINTER)
    )(_launch),
)
"""Kept here as long as the library may call them."""


@contextmanager
def connected(library: ModuleType, own_allocator: bool = True) -> Iterator[None]:
    """The library launches on the CPU inside; the allocator may be one that PyTorch was given."""
    addresses = [ctypes.cast(function, _POINTER).value for function in _FUNCTIONS]
    library.connect(*addresses, knobs.runtime, own_allocator, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "_kernel_of", _kernel_of)
        yield
    _launched.clear()
