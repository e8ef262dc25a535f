"""A record of a model that runs: which norms take the sum of an add, which modules multiply by a gate or convolve."""

from __future__ import annotations

import functools
import re
from collections.abc import Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

Call = tuple[str, object]

_ADDS = (torch.ops.aten.add, torch.ops.aten.add_)
_ACTIVATIONS = (torch.ops.aten.silu, torch.ops.aten.gelu)


class TracedSums(TorchDispatchMode):
    """A context that records what the operators of a model's forward are used for.

    Attributes:
        called: the norms that were called.
        fed: those whose input is the sum of an add that the module which holds them made in the same call.
        gated: the modules that multiplied the SiLU or the GELU of a tensor by another tensor of its shape.
        convolved: those that made a depthwise convolution of two to four taps, padded on both sides by all taps but
            one: what is left when its end is cut off sees no later token.
    """

    def __init__(self, model: nn.Module, norms: Set[str]) -> None:
        """``norms``: their paths in ``model``."""
        super().__init__()
        self.called: set[str] = set()
        self.fed: set[str] = set()
        self.gated: set[str] = set()
        self.convolved: set[str] = set()
        self._holders = {path: re.sub(r"\.?[^.]+(\.\d+)?$", "", path) for path in norms}  # some are in lists
        self._convolutions = {path for path, module in model.named_modules() if type(module) is nn.Conv1d}
        self._calls: list[Call] = []
        self._sums: dict[Any, tuple[Tensor, int, Call]] = {}  # kept, and so their addresses are
        self._activated: dict[Any, Tensor] = {}
        self._handles = []
        for path, module in model.named_modules():
            enter = functools.partial(self._enter, path)
            is_plain = not module._parameters and not module._modules and not module._buffers
            cls: Any = type(module)
            leave = functools.partial(self._leave, is_plain and _activates(cls))
            self._handles += [
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(leave, always_call=True),
            ]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._sums.clear()
        self._activated.clear()

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operator = func.overloadpacket
        if operator in _ADDS and self._calls and all(getattr(x, "shape", None) == result.shape for x in args[:2]):
            in_place = operator is torch.ops.aten.add_  # which counts as a change only when it has returned
            self._sums[_place(result)] = result, result._version + in_place, self._calls[-1]
        elif operator in _ACTIVATIONS:
            self._activated[_place(result)] = result
        elif operator is torch.ops.aten.mul and self._calls:
            tensors = [argument for argument in args if isinstance(argument, Tensor)]
            gates = [tensor for tensor in tensors if _place(tensor) in self._activated]
            if len(tensors) == 2 and len(gates) == 1 and tensors[0].shape == tensors[1].shape:
                self.gated.add(self._calls[-1][0])
        elif operator is torch.ops.aten.convolution and _is_short_and_causal(*args):
            self.convolved.update([path for path, _ in self._calls if path not in self._convolutions][-1:])
        return result

    def _enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if path in self._holders:
            self.called.add(path)
            x = next((argument for argument in (*args, *kwargs.values()) if isinstance(argument, Tensor)), None)
            if x is not None and self._calls and self._is_sum_of(x, self._calls[-1], self._holders[path]):
                self.fed.add(path)
        self._calls.append((path, object()))

    def _is_sum_of(self, x: Tensor, call: Call, holder: str) -> bool:
        """Return whether ``call`` is one of the module at ``holder``, and made a tensor, as it is now, by an add."""
        _, version, made_in = self._sums.get(_place(x), (None, None, None))
        return made_in is call and version == x._version and call[0] == holder

    def _leave(self, is_activation: bool, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if self._calls:
            self._calls.pop()
        if is_activation and isinstance(result, Tensor):
            self._activated[_place(result)] = result


def _is_short_and_causal(x: Tensor, weight: Tensor, _bias: Any, stride: Any, padding: Any, dilation: Any,
                         transposed: bool, _output: Any, groups: int) -> bool:  # fmt: skip
    taps = weight.shape[-1]
    depthwise = x.dim() == 3 and not transposed and groups == weight.shape[0] == x.shape[1]
    return depthwise and 2 <= taps <= 4 and list(stride) == list(dilation) == [1] and list(padding) == [taps - 1]


def _place(tensor: Tensor) -> Any:
    return tensor.data_ptr(), tensor.shape


@functools.cache
def _activates(cls: Any) -> bool:
    """Return whether a module of a class without parameters computes the SiLU or a GELU."""
    x = torch.linspace(-3, 3, 64, device="cpu")
    try:
        y = cls()(x)
    except Exception:  # a foreign module may raise anything
        return False
    known = (functional.silu(x), functional.gelu(x), functional.gelu(x, approximate="tanh"))
    return isinstance(y, Tensor) and any(torch.allclose(y, other, atol=1e-5) for other in known)
