"""The vocabulary head of a model, whose logits are never whole in memory: what the operators that need them share.

The rows go through in chunks. A product computes the logits of a chunk, one kernel what is wanted of them and, over the
logits, their gradients, and two products the gradients of the rows and of the weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import Unsupported, check_tensor, why_other_dtype
from .autocast import autocast_dtype, set_autocast
from .operator import BackwardArguments, Grads, Operator
from .triton.call import Call
from .triton.cross_entropy_kernels import Statistics, launch_cross_entropy

IGNORED = -100
"""The label of rows that have none, unless ``ignore_index`` says otherwise."""

MOST_ROWS, MOST_BYTES = 2048, 2**30
"""Rows of a chunk, and bytes of its logits, at most. On an H200 chunks of 4096 rows are up to 4 % faster and take twice
the memory; chunks of 1024 are 8 to 15 % slower."""

_MULTIPLE = 128
"""Rows of a chunk are a multiple of it, as tiles of products are."""

_ALIGNED = 64
"""Elements that rows of logits begin at multiples of: cuBLAS and kernels read 16 bytes at a time."""


class HeadOperator(Operator):
    """An operator on the logits of a head, whose first tensors are x, weight, bias and target.

    ``forward`` and ``backward`` compute at once, as their steps depend on data: a call has nothing left to run.
    """

    takes_dtensors = False
    extra_saved = ("x_grad", "weight_grad", "bias_grad")
    has_products = True
    gradients = ("dx", "dweight", "dbias")

    def why_reference_only(self, *arguments: Any) -> Unsupported | None:
        x, weight, bias, target, *_ = arguments
        if not all(t.numel() for t in (x, weight, target)):
            return Unsupported("")
        reason = why_other_dtype("weight", "x", weight, x) or why_other_dtype(
            "bias", "x", x if bias is None else bias, x
        )
        return None if reason is None else Unsupported(reason)

    def empty_grads(self, call: Call, given: BackwardArguments) -> Grads:
        return tuple(map(call.empty_weight_like, given.saved[:3], given.needed))

    def _recorded(self, arguments: tuple[Any, ...]) -> Any:
        return None  # products and checks of labels are steps that a recording cannot repeat


class Head(NamedTuple):
    """One call of a head.

    Attributes:
        operator: its name, for errors.
        x: [..., H].
        weight: [V, H], of x's dtype.
        bias: [V], of x's dtype, or None.
        target: [...], int64.
        max_labels: at least the number of rows with a label; None if nobody knows one.
        options: of ``launch_cross_entropy``: ``ignored`` at least.
    """

    operator: str
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    max_labels: int | None
    options: Mapping[str, Any]


class HeadResults(NamedTuple):
    """What ``by_chunks`` computes, losses and statistics for all rows, those without a label too.

    Attributes:
        losses: [rows], float32.
        statistics: as ``launch_cross_entropy`` writes them.
        grads: of x, weight and bias; None for those not asked for.
    """

    losses: Tensor
    statistics: Statistics
    grads: tuple[Tensor | None, Tensor | None, Tensor | None]


def chunk_rows(rows: int, vocabulary: int, itemsize: int) -> int:
    """The number of rows in a chunk: chunks are of one size, as few as the limits allow."""
    most = max(_MULTIPLE, min(MOST_ROWS, MOST_BYTES // (vocabulary * itemsize) // _MULTIPLE * _MULTIPLE))
    chunks = -(-rows // most)
    return min(rows, -(-rows // (chunks * _MULTIPLE)) * _MULTIPLE)


def by_chunks(
    head: Head,
    trained: Sequence[bool],
    gradient: Tensor | None,
    entropy_gradient: Tensor | None = None,
    *,
    wanted: Sequence[bool] = (False,) * len(Statistics._fields),
    grad_dtype: torch.dtype | None = None,
) -> HeadResults:
    """Compute the losses of all rows, and the gradients of x, weight and bias that are ``trained``.

    Args:
        head: the call.
        trained: of x, weight and bias.
        gradient: that of the rows' losses, float32, [rows] or, if it is the same for all, []; None for 1.
        entropy_gradient: that of the rows' entropies, float32, [rows]; None for 0.
        wanted: which of ``Statistics`` to compute.
        grad_dtype: of the gradients, which are sums in float32; None for the dtypes of their tensors.
    """
    x, weight, bias = head.x, head.weight, head.bias
    train_x, train_weight, train_bias = trained
    vocabulary, width = weight.shape
    all_rows, labels = x.reshape(-1, width), head.target.reshape(-1).contiguous()
    most, ignored = head.max_labels, head.options["ignored"]
    _check_labels(head.operator, labels, vocabulary, ignored, most)
    rows, order = all_rows, None
    if most is not None and most < len(labels):
        order = torch.argsort((labels == ignored).to(torch.uint8), stable=True)[: max(1, most)]
        rows, labels = all_rows[order], labels[order]
    count = len(rows)
    losses, *statistics = (x.new_empty(count, dtype=torch.float32) if want else None for want in (True, *wanted))
    assert losses is not None
    if gradient is None:
        gradient = losses.new_ones(())
    if not any(trained):
        gradient = entropy_gradient = None
    gradients = [g if g is None or order is None or not g.dim() else g[order] for g in (gradient, entropy_gradient)]
    chunk = chunk_rows(count, vocabulary, x.element_size())
    sum_dtype = grad_dtype or (x.dtype if chunk >= count else torch.float32)
    dx = rows.new_empty(rows.shape, dtype=grad_dtype) if train_x else None
    dweight = weight.new_empty(weight.shape, dtype=sum_dtype) if train_weight else None
    dbias = weight.new_zeros(vocabulary, dtype=torch.float32) if train_bias else None
    # A CPU's products in bf16 (PyTorch 2.13) read what lies between rows.
    columns = -(-vocabulary // _ALIGNED) * _ALIGNED if x.is_cuda else vocabulary
    with torch.no_grad(), set_autocast(x.device.type, None):
        buffer = x.new_empty((chunk, columns))[:, :vocabulary]
        for start in range(0, count, chunk):
            part = slice(start, min(start + chunk, count))
            inputs = rows[part]
            logits = buffer[: len(inputs)]
            _multiply(logits, inputs, weight.t(), bias)
            of_loss, of_entropy = (g[part] if g is not None and g.dim() else g for g in gradients)
            Call.at_once(
                launch_cross_entropy, logits, labels[part], losses[part], of_loss, entropy_gradient=of_entropy,
                statistics=Statistics(*(t if t is None else t[part] for t in statistics)), **head.options,
            )  # fmt: skip
            if dx is not None:
                _multiply(dx[part], logits, weight)
            if dweight is not None:
                _multiply(dweight, logits.t(), inputs, dweight if start else None)
            if dbias is not None:
                dbias += logits.sum(0, dtype=torch.float32)
        del buffer, logits
        if order is not None:
            losses, dx, *statistics = (_in_all_rows(t, order, len(all_rows)) for t in (losses, dx, *statistics))
        dx = None if dx is None else dx.view(x.shape)
        dweight, dbias = (None if t is None else t.to(grad_dtype or weight.dtype) for t in (dweight, dbias))
    assert losses is not None
    return HeadResults(losses, Statistics(*statistics), (dx, dweight, dbias))


def _in_all_rows(values: Tensor | None, order: Tensor, count: int) -> Tensor | None:
    """Values of the rows ``order``, and zeros for all others."""
    return None if values is None else values.new_zeros(count, *values.shape[1:]).index_copy_(0, order, values)


def _check_labels(operator: str, labels: Tensor, vocabulary: int, ignored: int, most: int | None) -> None:
    """Raise for labels outside of the vocabulary; on a GPU as PyTorch does, by an assertion that nobody waits for."""
    has_label = labels != ignored
    are_valid = ((labels >= 0) & (labels < vocabulary) | ~has_label).all()
    if labels.device.type == "cpu":
        if not are_valid:
            label = labels[has_label & ((labels < 0) | (labels >= vocabulary))][0]
            raise IndexError(f"{operator}: target {int(label)} is out of bounds for {vocabulary} classes")
        if most is not None and has_label.sum() > most:
            raise ValueError(f"{operator}: {int(has_label.sum())} rows have a label, max_labels is {most}")
        return
    torch._assert_async(are_valid, f"{operator}: a target is out of bounds")
    if most is not None:
        torch._assert_async(has_label.sum() <= most, f"{operator}: more than max_labels rows have a label")


def _multiply(out: Tensor, a: Tensor, b: Tensor, added: Tensor | None = None) -> None:
    """``out = a @ b + added``. A float32 ``out`` of narrower a and b is itself what is ``added``, or nothing is."""
    if a.device.type != "cuda":  # whose products in 16 bits do not overwrite NaN, and know no wider result
        wide = a.to(out.dtype) @ b.to(out.dtype) if added is out or added is None else torch.addmm(added, a, b)
        out.copy_(wide if added is not out else out + wide)
        return
    dtype: dict[str, Any] = {} if out.dtype == a.dtype else {"out_dtype": out.dtype}
    if added is None:
        torch.mm(a, b, out=out, **dtype)
    else:
        torch.addmm(added, a, b, out=out, **dtype)


def check_head(
    tensors: tuple[Tensor, Any, Any, Any],
    ignored: object,
    most: object,
    *,
    positive: Mapping[str, Any],
    numbers: Mapping[str, object],
) -> Unsupported | None:
    """Refuse tensors of a head that do not fit each other, and options that are not such numbers.

    Args:
        tensors: x, weight, bias and target as in ``Head``, of any kind but for x.
        ignored: the label of rows that have none, an int.
        most: ``max_labels``, an int or None.
        positive: options by their names, positive Python numbers or None.
        numbers: other options by their names, Python numbers or None.
    """
    x, weight, bias, target = tensors
    for name, tensor in (("linear_weight", weight), ("linear_bias", bias)):
        if tensor is not None and (refusal := check_tensor(name, tensor, ("input", x))) is not None:
            return refusal
    if (refusal := _check_target(x, weight, bias, target)) is not None:
        return refusal
    for name, value in (("ignore_index", ignored), ("max_labels", 0 if most is None else most)):
        if isinstance(value, bool) or not isinstance(value, int):
            return Unsupported(f"{name} must be an int, not {value!r}", TypeError)
    for name, value in (*numbers.items(), *positive.items()):
        if value is not None and (not isinstance(value, Real) or isinstance(value, bool)):
            return Unsupported(f"{name} must be a Python number, not {type(value).__name__}", TypeError)
    for name, value in positive.items():
        if value is not None and not value > 0:
            return Unsupported(f"{name} must be positive, not {value}", ValueError)
    return None


def _check_target(x: Tensor, weight: Tensor, bias: Tensor | None, target: Any) -> Unsupported | None:
    """Refuse labels of another type, dtype, device or shape, and a weight or bias of another shape."""
    if not isinstance(target, Tensor) or target.dtype != torch.int64:
        what = target.dtype if isinstance(target, Tensor) else type(target).__name__
        return Unsupported(f"target must be a tensor of int64, not {what}", TypeError)
    if target.device != x.device:
        return Unsupported(f"target is on {target.device} and input on {x.device}; move them to one device", ValueError)
    fits = weight.dim() == 2 and weight.shape[1] == x.shape[-1] and target.shape == x.shape[:-1]
    if fits and (bias is None or bias.shape == weight.shape[:1]):
        return None
    shapes = ", ".join(str(tuple(t.shape)) for t in (x, weight, target, bias) if t is not None)
    return Unsupported(
        "input, linear_weight, target and linear_bias must have shapes [..., H], [V, H], [...] and [V], not " + shapes,
        ValueError,
    )


def head_tensors(x: Any, weight: Any, bias: Any, *, casts: bool = True) -> tuple[list[Any], list[bool]]:
    """The tensors, cast as for a linear under autocast, and which of them need a gradient; they may be of any kind.

    ``casts``: without it they stay as they are.
    """
    tensors = [x, weight, bias]
    if casts and isinstance(x, Tensor) and (dtype := autocast_dtype(x)) is not None and x.dtype != torch.float64:
        tensors = [t.to(dtype) if isinstance(t, Tensor) else t for t in tensors]
    is_trained = torch.is_grad_enabled()
    return tensors, [is_trained and isinstance(t, Tensor) and t.requires_grad for t in tensors]


def unless_one(factor: Any) -> Any:
    """A factor or divisor of logits; None for 1, which changes nothing."""
    return None if type(factor) in (float, int) and factor == 1 else factor
