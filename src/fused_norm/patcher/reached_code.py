"""A key for what a function or a module computes, made of all that its code can reach: equal keys, equal results.

From the function or module, the root, everything is followed that code reaches by name: variables of functions around,
defaults, globals and the attributes of modules among them, methods and other members of the root's class and of its
bases, attributes of the instance, which may hide those. In the key, code and plain values stand for themselves; what
Python and PyTorch bring stands for its identity. No key holds a class, module or function alive: a cache may keep it.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from enum import Enum
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_MOST_THINGS = 1000
_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented), Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"forward"}
_UNNAMED = ("__call__", "__getattr__", "__getattribute__")
"""Methods that Python calls although no code names them."""


_seen: ContextVar[dict[Any, tuple[Any, Reached]] | None] = ContextVar("fused_norm_reached", default=None)
"""What was found by ``_kind_of_root``, with the root: while that lives, no other one has its identity."""


class Reached(NamedTuple):
    """The code and values that a function or module reaches.

    Attributes:
        key: equal for what would compute the same; None where something cannot be told from another by a value.
        foreign: the name of the first thing that is no Python over PyTorch: a Triton kernel, an extension's function,
            another's autograd function; None without one.
    """

    key: Any
    foreign: str | None


def reached_by(root: Any) -> Reached:
    """Return what a function or a module uses when it is called, but for parameters, buffers and hooks."""
    seen = _seen.get()
    if seen is None:
        return _Walk(root).reached()
    alike = _kind_of_root(root)
    if alike not in seen:
        seen[alike] = root, _Walk(root).reached()
    return seen[alike][1]


@contextlib.contextmanager
def no_code_changes() -> Iterator[None]:
    """Look at a function once within this ``with``, in which no code is replaced, and at one of modules alike."""
    token = _seen.set({})
    try:
        yield
    finally:
        _seen.reset(token)


def _kind_of_root(root: Any) -> Any:
    """What is equal for modules that use the same at any one time: of one class, with the same plain attributes."""
    if isinstance(root, nn.Module):
        own = own_attributes(root)
        if all(isinstance(value, _PLAIN) for value in own.values()):
            return type(root), tuple((name, type(value), repr(value)) for name, value in own.items())
    return id(root)


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """The instance's attributes without those that every module has: parameters, hooks, training flag, forward."""
    return {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}


class _Walk:
    """Numbers all that a root reaches, and describes each of these things; in a description others are numbers."""

    def __init__(self, root: Any) -> None:
        self._known = True
        self._foreign: str | None = None
        self._members = [vars(base) for base in _bases(type(root))] if isinstance(root, nn.Module) else []
        self._things = [root]
        self._numbers = {id(root): 0}

    def reached(self) -> Reached:
        """The descriptions of all things, the root's first, as the key."""
        found = []
        for thing in self._things:  # grows meanwhile
            if len(self._things) > _MOST_THINGS:
                self._known = False
                break
            found.append(self._describe(thing))
        return Reached(tuple(found) if self._known else None, self._foreign)

    def _of(self, thing: Any) -> Any:
        """A plain value as type and text; of anything else its number, which a new thing gets here."""
        if isinstance(thing, _PLAIN):
            return type(thing).__name__, repr(thing)  # neither 1 and True nor 0.0 and -0.0 are the same
        if id(thing) not in self._numbers:
            self._numbers[id(thing)] = len(self._things)
            self._things.append(thing)
        return self._numbers[id(thing)]

    def _all_of(self, things: Any) -> Any:
        if isinstance(things, dict):
            return tuple((self._of(name), self._of(thing)) for name, thing in things.items())
        return tuple(map(self._of, things))

    def _describe(self, thing: Any) -> Any:
        """What a thing computes, or holds, in values that can be compared."""
        match thing:
            case FunctionType():
                return self._of_function(thing)
            case MethodType():
                return self._all_of(("method", thing.__func__, thing.__self__))
            case staticmethod() | classmethod() | functools._lru_cache_wrapper():
                return self._all_of((type(thing).__name__, thing.__wrapped__))
            case property():
                return self._all_of(("property", thing.fget, thing.fset))
            case functools.partial():
                return self._all_of(("partial", thing.func, tuple(thing.args), thing.keywords))
            case tuple() | list() | dict():
                return type(thing).__name__, self._all_of(thing)
            case nn.Module():
                return self._of_module(thing)
            case type() if not _is_given(thing.__module__):
                return self._of_class(thing)
        return self._same(thing)

    def _of_function(self, function: FunctionType) -> Any:
        code = function.__code__
        given = function.__defaults__ or (), function.__kwdefaults__ or {}
        closed = [self._of_cell(*one) for one in zip(code.co_freevars, function.__closure__ or (), strict=True)]
        if _is_given(function.__globals__.get("__name__", "")):
            return "function", weakref.ref(function), self._all_of((*given, *closed))
        global_names, attributes = _names_in(code)
        places: list[Any] = [function.__globals__, sys.modules, vars(Tensor), *self._members]
        found = []
        for number, place in enumerate(places):  # grows by the modules that are found
            for name in attributes if number else global_names:
                if name not in place:
                    continue
                found.append((number, name, self._of(place[name])))
                if isinstance(place[name], ModuleType) and all(vars(place[name]) is not one for one in places):
                    places.append(vars(place[name]))
        return "function", code, self._all_of((*given, *closed)), tuple(found)

    def _of_module(self, module: nn.Module) -> Any:
        described: tuple[Any, ...] = "module", type(module).forward, own_attributes(module)
        if module is not self._things[0]:
            described = *described, type(module)
            self._known = self._known and not (module._parameters or module._buffers or module._modules)
        return self._all_of(described)

    def _of_cell(self, name: str, cell: Any) -> Any:
        """A variable of a function around; not ``__class__``, for the names that code uses of it are followed."""
        try:
            return None if name == "__class__" else self._of(cell.cell_contents)
        except ValueError:
            return "empty"

    def _of_class(self, found: type) -> Any:
        if issubclass(found, torch.autograd.Function):
            self._meet_foreign(found)
        own = [vars(base) for base in _bases(found)]
        kinds = (FunctionType, staticmethod, classmethod, property, *_PLAIN)
        members = [(name, one) for place in own for name, one in sorted(place.items()) if isinstance(one, kinds)]
        return "class", weakref.ref(found), self._all_of(dict(enumerate(members)))

    def _same(self, thing: Any) -> Any:
        """A thing whose inside is not looked at: a weak reference to it, which is equal for this very thing alone."""
        if isinstance(thing, MethodDescriptorType | WrapperDescriptorType):
            return thing.__qualname__  # of a type of C, which keeps it
        place = (thing if isinstance(thing, (type, BuiltinFunctionType)) else type(thing)).__module__ or "builtins"
        if isinstance(thing, BuiltinFunctionType) and not _is_given(place):
            self._meet_foreign(thing)
        elif place.partition(".")[0] == "triton":
            self._meet_foreign(type(thing))
        elif not (isinstance(thing, (type, ModuleType, BuiltinFunctionType)) or place in sys.stdlib_module_names):
            self._known = False
        try:
            return weakref.ref(thing)
        except TypeError:
            self._known = False
            return None

    def _meet_foreign(self, thing: Any) -> None:
        self._foreign = self._foreign or f"{thing.__module__}.{thing.__qualname__}"
        self._known = False


def _is_given(place: str) -> bool:
    """Return whether a module is Python's or PyTorch's, and what it has is taken as it is: not those of layers."""
    top, _, inner = place.partition(".")
    layers = inner.startswith("nn.") and inner != "nn.modules.module"
    return top in sys.stdlib_module_names or (top == "torch" and not layers)


def _bases(found: type) -> list[type]:
    """The classes that a class derives from, itself first, but for those that are taken as they are."""
    return [base for base in found.__mro__ if not _is_given(base.__module__)]


@functools.lru_cache(maxsize=1024)
def _names_in(code: CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a code object, or one inside it, looks up: globals, and attributes, in strings too, as ``getattr`` does."""
    codes = [code]
    for one in codes:  # grows meanwhile
        codes += [constant for constant in one.co_consts if isinstance(constant, CodeType)]
    found = [
        op.argval for one in codes for op in dis.get_instructions(one) if op.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    ]
    strings = (constant for one in codes for constant in one.co_consts if isinstance(constant, str))
    attributes = [*_UNNAMED, *(name for one in codes for name in one.co_names), *filter(str.isidentifier, strings)]
    return tuple(dict.fromkeys(found)), tuple(dict.fromkeys(attributes))
