"""Faults planted in a fused model, in one place at a time, to see that the verdict turns red.

Each stands for a mistake that kernels or patchers have made. A fault that nothing calls is no test, so each counts how
often it was run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..spec import Kind
from .comparison import NORM_KINDS

if TYPE_CHECKING:
    from ..patcher import Site

SOUND = "none"
"""Stands for no mutation: the fused twin as it is, for as many steps as those with faults. It must be green."""


@dataclass
class PlantedFault:
    """A fault that is in place.

    Attributes:
        path: of the norm, or of the attention, that has it.
        runs: number of times that it has had its effect.
    """

    path: str
    runs: int = 0


@dataclass(frozen=True)
class NormInput:
    """The input of one norm in the stock run, which decides the faults that can show in it.

    Attributes:
        dtype: of the input.
        mean_square: of a row, the median over rows.
        eps: of the norm.
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
        plant: puts it into a model, at the module with this path, and returns what takes it out again.
        shows: whether it changes a single number in such a norm.
        hidden: why not, in words.
        kind: of the sites that can have it; ``norm`` for one that any norm can have, of queries and keys too.
    """

    name: str
    what: str
    plant: Callable[[nn.Module, PlantedFault], Callable[[], None]]
    shows: Callable[[NormInput], bool] = lambda norm: True
    hidden: str = ""
    kind: Kind = "norm"


@contextlib.contextmanager
def planted_fault(mutation: Mutation, model: nn.Module, path: str) -> Iterator[PlantedFault]:
    """Plant the fault in the module at ``path`` for the length of a ``with``."""
    state = PlantedFault(path)
    remove = mutation.plant(model, state)
    try:
        yield state
    finally:
        remove()


def path_for_fault(mutation: Mutation, fused: Iterable[Site], inputs: Mapping[str, NormInput]) -> str | None:
    """The module to plant a fault in: the last fused site in the layers that can show it; None where none can.

    Args:
        mutation: the fault.
        fused: sites of the model it goes to.
        inputs: of each norm in the stock run, by path.
    """
    if mutation.kind == "norm":
        paths = [site.path for site in fused if site.kind in NORM_KINDS and mutation.shows(inputs[site.path])]
    else:
        paths = [site.path for site in fused if site.kind == mutation.kind]
    inside = [path for path in paths if any(part.isdigit() for part in path.split("."))]
    candidates = inside or paths
    return candidates[-1] if candidates else None


def _wrong_spec(**changes: Any) -> Callable[[nn.Module, PlantedFault], Callable[[], None]]:
    def plant(model: nn.Module, state: PlantedFault) -> Callable[[], None]:
        norm: Any = model.get_submodule(state.path)
        spec = norm.fused_norm_spec
        made = {name: change(spec) for name, change in changes.items()}
        # On the instance: the class is shared by all norms of its kind.
        norm.fused_norm_spec = replace(spec, **made)
        return _undo_all(_count_calls(norm, state), lambda: vars(norm).pop("fused_norm_spec"))

    return plant


def _wrong_eps(model: nn.Module, state: PlantedFault) -> Callable[[], None]:
    norm: Any = model.get_submodule(state.path)
    name, eps = norm.fused_norm_eps_name, norm.fused_norm_spec.eps
    setattr(norm, name, 10 * eps)
    return _undo_all(_count_calls(norm, state), lambda: setattr(norm, name, eps))


def _dropped_residual(model: nn.Module, state: PlantedFault) -> Callable[[], None]:
    dropped_at = model.get_submodule(state.path)

    def drop(add: Callable[..., Any], norm: nn.Module, residual: Tensor, *arguments: Any, **named: Any) -> Any:
        if norm is dropped_at:
            state.runs += 1
            residual = torch.zeros_like(residual)
        return add(norm, residual, *arguments, **named)

    # A norm does not know its layer, so all of them are watched.
    blocks = [module for module in model.modules() if hasattr(module, "fused_norm_add")]
    return _undo_all(*(_wrap(block, "fused_norm_add", drop) for block in blocks))


def _wrong_rotation(model: nn.Module, state: PlantedFault) -> Callable[[], None]:
    def reverse(rotated: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        state.runs += 1
        *others, sin = arguments
        return rotated(*others, -sin, **named)

    return _wrap(model.get_submodule(state.path), "fused_norm_rotated", reverse)


def _gradient_in_place(model: nn.Module, state: PlantedFault) -> Callable[[], None]:
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

    def write_over(forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        result = forward(*arguments, **named)
        if isinstance(result, tuple):
            return WriteOver.apply(result[0]), *result[1:]
        return WriteOver.apply(result)

    return _wrap(model.get_submodule(state.path), "forward", write_over)


def _frozen_dw(model: nn.Module, state: PlantedFault) -> Callable[[], None]:
    norm: Any = model.get_submodule(state.path)

    def freeze(gradient: Tensor) -> Tensor:
        state.runs += 1
        return torch.zeros_like(gradient)

    return norm.weight.register_hook(freeze).remove


def _wrap(module: nn.Module, method: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Puts ``around(method, ...)`` in the method's place, on the instance."""
    vars(module)[method] = functools.partial(around, getattr(module, method))
    return lambda: vars(module).__delitem__(method)


def _count_calls(norm: nn.Module, state: PlantedFault) -> Callable[[], None]:
    def count(forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        state.runs += 1
        return forward(*arguments, **named)

    return _wrap(norm, "forward", count)


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
                shows=lambda norm: norm.dtype != torch.float32,
                hidden="every norm takes fp32, where there is nothing to round",
            ),
            Mutation(
                "centering",
                "the + 1 of a zero-centered norm is missing, or one is added to another",
                _wrong_spec(zero_centered=lambda spec: not spec.zero_centered),
            ),
            Mutation("residual", "the residual never arrives in the sum", _dropped_residual, kind="residual"),
            Mutation("rotation", "queries and keys are rotated the wrong way", _wrong_rotation, kind="rope"),
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
                shows=lambda norm: 4.5 * norm.eps / norm.mean_square > torch.finfo(norm.dtype).eps,
                hidden="every input is so large that eps vanishes in its rounding",
            ),
        )
    }
)
