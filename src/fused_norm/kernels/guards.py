"""Guards: functions that tell whether the arguments of a call are like those of another one, and go on where they are.

The facts of tensors are verified by the guard that Dynamo uses for compiled code, one call into C++, and by plain
comparisons where PyTorch has no such guard. It does not see grad mode, which is a condition of its own where it
matters, and forward-mode differentiation and the modes that fake or trace, for which whoever calls has to look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

TensorGuards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)


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
    expected = [_facts(tensor) for tensor in tensors]
    return lambda *given: len(set(map(id, given))) == len(given) and [_facts(one) for one in given] == expected


def _facts(tensor: Any) -> Any:
    if type(tensor) not in (Tensor, Parameter) or torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    described = tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
    return type(tensor), *described, tensor.is_neg(), tensor.is_inference(), torch.is_inference_mode_enabled()


@lru_cache(maxsize=512)
def _code(names: tuple[str, ...], lines: tuple[str, ...]) -> CodeType:
    source = "".join(f"    {line}\n" for line in lines)
    module = compile(f"def run({', '.join(names)}):\n{source}", "<program of fused_norm>", "exec")
    return next(one for one in module.co_consts if isinstance(one, CodeType))


def function_of(names: Sequence[str], lines: Sequence[str], known: dict[str, Any]) -> Callable[..., Any]:
    """The function of arguments of these names that does the lines, with these global names."""
    return FunctionType(_code(tuple(names), tuple(lines)), {"__builtins__": __builtins__, **known})
