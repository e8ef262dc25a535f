"""Runs code beside known formulas on small tensors on the CPU and compares them bit for bit, to find what it computes.

Each sort of code (norms, rotary embeddings, activations) brings its cases and its formula to a ``Recognizer``. What was
found is known again by all that the code reaches (``reached_code.py``), so that it is found anew if any of that is
another, or if it reaches something of which that cannot be told.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from .reached_code import Reached

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_MOST_OUTCOMES = 1024

T = TypeVar("T")


class UnrecognisedError(Exception):
    """Code that computes nothing known here, or cannot be run to find out; the message says why."""


class NotTakenError(Exception):
    """Code that does not take arguments which not every code takes; the formula is not compared on them."""


class Outcomes(Generic[T]):
    """The results of probes of one sort, remembered by what code reaches; it keeps no class, function or module."""

    def __init__(self) -> None:
        self._outcomes: dict[Any, tuple[T | None, str]] = {}

    def get_or_compute(self, reached: Reached, asked: Any, find: Callable[[], T]) -> T:
        """The result of ``find``, or that of an earlier call for what reaches the same code and values.

        Without a key the result is remembered for this very ``reached`` alone, as long as that is taken to be true.

        Args:
            reached: what the code in question reaches.
            asked: what the result depends on besides.
            find: runs the code to find out.

        Raises:
            UnrecognisedError: as ``find``, or as it has.
        """
        outcomes, key = self._outcomes, (reached.key, asked)
        if reached.key is None:
            outcomes, key = reached.outcomes, (id(self), asked)
        result = outcomes.get(key)
        if result is None:
            try:
                result = find(), ""
            except UnrecognisedError as error:
                result = None, str(error)
            if len(outcomes) >= _MOST_OUTCOMES:
                outcomes.clear()
            outcomes[key] = result
        outcome, reason = result
        if outcome is None:
            raise UnrecognisedError(reason)
        return outcome


@contextlib.contextmanager
def plain_pytorch(*, gradients: bool = False) -> Iterator[None]:
    """PyTorch on the CPU as it is by itself: no autocast, no mode such as of fake tensors, no warnings.

    ``gradients``: they are recorded.
    """
    cpu, exact = torch.device("cpu"), torch.autocast("cpu", enabled=False)
    with (
        _disable_current_modes(),
        cpu,
        exact,
        torch.inference_mode(False),
        torch.set_grad_enabled(gradients),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def cpu_replica(kind: type[nn.Module], attributes: Mapping[str, Any]) -> nn.Module:
    """A module of a class with these attributes, and nothing else but what every module has."""
    replica: nn.Module = object.__new__(kind)
    nn.Module.__init__(replica)
    vars(replica).update(attributes)
    return replica


class Case(NamedTuple):
    """A call of the code in question, and what formulas take besides its arguments.

    Attributes:
        code: what is called.
        given: its arguments.
        facts: what a formula takes before them.
    """

    code: Callable[..., Any]
    given: Sequence[Tensor]
    facts: tuple[Any, ...] = ()


class Recognizer(Generic[T]):
    """Tells which formula code computes, bit for bit, in all cases; the code is run once a case, when it is needed."""

    def __init__(self, cases: Iterable[Case], formula: Callable[..., Any], *, gradients: bool = False) -> None:
        """Compare the code of ``cases`` with ``formula(candidate, *facts, *given)``.

        ``gradients``: those are compared too, up to roundings.
        """
        self._cases, self._formula, self._gradients = iter(cases), formula, gradients
        self._calls: list[tuple[Case, tuple[Tensor, ...]]] = []

    def agrees(self, candidate: T) -> bool:
        """Return whether the code gives the bits of the formula, in all results, and leaves its arguments alone.

        Raises:
            UnrecognisedError: as the code; any other error of the code's is no agreement.
        """
        with plain_pytorch(gradients=self._gradients):
            for case, actual in self._calls_of_code():
                formula = partial(self._formula, candidate, *case.facts)
                expected = (*_results(formula, case.given), *case.given)
                if len(actual) != len(expected) or not all(map(same_values, actual, expected)):
                    return False
                if self._gradients and not agrees_in_gradients(case.code, formula, case.given):
                    return False
        return True

    def _calls_of_code(self) -> Iterator[tuple[Case, tuple[Tensor, ...]]]:
        """The cases that the code takes, each with its results and its arguments after the call."""
        yield from self._calls
        for case in self._cases:
            copies = [one.clone() for one in case.given]
            try:
                self._calls.append((case, (*_results(case.code, copies), *copies)))
            except NotTakenError:
                continue
            yield self._calls[-1]


def agrees_in_gradients(
    code: Callable[..., Any], formula: Callable[..., Any], given: Sequence[Tensor], learnt: Sequence[Tensor] = ()
) -> bool:
    """Return whether code and formula have the same gradients, up to roundings: values do not show what is detached.

    Args:
        code: gives results that are those of the formula.
        formula: what it is compared with.
        given: what both take.
        learnt: what both use besides, and have gradients of.

    Raises:
        UnrecognisedError: if ``code`` reads an attribute of what it is given that tensors do not have by themselves.
    """
    leaves = [one.clone().requires_grad_() for one in given]
    results = [_results(code, [watched(leaf * 1) for leaf in leaves]), _results(formula, [leaf * 1 for leaf in leaves])]
    if len(results[0]) != len(results[1]):
        return False
    for actual, wanted in zip(*results, strict=True):
        if not actual.requires_grad or not torch.allclose(actual, wanted, rtol=1e-4, atol=1e-4):
            return False
        dy = torch.linspace(-1, 2, wanted.numel(), dtype=torch.float32).view_as(wanted)
        both = (
            torch.autograd.grad(y, [*leaves, *learnt], dy, retain_graph=True, materialize_grads=True)
            for y in (actual, wanted)
        )
        if not all(torch.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in zip(*both, strict=True)):
            return False
    return True


def watched(tensor: Tensor) -> Tensor:
    """Return a tensor, or a parameter, in the place of another, that refuses code which reads attributes it lacks.

    The real tensor may have such an attribute, now or later. What is computed of the returned one is a plain tensor.
    """
    kind, is_parameter = type(tensor), isinstance(tensor, nn.Parameter)
    members = {
        "__torch_function__": torch._C._disabled_torch_function_impl,
        "__getattr__": _lacks,
        "_is_param": is_parameter,  # PyTorch asks subclasses
    }
    sub: type[Tensor] = type(kind.__name__, (kind,), members)
    if is_parameter:
        return Tensor._make_subclass(sub, tensor.detach(), tensor.requires_grad)
    return tensor.as_subclass(sub)


def _lacks(tensor: Tensor, name: str) -> Any:
    if name.startswith("__"):  # PyTorch asks for some
        raise AttributeError(name)
    raise UnrecognisedError(f"reads `{name}` of a tensor, which tensors do not have by themselves")


def same_values(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have one dtype, one shape and the same values, NaN among them."""
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _results(code: Callable[..., Any], given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors that code returns; none where it raises an error of its own, or returns something else."""
    try:
        results = code(*given)
    except (NotTakenError, UnrecognisedError):
        raise
    except Exception:  # foreign code may raise anything
        return ()
    results = results if isinstance(results, tuple) and len(results) > 1 else (results,)
    return results if all(isinstance(one, Tensor) for one in results) else ()
