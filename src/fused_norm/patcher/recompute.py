"""Outputs of fused operators that a layer does not keep for its backward, because they are recomputed there.

The output of a norm, the rotated queries and keys and the product of a gate are kept by what comes after them, a linear
or the attention, for its own backward. One cheap kernel recomputes them from what the operators keep anyway. While the
forward of a layer runs, hooks see every tensor that autograd saves, and save how to recompute such an output instead.
The backward recomputes it once for all that have saved it.

What is saved holds the tensors that are needed themselves, so there are no chains of recomputed outputs. It is taken
only for the output itself, for a cast of it, such as autocast makes for a linear, and for views of both, told by their
history: whoever writes into an output by other means than PyTorch's must return it from an autograd function of its
own, as Liger's rotary embedding does, and its result is saved as it is. Nobody but autograd is concerned: what holds
the tensor otherwise, holds the tensor.

Versions of tensors are checked as autograd checks those of what it saves, and it is their memory that is held, so that
a parameter may get other memory meanwhile. Writes that make no version (through ``.data``, or by NumPy) are not seen.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ..kernels.operator import Operator, Recompute, Spec, calls
from ..kernels.triton.devices import is_transformed
from .fused_norm_module import is_disabled

logger = logging.getLogger("fused_norm")

_VIEWS = frozenset(
    f"{name}Backward0"
    for name in (
        "Alias", "AsStrided", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split", "Squeeze", "T",
        "Transpose", "Unbind", "Unflatten", "UnsafeSplit", "UnsafeView", "Unsqueeze", "View",
    )
) | {"SqueezeBackward1", "SqueezeBackward2"}  # fmt: skip
"""The nodes behind tensors that are nothing but views."""

_CAST = "ToCopyBackward0"

_OTHER_HOOKS = "other saved-tensor hooks are active, as under gradient checkpointing or offloading"
_explained: set[str] = set()


def call_recomputing(forward: Callable[..., Any], layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``forward(layer, *args, **kwargs)``, the outputs of fused operators recomputed where that is possible."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not _is_possible():
        return forward(layer, *args, **kwargs)
    register = _Register()
    try:
        with saved_tensors_hooks(register.pack, _unpack), calls.by(register):
            return forward(layer, *args, **kwargs)
    finally:
        register.forget()


def _is_possible() -> bool:
    """Return whether hooks of ours would be the only ones that see what is saved."""
    if calls.observer is not None or is_disabled() or is_transformed() or torch._C._len_torch_dispatch_stack():
        return False
    autograd: Any = torch._C._autograd
    if not autograd._saved_tensors_hooks_is_enabled():
        return False
    if _hooks_in_use() is not None:
        _explain(_OTHER_HOOKS)
        return False
    if torch._C._current_graph_task_id() != -1:
        _explain("gradient checkpointing runs the layer again in the backward")
        return False
    return True


def _explain(reason: str) -> None:
    if reason not in _explained:
        _explained.add(reason)
        logger.warning("recompute is off for some calls of layers: %s", reason)


class _Register:
    """The hook on tensors that autograd saves while a layer runs; it knows the recomputable outputs, and holds none."""

    __slots__ = ("_outputs", "_saved_by_operator")

    def __init__(self) -> None:
        self._outputs: dict[tuple[Any, int], _Output] = {}
        """By their places in the graph: a node, and which of its outputs."""
        self._saved_by_operator: list[Tensor] | None = None

    def called(self, operator: Operator, spec: Spec, arguments: tuple[Any, ...]) -> Any:
        """Call the operator, whose own backward keeps tensors as they are, and note its outputs."""
        saved: list[Tensor] = []
        self._saved_by_operator = saved
        try:
            results = operator.results_of(spec, *arguments)
        finally:
            self._saved_by_operator = None
        handed_out = operator.by_output(results)
        outputs = tuple([tensors[0] for tensors in handed_out])
        if type(outputs[0]) is not Tensor or outputs[0].grad_fn is None:
            return results
        hooks = _hooks_in_use()
        if hooks is None or hooks[0] != self.pack:
            _explain(_OTHER_HOOKS)
            return results
        kept = saved[len(saved) - len(operator.kept) :]  # an operator saves last what it has computed for that alone
        recompute = operator.recompute(spec, arguments, (*outputs, *kept))
        if recompute is not None and not any(_is_gathered_for_its_module(one) for one in recompute.arguments):
            recomputed = _Recomputed(recompute)
            for place, tensors in enumerate(handed_out[: len(recompute.operator.outputs)]):
                for output in tensors:
                    self._outputs[output.grad_fn, output.output_nr] = _Output(recomputed, place, output)
        return results

    def pack(self, tensor: Tensor) -> Any:
        """The value to save for a tensor: how to recompute it, or the tensor and its version."""
        if self._saved_by_operator is not None:
            self._saved_by_operator.append(tensor)
        elif not tensor.is_leaf and self._outputs and type(tensor) is Tensor:
            recomputed = self._recomputed(tensor)
            if recomputed is not None:
                return recomputed
        # A leaf itself, as autograd does: whoever shards parameters gives them other memory meanwhile.
        return tensor if tensor.is_leaf else tensor.detach(), tensor._version

    def _recomputed(self, tensor: Tensor) -> _View | None:
        """How to recompute a tensor; None for one that is no output, no view of one and no view of a cast of one."""
        node: Any = tensor.grad_fn
        number = tensor.output_nr
        while (name := node.name()) in _VIEWS:
            node, number = node.next_functions[0]
        is_cast = name == _CAST
        if is_cast:
            node, number = node.next_functions[0]
        output = self._outputs.get((node, number))
        return None if output is None else output.seen_as(tensor, is_cast)

    def forget(self) -> None:
        """Let go of all outputs: autograd holds its hooks as long as the graph."""
        self._outputs.clear()


class _Output:
    """One output of a call that can be recomputed, recognised as long as its memory is there."""

    __slots__ = ("_output", "_place", "_recomputed", "_storage", "_version")

    def __init__(self, recomputed: _Recomputed, place: int, output: Tensor) -> None:
        self._recomputed, self._place = recomputed, place
        self._output, self._version = weakref.ref(output), output._version
        # The storage's address belongs to no other as long as there is a weak reference to it.
        self._storage = StorageWeakRef(output.untyped_storage())

    def seen_as(self, tensor: Tensor, is_cast: bool) -> _View | None:
        """How to recompute a view of the output, or of a cast of it; None where either may have been written into."""
        source: Any = tensor
        if is_cast:
            # What the cast has read is what the operator has written, if the output is that still.
            source, cast = self._output(), tensor if tensor._base is None else tensor._base
            if source is None or tensor._version != 0 or _form(cast) != _form(source):
                return None
        if not self._is_in(source) or not self._recomputed.is_possible():
            return None
        return self._recomputed.saved(self._place, tensor)

    def _is_in(self, tensor: Tensor) -> bool:
        """Return whether a tensor's memory is the output's, as the operator has written it."""
        return tensor._version == self._version and tensor.untyped_storage()._cdata == self._storage.cdata


_Made = tuple[int, torch.dtype]
"""An output of a call, by its place, as it is or cast to another dtype."""


class _View(NamedTuple):
    """The value that autograd saves in place of an output or its cast, or of a view of them."""

    recomputed: _Recomputed
    made: _Made
    size: Any
    strides: Any
    offset: Any
    without_memory: Tensor
    version: int


class _Recomputed:
    """The outputs of one call, recomputed once for all who have saved them, and freed when all have got them.

    It holds what autograd itself would save: the memory that the forward has read, whatever memory its tensors have
    been given since, and their versions.
    """

    __slots__ = ("_made", "_read", "_recompute", "_saved", "_stream", "_waiting")

    def __init__(self, recompute: Recompute) -> None:
        arguments = tuple(one.detach() if isinstance(one, Tensor) else one for one in recompute.arguments)
        self._recompute = recompute._replace(arguments=arguments)
        self._read = [(one, one._version) for one in arguments if isinstance(one, Tensor)]
        self._saved: dict[_Made, int] = {}
        """How many have saved it."""
        self._waiting: dict[_Made, int] = {}
        self._made: dict[_Made, Tensor] = {}
        self._stream: Any = None

    def is_possible(self) -> bool:
        """Return whether all that is needed is there, and unchanged."""
        return all(one._version == version and not _is_freed(one) for one, version in self._read)

    def saved(self, place: int, tensor: Tensor) -> _View:
        """Note that somebody saves an output, or a view of it, in the dtype of this tensor."""
        made = place, tensor.dtype
        self._saved[made] = self._saved.get(made, 0) + 1
        layout = tensor.shape, tensor.stride(), tensor.storage_offset()
        return _View(self, made, *layout, _without_memory(tensor), tensor._version)

    def take(self, wanted: _Made) -> Tensor:
        """An output for one of those who have saved it."""
        for one, version in self._read:
            _check_version(one, version, one.shape)
            if _is_freed(one):
                raise RuntimeError(
                    f"recompute: the memory of a tensor of shape {tuple(one.shape)} was freed between forward and "
                    "backward; apply_fused_norm(model, recompute=False) goes without it"
                )
        # What was made on another stream may not be there yet.
        stream = _current_stream()
        found = self._made.get(wanted) if stream == self._stream else None
        if found is None:
            outputs = self._recompute.outputs()
            made = {(place, dtype): outputs[place].to(dtype) for place, dtype in self._saved}
            found = made[wanted]
            self._made, self._waiting, self._stream = made, self._saved.copy(), stream
        self._waiting[wanted] -= 1
        if self._waiting[wanted] <= 0:
            self._made.pop(wanted, None)
        return found


def _unpack(saved: Any) -> Tensor:
    if type(saved) is _View:
        _check_version(saved.without_memory, saved.version, saved.size)
        return saved.recomputed.take(saved.made).as_strided(saved.size, saved.strides, saved.offset)
    tensor, version = saved
    _check_version(tensor, version, tensor.shape)
    return tensor


def _check_version(tensor: Tensor, version: int, shape: Sequence[int]) -> None:
    """Raise as autograd does where nobody looks at what it saves."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(shape)}] is at version {tensor._version}; expected version {version} instead"
        )


def _without_memory(tensor: Tensor) -> Tensor:
    """An empty tensor that has the version of this one, now and later."""
    empty = tensor.detach()
    empty.data = _empty(tensor.dtype, tensor.device)  # which leaves it its version
    return empty


@lru_cache(maxsize=64)
def _empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """What a cast leaves as it is."""
    return tensor.shape, tensor.stride(), tensor.device


def _hooks_in_use() -> Any:
    """The hooks that see what this thread saves for a backward, a pair of functions; None without any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _is_gathered_for_its_module(argument: Any) -> bool:
    """Return whether a weight is there only while its own module runs: DeepSpeed's ZeRO-3 has taken it apart."""
    return isinstance(argument, nn.Parameter) and hasattr(argument, "ds_id")


def _is_freed(tensor: Tensor) -> bool:
    """Return whether a tensor has lost its memory, as those that FSDP gathers have between their uses."""
    return not tensor.untyped_storage().size() and tensor.numel() > 0


def _current_stream() -> Any:
    """The stream on which kernels are launched now."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
    return None
