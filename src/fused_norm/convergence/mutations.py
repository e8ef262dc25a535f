"""Faults planted in a fused model, one norm at a time, to see that the verdict turns red.

Each stands for a mistake that kernels or patchers have made. A fault that nothing calls is no test, so each counts how
often it was run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..patcher import Site
from .plan import NORM_KINDS

SOUND = "none"
"""In place of a mutation's name: the fused twin as it is, for as many steps as those with faults. It must be green."""


@dataclass
class Planted:
    """A fault in place.

    Attributes:
        path: of the norm that has it.
        runs: how often it has had its effect.
    """

    path: str
    runs: int = 0


@dataclass(frozen=True)
class Seen:
    """What a stock run shows of one norm, which decides the faults that can be seen in it.

    Attributes:
        dtype: of its input.
        mean_square: the median over rows of its input.
        eps: its own.
    """

    dtype: torch.dtype
    mean_square: float
    eps: float


@dataclass(frozen=True)
class Mutation:
    """A fault that can be planted.

    Attributes:
        name: its key in ``MUTATIONS``.
        what: is wrong, in words.
        plant: puts it into one norm and returns what takes it out again.
        shows: whether it changes a single number in such a norm.
        hidden: why not, in words.
        kind: ``residual`` for a fault of residual adds, ``norm`` for one that any norm can have.
    """

    name: str
    what: str
    plant: Callable[[Any, Planted], Callable[[], None]]
    shows: Callable[[Seen], bool] = lambda seen: True
    hidden: str = ""
    kind: str = "norm"


@contextlib.contextmanager
def planted(mutation: Mutation, model: nn.Module, path: str) -> Iterator[Planted]:
    """The fault is in the norm at ``path`` inside the ``with``, and gone afterwards."""
    state = Planted(path)
    remove = mutation.plant(model.get_submodule(path), state)
    try:
        yield state
    finally:
        remove()


def site_for(mutation: Mutation, fused: Iterable[Site], seen: Mapping[str, Seen]) -> str | None:
    """Where to plant a fault: the last fused norm in the layers that can show it; None where none can.

    Args:
        mutation: the fault.
        fused: sites of the model it goes to.
        seen: what the stock run showed of each norm, by path.
    """
    kinds = ("residual",) if mutation.kind == "residual" else NORM_KINDS
    paths = [site.path for site in fused if site.kind in kinds and mutation.shows(seen[site.path])]
    inside = [path for path in paths if any(part.isdigit() for part in path.split("."))]
    candidates = inside or paths
    return candidates[-1] if candidates else None


def _wrong_spec(**changes: Any) -> Callable[[Any, Planted], Callable[[], None]]:
    def plant(norm: Any, state: Planted) -> Callable[[], None]:
        spec = norm.fused_norm_spec
        made = {name: change(spec) for name, change in changes.items()}
        # On the instance: the class is shared by all norms of its kind.
        norm.fused_norm_spec = replace(spec, **made)
        return _undo_all(_count_calls(norm, state), lambda: vars(norm).pop("fused_norm_spec"))

    return plant


def _wrong_eps(norm: Any, state: Planted) -> Callable[[], None]:
    name, eps = norm.fused_norm_eps_name, norm.fused_norm_spec.eps
    setattr(norm, name, 10 * eps)
    return _undo_all(_count_calls(norm, state), lambda: setattr(norm, name, eps))


def _dropped_residual(norm: Any, state: Planted) -> Callable[[], None]:
    def drop(arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if len(arguments) > 1:
            state.runs += 1
            x, residual, *rest = arguments
            return (x, torch.zeros_like(residual), *rest), named
        return arguments, named

    return _wrap_forward(norm, before=drop)


def _gradient_in_place(norm: Any, state: Planted) -> Callable[[], None]:
    class WriteOver(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            return y.view_as(y)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            state.runs += 1
            correct = dy.clone()
            dy.mul_(0.5)  # the kernel has written its own result where somebody else's gradient was
            return correct

    return _wrap_forward(norm, after=WriteOver.apply)


def _frozen_dw(norm: Any, state: Planted) -> Callable[[], None]:
    def freeze(gradient: Tensor) -> Tensor:
        state.runs += 1
        return torch.zeros_like(gradient)

    return norm.weight.register_hook(freeze).remove


def _wrap_forward(norm: Any, *, before: Any = None, after: Any = None) -> Callable[[], None]:
    forward = norm.forward

    def wrapped(*arguments: Any, **named: Any) -> Any:
        if before is not None:
            arguments, named = before(arguments, named)
        result = forward(*arguments, **named)
        if after is None:
            return result
        return (after(result[0]), *result[1:]) if isinstance(result, tuple) else after(result)

    norm.forward = wrapped
    return lambda: vars(norm).pop("forward")


def _count_calls(norm: Any, state: Planted) -> Callable[[], None]:
    def count(result: Any) -> Any:
        state.runs += 1
        return result

    return _wrap_forward(norm, after=count)


def _undo_all(*undo: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        for each in undo:
            each()

    return run


MUTATIONS: Mapping[str, Mutation] = MappingProxyType(
    {
        mutation.name: mutation
        for mutation in (
            Mutation(
                "casting",
                "x_hat is rounded before gamma where stock rounds after it, or the other way round",
                _wrong_spec(casting=lambda spec: "gemma" if spec.casting == "llama" else "llama"),
                shows=lambda seen: seen.dtype != torch.float32,
                hidden="every norm takes fp32, where there is nothing to round",
            ),
            Mutation(
                "centering",
                "the + 1 of a zero-centered norm is missing, or one is added to another",
                _wrong_spec(zero_centered=lambda spec: not spec.zero_centered),
            ),
            Mutation("residual", "the residual never arrives in the sum", _dropped_residual, kind="residual"),
            Mutation(
                "in-place",
                "backward writes into the gradient it was handed, which belongs to others too",
                _gradient_in_place,
            ),
            Mutation("dw", "the gradient of the weight is zero", _frozen_dw),
            Mutation(
                "eps",
                "eps is ten times too large",
                _wrong_eps,
                # A relative change of the outputs by two roundings.
                shows=lambda seen: 4.5 * seen.eps / seen.mean_square > torch.finfo(seen.dtype).eps,
                hidden="every input is so large that eps vanishes in its rounding",
            ),
        )
    }
)
