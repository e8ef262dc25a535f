"""Native code that a function reaches: kernels of Triton, functions of extensions, autograd functions of others."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from .probe import own_attributes

_MOST_THINGS = 1000

# A metaclass may answer anything.
_members_of, _bases_of, _module_of = (type.__dict__[name].__get__ for name in ("__dict__", "__mro__", "__module__"))


def native_code(root: Any) -> str | None:
    """Return the name of the first thing that a function reaches and that is not Python over PyTorch; None without one.

    Everything is followed that code reaches by name: variables of enclosing functions, defaults, globals and their
    attributes if they are modules, members of classes, and contents of containers.
    """
    things, seen = [root], set[int]()
    for thing in things:  # grows meanwhile
        if id(thing) in seen or len(seen) > _MOST_THINGS:
            continue
        seen.add(id(thing))
        with suppress(Exception):  # code of others may answer the simplest question with anything
            kind: Any = type(thing)
            if kind is BuiltinFunctionType and not _is_of_python_or_torch(thing.__module__ or "builtins"):
                return f"{thing.__module__}.{thing.__qualname__}"
            is_function = issubclass(kind, type) and issubclass(thing, torch.autograd.Function)
            if is_function and not _is_of_python_or_torch(_module_of(thing)):
                return f"{thing.__module__}.{thing.__qualname__}"
            if _package_of(_module_of(kind)) == "triton":
                return f"{kind.__module__}.{kind.__qualname__}"
            things += _reached_from(thing)
    return None


def _package_of(module: Any) -> str:
    return module.partition(".")[0] if type(module) is str else ""


def _is_of_python_or_torch(module: Any) -> bool:
    package = _package_of(module)
    return package == "torch" or package in sys.stdlib_module_names


def _reached_from(thing: Any) -> Iterator[Any]:
    """Yield what a thing holds or names. Its exact type alone says what that is, as a subclass may do anything."""
    kind: Any = type(thing)
    if kind is FunctionType:
        if not _is_of_python_or_torch(thing.__globals__.get("__name__")):
            yield from _reached_from_function(thing)
    elif kind is MethodType:
        yield from (thing.__func__, thing.__self__)
    elif kind in (tuple, list, set, frozenset):
        yield from thing
    elif kind is dict:
        yield from (part for item in thing.items() for part in item)
    elif kind is staticmethod or kind is classmethod or kind is functools._lru_cache_wrapper:
        yield thing.__wrapped__
    elif kind is property:
        yield from (thing.fget, thing.fset, thing.fdel)
    elif kind is functools.partial:
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif issubclass(kind, nn.Module):
        yield from (kind, *own_attributes(thing).values())
    elif issubclass(kind, type):
        for base in _bases_of(thing):
            if not _is_of_python_or_torch(_module_of(base)):
                yield from _members_of(base).values()


def _reached_from_function(function: FunctionType) -> Iterator[Any]:
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from vars(function).values()
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is empty
            yield cell.cell_contents
    codes = [function.__code__]
    for code in codes:  # grows meanwhile
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    texts = (constant for code in codes for constant in code.co_consts if isinstance(constant, str))  # ``getattr``
    names = dict.fromkeys(chain((name for code in codes for name in code.co_names), texts))
    places = [function.__globals__]
    for place in places:  # grows meanwhile
        for value in [place[name] for name in names if name in place]:
            if not issubclass(type(value), ModuleType):
                yield value
            elif all(vars(value) is not place for place in places):
                places.append(vars(value))
