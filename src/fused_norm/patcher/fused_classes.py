"""The fused classes, and the guard of rewritten forwards.

A fused class derives from the class of the instances that get it and keeps its names, so ``isinstance``, FSDP's
auto-wrap policies, device maps and weight initialisation, which all go by class or by name, see what they saw before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache, partial, wraps
from typing import Any
from uuid import uuid4

import torch
from torch import nn

from ..kernels.switch import switch
from ..options import RecomputeLevel
from .cuda_graphs import replayed
from .fused_block import FusedBlock, Rewrite
from .fused_norm_module import FusedNorm
from .hooks import are_plain_calls
from .linear_inputs import taking_tensors
from .losses import FusedHead, FusedLoss, fused_forward
from .patterns import bypassed_by, functions_of, linears_of, rewrites_with_calls, rewritten_forward
from .patterns.calls import Callee
from .recompute import call_recomputing
from .running_code import RunningCode
from .source import member_of, namespace_of

logger = logging.getLogger("fused_norm")

Forward = Callable[..., Any]


class _NoHubKernel:
    """A descriptor that hides ``kernel_layer_name``: transformers would bind a kernel from the hub over the forward."""

    def __get__(self, instance: object, owner: type | None = None) -> str:
        raise AttributeError("kernel_layer_name: a fused module takes no kernel from the hub")


def fused_block_class(
    origin: Any, rewrites: tuple[Rewrite, ...], recompute: RecomputeLevel = False, cuda_graphs: bool = False
) -> type[nn.Module]:
    """The fused class for modules of class ``origin``, with these rewrites of their forward.

    ``recompute``: what fused operators return in its forward is recomputed in the backward, and from some levels on
    what linears return (``recompute.py``). ``cuda_graphs``: its forward is replayed (``cuda_graphs.py``).

    Raises:
        SourceError: if the forward cannot be rewritten.
    """
    return fused_class(
        FusedBlock,
        origin,
        partial(_guarded_forward, origin, rewrites, recompute, cuda_graphs=cuda_graphs),
        (fused_block_class, origin, rewrites, recompute, cuda_graphs),
        fused_norm_rewrites=rewrites,
        fused_norm_recompute=recompute,
        fused_norm_cuda_graphs=cuda_graphs,
        fused_norm_linears=linears_of(rewrites),
        **(functions_of(origin, rewrites) if rewrites else {}),
    )


def fused_loss_class(origin: Any) -> type[nn.Module]:
    """The fused class for language models of class ``origin``."""
    forward, head = partial(fused_forward, origin), fused_class(FusedHead, nn.Linear)
    return fused_class(FusedLoss, origin, forward, (fused_loss_class, origin), fused_norm_head_class=head)


def fused_class(
    base: type,
    origin: Any,
    forward: Callable[[], Any] | None = None,
    made_by: tuple[Any, ...] = (),
    **members: Any,
) -> Any:
    """A class of both with these members: the one that was made before, if an instance of it lives.

    ``forward``: makes its forward, if it is not that of ``base``. ``made_by``: a function that makes the class again,
    and its arguments, if this function with these members is not to.
    """
    make, *arguments = made_by or (fused_class, base, origin)
    made_by = make, arguments, {} if made_by else members
    members = {"fused_norm_made_by": made_by, **members}
    if (made_before := _made_before(origin, members)) is not None:
        return made_before

    def reduce_ex(self: nn.Module, protocol: int) -> Any:
        constructor, values, *state = origin.__reduce_ex__(self, protocol)
        if not values or values[0] is not derived:  # a subclass made by others (FSDP's) pickles in its own way
            return constructor, values, *state
        if not are_plain_calls(inside=derived):  # what runs is the forward that the class has now
            return constructor, (origin, *values[1:]), *state
        return _rebuild, (origin, made_by, derived.fused_norm_key), *state

    members |= {name: getattr(origin, name) for name in ("__module__", "__qualname__", "__doc__")}
    members |= {
        "fused_norm_origin": origin,
        "fused_norm_origin_forward": origin.forward,
        "fused_norm_origin_code": RunningCode(origin.forward),
        "fused_norm_key": uuid4().hex,
        "kernel_layer_name": _NoHubKernel(),
        "__reduce_ex__": reduce_ex,
    }
    if forward is not None:
        members["forward"] = forward()
    derived = type(origin)(origin.__name__, (base, origin), members)
    derived.fused_norm_forward = derived.forward
    return derived


def _made_before(origin: Any, members: Mapping[str, Any]) -> Any:
    """The fused class for modules of class ``origin`` that has these members, if an instance of it lives; or None."""
    for subclass in origin.__subclasses__():  # this list does not hold them
        is_alike = all(vars(subclass).get(name) == value for name, value in members.items())
        if is_alike and are_plain_calls(inside=subclass):
            return subclass
    return None


def _rebuild(origin: Any, made_by: tuple[Any, ...], key: str) -> nn.Module:
    """An empty instance of a fused class, for pickle and deepcopy to fill.

    ``key``: that of the class. In another process, or if none of its instances lives, the class is made again, of the
    code that runs there.
    """
    make, arguments, members = made_by
    kind: Any = _made_before(origin, {"fused_norm_key": key}) or make(*arguments, **members)
    return object.__new__(kind)


def _guarded_forward(
    origin: Any, rewrites: tuple[Rewrite, ...], recompute: RecomputeLevel, *, cuda_graphs: bool
) -> Forward:
    """The forward of a class with these rewrites, which asks at each call whether all that it bypasses is still plain.

    If other code would miss a call of a norm or an activation, a second forward runs, which makes every call.
    If other code has put a forward of its own on ``origin`` since, or code into that one, that runs.

    Raises:
        SourceError: if the forward cannot be rewritten.
    """
    norms, bypassed = bypassed_by(origin, rewrites) if rewrites else ([], [])
    activations = [(_look_up(origin, act), activation) for act, activation in bypassed]
    straight = rewritten_forward(origin, rewrites)
    calling = rewritten_forward(origin, tuple(rewrites_with_calls(origin, rewrites)))

    @cache
    def note() -> None:
        logger.info("%s calls its modules one by one because other code sees some of these calls", origin.__name__)

    def other(self: Any) -> Forward:
        """The forward for a module that the straight one is not for."""
        if switch.depth or not are_plain_calls(inside=type(self)):
            return taking_tensors(origin.forward)
        if torch.compiler.is_compiling():
            return origin.forward
        note()
        return calling

    @wraps(straight)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        modules: Any = self._modules
        called: list[Any] = []
        is_same = not switch.depth
        for name in norms:
            norm = modules[name] if name in modules else member_of(self, name)
            is_same = is_same and isinstance(norm, FusedNorm) and type(norm).forward is FusedNorm.forward
            called.append(norm)
        for look_up, activation in activations:
            act = look_up(self)
            is_same = is_same and activation.is_now(act)
            if activation.kind is not None:
                called.append(act)
        run = straight if is_same and are_plain_calls(*called, inside=type(self)) else other(self)
        if recompute and (run is straight or run is calling):
            return call_recomputing(run, self, args, kwargs, recompute)
        return run(self, *args, **kwargs)

    return replayed(forward) if cuda_graphs else forward


def _look_up(origin: Any, act: Callee) -> Callable[[nn.Module], Any]:
    """The function that looks an activation up in a module, or among the globals of the class's forward."""
    name, _, number = act.name.partition(".")
    source = act.name if act.is_function else f"self.{name}" + (f"[{number}]" if number else "")
    return eval(f"lambda self: {source}", namespace_of(origin))
