"""Recordings: the allocations and launches of a whole call, repeated for all calls like it.

An operator's forward, or backward, is built once for tensors of certain properties (shapes, strides, dtypes, device,
which of them require a gradient). What its ``Call`` lists becomes a few lines of straight-line Python, compiled once
for each sequence of steps: allocate, gather addresses, launch (``codegen``). If a result is neither an argument nor
allocated by the call, such as a gradient that PyTorch has cast, the recording runs the operator's code every time.

A guard tells whether a call is like the recorded one. The properties of tensors are verified by the guard that Dynamo
uses for compiled code, one call into C++; a PyTorch that has no such guard gets no recordings. It does not check grad
mode (added separately when relevant), forward-mode AD, FakeTensorMode or make_fx; the caller must check these.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from .codegen import NotRecordableError, function_of, generated_lines, launch_backend
from .triton.call import Call
from .triton.devices import when_plans_change

logger = logging.getLogger("fused_norm")

TensorGuards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)

KEYS, EACH = 4096, 8
"""The most keys that a cache has, and the most recordings of each; the oldest one makes room for another."""


class Guard:
    """Tells whether arguments are like those of a call.

    Attributes:
        names: of the arguments, in functions that begin with this guard.
        tensors: the names of those that are tensors, or None in place of a tensor.
    """

    def __init__(self, tensors: Sequence[Tensor | None], options: Sequence[Any], in_any_grad_mode: bool) -> None:
        """Note the properties of a call; ``record`` explains its arguments."""
        arguments = [*tensors, *options]
        self.names = [f"a{index}" for index in range(len(arguments))]
        self.tensors = self.names[: len(tensors)]
        conditions: list[str] = []
        first_names: dict[int, str] = {}
        distinct: list[Tensor] = []
        self._globals: dict[str, Any] = {}
        for name, value in zip(self.names, arguments, strict=True):
            if value is None or value is True or value is False:
                conditions.append(f"{name} is {value}")
            elif name not in self.tensors:
                self._globals |= {f"c{name}": value, f"k{name}": type(value)}
                conditions.append(f"({name} is c{name} or (type({name}) is k{name} and {name} == c{name}))")
            elif id(value) in first_names:  # the same tensor twice
                conditions.append(f"{name} is {first_names[id(value)]}")
            else:
                first_names[id(value)] = name
                distinct.append(value)
                if len(distinct) > 1:
                    # The caller has read the first one's sizes; to read those of a nested tensor ends the process.
                    conditions.append(f"not getattr({name}, 'is_nested', False)")
        sizes, strides = [list(t.shape) for t in distinct], [list(t.stride()) for t in distinct]
        guards = TensorGuards(*distinct, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        self._globals["check"] = guards.check
        conditions.append(f"check({', '.join(first_names.values())})")
        if not in_any_grad_mode and any(tensor.requires_grad for tensor in distinct):
            self._globals["grad_mode"] = torch.is_grad_enabled
            conditions.append("grad_mode()" if torch.is_grad_enabled() else "not grad_mode()")
        self._condition = " and ".join(conditions)

    def function(self, lines: Sequence[str], names: dict[str, Any], otherwise: Any = None) -> Callable[..., Any]:
        """A function of all arguments that runs the lines if the guard holds, and returns ``otherwise`` if not."""
        guarded = [f"if not ({self._condition}):", f"    return {otherwise}", *lines]
        return function_of(self.names, guarded, {**self._globals, **names})


def distinct(outputs: Any, inputs: Sequence[Any]) -> Any:
    """The outputs, with an alias for each that is an input or comes once more: autograd needs outputs of its own."""
    if isinstance(outputs, Tensor):
        return outputs
    taken, aliases = list(inputs), []
    for output in outputs:
        is_taken = output is not None and any(output is other for other in taken)
        aliases.append(output.detach() if is_taken else output)
        taken.append(output)
    return tuple(aliases)


class SingleCall:
    """Stands for a recording in a call that is not recorded; ``build`` is as in ``record``."""

    backwards: tuple[Recording, ...] = ()

    def __init__(self, build: Callable[..., Any]) -> None:
        self._build = build
        self.backward_state: Any = None

    def forward(self, ctx: Any, *tensors: Tensor | None) -> Any:
        """Make the call, and hand its results to autograd."""
        return self.hand_on(ctx, tensors, Call.at_once(self._build, *tensors))

    def hand_on(self, ctx: Any, tensors: Sequence[Tensor | None], results: Any) -> Any:
        """Keep in the context what the backward needs, and return the outputs."""
        outputs, ctx.to_save, ctx.sources, self.backward_state = results
        return distinct(outputs, tensors)


class Recording(SingleCall):
    """The launches and allocations of one call, which repeat for calls like it.

    Attributes:
        call: repeats it and returns the results; returns None for arguments that are not like those of the call.
        forward: of a call that has a backward, what ``call`` hands to autograd: takes the context and the tensors.
        backwards: the recordings of the backward of this forward.
        backward_state: what else the backward needs.
        may_replace: the keys of the stock code that the call may replace; see ``Operator.try_fused``.
    """

    forward: Callable[..., Any]

    def __init__(
        self,
        guard: Guard,
        build: Callable[..., Any],
        apply: Callable[..., Any] | None,
        generated: tuple[list[str], dict[str, Any]] | None,
    ) -> None:
        super().__init__(build)
        self._guard = guard
        self.may_replace: set[Any] = set()
        tensors = ", ".join(guard.tensors)
        if apply is None:
            lines, names = generated or ([f"return repeat({tensors})"], {})
            self.call = guard.function(lines, {"repeat": partial(Call.at_once, build), **names})
            return
        lines, names = generated or ([f"return repeat(ctx, {tensors})"], {})
        self.forward = function_of(["ctx", *guard.tensors], lines, {"repeat": super().forward, **names})
        self.call = guard.function([f"return apply(recording, {tensors})"], {"apply": apply, "recording": self})

    @cached_property
    def fits(self) -> Callable[..., bool]:
        """The function that returns whether arguments are like those of the call."""
        return self._guard.function(["return True"], {}, otherwise=False)


caches: list[dict[Any, tuple[Recording, ...]]] = []
"""The recordings of each operator, by the keys of their calls."""


def key_function(tensors: str, options: str) -> Callable[..., Any]:
    """A function of a call's arguments that returns a key, by which few recordings are to be compared with the call.

    Args:
        tensors: the schema of the first arguments.
        options: that of the others.
    """
    parts, names = list[str](), list[str]()
    for kind, name in (argument.split()[:2] for argument in f"{tensors}, {options}".split(",") if argument.strip()):
        tensor = f"{name}.shape, {name}.dtype, {name}.requires_grad"
        of_kind = {
            "Tensor": tensor,
            "Tensor?": f"{name} if {name} is None else ({tensor})",
            "NormSpec": f"{name}.eps, {name}.casting",
        }
        parts.append(f"tuple({name})" if kind.endswith("[]") else of_kind.get(kind, name))
        names.append(name)
    return function_of(names, [f"return {', '.join(parts)}"], {})


def remember(cache: dict[Any, tuple[Recording, ...]], key: Any, recording: Recording) -> None:
    """Add a recording of a call with this key to the others of its operator."""
    if key not in cache and len(cache) >= KEYS:
        cache.pop(next(iter(cache)), None)  # another thread may have
    cache[key] = appended(cache.get(key, ()), recording)


def forget_all() -> None:
    """Forget every recording."""
    for cache in caches:
        cache.clear()


when_plans_change.append(forget_all)


def appended(recordings: tuple[Recording, ...], recording: Recording) -> tuple[Recording, ...]:
    """The recordings with another one, without the oldest one if they are too many."""
    return (*recordings, recording)[-EACH:]


def record(
    tensors: Sequence[Tensor | None],
    options: Sequence[Any],
    build: Callable[..., Any],
    *,
    apply: Callable[..., Any] | None = None,
    in_any_grad_mode: bool = False,
) -> tuple[Recording, Any] | None:
    """Run the call once, and return a recording of it together with its outputs.

    Returns None without running the call if its arguments cannot be compared (NaN is not equal to itself, and 0.0 is
    equal to -0.0), or if a tensor is not 16-byte aligned, because Triton specialises on alignment.

    Args:
        tensors: the tensors of the call, or None. No dispatch mode may be active.
        options: its other arguments, which come after the tensors.
        build: takes a ``Call`` and tensors like these, and returns the outputs that the call will have written when it
            has run, in nested tuples. If the call has a backward it returns the outputs, what is saved for it, the
            weights whose copies are among that, and what else the backward needs. It holds no tensor.
        apply: hands the recording and the tensors to autograd, if the call has a backward.
        in_any_grad_mode: leave grad mode out of the guard; the caller checks it.
    """
    present = [t for t in tensors if t is not None]
    if TensorGuards is None:
        return None
    if any(isinstance(option, float) and (option != option or option == 0.0) for option in options):
        return None
    if any(t.data_ptr() % 16 for t in present):
        return None
    guard, backend = Guard(tensors, options, in_any_grad_mode), launch_backend(present[0].device)
    call, generated = Call(), None
    with torch.no_grad():
        results = build(call, *tensors)
        steps = call.run()
    if backend is not None:
        try:
            names, repeated = (guard.tensors, results) if apply is None else (["ctx", *guard.tensors], results[:3])
            generated = generated_lines(backend, tensors, names, call.allocated, steps, repeated)
        except NotRecordableError as reason:
            logger.debug("a call is not repeated by generated lines: %s", reason)
    recording = Recording(guard, build, apply, generated)
    if apply is None:
        return recording, results
    # The call was made already: its results are handed to autograd.
    forward, recording.forward = recording.forward, lambda ctx, *_: recording.hand_on(ctx, tensors, results)
    recording.backward_state = results[3]
    try:
        return recording, apply(recording, *tensors)
    finally:
        recording.forward = forward
