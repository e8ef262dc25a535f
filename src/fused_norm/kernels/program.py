"""Programs: the allocations and launches of a whole call, recorded once and repeated for all calls like it.

An operator's forward, or backward, is run once for tensors of certain facts (shapes, strides, dtypes, device, who
wants a gradient), while a recorder notes what it allocates and launches. What it noted becomes a few lines of
straight-line Python, compiled once for each sequence of steps: allocate, gather addresses, launch (``straight_lines``).
A call that does anything else to a tensor, such as a copy, has a program that runs the operator's code every time.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .guards import Guard, function_of, is_comparable
from .straight_lines import NotRecordableError, machine_of, straight_lines
from .triton.devices import when_plans_change
from .triton.launch import Launch, launches

logger = logging.getLogger("fused_norm")

SHAPES, EACH = 1024, 8
"""How many shapes an operator remembers, and how many programs for each; where there are more it starts anew."""

_ALLOCATIONS = ("new_empty", "empty_strided")
"""The operators by which launchers allocate what a program can allocate again."""

_WITHOUT_WORK = ("detach", "promote_types")
"""Operators that do nothing to memory; ``detach`` is how the dispatcher hands a tensor on."""


class Recorder(TorchDispatchMode):
    """Notes allocations inside a ``with``, and the launches that it is told of; no other operator is let through."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[Tensor] = []
        self.launches: list[Launch] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__ if func.namespace == "aten" else ""
        if name not in _ALLOCATIONS and name not in _WITHOUT_WORK:
            raise NotRecordableError(f"{func} is no allocation")
        made = func(*args, **(kwargs or {}))
        if name in _ALLOCATIONS:
            self.allocated.append(made)
        return made

    def launched(self, launch: Launch) -> None:
        """Note a launch."""
        self.launches.append(launch)


class Program:
    """What a call did, for calls like it.

    Attributes:
        call: does it and returns the results; None for arguments that are not like those of the call.
        forward: of a call that has a backward, what ``call`` hands to autograd: takes the context and the tensors.
        backwards: the programs of the backward behind this forward.
        facts: what else the backward has to know.
    """

    __slots__ = ("_guard", "backwards", "call", "facts", "forward")

    def __init__(
        self,
        guard: Guard,
        function: Callable[..., Any],
        apply: Callable[..., Any] | None,
        straight: tuple[list[str], dict[str, Any]] | None,
    ) -> None:
        self._guard = guard
        self.backwards: tuple[Program, ...] = ()
        self.facts: Any = None
        tensors = ", ".join(guard.tensors)
        if apply is None:
            lines, known = straight or ([f"return repeat({tensors})"], {})
            self.call = guard.function(lines, {"repeat": function, **known})
            return

        def repeat(ctx: Any, *tensors: Tensor | None) -> Any:
            outputs, ctx.to_save, ctx.sources, self.facts = function(*tensors)
            return outputs

        lines, known = straight or ([f"return repeat(ctx, {tensors})"], {})
        self.forward = function_of(["ctx", *guard.tensors], lines, {"repeat": repeat, **known})
        self.call = guard.function([f"return apply(program, {tensors})"], {"apply": apply, "program": self})

    def fits(self, *arguments: Any) -> bool:
        """Return whether arguments are like those of the call."""
        fits: bool = self._guard.function(["return True"], {}, otherwise=False)(*arguments)
        return fits


class _FirstCall(NamedTuple):
    """Stands for a program in the call that it was made from: the results are there."""

    program: Program
    results: Any

    @property
    def facts(self) -> Any:
        """What else the backward has to know."""
        return self.results[3]

    def forward(self, ctx: Any, *tensors: Tensor | None) -> Any:
        """Hand the results to autograd."""
        ctx.program = self.program
        outputs, ctx.to_save, ctx.sources, self.program.facts = self.results
        return outputs


class Programs:
    """The programs of calls, found by the shape of their first tensor and confirmed by their guards."""

    def __init__(self) -> None:
        self.by_shape: dict[Any, tuple[Program, ...]] = {}
        _all.add(self)

    def of(self, shape: Any) -> tuple[Program, ...]:
        """The programs of calls whose first tensor has this shape."""
        return self.by_shape.get(shape, ())

    def remember(self, shape: Any, program: Program) -> None:
        """Remember a program of calls whose first tensor has this shape."""
        if shape not in self.by_shape and len(self.by_shape) >= SHAPES:
            self.by_shape.clear()
        self.by_shape[shape] = with_one_more(self.of(shape), program)


_all: weakref.WeakSet[Programs] = weakref.WeakSet()


def forget_all() -> None:
    """Forget every program."""
    for programs in list(_all):
        programs.by_shape.clear()


when_plans_change.append(forget_all)


def with_one_more(programs: tuple[Program, ...], program: Program) -> tuple[Program, ...]:
    """The programs and one more; that one alone where they are too many."""
    return (*programs, program) if len(programs) < EACH else (program,)


def recorded(
    inputs: Sequence[Tensor | None],
    further: Sequence[Any],
    function: Callable[..., Any],
    *,
    apply: Callable[..., Any] | None = None,
    in_any_grad_mode: bool = False,
) -> tuple[Program, Any] | None:
    """Make a call, and return a program for calls like it and its outputs.

    None, and nothing is called, where calls like it cannot be told from others, and for tensors at odd addresses, for
    which kernels are compiled apart.

    Args:
        inputs: the tensors of the call, or None. Nobody may watch the dispatcher.
        further: its other arguments, which stand before (``further[0]``) and behind the tensors.
        function: makes it of tensors like these, and returns its outputs, in nested tuples. Where the call has a
            backward it returns the outputs, what is saved for it, the weights that copies among that were made of, and
            what else it has to know. It holds no tensor.
        apply: of a call that has a backward, takes the program and the tensors to autograd.
        in_any_grad_mode: whoever looks for the program knows the grad mode.
    """
    present = [one for one in inputs if one is not None]
    if not all(map(is_comparable, further)) or any(one.data_ptr() % 16 for one in present):
        return None
    guard, machine = Guard(inputs, further, in_any_grad_mode), machine_of(present[0].device)
    recorder, results, straight = Recorder(), None, None
    try:
        if machine is None:
            raise NotRecordableError("kernels are launched by Triton itself here")
        # Outside of inference mode, in which the dispatcher is passed over.
        with torch.inference_mode(False), torch.no_grad(), launches.by(recorder), recorder:
            results = function(*inputs)
        performed = [(one, one.run()) for one in recorder.launches]
        names, repeated = (guard.tensors, results) if apply is None else (["ctx", *guard.tensors], results[:3])
        straight = straight_lines(machine, inputs, names, recorder.allocated, performed, repeated)
    except NotRecordableError as reason:
        logger.debug("a call is not repeated by straight lines: %s", reason)
    program = Program(guard, function, apply, straight)
    if results is None or torch.is_inference_mode_enabled():
        return program, function(*inputs) if apply is None else apply(program, *inputs)
    return program, results if apply is None else apply(_FirstCall(program, results), *inputs)
