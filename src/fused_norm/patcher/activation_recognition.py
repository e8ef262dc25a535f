"""The recognition of the activation of a gated MLP by what it computes, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType, MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from .fused_norm_module import has_hooks
from .norm_recognition import UnrecognisedError, same_values

Formula = Literal["silu", "gelu", "gelu_tanh"]

FORMULAS: Mapping[Formula, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": nn.functional.silu,
        "gelu": nn.functional.gelu,
        "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
    }
)
"""The activations that the fused operator knows, as stock code computes them."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN = (bool, int, float, str, type(None), FunctionType, BuiltinFunctionType)


@dataclass(frozen=True)
class Activation:
    """An activation whose values are those of a formula.

    Attributes:
        formula: a key of ``FORMULAS``.
        function: the function; of a module, the forward of its class.
        kind: the module's class; None for a function.
        settings: the module's own attributes, by name.
    """

    formula: Formula
    function: Callable[..., Any]
    kind: type[nn.Module] | None
    settings: tuple[tuple[str, Any], ...]

    def is_now(self, value: Any) -> bool:
        """Return whether ``value`` is this activation, and no hook or other code would see it called."""
        if self.kind is None:
            return value is self.function
        return (
            type(value) is self.kind
            and type(value).forward is self.function
            and "forward" not in value.__dict__
            and not has_hooks(value)
            and all(_setting(getattr(value, name, None)) == setting for name, setting in self.settings)
        )


def recognise_activation(value: Any) -> Activation:
    """Return what is known of an activation, a module or a function, that computes one of ``FORMULAS``.

    Raises:
        UnrecognisedError: where it computes something else, or cannot be run to find out.
    """
    if isinstance(value, (FunctionType, BuiltinFunctionType)):
        return _known(value, None, ())
    if not isinstance(value, nn.Module):
        raise UnrecognisedError(f"its activation is a {type(value).__name__}, neither a module nor a function")
    name = type(value).__name__
    if held := [*value._parameters, *value._buffers, *value._modules]:
        raise UnrecognisedError(f"its activation {name} holds {', '.join(held)}")
    inherited = vars(nn.Module())
    own = {key: setting for key, setting in vars(value).items() if key not in inherited and not key.startswith("_")}
    own.pop("forward", None)
    settings = tuple((key, _setting(setting)) for key, setting in sorted(own.items()))
    for key, setting in settings:
        function = setting.function if isinstance(setting, _Partial) else setting
        if not isinstance(function, _PLAIN):
            raise UnrecognisedError(f"its activation {name} holds {key}, a {type(function).__name__}")
    return _known(type(value).forward, type(value), settings)


def _known(function: Callable[..., Any], kind: Any, settings: tuple[tuple[str, Any], ...]) -> Activation:
    formula = _formula_of(function, kind, settings)
    if formula is None:
        name = function.__name__ if kind is None else kind.__name__
        raise UnrecognisedError(f"its activation {name} computes none of {', '.join(FORMULAS)}")
    return Activation(formula, function, kind, settings)


class _Partial(NamedTuple):
    """A partial function in a form that is equal for equal ones; itself it is only equal to itself."""

    function: Any
    arguments: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]


def _setting(value: Any) -> Any:
    """An attribute in a form that is equal for equal attributes."""
    if isinstance(value, partial):
        return _Partial(
            value.func, tuple(value.args), tuple(value.keywords.items())
        )  # to Dynamo of 2.11 args are a list
    return value


@cache
def _formula_of(function: Callable[..., Any], kind: Any, settings: tuple[tuple[str, Any], ...]) -> Formula | None:
    calls: list[Callable[..., Any]] = [function]
    if kind is not None:
        calls = []
        for training in (True, False):
            shadow: nn.Module = object.__new__(kind)
            nn.Module.__init__(shadow)
            vars(shadow).update({key: _restored(setting) for key, setting in settings}, training=training)
            calls.append(partial(function, shadow))
    matches = [formula for formula, expected in FORMULAS.items() if all(_agrees(call, expected) for call in calls)]
    return matches[0] if len(matches) == 1 else None


def _restored(setting: Any) -> Any:
    if isinstance(setting, _Partial):
        return partial(setting.function, *setting.arguments, **dict(setting.named))
    return setting


def _agrees(call: Callable[[Tensor], Any], expected: Callable[[Tensor], Tensor]) -> bool:
    """Return whether both give the same bits for values of every size, the same gradient, and leave x alone."""
    generator = torch.Generator().manual_seed(0)
    cpu, exact = torch.device("cpu"), torch.autocast("cpu", enabled=False)
    with cpu, exact, torch.inference_mode(False), torch.no_grad():
        plain = torch.randn(1024, generator=generator, dtype=torch.float32)
        scales = torch.tensor([1e-6, 1e-3, 1.0, 4.0, 16.0, 1e3, 1e6, torch.nan])
        values = (plain[:, None] * scales).view(64, -1)
        for dtype in _DTYPES:
            x = values.to(dtype)
            given = x.clone()
            try:
                actual = call(given)
            except Exception:  # a foreign function may raise anything
                return False
            if not isinstance(actual, Tensor) or not same_values(given, x) or not same_values(actual, expected(x)):
                return False
        x = plain.requires_grad_()
        with torch.enable_grad():
            y = call(x * 1)
            if not y.requires_grad:
                return False
            dx, wanted = (torch.autograd.grad(one.sum(), x)[0] for one in (y, expected(x)))
        return torch.allclose(dx, wanted, rtol=1e-4, atol=1e-5)
