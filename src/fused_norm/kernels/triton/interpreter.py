"""Runs kernels in Triton's interpreter: one at a time, and faster than it does unaided.

The interpreter replaces functions of ``triton.language`` by its own before it runs a kernel. It looks for functions to
replace again at every call inside the kernel, although none is left: in kernels with many calls, such as those of
norms, that was half of the time. And it repeats every sum of integers in 64 bits to see whether it has overflowed,
which no GPU does and which took two fifths of what was left.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import triton.language as tl

_lock = threading.Lock()


@contextlib.contextmanager
def one_launch() -> Iterator[None]:
    """A context in which one thread at a time runs a kernel: the interpreter keeps the grid in one place for all.

    Meanwhile ``_prepared_once`` stands for its private ``_patch_lang``, and integers are added as on a GPU; in a Triton
    that has other names for these, all stays as it is.
    """
    from triton.runtime import interpreter  # only here: nobody needs it if kernels are compiled

    with _lock, contextlib.ExitStack() as undo:
        patch: Any = getattr(interpreter, "_patch_lang", None)
        if patch is not None:
            undo.callback(setattr, interpreter, "_patch_lang", patch)
            interpreter._patch_lang = _prepared_once(patch)
        builder: Any = getattr(interpreter, "interpreter_builder", None)
        options: Any = getattr(builder, "options", None)
        if hasattr(options, "sanitize_overflow"):
            undo.callback(setattr, builder, "options", options)
            builder.options = replace(options, sanitize_overflow=False)
        yield


def _prepared_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``patch``, which prepares modules of Triton's language for the function that is called, once for each of them.

    What it returns has a ``restore`` that the interpreter calls after the function.
    """
    done: set[frozenset[str]] = set()

    def prepare(function: Any) -> Any:
        modules = _languages(function)
        if modules in done:
            return SimpleNamespace(restore=lambda: None)
        done.add(modules)
        undo, scope = contextlib.ExitStack(), patch(function)
        if scope is not None:
            undo.callback(scope.restore)
        undo.callback(done.discard, modules)
        return SimpleNamespace(restore=undo.close)

    return prepare


@cache
def _languages(function: Any) -> frozenset[str]:
    """The names of the modules of Triton's language that a function refers to."""
    modules = filter(inspect.ismodule, function.__globals__.values())
    return frozenset(module.__name__ for module in modules if module in (tl, tl.core))
