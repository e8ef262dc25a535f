"""Old names of options and of kinds of sites: they keep working, with a FutureWarning that says the new one."""

from __future__ import annotations

import functools
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

OLD_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "adapter": "lora",
        "casting": "norm_rounding",
        "consumers": "shared_inputs",
        "linear": "linear_4bit",
        "readers": "shared_inputs",
        "sandwich": "post_norm",
    }
)
"""The new name for each old one, of options of ``apply_fused_norm`` and of the kinds of sites they switch."""

_Takes = TypeVar("_Takes", bound=Callable[..., Any])
_PASSED_THROUGH = ("fused_norm", "contextlib")
"""Packages that a warning passes over when it looks for the line that gave an old name."""


def takes_old_names(function: _Takes) -> _Takes:
    """Let a function, or the ``__init__`` of a class, take keyword arguments by their old names too.

    Raises:
        ValueError: out of ``function``, if it is given an option by two names.
    """
    if isinstance(function, type):
        made: Any = function
        made.__init__ = takes_old_names(made.__init__)
        return function

    @functools.wraps(function)
    def taking_old_names(*args: Any, **options: Any) -> Any:
        for old in [name for name in options if name in OLD_NAMES]:
            if (new := OLD_NAMES[old]) in options:
                raise ValueError(f"{old} is the old name of {new}; give {new} alone")
            options[_warned_of(old)] = options.pop(old)
        return function(*args, **options)

    return taking_old_names  # type: ignore[return-value]


class OldNames:
    """Base of classes with attributes that have old names: these are read too, and unpickled."""

    if not TYPE_CHECKING:  # type checkers know the new names alone

        def __getattr__(self, name: str) -> Any:
            if name not in OLD_NAMES:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(self, _warned_of(name))

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = {OLD_NAMES.get(name, name): value for name, value in state.items()}
        if "kind" in state:
            state["kind"] = OLD_NAMES.get(state["kind"], state["kind"])
        self.__dict__.update(state)


class ByKind(dict[Any, int]):
    """Numbers by kinds of sites, which are found by an old name too."""

    def __missing__(self, kind: str) -> int:
        if kind not in OLD_NAMES:
            raise KeyError(kind)
        return self[_warned_of(kind)]

    def get(self, kind: str, default: Any = None) -> Any:
        return self[kind] if kind in self or kind in OLD_NAMES else default

    def __reduce__(self) -> Any:  # torch.load with weights_only knows this class
        return OrderedDict, (), None, None, iter(self.items())


def _warned_of(old: str) -> str:
    """The new name of ``old``, after a warning at the line of the caller outside of this package."""
    new, level, frame = OLD_NAMES[old], 1, sys._getframe()
    while frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED_THROUGH and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(f"fused_norm: {old} is called {new} now", FutureWarning, stacklevel=level)
    return new
