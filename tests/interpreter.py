"""Makes Triton's interpreter, which takes most of the tests' time, three times as fast, with the same bits.

An operation of a kernel takes numpy microseconds, and the interpreter many times that for the types, shapes and names
of its operands. The same few types come back in every program of every grid, so everything that follows from them is
cached by the name of the element type and the shape.

The operands of an operation on two tensors get the shape of its result as their type alone: numpy itself broadcasts
their numbers.

To convert between bf16 and fp32 the interpreter decomposes numbers; shifting their bits gives the same numbers, unless
one of them is subnormal.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np


def speed_up() -> None:
    """Replace slow parts of the interpreter by faster ones for the rest of the process.

    If a release of Triton has other parts, it stays as it is and is only slower.
    """
    import triton.language as tl
    from triton.language import core, semantic
    from triton.runtime import interpreter

    parts = (
        (interpreter, "_get_np_dtype"),
        (core.block_type, "__init__"),
        (core.tensor, "__init__"),
        (semantic.TritonSemantic, "broadcast_impl_value"),
        (interpreter, "_convert_float"),
        (semantic.TritonSemantic, "binary_op_type_checking_impl"),
        (interpreter, "_patch_builtin"),
        (core, "_unwrap_if_constexpr"),
        (interpreter.TensorHandle, "__init__"),
        (interpreter.InterpreterBuilder, "create_expand_dims"),
    )
    if not all(name in vars(owner) for owner, name in parts):
        return
    np_dtype, init_block, init_tensor, broadcast, convert, check_operands, _, unwrap, *_ = (
        getattr(owner, name) for owner, name in parts
    )
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

    def operands_of_known_types(self: Any, lhs: Any, rhs: Any, *rules: Any, **named_rules: Any) -> tuple[Any, Any]:
        key = (_key(lhs), _key(rhs), *rules, *named_rules.items())
        types = operand_types.get(key)
        if types is None:
            lhs, rhs = check_operands(self, lhs, rhs, *rules, **named_rules)
            operand_types[key] = lhs.type, rhs.type
            return lhs, rhs
        return _operand(self, lhs, types[0]), _operand(self, rhs, types[1])

    operand_types: dict[Any, tuple[Any, Any]] = {}

    def _key(operand: Any) -> Any:
        return operand.type.name if type(operand) is core.tensor else (type(operand), operand)

    def _operand(self: Any, operand: Any, ty: Any) -> Any:
        if type(operand) is not core.tensor:
            operand = self.scalar_constant(operand, dtype=ty.scalar)
        elif operand.type.name == ty.name:
            return operand
        elif operand.type.scalar.name != ty.scalar.name:
            operand = self.cast(operand, ty.scalar)
        return core.tensor(operand.handle, ty)

    def called_by_the_interpreter(member: Any) -> Any:
        function = getattr(member, "__wrapped__", member)  # without the check that it is called in a kernel

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **named)

        return call

    def built_ins_of(package: Any) -> list[tuple[str, Any, Any]]:
        members = [(name, member) for name, member in inspect.getmembers(package) if core.is_builtin(member)]
        return [(name, member, called_by_the_interpreter(member)) for name, member in members]

    # Looked up now, before a test replaces any of them.
    built_ins = {package: built_ins_of(package) for package in (tl, core, core.tensor, tl.math)}

    def remembered_patch(package: Any, builder: Any, scope: Any) -> None:
        if package not in built_ins:
            built_ins[package] = built_ins_of(package)
        for name, member, replacement in built_ins[package]:
            if getattr(package, name) is member:
                scope.set_attr(package, name, replacement)

    def unwrapped(operand: Any) -> Any:
        kind = type(operand)
        if kind is core.tensor or kind is int or kind is float:
            return operand
        return operand.value if kind is core.constexpr else unwrap(operand)

    def init_handle(handle: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        handle.data, handle.dtype, handle.attr = data, dtype, {} if attr is None else attr

    def expand_dims(builder: Any, handle: Any, axis: int) -> Any:
        return interpreter.TensorHandle(handle.data[(slice(None),) * axis + (None,)], handle.dtype.scalar)

    replacements = (
        remembered_np_dtype, remembered_block, remembered_tensor, remembered_broadcast, shifted,
        operands_of_known_types, remembered_patch, unwrapped, init_handle, expand_dims,
    )  # fmt: skip
    for (owner, name), replacement in zip(parts, replacements, strict=True):
        setattr(owner, name, replacement)


def _has_subnormal(bits: Any, exponent: int) -> bool:
    """Return whether any of these numbers is subnormal."""
    return bool(((bits & exponent == 0) & (bits & (exponent | (exponent & -exponent) - 1) != 0)).any())
