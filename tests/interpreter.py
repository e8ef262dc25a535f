"""Makes Triton's interpreter, which takes most of the tests' time, twice as fast, with the same bits.

An operation of a kernel takes numpy microseconds, and the interpreter many times that for the types, shapes and names
of its operands. The same few types come back in every program of every grid, so everything that follows from them is
cached by the name of the element type and the shape.

To convert between bf16 and fp32 the interpreter decomposes numbers; shifting their bits gives the same numbers, unless
one of them is subnormal.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def speed_up() -> None:
    """Replace slow parts of the interpreter by faster ones for the rest of the process.

    If a release of Triton has other parts, it stays as it is and is only slower.
    """
    from triton.language import core, semantic
    from triton.runtime import interpreter

    parts = (
        (interpreter, "_get_np_dtype"),
        (core.block_type, "__init__"),
        (core.tensor, "__init__"),
        (semantic.TritonSemantic, "broadcast_impl_value"),
        (interpreter, "_convert_float"),
    )
    if not all(name in vars(owner) for owner, name in parts):
        return
    np_dtype, init_block, init_tensor, broadcast, convert = (getattr(owner, name) for owner, name in parts)
    np_dtypes: dict[str, Any] = {}
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    block_shapes: dict[tuple[int, ...], Any] = {}
    tensors: dict[str, dict[str, Any]] = {}

    def remembered_np_dtype(dtype: Any) -> Any:
        name = dtype.element_ty.name if type(dtype) is core.block_type else dtype.name
        if name not in np_dtypes:
            np_dtypes[name] = np_dtype(dtype)
        return np_dtypes[name]

    def remembered_block(block: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if type(size) is core.constexpr else size for size in shape])
        key = (element_ty.name, *sizes)
        if key not in blocks:
            init_block(block, element_ty, shape)
            same_shape = block_shapes.setdefault(sizes, block.shape)
            blocks[key] = {"shape": same_shape, "numel": block.numel, "name": block.name}
        vars(block).update(blocks[key], element_ty=element_ty)

    def remembered_tensor(tensor: Any, handle: Any, dtype: Any) -> None:
        if dtype.name not in tensors:
            init_tensor(tensor, handle, dtype)
            tensors[dtype.name] = vars(tensor) | {"handle": None}
        vars(tensor).update(tensors[dtype.name], handle=handle, type=dtype)

    def remembered_broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def shifted(numbers: Any, dtype: Any, to: Any, rounding: Any) -> Any:
        names, shifts = (dtype.name, to.name), rounding is None
        if shifts and names == ("fp32", "bf16") and not _has_subnormal(bits := numbers.view(np.uint32), 0x7F800000):
            return (bits >> 16).astype(np.uint16)
        if shifts and names == ("bf16", "fp32") and not _has_subnormal(numbers, 0x7F80):
            return numbers.astype(np.uint32) << 16
        return convert(numbers, dtype, to, rounding)

    replacements = (remembered_np_dtype, remembered_block, remembered_tensor, remembered_broadcast, shifted)
    for (owner, name), replacement in zip(parts, replacements, strict=True):
        setattr(owner, name, replacement)


def _has_subnormal(bits: Any, exponent: int) -> bool:
    """Return whether any of these numbers is subnormal."""
    return bool(((bits & exponent == 0) & (bits & (exponent | (exponent & -exponent) - 1) != 0)).any())
