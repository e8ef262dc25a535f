"""Ways to plant a fault in a model that is trained, to see that the convergence suite finds it.

A fault (``faults.py`` has them) replaces the forward or the backward of an operator, what compiled code calls, or a
function of the fused blocks, for the length of a ``with``. Each counts the numbers that it changed, because a fault
that changes none tests nothing.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fused_norm.check.distances import share_different
from fused_norm.kernels.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from fused_norm.kernels.operator import OPERATORS, BackwardCall, Operator, Recompute
from fused_norm.kernels.program import forget_all
from fused_norm.patcher import adapters, fused_block, fused_norm_module, recompute, recompute_linears
from fused_norm.patcher.fused_block import FusedBlock
from fused_norm.patcher.lazy_logits import CrossEntropy, Projection
from fused_norm.patcher.losses import FusedHead
from fused_norm.spec import NormSpec

Results = tuple[Tensor | None, ...]

Planting = Callable[[nn.Module], contextlib.AbstractContextManager["PlantedFault"]]
"""Puts a fault in its place in a model for the length of a ``with``."""

# The package has the function under this name.
linear_cross_entropy = sys.modules[LINEAR_CROSS_ENTROPY.__module__]

WEIGHTS = ("dw", "dinner", "dq_weight", "dk_weight", "da", "db")
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
        """Count a call that gave one of each pair where the other was right."""
        shares = [_share_changed(one, other) for one, other in pairs if isinstance(one, Tensor)]
        self.calls += 1
        self.share = max(self.share, *shares)

    def add(self, other: PlantedFault) -> None:
        """Count what another planting of the same fault has changed."""
        self.calls, self.share = self.calls + other.calls, max(self.share, other.share)


@dataclass(frozen=True)
class Forward:
    """A forward of an operator that may go wrong.

    Attributes:
        operator, spec, arguments, training: as in ``Operator.forward``.
        right: runs it as it should be, with another spec or other arguments.
        memory: the fault's.
    """

    operator: Operator
    spec: NormSpec | None
    arguments: tuple[Any, ...]
    training: bool
    right: Callable[..., Results]
    memory: dict[Any, Any]

    def results(self, *, spec: NormSpec | None = None, arguments: Sequence[Any] | None = None) -> list[Tensor | None]:
        """The right results, for another spec or other arguments where given."""
        given = self.arguments if arguments is None else arguments
        return list(self.right(spec or self.spec, *given, training=self.training))

    def edited(self, edit: Callable[[Tensor], Tensor], *names: str) -> list[Tensor | None]:
        """The results with the outputs of these names, all unless given, changed."""
        results = self.results()
        for place, name in enumerate(self.operator.outputs):
            output = results[place]
            if output is not None and (not names or name in names):
                results[place] = edit(output)
        return results


@dataclass(frozen=True)
class Backward:
    """A backward of an operator that may go wrong; attributes as in ``Forward`` and ``Operator.backward``."""

    operator: Operator
    spec: NormSpec | None
    call: BackwardCall
    right: Callable[..., Results]

    def edited(self, edit: Callable[[Tensor], Tensor], *names: str) -> list[Tensor | None]:
        """The gradients, those of these names changed."""
        found = list(self.right(self.spec, self.call))
        for place, name in enumerate(self.operator.gradients):
            gradient = found[place]
            if gradient is not None and name in names:
                found[place] = edit(gradient)
        return found


def in_forward(operator: Operator, wrong: Callable[[Forward], Sequence[Tensor | None]]) -> Planting:
    """Plant a fault in the forward of an operator: ``wrong`` makes its results instead."""

    def wronged(operator: Operator, state: PlantedFault) -> Any:
        right = operator.forward

        def forward(
            spec: NormSpec | None, *arguments: Any, training: bool, launch: bool = True, **copied: Sequence[str]
        ) -> Results:
            if not launch:
                return right(spec, *arguments, training=training, launch=False, **copied)
            before = [_copy(one) for one in arguments]
            expected = right(spec, *arguments, training=training, **copied)
            found = wrong(
                Forward(operator, spec, arguments, training, functools.partial(right, **copied), state.memory)
            )
            # What is kept for the backward is nobody's number.
            given = zip(operator.outputs, expected, found, strict=False)
            state.count([*((one, other) for _, one, other in given), *zip(before, arguments, strict=True)])
            return tuple(found)

        return replaced_in(operator, forward=forward)

    return _in_all_forms(operator, wronged)


def in_backward(operator: Operator, wrong: Callable[[Backward], Sequence[Tensor | None]]) -> Planting:
    """Plant a fault in the backward of an operator: ``wrong`` makes its gradients instead."""

    def wronged(operator: Operator, state: PlantedFault) -> Any:
        right = operator.backward

        def backward(spec: NormSpec | None, call: BackwardCall, *, launch: bool = True) -> Results:
            if not launch:
                return right(spec, call, launch=False)
            before = [_copy(one) for one in tree_leaves(call.incoming)]
            expected = right(spec, call)
            found = wrong(Backward(operator, spec, call, right))
            pairs = [*zip(expected, found, strict=True), *zip(before, tree_leaves(call.incoming), strict=True)]
            state.count(pairs)
            return tuple(found)

        return replaced_in(operator, backward=backward)

    return _in_all_forms(operator, wronged)


def _in_all_forms(operator: Operator, wronged: Callable[[Operator, PlantedFault], Any]) -> Planting:
    """Plant a fault in an operator, and in its forms for readers, which models call."""

    @contextlib.contextmanager
    def planted(model: nn.Module) -> Iterator[PlantedFault]:
        state = PlantedFault()
        with contextlib.ExitStack() as stack:
            for form in [one for one in OPERATORS.values() if operator.name in (one.name, one.plain_name)]:
                stack.enter_context(wronged(form, state))
            yield state

    return planted


@dataclass(frozen=True)
class Losses:
    """A call of what computes the losses of rows and their gradients, which may go wrong.

    Attributes:
        arguments: the operator's, by name.
        gradient: that of a row's loss; None for 1.
        right: computes it as it should be, with other arguments, by name, or another gradient.
    """

    arguments: dict[str, Any]
    gradient: Tensor | None
    right: Callable[..., list[Tensor | None]]


def in_losses(wrong: Callable[[Losses], Sequence[Tensor | None]]) -> Planting:
    """Plant a fault in the operator of heads and losses.

    ``wrong`` computes the losses of rows, and the gradients of x, weight and bias, instead.
    """

    @contextlib.contextmanager
    def planted(model: nn.Module) -> Iterator[PlantedFault]:
        state, by_chunks = PlantedFault(), linear_cross_entropy._by_chunks

        def wronged(arguments: Sequence[Any], gradient: Tensor | None, trained: Sequence[bool]) -> Results:
            by_name = LINEAR_CROSS_ENTROPY.by_name(arguments)

            def right(*, gradient: Tensor | None = gradient, **changed: Any) -> list[Tensor | None]:
                return list(by_chunks(tuple((by_name | changed).values()), gradient, trained))

            expected = right()
            before = by_name["x"].clone()
            found = wrong(Losses(by_name, gradient, right))
            sums = [(expected[0].sum(), found[0].sum())]  # rows without a label may be left out of one of them
            state.count([*sums, *zip(expected[1:], found[1:], strict=True), (before, by_name["x"])])
            return tuple(found)

        with mock.patch.object(linear_cross_entropy, "_by_chunks", wronged):
            yield state

    return planted


def in_head(change: Callable[[CrossEntropy], CrossEntropy]) -> Planting:
    """Plant a fault in what a head is asked for: its loss is another one."""

    def wrong(right: Any, memory: Any, head: FusedHead, x: Tensor, how: CrossEntropy, *further: Any) -> Tensor:
        loss: Tensor = right(head, x, how if fused_norm_module.is_disabled() else change(how), *further)
        return loss

    return replaced_by(FusedHead, "fused_norm_cross_entropy", wrong)


@contextlib.contextmanager
def logits_of_the_latest_batch(model: nn.Module) -> Iterator[PlantedFault]:
    """Plant logits that are computed of the hidden states which a head has got last, whenever they are read."""
    state, compute, made = PlantedFault(), Projection.compute, Projection.__post_init__

    def noted(projection: Projection) -> None:
        state.memory["x"] = projection.x
        made(projection)

    def wrong(projection: Projection) -> Tensor:
        found = compute(replace(projection, x=state.memory["x"]))
        state.count([(compute(projection), found)])
        return found

    with mock.patch.multiple(Projection, compute=wrong, __post_init__=noted):
        yield state


def in_compiled_backward(operator: Operator) -> Planting:
    """Plant a fault that only compiled code has: dw of the registered operator, which it calls, is 1 % too large."""

    @contextlib.contextmanager
    def planted(model: nn.Module) -> Iterator[PlantedFault]:
        state, right, forward = PlantedFault(), operator._backward_op, operator.forward
        weights = [name in WEIGHTS for name in operator.gradients]

        def counted(*arguments: Any, **how: Any) -> Any:
            state.calls, state.share = state.calls + 1, 1.0
            return forward(*arguments, **how)

        def wrong(*arguments: Any) -> Any:
            found = right(*arguments)
            return tuple(one * 1.01 if weight else one for one, weight in zip(found, weights, strict=True))

        with replaced_in(operator, _backward_op=wrong, forward=counted):
            yield state

    return planted


def falls_back(*operators: Operator, where: Callable[[Tensor], bool] = lambda x: True) -> Planting:
    """Plant fallbacks: modules do not get these operators, where the first tensor is such, and run stock code."""

    @contextlib.contextmanager
    def planted(model: nn.Module) -> Iterator[PlantedFault]:
        state, right = PlantedFault(), fused_block.run_fused

        def declines(operator: Operator, *arguments: Any, **named: Any) -> tuple[Any, str | None]:
            if OPERATORS[operator.plain_name or operator.name] not in operators or not where(arguments[1]):
                return right(operator, *arguments, **named)
            state.calls, state.share = state.calls + 1, 1.0
            return None, ""

        with (
            mock.patch.object(fused_block, "run_fused", declines),
            mock.patch.object(fused_norm_module, "run_fused", declines),
            mock.patch.object(adapters, "run_fused", declines),
        ):
            yield state

    return planted


@contextlib.contextmanager
def recomputed_wrong(model: nn.Module) -> Iterator[PlantedFault]:
    """Plant values that are .3 % too large where they are recomputed."""
    state, right = PlantedFault(), Recompute.outputs

    def wrong(recompute: Recompute) -> tuple[Tensor, ...]:
        state.calls, state.share = state.calls + 1, 1.0
        return tuple(one * 1.003 for one in right(recompute))

    with mock.patch.object(Recompute, "outputs", wrong):
        yield state


@contextlib.contextmanager
def linears_recomputed_wrong(model: nn.Module) -> Iterator[PlantedFault]:
    """Plant outputs of linears that are .3 % too large where they are recomputed."""
    state, right = PlantedFault(), recompute_linears._linear

    def wrong(*operands: Tensor) -> Tensor:
        state.calls, state.share = state.calls + 1, 1.0
        return right(*operands) * 1.003

    with mock.patch.object(recompute_linears, "_linear", wrong):
        yield state


@contextlib.contextmanager
def never_recomputes(model: nn.Module) -> Iterator[PlantedFault]:
    """Plant layers that keep the outputs which they are to recompute."""
    state = PlantedFault()

    def declines() -> bool:
        state.calls, state.share = state.calls + 1, 1.0
        return False

    with mock.patch("fused_norm.patcher.recompute._is_possible", declines):
        yield state


def recomputes_as(levels: dict[Any, Any]) -> Planting:
    """Plant levels of ``recompute`` that do what other levels do: each key what its value does."""

    @contextlib.contextmanager
    def planted(model: nn.Module) -> Iterator[PlantedFault]:
        right = recompute._READERS_OF_LINEARS
        wrong = {level: right[levels.get(level, level)] for level in right}
        with mock.patch.object(recompute, "_READERS_OF_LINEARS", wrong):
            yield PlantedFault(calls=1, share=1.0)

    return planted


@contextlib.contextmanager
def adapters_not_recomputed(model: nn.Module) -> Iterator[PlantedFault]:
    """Plant outputs of LoRA layers that are kept, and not recomputed."""
    state = PlantedFault()

    def declines(*_: Any) -> None:
        state.calls, state.share = state.calls + 1, 1.0

    nodes = recompute_linears.LinearOutputs._READ | {"LoraAddBackward": declines}
    with mock.patch.object(recompute_linears.LinearOutputs, "_READ", nodes):
        yield state


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
            state.calls, state.share = state.calls + 1, 1.0
            return wrong(right, state.memory, *arguments, **named)

        is_operator = isinstance(owner, Operator)
        with replaced_in(owner, **{name: called}) if is_operator else mock.patch.object(owner, name, called):
            yield state

    return planted


def never_answers(owner: Any, name: str) -> Planting:
    """Plant a function that returns None; a call counts if it would have returned something else."""

    @contextlib.contextmanager
    def planted(model: nn.Module) -> Iterator[PlantedFault]:
        state, right = PlantedFault(), getattr(owner, name)

        def called(*arguments: Any, **named: Any) -> None:
            if right(*arguments, **named):
                state.calls, state.share = state.calls + 1, 1.0

        with mock.patch.object(owner, name, called):
            yield state

    return planted


@contextlib.contextmanager
def replaced_in(operator: Operator, **methods: Callable[..., Any]) -> Iterator[None]:
    """Replace methods of an operator for the length of a ``with``; it repeats no earlier call's launches meanwhile."""
    forget_all()
    try:
        with mock.patch.multiple(operator, _recorded=lambda *_: None, **methods):
            yield
    finally:
        forget_all()


def _copy(one: Any) -> Any:
    return one.clone() if isinstance(one, Tensor) else one


def _share_changed(one: Tensor, other: Any) -> float:
    return share_different(one, other) if isinstance(other, Tensor) else 0.0
