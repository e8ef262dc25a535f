"""The guard of a rewritten forward: is all that it computes without a call still plain?

Where other code sees the call of a norm or an activation, another forward runs: the one that a patch would make of the
class as things are, in which that call stands as in the stock source.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

from .fused_norm_module import FusedNorm, may_be_bypassed, takes_residual
from .hooks import are_plain_calls, has_origin_forward, replaced_linear
from .linear_inputs import called_by, explain_readers
from .patterns import bypassed_by, rewrites_around, rewritten_forward
from .patterns.calls import Called
from .rewrite import Rewrite
from .source import SourceError, member_of, namespace_of

logger = logging.getLogger("fused_norm")

Forward = Callable[..., Any]

_MOST_VARIANTS = 8
"""Forwards of a class for calls that other code sees; where more would be needed, the stock one runs."""


def guarded_forward(origin: Any, rewrites: tuple[Rewrite, ...], finish: Callable[[Forward], Forward]) -> Forward:
    """The forward of a class with these rewrites, which asks at each call whether it may run.

    If other code has put a forward of its own on ``origin`` since, or code into that one, that runs.

    ``finish``: what is done with each rewritten forward.

    Raises:
        SourceError: where the forward cannot be rewritten.
    """
    stock: Any = origin.forward
    norms, readers, found = bypassed_by(origin, rewrites) if rewrites else ((), (), ())
    activations = [(act.name, _look_up(origin, act), activation) for act, activation in found]
    straight = finish(rewritten_forward(origin, rewrites) if rewrites else stock)
    variants: dict[frozenset[tuple[str, bool]], Forward] = {frozenset(): straight}

    def other(self: Any) -> Forward:
        """The forward for a module that the straight one is not for, as other code sees calls inside."""
        if not has_origin_forward(type(self)):
            return origin.forward
        if torch.compiler.is_compiling():
            return stock
        held = {name: member_of(self, name) for name in norms}
        seen = {name: takes_residual(norm) for name, norm in held.items() if not may_be_bypassed(norm)}
        for name in readers:
            called = _called_in(self._modules.get(name))
            if called is None or not are_plain_calls(*called) or replaced_linear() is not None:
                seen[name] = False
                explain_readers(self._modules.get(name))
        for name, look_up, activation in activations:
            act = look_up(self)
            if not activation.is_now(act) or (activation.kind is not None and not are_plain_calls(act)):
                seen[name] = False
        key = frozenset(seen.items())
        if key not in variants:
            if len(variants) > _MOST_VARIANTS:
                return stock
            names = ", ".join(sorted(seen))
            logger.info("%s runs a forward of its own where other code sees calls of %s", origin.__name__, names)
            left = tuple(rewrites_around(origin, rewrites, seen))
            try:
                variants[key] = finish(rewritten_forward(origin, left) if left else stock)
            except SourceError:  # the file may be another one by now
                variants[key] = stock
        return variants[key]

    @wraps(straight)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        modules = self._modules
        bypassed: list[nn.Module] = []
        for name in norms:
            norm = modules[name] if name in modules else member_of(self, name)
            if not isinstance(norm, FusedNorm) or type(norm).forward is not FusedNorm.forward:
                return other(self)(self, *args, **kwargs)
            bypassed.append(norm)
        for _, look_up, activation in activations:
            act = look_up(self)
            if not activation.is_now(act):
                return other(self)(self, *args, **kwargs)
            if activation.kind is not None:
                bypassed.append(act)
        if readers and not torch.compiler.is_compiling():
            for name in readers:
                called = _called_in(modules.get(name))
                if called is None:
                    return other(self)(self, *args, **kwargs)
                bypassed += called
            if replaced_linear() is not None:
                return other(self)(self, *args, **kwargs)
        run = straight if are_plain_calls(*bypassed, inside=type(self)) else other(self)
        return run(self, *args, **kwargs)

    return forward


def _called_in(block: Any) -> list[nn.Module] | None:
    """The block and the modules by which its linears read a norm, if their calls are plain; None if they are others."""
    fused: Any = type(block)  # a wrapper may forward the attributes of what is inside
    linears = getattr(fused, "fused_norm_linears", ())
    if not linears or fused.forward is not fused.fused_norm_forward:
        return None
    called = called_by(map(block._modules.get, linears))
    return None if called is None else [block, *called]


def _look_up(origin: Any, act: Called) -> Callable[[nn.Module], Any]:
    """The function that looks an activation up in a module, or among the globals of the class's forward."""
    held, _, number = act.name.partition(".")
    source = act.name if act.is_function else f"self.{held}" + (f"[{number}]" if number else "")
    return eval(f"lambda self: {source}", namespace_of(origin))
