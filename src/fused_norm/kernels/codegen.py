"""Code generation: what a call allocates and launches, as lines of Python that do it again for tensors like its own.

They allocate, gather addresses and launch, by parts of PyTorch and Triton that are not public. What is allocated is
called m0, m1 and so on, and the address of m0 is pm0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs

from .triton.call import CallStep
from .triton.devices import INTERPRETED
from .triton.launch import Launch
from .triton.memory import INT32_LIMIT
from .triton.torch_calls import TorchCall

_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_empty_strided_cuda: Any = getattr(_guards, "_empty_strided_cuda", None)


class NotRecordableError(Exception):
    """The call does something that a recording cannot repeat."""


class _Entry(NamedTuple):
    """The function that launches a compiled kernel, called as ``call(x, y, 1, stream, *head, arguments...)``."""

    call: Callable[..., Any]
    head: tuple[Any, ...]  # what it takes before the kernel's arguments
    packed: bool  # these are one tuple, without those that were compiled in; otherwise all of them follow
    numbers: tuple[Any, ...]  # the arguments that are not tensors
    tensors: tuple[int | None, ...]  # the index of each tensor that is passed; None is passed as it is


class _TensorNames:
    """The names of the tensors of a call; ``used`` has those that its lines read."""

    def __init__(self, tensors: Sequence[Tensor | None], names: Sequence[str]) -> None:
        self._names: dict[int, str] = {}
        self.used: set[str] = set()
        for tensor, name in zip(tensors, names, strict=True):
            if tensor is not None:
                self._names.setdefault(id(tensor), name)

    def lookup(self, tensor: Tensor) -> str:
        """The name of a tensor."""
        name = self._names.get(id(tensor))
        if name is None:
            raise NotRecordableError("a tensor is neither an argument nor allocated by the call")
        self.used.add(name)
        return name

    def expression(self, results: Any, taken: set[str] | None = None) -> str:
        """Source text for the results; a name that is ``taken`` is detached: autograd needs distinct outputs."""
        if results is None:
            return "None"
        if isinstance(results, Tensor):
            name = self.lookup(results)
            if taken is None:
                return name
            is_new = name not in taken
            taken.add(name)
            return name if is_new else f"{name}.detach()"
        parts = [self.expression(part, taken) for part in results]
        return f"({', '.join(parts)}{',' * (len(parts) == 1)})"


def generated_lines(
    backend: Cuda | Interpreter,
    inputs: Sequence[Tensor | None],
    arguments: Sequence[str],
    allocated: Sequence[Tensor],
    steps: Sequence[tuple[CallStep, Any]],
    results: Any,
) -> tuple[list[str], dict[str, Any]]:
    """Lines that repeat a call, and their global names, to which the caller adds ``repeat``.

    They fall back to ``repeat`` if an address is not 16-byte aligned or a launch hook is installed.

    Args:
        backend: how its kernels are launched.
        inputs: its tensors.
        arguments: the names of these; a context, ``ctx``, before them gets what is saved.
        allocated: the tensors that it has allocated.
        steps: its launches with their compiled kernels, and what PyTorch computes between them.
        results: in nested tuples; with a context the outputs, what is saved, and the weights whose copies are among
            that.

    Raises:
        NotRecordableError: if a tensor is of unknown origin, or a launch is compiled anew for its numbers.
    """
    new_names = [f"m{index}" for index in range(len(allocated))]
    names = _TensorNames([*inputs, *allocated], [*arguments[len(arguments) - len(inputs) :], *new_names])
    runtime = knobs.runtime
    values = {"kept": [compiled for _, compiled in steps], "index": backend.index, "empty": backend.empty}
    values |= {"device": backend.device, "stream_of": backend.stream, "runtime": runtime}
    values |= {"enter": runtime.launch_enter_hook, "leave": runtime.launch_exit_hook}
    launches = []
    for index, (launch, compiled) in enumerate(steps):
        if isinstance(launch, TorchCall):
            line, line_values = launch.line(names.lookup)
        else:
            places = [None if t is None else f"p{names.lookup(t)}" for t in launch.tensors]
            line, line_values = _launch_line(index, launch, backend.entry(launch, compiled), places)
        launches.append(line)
        values |= line_values
    passed = sorted(names.used)
    taken = None
    if len(arguments) > len(inputs):
        results, saved, sources = results
        launches.append(f"ctx.to_save = {names.expression(saved)}")
        if sources:
            launches.append(f"ctx.sources = {names.expression(sources)}")
        taken = {*arguments}  # autograd wants outputs that are neither inputs nor each other
    launches.append(f"return {names.expression(results, taken)}")
    otherwise = f"    return repeat({', '.join(arguments)})"
    hooks = "enter is not runtime.launch_enter_hook or enter.calls or leave is not runtime.launch_exit_hook"
    lines = [f"if {hooks} or leave.calls{' or device() != index' * backend.is_one_of_several}:", otherwise]
    for name, tensor in zip(new_names, allocated, strict=True):
        if name in names.used:
            values[f"size_{name}"], values[f"stride_{name}"] = tuple(tensor.shape), tensor.stride()
            values[f"dtype_{name}"] = tensor.dtype
            lines.append(f"{name} = empty(size_{name}, stride_{name}, dtype_{name})")
    lines += [f"p{name} = {name}.data_ptr()" for name in passed]
    if passed:
        lines += [f"if ({' | '.join(f'p{name}' for name in passed)}) & 15:", otherwise, "stream = stream_of(index)"]
    return [*lines, *launches], values


def _launch_line(index: int, launch: Launch, entry: _Entry, places: Sequence[str | None]) -> tuple[str, dict[str, Any]]:
    """The line that makes one launch, with its tensors at the addresses named, and its global names."""
    if any(isinstance(number, int) and number >= INT32_LIMIT for number in launch.numbers):
        raise NotRecordableError(f"{launch.name} is compiled anew for numbers like these")
    head = {f"h{index}_{i}": value for i, value in enumerate(entry.head)}
    numbers = {f"n{index}_{i}": value for i, value in enumerate(entry.numbers)}
    passed = ", ".join((*("None" if at is None else str(places[at]) for at in entry.tensors), *numbers))
    passed = f"({passed},)" if entry.packed else passed
    line = f"call{index}(x{index}, y{index}, 1, stream, {', '.join(head)}, {passed})"
    grid = {f"x{index}": launch.grid[0], f"y{index}": launch.grid[1]}
    return line, {f"call{index}": entry.call, **grid, **head, **numbers}


class Cuda:
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
        names = launch.kernel.arg_names[len(launch.tensors) + len(launch.numbers) :]
        constants = tuple(launch.constants[name] for name in names)
        all_tensors = tuple(None if t is None else index for index, t in enumerate(launch.tensors))
        direct = getattr(launcher, "launch", None)
        scratch = [getattr(launcher, f"{sort}_scratch_size", None) for sort in ("global", "profile")]
        if torch.version.hip or direct is None or scratch != [0, 0] or getattr(launcher, "gsan_enabled", False):
            head: tuple[Any, ...] = (function, metadata, None, None, None)
            return _Entry(launcher, head, False, (*launch.numbers, *constants), all_tensors)
        how = function, launcher.launch_cooperative_grid, launcher.launch_pdl
        if not hasattr(launcher, "arg_annotations"):  # Triton 3.6
            head = (*how, None, None, metadata, None, None, None)
            return _Entry(direct, head, False, (*launch.numbers, *constants), all_tensors)
        passed = [kind != "constexpr" for kind in compiled.src.signature.values()]
        annotations = [note for note, is_passed in zip(launcher.arg_annotations, passed, strict=True) if is_passed]
        head = (*how, metadata, None, None, None, None, None, annotations, launcher.kernel_signature)
        tensors = tuple(index for index in range(len(launch.tensors)) if passed[index])
        after_tensors = passed[len(launch.tensors) : len(launch.tensors) + len(launch.numbers)]
        numbers = tuple(number for number, is_passed in zip(launch.numbers, after_tensors, strict=True) if is_passed)
        return _Entry(direct, head, True, numbers, tensors)


class Interpreter:
    """Stands for a GPU if kernels are interpreted: makes tensors of the addresses that it is given."""

    index, is_one_of_several = 0, True

    device, stream = staticmethod(lambda: 0), staticmethod(lambda index: 0)
    # As on a GPU, but PyTorch can be told to fill uninitialised memory.
    empty = staticmethod(lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype))

    @staticmethod
    def entry(launch: Launch, compiled: Any) -> _Entry:
        """The launch of a kernel, which gets tensors like those of ``launch`` at other addresses."""
        like = tuple(None if t is None else (t.shape, t.stride(), t.dtype) for t in launch.tensors)

        def call(x: int, y: int, z: int, stream: int, launch: Launch, arguments: tuple[Any, ...]) -> None:
            addresses = iter(arguments)
            tensors = tuple(None if layout is None else tensor_at(next(addresses), *layout) for layout in like)
            launch._replace(grid=(x, y), tensors=tensors, numbers=tuple(addresses)).run()

        tensors = tuple(index for index, t in enumerate(launch.tensors) if t is not None)
        return _Entry(call, (launch._replace(tensors=()),), True, launch.numbers, tensors)


def launch_backend(device: torch.device) -> Cuda | Interpreter | None:
    """Return what launches kernels on ``device``; None if Triton itself has to."""
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    if not all(hasattr(hook, "calls") for hook in hooks):
        return None
    if device.type == "cpu":
        return Interpreter() if INTERPRETED else None
    return Cuda(device) if device.type == "cuda" and not INTERPRETED and _empty_strided_cuda is not None else None


def tensor_at(address: int, shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU's memory at ``address``."""
    import ctypes

    extent = (1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))) * dtype.itemsize
    memory = torch.frombuffer((ctypes.c_byte * extent).from_address(address), dtype=torch.uint8, count=extent)
    return memory.view(dtype).as_strided(shape, stride)


@lru_cache(maxsize=512)
def _code(names: tuple[str, ...], lines: tuple[str, ...]) -> CodeType:
    source = "".join(f"    {line}\n" for line in lines)
    module = compile(f"def run({', '.join(names)}):\n{source}", "<program of fused_norm>", "exec")
    return next(code for code in module.co_consts if isinstance(code, CodeType))


def function_of(names: Sequence[str], lines: Sequence[str], values: dict[str, Any]) -> Callable[..., Any]:
    """The function of arguments of these names that runs the lines, with these global names."""
    return FunctionType(_code(tuple(names), tuple(lines)), {"__builtins__": __builtins__, **values})
