"""Programs: the allocations and launches of a whole call, recorded once and repeated for all calls like it.

An operator's forward, or backward, is run once for tensors of certain facts (shapes, strides, dtypes, device, who
wants a gradient), while a recorder notes what it allocates and launches. What it noted becomes a few lines of
straight-line Python, compiled once for each sequence of steps: allocate, gather addresses, launch (``codegen``). A call
that does anything else to a tensor, such as a copy, has a program that runs the operator's code every time.

A guard tells whether a call is like the recorded one. The facts of tensors are verified by the guard that Dynamo uses
for compiled code, one call into C++, or by plain comparisons if PyTorch has no such guard. It does not check grad mode
(added separately when relevant), forward-mode AD, FakeTensorMode or make_fx; the caller must check these.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from .codegen import NotRecordableError, function_of, generated_lines, launch_backend
from .triton.devices import when_plans_change
from .triton.launch import Launch, launches

logger = logging.getLogger("fused_norm")

TensorGuards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)

SHAPES, EACH = 1024, 8
"""The most shapes that an operator remembers, and the most programs of each; beyond that it starts anew."""

_ALLOCATIONS = ("new_empty", "empty_strided")
"""The operators by which launchers allocate what a program can allocate again."""

_WITHOUT_WORK = ("detach", "promote_types")
"""Operators that do nothing to memory; ``detach`` is how the dispatcher hands a tensor on."""


class Guard:
    """Tells whether arguments are like those of a call.

    Attributes:
        names: of the arguments, in functions that begin with this guard.
        tensors: the names of those that are tensors or stand in the place of one.
    """

    def __init__(self, inputs: Sequence[Tensor | None], further: Sequence[Any], in_any_grad_mode: bool) -> None:
        """Take the facts of a call, as ``program.recorded`` has its arguments."""
        given = [*further[:1], *inputs, *further[1:]]
        self.names = [f"a{index}" for index in range(len(given))]
        self.tensors = self.names[len(further[:1]) :][: len(inputs)]
        conditions: list[str] = []
        first: dict[int, str] = {}
        self._known: dict[str, Any] = {}
        for name, value in zip(self.names, given, strict=True):
            if value is None or value is True or value is False:
                conditions.append(f"{name} is {value}")
            elif name in self.tensors:
                if first.setdefault(id(value), name) != name:  # a tensor given twice
                    conditions.append(f"{name} is {first[id(value)]}")
                elif (
                    len(first) > 1
                ):  # sizes of the first are looked at before; those of a nested tensor end the process
                    conditions.append(f"not getattr({name}, 'is_nested', False)")
            else:
                self._known |= {f"c{name}": value, f"k{name}": type(value)}
                conditions.append(f"({name} is c{name} or (type({name}) is k{name} and {name} == c{name}))")
        tensors = [one for one, name in zip(given, self.names, strict=True) if first.get(id(one)) == name]
        self._known["check"] = _check_of(tensors)
        conditions.append(f"check({', '.join(first.values())})")
        if not in_any_grad_mode and any(tensor.requires_grad for tensor in tensors):
            self._known["grad_mode"] = torch.is_grad_enabled
            conditions.append("grad_mode()" if torch.is_grad_enabled() else "not grad_mode()")
        self._condition = " and ".join(conditions)

    def function(self, lines: Sequence[str], known: dict[str, Any], otherwise: Any = None) -> Callable[..., Any]:
        """A function of all arguments that does the lines for those that are alike, and returns ``otherwise`` else."""
        guarded = [f"if not ({self._condition}):", f"    return {otherwise}", *lines]
        return function_of(self.names, guarded, {**self._known, **known})


def is_comparable(value: Any) -> bool:
    """Return whether equal values mean the same: NaN is not equal to itself, and 0.0 is to -0.0."""
    return not isinstance(value, float) or (value == value and value != 0.0)


def _check_of(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function that tells whether tensors, no one given twice, have the facts of these, and the thread its state."""
    if TensorGuards is not None:
        sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
        return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    expected = [_tensor_key(tensor) for tensor in tensors]
    return lambda *given: len(set(map(id, given))) == len(given) and [_tensor_key(one) for one in given] == expected


def _tensor_key(tensor: Any) -> Any:
    if type(tensor) not in (Tensor, Parameter) or torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    described = tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
    return type(tensor), *described, tensor.is_neg(), tensor.is_inference(), torch.is_inference_mode_enabled()


class Recorder(TorchDispatchMode):
    """Notes allocations inside a ``with``, and launches instead of making them, until it meets any other operator.

    From that operator on, which may read what was launched, everything is done at once, and nothing is noted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[Tensor] = []
        self.launches: list[Launch] = []
        self.obstacle: str | None = None
        """The operator that cannot be repeated."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__ if func.namespace == "aten" else ""
        if self.obstacle is None and name not in _ALLOCATIONS and name not in _WITHOUT_WORK:
            self.obstacle = str(func)
            for launch in self.launches:
                launch.run()
        result = func(*args, **(kwargs or {}))
        if name in _ALLOCATIONS:
            self.allocated.append(result)
        return result

    def launched(self, launch: Launch) -> None:
        """Note a launch, or make it."""
        if self.obstacle is None:
            self.launches.append(launch)
        else:
            launch.run()


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


class SingleCall:
    """Stands for a program in one call: the one that it was recorded in, or one that is not recorded.

    Attributes:
        facts: what else the backward has to know.
        backwards: the programs of the backward, of which there are none.
    """

    backwards: tuple[Program, ...] = ()

    def __init__(self, function: Callable[..., Any], program: Program | None = None) -> None:
        """Take a call's ``function``, as ``recorded`` does, and the program that autograd gets, if it is not this."""
        self._function, self._program = function, program
        self.facts: Any = None

    def forward(self, ctx: Any, *tensors: Tensor | None) -> Any:
        """Make the call, and hand its results to autograd."""
        ctx.program = self if self._program is None else self._program
        outputs, ctx.to_save, ctx.sources, ctx.program.facts = self._function(*tensors)
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
    """The programs and one more; that one alone if they are too many."""
    return (*programs, program) if len(programs) < EACH else (program,)


def recorded(
    inputs: Sequence[Tensor | None],
    further: Sequence[Any],
    function: Callable[..., Any],
    *,
    apply: Callable[..., Any] | None = None,
    in_any_grad_mode: bool = False,
) -> tuple[Program, Any] | None:
    """Run the call once, and return a program for calls like it, and its outputs.

    Returns None without running the call if its arguments cannot be compared (NaN, 0.0 and -0.0), or if a tensor is not
    16-byte aligned, because Triton specialises on alignment.

    Args:
        inputs: the tensors of the call, or None. Nobody may watch the dispatcher.
        further: its other arguments: the first comes before the tensors, the others after them.
        function: makes it of tensors like these, and returns its outputs, in nested tuples. If the call has a backward
            it returns the outputs, what is saved for it, the weights that copies among that were made of, and what else
            it has to know. It holds no tensor.
        apply: takes the program and the tensors to autograd, if the call has a backward.
        in_any_grad_mode: leave grad mode out of the guard; the caller checks it.
    """
    present = [one for one in inputs if one is not None]
    if not all(map(is_comparable, further)) or any(one.data_ptr() % 16 for one in present):
        return None
    guard, machine = Guard(inputs, further, in_any_grad_mode), launch_backend(present[0].device)
    results, straight = None, None
    if machine is not None:
        # Outside of inference mode, in which the dispatcher is passed over.
        with torch.inference_mode(False), torch.no_grad(), launches.by(recorder := Recorder()), recorder:
            results = function(*inputs)
        try:
            if recorder.obstacle is not None:
                raise NotRecordableError(f"{recorder.obstacle} is no allocation")
            with torch.no_grad():
                performed = [(launch, launch.run()) for launch in recorder.launches]
            names, repeated = (guard.tensors, results) if apply is None else (["ctx", *guard.tensors], results[:3])
            straight = generated_lines(machine, inputs, names, recorder.allocated, performed, repeated)
        except NotRecordableError as reason:
            logger.debug("a call is not repeated by generated lines: %s", reason)
    program = Program(guard, function, apply, straight)
    if results is None or torch.is_inference_mode_enabled():
        return program, function(*inputs) if apply is None else apply(program, *inputs)
    return program, results if apply is None else apply(SingleCall(lambda *_: results, program), *inputs)
