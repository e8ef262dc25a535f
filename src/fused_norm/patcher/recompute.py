"""Outputs of fused operators that a layer does not keep for its backward, because they are recomputed there.

The output of a norm, the rotated queries and keys and the product of a gate are kept by what comes after them, a linear
or the attention, for its own backward. One cheap kernel recomputes them from what the operators keep anyway. While the
forward of a layer runs, hooks see every tensor that autograd saves, and save how to recompute such an output instead.
The backward recomputes it once for all that have saved it. Outputs of the linears after a norm cost a product of
matrices each, and are recomputed on demand: those that a gate reads, or all of them.

What is saved holds the tensors that are needed themselves, or other recomputed outputs. It is taken only for the output
itself, for a cast of it, such as autocast makes for a linear, and for views of both, told by their history: whoever
writes into an output by other means than PyTorch's must return it from an autograd function of its own, as Liger's
rotary embedding does, and its result is saved as it is. Only autograd's saved tensors are replaced: other references
keep the tensor alive.

Versions of tensors are checked as autograd checks those of what it saves, and it is their memory that is held, so that
a parameter may get other memory meanwhile. Writes that make no version (through ``.data``, or by NumPy) are not seen.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ..kernels.autocast import set_autocast
from ..kernels.glu import GLU, GLU_FOR_CONSUMERS
from ..kernels.linear_4bit import LINEAR_4BIT, LORA_LINEAR_4BIT, LORA_SUMMANDS_4BIT
from ..kernels.lora import LORA_ADD, LORA_LINEAR
from ..kernels.norm import RECOMPUTED_NORM
from ..kernels.operator import Operator, Recompute, calls
from ..kernels.qk_norm_rope import QK_NORM, ROPE
from ..kernels.triton.devices import is_transformed
from ..options import RecomputeLevel
from .recompute_linears import CAST, Kept, LinearOutputs, Matrix, Recipe

logger = logging.getLogger("fused_norm")

_VIEWS = frozenset(
    f"{name}Backward0"
    for name in (
        "Alias", "AsStrided", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split", "Squeeze", "T",
        "Transpose", "Unbind", "Unflatten", "UnsafeSplit", "UnsafeView", "Unsqueeze", "View",
    )
) | {"SqueezeBackward1", "SqueezeBackward2"}  # fmt: skip
"""The nodes behind tensors that are nothing but views."""

_CONSUMERS_OF_LINEARS: Mapping[RecomputeLevel, Sequence[Operator | None]] = {
    False: (),
    True: (),
    "mlp": (GLU, GLU_FOR_CONSUMERS),
    "attention": (GLU, GLU_FOR_CONSUMERS, QK_NORM, ROPE, None),
}
"""Those for which outputs of linears are recomputed: operators, of their first two arguments, and None, all others."""

_LINEARS = (LINEAR_4BIT, LORA_ADD, LORA_LINEAR, LORA_LINEAR_4BIT, LORA_SUMMANDS_4BIT)
"""The operators that save what linears save, and are recomputed as these are."""

_OTHER_HOOKS = "other saved-tensor hooks are active, as under gradient checkpointing or offloading"
_warned: set[str] = set()

COMPILED = "it is compiled, and its compiler decides what is kept; gradient checkpointing keeps less"
"""The reason not to recompute what a layer computes."""


def call_recomputing(
    forward: Callable[..., Any], layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], level: RecomputeLevel = True
) -> Any:
    """``forward(layer, *args, **kwargs)``, outputs of fused operators, and of linears, recomputed if possible."""
    if not torch.is_grad_enabled():
        return forward(layer, *args, **kwargs)
    if torch.compiler.is_compiling():
        if not torch.compiler._is_exporting_flag:
            _explain_compiled()
        return forward(layer, *args, **kwargs)
    if (reason := _why_impossible()) is not None:
        _explain(reason)
        return forward(layer, *args, **kwargs)
    register = _SavedTensorHook(level)
    try:
        with saved_tensors_hooks(register.pack, _unpack), calls.by(register):
            return forward(layer, *args, **kwargs)
    finally:
        register._outputs.clear()  # autograd holds its hooks as long as the graph


def recomputes() -> bool:
    """Return whether a layer runs that computes something again in the backward."""
    return type(calls.interceptor) is _SavedTensorHook


def recomputes_linears() -> bool:
    """Return whether a layer runs that computes outputs of its linears again in the backward."""
    register = calls.interceptor
    return type(register) is _SavedTensorHook and bool(register._consumers)


@contextmanager
def computed_again(tensor: Tensor, recipe: Recipe) -> Iterator[None]:
    """Inside the ``with``, autograd saves how to compute a tensor in place of the tensor and of views of it.

    Nothing is changed for a tensor that is a leaf, or if other hooks see what is saved.

    Args:
        tensor: what others compute with.
        recipe: computes it again, as the only one of a tuple.
    """
    autograd: Any = torch._C._autograd
    hooks = autograd._top_saved_tensors_default_hooks(True)
    outer = getattr(hooks[0], "__self__", None) if hooks is not None else None
    if tensor.grad_fn is None or not torch.is_grad_enabled():
        yield
    elif isinstance(outer, _SavedTensorHook):  # of a layer that recomputes, or of a call of this function
        outer.note(tensor, recipe)
        yield
    elif _why_impossible() is None:
        register = _SavedTensorHook(False)
        register.note(tensor, recipe)
        try:
            with saved_tensors_hooks(register.pack, _unpack):
                yield
        finally:
            register._outputs.clear()
    else:
        yield


def _why_impossible() -> str | None:
    """Why hooks of ours would not be the only ones that see what is saved, empty if that is not logged; or None."""
    if calls.interceptor is not None or is_transformed() or torch._C._len_torch_dispatch_stack():
        return ""
    autograd: Any = torch._C._autograd
    if not autograd._saved_tensors_hooks_is_enabled():
        return ""
    if autograd._top_saved_tensors_default_hooks(True) is not None:
        return _OTHER_HOOKS
    if torch._C._current_graph_task_id() != -1:
        return "gradient checkpointing runs the layer again in the backward"
    return None


def _explain(reason: str, message: str = "recompute is off for some calls of layers: %s") -> None:
    if reason and reason not in _warned:
        _warned.add(reason)
        logger.warning(message, reason)


def _explain_compiled() -> None:
    """Log that ``recompute`` does nothing in what is being compiled; Dynamo calls this while it traces."""
    _explain(COMPILED, "recompute does nothing in a layer: %s")


_explain_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]  # without importing torch._dynamo


class _SavedTensorHook:
    """The hook on tensors that autograd saves while a layer runs; it knows the recomputable outputs, and holds none."""

    __slots__ = ("_consumers", "_operator", "_outputs", "_saved_by_operator")

    def __init__(self, level: RecomputeLevel) -> None:
        self._consumers = _CONSUMERS_OF_LINEARS[level]
        self._outputs: dict[tuple[Any, int], _Output] = {}
        """By their places in the graph: a node, and which of its outputs."""
        self._operator: Operator | None = None
        """The one that is being called."""
        self._saved_by_operator: list[Tensor] = []

    def called(self, operator: Operator, arguments: tuple[Any, ...]) -> Any:
        """Call the operator, whose backward keeps tensors as they are, but for outputs of linears; note its outputs."""
        if operator in _LINEARS:
            return operator.results_of(*arguments)
        autograd: Any = torch._C._autograd
        hooks = autograd._top_saved_tensors_default_hooks(True)  # a pair of functions, or None
        is_first = hooks is not None and hooks[0] == self.pack
        reads_linears = operator in self._consumers
        saved: list[Tensor] = []
        is_unseen = is_first and not reads_linears  # it keeps tensors as they are, sooner if no hook sees them
        if is_unseen:
            autograd._pop_saved_tensors_default_hooks()
        else:
            self._operator, self._saved_by_operator = operator, saved
        try:
            results = operator.results_of(*arguments)
        finally:
            if is_unseen:
                autograd._push_saved_tensors_default_hooks(*hooks)
            else:
                self._operator, self._saved_by_operator = None, []
        handed_out = operator.group_outputs(results)
        outputs = tuple([tensors[0] for tensors in handed_out])
        if type(outputs[0]) is not Tensor or outputs[0].grad_fn is None:
            return results
        if not is_first:
            _explain(_OTHER_HOOKS)
            return results
        if not reads_linears:
            node: Any = outputs[0].grad_fn
            saved = node.saved_tensors
        kept = saved[len(saved) - len(operator.extra_saved) :]  # computed for that alone
        arguments = operator.as_saved(arguments, saved)
        recompute = operator.recompute(arguments, (*outputs, *kept))
        if reads_linears:
            linears = [
                self._recomputed(argument) if type(argument) is Tensor and not argument.is_leaf else None
                for argument in arguments[:2]
            ]
            if operator is ROPE and None not in linears:  # it keeps neither, so that both have to be known
                recompute = Recompute(operator, arguments)
            if recompute is not None:
                first = [
                    argument if recipe is None else recipe for argument, recipe in zip(arguments, linears, strict=False)
                ]
                recompute = recompute._replace(arguments=(*first, *arguments[2:]))
        if recompute is None:
            return results
        # DeepSpeed's ZeRO-3 has taken weights with a ``ds_id`` apart, and they are whole only while their module runs.
        for argument in recompute.arguments:
            if hasattr(argument, "ds_id"):
                return results
        again = recompute.operator
        recipe = Recipe.from_call(lambda *operands: Recompute(again, operands).outputs(), *recompute.arguments)
        recomputed = _Recomputable(recipe, feeds_linears=again is RECOMPUTED_NORM and bool(self._consumers))
        for place, tensors in enumerate(handed_out[: len(again.outputs)]):
            for output in tensors:
                self._outputs[output.grad_fn, output.output_nr] = _Output(recomputed, place, output)
        return results

    def note(self, tensor: Tensor, recipe: Recipe) -> None:
        """Save how to compute a tensor that has a node, in place of the tensor; the recipe returns a tuple of it."""
        self._outputs[tensor.grad_fn, tensor.output_nr] = _Output(_Recomputable(recipe), 0, tensor)

    def pack(self, tensor: Tensor) -> Recipe | Kept:
        """The value to save for a tensor: how to recompute it, or the tensor and its version."""
        operator, base = self._operator, tensor._base
        if operator is not None:
            self._saved_by_operator.append(tensor)
        if base is not None and base.is_leaf:  # such as a weight, transposed
            return Kept(tensor.detach(), tensor._version)
        is_computed = type(tensor) is Tensor and not tensor.is_leaf
        if self._outputs and is_computed and (operator is None or operator in self._consumers):
            recipe = self._recomputed(tensor)
            if recipe is not None:
                return recipe
        # A leaf itself, as autograd does: whoever shards parameters gives them other memory meanwhile.
        return Kept(tensor if tensor.is_leaf else tensor.detach(), tensor._version)

    def _recomputed(self, tensor: Tensor) -> Recipe | None:
        """How to recompute a tensor; None for one that is no output, no view of one and no view of a cast of one."""
        node: Any = tensor.grad_fn
        number = tensor.output_nr
        while (name := node.name()) in _VIEWS:
            node, number = node.next_functions[0]
        output = self._outputs.get((node, number))
        is_cast = output is None and name == CAST
        if is_cast:
            output = self._outputs.get(node.next_functions[0])
        if output is None and self._operator in self._consumers:
            output, is_cast = self._linear_output(node, tensor), False
        recipe = None if output is None else output.recipe_for(tensor, is_cast)
        if recipe is None and self._operator is not None:
            _explain(name, "recompute keeps outputs of linears that nodes of this kind have made: %s")
        return recipe

    def _linear_output(self, node: Any, tensor: Tensor) -> _Output | None:
        """The output of a linear after a norm, which a node has made, and this tensor is, or is a view of."""
        # Another product reads rows, and what it reads is kept: the small output of a LoRA layer's first one.
        # PyTorch counts a product, or a cast, that it writes into a tensor; of a sum in float32 a kernel writes all.
        is_sum = LORA_LINEAR.owns(node) or LORA_LINEAR_4BIT.owns(node)
        made_version = int(LINEAR_4BIT.owns(node) or (is_sum and tensor.dtype != torch.float32))
        if tensor._version != made_version or (self._operator is None and tensor.dim() == 2):
            return None
        matrix = LinearOutputs(self._outputs).output_of(node)
        whole = tensor if tensor._base is None else tensor._base
        if matrix is None or not matrix.is_of_norm or whole.numel() != matrix.rows * matrix.columns:
            return None
        if not whole.is_contiguous() or whole.untyped_storage().nbytes() != whole.numel() * whole.element_size():
            return None
        (compute, reads), device = matrix.recipe, whole.device.type

        def outputs() -> tuple[Tensor]:
            with torch.no_grad(), set_autocast(device, None):  # its operands were cast in the forward
                return (compute(),)

        output = self._outputs[node, 0] = _Output(_Recomputable(Recipe(outputs, reads)), 0, whole)
        return output


class _Output:
    """One output of a call that can be recomputed, recognised as long as its memory is there."""

    __slots__ = ("_columns", "_output", "_place", "_recomputable", "_rows", "_storage", "_version", "_without_memory")

    def __init__(self, recomputable: _Recomputable, place: int, output: Tensor) -> None:
        self._recomputable, self._place = recomputable, place
        self._output, self._version = weakref.ref(output), output._version
        self._without_memory: Tensor | None = None
        if recomputable.feeds_linears and output.is_contiguous() and output.storage_offset() == 0:
            self._without_memory = _without_memory(output)  # linears may have read it, written into, when it is gone
            self._columns = output.shape[-1]
            self._rows = output.numel() // max(self._columns, 1)
        # The storage's address belongs to no other as long as there is a weak reference to it.
        self._storage = StorageWeakRef(output.untyped_storage())

    def recipe_for(self, tensor: Tensor, is_cast: bool) -> Recipe | None:
        """How to recompute a view of the output, or of a cast of it; None if either may have been written into."""
        source: Any = tensor
        if is_cast:
            # What the cast has read is what the operator has written, if the output is that still.
            source, cast = self._output(), tensor if tensor._base is None else tensor._base
            if source is None or tensor._version != 0:
                return None
            if len({(t.shape, t.stride(), t.device) for t in (source, cast)}) > 1:
                return None
        if source._version != self._version or source.untyped_storage()._cdata != self._storage.cdata:
            return None
        call = self._recomputable
        for read, version in zip(call._reads, call._versions, strict=True):
            if read._version != version or (not read.untyped_storage().size() and read.numel()):
                return None
        layout = tensor.shape, tensor.stride(), tensor.storage_offset()
        return call.recipe_for_view((self._place, tensor.dtype), *layout, tensor)

    def rows_of_norm(self, columns: int, dtype: torch.dtype) -> Matrix | None:
        """The output of a norm, as rows, in a dtype; None for another output, or one that was written into."""
        output = self._without_memory
        if output is None or columns != self._columns or output._version != self._version:
            return None
        recipe = self._recomputable.recipe_for_view((self._place, dtype), (self._rows, columns), (columns, 1), 0)
        return Matrix(recipe, self._rows, columns, is_of_norm=True)


_Place = tuple[int, torch.dtype]
"""Which output of a call, and the dtype that it is cast to."""


class _Recomputable:
    """The outputs of one call, recomputed once for all nodes that have saved them, and freed after the last one.

    It holds what autograd itself would save: the memory that the forward has read, whatever memory its tensors have
    been given since, and their versions.

    Attributes:
        feeds_linears: its first output is a norm, and the linears after that are recomputed.
    """

    __slots__ = ("_compute", "_made", "_reads", "_saved", "_stream", "_versions", "_waiting", "feeds_linears")

    def __init__(self, recipe: Recipe, *, feeds_linears: bool = False) -> None:
        self._compute, self._reads = recipe
        self.feeds_linears = feeds_linears
        self._versions = [tensor._version for tensor in self._reads]
        self._saved: dict[_Place, int] = {}
        """How many have saved it."""
        self._waiting: dict[_Place, int] = {}
        self._made: dict[_Place, Tensor] = {}
        self._stream: Any = None

    def recipe_for_view(
        self, place: _Place, size: Any, strides: Any, offset: Any, saved: Tensor | None = None
    ) -> Recipe:
        """Note that an output, or its cast, is saved, and return how to compute this view of it.

        ``saved``: the tensor that autograd would have saved; None if another recipe reads the view.
        """
        self._saved[place] = self._saved.get(place, 0) + 1
        guard = None if saved is None else Kept(_without_memory(saved), saved._version)
        return Recipe(partial(self._view, place, guard, size, strides, offset), self._reads)

    def _view(self, place: _Place, guard: Kept | None, size: Any, strides: Any, offset: int) -> Tensor:
        """A view of an output, or of its cast; an error if the tensor that was saved was written into."""
        if guard is not None and guard.tensor._version != guard.version:
            raise _modified(*guard, size)
        return self.materialize(place).as_strided(size, strides, offset)

    def materialize(self, place: _Place) -> Tensor:
        """Compute an output, or a cast of it, for one of the nodes that have saved it."""
        # An output that was computed on another stream may not be there yet.
        stream = _current_stream()
        output = self._made.get(place) if stream == self._stream else None
        if output is None:
            for tensor, version in zip(self._reads, self._versions, strict=True):
                if tensor._version != version:
                    raise _modified(tensor, version, tensor.shape)
                if not tensor.untyped_storage().size() and tensor.numel():  # as FSDP frees them between their uses
                    raise RuntimeError(
                        f"the memory of a tensor of shape {tuple(tensor.shape)} was freed before the backward, which "
                        "computes another from it; apply_fused_norm(model, recompute=False), or lora=False for "
                        "adapters on experts, goes without it"
                    )
            outputs = self._compute()
            self._made = {(number, dtype): outputs[number].to(dtype) for number, dtype in self._saved}
            self._waiting, self._stream = self._saved.copy(), stream
            output = self._made[place]
        self._waiting[place] -= 1
        if self._waiting[place] <= 0:
            self._made.pop(place, None)
        return output


def _unpack(saved: Recipe | Kept) -> Tensor:
    if isinstance(saved, Recipe):
        value: Tensor = saved.value()
        return value
    tensor, version = saved
    if tensor._version != version:
        raise _modified(tensor, version, tensor.shape)
    return tensor


def _modified(tensor: Tensor, version: int, shape: Sequence[int]) -> RuntimeError:
    """The error that autograd raises if a tensor that it saves was written into; nobody looks at what hooks save."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(shape)}] is at version {tensor._version}; expected version {version} instead"
    )


def _without_memory(tensor: Tensor) -> Tensor:
    """An empty tensor that has the version of this one, now and later."""
    empty = tensor.detach()
    empty.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # which leaves it its version
    return empty


def _current_stream() -> Any:
    """The stream on which kernels are launched now."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
    return None
