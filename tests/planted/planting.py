"""Ways to plant a fault in a model that is trained, to see that the convergence suite finds it.

A fault (``faults.py`` has them) replaces the forward or the backward of an operator, or a function of the fused blocks,
for the length of a ``with``. Each counts the numbers that it changed, because a fault that changes none tests nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fused_norm.kernels.backward import BackwardArguments
from fused_norm.kernels.operator import OPERATORS, Operator
from fused_norm.kernels.recording import forget_all
from fused_norm.kernels.switch import switch
from fused_norm.kernels.triton.call import Call
from fused_norm.patcher.fused_block import FusedBlock
from fused_norm.patcher.lazy_logits import CrossEntropy, Projection
from fused_norm.patcher.losses import FusedHead

Results = Sequence[Tensor | None]

Planting = Callable[[nn.Module], contextlib.AbstractContextManager["PlantedFault"]]
"""Plants a fault in a model for the length of a ``with``."""

WEIGHTS = ("dw", "dw_inner", "dq_weight", "dk_weight", "da", "db")
"""The gradients of weights, by their names in ``Operator.gradients``."""


@dataclass
class PlantedFault:
    """A fault that is in place.

    Attributes:
        calls: number of calls that it was part of.
        share: of the numbers that a call gives, those that it changed; of the call in which it changed most.
        memory: what it remembers from call to call.
    """

    calls: int = 0
    share: float = 0.0
    memory: dict[Any, Any] = field(default_factory=dict)

    def count(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Count a call with these pairs of right and actual results."""
        tensors = [pair for pair in pairs if all(isinstance(value, Tensor) for value in pair)]
        self.count_all(max([_share_different(*pair) for pair in tensors], default=0.0))

    def count_all(self, share: float = 1.0) -> None:
        """Count a call in which it changed this share of the numbers."""
        self.calls, self.share = self.calls + 1, max(self.share, share)


def _share_different(right: Tensor, actual: Tensor) -> float:
    """Return the share of the numbers that differ."""
    different = ~((right == actual) | (right.isnan() & actual.isnan()))
    return different.double().mean().item() if different.numel() else 0.0


@dataclass(frozen=True)
class Forward:
    """A forward of an operator that may go wrong; ``call["x"]`` is the argument x.

    Attributes:
        operator, arguments, training: as in ``Operator.forward``.
        right: runs it as it should be, or with other arguments.
        memory: the fault's.
    """

    operator: Operator
    arguments: tuple[Any, ...]
    training: bool
    right: Callable[..., Results]
    memory: dict[Any, Any]

    def __getitem__(self, name: str) -> Any:
        return self.operator.by_name(self.arguments).get(name)

    def results(self, **changed: Any) -> list[Tensor | None]:
        """Return the results; those of changed arguments, given by name, have the dtypes of the right ones."""
        results = self.right(*self.arguments, training=self.training)
        arguments = (self.operator.by_name(self.arguments) | changed).values()
        return _in_dtypes_of(results, self.right(*arguments, training=self.training)) if changed else list(results)

    def edited(self, edit: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        """Return the results with all outputs changed."""
        return _edited(self.results(), self.operator.outputs, edit, self.operator.outputs)


@dataclass(frozen=True)
class Backward:
    """A backward of an operator that may go wrong; ``call["dy"]`` is the gradient of y, ``call["x"]`` the saved x."""

    operator: Operator
    call: BackwardArguments
    right: Callable[..., Results]

    def __getitem__(self, name: str) -> Any:
        return self.operator.backward_by_name(self.call).get(name)

    def results(self, **changed: Any) -> list[Tensor | None]:
        """Return the gradients; those of changed tensors or facts, given by name, have the dtypes of the right ones."""
        results = self.right(self.call)
        values = iter((self.operator.backward_by_name(self.call) | changed).values())
        call = BackwardArguments(*(tuple(next(values) for _ in part) for part in self.call))
        return _in_dtypes_of(results, self.right(call)) if changed else list(results)

    def edited(self, edit: Callable[[Tensor], Tensor], *names: str) -> list[Tensor | None]:
        """Return the gradients with those of these names changed."""
        return _edited(self.results(), self.operator.gradients, edit, names)


def _in_dtypes_of(right: Results, others: Results) -> list[Tensor | None]:
    return [a if a is None or b is None else b.to(a.dtype) for a, b in zip(right, others, strict=True)]


def _edited(
    tensors: list[Tensor | None], names: Sequence[str], edit: Callable[[Tensor], Tensor], chosen: Sequence[str]
) -> list[Tensor | None]:
    for place, name in enumerate(names):
        tensor = tensors[place]
        if tensor is not None and name in chosen:
            tensors[place] = edit(tensor)
    return tensors


def in_forward(operator: Operator, wrong: Callable[[Forward], Results]) -> Planting:
    """Plant a fault in the forward of an operator, whose results ``wrong`` computes."""

    def wronged(operator: Operator, state: PlantedFault) -> Any:
        right = operator.forward

        def forward(call: Call, *arguments: Any, training: bool, **copied: Sequence[str]) -> Results:
            before = [_copy(argument) for argument in arguments]
            expected = Call.at_once(right, *arguments, training=training, **copied)
            again = functools.partial(Call.at_once, right, **copied)
            actual = wrong(Forward(operator, arguments, training, again, state.memory))
            # Tensors saved for the backward do not count.
            triples = zip(operator.outputs, expected, actual, strict=False)
            state.count([*((a, b) for _, a, b in triples), *zip(before, arguments, strict=True)])
            return tuple(actual)

        return replaced_in(operator, forward=forward, empty_results=_traced(operator, "empty_results", right))

    return _in_all_forms(operator, wronged)


def in_backward(operator: Operator, wrong: Callable[[Backward], Results]) -> Planting:
    """Plant a fault in the backward of an operator, whose gradients ``wrong`` computes."""

    def wronged(operator: Operator, state: PlantedFault) -> Any:
        right = operator.backward

        def backward(call: Call, given: BackwardArguments) -> Results:
            before = [_copy(leaf) for leaf in tree_leaves(given.incoming)]
            by_kernels = functools.partial(Call.at_once, right)
            expected = by_kernels(given)
            actual = wrong(Backward(operator, given, by_kernels))
            state.count([*zip(expected, actual, strict=True), *zip(before, tree_leaves(given.incoming), strict=True)])
            return tuple(actual)

        return replaced_in(operator, backward=backward, empty_grads=_traced(operator, "empty_grads", right))

    return _in_all_forms(operator, wronged)


def _traced(operator: Operator, method: str, right: Callable[..., Results]) -> Callable[..., Results]:
    """What tracing takes: the operator's own method, or the right forward or backward, which it would call."""
    own: Callable[..., Results] = getattr(operator, method)
    return right if getattr(type(operator), method) is getattr(Operator, method) else own


def _in_all_forms(operator: Operator, wronged: Callable[[Operator, PlantedFault], Any]) -> Planting:
    """Plant a fault in an operator and in its forms for consumers, which models call."""

    @contextlib.contextmanager
    def planted(model: nn.Module) -> Iterator[PlantedFault]:
        state = PlantedFault()
        with contextlib.ExitStack() as stack:
            for form in [op for op in OPERATORS.values() if operator.name in (op.name, op.plain_name)]:
                stack.enter_context(wronged(form, state))
            yield state

    return planted


def in_head(change: Callable[[CrossEntropy], CrossEntropy]) -> Planting:
    """Plant a fault in the loss that a head is asked for."""

    def wrong(right: Any, memory: Any, head: FusedHead, x: Tensor, request: CrossEntropy, *args: Any) -> Tensor:
        loss: Tensor = right(head, x, request if switch.depth else change(request), *args)
        return loss

    return replaced_by(FusedHead, "fused_norm_cross_entropy", wrong)


@contextlib.contextmanager
def logits_of_the_latest_batch(model: nn.Module) -> Iterator[PlantedFault]:
    """Plant logits that are computed from the hidden states of a head's latest call, whenever they are read."""
    state, compute, post_init = PlantedFault(), Projection.compute, Projection.__post_init__

    def noted(projection: Projection) -> None:
        state.memory["x"] = projection.x
        post_init(projection)

    def wrong(projection: Projection) -> Tensor:
        logits = compute(replace(projection, x=state.memory["x"]))
        state.count([(compute(projection), logits)])
        return logits

    with mock.patch.multiple(Projection, compute=wrong, __post_init__=noted):
        yield state


def in_compiled_backward(operator: Operator) -> Planting:
    """Plant a fault that only compiled code has: dw of the registered operator is 1 % too large."""

    @contextlib.contextmanager
    def planted(model: nn.Module) -> Iterator[PlantedFault]:
        state, right, forward = PlantedFault(), operator._backward_op, operator.forward

        def counted(*arguments: Any, **kwargs: Any) -> Any:
            state.count_all()
            return forward(*arguments, **kwargs)

        def wrong(*arguments: Any) -> Any:
            named_gradients = zip(operator.gradients, right(*arguments), strict=True)
            return tuple(gradient * 1.01 if name in WEIGHTS else gradient for name, gradient in named_gradients)

        with replaced_in(operator, _backward_op=wrong, forward=counted):
            yield state

    return planted


def falls_back(*operators: Operator, where: Callable[[Tensor], bool] = lambda x: True) -> Planting:
    """Plant fallbacks: if ``where`` holds for the first tensor, modules run stock code instead of these operators."""

    @contextlib.contextmanager
    def planted(model: nn.Module) -> Iterator[PlantedFault]:
        state, right = PlantedFault(), Operator.try_fused

        def declines(operator: Operator, *arguments: Any, **named: Any) -> tuple[Any, str | None]:
            is_public = "replaces" in named and named["replaces"] is None
            is_right = is_public or OPERATORS[operator.plain_name or operator.name] not in operators
            if is_right or not where(arguments[0]):
                return right(operator, *arguments, **named)
            state.count_all()
            return None, ""

        with mock.patch.object(Operator, "try_fused", declines):
            yield state

    return planted


@contextlib.contextmanager
def left_stock(model: nn.Module) -> Iterator[PlantedFault]:
    """Plant a block that runs its stock code although the report calls it fused."""
    block = next((module for module in model.modules() if isinstance(module, FusedBlock)), None)
    if block is None:
        yield PlantedFault()
        return
    fused = type(block)
    block.__class__ = fused.fused_norm_origin  # type: ignore[assignment]
    try:
        yield PlantedFault(calls=1, share=1.0)
    finally:
        block.__class__ = fused


def replaced_by(owner: Any, name: str, wrong: Callable[..., Any]) -> Planting:
    """Plant a fault in a function of modules or of an operator.

    ``wrong`` gets the right one, and what it remembers, before arguments.
    """

    @contextlib.contextmanager
    def planted(model: nn.Module) -> Iterator[PlantedFault]:
        state, right = PlantedFault(), getattr(owner, name)

        @functools.wraps(right)
        def called(*arguments: Any, **named: Any) -> Any:
            state.count_all()
            return wrong(right, state.memory, *arguments, **named)

        is_operator = isinstance(owner, Operator)
        with replaced_in(owner, **{name: called}) if is_operator else mock.patch.object(owner, name, called):
            yield state

    return planted


def with_changed_table(owner: Any, name: str, change: Callable[[Any], Any]) -> Planting:
    """Plant a changed table of the patcher."""

    @contextlib.contextmanager
    def planted(model: nn.Module) -> Iterator[PlantedFault]:
        with mock.patch.object(owner, name, change(getattr(owner, name))):
            yield PlantedFault(calls=1, share=1.0)

    return planted


def never_answers(owner: Any, name: str) -> Planting:
    """Plant a function that returns None; a call counts if it should have returned something else."""

    @contextlib.contextmanager
    def planted(model: nn.Module) -> Iterator[PlantedFault]:
        state, right = PlantedFault(), getattr(owner, name)

        def called(*arguments: Any, **named: Any) -> None:
            if right(*arguments, **named) is not None:
                state.count_all()

        with mock.patch.object(owner, name, called):
            yield state

    return planted


@contextlib.contextmanager
def replaced_in(operator: Operator, **methods: Callable[..., Any]) -> Iterator[None]:
    """Replace methods of an operator for the length of a ``with``, without recorded calls."""
    forget_all()
    try:
        with mock.patch.multiple(operator, _recorded=lambda *_: None, **methods):
            yield
    finally:
        forget_all()


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
