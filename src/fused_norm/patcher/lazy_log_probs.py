"""What people compute of a model's logits themselves: log-probabilities, losses of rows, entropies, predictions.

A model that is trained without labels returns lazy logits, and ``operate`` does these to them without making real ones.
Intermediate results, such as log-softmax, stay lazy. What ends a chain, such as the gather of log-softmax, is computed
at once, by the operators that compute it in chunks of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels.autocast import autocast_dtype, set_autocast
from ..kernels.linear_log_probs import LogProbs, linear_log_probs
from ..kernels.plain_calls import dispatch_modes
from ..kernels.switch import switch
from ..kernels.triton.devices import is_transformed
from ..kernels.vocabulary_head import chunk_rows
from .lazy_logits import SUMMARIES, CrossEntropy, LazyLogits, LazyTensor, ended
from .logit_steps import OF_ROWS, Step, is_of_pytorch, pieces_of, rows_by, step_of, transformation_by, write_of

_NO_LABEL = 1 - 2**31
"""An index that nobody gathers by, so that every row has a log-probability; of 32 bits, as other ignored labels are."""

_SMALL = frozenset({"selected", "logsumexp", "mean"})
"""Summaries of one number for each row."""


@dataclass(frozen=True)
class _Ending:
    """An operation that ends a chain; ``loss_of`` does it to real logits, by PyTorch."""

    loss_of: Callable[[Tensor], Tensor]


class _Operands(NamedTuple):
    """What the operator takes of lazy logits besides their rows, which log-softmax may have been taken of."""

    weight: Tensor
    bias: Tensor | None
    options: dict[str, Any]

    @classmethod
    def of(cls, lead: LazyLogits) -> _Operands | None:
        """None if the operator lacks a step."""
        before = _before_summary(lead._steps)
        options = None if before is None else transformation_by(before, with_temperature=True)
        projection = lead._projection
        return None if options is None else cls(projection.weight, projection.bias, options)

    def log_probs(
        self, rows: Tensor, target: Tensor, ignore_index: int = _NO_LABEL, *, entropies: bool = False
    ) -> LogProbs:
        """The log-probabilities of labels, one for each row of hidden states."""
        # The host waits here for the device: rows without a label are left out of the products.
        count = None if ignore_index == _NO_LABEL else int((target != ignore_index).sum())
        scale, temperature = (
            1.0 if self.options[name] is None else self.options[name] for name in ("scale", "temperature")
        )
        return linear_log_probs(
            rows,
            self.weight,
            target,
            linear_bias=self.bias,
            ignore_index=ignore_index,
            temperature=temperature,
            logit_scale=scale,
            softcap=self.options["cap"],
            logits_in_fp32=self.options["in_fp32"],
            max_labels=count,
            entropies=entropies,
        )


class _Operation(NamedTuple):
    """An operation on lazy logits.

    Attributes:
        run: does it, to the logits and its arguments by name; returns None for a call that needs values.
        parameters: the names of its arguments, in order.
        by_keyword: those that may be given by keyword alone.
    """

    run: Callable[..., Any]
    parameters: tuple[str, ...]
    by_keyword: tuple[str, ...] = ()

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """The arguments by name; None if there are others."""
        bound = dict(zip(self.parameters, args, strict=False))
        are_known = len(args) <= len(self.parameters) and {*kwargs} <= {*self.parameters, *self.by_keyword}
        return None if not are_known or {*bound} & {*kwargs} else {**bound, **kwargs}


def operate(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation on lazy logits; NotImplemented for one that needs their values."""
    if switch.depth or dispatch_modes() or is_transformed() or not is_of_pytorch(func):
        return NotImplemented
    if name == "stack":
        result: Any = None if len(args) != 1 or kwargs not in ({}, {"dim": 0}) else _stacked(args[0])
        return NotImplemented if result is None else result
    lead, *rest = args
    if not isinstance(lead, LazyLogits) or not lead.numel():
        return NotImplemented
    if lead.summary in (None, "log_softmax") and (pieces := pieces_of(lead, name, func, rest, kwargs)) is not None:
        return tuple([lead.then(piece) for piece in pieces])
    if lead.summary is None and (write := write_of(name, func, rest, kwargs)) is not None:
        return lead if lead.write(write) else NotImplemented
    if lead.summary is not None and (step := _rows_of_summary(lead, name, func, rest, kwargs)) is not None:
        return lead if step.name == "same" else lead.then(step)
    operation = _OPERATIONS.get(name)
    arguments = None if operation is None else operation.arguments(rest, kwargs)
    result = None if operation is None or arguments is None else operation.run(lead, **arguments)
    return NotImplemented if result is None else result


def _rows_of_summary(lead: LazyLogits, name: str, func: Any, args: Any, kwargs: Any) -> Step | None:
    """A selection of rows of log-softmax, or another shape of one number for each row."""
    if lead.summary == "log_softmax":
        step = step_of(lead, name, func, args, kwargs)
        return step if step is not None and step.name in OF_ROWS else None
    if lead.summary not in _SMALL or name not in ("squeeze", "unsqueeze") or kwargs.keys() - {"dim"}:
        return None
    (dim,) = [*args, *kwargs.values()] or [None]
    is_last = dim == -1 or (type(dim) is int and dim == lead.dim() - (name == "squeeze"))
    has_column = lead.dim() > 0 and lead.shape[-1] == 1
    return Step("view", lambda x: func(x, *args, **kwargs)) if is_last and has_column == (name == "squeeze") else None


def _is_last(logits: Tensor, dim: Any) -> bool:
    """Return whether a dimension is the vocabulary."""
    (dim,) = dim if isinstance(dim, list | tuple) and len(dim) == 1 else (dim,)
    return type(dim) is int and dim in (-1, logits.dim() - 1)


def _before_summary(steps: Sequence[Step]) -> Sequence[Step] | None:
    """The steps that make the logits of a log-softmax; None if others than selections of rows follow it."""
    place = next((place for place, step in enumerate(steps) if step.name in SUMMARIES), len(steps))
    return steps[:place] if all(step.name in OF_ROWS for step in steps[place + 1 :]) else None


def _source(lead: LazyLogits) -> LazyLogits | None:
    """The logits that a summary of all of their rows is made of; logits themselves."""
    logits = next((lazy for lazy in lead.ancestors() if lazy.summary is None), None)
    is_of_all = logits is not None and all(
        step.name in SUMMARIES or step.name == "view" for step in lead._steps[len(logits._steps) :]
    )
    return logits if is_of_all else None


def _have_equal_places(*lazies: LazyLogits) -> bool:
    """Return whether all are in autograd's graph or none is, if it matters."""
    return not torch.is_grad_enabled() or len({lazy.requires_grad for lazy in lazies}) == 1


def _untraced(result: Any, *lazies: LazyLogits) -> Any:
    """The result, whose gradient is not known to those that it is made of, so that to ask them for it is an error."""
    for lazy in lazies if result.requires_grad else ():
        lazy._has_loss = lazy._is_untraced = True
    return result


def _is_in_fp32(lead: LazyLogits) -> bool:
    """Return whether operations on a tensor are in float32, with or without autocast."""
    return lead.dtype == torch.float32


def _softmax_dtype(lead: LazyLogits, dtype: Any) -> torch.dtype | None:
    """The dtype of a softmax; None for one in which the logits would be rounded once more."""
    if dtype is None and autocast_dtype(lead) is not None:
        like = torch.zeros(1, dtype=lead.dtype, device=lead.device)
        dtype = torch.log_softmax(like, -1).dtype
    return lead.dtype if dtype is None else dtype if dtype in (lead.dtype, torch.float32) else None


def _log_softmax(lead: LazyLogits, dim: Any = None, dtype: Any = None, _stacklevel: int = 3) -> LazyLogits | None:
    to = _softmax_dtype(lead, dtype)
    if lead.summary is not None or not _is_last(lead, dim) or to is None:
        return None
    return lead.then(Step("log_softmax", lambda x: torch.log_softmax(x, -1, dtype=to)))


def _logsumexp(lead: LazyLogits, dim: Any = None, keepdim: bool = False) -> LazyLogits | None:
    if lead.summary is not None or not _is_last(lead, dim) or not _is_in_fp32(lead):
        return None
    return lead.then(Step("logsumexp", lambda x: torch.logsumexp(x, -1, keepdim=keepdim)))


def _is_index(index: Any, shape: tuple[int, ...], lead: LazyLogits) -> bool:
    """Return whether an index is a plain tensor of labels of this shape."""
    is_plain = isinstance(index, Tensor) and not isinstance(index, LazyTensor)
    return is_plain and index.dtype == torch.int64 and index.device == lead.device and tuple(index.shape) == shape


def _gather(lead: LazyLogits, dim: Any = None, index: Any = None) -> Tensor | None:
    if not _is_last(lead, dim) or not _is_index(index, (*lead.shape[:-1], 1), lead):
        return None
    index, dtype = index.clone(), lead.dtype  # the caller may write other numbers into it
    if lead.summary is None:
        step = Step("selected", lambda x: x.gather(-1, index.to(x.device)), chosen=index)
        return lead.then(step) if _is_in_fp32(lead) else None
    if lead.summary != "log_softmax" or (operands := _Operands.of(lead)) is None:
        return None

    def of_rows(rows: Tensor) -> Tensor:
        return operands.log_probs(rows, index.squeeze(-1)).log_probs.unsqueeze(-1).to(dtype)

    return ended(lead, _Ending(lambda log_p: log_p.gather(-1, index)), of_rows)


def _loss(
    lead: LazyLogits,
    target: Any = None,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    function: Any,
) -> Tensor | None:
    """The loss of labels by ``function``: ``nll_loss`` of log-softmax, or ``cross_entropy`` of logits."""
    is_summary_right = lead.summary == ("log_softmax" if function is functional.nll_loss else None)
    if not is_summary_right or not (weight is size_average is reduce is None):
        return None
    dtype, smoothing = lead.dtype, float(label_smoothing)
    options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction}
    if lead.dim() != 2 or not _is_index(target, tuple(lead.shape[:1]), lead) or type(ignore_index) is not int:
        return None
    if not _is_in_fp32(lead) and autocast_dtype(lead) is not None:
        like = torch.zeros(1, 1, dtype=dtype, device=lead.device)
        dtype = function(like, torch.zeros(1, dtype=torch.int64, device=lead.device)).dtype
    target = target.clone()
    if smoothing:
        options["label_smoothing"] = smoothing
    how = _Ending(lambda logits: function(logits, target, **options))
    if reduction == "none" and not smoothing:
        if (operands := _Operands.of(lead)) is None:
            return None

        def of_rows(rows: Tensor) -> Tensor:
            return (0.0 - operands.log_probs(rows, target, ignore_index).log_probs).to(dtype)

        return ended(lead, how, of_rows)
    projection, before = lead._projection, _before_summary(lead._steps)
    if reduction not in ("mean", "sum") or dtype != torch.float32 or not projection.is_of_head() or before is None:
        return None
    if (transformation := transformation_by(before)) is None:
        return None
    entropy = CrossEntropy(target, reduction, ignore_index, smoothing, **transformation)
    return ended(lead, how, lambda rows: projection.loss(rows, entropy))


def _subtract(lead: LazyLogits, other: Any = None) -> Tensor | None:
    """The difference of logits, or a mean of them, and the log of the sum of their exponentials."""
    if not isinstance(other, LazyLogits) or not other.is_lazy():
        return None
    logits, names = _source(lead), (lead.summary, other.summary)
    if logits is None or logits is not _source(other) or not _have_equal_places(logits, lead, other):
        return None
    if names == (None, "logsumexp") and tuple(other.shape) == (*lead.shape[:-1], 1) and lead is logits:
        return _untraced(logits.then(Step("log_softmax", lambda x: x - x.logsumexp(-1, keepdim=True))), other)
    if lead.shape != other.shape or (operands := _Operands.of(logits)) is None:
        return None
    shape = lead.shape
    if names == ("selected", "logsumexp"):
        index = next(step for step in lead._steps if step.name == "selected").chosen
        assert index is not None

        def log_probs(rows: Tensor) -> Tensor:
            return operands.log_probs(rows, index.squeeze(-1)).log_probs.view(shape)

        how = _Ending(lambda x: (x.gather(-1, index) - x.logsumexp(-1, keepdim=True)).view(shape))
        return _untraced(ended(logits, how, log_probs), lead, other)
    if names == ("logsumexp", "mean"):
        return _untraced(_entropies(logits, operands, shape, torch.float32), lead, other)
    return None


def _entropies(logits: LazyLogits, operands: _Operands, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    def entropies(rows: Tensor) -> Tensor:
        target = torch.zeros(rows.shape[:-1], dtype=torch.int64, device=rows.device)
        results = operands.log_probs(rows, target, entropies=True)
        assert results.entropies is not None
        return results.entropies.view(shape).to(dtype)

    def of_logits(x: Tensor) -> Tensor:
        log_p = torch.log_softmax(x, -1)
        return -(log_p.exp() * log_p).sum(-1).view(shape)

    return ended(logits, _Ending(of_logits), entropies)


def _softmax(lead: LazyLogits, dim: Any = None, dtype: Any = None, _stacklevel: int = 3) -> LazyLogits | None:
    to = _softmax_dtype(lead, dtype)
    if lead.summary is not None or not _is_last(lead, dim) or to is None:
        return None
    return lead.then(Step("softmax", lambda x: torch.softmax(x, -1, dtype=to)))


def _exp(lead: LazyLogits) -> LazyLogits | None:
    is_same = _is_in_fp32(lead) or autocast_dtype(lead) is None
    return lead.then(Step("softmax", torch.exp)) if lead.summary == "log_softmax" and is_same else None


def _multiply(lead: LazyLogits, other: Any = None) -> LazyLogits | None:
    """Probabilities times logits or log-probabilities."""
    if not isinstance(other, LazyLogits) or not other.is_lazy() or lead.dtype != other.dtype:
        return None
    names, logits = {lead.summary, other.summary}, _source(lead)
    if logits is None or logits is not _source(other) or not _have_equal_places(logits, lead, other):
        return None
    if lead.shape != other.shape or names not in ({"softmax", None}, {"softmax", "log_softmax"}):
        return None
    factors = [lazy._steps[len(logits._steps) :] for lazy in (lead, other)]

    def product(x: Tensor) -> Tensor:
        first, second = (reduce(lambda value, step: step.run(value), steps, x) for steps in factors)
        return first * second

    name = "weighted_logits" if None in names else "product"
    return _untraced(logits.then(Step(name, product)), *(lazy for lazy in (lead, other) if lazy is not logits))


def _sum(lead: LazyLogits, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """The negative entropy of a product with log-probabilities; of one with logits their mean, which stays lazy."""
    logits = _source(lead)
    is_same = _is_in_fp32(lead) or autocast_dtype(lead) is None
    if logits is None or not _is_last(lead, dim) or dtype not in (None, lead.dtype) or not is_same:
        return None
    if lead.summary == "weighted_logits":
        return lead.then(Step("mean", lambda x: x.sum(-1, keepdim=keepdim))) if _is_in_fp32(lead) else None
    if lead.summary != "product" or (operands := _Operands.of(logits)) is None:
        return None
    shape = torch.Size((*lead.shape[:-1], 1)) if keepdim else lead.shape[:-1]
    return _untraced(0.0 - _entropies(logits, operands, shape, lead.dtype), lead)


def _stacked(lazies: Any) -> LazyLogits | None:
    """The summaries of all pieces along the first dimension as that of the whole."""
    if not lazies or any(not isinstance(lazy, LazyLogits) or lazy.summary != "logsumexp" for lazy in lazies):
        return None
    if not all(lazy.is_lazy() and lazy._made_by is not None and lazy._made_by.name == "logsumexp" for lazy in lazies):
        return None
    pieces = [lazy._parent for lazy in lazies]
    whole = pieces[0]._parent
    if whole is None or not _have_equal_places(whole, *lazies) or lazies[0].shape != pieces[0].shape[:-1]:
        return None
    for place, piece in enumerate(pieces):
        if piece._parent is not whole or piece._made_by.piece != (place, len(lazies)):
            return None
    return _untraced(whole.then(Step("logsumexp", lambda x: x.logsumexp(-1))), *lazies)


def _argmax(lead: LazyLogits, dim: Any = None, keepdim: bool = False) -> Tensor | None:
    """The largest logits of rows, which are computed in chunks."""
    if lead.summary is not None or not _is_last(lead, dim):
        return None
    projection, steps = lead._projection, [step for step in lead._steps if step.name not in OF_ROWS]
    projection.check()
    with torch.no_grad(), set_autocast(lead.device.type, projection.dtype):
        rows = rows_by(lead._steps, projection.x)
        flat = rows.reshape(-1, rows.shape[-1])
        parts = flat.split(max(1, chunk_rows(len(flat), lead.shape[-1], lead.element_size())))
        logits = (functional.linear(part, projection.weight, projection.bias) for part in parts)
        largest = torch.cat([reduce(lambda x, step: step.run(x), steps, part).argmax(-1) for part in logits])
    return largest.view(*lead.shape[:-1], *([1] if keepdim else []))


_LOSS_PARAMETERS = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction")

_OPERATIONS = {
    "log_softmax": _Operation(_log_softmax, ("dim",), ("dtype", "_stacklevel")),
    "softmax": _Operation(_softmax, ("dim",), ("dtype", "_stacklevel")),
    "gather": _Operation(_gather, ("dim", "index")),
    "logsumexp": _Operation(_logsumexp, ("dim", "keepdim")),
    "nll_loss": _Operation(partial(_loss, function=functional.nll_loss), _LOSS_PARAMETERS),
    "cross_entropy": _Operation(
        partial(_loss, function=functional.cross_entropy), (*_LOSS_PARAMETERS, "label_smoothing")
    ),
    "argmax": _Operation(_argmax, ("dim", "keepdim")),
    "exp": _Operation(_exp, ()),
    "sum": _Operation(_sum, ("dim", "keepdim"), ("dtype",)),
    **dict.fromkeys(("sub", "__sub__", "subtract"), _Operation(_subtract, ("other",))),
    **dict.fromkeys(("mul", "__mul__", "multiply"), _Operation(_multiply, ("other",))),
}
"""Operations by the names of PyTorch's functions and methods; all but rows of logits and writes into them."""
