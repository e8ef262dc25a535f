"""Patching at load: one call for code of your own, a ``with`` block for code you cannot change.

AutoModel, pipelines, adapters and the classes themselves all end in ``PreTrainedModel.from_pretrained`` or
``PreTrainedModel._from_config``, so these two are wrapped while a block is open and put back when the last one closes.
So is ``BaseTuner.inject_adapter``, in which all ways end by which PEFT puts adapters into a model that is loaded.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ..options import FuseOptions
from .apply import apply_fused_norm
from .patch_report import PatchReport

logger = logging.getLogger("fused_norm")


def from_pretrained(
    auto_class: Any, *args: Any, fused_norm: FuseOptions | Mapping[str, Any] | None = None, **kwargs: Any
) -> Any:
    """Load a model with ``auto_class.from_pretrained`` and patch it with ``apply_fused_norm``.

    Args:
        auto_class: what has the ``from_pretrained``: an AutoModel class, a model class, a PEFT AutoModel class.
        *args: passed on untouched.
        fused_norm: the options of ``apply_fused_norm``, as ``FuseOptions`` or a mapping. None means the defaults.
        **kwargs: passed on untouched.

    Returns:
        What ``auto_class.from_pretrained`` returns: the model, or a tuple that starts with it when
        ``output_loading_info=True``. Inside ``on_load`` the options given here win for this model.

    Raises:
        TypeError: an unknown option, or ``fused_norm`` is neither options nor a mapping. Nothing has been loaded.
        ValueError: contradictory options. Nothing has been loaded.
        FusedNormError: as ``apply_fused_norm``.
    """
    options: Any = {} if fused_norm is None else fused_norm
    if isinstance(options, Mapping):
        options = FuseOptions(**options)
    if not isinstance(options, FuseOptions):
        raise TypeError(f"fused_norm must be FuseOptions, a mapping of options or None, not {type(options).__name__}")
    scope = _Scope(options, parent=_hooks.current_scope())
    return scope.build(functools.partial(auto_class.from_pretrained, *args, **kwargs))


@contextmanager
def on_load(
    *, everywhere: bool = False, notify: Callable[[PatchReport], object] | None = None, **options: Any
) -> Iterator[list[PatchReport]]:
    """Patch every transformers model that is loaded or built from a config inside the ``with`` block.

    Covered are ``from_pretrained`` and ``from_config`` of AutoModel and of model classes, and whatever calls them. A
    model made by calling its class is not; call ``apply_fused_norm`` on it. A model that builds others on its way is
    patched once, as a whole, when it is complete. Where PEFT puts adapters into it later, and was imported when the
    model was loaded, it is patched once more, with the same options. Blocks nest: the options of the innermost one
    hold, and its reports are in the lists of the outer ones too.

    Args:
        everywhere: cover every thread of the process, not only the context (thread, or asyncio task) of the block. A
            block of the thread's own still wins there.
        notify: called with each report, right after the model was patched.
        **options: the options of ``apply_fused_norm``. Strict by default: a model with nothing to fuse raises.

    Yields:
        A list that receives the report of each model, in the order in which they are patched.

    Raises:
        TypeError: an unknown option.
        ValueError: contradictory options.
        FusedNormError: from inside the block, as ``apply_fused_norm``.
    """
    scope = _Scope(FuseOptions(**options), parent=_hooks.current_scope(), notify=notify, everywhere=everywhere)
    _hooks.acquire(scope)
    token = _innermost.set(scope)
    try:
        yield scope.reports
    finally:
        # A task that outlives the block keeps this scope in its own copy of the context.
        scope.open = False
        _hooks.release(scope)
        _innermost.reset(token)


def fuse_from_now_on(options: FuseOptions, notify: Callable[[PatchReport], object]) -> None:
    """Patch every model as ``on_load(everywhere=True)`` does, until the process ends."""
    _hooks.acquire(_Scope(options, parent=None, notify=notify, everywhere=True))


@dataclass(eq=False)
class _Scope:
    """One open ``on_load`` block, or one call of ``from_pretrained``: its options, and where its reports go."""

    options: FuseOptions
    parent: _Scope | None
    notify: Callable[[PatchReport], object] | None = None
    reports: list[PatchReport] = field(default_factory=list)
    everywhere: bool = False
    open: bool = True

    def build(self, load: Callable[[], Any]) -> Any:
        """Call ``load`` with the hook off, so that models it builds inside stay whole, and patch what it returns."""
        token = _building.set(True)
        try:
            result = load()
        finally:
            _building.reset(token)
        model = result[0] if isinstance(result, tuple) else result
        self.patch(model)
        _patched_by[model] = self
        _hooks.wrap_peft()
        return result

    def patch(self, model: nn.Module) -> None:
        """Patch a model, and tell all blocks that are open around."""
        report = apply_fused_norm(model, **vars(self.options))
        scope: _Scope | None = self
        while scope is not None:
            if scope.open:
                scope.reports.append(report)
                if scope.notify is not None:
                    scope.notify(report)
            scope = scope.parent


_innermost: ContextVar[_Scope | None] = ContextVar("fused_norm_scope", default=None)
_building: ContextVar[bool] = ContextVar("fused_norm_building", default=False)
_patched_by: WeakKeyDictionary[nn.Module, _Scope] = WeakKeyDictionary()


class _Hooks:
    """The wrappers on methods of others: there while at least one block is open in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scopes: list[_Scope] = []
        self._installed: dict[tuple[type, str], tuple[Any, Any]] = {}

    def current_scope(self) -> _Scope | None:
        """The innermost open block of this context, or else the latest one that covers the process."""
        scope = _innermost.get()
        while scope is not None and not scope.open:
            scope = scope.parent
        if scope is not None:
            return scope
        with self._lock:
            return next((scope for scope in reversed(self._scopes) if scope.everywhere), None)

    def acquire(self, scope: _Scope) -> None:
        # Not at the top of the file, and not under the lock: `fuse_from_now_on` is called by this import.
        from transformers import PreTrainedModel

        with self._lock:
            if not self._scopes:
                for name in ("from_pretrained", "_from_config"):
                    self._wrap(PreTrainedModel, name, _patching_what_it_returns)
            self._scopes.append(scope)

    def wrap_peft(self) -> None:
        """Wrap PEFT's method too, if PEFT is imported, which this package leaves to others."""
        tuners = sys.modules.get("peft.tuners.tuners_utils")
        with self._lock:
            if tuners is not None and self._scopes and (tuners.BaseTuner, "inject_adapter") not in self._installed:
                self._wrap(tuners.BaseTuner, "inject_adapter", _patching_what_it_changes)

    def _wrap(self, owner: type, name: str, wrapper: Callable[[Any], Any]) -> None:
        original = vars(owner)[name]
        ours = wrapper(original)
        self._installed[owner, name] = original, ours
        setattr(owner, name, ours)

    def release(self, scope: _Scope) -> None:
        with self._lock:
            self._scopes.remove(scope)
            if self._scopes:
                return
            for (owner, name), (original, ours) in self._installed.items():
                if vars(owner).get(name) is ours:
                    setattr(owner, name, original)
                else:
                    logger.warning(
                        "%s.%s was replaced inside fused_norm.on_load() and is left as it is; "
                        "the hook under it does nothing any more",
                        owner.__name__,
                        name,
                    )
            self._installed.clear()


_hooks = _Hooks()


def _patching_what_it_returns(original: Any) -> classmethod[Any, Any, Any]:
    """A classmethod like ``original`` that patches the model that it returns when a block is open here."""

    @functools.wraps(getattr(original, "__func__", original))
    def build(cls: type, *args: Any, **kwargs: Any) -> Any:
        load = functools.partial(original.__get__(None, cls), *args, **kwargs)
        scope = None if _building.get() else _hooks.current_scope()
        return load() if scope is None else scope.build(load)

    return classmethod(build)


def _patching_what_it_changes(original: Any) -> Any:
    """A method of a PEFT tuner like ``original`` that patches its model once more, if a block that is open has before.

    One that is called while a model is loaded leaves it to the load.
    """

    @functools.wraps(original)
    def inject(tuner: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = original(tuner, model, *args, **kwargs)
        scope = _patched_by.get(model)
        if scope is not None and scope.open and not _building.get():
            scope.patch(model)
        return result

    return inject
