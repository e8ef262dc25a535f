"""Logits that are computed when they are read: tensors that know their shape and how they would be computed.

While a language model computes a loss, its head returns ``LazyLogits``. Selecting rows of them, casting, scaling or
capping them gives further lazy logits, and ``torch.nn.functional.cross_entropy`` of such logits is the fused operator,
which never holds them. Any other operation reads them: all lazy logits of the call are computed by the operations that
were asked for, and are plain tensors from then on. So code that is given lazy logits computes what it would compute
with the real ones. Once the model's forward has returned, all but a question for their shape and a cast to float32, as
accelerate makes, reads them. If the model got no labels, the operations of ``lazy_log_probs.py`` do not either.

To C++ lazy logits are tensors without numbers that have a place in autograd's graph. Who differentiates there, as a
``torch.autograd.Function`` of somebody's does, gets the right gradients, and the fused loss passes its gradient on
there if somebody has asked for that of the logits. If code in C++ has given lazy logits another place, as that of such
a function's result, no loss is made of the head's inputs any more.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from types import FunctionType
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from ..kernels.autocast import autocast_dtype, set_autocast
from .logit_steps import OF_ROWS, Step, is_of_pytorch, plain_functions, rows_by, step_of, transformation_by

_OF_SHAPE = frozenset({
    "shape", "dtype", "device", "ndim", "layout", "names", "itemsize", "nbytes", "is_cuda", "is_cpu", "is_meta",
    "is_xpu", "is_mps", "is_mkldnn", "is_sparse", "is_nested", "is_quantized", "size", "dim", "numel", "nelement",
    "ndimension", "__len__", "element_size", "stride", "is_contiguous", "is_floating_point", "is_complex", "is_signed",
    "get_device", "is_inference", "is_conj", "is_neg", "__hash__", "requires_grad", "is_leaf", "_base",
})  # fmt: skip
"""Functions and attributes of tensors that tell nothing of their numbers."""

_ASKS = frozenset({"grad_fn", "retain_grad", "register_hook"})
"""Those by which somebody asks for a gradient, or for the node that gets it."""

_OF_GRADIENT = _ASKS | {"grad", "retains_grad"}

_DIFFERENTIATES = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
"""Functions that are asked for the gradients of ``inputs``."""

SUMMARIES = frozenset({"log_softmax", "softmax", "product", "weighted_logits", "selected", "logsumexp", "mean"})
"""The steps after which a lazy tensor holds no logits any more."""

_DDP = torch.nn.parallel.distributed.__name__

_DYNAMO = f"{torch.__path__[0]}/_dynamo/eval_frame.py"
"""The file through which compiled functions are called."""

_SAMPLED = 4096

_TOO_LATE = (
    "the gradient of a view of logits, or of logits that were written into, is asked for after their loss: call"
    " retain_grad() or register_hook() before it, or patch the model with apply_fused_norm(model, loss=False)"
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
class Projection:
    """A call of a head: what its logits are computed of, in the state that PyTorch had then.

    Attributes:
        x, weight, bias: the linear's arguments, as it got them.
        dtype: what autocast casts them to; None without autocast.
        loss: computes the cross entropy of rows of x: takes the rows and a ``CrossEntropy``.
        noted: is told that logits of this call were read, and by what.
        parameters: those that the head has by now; None if it cannot get others.
        is_running: the model's forward has not returned, so that nobody has stepped or sharded weights.
        operate: for a model without labels, does an operation on lazy logits that reads none: takes the function, its
            name and its arguments, and returns NotImplemented for another operation.
        asked: by which functions somebody asks for the gradient that a fused loss gives its logits.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype | None
    loss: Callable[[Tensor, CrossEntropy], Tensor]
    noted: Callable[[str], None]
    parameters: Mapping[str, Tensor | None] | None = None
    is_running: bool = True
    operate: Callable[[Any, str, Any, Any], Any] | None = None
    asked: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.arguments = self.x, self.weight, self.bias
        self.tensors = [tensor for tensor in self.arguments if tensor is not None]
        self._members: list[ref[LazyTensor]] = []
        self._versions = list(map(_version, self.tensors))
        # Autograd does not count writes through ``data``, nor any into tensors of inference mode.
        uncounted = [self.weight, *([self.x] if self.x.is_inference() else [])]
        self._samples = [(tensor, _sample(tensor)) for tensor in uncounted]

    def add(self, lazy: LazyTensor) -> None:
        """Note a lazy tensor that is made of this call."""
        self._members.append(ref(lazy))

    def members(self, kind: type[LazyTensor]) -> Iterator[Any]:
        """The lazy tensors of a class that somebody still has, in the order in which they were made."""
        return (lazy for lazy in [made() for made in self._members] if isinstance(lazy, kind))

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
        changed = list(map(_version, self.tensors)) != self._versions
        changed = changed or any(tensor.untyped_storage().nbytes() == 0 for tensor in self.tensors if tensor.numel())
        for tensor, sample in () if self.is_running else self._samples:
            changed = changed or tensor.dtype != sample.dtype
            changed = changed or not torch.equal(sample.view(torch.uint8), _sample(tensor).view(torch.uint8))
        if changed:
            raise RuntimeError(
                "outputs.logits are computed when they are first read, and the weights have been written to or freed"
                " since the forward, as by a step of the optimizer: read them before, or patch the model with"
                " apply_fused_norm(model, loss=False)"
            )

    def is_of_head(self) -> bool:
        """Return whether the head still has the weights of this call, as the loss takes those that it has."""
        now = self.parameters
        return now is None or (now.get("weight") is self.weight and now.get("bias") is self.bias)


class Ending(Protocol):
    """What a fused operator computes of logits."""

    def loss_of(self, logits: Tensor) -> Tensor:
        """The same of real logits, by PyTorch."""


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

    _real: Tensor | None
    _place: Any  # in autograd's graph, when it was made: whether it requires a gradient, and its node

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device) -> Any:
        lazy = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device, requires_grad=False
        )
        torch._C._set_throw_on_mutable_data_ptr(lazy)  # for code in C++ that would read memory that is not there
        return lazy

    def _placed(self, projection: Projection) -> None:
        self._real, self._place = None, self._place_now()
        projection.add(self)

    def _place_now(self) -> Any:
        with plain_functions():
            return self.requires_grad, self.grad_fn

    def is_lazy(self) -> bool:
        """Return whether it is not read, and code in C++ has not given it another place in autograd's graph."""
        return self._real is None and self._place == self._place_now()

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
    _has_loss: bool  # a fused loss with a gradient was made of these, or of what steps make of them
    _is_untraced: bool  # what was made of these has no place behind them in autograd's graph, or they were written into
    _is_written_over: bool  # by a write into rows of these, so that steps do not tell them any more
    _is_alias: bool  # of the memory of what it is made of
    _made_by: Step | None
    _writes: list[tuple[tuple[Step, ...], Step]]  # into which rows of these, and what
    _hooks: OrderedDict[int, Any]

    @classmethod
    def from_projection(cls, projection: Projection) -> LazyLogits:
        """The logits of a call of a head."""
        x, weight = projection.x, projection.weight
        like = torch.empty((*x.shape[:-1], len(weight)), dtype=projection.dtype or x.dtype, device="meta")
        in_graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in projection.tensors)
        return cls._made(projection, (), None, like, in_graph)

    def then(self, step: Step) -> LazyLogits:
        """The lazy logits that a step makes of these."""
        with plain_functions(), torch.no_grad():
            like = step.run(torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta"))
        in_graph = torch.is_grad_enabled() and self.requires_grad and step.name != "detach"
        steps = (*self._steps, step._replace(shape=like.shape))
        lazy = self._made(self._projection, steps, self, like, in_graph)
        lazy._is_alias = like._is_view()
        return lazy

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
        lazy._has_loss = lazy._is_untraced = lazy._is_written_over = lazy._is_alias = False
        lazy._made_by, lazy._writes, lazy._hooks = steps[-1] if steps else None, [], OrderedDict()
        lazy._placed(projection)
        return lazy

    def read(self, reader: str) -> Tensor:
        if self._real is None:
            self._projection.noted(reader)
            # All of them, as whoever has one may write into it, and others are views or copies of that.
            for lazy in self._projection.members(LazyLogits):
                lazy._compute()
            for loss in self._projection.members(LazySum):
                loss.read(reader)
        assert self._real is not None
        return self._real

    def _compute(self) -> None:
        """Compute the real logits, in the modes of the forward whatever the reader's are."""
        if self._real is not None:
            return
        # A loss has a gradient for the lazy ones, to which that of the real ones is added.
        is_result = not self.is_lazy() or (self._has_loss and self._is_no_view() and not self._is_untraced)
        in_graph, x = self._place[0] and not is_result, self._projection.x
        with (
            torch.inference_mode(x.is_inference()),
            torch.set_grad_enabled(in_graph),
            set_autocast(x.device.type, None),
        ):
            if self._parent is None:
                real = self._projection.compute()
            else:
                assert self._parent._real is not None
                assert self._made_by is not None
                real = self._made_by.run(self._parent._real)
            for path, write in self._writes:
                view = reduce(lambda rows, step: step.run(rows), path, real)
                view.mul_(write.number) if write.name == "mul" else view.div_(write.number)
        if is_result:
            with torch.enable_grad(), plain_functions():
                real = _Read.apply(self, [real])
        for hook in self._hooks.values() if real.requires_grad else ():
            real.register_hook(hook)
        self._real, self._parent = real, None

    @property
    def summary(self) -> str | None:
        """The last step of ``lazy_log_probs.py``; None for logits."""
        return next((step.name for step in reversed(self._steps) if step.name in SUMMARIES), None)

    def _is_no_view(self) -> bool:
        return self._made_by is None or self._made_by.name not in ("detach", *OF_ROWS)

    def ancestors(self) -> list[LazyLogits]:
        """These logits, those that they are made of, and so on."""
        found = [self]
        while found[-1]._parent is not None:
            found.append(found[-1]._parent)
        return found

    def write(self, step: Step) -> bool:
        """Have a multiple of these logits written into them, and return True; or return False, and do nothing.

        The latter is so if there are other lazy tensors than those that these were made of: they may share memory with
        these, or may be copies from before the write; and if autograd is off and would not know of the write.
        """
        ancestors, is_traced = self.ancestors(), torch.is_grad_enabled()
        if {*map(id, self._projection.members(LazyTensor))} - {*map(id, ancestors)} or any(
            not lazy.is_lazy() or (lazy.requires_grad and not is_traced) for lazy in ancestors
        ):
            return False
        own = next(place for place, lazy in enumerate(ancestors) if not lazy._is_alias)  # which has memory of its own
        if any(lazy._made_by is not None and lazy._made_by.name == "detach" for lazy in ancestors[:own]):
            return False
        path: tuple[Step, ...] = ()
        for lazy in ancestors[: own + 1]:
            with plain_functions():
                if lazy.requires_grad:
                    _Written.apply(lazy, path, step)
            lazy._place, lazy._is_untraced = lazy._place_now(), True
            if path:
                lazy._is_written_over = True
            else:
                lazy._steps = (*lazy._steps, step)
            if lazy._is_alias and lazy._made_by is not None:
                path = (lazy._made_by, *path)
        ancestors[own]._writes.append((path, step))
        return True

    def ask(self, name: str) -> None:
        """Have the fused loss of these compute their gradient, for which the function of that name asks.

        Raises:
            RuntimeError: if that is not what is asked for.
        """
        is_changed = self._is_untraced or (self._real is not None and self._real._version)
        if is_changed or not self._is_no_view():
            raise RuntimeError(_TOO_LATE)
        self._projection.asked.add(name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, FunctionType) and func not in _OWN:  # other code may have put it under a name of PyTorch's
            func = next((own for name, own in GENUINE.items() if vars(functional)[name] is func), func)
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            name = func.__self__.__name__
        lead = args[0] if args else None
        if isinstance(lead, LazyLogits) and lead.is_lazy():
            # DistributedDataParallel asks for the node of all that a model returns, and copies that if it has one.
            is_of_ddp = name == "grad_fn" and sys._getframe(1).f_globals.get("__name__") == _DDP
            is_of_shape = name in _OF_SHAPE and (len(args) == 1 or name in ("size", "stride"))
            if is_of_ddp or (is_of_shape and is_of_pytorch(func)):
                with plain_functions():
                    return func(*args, **kwargs)
            # Without a loss in the output FSDP has no other hook than these.
            if name == "register_hook" and _is_of_sharding(args[1]) and lead._projection.operate is None:
                handle = RemovableHandle(lead._hooks)
                lead._hooks[handle.id] = args[1]
                return handle
            is_kept = lead._projection.is_running or name in ("float", "to")  # accelerate casts what a model returns
            is_kept = is_kept or (name != "detach" and _operations_on(args) is not None)
            is_kept = is_kept and not lead._is_written_over and lead.summary is None
            if is_kept and (step := step_of(lead, name, func, args[1:], kwargs)) is not None:
                return lead if step.name == "same" else lead.then(step)
        if (operate := _operations_on(args)) is not None:
            result = operate(func, name, args, kwargs)
            if result is not NotImplemented:
                return result
        if isinstance(lead, LazyLogits) and lead._has_loss and name in _OF_GRADIENT:
            if name in _ASKS:
                lead.ask(name)
            with plain_functions():
                return func(*args, **kwargs)
        if func is GENUINE["cross_entropy"]:
            loss = _cross_entropy(*args, **kwargs)
            if loss is not None:
                return loss
        if func in _DIFFERENTIATES:
            return _differentiated(func, args, kwargs)
        with plain_functions():
            return func(*_real(args, name), **_real(kwargs, name))


class LazySum(LazyTensor):
    """The sum of the losses of rows, which is computed when it is known whether it is divided by a number of items.

    Gradients are rounded once, with the divisor in them, so it has to be known before they are made.
    """

    _logits: LazyLogits
    _how: CrossEntropy

    @classmethod
    def from_logits(cls, logits: LazyLogits, how: CrossEntropy) -> LazySum:
        """The sum of losses of logits."""
        with plain_functions(), torch.set_grad_enabled(logits.requires_grad and torch.is_grad_enabled()):
            lazy: LazySum = _Loss.apply(None, logits, how, *logits._projection.arguments)
        lazy._logits, lazy._how = logits, how
        lazy._placed(logits._projection)
        return lazy

    def read(self, reader: str) -> Tensor:
        if self._real is None:
            is_moved = not self.is_lazy()
            with torch.set_grad_enabled(self._place[0] and not is_moved):
                self._real = _loss_of(self._logits, self._how)
            if is_moved:
                with torch.enable_grad(), plain_functions():
                    self._real = _Read.apply(self, [self._real])
        return self._real

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        name = func.__self__.__name__ if name == "__get__" else name
        lead = args[0] if args else None
        if isinstance(lead, LazySum) and lead.is_lazy() and is_of_pytorch(func):
            if name in _OF_SHAPE and len(args) == 1:
                with plain_functions():
                    return func(*args, **(kwargs or {}))
            if name in ("__truediv__", "div", "true_divide") and len(args) == 2 and not kwargs and _is_count(args[1]):
                return _loss_of(lead._logits, replace(lead._how, num_items=args[1]))
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


class _Written(torch.autograd.Function):
    """Lazy logits after a write of a multiple into rows of them, in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, lazy: LazyLogits, path: tuple[Step, ...], write: Step) -> Any:
        ctx.set_materialize_grads(False)
        ctx.path, ctx.write = path, write
        ctx.mark_dirty(lazy)
        return lazy

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return None, None, None
        if not ctx.path:
            return ctx.write.run(gradient), None, None
        gradient = gradient.clone()
        view = reduce(lambda rows, step: step.run(rows), ctx.path, gradient)
        view.mul_(ctx.write.number) if ctx.write.name == "mul" else view.div_(ctx.write.number)
        return gradient, None, None


class _Read(torch.autograd.Function):
    """A real tensor as a result of a lazy one, which has a place of its own in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, lazy: LazyTensor, reals: list[Tensor]) -> Any:
        (real,) = reals
        return real.clone() if real._is_view() else real

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Loss(torch.autograd.Function):
    """The fused loss, or a ``LazySum`` if ``loss`` is None, as a result of its lazy logits in autograd's graph.

    The backward of the fused loss needs no gradient of logits, and none is made unless somebody asks for it.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor | None, logits: LazyLogits, how: Ending, *arguments: Any) -> Any:
        ctx.save_for_backward(*arguments)
        ctx.set_materialize_grads(False)
        ctx.steps, ctx.how, ctx.is_lazy = logits._steps, how, loss is None
        ctx.dtype, ctx.asked = logits._projection.dtype, logits._projection.asked
        if loss is None:
            return LazySum(torch.empty((), dtype=torch.float32, device="meta"), logits.device)
        return loss.clone()  # and no view: callers scale it, and add to it, in place

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None) -> Any:
        if dloss is None or not (ctx.is_lazy or ctx.asked):
            return dloss, *(None,) * 5
        dlogits = _gradient_of(ctx.how.loss_of, (ctx.steps, ctx.dtype, *ctx.saved_tensors), dloss)
        return None, dlogits, *(None,) * 4


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    with set_autocast(x.device.type, dtype):
        return functional.linear(x, weight, bias)


def _gradient_of(function: Callable[[Tensor], Tensor], made_by: tuple[Any, ...], gradient: Tensor) -> Tensor:
    """The gradient of logits for that of a function of them.

    ``made_by``: the steps that made the logits, autocast's dtype, and what the head got.
    """
    steps, dtype, x, weight, bias = made_by
    again = torch.is_grad_enabled()
    logits = reduce(lambda logits, step: step.run(logits), steps, _logits(x, weight, bias, dtype))
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
    if not isinstance(logits, LazyLogits) or not isinstance(target, Tensor):
        return None
    if not logits.is_lazy() or not logits._projection.is_running:
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
    return LazySum.from_logits(logits, how) if reduction == "sum" else _loss_of(logits, how)


def _loss_of(logits: LazyLogits, how: CrossEntropy) -> Tensor:
    """The loss of logits by the fused operator, or by PyTorch if they were read or the operator cannot be called."""
    if not logits.is_lazy() or not logits._projection.is_of_head():
        return how.loss_of(logits.read("its loss"))
    transformation, projection = transformation_by(logits._steps), logits._projection
    assert transformation is not None
    return ended(logits, how, lambda rows: projection.loss(rows, replace(how, **transformation)))


def ended(logits: LazyLogits, how: Ending, operate: Callable[[Tensor], Tensor]) -> Tensor:
    """The result of a fused operator on lazy logits, with its place in autograd's graph.

    Args:
        logits: that the result is of.
        how: does it by PyTorch, if somebody asks for the gradient of logits.
        operate: does it, to their rows of hidden states.

    Raises:
        RuntimeError: as ``Projection.check``.
    """
    projection = logits._projection
    projection.check()
    needs_gradient = logits.requires_grad and torch.is_grad_enabled()
    # Autocast as it was for the head, whatever it is now.
    with torch.set_grad_enabled(needs_gradient), set_autocast(projection.x.device.type, projection.dtype):
        result = operate(rows_by(logits._steps, projection.x))
    if result.requires_grad:
        with plain_functions():
            result = _Loss.apply(result, logits, how, *projection.arguments)
        for lazy in logits.ancestors():
            lazy._has_loss = True
    return result


def _operations_on(args: Any) -> Callable[[Any, str, Any, Any], Any] | None:
    """What does the operations on the lazy logits among arguments, or in a list that is the first; None without it."""
    leads = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
    lazy = next((lead for lead in leads if isinstance(lead, LazyLogits)), None)
    if lazy is None or not lazy.is_lazy() or lazy._is_written_over:
        return None
    is_compiled = not lazy._projection.is_running and is_in_compiled_function()
    return None if is_compiled else lazy._projection.operate


def is_in_compiled_function() -> bool:
    """Return whether a compiled function is running: a compiler traces what is made of real logits alone."""
    return any(frame.f_code.co_filename == _DYNAMO for frame, _ in traceback.walk_stack(None))


def _is_count(value: Any) -> bool:
    """Return whether a value is a number of items, or a tensor of one."""
    if isinstance(value, LazyTensor):
        return False
    return (type(value) in (int, float) and value != 0) or (
        isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad and not value.is_complex()
    )


def _differentiated(function: Any, args: Any, kwargs: Any) -> Any:
    """The result of a function that differentiates; logits of a loss have the lazy ones' place in the graph."""
    args, kwargs = tree_map_only(LazySum, lambda loss: loss.read("autograd"), (args, kwargs))
    for lazy in tree_leaves(kwargs.get("inputs", args[1:2])):
        if isinstance(lazy, LazyLogits) and lazy._has_loss:
            lazy.ask("autograd")
    args, kwargs = tree_map_only(
        LazyLogits, lambda lazy: lazy if lazy._has_loss else lazy.read("autograd"), (args, kwargs)
    )
    with plain_functions():
        return function(*args, **kwargs)


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


# A function that torch.compile traces is given real logits by these methods, which are none of its code. A PyTorch that
# has no such names any more compiles them too, in graphs of their own.
with contextlib.suppress(AttributeError):
    _frames: Any = torch._C._dynamo.eval_frame
    _SKIPPED = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)
    for _method in (LazyLogits.__torch_function__, LazySum.__torch_function__, LazyTensor.__torch_dispatch__):
        _frames.set_code_exec_strategy(_method.__func__.__code__, _SKIPPED)  # type: ignore[attr-defined]
