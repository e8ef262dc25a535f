"""Runs kernels in Triton's interpreter: one at a time, and faster than it does by itself.

The interpreter replaces functions of ``triton.language`` by its own before it runs a kernel. It looks for functions to
replace again at every call inside the kernel, where none is left: in kernels with many calls, such as those of norms,
that was half of the time. And it repeats every sum of integers in 64 bits to see whether it has overflowed, which no
GPU does and which took two fifths of what was left.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import triton.language as tl


class Turn:
    """Lets one thread at a time run a kernel: the interpreter keeps the grid in one place for all threads.

    Meanwhile a ``_PatchOnce`` stands for its private ``_patch_lang``, and integers are added as on a GPU; in a Triton
    that has other names for these, all stays as it is.
    """

    def __init__(self) -> None:
        from triton.runtime import interpreter  # only here: where kernels are compiled nobody needs it

        self._lock = threading.Lock()
        self._interpreter = interpreter

    def __enter__(self) -> None:
        self._lock.acquire()
        self._patch = getattr(self._interpreter, "_patch_lang", None)
        if self._patch is not None:
            self._interpreter._patch_lang = _PatchOnce(self._patch)
        builder: Any = getattr(self._interpreter, "interpreter_builder", None)
        options: Any = getattr(builder, "options", None)
        if hasattr(options, "sanitize_overflow"):
            builder.options = replace(options, sanitize_overflow=False)
        self._options = options

    def __exit__(self, *_: object) -> None:
        if self._patch is not None:
            self._interpreter._patch_lang = self._patch
        if self._options is not None:
            self._interpreter.interpreter_builder.options = self._options
        self._lock.release()


class _PatchOnce:
    """``patch``, which prepares modules of Triton's language for the function that is called, once for each of them."""

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self._patch = patch
        self._done: set[frozenset[str]] = set()

    def __call__(self, function: Any) -> _Scope:
        modules = _languages(function)
        if modules in self._done:
            return _Scope()
        self._done.add(modules)
        scope = self._patch(function)

        def restore() -> None:
            self._done.discard(modules)
            if scope is not None:
                scope.restore()

        return _Scope(restore)


class _Scope:
    """An object that puts back what was replaced when the interpreter calls ``restore``."""

    def __init__(self, restore: Callable[[], None] = lambda: None) -> None:
        self.restore = restore


@cache
def _languages(function: Any) -> frozenset[str]:
    """The names of the modules that a function finds Triton's language in."""
    modules = filter(inspect.ismodule, function.__globals__.values())
    return frozenset(module.__name__ for module in modules if module in (tl, tl.core))
