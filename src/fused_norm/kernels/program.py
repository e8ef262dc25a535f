"""Programs: the allocations and launches of a whole call, recorded once and repeated for all calls like it.

An operator's forward, or backward, is run once for tensors of certain facts (shapes, strides, dtypes, device, who
wants a gradient), while a recorder notes what it allocates and launches. What it noted becomes a few lines of
straight-line Python, compiled once for each sequence of steps: allocate, gather addresses, launch. A call that does
anything else to a tensor, such as a copy, has no program and goes the general way every time.

The facts are verified by the guard that Dynamo uses for compiled code, one call into C++, and by plain comparisons
where PyTorch has no such guard. It does not see grad mode, which is a condition of its own where it matters, and
forward-mode differentiation and the modes that fake or trace, which whoever looks for a program asks for.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

from .triton.devices import INTERPRETED, when_plans_change
from .triton.launch import Launch, launches
from .triton.memory import INT32_LIMIT

logger = logging.getLogger("fused_norm")

_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
TensorGuards: Any = getattr(_guards, "TensorGuards", None)
_empty_strided_cuda: Any = getattr(_guards, "_empty_strided_cuda", None)

SHAPES, EACH = 1024, 8
"""How many shapes an operator remembers, and how many programs for each; where there are more it starts anew."""

_ALLOCATIONS = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
_ZEROS = ("zeros", "zeros_like", "new_zeros")
_WITHOUT_WORK = ("alias", "detach", "promote_types", "view")
"""Operators that do nothing to memory; ``detach`` is how the dispatcher hands a tensor on."""


class NotRecordableError(Exception):
    """The call does something that a program cannot repeat."""


class Recorder(TorchDispatchMode):
    """Notes the allocations and launches of its thread inside a ``with``; kernels are not launched."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[tuple[Tensor, bool]] = []
        self.launches: list[Launch] = []
        self._observing = contextlib.ExitStack()

    def __enter__(self) -> Recorder:
        self._observing.enter_context(launches.by(self))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._observing.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__ if func.namespace == "aten" else None
        if name not in (*_ALLOCATIONS, *_ZEROS, *_WITHOUT_WORK):
            raise NotRecordableError(f"{func} is no allocation")
        made = func(*args, **(kwargs or {}))
        if name not in _WITHOUT_WORK:
            self.allocated.append((made, name in _ZEROS))
        return made

    def launched(self, launch: Launch) -> None:
        """Note a launch."""
        self.launches.append(launch)


class _Steps(NamedTuple):
    """The steps of a call. Tensors have numbers, called slots: the inputs come first, then what is allocated.

    Attributes:
        inputs: how many.
        device: of all tensors.
        allocated: size, strides, dtype, and whether it is to be zero.
        launches: without their tensors.
        slots: the slot and dtype of each launch's tensors, None for absent ones.
        results: slots in nested tuples, None for absent results.
    """

    inputs: int
    device: torch.device
    allocated: list[tuple[Any, Any, torch.dtype, bool]]
    launches: list[Launch]
    slots: list[tuple[tuple[int, torch.dtype] | None, ...]]
    results: Any


def _steps_of(recorder: Recorder, inputs: Sequence[Tensor | None], results: Any) -> _Steps:
    """The steps that were recorded; raises NotRecordableError where one of them uses a tensor of unknown origin."""
    flat = list(_flat(results))
    used = {t.data_ptr() for one in recorder.launches for t in one.tensors if t is not None}
    used |= {t.data_ptr() for t in flat}
    allocated = [(t, zero) for t, zero in recorder.allocated if t.data_ptr() in used or any(t is one for one in flat)]
    known: list[Any] = [*inputs, *(t for t, _ in allocated)]

    def slot_of(tensor: Tensor) -> int:
        found = [slot for slot, one in enumerate(known) if one is tensor]
        if not found:  # a view
            address = tensor.data_ptr()
            found = [slot for slot, one in enumerate(known) if one is not None and one.data_ptr() == address]
            found = found if len(found) == 1 else []
        if not found or known[found[0]].element_size() != tensor.element_size():
            raise NotRecordableError("a tensor is neither an input nor allocated for it")
        return found[0]

    def result_of(tensor: Tensor) -> int:
        slot = slot_of(tensor)
        one = known[slot]
        if (one.shape, one.stride(), one.dtype) != (tensor.shape, tensor.stride(), tensor.dtype):
            raise NotRecordableError("a result is a view of another tensor")
        return slot

    lead = next(one for one in inputs if one is not None)
    for one in recorder.launches:
        if any(isinstance(number, int) and number >= INT32_LIMIT for number in one.numbers):
            raise NotRecordableError(f"{one.name} is compiled anew for numbers like these")
    return _Steps(
        len(inputs),
        lead.device,
        [(tuple(t.shape), t.stride(), t.dtype, zero) for t, zero in allocated],
        [one._replace(tensors=()) for one in recorder.launches],
        [tuple(None if t is None else (slot_of(t), t.dtype) for t in one.tensors) for one in recorder.launches],
        _mapped(result_of, results),
    )


class Program:
    """A recorded call.

    Attributes:
        fits: whether arguments are like those that it was recorded for.
        call: does what was recorded, and returns the results; None for arguments that it is not for, and where nothing
            could be recorded.
        forward: of a call that has a backward, what ``call`` hands to autograd: takes the context and the tensors.
        backwards: the programs of the backward behind this forward.
        facts: what else the backward has to know.
    """

    __slots__ = ("_guard", "_steps", "backwards", "call", "facts", "fits", "forward")

    def __init__(self, guard: _Guard, steps: _Steps | None, facts: Any, apply: Callable[..., Any] | None) -> None:
        self._guard, self._steps, self.facts = guard, steps, facts
        self.fits = guard.function(["return True"], {}, otherwise=False)
        self.forward: Callable[..., Any] | None = None
        self.backwards: tuple[Program, ...] = ()
        tensors = ", ".join(guard.tensors)
        if steps is None:
            self.call: Callable[..., Any] = _nothing
        elif apply is None:
            self.call = guard.function([f"return repeat({tensors})"], {"repeat": self._repeat})
        else:
            self.call = guard.function([f"return apply(program, {tensors})"], {"apply": apply, "program": self})
            self.forward = self._repeat

    @property
    def is_recorded(self) -> bool:
        """The call could be recorded."""
        return self._steps is not None

    def _repeat(self, *given: Any) -> Any:
        """Run by Triton's own launches, which take tensors at any address and call the hooks of profilers."""
        steps = self._steps
        assert steps is not None
        tensors = given if self.forward is None else given[1:]
        made = [torch.empty_strided(size, step, dtype=d, device=steps.device) for size, step, d, _ in steps.allocated]
        for tensor, (*_, zero) in zip(made, steps.allocated, strict=True):
            if zero:
                tensor.zero_()
        known: list[Any] = [*tensors, *made]
        performed, aligned = [], True
        for launch, slots in zip(steps.launches, steps.slots, strict=True):
            tensors = tuple(None if slot is None else _typed(known[slot[0]], slot[1]) for slot in slots)
            launch = launch._replace(tensors=tensors)
            performed.append((launch, launch.run()))
            aligned = aligned and not any(tensor.data_ptr() % 16 for tensor in tensors if tensor is not None)
        if aligned:
            self._straighten(steps, performed)
        results = _mapped(known.__getitem__, steps.results)
        if self.forward is None:
            return results
        outputs, given[0].to_save = results
        return outputs

    def _straighten(self, steps: _Steps, performed: list[tuple[Launch, Any]]) -> None:
        """Put straight-line code in the place of ``_repeat``, if it is known how to launch on this machine."""
        machine = _machine(steps.device)
        if machine is None:
            return
        inputs = self._guard.tensors if self.forward is None else ["ctx", *self._guard.tensors]
        lines, known = _straight_lines(steps, machine, performed, inputs)
        known["repeat"] = self._repeat
        if self.forward is None:
            self.call = self._guard.function(lines, known)
        else:
            self.forward = _function("run", inputs, lines, known)


def _nothing(*_: Any) -> None:
    """The results of a call that could not be recorded."""


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
    call: Callable[[], tuple[Any, Any]],
    *,
    apply: Callable[..., Any] | None = None,
    in_any_grad_mode: bool = False,
) -> Program | None:
    """The program of a call; None where calls like it cannot be told from others.

    Args:
        inputs: the tensors of the call, or None. Nobody may watch the dispatcher.
        further: its other arguments, which stand before (``further[0]``) and behind the tensors.
        call: makes it, and returns its results, in nested tuples, and what its backward has to know. Where it has a
            backward, the results are the outputs and what is saved for it.
        apply: of a call that has a backward, takes the program and the tensors to autograd.
        in_any_grad_mode: whoever looks for the program knows the grad mode.
    """
    if not all(map(_is_comparable, further)):
        return None
    guard = _Guard(inputs, further, in_any_grad_mode)
    try:
        # Outside of inference mode, in which the dispatcher is passed over.
        with torch.inference_mode(False), torch.no_grad(), Recorder() as recorder:
            results, facts = call()
        return Program(guard, _steps_of(recorder, inputs, results), facts, apply)
    except NotRecordableError as reason:
        logger.debug("a call has no program: %s", reason)
        return Program(guard, None, None, None)


# ---- guards ----


class _Guard:
    """Tells whether arguments are like those of a call.

    Attributes:
        names: of the arguments, in functions that begin with this guard.
        tensors: the names of those that are tensors or stand in the place of one.
    """

    def __init__(self, inputs: Sequence[Tensor | None], further: Sequence[Any], in_any_grad_mode: bool) -> None:
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
        return _function("run", self.names, guarded, {**self._known, **known})


def _is_comparable(value: Any) -> bool:
    """Return whether equal values mean the same: NaN is not equal to itself, and 0.0 is to -0.0."""
    return not isinstance(value, float) or (value == value and value != 0.0)


def _check_of(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function that tells whether tensors, no one given twice, have the facts of these, and the thread its state."""
    if TensorGuards is not None:
        sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
        return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    expected = [_facts(tensor) for tensor in tensors]
    return lambda *given: len(set(map(id, given))) == len(given) and [_facts(one) for one in given] == expected


def _facts(tensor: Any) -> Any:
    if type(tensor) not in (Tensor, Parameter) or torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    described = tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
    return type(tensor), *described, tensor.is_neg(), tensor.is_inference(), torch.is_inference_mode_enabled()


# ---- straight lines ----


class _Entry(NamedTuple):
    """The function that launches a compiled kernel, called as ``call(x, y, 1, stream, *head, arguments...)``.

    Attributes:
        call: the function.
        head: what it takes in front of the kernel's arguments.
        packed: whether these are one tuple, without those that were compiled in; otherwise all of them follow.
        numbers: the arguments that are no tensors.
        tensors: the index of each tensor argument that is passed; None is passed as it is.
    """

    call: Callable[..., Any]
    head: tuple[Any, ...]
    packed: bool
    numbers: tuple[Any, ...]
    tensors: tuple[int | None, ...]


def _straight_lines(
    steps: _Steps, machine: _Cuda | _Interpreter, performed: list[tuple[Launch, Any]], inputs: Sequence[str]
) -> tuple[list[str], dict[str, Any]]:
    """Lines that do the steps with ``inputs``, and the names that they know.

    They call ``repeat`` where the compiled kernels are not for these addresses. With a context in front of the
    tensors, what is saved is given to it.
    """
    entries = [machine.entry(launch, compiled) for launch, compiled in performed]
    names = [*inputs[len(inputs) - steps.inputs :], *(f"m{index}" for index in range(len(steps.allocated)))]
    otherwise = f"    return repeat({', '.join(inputs)})"
    known: dict[str, Any] = {"kept": [compiled for _, compiled in performed], "index": machine.index}
    known |= {"empty": machine.empty, "device": machine.device, "stream_of": machine.stream}
    runtime = knobs.runtime
    known |= {"runtime": runtime, "enter": runtime.launch_enter_hook, "leave": runtime.launch_exit_hook}
    hooks = "enter is not runtime.launch_enter_hook or enter.calls or leave is not runtime.launch_exit_hook"
    lines = [f"if {hooks} or leave.calls{' or device() != index' * machine.is_one_of_several}:", otherwise]
    for index, (size, stride, dtype, zero) in enumerate(steps.allocated):
        known |= {f"size{index}": size, f"stride{index}": stride, f"dtype{index}": dtype}
        lines.append(f"m{index} = empty(size{index}, stride{index}, dtype{index})")
        lines += [f"m{index}.zero_()"] * zero
    passed = sorted({slot[0] for slots in steps.slots for slot in slots if slot is not None})
    lines += [f"p{slot} = {names[slot]}.data_ptr()" for slot in passed]
    if passed:
        lines += [f"if ({' | '.join(f'p{slot}' for slot in passed)}) & 15:", otherwise, "stream = stream_of(index)"]
    for index, ((launch, _), entry, slots) in enumerate(zip(performed, entries, steps.slots, strict=True)):
        head = {f"h{index}_{i}": value for i, value in enumerate(entry.head)}
        numbers = {f"n{index}_{i}": value for i, value in enumerate(entry.numbers)}
        known |= {f"call{index}": entry.call, f"x{index}": launch.grid[0], f"y{index}": launch.grid[1]}
        known |= {**head, **numbers}
        addresses = ["None" if at is None else f"p{slots[at][0]}" for at in entry.tensors]  # type: ignore[index]
        arguments = ", ".join((*addresses, *numbers))
        if entry.packed:
            arguments = f"({arguments},)"
        lines.append(f"call{index}(x{index}, y{index}, 1, stream, {', '.join(head)}, {arguments})")
    results = steps.results
    if len(inputs) > steps.inputs:
        results, saved = results
        lines.append(f"ctx.to_save = {_expression(saved, names)}")
    return [*lines, f"return {_expression(results, names)}"], known


class _Cuda:
    """Launches on an NVIDIA or AMD GPU, by parts of PyTorch and Triton that are not public."""

    def __init__(self, device: torch.device) -> None:
        self.index: Any = device.index
        self.is_one_of_several = torch.cuda.device_count() > 1
        self.empty = _empty_strided_cuda
        self.device, self.stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream

    @staticmethod
    def entry(launch: Launch, compiled: Any) -> _Entry:
        """The launch of a compiled kernel, as directly as this Triton lets it."""
        launcher, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        behind = launch.kernel.arg_names[len(launch.tensors) + len(launch.numbers) :]
        constants = tuple(launch.constants[name] for name in behind)
        everything = tuple(None if one is None else index for index, one in enumerate(launch.tensors))
        direct = getattr(launcher, "launch", None)
        scratch = [getattr(launcher, f"{sort}_scratch_size", None) for sort in ("global", "profile")]
        if torch.version.hip or direct is None or scratch != [0, 0] or getattr(launcher, "gsan_enabled", False):
            head: tuple[Any, ...] = (function, metadata, None, None, None)
            return _Entry(launcher, head, False, (*launch.numbers, *constants), everything)
        how = function, launcher.launch_cooperative_grid, launcher.launch_pdl
        if not hasattr(launcher, "arg_annotations"):  # Triton 3.6
            head = (*how, None, None, metadata, None, None, None)
            return _Entry(direct, head, False, (*launch.numbers, *constants), everything)
        passed = [kind != "constexpr" for kind in compiled.src.signature.values()]
        annotations = [one for one, is_passed in zip(launcher.arg_annotations, passed, strict=True) if is_passed]
        head = (*how, metadata, None, None, None, None, None, annotations, launcher.kernel_signature)
        tensors = tuple(index for index in range(len(launch.tensors)) if passed[index])
        behind_tensors = passed[len(launch.tensors) : len(launch.tensors) + len(launch.numbers)]
        numbers = tuple(one for one, is_passed in zip(launch.numbers, behind_tensors, strict=True) if is_passed)
        return _Entry(direct, head, True, numbers, tensors)


class _Interpreter:
    """Stands for a GPU where kernels are interpreted: makes tensors of the addresses that it is given."""

    index, is_one_of_several = 0, True

    @staticmethod
    def empty(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        """As on a GPU, but uninitialised memory is filled where PyTorch is told so."""
        return torch.empty_strided(size, stride, dtype=dtype)

    @staticmethod
    def device() -> int:
        """There is one."""
        return 0

    @staticmethod
    def stream(index: int) -> int:
        """There is one."""
        return 0

    @staticmethod
    def entry(launch: Launch, compiled: Any) -> _Entry:
        """The launch of a kernel, which gets tensors like those of ``launch`` at other addresses."""
        like = tuple(None if one is None else (one.shape, one.stride(), one.dtype) for one in launch.tensors)

        def call(x: int, y: int, z: int, stream: int, launch: Launch, arguments: tuple[Any, ...]) -> None:
            addresses = iter(arguments)
            tensors = tuple(None if one is None else tensor_at(next(addresses), *one) for one in like)
            launch._replace(grid=(x, y), tensors=tensors, numbers=tuple(addresses)).run()

        tensors = tuple(index for index, one in enumerate(launch.tensors) if one is not None)
        return _Entry(call, (launch._replace(tensors=()),), True, launch.numbers, tensors)


def _machine(device: torch.device) -> _Cuda | _Interpreter | None:
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    if not all(hasattr(hook, "calls") for hook in hooks):
        return None
    if device.type == "cpu":
        return _Interpreter() if INTERPRETED else None
    return _Cuda(device) if device.type == "cuda" and not INTERPRETED and _empty_strided_cuda is not None else None


def tensor_at(address: int, shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU's memory at ``address``."""
    import ctypes

    extent = (1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))) * dtype.itemsize
    memory = torch.frombuffer((ctypes.c_byte * extent).from_address(address), dtype=torch.uint8, count=extent)
    return memory.view(dtype).as_strided(shape, stride)


@lru_cache(maxsize=512)
def _code(source: str) -> CodeType:
    module = compile(source, "<program of fused_norm>", "exec")
    return next(one for one in module.co_consts if isinstance(one, CodeType))


def _function(name: str, names: Sequence[str], lines: Sequence[str], known: dict[str, Any]) -> Any:
    """The function of arguments of these names that does the lines, with these global names."""
    source = "".join(f"    {line}\n" for line in lines)
    return FunctionType(_code(f"def {name}({', '.join(names)}):\n{source}"), {"__builtins__": __builtins__, **known})


def _expression(results: Any, names: Sequence[str]) -> str:
    if results is None:
        return "None"
    if isinstance(results, int):
        return names[results]
    return f"({', '.join(_expression(one, names) for one in results)}{',' * (len(results) == 1)})"


def _flat(results: Any) -> list[Tensor]:
    if isinstance(results, Tensor):
        return [results]
    return [] if results is None else [tensor for one in results for tensor in _flat(one)]


def _mapped(function: Callable[[Any], Any], results: Any) -> Any:
    """``function`` of everything in nested tuples, None left as it is."""
    if isinstance(results, tuple):
        return tuple(_mapped(function, one) for one in results)
    return None if results is None else function(results)


def _typed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
