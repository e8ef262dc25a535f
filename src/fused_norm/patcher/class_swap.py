"""The fused classes, and the change of an instance's class into one of them and back.

A fused class derives from the instance's own class and keeps its names, so ``isinstance``, FSDP's auto-wrap policies,
device maps and weight initialisation, which all go by class or by name, see what they saw before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from ..spec import Casting, FusedNormError, GatedNormSpec, NormSpec
from .adapter_casts import FusedAdapter
from .fused_block import FusedBlock
from .fused_norm_module import FusedGatedNorm, FusedNorm, has_origin_forward
from .patterns import activations_of, rewritten_forward, rotations_of
from .patterns.calls import Rewrite
from .recompute import call_recomputing
from .source import cells_of

Fused = FusedNorm | FusedBlock | FusedAdapter
"""The bases of fused classes."""

_Recipe = tuple[Callable[..., Any], tuple[Any, ...]]
"""The function that makes a fused class of another, and what it takes besides."""

_POPPED = "_fused_norm_popped_forward"


class _NoHubKernel:
    """A descriptor that hides ``kernel_layer_name``: transformers would bind a kernel from the hub over the forward."""

    def __get__(self, instance: object, owner: type | None = None) -> str:
        raise AttributeError("kernel_layer_name: a fused norm takes no kernel from the hub")


def fused_norm_class(origin: Any, spec: NormSpec, eps_name: str, replaced: Casting | None = None) -> type[nn.Module]:
    """The fused class for norms of class ``origin`` that compute ``spec``, with eps in the attribute ``eps_name``.

    ``replaced``: the casting of ``origin``, where that of ``spec`` is another one.
    """
    recipe = fused_norm_class, (spec, eps_name, replaced)
    return _known(origin, recipe) or _derive(
        FusedGatedNorm if isinstance(spec, GatedNormSpec) else FusedNorm,
        origin,
        recipe,
        fused_norm_spec=spec,
        fused_norm_replaced=replaced,
        fused_norm_eps_name=eps_name,
        kernel_layer_name=_NoHubKernel(),
    )


def fused_block_class(origin: Any, rewrites: tuple[Rewrite, ...], recompute: bool = False) -> type[nn.Module]:
    """The fused class for modules of class ``origin``, with these rewrites of their forward.

    ``recompute``: what fused operators return in its forward is recomputed in the backward (``recompute.py``).

    Raises:
        SourceError: where the forward cannot be rewritten.
    """
    recipe = fused_block_class, (rewrites, recompute)
    rotations = rotations_of(origin, rewrites) if rewrites else ()
    if known := _known(origin, recipe, fused_norm_rotations=rotations):
        return known
    forward = origin.forward
    rewritten = rewritten_forward(origin, rewrites) if rewrites else forward

    @wraps(rewritten)
    def rewritten_or_replaced(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Other code may have put a forward of its own on the class, with other arguments, since the model was patched.
        current = origin.forward
        if current is not forward:
            return current(self, *args, **kwargs)
        if recompute:
            return call_recomputing(rewritten, self, args, kwargs)
        return rewritten(self, *args, **kwargs)

    return _derive(
        FusedBlock,
        origin,
        recipe,
        fused_norm_rewrites=rewrites,
        fused_norm_rotations=rotations,
        fused_norm_recompute=recompute,
        fused_norm_activations=activations_of(rewrites),
        forward=rewritten_or_replaced,
    )


def fused_adapter_class(origin: Any) -> type[nn.Module]:
    """The fused class for LoRA layers of class ``origin``."""
    recipe: _Recipe = fused_adapter_class, ()
    return _known(origin, recipe) or _derive(FusedAdapter, origin, recipe)


def _known(origin: Any, recipe: _Recipe, **members: Any) -> Any:
    """The class that was derived by this recipe before, with these members; None without one.

    It lives as long as an instance does: the list of a class's subclasses does not hold them.
    """
    wanted = {"fused_norm_recipe": recipe, **members}
    for one in origin.__subclasses__():
        if all(vars(one).get(name) == value for name, value in wanted.items()) and has_origin_forward(one):
            return one
    return None


def _derive(base: type, origin: Any, recipe: _Recipe, **members: Any) -> type[nn.Module]:
    make, arguments = recipe

    def reduce_ex(self: nn.Module, protocol: int) -> Any:
        constructor, values, *state = origin.__reduce_ex__(self, protocol)
        if not values or values[0] is not derived:  # a subclass made by others (FSDP's) pickles in its own way
            return constructor, values, *state
        if not has_origin_forward(derived):  # what runs is the forward that the class has now
            return constructor, (origin, *values[1:]), *state
        return _rebuild, (make, origin, arguments), *state

    names = {"__module__": origin.__module__, "__qualname__": origin.__qualname__, "__doc__": origin.__doc__}
    facts = {
        "fused_norm_origin": origin,
        "fused_norm_origin_forward": origin.forward,
        "fused_norm_recipe": recipe,
    }
    members = {**names, **members, **facts, "__reduce_ex__": reduce_ex}
    derived = type(origin)(origin.__name__, (base, origin), members)
    derived.fused_norm_forward = derived.forward
    return derived


def _rebuild(make: Callable[..., type], origin: type, arguments: tuple[Any, ...]) -> nn.Module:
    """An empty instance of a fused class, for pickle and deepcopy to fill."""
    return object.__new__(make(origin, *arguments))


def stock_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module in the stock model."""
    return module.fused_norm_origin if isinstance(module, Fused) else type(module)


def fused_class(module: Fused) -> Any:
    """The class that was put on a module: its own, or one that other code has built upon."""
    return next(base for base in type(module).__mro__ if "fused_norm_origin" in vars(base))


def class_forward_replaced(origin: type[nn.Module]) -> str | None:
    """The reason, for a report, that other code has put its forward on a class; None where the class has its own."""
    if origin.forward is nn.Module.forward:
        return None
    forward: Any = inspect.unwrap(origin.forward)
    place = f"{getattr(forward, '__module__', '?')}.{getattr(forward, '__qualname__', forward)}"
    if any(place == f"{base.__module__}.{base.__qualname__}.forward" for base in origin.__mro__):
        return None
    return f"its class's forward was replaced, by {place}"


def fused_forward_replaced(fused: Any) -> str | None:
    """The reason, for a report, that other code has put its forward on a fused class; None where it has its own."""
    if fused.forward is fused.fused_norm_forward:
        return None
    return f"the forward of its fused class was replaced, by {_name_of(fused.forward)}"


def foreign_forward(module: nn.Module) -> str | None:
    """The reason why a change of class would not take effect: other code has put a ``forward`` on this instance."""
    if isinstance(module, Fused) and (owner := fused_forward_replaced(fused_class(module))):
        return owner
    forward = vars(module).get("forward")
    if forward is None or _is_bound(forward, module):
        return None
    if _is_bound(vars(module).get("_old_forward"), module):  # accelerate calls the forward that it keeps there
        return None
    if _cell_of_forward(module) is not None:
        return None
    return f"its forward was replaced on the instance, by {_name_of(forward)}"


def is_called_around(norm: nn.Module) -> bool:
    """Return whether calls go through a ``forward`` that other code, accelerate included, has put on this instance."""
    forward = vars(norm).get("forward")
    return forward is not None and not _is_bound(forward, norm)


def is_called_in_parallel(norm: nn.Module) -> bool:
    """Return whether calls go through a function of transformers' tensor parallelism, which cuts the first argument."""
    return _cell_of_forward(norm) is not None


def _name_of(forward: Any) -> str:
    function = getattr(forward, "func", getattr(forward, "__func__", forward))
    name = getattr(function, "__qualname__", type(forward).__name__)
    return f"{getattr(function, '__module__', '?')}.{name}"


@dataclass(frozen=True)
class ClassChange:
    """A module and the class that it is to have."""

    module: nn.Module
    new: type[nn.Module]


def change_to(module: nn.Module, new: type[nn.Module]) -> list[ClassChange]:
    """The change that gives a module this class, where it has another one.

    Raises:
        FusedNormError: where other code has built on its fused class.
    """
    if isinstance(module, Fused):
        if fused_class(module) is new:
            return []
        origin_of(module)  # raises there
    return [] if type(module) is new else [ClassChange(module, new)]


def change_class(module: nn.Module, new: type[nn.Module]) -> Callable[[], None]:
    """Give ``module`` another class, and return a function that puts class and attributes back."""
    old, attributes = type(module), dict(vars(module))
    _rebind(module, new)

    def undo() -> None:
        if (cell := _cell_of_forward(module)) is not None:
            cell.cell_contents = MethodType(old.forward, module)
        module.__class__ = old
        vars(module).clear()
        vars(module).update(attributes)

    return undo


def built_upon(module: Fused) -> bool:
    """Return whether other code has derived a class of its own from the fused one, as FSDP does when it shards."""
    return "fused_norm_origin" not in vars(type(module))


def origin_of(module: Fused) -> type[nn.Module]:
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
    the one in ``_old_forward``, and transformers' tensor parallelism one that its function in ``forward`` closes over:
    these are made anew.
    """
    attributes = vars(module)
    bound = _is_bound(attributes.get("forward"), module)
    kept_by_accelerate = _is_bound(attributes.get("_old_forward"), module)
    cell = _cell_of_forward(module)
    module.__class__ = new
    if cell is not None:
        cell.cell_contents = MethodType(new.forward, module)
    if bound:
        del attributes["forward"]
        if issubclass(new, Fused):
            attributes[_POPPED] = True
    if attributes.get(_POPPED) and not issubclass(new, Fused):
        del attributes[_POPPED]
        attributes["forward"] = MethodType(new.forward, module)
    if kept_by_accelerate:
        attributes["_old_forward"] = MethodType(new.forward, module)


def _cell_of_forward(module: nn.Module) -> CellType | None:
    """Return the cell with the forward of a module's class, for the function that tensor parallelism calls instead.

    None without such a function: transformers has them since 5.17, for norms whose rows are cut between devices.
    """
    function = vars(module).get("forward")
    if not isinstance(function, FunctionType) or not function.__module__.startswith("transformers.distributed."):
        return None
    cell = cells_of(function).get("original_forward")
    return cell if cell is not None and _is_bound(cell.cell_contents, module) else None


def _is_bound(forward: Any, module: nn.Module) -> bool:
    """Return whether ``forward`` is the class's own, bound to the instance, so that dropping it changes nothing."""
    return (
        isinstance(forward, MethodType)
        and forward.__self__ is module
        and forward.__func__ is getattr(type(module), "forward", None)
    )
