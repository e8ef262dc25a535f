"""The change of an instance's class into a fused one and back, and what other code has put in the way of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from ..spec import FusedNormError
from .graph_guards import GRAPHS
from .hooks import Fused, name_of_function, stock_class
from .source import cells_of
from .trl_head import cell_of_forward, is_out_of_reach, with_operator, without_operator

_POPPED = "_fused_norm_popped_forward"


def _own_fused_class(module: Fused) -> Any:
    """The class that was put on a module: its own, or one that other code has built upon."""
    return next(base for base in type(module).__mro__ if "fused_norm_origin" in vars(base))


def why_class_overridden(origin: type[nn.Module]) -> str | None:
    """The reason, for a report, that other code has put its forward on a class; None if the class has its own."""
    if origin.forward is nn.Module.forward:
        return None
    forward: Any = inspect.unwrap(origin.forward)
    place = f"{getattr(forward, '__module__', '?')}.{getattr(forward, '__qualname__', forward)}"
    if any(place == f"{base.__module__}.{base.__qualname__}.forward" for base in origin.__mro__):
        return None
    return f"its class's forward was replaced, by {place}"


def why_fused_overridden(fused: Any) -> str | None:
    """The reason, for a report, that other code has put its forward on a fused class; None if it has its own."""
    if fused.forward is fused.fused_norm_forward:
        return None
    return f"the forward of its fused class was replaced, by {name_of_function(fused.forward)}"


def why_instance_overridden(module: nn.Module, *, under_autocast: bool = False) -> str | None:
    """The reason why a change of class would not take effect: other code has put a ``forward`` on this instance.

    ``under_autocast``: what counts is the forward that accelerate's one runs under autocast.
    """
    if isinstance(module, Fused) and (override := why_fused_overridden(_own_fused_class(module))):
        return override
    forward = vars(module).get("forward")
    if under_autocast:
        forward = vars(module).get("_original_forward", forward)
    if forward is None or _is_bound(forward, module):
        return None
    if _is_bound(vars(module).get("_old_forward"), module):  # accelerate calls the forward that it keeps there
        return None
    if _cell_of_forward(module) is not None and not is_out_of_reach(module):
        return None
    return f"its forward was replaced on the instance, by {name_of_function(forward)}"


def is_called_around(norm: nn.Module, *, with_residual: bool) -> bool:
    """Return whether calls go through other code on this instance: a ``forward``, accelerate's included, or a compiler.

    ``with_residual``: they may be calls with a residual, in whose way only transformers' tensor parallelism is: its
    function cuts the first argument.
    """
    forward = vars(norm).get("forward")
    if with_residual:
        return _cell_of_forward(norm) is not None
    return norm._compiled_call_impl is not None or (forward is not None and not _is_bound(forward, norm))


ClassChange = tuple[nn.Module, type[nn.Module]]
"""A module and the class that it is to have."""


def has_to_change(module: nn.Module, new: type[nn.Module]) -> bool:
    """Return whether a module has another class than this one.

    Raises:
        FusedNormError: if other code has built on its fused class.
    """
    if isinstance(module, Fused):
        if _own_fused_class(module) is new:
            return False
        original_class(module)  # raises there
    return type(module) is not new


def change_class(module: nn.Module, new: type[nn.Module]) -> Callable[[], None]:
    """Give ``module`` another class, and return a function that puts class and attributes back.

    With the class change the bound forwards of the old one that the instance holds. transformers 4 leaves one in
    ``forward``: it is dropped, and put back when the class changes back. accelerate calls the one in ``_old_forward``,
    and transformers' tensor parallelism one that its function in ``forward`` closes over, as TRL's head does: these are
    made anew. TRL's head gets the operator in a model with a fused loss, and is TRL's own in any other.
    """
    old, attributes = type(module), vars(module)
    before = dict(attributes)

    def undo() -> None:
        if (cell := _cell_of_forward(module)) is not None:
            cell.cell_contents = MethodType(old.forward, module)
        module.__class__ = old
        attributes.clear()
        attributes.update(before)

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
    if "forward" in attributes:
        forward = without_operator(attributes["forward"])
        attributes["forward"] = with_operator(module, forward) if hasattr(new, "fused_norm_head_class") else forward
    if not getattr(new, "fused_norm_cuda_graphs", False):
        attributes.pop(GRAPHS, None)
    return undo


def has_derived_class(module: Fused) -> bool:
    """Return whether other code has derived a class of its own from the fused one, as FSDP does when it shards."""
    return "fused_norm_origin" not in vars(type(module))


def original_class(module: Fused) -> type[nn.Module]:
    """The class that a fused instance had before.

    Raises:
        FusedNormError: if other code has derived a class of its own from the fused one.
    """
    if has_derived_class(module):
        bases = ", ".join(f"{base.__module__}.{base.__name__}" for base in type(module).__bases__)
        raise FusedNormError(
            f"{type(module).__name__} was derived from a fused class afterwards (its bases: {bases}); "
            "call remove_fused_norm before sharding or wrapping the model"
        )
    return stock_class(module)


def _cell_of_forward(module: nn.Module) -> CellType | None:
    """Return the cell with the forward of a module's class, for the function that tensor parallelism calls instead.

    transformers has such functions since 5.17, for norms whose rows are cut between devices. TRL's trainers put one on
    language models. None without one.
    """
    cell = cell_of_forward(module)
    function = vars(module).get("forward")
    if isinstance(function, FunctionType) and function.__module__.startswith("transformers.distributed."):
        cell = cells_of(function).get("original_forward")
    return cell if cell is not None and _is_bound(cell.cell_contents, module) else None


def _is_bound(forward: Any, module: nn.Module) -> bool:
    """Return whether ``forward`` is the class's own, bound to the instance, so that dropping it changes nothing."""
    return (
        isinstance(forward, MethodType)
        and forward.__self__ is module
        and forward.__func__ is getattr(type(module), "forward", None)
    )
