"""The code that a function runs now, which may be swapped inside it, as IPython's ``%autoreload 2`` does."""

from __future__ import annotations

import weakref
from itertools import chain
from types import FunctionType
from typing import Any


class Identity:
    """The identity of an object, whatever its ``==`` and hash are; it equals only that of the same living object.

    It keeps the object alive only if that takes no weak references, as numbers and containers do not.
    """

    __slots__ = "_id", "_reference", "_value"

    def __init__(self, value: Any) -> None:
        self._id, self._value = id(value), None
        try:
            self._reference: weakref.ref[Any] | None = weakref.ref(value)
        except TypeError:
            self._reference, self._value = None, value

    @property
    def value(self) -> Any:
        """The object; None if it is gone."""
        return self._value if self._reference is None else self._reference()

    def __eq__(self, other: object) -> bool:
        if self is other or type(other) is not Identity:
            return self is other
        value = self.value
        return self._id == other._id and (self._reference is None or value is not None) and other.value is value

    def __hash__(self) -> int:
        return self._id


class RunningCode:
    """The code and the defaults of a function, what it closes over, and those of the function that it wraps.

    ``__class__``, which ``super()`` closes over, is left out. Functions and classes are not kept alive.

    Attributes:
        quick: if there is no more than code and positional defaults, what callers on a hot path compare themselves:
            ``running.quick == (function.__code__, id(function.__defaults__), function.__kwdefaults__)``; else None.
    """

    __slots__ = "_code", "_defaults", "_function", "_others", "_wrapped", "quick"

    def __init__(self, function: Any) -> None:
        self._function = Identity(function)
        self._code = getattr(function, "__code__", None)
        self._defaults = getattr(function, "__defaults__", None)
        self._others = tuple(map(Identity, _others(function)))
        wrapped = getattr(function, "__wrapped__", None)
        self._wrapped = None if wrapped is None else RunningCode(wrapped)
        is_all = not self._others and wrapped is None and self._code is not None
        self.quick = (self._code, id(self._defaults), None) if is_all else None

    def is_in(self, function: Any) -> bool:
        """Return whether a function, usually the original one, runs this code; asked at each call."""
        running: RunningCode | None = self
        while running is not None:  # and what it wraps, in turn
            if running._code is None:
                return True
            code = getattr(function, "__code__", None)  # a forward may be no function
            if code is not running._code:
                if code != running._code:
                    return False
                running._code = code  # the same, compiled again
            if function.__defaults__ is not running._defaults:
                return False
            if running.quick is not None:
                return function.__kwdefaults__ is None
            others = _others(function)
            if len(others) != len(running._others):
                return False
            for held, other in zip(running._others, others, strict=True):
                value = held._value if held._reference is None else held._reference()
                if value is not other or (value is None and held._reference is not None):  # what it was is gone
                    return False
            running, function = running._wrapped, getattr(function, "__wrapped__", None)
        return True

    # Dynamo asks once, while it traces; it does not see through all that wraps a forward.
    is_in._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: Any) -> RunningCode:
        return self

    def __reduce__(self) -> Any:
        """Pickle as the code of the same function if that still runs it, else as code that no function runs."""
        function = self._function.value
        return RunningCode, (function if self._code is None or self.is_in(function) else _run_by_none,)

    def __eq__(self, other: object) -> bool:
        return type(other) is RunningCode and (
            self._code == other._code
            and self._defaults is other._defaults
            and self._others == other._others
            and self._wrapped == other._wrapped
        )

    def __hash__(self) -> int:
        return hash(self._code)


def _run_by_none() -> None:
    """Its code is that of no other function."""


def _others(function: Any) -> list[Any]:
    """The keyword defaults of a function, what it closes over, and the function that it wraps."""
    if not isinstance(function, FunctionType):
        return []
    others: list[Any] = [*chain(*(function.__kwdefaults__ or {}).items()), *closed_over(function)]
    attributes = vars(function)
    if "__wrapped__" in attributes:
        others.append(attributes["__wrapped__"])
    return others


def closed_over(function: FunctionType) -> list[Any]:
    """The values of a function's variables of enclosing functions; ``ValueError`` for one that has none yet."""
    values: list[Any] = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__":
            try:
                values.append(cell.cell_contents)
            except ValueError:
                values.append(ValueError)
    return values
