"""The native library on a CPU: its launches come back to Triton's interpreter.

The library launches by calling the driver. Here a function of ours stands for the driver's: it reads the parameters from
memory as a GPU would, makes tensors of the addresses, and runs the kernel on them. All else is as on a GPU.
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

from fused_norm.kernels import add_rms_norm, norm_add, norm_add_norm, qk_norm, rms_norm  # noqa: F401
from fused_norm.kernels.launch import Launch
from fused_norm.kernels.native.library import Unavailable, load
from fused_norm.kernels.native.operation import Operation
from fused_norm.kernels.native.recording import Kernel

_launched: list[tuple[Launch, tuple[Any, ...], tuple[int, int, int]]] = []
"""What the handles of kernels stand for: the launch, its arguments, and how many are tensors, counts and strides."""

hooks: list[Any] = []
"""Stands for the list of those who want to see every launch."""


def _kernel_for(self: Launch, grid: Any, tensors: Any, counts: Any, strides: Any, floats: Any) -> Kernel:
    arguments = (*tensors, *counts, *strides, *floats)
    types = tuple(
        "constexpr" if one is None else "*" if isinstance(one, Tensor) else "i64" if isinstance(one, int) else "fp32"
        for one in arguments
    )
    _launched.append((self, arguments, (len(tensors), len(counts), len(strides))))
    return Kernel(len(_launched), 32, 0, types, 2)


def _tensor_at(address: int, like: Tensor) -> Tensor:
    extent = 1 + sum((n - 1) * step for n, step in zip(like.shape, like.stride(), strict=True))
    size = extent * like.element_size()
    memory = (ctypes.c_byte * size).from_address(address)
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=size).view(like.dtype)
    return flat.as_strided(like.shape, like.stride())


def _launch(
    handle: int, grid_x: int, grid_y: int, grid_z: int, block: int, _y: int, _z: int, _shared: int, _stream: int,
    parameters: Any, _extra: Any,
) -> int:  # fmt: skip
    launch, arguments, (tensors, counts, strides) = _launched[handle - 1]
    given: list[Any] = []
    passed = 0
    for like in arguments:
        if like is None:
            given.append(None)
            continue
        kind = ctypes.c_float if isinstance(like, float) else ctypes.c_int64
        value = ctypes.cast(parameters[passed], ctypes.POINTER(kind))[0]
        passed += 1
        given.append(_tensor_at(value, like) if isinstance(like, Tensor) else value)
    scratch = [ctypes.cast(parameters[passed + i], ctypes.POINTER(ctypes.c_int64))[0] for i in range(2)]
    assert (grid_z, block, scratch) == (1, 32, [0, 0])
    parts = given[:tensors], given[tensors : tensors + counts], given[tensors + counts : tensors + counts + strides]
    launch._launch((grid_x, grid_y), *map(tuple, parts), tuple(given[tensors + counts + strides :]))
    return 0


def _succeed(*_: Any) -> int:
    return 0


_POINTER = ctypes.c_void_p
_UNSIGNED = ctypes.c_uint
_FUNCTIONS = (
    ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, _POINTER)(_succeed),
    ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _POINTER)(_succeed),
    ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_POINTER))(lambda context: context.__setitem__(0, 1) or 0),
    ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, ctypes.c_int)(_succeed),
    ctypes.CFUNCTYPE(ctypes.c_int, _POINTER)(_succeed),
    ctypes.CFUNCTYPE(
        ctypes.c_int, _POINTER, *[_UNSIGNED] * 7, _POINTER, ctypes.POINTER(_POINTER), ctypes.POINTER(_POINTER)
    )(_launch),
)
"""Kept here as long as the library may call them."""

OPERATIONS: tuple[Operation, ...] = tuple(
    vars(module)["_native"]
    for module in map(
        __import__("importlib").import_module,
        [f"fused_norm.kernels.{name}" for name in ("rms_norm", "add_rms_norm", "norm_add", "norm_add_norm", "qk_norm")],
    )
)


def _library() -> ModuleType:
    try:
        return load()
    except Unavailable as reason:
        pytest.skip(f"no native library: {reason}")


@contextmanager
def native_on_cpu() -> Iterator[dict[str, Any]]:
    """Operators are native inside; yields the native half of each, by name."""
    library = _library()
    addresses = [ctypes.cast(function, _POINTER).value for function in _FUNCTIONS]
    library.connect(*addresses, (hooks,), True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "_kernel_for", _kernel_for)
        for operation in OPERATIONS:
            patch.setattr(operation, "call", operation.call)
            operation.connect(library)
        yield {operation.name: operation.call for operation in OPERATIONS}
