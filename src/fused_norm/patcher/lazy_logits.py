"""Logits that are computed when they are read: tensors that know their shape and how they would be computed.

The head of a language model returns ``LazyLogits``. Selecting rows of them, casting, scaling or capping them gives
further lazy logits. ``torch.nn.functional.cross_entropy`` of such logits is the fused operator, which never holds them.
Any other operation reads them: they are computed by the operations that were asked for, and connected to the graph as
those are. So code that is given lazy logits, the user's too, computes what it would compute with the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from inspect import signature
from types import FunctionType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from ..kernels.autocast import autocast_dtype, set_autocast
from .logit_steps import Step, is_of_pytorch, plain_functions, rows_by, step_of, transformation_by

_OF_SHAPE = frozenset({
    "shape", "dtype", "device", "ndim", "layout", "names", "itemsize", "nbytes", "is_cuda", "is_cpu", "is_meta",
    "is_xpu", "is_mps", "is_mkldnn", "is_sparse", "is_nested", "is_quantized", "size", "dim", "numel", "nelement",
    "ndimension", "__len__", "element_size", "stride", "is_contiguous", "is_floating_point", "is_complex", "is_signed",
    "get_device", "is_inference", "is_conj", "is_neg", "__hash__",
})  # fmt: skip
"""Functions and attributes of tensors that tell nothing of their numbers."""

_OF_GRAPH = frozenset({
    "requires_grad", "is_leaf", "grad_fn", "grad", "retains_grad", "output_nr", "_backward_hooks", "_base", "_is_view",
    "_version", "retain_grad", "register_hook",
})  # fmt: skip
"""Those that tell of, or hook into, the place of a tensor in autograd's graph, which a lazy tensor has."""

_ASKS = frozenset({"grad_fn", "retain_grad", "register_hook"})
"""Those of them by which somebody asks for a gradient, or for the node that gets it."""

_DIFFERENTIATES = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
"""Functions that take lazy logits as ``inputs``; older PyTorch hands those of ``backward`` to its engine alone."""

_ASSIGNMENTS = frozenset(name for name in dir(Tensor) if name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}"))
"""The methods of operators such as ``+=``."""

_SAMPLED = 4096


_TOO_LATE = (
    "the gradient of a tensor that is made of outputs.logits is asked for after it was read: call its retain_grad()"
    " before, or patch the model with apply_fused_norm(model, loss=False)"
)

GENUINE: dict[str, Any] = {"linear": torch._C._nn.linear}
"""PyTorch's own functions of ``torch.nn.functional``.

One of them that gets a lazy tensor passes on what has its name in that module now. If other code has put a wrapper
there, that would do its work twice."""

REPLACED_BEFORE: list[str] = []
"""The names of those that other code had replaced before this import."""

for _name, _function in vars(functional).items():
    if isinstance(_function, FunctionType) and not _name.startswith("_") and _name not in GENUINE:
        if _function.__code__.co_filename.startswith(torch.__path__[0]):
            GENUINE[_name] = _function
        elif _function.__module__ != functional.__name__:
            REPLACED_BEFORE.append(_name)

_OWN = frozenset(GENUINE.values())


@dataclass(eq=False)
class Family:
    """All lazy logits of one call of a head.

    Attributes:
        members: those that somebody still has.
        is_watched: somebody has asked for a gradient at one of them, by a hook or otherwise.
        is_copied: a view that is watched was read as a copy, so that a write into it would not reach the others.
    """

    members: WeakSet[LazyLogits] = field(default_factory=WeakSet)
    is_watched: bool = False
    is_copied: bool = False


@dataclass(eq=False)
class Projection:
    """A call of a head: what its logits are computed of, in the state that PyTorch had then.

    Attributes:
        x, weight, bias: the linear's arguments, as it got them.
        dtype: what autocast casts them to; None without autocast.
        loss: computes the cross entropy of rows of x: takes these and a ``CrossEntropy``.
        noted: is told that logits of this call were read, and by what.
        is_running: the model's forward has not returned, so that nobody has stepped or sharded weights.
        arguments: x, weight and bias.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype | None
    loss: Callable[[Tensor, CrossEntropy], Tensor]
    noted: Callable[[str], None]
    is_running: bool = False

    def __post_init__(self) -> None:
        self.arguments = self.x, self.weight, self.bias
        self._tensors = [tensor for tensor in self.arguments if tensor is not None]
        self._versions = list(map(_version, self._tensors))
        # Autograd does not count writes through ``data``, nor any into tensors of inference mode.
        uncounted = [self.weight, *([self.x] if self.x.is_inference() else [])]
        self._samples = [(tensor, _sample(tensor)) for tensor in uncounted]

    def compute(self) -> Tensor:
        """The logits.

        Raises:
            RuntimeError: as ``check``.
        """
        self.check()
        return _logits(*self.arguments, self.dtype)

    def check(self) -> None:
        """Check that logits computed now would be those of the forward.

        Raises:
            RuntimeError: if they would not, because hidden states or weights were written to or freed.
        """
        changed = list(map(_version, self._tensors)) != self._versions
        changed = changed or any(tensor.untyped_storage().nbytes() == 0 for tensor in self._tensors if tensor.numel())
        for tensor, sample in () if self.is_running else self._samples:
            changed = changed or tensor.dtype != sample.dtype or not torch.equal(sample, _sample(tensor))
        if changed:
            raise RuntimeError(
                "outputs.logits are computed when they are first read, and the weights have been written to or freed"
                " since the forward, as by a step of the optimizer: read them before, or patch the model with"
                " apply_fused_norm(model, loss=False)"
            )


@dataclass(frozen=True)
class CrossEntropy:
    """The arguments of ``torch.nn.functional.cross_entropy`` of logits, and what was done to logits before.

    Attributes:
        target: a label for each row.
        reduction, ignore_index, label_smoothing: as there.
        num_items: what a sum is divided by, or None.
        scale, cap, in_fp32: as ``linear_cross_entropy`` has them.
    """

    target: Tensor
    reduction: str
    ignore_index: int
    label_smoothing: float
    num_items: Tensor | float | None = None
    scale: float | None = None
    cap: float | None = None
    in_fp32: bool = False

    def loss_of(self, logits: Tensor) -> Tensor:
        """The loss of real logits, after scale and cap, by PyTorch."""
        loss = functional.cross_entropy(
            logits,
            self.target,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )
        return loss if self.num_items is None else loss / self.num_items


class LazyTensor(Tensor):
    """Base of tensors that are computed when they are read."""

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device, requires_grad=False
        )

    def read(self, reader: str) -> Tensor:
        """The real tensor, in autograd's graph where this one is; ``reader`` is the name of what reads."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Code that calls PyTorch's C++ without its Python functions comes here, below autograd.
        name = func.overloadpacket.__name__
        args, kwargs = tree_map_only(LazyTensor, lambda lazy: lazy.read(name).detach(), (args, kwargs or {}))
        return func(*args, **kwargs)


class LazyLogits(LazyTensor):
    """Logits of a ``Projection``, or what steps make of them."""

    _projection: Projection
    _steps: tuple[Step, ...]
    _parent: LazyLogits | None
    _family: Family
    _real: Tensor | None
    _version_read: int | None  # of the real one, when it was made
    _was_read_apart: bool  # the real one was made of its parent's, and is no result of this one in the graph
    _has_loss: bool  # a fused loss was made of these, or of what steps make of them

    @classmethod
    def from_projection(cls, projection: Projection) -> LazyLogits:
        """The logits of a call of a head."""
        x, weight = projection.x, projection.weight
        like = torch.empty((*x.shape[:-1], len(weight)), dtype=projection.dtype or x.dtype, device="meta")
        in_graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in projection._tensors)
        return cls._made(projection, (), None, like, in_graph)

    def then(self, step: Step) -> LazyLogits:
        """The lazy logits that a step makes of these."""
        with plain_functions(), torch.no_grad():
            like = step.run(torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta"))
        in_graph = torch.is_grad_enabled() and self.requires_grad and step.name != "detach"
        steps = (*self._steps, step._replace(shape=like.shape))
        return self._made(self._projection, steps, self, like, in_graph)

    @classmethod
    def _made(
        cls, projection: Projection, steps: tuple[Step, ...], parent: LazyLogits | None, like: Tensor, in_graph: bool
    ) -> LazyLogits:
        with plain_functions():
            if in_graph:
                lazy: LazyLogits = _Lazy.apply(like, steps, projection.dtype, parent, *projection.arguments)
            else:
                lazy = cls(like, projection.x.device)
        lazy._projection, lazy._steps, lazy._parent = projection, steps, parent
        lazy._real = lazy._version_read = None
        lazy._was_read_apart = lazy._has_loss = False
        lazy._family = Family() if parent is None else parent._family
        lazy._family.members.add(lazy)
        return lazy

    def read(self, reader: str) -> Tensor:
        if self._real is None:
            with plain_functions():
                in_graph = self.requires_grad
            if self._parent is None:
                self._projection.noted(reader)
            # In the grad mode of the forward, whatever the reader's is.
            is_in_inference = torch.is_inference_mode_enabled() and not in_graph
            with torch.inference_mode(is_in_inference), torch.set_grad_enabled(in_graph):
                if in_graph and (self._parent is None or (self._family.is_watched and not self.is_apart())):
                    with plain_functions():
                        self._real = _Read.apply(self)
                else:
                    self._real, self._was_read_apart = self._computed(reader), self._parent is not None
            self._version_read = _version(self._real)
        return self._real

    def was_written(self) -> bool:
        """Return whether these or what they were made of have been written into since a read, as by way of a view."""
        read = (lazy for lazy in self.with_ancestors() if lazy._real is not None)
        return any(_version(lazy._real) != lazy._version_read for lazy in read)

    def with_ancestors(self) -> Iterator[LazyLogits]:
        """These logits, what they were made of, and so on."""
        lazy: LazyLogits | None = self
        while lazy is not None:
            yield lazy
            lazy = lazy._parent

    def is_apart(self) -> bool:
        """Return whether the real logits are, or would be, no result of these in autograd's graph."""
        return any(lazy._was_read_apart for lazy in self.with_ancestors())

    def in_graph(self, *, is_asked: bool = True) -> Tensor:
        """The tensor that has the place of these logits in autograd's graph.

        Args:
            is_asked: somebody asks for the gradient.

        Raises:
            RuntimeError: if the gradient is asked for, and is divided between two places.
        """
        if not self.is_apart():
            return self
        if not is_asked:
            return self if self._real is None else self._real
        if self._has_loss:
            raise RuntimeError(_TOO_LATE)
        return self.read("autograd")

    def _computed(self, reader: str) -> Tensor:
        if self._parent is None:
            return self._projection.compute()
        parent = self._parent.read(reader)
        result = self._steps[-1].run(parent)
        if self._parent.was_written() and not _share_memory(result, parent):
            # The step was taken before the write: none is taken afterwards.
            result = _after(self._steps, self._projection.compute())
        return result

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, FunctionType) and func not in _OWN:  # other code may have put it under a name of PyTorch's
            func = next((own for name, own in GENUINE.items() if vars(functional)[name] is func), func)
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            name = func.__self__.__name__
        lead = args[0] if args else None
        if isinstance(lead, LazyLogits):
            if (name in _OF_GRAPH or name in _OF_SHAPE) and is_of_pytorch(func):
                is_asked = name in _ASKS and not (name == "register_hook" and _is_of_sharding(args[1]))
                lead._family.is_watched |= is_asked
                place = lead.in_graph(is_asked=is_asked) if name in _OF_GRAPH else lead
                with plain_functions():
                    if name == "grad" and place is not lead and lead.retains_grad:  # by the engine
                        raise RuntimeError(_TOO_LATE)
                    return func(place, *args[1:], **kwargs)
            is_lazy = lead._real is None and not lead.was_written()
            if is_lazy and (step := step_of(lead, name, func, args[1:], kwargs)) is not None:
                return lead if step.name == "same" else lead.then(step)
        if func is GENUINE["cross_entropy"]:
            loss = _cross_entropy(*args, **kwargs)
            if loss is not None:
                return loss
        elif func in _DIFFERENTIATES:
            return _differentiated(func, args, kwargs)
        if writes(name) or "out" in kwargs:
            _read_families((args, kwargs), name)
        with plain_functions():
            return func(*_real(args, name), **_real(kwargs, name))


class LazySum(LazyTensor):
    """The sum of the losses of rows, which is computed when it is known whether it is divided by a number of items.

    Gradients are rounded once, with the divisor in them, so it has to be known before they are made.
    """

    _logits: LazyLogits
    _how: CrossEntropy
    _real: Tensor | None = None

    @classmethod
    def from_logits(cls, logits: LazyLogits, how: CrossEntropy) -> LazySum:
        """The sum of losses of logits."""
        like = torch.empty((), dtype=torch.float32, device="meta")
        with plain_functions():
            device, requires_grad = logits.device, logits.requires_grad
            if torch.is_grad_enabled() and requires_grad:
                lazy: LazySum = _Loss.apply(like, logits, how, True, *logits._projection.arguments)
            else:
                lazy = cls(like, device)
        lazy._logits, lazy._how = logits, how
        return lazy

    def read(self, reader: str) -> Tensor:
        if self._real is None:
            self._real = _fused(self._logits, self._how)
        return self._real

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        name = func.__self__.__name__ if name == "__get__" else name
        lead = args[0] if args else None
        if isinstance(lead, LazySum) and lead._real is None and is_of_pytorch(func):
            if name in _OF_SHAPE and len(args) == 1:
                with plain_functions():
                    return func(*args, **(kwargs or {}))
            if name in ("__truediv__", "div", "true_divide") and len(args) == 2 and not kwargs and _is_count(args[1]):
                return _fused(lead._logits, replace(lead._how, num_items=args[1]))
        if func in _DIFFERENTIATES:
            return _differentiated(func, args, kwargs or {})
        with plain_functions():
            return func(*_real(args, name), **_real(kwargs or {}, name))


class _Lazy(torch.autograd.Function):
    """Lazy logits in autograd's graph, a result of those that they are made of, or of the head's arguments.

    The backward is that of a linear, or takes the last step once more and differentiates it.
    """

    @staticmethod
    def forward(
        ctx: Any, like: Tensor, steps: tuple[Step, ...], dtype: Any, parent: LazyLogits | None, *arguments: Any
    ) -> Any:
        ctx.save_for_backward(*arguments)
        ctx.set_materialize_grads(False)
        ctx.steps, ctx.dtype, ctx.is_first = steps, dtype, parent is None
        return LazyLogits(like, arguments[0].device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return (None,) * 7
        x, weight, bias = ctx.saved_tensors
        if not ctx.is_first:
            before = (ctx.steps[:-1], ctx.dtype, x, weight, bias)
            return None, None, None, _gradient_of(ctx.steps[-1].run, before, gradient), None, None, None
        need_x, need_weight, need_bias = ctx.needs_input_grad[4:]
        rows, cast = gradient.flatten(0, -2), ctx.dtype or x.dtype
        dx = (rows @ weight.to(cast)).view(x.shape).to(x.dtype) if need_x else None
        dweight = (rows.t() @ x.to(cast).flatten(0, -2)).to(weight.dtype) if need_weight else None
        return None, None, None, None, dx, dweight, rows.sum(0).to(bias.dtype) if need_bias else None


class _Read(torch.autograd.Function):
    """Real logits as a result of lazy ones."""

    @staticmethod
    def forward(ctx: Any, lazy: LazyLogits) -> Any:
        tensor = lazy._computed("a read")
        if not tensor._is_view():
            return tensor
        lazy._family.is_copied = True
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


class _Loss(torch.autograd.Function):
    """The fused loss, or a ``LazySum`` in its place, as a result of its lazy logits in autograd's graph.

    The backward of the fused loss needs no gradient of logits, and none is made unless somebody has asked for it.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, logits: LazyLogits, how: CrossEntropy, is_lazy: bool, *arguments: Any) -> Any:
        ctx.save_for_backward(*arguments)
        ctx.set_materialize_grads(False)
        ctx.steps, ctx.dtype, ctx.family = logits._steps, logits._projection.dtype, logits._family
        for lazy in logits.with_ancestors():
            lazy._has_loss = True
        ctx.how, ctx.is_lazy = how, is_lazy
        # A copy and no view: callers scale it, and add to it, in place.
        return LazySum(loss, logits.device) if is_lazy else loss.clone()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None) -> Any:
        with plain_functions():  # older PyTorch tells its engine alone of ``backward(inputs=...)``
            is_watched = ctx.family.is_watched or any(lazy.retains_grad for lazy in ctx.family.members)
        if dloss is None or not (ctx.is_lazy or is_watched):
            return dloss, *(None,) * 6
        dlogits = _gradient_of(ctx.how.loss_of, (ctx.steps, ctx.dtype, *ctx.saved_tensors), dloss)
        return None, dlogits, *(None,) * 5


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    with set_autocast(x.device.type, dtype):
        return functional.linear(x, weight, bias)


def _after(steps: tuple[Step, ...], logits: Tensor) -> Tensor:
    return reduce(lambda logits, step: step.run(logits), steps, logits)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _gradient_of(function: Callable[[Tensor], Tensor], made_by: tuple[Any, ...], gradient: Tensor) -> Tensor:
    """The gradient of logits for that of a function of them.

    ``made_by``: the steps that made the logits, autocast's dtype, and what the head got.
    """
    steps, dtype, x, weight, bias = made_by
    again = torch.is_grad_enabled()
    logits = _after(steps, _logits(x, weight, bias, dtype))
    with torch.enable_grad():
        leaf = logits if again and logits.requires_grad else logits.detach().requires_grad_()
        return torch.autograd.grad(function(leaf), leaf, gradient, create_graph=again)[0]


def _cross_entropy(
    logits: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """The loss of lazy logits by the fused operator; None for a call that it cannot make."""
    if not isinstance(logits, LazyLogits) or logits._real is not None or not isinstance(target, Tensor):
        return None
    if logits.is_apart():
        return None
    if not (weight is size_average is reduce is None) or reduction not in ("mean", "sum"):
        return None
    if isinstance(target, LazyTensor) or logits.dim() != 2 or target.shape != logits.shape[:1]:
        return None
    if target.dtype != torch.int64 or target.device != logits.device:
        return None
    is_cast = autocast_dtype(logits._projection.x) is not None  # which has cross entropies in float32
    if logits.dtype != torch.float32 and not is_cast:
        return None
    how = CrossEntropy(target, reduction, ignore_index, float(label_smoothing))
    if transformation_by(logits._steps) is None:
        return None
    return LazySum.from_logits(logits, how) if reduction == "sum" else _fused(logits, how)


def _fused(logits: LazyLogits, how: CrossEntropy) -> Tensor:
    """The loss of lazy logits by the fused operator."""
    transformation, projection = transformation_by(logits._steps), logits._projection
    assert transformation is not None
    projection.check()
    with torch.set_grad_enabled(logits.requires_grad and torch.is_grad_enabled()):
        # As it was for the head, whatever autocast is now.
        with set_autocast(projection.x.device.type, projection.dtype):
            loss = projection.loss(rows_by(logits._steps, projection.x), replace(how, **transformation))
        if loss.requires_grad:
            with plain_functions():
                loss = _Loss.apply(loss, logits, how, False, *projection.arguments)
    return loss


def writes(name: str) -> bool:
    """Return whether a function of this name, or who gets an attribute of it, may write into a tensor."""
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name in ("__setitem__", "__set__", "data") or name in _ASSIGNMENTS


def _is_count(value: Any) -> bool:
    """Return whether a value is a number of items, or a tensor of one."""
    if isinstance(value, LazyTensor):
        return False
    return (type(value) in (int, float) and value != 0) or (
        isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad and not value.is_complex()
    )


def _read_families(tree: Any, reader: str) -> None:
    """Read all that is made of the lazy logits in a tree, which are about to be written to.

    Raises:
        RuntimeError: if the write would be seen in other logits of a model that is not patched, and not in these.
    """

    for value in tree_leaves(tree):
        if isinstance(value, LazyLogits):
            for member in list(value._family.members):
                member.read(reader)
            if value._family.is_copied:
                raise RuntimeError(
                    f"{reader} writes into logits, a view of which a hook or autograd.grad has asked a gradient of: "
                    "write before, or patch the model with apply_fused_norm(model, loss=False)"
                )


def _differentiated(func: Any, args: Any, kwargs: Any) -> Any:
    """Call one of ``_DIFFERENTIATES``, whose ``inputs`` may be lazy logits: their gradients are asked for."""
    arguments: dict[str, Any] = dict(signature(func).bind(*args, **kwargs).arguments)
    inputs = arguments.pop("inputs", None)
    for leaf in tree_leaves(inputs):  # the fused loss leaves their place in the graph out unless asked
        if isinstance(leaf, LazyLogits):
            leaf._family.is_watched = True
    arguments = _real(arguments, func.__name__)
    with plain_functions():
        lead = (arguments.pop("self"),) if "self" in arguments else ()  # of a method
        return func(*lead, **arguments, inputs=tree_map_only(LazyLogits, LazyLogits.in_graph, inputs))


def _real(tree: Any, reader: str) -> Any:
    """The tree with real tensors in the place of lazy ones."""
    return tree_map_only(LazyTensor, lambda lazy: lazy.read(reader), tree)


def _is_of_sharding(hook: Any) -> bool:
    """Return whether a hook is one that FSDP puts on all outputs: it waits for the backward, and reads no gradient."""
    function = hook.func if isinstance(hook, partial) else getattr(hook, "__func__", hook)
    return (getattr(function, "__module__", None) or "").startswith("torch.distributed.")


def _version(tensor: Any) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _sample(tensor: Tensor) -> Tensor:
    """Some of a tensor's numbers, by which a step of an optimizer is noticed."""
    flat = tensor.detach().flatten()
    return flat[:: max(1, len(flat) // _SAMPLED)].clone()
