"""The operations on a head's logits that need no values: selections of rows, casts, scale, cap and temperature.

Lazy logits remember them, to do them later. ``transformation_by`` and ``rows_by`` say what a fused operator is to do of
the logits of which rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

plain_functions = torch._C.DisableTorchFunctionSubclass
"""The context in which functions see a lazy tensor as the empty tensor that it is to C++."""

_VIEWS = frozenset({"view", "reshape", "flatten", "squeeze", "unsqueeze"})

_PIECES = frozenset({"unbind", "split", "chunk"})

_WRITES = {"div_": "div", "true_divide_": "div", "mul_": "mul", "multiply_": "mul"}
"""Functions that write a multiple of logits into them, and the step that does it to a copy."""

OF_ROWS = frozenset({"rows", "view", "copy", "same"})
"""The steps that change no number."""


class Step(NamedTuple):
    """An operation that makes lazy logits of others.

    Attributes:
        name: ``float``, ``mul``, ``div``, ``tanh``, ``detach``, ``rows`` for a selection of rows, ``view`` for another
            shape in which they stay rows, ``copy``, ``same`` for nothing; or what ``lazy_log_probs.py`` makes of them.
        run: does it to a tensor.
        number: what is multiplied with, or divided by.
        shape: of what it makes, once it is taken.
        piece: which of how many pieces along the first dimension, that are all.
        chosen: by which numbers are selected.
    """

    name: str
    run: Callable[[Tensor], Tensor]
    number: float = 1.0
    shape: torch.Size = torch.Size()
    piece: tuple[int, int] | None = None
    chosen: Tensor | None = None


def is_of_pytorch(func: Any) -> bool:
    """Return whether a function is PyTorch's, whose name tells what it does; others have operators of such names."""
    if isinstance(func, OpOverload | OpOverloadPacket):
        return str(func).startswith("aten.")
    return not isinstance(func, FunctionType) or func.__code__.co_filename.startswith(torch.__path__[0])


def step_of(lazy: Tensor, name: str, func: Any, args: Any, kwargs: Any) -> Step | None:
    """Return the step that a function of lazy logits takes; None for a function that needs their values."""
    if not is_of_pytorch(func):
        return None
    if name in ("float", "to", "detach", "contiguous"):
        return _cast_of(lazy, name, args, kwargs)
    if name in ("mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__", "true_divide") and not kwargs:
        if len(args) != 1 or type(args[0]) not in (int, float) or args[0] == 0:
            return None
        return _multiple("mul" if "mul" in name else "div", args[0])
    if name == "tanh" and not args and not kwargs:
        return Step("tanh", torch.tanh)
    if name in _VIEWS:  # another shape in which rows stay rows
        step = Step("view", lambda x: func(x, *args, **kwargs))
        try:
            with plain_functions(), torch.no_grad():
                like = step.run(torch.empty_strided(lazy.shape, lazy.stride(), dtype=lazy.dtype, device="meta"))
        except (RuntimeError, TypeError, ValueError):
            return None  # the real function raises the real error
        return step if like.dim() and like.shape[-1] == lazy.shape[-1] and like.dtype == lazy.dtype else None
    if name == "__getitem__" and len(args) == 1:
        return _rows_of(lazy, args[0])
    return None


def _multiple(name: str, number: float) -> Step:
    return Step("mul", lambda x: x * number, number) if name == "mul" else Step("div", lambda x: x / number, number)


def write_of(name: str, func: Any, args: Any, kwargs: Any) -> Step | None:
    """Return the step that a function does to logits in place; None for another function."""
    if name not in _WRITES or kwargs or not is_of_pytorch(func) or len(args) != 1:
        return None
    (number,) = args
    return _multiple(_WRITES[name], number) if type(number) in (int, float) and number != 0 else None


def pieces_of(lazy: Tensor, name: str, func: Any, args: Any, kwargs: Any) -> list[Step] | None:
    """Return the selections of rows that a function cuts logits into; None for another function."""
    if name not in _PIECES or not is_of_pytorch(func):
        return None
    try:
        with plain_functions(), torch.no_grad():
            likes = func(
                torch.empty_strided(lazy.shape, lazy.stride(), dtype=lazy.dtype, device="meta"), *args, **kwargs
            )
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None  # the real function raises the real error
    has_rows = lazy.dim() > 1 and all(like.dim() and like.shape[-1] == lazy.shape[-1] for like in likes)
    dimension = kwargs.get("dim", args[-1] if args and name == "unbind" else args[1] if len(args) > 1 else 0)
    if not has_rows or type(dimension) is not int or dimension % lazy.dim() == lazy.dim() - 1:
        return None

    def piece(index: int) -> Step:
        whole = (index, len(likes)) if name == "unbind" and dimension % lazy.dim() == 0 else None
        return Step("rows", lambda x: func(x, *args, **kwargs)[index], piece=whole)

    return [piece(index) for index in range(len(likes))]


def _cast_of(lazy: Tensor, name: str, args: Any, kwargs: Any) -> Step | None:
    if name == "detach":
        return Step("detach", Tensor.detach)
    if name == "contiguous":
        name = "same" if lazy.is_contiguous() else "copy"
        return Step(name, Tensor.contiguous) if not args and not kwargs else None
    if name == "float":
        dtype: Any = torch.float32
    else:
        targets = [*args, *(kwargs[key] for key in ("device", "dtype") if kwargs.get(key) is not None)]
        if not {*kwargs} <= {"device", "dtype", "non_blocking"}:
            return None
        dtypes = [target for target in targets if isinstance(target, torch.dtype)]
        devices = [target for target in targets if isinstance(target, (str, torch.device))]
        if len(dtypes) + len(devices) != len(targets) or len(dtypes) > 1:
            return None
        if any(torch.device(target) != lazy.device for target in devices):
            return None
        dtype = dtypes[0] if dtypes else lazy.dtype
    if dtype == lazy.dtype:
        return Step("same", Tensor.detach)
    return Step("float", lambda x: x.to(dtype)) if dtype == torch.float32 else None


def _rows_of(lazy: Tensor, index: Any) -> Step | None:
    """A selection of rows: by slices, numbers and masks of dimensions before the last."""
    parts = index if isinstance(index, tuple) else (index,)
    fixed: list[Any] = []
    for part in parts:
        if isinstance(part, Tensor) and part.dtype == torch.bool:
            selected = lazy.shape[len(fixed) : len(fixed) + part.dim()]
            is_after_ellipsis = any(part is Ellipsis for part in fixed)
            if part.device != lazy.device or part.dim() == 0 or is_after_ellipsis or selected != part.shape:
                return None  # PyTorch says what is wrong with it
            fixed += part.nonzero(as_tuple=True)  # waits for the device, as the selection itself does
        elif part is Ellipsis or type(part) in (int, slice):
            fixed.append(part)
        else:
            return None
    ellipses = sum(part is Ellipsis for part in fixed)
    used = len(fixed) - ellipses
    reaches_columns = (ellipses > 1 or fixed[-1] is not Ellipsis) if ellipses else used == lazy.dim()
    if used > lazy.dim() or (reaches_columns and (isinstance(fixed[-1], Tensor) or fixed[-1] != slice(None))):
        return None
    return Step("rows", lambda x: x[tuple(part.to(x.device) if isinstance(part, Tensor) else part for part in fixed)])


def transformation_by(steps: Sequence[Step], *, with_temperature: bool = False) -> dict[str, Any] | None:
    """Return the scale and cap of steps, and if they are in fp32; None for steps that the fused operator lacks.

    ``with_temperature``: the operator has one, by which logits are divided after scale and cap.
    """
    operations: list[Step] = []
    in_fp32 = is_done = False
    for step in steps:
        if step.name == "float":
            in_fp32, is_done = not operations, bool(operations)
        elif step.name in ("mul", "div", "tanh"):
            if is_done:
                return None
            operations.append(step)
        elif step.name not in OF_ROWS and step.name != "detach":
            return None
    names, numbers = [step.name for step in operations], [float(step.number) for step in operations]
    scale = cap = None
    temperature: dict[str, float | None] = {"temperature": None} if with_temperature else {}
    if with_temperature and names[-1:] == ["div"] and numbers[-1] > 0:
        temperature["temperature"] = numbers.pop()
        names.pop()
    if names[-3:] == ["div", "tanh", "mul"] and numbers[-3] == numbers[-1] > 0:
        cap = numbers[-1]
        del names[-3:]
    if names in (["mul"], ["div"]):
        scale = numbers[0] if names.pop() == "mul" else 1.0 / numbers[0]
    return None if names else {"scale": scale, "cap": cap, "in_fp32": in_fp32 and bool(operations), **temperature}


def rows_by(steps: Sequence[Step], x: Tensor) -> Tensor:
    """Return the rows of hidden states [..., H] that steps select of their logits, in that order."""
    for step in steps:
        if step.name == "rows":
            x = step.run(x)
        elif step.name == "view":
            x = x.reshape(*step.shape[:-1], x.shape[-1])
    return x
