"""Hooks, replaced forwards and modes of PyTorch: what other code would notice if a module were not called.

A kernel takes the place of a module's call only if nothing else happens at that call than the module's own forward.
``Fused``, the base of the classes whose calls do that, is here too.
"""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

from ..kernels.switch import modes, switch, why_seen_by_mode
from .running_code import RunningCode

_LINEAR = torch._C._nn.linear
_MODULE_CALL = nn.Module.__call__


class Fused(nn.Module):
    """Base of the fused classes; each also derives from the class of the instances that it is put on.

    Attributes:
        fused_norm_origin: that class.
        fused_norm_origin_forward: its forward when the fused class was made.
        fused_norm_origin_code: the code of that forward then.
    """

    fused_norm_origin: ClassVar[Any]
    fused_norm_origin_forward: ClassVar[Any]
    fused_norm_origin_code: ClassVar[RunningCode]

    @property
    def fused_norm_what(self) -> str:
        """The name of what is fused in this module, such as ``norm (llama)``."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Return the line of ``print(model)``: that of the stock module, and after it what is fused."""
        return ", ".join(filter(None, [super().extra_repr(), f"fused: {self.fused_norm_what}"]))


def stock_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module in the stock model."""
    return module.fused_norm_origin if isinstance(module, Fused) else type(module)


def has_hooks(module: nn.Module) -> bool:
    """Return whether any hook, the module's own or a global one, would see a call of the module."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _global_forward_hooks
        or _global_forward_pre_hooks
        or _global_backward_hooks
        or _global_backward_pre_hooks
    )


def are_plain_calls(*modules: Any, inside: Any = None, linears: bool = False) -> bool:
    """Return whether calls of modules run the forwards of their classes, and no hook or wrapper sees them.

    A fused class among theirs has to stand for what runs in stock: no code has put another forward on its origin since,
    nor other code into that forward, as ``%autoreload`` does.

    Args:
        modules: the modules.
        inside: a fused class of which that is asked too; without modules of it alone.
        linears: linears are among them, so that ``why_linears_replaced`` has to be None.
    """
    if modules and (
        _global_forward_hooks or _global_forward_pre_hooks or _global_backward_hooks or _global_backward_pre_hooks
    ):
        return False
    if linears:
        is_suspect = functional.linear is not _LINEAR or switch.latest_mode is not None or modes()
        for kind, forward, code in _OF_LINEARS:
            is_suspect = is_suspect or kind.forward is not forward or forward.__code__ is not code
        if is_suspect and why_linears_replaced() is not None:
            return False
    fused = [] if inside is None else [inside]
    for module in modules:
        own, kind = module.__dict__, type(module)
        if (
            "forward" in own
            or own.get("_compiled_call_impl") is not None
            or kind.__call__ is not _MODULE_CALL
            or module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
        ):
            return False
        if hasattr(kind, "fused_norm_origin"):
            fused.append(kind)
    is_compiling = torch.compiler.is_compiling()
    for kind in fused:
        forward, running = kind.fused_norm_origin.forward, kind.fused_norm_origin_code
        if forward is not kind.fused_norm_origin_forward:
            return False
        quick = None if is_compiling else running.quick
        is_same = quick is not None and quick == (forward.__code__, id(forward.__defaults__), forward.__kwdefaults__)
        if not is_same and not running.is_in(forward):
            return False
    return True


def is_idle_dropout(module: Any) -> bool:
    """Return whether a module is a dropout that returns what it is given, and nobody would miss its call."""
    kind = type(module)
    is_idle = kind is nn.Identity or (kind is nn.Dropout and not (module.training and module.p))
    return is_idle and are_plain_calls(module) and is_genuine(kind)


def why_linears_replaced() -> str | None:
    """Return the reason why linears, or dropouts before them, may not compute what PyTorch's do; or None."""
    if functional.linear is not _LINEAR:
        return f"torch.nn.functional.linear was replaced, by {name_of_function(functional.linear)}"
    for kind, genuine, code in _OF_LINEARS:
        forward: Any = kind.forward
        if forward is not genuine or forward.__code__ is not code:
            return f"the forward of torch.nn.{kind.__name__} was replaced, by {name_of_function(forward)}"
    return why_seen_by_mode()


def is_genuine(cls: Any) -> bool:
    """Return whether a class has the forward that stands in its own source, with no function around it."""
    forward = cls.forward
    genuine = _GENUINE.get(cls)
    if genuine is not None and forward is genuine[0] and forward.__code__ is genuine[1]:
        return True
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    if (
        type(forward) is not FunctionType
        or hasattr(forward, "__wrapped__")
        or forward.__globals__ is not vars(sys.modules[owner.__module__])
        or forward.__code__.co_qualname != f"{owner.__qualname__}.forward"
    ):
        return False
    _GENUINE[cls] = forward, forward.__code__
    return True


_GENUINE: dict[Any, tuple[Any, Any]] = {}
"""The forwards, with their code, that classes have had from their own source; asked for at every call."""

# Before other code may replace them; one that was replaced before this import never is what it was.
_OF_LINEARS = [
    (kind, kind.forward, kind.forward.__code__ if is_genuine(kind) else None)
    for kind in (nn.Linear, nn.Dropout, nn.Identity)
]


def why_forward_replaced(cls: Any) -> str | None:
    """Return the reason that other code has put its forward on a class whose own one has no decorator; or None."""
    return None if is_genuine(cls) else f"its class's forward was replaced, by {name_of_function(cls.forward)}"


def name_of(cls: type) -> str:
    """The name of a class for messages: that of a LoRA layer as PEFT prints it."""
    return f"lora.{cls.__name__}" if cls.__module__.startswith("peft.tuners.lora.") else cls.__name__


def name_of_function(function: Any) -> str:
    """Return the full name of a function for a message; of a method or a partial, that of the function inside."""
    function = getattr(function, "func", getattr(function, "__func__", function))
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{getattr(function, '__module__', '?')}.{name}"


def short_name(function: Any) -> str:
    """Return the name of a function without its module; of a module that stands for one, its class's."""
    return getattr(function, "__name__", type(function).__name__)


def runs_as_compared(value: Any, function: Any, running: RunningCode) -> bool:
    """Return whether ``value`` is a function, or a module that stands for one, and runs the code that was compared.

    No hook or other code would see it called.
    """
    if value is not function:
        return False
    if type(value) is FunctionType:
        quick = None if torch.compiler.is_compiling() else running.quick
        is_same = quick is not None and quick == (value.__code__, id(value.__defaults__), value.__kwdefaults__)
        return is_same or running.is_in(value)
    return _has_forward_of_class(value) and not has_hooks(value) and running.is_in(type(value).forward)


def is_function_as_module(value: Any) -> bool:
    """Return whether a value is a module that stands for a function, as Hugging Face's ``kernels`` makes them."""
    return isinstance(value, nn.Module) and next(value.parameters(), None) is None and _has_forward_of_class(value)


def _has_forward_of_class(module: nn.Module) -> bool:
    """Return whether a module runs the forward of its class, which ``kernelize`` may bind to the instance."""
    forward = vars(module).get("forward")
    return forward is None or getattr(forward, "__func__", None) is type(module).forward


def defined_function(module: str, name: str) -> FunctionType | None:
    """Return the function that a loaded module itself defines by this name; None without one, or for another's code."""
    namespace = vars(sys.modules.get(module, sys))
    value = namespace.get(name)
    if type(value) is not FunctionType or value.__globals__ is not namespace:
        return None
    code = value.__code__
    return value if (code.co_filename, code.co_qualname) == (namespace["__file__"], name) else None
