"""Finds out what code computes: runs it on small CPU tensors and compares it bit for bit with known formulas.

Code of others may draw random numbers or change settings; whoever runs it does so within ``plain_pytorch``, which puts
both back.

Each kind of code (norms, rotary embeddings, activations) brings its cases and its formula to a ``Recognizer``. What
code reaches may be replaced, so code that was recognised before is run again at each ``apply_fused_norm``.
"""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn, overrides
from torch.utils import _device
from torch.utils._python_dispatch import _disable_current_modes

from ..kernels.switch import modes
from .running_code import Identity

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_AUTOCAST = ("cpu", "cuda", "xpu")

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"forward"}

T = TypeVar("T")


class UnrecognisedError(Exception):
    """Code that computes no known formula, or cannot be run to find out; the message says why."""


class NotTakenError(Exception):
    """Code does not accept the arguments of a case that not all such code accepts; the case is left out."""


_results_by_key: ContextVar[dict[Any, tuple[Any, str | None]] | None] = ContextVar("fused_norm_results", default=None)
"""Results of ``found_once`` within ``no_code_changes``, by key: each beside None, or None beside an error's message."""


@contextlib.contextmanager
def no_code_changes() -> Iterator[None]:
    """Run code that is alike once, as none is replaced meanwhile, and keep the state of the process."""
    token = _results_by_key.set({})
    try:
        with process_state_kept():
            yield
    finally:
        _results_by_key.reset(token)


def found_once(find: Callable[[], T], *key: Any, reason: str = "") -> T:
    """Return the result of ``find``; within ``no_code_changes``, the earlier one for this key.

    ``reason``: the message of the error if there is no result, in place of that of ``find``.

    Raises:
        UnrecognisedError: if ``find`` does, or did.
    """
    results: dict[Any, tuple[Any, str | None]] = {} if (known := _results_by_key.get()) is None else known
    if key not in results:
        try:
            results[key] = find(), None
        except UnrecognisedError as error:
            results[key] = None, str(error)
    result, message = results[key]
    if message is not None:
        raise UnrecognisedError(reason or message)
    return result


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """The instance's attributes without those that every module has: parameters, hooks, training flag, forward."""
    return {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}


def key_of_module(kind: type[nn.Module], attributes: Mapping[str, Any]) -> Any:
    """A key that modules of one class share if these attributes are the same objects, or equal plain values."""
    try:
        return Identity(kind), tuple((name, _key_of_value(value)) for name, value in attributes.items())
    except RecursionError:  # a container holds itself
        return Identity(attributes)


def _key_of_value(value: Any) -> Any:
    """A key that is equal for the same value alone: neither 1 and True nor 0.0 and -0.0 are the same."""
    kind: Any = type(value)
    if any(kind is plain for plain in (bool, int, str)):
        return kind, value
    if kind is float:
        return kind, value.hex()
    if kind is torch.device:
        return kind, str(value)
    if kind is tuple or kind is list or kind is torch.Size:
        return kind, tuple(map(_key_of_value, value))
    if kind is dict:
        return kind, tuple((_key_of_value(name), _key_of_value(item)) for name, item in value.items())
    if kind is partial and not vars(value):  # each module of some activations has one of its own
        return kind, tuple(map(_key_of_value, (value.func, value.args, value.keywords)))
    return Identity(value)


_FLAGS: Sequence[tuple[Callable[[], Any], Callable[[Any], Any]]] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    *((partial(torch.is_autocast_enabled, on), partial(torch.set_autocast_enabled, on)) for on in _AUTOCAST),
    *((partial(torch.get_autocast_dtype, on), partial(torch.set_autocast_dtype, on)) for on in _AUTOCAST),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    *(
        (partial(getattr, module, name), partial(setattr, module, name))
        for module, name in (
            (torch.backends.cudnn, "deterministic"),
            (torch.backends.cudnn, "benchmark"),
            (torch.utils.deterministic, "fill_uninitialized_memory"),
        )
    ),
)
"""Settings of the process, each as what reads it and what sets it."""


@contextlib.contextmanager
def process_state_kept() -> Iterator[None]:
    """Put random generators, settings of PyTorch and the filters of warnings back as they were before."""
    flags = [(value(), value, put) for value, put in _FLAGS]
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None), _device.CURRENT_DEVICE
    function_modes = overrides._get_current_function_mode_stack()
    seeds = vars(getattr(torch.cuda, "_lazy_seed_tracker", SimpleNamespace()))  # for devices that nobody has used yet
    seeds_before, numpy = dict(seeds), sys.modules.get("numpy.random")
    states = random.getstate(), numpy and numpy.get_state()
    with _disable_current_modes():
        generators = [torch.default_generator, *torch.cuda.default_generators, *torch.xpu.default_generators]
        device_states = [generator.get_state() for generator in generators]
    try:
        with warnings.catch_warnings():
            yield
    finally:
        with _disable_current_modes():
            for generator, state in zip(generators, device_states, strict=True):
                generator.set_state(state)
        random.setstate(states[0])
        if numpy:
            numpy.set_state(states[1])
        seeds.update(seeds_before)
        if overrides._get_current_function_mode_stack() != function_modes:  # the default device is one of them
            for _ in overrides._get_current_function_mode_stack():
                overrides._pop_mode()
            for mode in function_modes:
                overrides._push_mode(mode)
            torch._GLOBAL_DEVICE_CONTEXT.device_context, _device.CURRENT_DEVICE = default
        for before, value, put in flags:
            if value() != before:
                put(before)


@contextlib.contextmanager
def plain_pytorch(*, gradients: bool = False) -> Iterator[None]:
    """Run PyTorch on the CPU without autocast, without modes such as fake tensors, without warnings.

    What runs inside leaves the process as it was. ``gradients``: whether autograd records.
    """
    with (
        _disable_current_modes(),
        torch.device("cpu") if modes() else contextlib.nullcontext(),  # it slows all functions down
        torch.autocast("cpu", enabled=False),
        torch.inference_mode(False),
        torch.set_grad_enabled(gradients),
        process_state_kept(),
    ):
        warnings.simplefilter("ignore")
        yield


def cpu_replica(kind: type[nn.Module], attributes: Mapping[str, Any]) -> nn.Module:
    """Return a module of a class with these attributes, and nothing else but what every module has."""
    replica: nn.Module = object.__new__(kind)
    nn.Module.__init__(replica)
    vars(replica).update(attributes)
    return replica


class Case(NamedTuple):
    """One call of the code in question.

    Attributes:
        code: what is called.
        args: its arguments.
        context: what a formula takes before these arguments.
    """

    code: Callable[..., Any]
    args: Sequence[Tensor]
    context: tuple[Any, ...] = ()


class Recognizer(Generic[T]):
    """Tells which formula code computes, bit for bit, in all cases. The code runs once a case, when it is needed.

    Whoever asks has entered ``plain_pytorch``, once for all candidates.
    """

    def __init__(self, cases: Iterable[Case], formula: Callable[..., Any], *, gradients: bool = False) -> None:
        """Compare the code of ``cases`` with ``formula(candidate, *context, *args)``.

        ``gradients``: compare gradients too, up to rounding.
        """
        self._cases, self._formula, self._gradients = iter(cases), formula, gradients
        self._calls: list[tuple[Case, tuple[Tensor, ...]]] = []

    def agrees(self, candidate: T) -> bool:
        """Return whether the code gives the bits of the formula in all results and leaves its arguments unchanged.

        Raises:
            UnrecognisedError: if the code raises it; code that raises any other error does not agree.
        """
        with torch.set_grad_enabled(self._gradients):
            for case, actual in self._calls_of_code():
                formula = partial(self._formula, candidate, *case.context)
                expected = (*_results(formula, case.args), *case.args)
                if len(actual) != len(expected) or not all(map(same_values, actual, expected)):
                    return False
                if self._gradients and not agrees_in_gradients(case.code, formula, case.args):
                    return False
        return True

    def _calls_of_code(self) -> Iterator[tuple[Case, tuple[Tensor, ...]]]:
        """The cases that the code accepts, each with its results and its arguments after the call."""
        yield from self._calls
        for case in self._cases:
            args = [arg.clone() for arg in case.args]
            with contextlib.suppress(NotTakenError):
                self._calls.append((case, (*_results(case.code, args), *args)))
                yield self._calls[-1]


def agrees_in_gradients(
    code: Callable[..., Any], formula: Callable[..., Any], args: Sequence[Tensor], parameters: Sequence[Tensor] = ()
) -> bool:
    """Return whether code and formula have the same gradients, up to rounding: values do not show a ``detach``.

    Args:
        code: gives results that are those of the formula.
        formula: what it is compared with.
        args: the arguments of both.
        parameters: other tensors that both use and have gradients of.

    Raises:
        UnrecognisedError: if ``code`` reads an attribute of an argument that plain tensors lack.
    """
    leaves = [arg.clone().requires_grad_() for arg in args]
    actual = _results(code, [strict(leaf * 1) for leaf in leaves])
    expected = _results(formula, [leaf * 1 for leaf in leaves])
    if len(actual) != len(expected):
        return False
    for y, stock in zip(actual, expected, strict=True):
        if not y.requires_grad or not torch.allclose(y, stock, rtol=1e-4, atol=1e-4):
            return False
        dy = torch.linspace(-1, 2, stock.numel(), dtype=torch.float32).view_as(stock)
        try:
            grads = [
                torch.autograd.grad(output, [*leaves, *parameters], dy, retain_graph=True, materialize_grads=True)
                for output in (y, stock)
            ]
        except Exception:  # foreign code may raise anything, as what is for inference alone does
            return False
        if not all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*grads, strict=True)):
            return False
    return True


def strict(tensor: Tensor) -> Tensor:
    """Return a tensor or parameter that raises UnrecognisedError if code reads an attribute that it lacks.

    The real tensor may have such an attribute, now or later. What is computed from the returned one is a plain tensor.
    """
    kind, is_parameter = type(tensor), isinstance(tensor, nn.Parameter)
    members = {
        "__torch_function__": torch._C._disabled_torch_function_impl,
        "__getattr__": _refuse_attribute,
        "_is_param": is_parameter,  # PyTorch asks subclasses
    }
    subclass: type[Tensor] = type(kind.__name__, (kind,), members)
    if is_parameter:
        return Tensor._make_subclass(subclass, tensor.detach(), tensor.requires_grad)
    return tensor.as_subclass(subclass)


def _refuse_attribute(tensor: Tensor, name: str) -> Any:
    if name.startswith("__"):  # PyTorch asks for some
        raise AttributeError(name)
    raise UnrecognisedError(f"reads `{name}` of a tensor, which tensors do not have by themselves")


def same_values(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have one dtype, one shape and the same values, NaN included."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _results(code: Callable[..., Any], args: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors that code returns; none if it raises an error of its own or returns something else."""
    try:
        results = code(*args)
    except (NotTakenError, UnrecognisedError):
        raise
    except Exception:  # foreign code may raise anything
        return ()
    if isinstance(results, Tensor):
        return (results,)
    is_several = isinstance(results, tuple) and len(results) > 1
    return results if is_several and all(isinstance(result, Tensor) for result in results) else ()
