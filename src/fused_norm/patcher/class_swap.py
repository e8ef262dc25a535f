"""The fused classes, and the change of an instance's class into one of them and back.

A fused class derives from the instance's own class and keeps its names, so ``isinstance``, FSDP's auto-wrap policies,
device maps and weight initialisation, which all go by class or by name, see what they saw before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

from torch import nn

from ..spec import FusedNormError, NormSpec
from .forward_rewrite import Rewrite, rewritten_forward, rotations_of
from .fused_block import FusedBlock
from .fused_norm_module import FusedNorm

_POPPED = "_fused_norm_popped_forward"


class _NoHubKernel:
    """A descriptor that hides ``kernel_layer_name``: transformers would bind a kernel from the hub over the forward."""

    def __get__(self, instance: object, owner: type | None = None) -> str:
        raise AttributeError("kernel_layer_name: a fused norm takes no kernel from the hub")


@cache
def fused_norm_class(origin: Any, spec: NormSpec, eps_name: str) -> type[nn.Module]:
    """The fused class for norms of class ``origin`` that compute ``spec``, with eps in the attribute ``eps_name``."""
    return _derive(
        FusedNorm,
        origin,
        (fused_norm_class, (spec, eps_name)),
        fused_norm_spec=spec,
        fused_norm_eps_name=eps_name,
        kernel_layer_name=_NoHubKernel(),
    )


@cache
def fused_block_class(origin: Any, rewrites: tuple[Rewrite, ...]) -> type[nn.Module]:
    """The fused class for modules of class ``origin``, with these rewrites of their forward.

    Raises:
        SourceError: where the forward cannot be rewritten.
    """
    return _derive(
        FusedBlock,
        origin,
        (fused_block_class, (rewrites,)),
        fused_norm_rewrites=rewrites,
        fused_norm_rotations=rotations_of(origin, rewrites),
        forward=rewritten_forward(origin, rewrites),
    )


def _derive(
    base: type, origin: Any, recipe: tuple[Callable[..., type], tuple[Any, ...]], **members: Any
) -> type[nn.Module]:
    make, arguments = recipe

    def reduce_ex(self: nn.Module, protocol: int) -> Any:
        constructor, values, *state = origin.__reduce_ex__(self, protocol)
        if values and values[0] is derived:  # a subclass made by others (FSDP's) pickles in its own way
            return _rebuild, (make, origin, arguments), *state
        return constructor, values, *state

    names = {"__module__": origin.__module__, "__qualname__": origin.__qualname__, "__doc__": origin.__doc__}
    members = {**names, **members, "fused_norm_origin": origin, "__reduce_ex__": reduce_ex}
    derived: type[nn.Module] = type(origin)(origin.__name__, (base, origin), members)
    return derived


def _rebuild(make: Callable[..., type], origin: type, arguments: tuple[Any, ...]) -> nn.Module:
    """An empty instance of a fused class, for pickle and deepcopy to fill."""
    return object.__new__(make(origin, *arguments))


def foreign_forward(module: nn.Module) -> str | None:
    """The reason why a change of class would not take effect: other code has put a ``forward`` on this instance."""
    forward = vars(module).get("forward")
    if forward is None or _is_bound(forward, module):
        return None
    if _is_bound(vars(module).get("_old_forward"), module):  # accelerate calls the forward that it keeps there
        return None
    function = getattr(forward, "func", getattr(forward, "__func__", forward))
    name = getattr(function, "__qualname__", type(forward).__name__)
    return f"its forward was replaced on the instance, by {getattr(function, '__module__', '?')}.{name}"


def change_class(module: nn.Module, new: type[nn.Module]) -> Callable[[], None]:
    """Give ``module`` another class, and return a function that puts class and attributes back."""
    old, attributes = type(module), dict(vars(module))
    _rebind(module, new)

    def undo() -> None:
        module.__class__ = old
        vars(module).clear()
        vars(module).update(attributes)

    return undo


def built_upon(module: FusedNorm | FusedBlock) -> bool:
    """Return whether other code has derived a class of its own from the fused one, as FSDP does when it shards."""
    return "fused_norm_origin" not in vars(type(module))


def origin_of(module: FusedNorm | FusedBlock) -> type[nn.Module]:
    """The class that a fused instance had before.

    Raises:
        FusedNormError: where other code has derived a class of its own from the fused one.
    """
    if built_upon(module):
        bases = ", ".join(f"{base.__module__}.{base.__name__}" for base in type(module).__bases__)
        raise FusedNormError(
            f"{type(module).__name__} was derived from a fused class afterwards (its bases: {bases}); "
            "call remove_fused_norm before sharding or wrapping the model"
        )
    return type(module).fused_norm_origin


def _rebind(module: nn.Module, new: type[nn.Module]) -> None:
    """Change the class, and with it the bound forwards of the old class that the instance holds.

    transformers 4 leaves one in ``forward``: it is dropped, and put back when the class changes back. accelerate calls
    the one in ``_old_forward``, which is made anew.
    """
    attributes = vars(module)
    bound = _is_bound(attributes.get("forward"), module)
    kept_by_accelerate = _is_bound(attributes.get("_old_forward"), module)
    module.__class__ = new
    if bound:
        del attributes["forward"]
        if issubclass(new, (FusedNorm, FusedBlock)):
            attributes[_POPPED] = True
    if attributes.get(_POPPED) and not issubclass(new, (FusedNorm, FusedBlock)):
        del attributes[_POPPED]
        attributes["forward"] = MethodType(new.forward, module)
    if kept_by_accelerate:
        attributes["_old_forward"] = MethodType(new.forward, module)


def _is_bound(forward: Any, module: nn.Module) -> bool:
    """Return whether ``forward`` is the class's own, bound to the instance, so that dropping it changes nothing."""
    return (
        isinstance(forward, MethodType)
        and forward.__self__ is module
        and forward.__func__ is getattr(type(module), "forward", None)
    )
