"""The code that a function runs at a time, which may be swapped inside it: IPython's ``%autoreload 2`` does so."""

from __future__ import annotations

import weakref
from types import FunctionType
from typing import Any


class Identity:
    """A thing as itself: equal to the identity of this very thing while it lives, whatever ``==`` and hash it has.

    It keeps the thing alive only if that takes no weak references, as numbers and containers do not.
    """

    __slots__ = "_number", "_of", "_reference"

    def __init__(self, thing: Any) -> None:
        self._number, self._of = id(thing), None
        try:
            self._reference: weakref.ref[Any] | None = weakref.ref(thing)
        except TypeError:
            self._reference, self._of = None, thing

    @property
    def thing(self) -> Any:
        """The thing; None if it is gone."""
        return self._of if self._reference is None else self._reference()

    def is_of(self, thing: Any) -> bool:
        """Return whether this is the identity of ``thing``."""
        return self.thing is thing

    def __eq__(self, other: object) -> bool:
        if self is other or type(other) is not Identity:
            return self is other
        mine = self.thing
        return self._number == other._number and (self._reference is None or mine is not None) and other.is_of(mine)

    def __hash__(self) -> int:
        return self._number


class RunningCode:
    """The code and the defaults of a function, with what it closes over, and those of the function that it wraps.

    ``__class__``, which ``super()`` closes over, is left out. Functions and classes are not kept alive.
    """

    __slots__ = "_code", "_defaults", "_function", "_others", "_wrapped", "quick"

    def __init__(self, function: Any) -> None:
        self._function = Identity(function)
        self._code = getattr(function, "__code__", None)
        self._defaults = getattr(function, "__defaults__", None)
        self._others = tuple(map(Identity, _others(function)))
        wrapped = getattr(function, "__wrapped__", None)
        self._wrapped = None if wrapped is None else RunningCode(wrapped)
        # What ``is_in`` compares where there is no more than this; who asks at every call compares it first, by
        # ``running.quick == (function.__code__, id(function.__defaults__), function.__kwdefaults__)``.
        is_all = not self._others and wrapped is None and self._code is not None
        self.quick = (self._code, id(self._defaults), None) if is_all else None

    def is_in(self, function: Any) -> bool:
        """Return whether a function, most often the one that this was made of, runs this code; asked at each call."""
        if self._code is None:
            return True
        code = getattr(function, "__code__", None)  # another one's forward may be no function
        if code is not self._code:
            if code != self._code:
                return False
            self._code = code  # the same, compiled again
        if function.__defaults__ is not self._defaults:
            return False
        if self.quick is not None:
            return function.__kwdefaults__ is None
        others = _others(function)
        if len(others) != len(self._others):
            return False
        for known, other in zip(self._others, others, strict=True):
            if (known._of if known._reference is None else known._reference()) is not other:
                return False
        return self._wrapped is None or self._wrapped.is_in(function.__wrapped__)

    # Dynamo asks once, while it traces; it does not see through all that wraps a forward.
    is_in._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: Any) -> RunningCode:
        return self

    def __reduce__(self) -> Any:
        """Pickle as the code of the same function, if that still runs it; otherwise as code that none runs."""
        function = self._function.thing
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
    """Have a code that no other function has."""


def _others(function: Any) -> list[Any]:
    """The named defaults of a function, what it closes over, and the function that it wraps."""
    if not isinstance(function, FunctionType):
        return []
    found: list[Any] = []
    for name, value in (function.__kwdefaults__ or {}).items():
        found += name, value
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__":
            try:
                found.append(cell.cell_contents)
            except ValueError:
                found.append(ValueError)  # it is empty
    if "__wrapped__" in vars(function):
        found.append(vars(function)["__wrapped__"])
    return found
