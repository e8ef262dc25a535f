"""The guard of a rewritten forward: is all that it computes without a call still plain?

If other code sees the call of a norm or an activation, another forward runs: the one that a patch would make of the
class as things are, in which that call stands as in the stock source.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch import nn

from .fused_norm_module import FusedNorm
from .hooks import are_plain_calls, has_hooks, replaced_linear
from .linear_inputs import called_by, taking_tensors, warn_about_consumers
from .patterns import bypassed_by, linears_of, rewrites_around, rewritten_forward
from .patterns.calls import Callee
from .rewrite import Rewrite
from .source import SourceError, member_of, namespace_of

logger = logging.getLogger("fused_norm")

Forward = Callable[..., Any]

_MOST_VARIANTS = 8
"""Forwards of a class for calls that other code sees; if more would be needed, the stock one runs."""


def guarded_forward(origin: Any, rewrites: tuple[Rewrite, ...], finish: Callable[[Forward], Forward]) -> Forward:
    """The forward of a class with these rewrites, which asks at each call whether it may run.

    If other code has put a forward of its own on ``origin`` since, or code into that one, that runs.

    ``finish``: what is done with each rewritten forward.

    Raises:
        SourceError: if the forward cannot be rewritten.
    """
    stock: Any = taking_tensors(origin.forward) if linears_of(rewrites) else origin.forward
    norms, consumers, bypassed = bypassed_by(origin, rewrites) if rewrites else ([], [], [])
    activations = [(act.name, _look_up(origin, act), activation) for act, activation in bypassed]
    straight = finish(rewritten_forward(origin, rewrites) if rewrites else stock)
    variants: dict[frozenset[tuple[str, bool]], Forward] = {frozenset(): straight}

    def other(self: Any, called_by_name: dict[str, list[Any] | None]) -> Forward:
        """The forward for a module that the straight one is not for, as other code sees calls inside."""
        if not are_plain_calls(inside=type(self)):
            return taking_tensors(origin.forward) if linears_of(rewrites) else origin.forward
        if torch.compiler.is_compiling():
            return origin.forward
        names = [name for name, called in called_by_name.items() if called is None or not are_plain_calls(*called)]
        for name in names:
            if name in consumers:
                warn_about_consumers(self._modules.get(name))
        seen = {name: _takes_residual(member_of(self, name)) for name in names}
        key = frozenset(seen.items())
        if key not in variants:
            if len(variants) > _MOST_VARIANTS:
                return stock
            what = ", ".join(sorted(names))
            logger.info("%s runs a forward of its own because other code sees calls of %s", origin.__name__, what)
            left = tuple(rewrites_around(origin, rewrites, seen))
            try:
                variants[key] = finish(rewritten_forward(origin, left) if left else stock)
            except SourceError:  # the file may be another one by now
                variants[key] = stock
        return variants[key]

    @wraps(straight)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        modules = self._modules
        # By name, the modules whose calls have to be plain; None if there is something else by now.
        called_by_name: dict[str, list[Any] | None] = {}
        for name in norms:
            norm = modules[name] if name in modules else member_of(self, name)
            is_fused = isinstance(norm, FusedNorm) and type(norm).forward is FusedNorm.forward
            called_by_name[name] = [norm] if is_fused else None
        for name, look_up, activation in activations:
            act = look_up(self)
            called = [] if activation.kind is None else [act]
            called_by_name[name] = called if activation.is_now(act) else None
        if consumers and not torch.compiler.is_compiling():
            is_replaced = replaced_linear() is not None
            for name in consumers:
                block = modules.get(name)
                fused: Any = type(block)  # a wrapper may forward the attributes of what is inside
                linears = getattr(fused, "fused_norm_linears", ())
                called_by_name[name] = None
                if linears and not is_replaced and fused.forward is fused.fused_norm_forward:
                    read_by: Any = list(map(block._modules.get, linears))
                    if set(map(type, read_by)) != {nn.Linear}:
                        read_by = called_by(read_by)
                    called_by_name[name] = None if read_by is None else [block, *read_by]
        is_known = None not in called_by_name.values()
        if is_known and are_plain_calls(*chain.from_iterable(called_by_name.values()), inside=type(self)):  # type: ignore[arg-type]
            return straight(self, *args, **kwargs)
        return other(self, called_by_name)(self, *args, **kwargs)

    return forward


def _takes_residual(norm: Any) -> bool:
    """Return whether ``norm(x, residual)`` reaches the forward of a fused norm, though other code may stand before it.

    That is accelerate, which calls the forward that it has kept; a hook would see the residual.
    """
    if not isinstance(norm, FusedNorm) or has_hooks(norm) or type(norm).forward is not FusedNorm.forward:
        return False
    own = norm.__dict__
    forward = own["_old_forward"] if "_old_forward" in own else own.get("forward")
    is_reached = forward is None or getattr(forward, "__func__", None) is FusedNorm.forward
    return is_reached and are_plain_calls(inside=type(norm))


def _look_up(origin: Any, act: Callee) -> Callable[[nn.Module], Any]:
    """The function that looks an activation up in a module, or among the globals of the class's forward."""
    name, _, number = act.name.partition(".")
    source = act.name if act.is_function else f"self.{name}" + (f"[{number}]" if number else "")
    return eval(f"lambda self: {source}", namespace_of(origin))
