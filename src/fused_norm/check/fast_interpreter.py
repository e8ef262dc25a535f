"""Makes Triton's interpreter, which takes most of the time of commands and tests on a CPU, faster, with the same bits.

An operation of a kernel takes numpy microseconds, and the interpreter many times that for the types, shapes and names
of its operands. The same few types come back in every program of every grid, so everything that follows from them is
cached by the name of the element type and the shape.

The operands of an operation on two tensors get the shape of its result as their type alone: numpy itself broadcasts
their numbers.

To convert between bf16 and fp32 the interpreter decomposes numbers; shifting their bits gives the same numbers, unless
one of them is subnormal.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

_replaced: list[tuple[Any, str, Any, Any]] = []
"""The parts of the interpreter that were replaced: owner, name, the value before, and the value now."""


def speed_up() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Replace slow parts of the interpreter by faster ones for the rest of the process: for processes of ours alone.

    It is a no-op in a process that does not interpret kernels, and the second time. If a release of Triton has other
    parts, it stays as it is and is only slower.

    Returns:
        What makes a context in which the interpreter is Triton's own.
    """
    if _replaced or os.environ.get("TRITON_INTERPRET") != "1":
        return _as_triton_has_it
    import triton.language as tl
    from triton.language import core, semantic
    from triton.runtime import interpreter

    makers = {
        (interpreter, "_get_np_dtype"): _remembered_np_dtype,
        (core.block_type, "__init__"): _remembered_block,
        (core.tensor, "__init__"): _remembered_tensor,
        (semantic.TritonSemantic, "broadcast_impl_value"): _unless_of_one_shape,
        (semantic.TritonSemantic, "binary_op_type_checking_impl"): _operands_of_known_types,
        (core, "_unwrap_if_constexpr"): _unwrapped,
        (interpreter, "_convert_float"): _shifted,
        (interpreter, "_patch_builtin"): _remembered_patch,
    }
    if not all(name in vars(owner) for owner, name in makers) or not hasattr(tl, "math"):
        return _as_triton_has_it
    for (owner, name), make in makers.items():
        before = getattr(owner, name)
        now = make(before)
        _replaced.append((owner, name, before, now))
        setattr(owner, name, now)
    return _as_triton_has_it


@contextlib.contextmanager
def _as_triton_has_it() -> Iterator[None]:
    for owner, name, before, _ in _replaced:
        setattr(owner, name, before)
    try:
        yield
    finally:
        for owner, name, _, now in _replaced:
            setattr(owner, name, now)


def _remembered_np_dtype(np_dtype: Any) -> Any:
    from triton.language import core

    np_dtypes: dict[str, Any] = {}

    def remembered(dtype: Any) -> Any:
        name = dtype.element_ty.name if type(dtype) is core.block_type else dtype.name
        if name not in np_dtypes:
            np_dtypes[name] = np_dtype(dtype)
        return np_dtypes[name]

    return remembered


def _remembered_block(init: Any) -> Any:
    from triton.language import core

    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], Any] = {}

    def remembered(block: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if type(size) is core.constexpr else size for size in shape])
        key = (element_ty.name, *sizes)
        if key not in blocks:
            init(block, element_ty, shape)
            same_shape = shapes.setdefault(sizes, block.shape)
            blocks[key] = {"shape": same_shape, "numel": block.numel, "name": block.name}
        vars(block).update(blocks[key], element_ty=element_ty)

    return remembered


def _remembered_tensor(init: Any) -> Any:
    tensors: dict[str, dict[str, Any]] = {}

    def remembered(tensor: Any, handle: Any, dtype: Any) -> None:
        if dtype.name not in tensors:
            init(tensor, handle, dtype)
            tensors[dtype.name] = vars(tensor) | {"handle": None}
        vars(tensor).update(tensors[dtype.name], handle=handle, type=dtype)

    return remembered


def _unless_of_one_shape(broadcast: Any) -> Any:
    def broadcast_unless_of_one_shape(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return broadcast_unless_of_one_shape


def _operands_of_known_types(check_operands: Any) -> Any:
    """Give both operands of an operation the types that they had the last time, without broadcasting their numbers."""
    from triton.language import core

    known: dict[Any, tuple[Any, Any]] = {}

    def key_of(operand: Any) -> Any:
        return operand.type.name if type(operand) is core.tensor else (type(operand), operand)

    def as_type(self: Any, operand: Any, ty: Any) -> Any:
        if type(operand) is not core.tensor:
            operand = self.scalar_constant(operand, dtype=ty.scalar)
        elif operand.type.name == ty.name:
            return operand
        elif operand.type.scalar.name != ty.scalar.name:
            operand = self.cast(operand, ty.scalar)
        return core.tensor(operand.handle, ty)

    def operands(self: Any, lhs: Any, rhs: Any, *rules: Any, **named_rules: Any) -> tuple[Any, Any]:
        key = (key_of(lhs), key_of(rhs), *rules, *named_rules.items())
        types = known.get(key)
        if types is None:
            lhs, rhs = check_operands(self, lhs, rhs, *rules, **named_rules)
            known[key] = lhs.type, rhs.type
            return lhs, rhs
        return as_type(self, lhs, types[0]), as_type(self, rhs, types[1])

    return operands


def _unwrapped(unwrap: Any) -> Any:
    from triton.language import core

    def unwrapped(operand: Any) -> Any:
        kind = type(operand)
        if kind is core.tensor or kind is int or kind is float:
            return operand
        return operand.value if kind is core.constexpr else unwrap(operand)

    return unwrapped


def _shifted(convert: Any) -> Any:
    def shifted(numbers: Any, dtype: Any, to: Any, rounding: Any) -> Any:
        names, shifts = (dtype.name, to.name), rounding is None
        if shifts and names == ("fp32", "bf16") and not _has_subnormal(bits := numbers.view(np.uint32), 0x7F800000):
            return (bits >> 16).astype(np.uint16)
        if shifts and names == ("bf16", "fp32") and not _has_subnormal(numbers, 0x7F80):
            return numbers.astype(np.uint32) << 16
        return convert(numbers, dtype, to, rounding)

    return shifted


def _remembered_patch(_: Any) -> Any:
    """Replace the functions of Triton's language, which are looked up once, before anything replaces one of them."""
    import triton.language as tl
    from triton.language import core
    from triton.runtime import interpreter

    def called_in_a_kernel(member: Any) -> Any:
        function = getattr(member, "__wrapped__", member)  # without the check that it is called in a kernel

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **named)

        return call

    def functions_of(package: Any) -> list[tuple[str, Any, Any]]:
        members = [(name, member) for name, member in inspect.getmembers(package) if core.is_builtin(member)]
        return [(name, member, called_in_a_kernel(member)) for name, member in members]

    functions = {package: functions_of(package) for package in (tl, core, core.tensor, tl.math)}

    def patch(package: Any, _: Any, scope: Any) -> None:
        if package not in functions:
            functions[package] = functions_of(package)
        for name, member, replacement in functions[package]:
            if getattr(package, name) is member:
                scope.set_attr(package, name, replacement)

    return patch


def _has_subnormal(bits: Any, exponent: int) -> bool:
    """Return whether any of these numbers is subnormal."""
    return bool(((bits & exponent == 0) & (bits & (exponent | (exponent & -exponent) - 1) != 0)).any())
