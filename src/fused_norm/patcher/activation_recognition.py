"""The recognition of the activation of a gated MLP by what it computes, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from ..kernels.reference import ACTIVATIONS, ActivationName
from .probe import (
    DTYPES,
    Case,
    Recognizer,
    UnrecognisedError,
    cpu_replica,
    found_once,
    key_of_module,
    own_attributes,
    plain_pytorch,
)
from .running_code import RunningCode

_PLAIN = (bool, int, float, str, type(None), FunctionType, BuiltinFunctionType)


@dataclass(frozen=True)
class Activation:
    """An activation that computes a known formula.

    Attributes:
        formula: a key of ``ACTIVATIONS``.
        function: the function; of a module, the forward of its class.
        running: the code of that function that was compared.
        kind: the module's class; None for a function.
        settings: the module's own attributes, by name.
    """

    formula: ActivationName
    function: Callable[..., Any]
    running: RunningCode
    kind: type[nn.Module] | None
    settings: tuple[tuple[str, Any], ...]

    def is_now(self, value: Any) -> bool:
        """Return whether ``value`` is this activation, apart from hooks and wrappers on it; asked at every call."""
        function: Any = self.function
        if value is not function if self.kind is None else (type(value), type(value).forward) != (self.kind, function):
            return False
        for name, setting in self.settings:
            if _setting(getattr(value, name, None)) != setting:
                return False
        return self.running.is_in(function)


def recognise_activation(value: Any) -> Activation:
    """Return the activation that a module or a function computes.

    Raises:
        UnrecognisedError: if it computes none of ``ACTIVATIONS``, or cannot be run to find out.
    """
    kind: Any = None
    key, calls, own = value, [value], dict[str, Any]()
    if not isinstance(value, (FunctionType, BuiltinFunctionType)):
        if not isinstance(value, nn.Module):
            raise UnrecognisedError(f"its activation is a {type(value).__name__}, neither a module nor a function")
        kind = type(value)
        if tensors_or_modules := [*value._parameters, *value._buffers, *value._modules]:
            raise UnrecognisedError(f"its activation {kind.__name__} holds {', '.join(tensors_or_modules)}")
        own = {name: setting for name, setting in sorted(own_attributes(value).items()) if not name.startswith("_")}
        for name, setting in own.items():
            function = setting.func if isinstance(setting, partial) else setting
            if not isinstance(function, _PLAIN):
                raise UnrecognisedError(f"its activation {kind.__name__} holds {name}, a {type(function).__name__}")
        replicas = [cpu_replica(kind, {**own, "training": training}) for training in (True, False)]
        key, calls = key_of_module(kind, own), [partial(kind.forward, replica) for replica in replicas]
    reason = f"its activation {(kind or value).__name__} computes none of {', '.join(ACTIVATIONS)}"
    formula = found_once(lambda: _formula_of(calls), recognise_activation, key, reason=reason)
    forward = value if kind is None else kind.forward
    settings = tuple((name, _setting(setting)) for name, setting in own.items())
    return Activation(formula, forward, RunningCode(forward), kind, settings)


def looks_like_activation(name: str, value: Any) -> bool:
    """Return whether an object that is called by this name is an activation, by the name or by what it computes."""
    if isinstance(value, nn.Module) and next(value.parameters(), None) is not None:
        return False
    try:
        return "act" in name.lower() or bool(recognise_activation(value))
    except UnrecognisedError:
        return False


def _setting(value: Any) -> Any:
    """An attribute in a form that compares by value: a partial function equals itself alone."""
    if isinstance(value, partial):  # whose arguments are a list to Dynamo of 2.11
        return value.func, tuple(value.args), tuple(value.keywords.items())
    return value


@plain_pytorch()
def _formula_of(calls: Sequence[Callable[..., Any]]) -> ActivationName:
    bits, gradients = (
        Recognizer[ActivationName](_cases(calls, way), lambda formula, x: ACTIVATIONS[formula](x), gradients=way)
        for way in (False, True)
    )
    matches = [formula for formula in ACTIVATIONS if bits.agrees(formula) and gradients.agrees(formula)]
    if len(matches) != 1:
        raise UnrecognisedError
    return matches[0]


def _cases(calls: Sequence[Callable[..., Any]], gradients: bool) -> Iterator[Case]:
    """Calls with values of every magnitude; for gradients, of one."""
    plain = torch.randn(1024, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    scales = torch.tensor([1e-6, 1e-3, 1.0, 4.0, 16.0, 1e3, 1e6, torch.nan])
    values = (plain[:, None] * scales).view(64, -1)
    for call in calls:
        yield from (Case(call, [x]) for x in ([plain] if gradients else [values.to(dtype) for dtype in DTYPES]))
