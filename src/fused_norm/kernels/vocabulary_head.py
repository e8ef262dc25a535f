"""The vocabulary head of a model, whose logits are never whole in memory: what the operators that need them share.

From top to bottom: Triton kernels and their launchers, the way through a head in chunks of rows, and checks of
arguments. Both operators have the same kernels, and stand in files of their own, ``linear_cross_entropy`` and
``linear_log_probs``.

The rows go through in chunks. A product computes the logits of a chunk, one kernel what is wanted of them and, over the
logits, their gradients, and two products the gradients of the rows and of the weight.

A row of V logits has one loss: the log of the sum of exponentials, less the logit at the row's label, which is the
label's log-probability with the other sign. On request a row has its entropy and other statistics of its
probabilities. The row is read twice, once for the maximum and the sums, once more for the gradient, which is written
over it. In between, a row of capped logits holds their tanh.

In kernels ``m`` and ``s`` are a lane's maximum so far and its sum of exp(x - m); ``top`` and ``total`` are those of the
row. ``weighted`` is the sum of exp(x - m) * (x - m), ``squares`` that of exp(x - m)^2, and ``total_x`` that of x.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import Unsupported, check_tensor, why_other_dtype
from .autocast import autocast_dtype, set_autocast
from .backward import BackwardArguments, Grads
from .operator import Operator
from .plans import next_power_of_2
from .reference import wide_dtype
from .triton.call import Call
from .triton.devices import INTERPRETED, device_props
from .triton.language import interpreted, round_to


@triton.jit
def _tanh(x):
    """tanh in fp32: a polynomial near 0, where ``1 - 2 / (e^2x + 1)`` cancels; relative error below 4e-7.

    Nothing bounds x: e^2x may be inf, and ``tl.minimum`` makes a number of NaN on a GPU.
    """
    u = x * x
    p = -0.05379083380103111 + u * (0.02081829123198986 - u * 0.005919910501688719)
    near = x + x * u * (-0.33333301544189453 + u * (0.13332012295722961 + u * p))
    size = tl.abs(x)
    far = 1 - 2 / (tl.exp(2 * size) + 1)
    return tl.where(size < 0.6, near, tl.where(x < 0, -far, far))


@triton.jit
def _load(row_ptr, col, V, fill, MASKED: tl.constexpr):
    x = tl.load(row_ptr + col, mask=col < V, other=fill) if MASKED else tl.load(row_ptr + col)
    return x.to(tl.float32)


@triton.jit
def _transformed(x, options, dtype: tl.constexpr):
    """Logits times the scale, capped, over the temperature, and the tanh; each operation is rounded to ``dtype``."""
    scale, _, inverse_cap, _, _ = options
    tanh = x
    if scale is not None:
        x = round_to(x * scale, dtype)
    if inverse_cap is not None:
        tanh = round_to(_tanh(round_to(x * inverse_cap, dtype)), dtype)
        x = tanh
    return _after_tanh(x, options, dtype), tanh


@triton.jit
def _after_tanh(x, options, dtype: tl.constexpr):
    """Multiply a tanh by the cap, and logits by the inverse temperature: the end of ``_transformed``."""
    _, cap, _, inverse_temperature, _ = options
    if cap is not None:
        x = round_to(x * cap, dtype)
    if inverse_temperature is not None:
        x = round_to(x * inverse_temperature, dtype)
    return x


@triton.jit
def _store(row_ptr, col, V, value, MASKED: tl.constexpr):
    """Write numbers that are rounded to the dtype of the row already."""
    value = value.to(row_ptr.dtype.element_ty)
    if MASKED:
        tl.store(row_ptr + col, value, mask=col < V)
    else:
        tl.store(row_ptr + col, value)


@triton.jit
def _statistics_step(
    row_ptr, col, V, lanes, options, statistics, dtype: tl.constexpr, KEEPS_TANH: tl.constexpr, MASKED: tl.constexpr
):
    """The statistics of each lane, ``lanes``, with one more block of logits; those that nobody wants stay 0.

    KEEPS_TANH: the tanh of the logits is written over them, for ``_gradient_step``.
    """
    m, s, total_x, weighted, squares = lanes
    HAS_MEAN, HAS_ENTROPY, HAS_SQUARES = statistics
    x, tanh = _transformed(_load(row_ptr, col, V, 0.0, MASKED), options, dtype)
    if KEEPS_TANH:
        _store(row_ptr, col, V, tanh, MASKED)
    if HAS_MEAN:
        total_x += tl.sum(tl.where(col < V, x, 0.0), 1)
    if MASKED:
        x = tl.where(col < V, x, -1e38)  # finite: a lane without logits computes no inf - inf
    m_new = tl.maximum(m, tl.max(x, 1))
    shift, x = m - m_new, x - m_new[:, None]
    shrink, e = tl.exp(shift), tl.exp(x)
    if HAS_ENTROPY:
        # A logit of -inf adds nothing: 0 * inf is no number.
        weighted = shrink * (weighted + shift * s) + tl.sum(e * tl.where(e > 0, x, 0.0), 1)
    if HAS_SQUARES:
        squares = squares * (shrink * shrink) + tl.sum(e * e, 1)
    s = s * shrink + tl.sum(e, 1)
    return m_new, s, total_x, weighted, squares


@triton.jit
def _gradient_step(
    row_ptr, col, V, label, top, total, share, of_entropy, options,
    dtype: tl.constexpr, KEEPS_TANH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block of logits over it; ``share`` is the gradient of the row's loss over ``total``.

    of_entropy: the gradient of the row's entropy over ``total``, and the entropy less the log of ``total``; or None.
    """
    scale, cap, inverse_cap, inverse_temperature, smoothing = options
    x = _load(row_ptr, col, V, 0.0, MASKED)
    if KEEPS_TANH:
        tanh = x
        x = _after_tanh(x, options, dtype)
    else:
        x, tanh = _transformed(x, options, dtype)
    e = tl.exp(x - top)
    if smoothing is None:
        d = tl.where(col == label, e - total, e) * share
    else:
        at_label = tl.where(col == label, 1.0 - smoothing, 0.0)
        d = (e - total * (at_label + smoothing / V)) * share
    entropy_share, excess = of_entropy
    if entropy_share is not None:
        # The log of a probability is x - top - log(total). A probability of 0 has no gradient.
        d -= e * tl.where(e > 0, x - top + excess, 0.0) * entropy_share
    d = round_to(d, dtype)
    if inverse_temperature is not None:
        d = round_to(d * inverse_temperature, dtype)
    if cap is not None:
        d = round_to(d * cap, dtype)
        # PyTorch rounds the slope, and the square in it, on a GPU and not on a CPU.
        slope = 1 - tanh * tanh if interpreted else round_to(1 - round_to(tanh * tanh, dtype), dtype)
        d = round_to(d * slope, dtype)
        d = round_to(d * inverse_cap, dtype)
    if scale is not None:
        d = round_to(d * scale, dtype)
    _store(row_ptr, col, V, round_to(d, row_ptr.dtype.element_ty), MASKED)


@triton.jit
def _store_if_wanted(ptr, row, value):
    if ptr is not None:
        tl.store(ptr + row, value)


@triton.jit
def _cross_entropy_kernel(
    logits_ptr,  # [M, V]; with GRAD their gradient is written over them
    labels_ptr,  # [M] int64
    losses_ptr,  # [M] fp32
    gradient_ptr,  # fp32, the gradients of the losses: [M] with BY_ROW, else one for all rows; None without GRAD
    entropy_gradient_ptr,  # [M] fp32, or None
    entropies_ptr, largest_ptr, means_ptr, squares_ptr,  # [M] fp32 each, or None
    V, stride, ignored,
    scale, cap, inverse_cap, inverse_temperature, smoothing,
    GRAD: tl.constexpr, BY_ROW: tl.constexpr, IN_FP32: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = LANES * VECTOR
    # With IN_FP32 scale, cap and temperature are operations on logits that were cast to fp32 before.
    dtype: tl.constexpr = tl.float32 if IN_FP32 else logits_ptr.dtype.element_ty
    options = scale, cap, inverse_cap, inverse_temperature, smoothing
    # To write a tanh and read it again is faster than to compute it twice: 3.0 ms instead of 4.3 for 4096 x 262144.
    KEEPS_TANH: tl.constexpr = GRAD and cap is not None and dtype == logits_ptr.dtype.element_ty
    HAS_MEAN: tl.constexpr = smoothing is not None or means_ptr is not None
    HAS_ENTROPY: tl.constexpr = entropies_ptr is not None or entropy_gradient_ptr is not None
    HAS_LARGEST: tl.constexpr = largest_ptr is not None
    statistics = HAS_MEAN, HAS_ENTROPY, squares_ptr is not None
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    tile = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    whole = V // BLOCK
    label = tl.load(labels_ptr + row)
    if label == ignored:
        tl.store(losses_ptr + row, 0.0)
        _store_if_wanted(entropies_ptr, row, 0.0)
        _store_if_wanted(largest_ptr, row, 0.0)
        _store_if_wanted(means_ptr, row, 0.0)
        _store_if_wanted(squares_ptr, row, 0.0)
        if GRAD:
            zero = tl.zeros([LANES, VECTOR], logits_ptr.dtype.element_ty)
            for block in range(whole):
                tl.store(row_ptr + (block * BLOCK + tile), zero)
            tl.store(row_ptr + (whole * BLOCK + tile), zero, mask=whole * BLOCK + tile < V)
    else:
        # Before the gradient overwrites it. An invalid label makes the loss NaN.
        is_valid = (label >= 0) & (label < V)
        at_label = tl.load(row_ptr + label, mask=is_valid, other=float("nan")).to(tl.float32)
        if KEEPS_TANH:  # all warps read it before one of them writes a tanh over it
            tl.debug_barrier()
        at_label, _ = _transformed(at_label, options, dtype)
        column = tl.where(is_valid, label, -1).to(tl.int32)
        zeros = tl.zeros([LANES], tl.float32)
        lanes = tl.full([LANES], -1e38, tl.float32), zeros, zeros, zeros, zeros
        begin = 0
        if HAS_LARGEST:
            begin = tl.maximum(column, 0) // BLOCK
            for block in range(begin):
                col = block * BLOCK + tile
                lanes = _statistics_step(row_ptr, col, V, lanes, options, statistics, dtype, KEEPS_TANH, False)
            # The largest logit before the label: argmax takes the first of equal ones.
            col = begin * BLOCK + tile
            x, _ = _transformed(_load(row_ptr, col, V, 0.0, True), options, dtype)
            before = tl.maximum(tl.max(lanes[0], 0), tl.max(tl.max(tl.where(col < column, x, -1e38), 1), 0))
            if KEEPS_TANH:
                tl.debug_barrier()
        for block in range(begin, whole):
            col = block * BLOCK + tile
            lanes = _statistics_step(row_ptr, col, V, lanes, options, statistics, dtype, KEEPS_TANH, False)
        if whole * BLOCK < V:
            col = whole * BLOCK + tile
            lanes = _statistics_step(row_ptr, col, V, lanes, options, statistics, dtype, KEEPS_TANH, True)
        m, s, total_x, weighted, squares = lanes
        top = tl.max(m, 0)
        shift = m - top
        shrink = tl.exp(shift)
        total = tl.sum(s * shrink, 0)
        log_total = tl.log(total)
        mean_x = tl.sum(total_x, 0) / V
        if smoothing is None:
            loss = log_total + (top - at_label)
        else:
            loss = log_total + (1.0 - smoothing) * (top - at_label) + smoothing * (top - mean_x)
        tl.store(losses_ptr + row, loss)
        _store_if_wanted(means_ptr, row, mean_x)
        if HAS_ENTROPY:
            # A lane without logits adds nothing: its shift times s may be inf.
            inside = tl.sum(shrink * (weighted + tl.where(shrink > 0, shift, 0.0) * s), 0) / total
            _store_if_wanted(entropies_ptr, row, log_total - inside)
        if squares_ptr is not None:
            tl.store(squares_ptr + row, tl.log(tl.sum(squares * (shrink * shrink), 0)) - 2 * log_total)
        if HAS_LARGEST:  # of a row with NaN or inf, none is
            is_largest = (at_label >= top) & (before < at_label) & (total == total)
            tl.store(largest_ptr + row, tl.where(is_largest, 1.0, 0.0))
        if GRAD:
            share = tl.load(gradient_ptr + (row if BY_ROW else 0)) / total
            of_entropy = None, None
            if entropy_gradient_ptr is not None:
                of_entropy = tl.load(entropy_gradient_ptr + row) / total, -inside
            # From the end: what was read last is still in the L2 cache.
            if whole * BLOCK < V:
                col = whole * BLOCK + tile
                _gradient_step(row_ptr, col, V, column, top, total, share, of_entropy, options, dtype, KEEPS_TANH, True)
            for block in range(whole):
                col = (whole - 1 - block) * BLOCK + tile
                _gradient_step(
                    row_ptr, col, V, column, top, total, share, of_entropy, options, dtype, KEEPS_TANH, False
                )


@triton.jit
def _multiply_kernel(x_ptr, factor_ptr, size, BLOCK: tl.constexpr):
    """``x *= factor``; nothing is read if the factor is 1. 0 stays 0: rows without a label have no gradient."""
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
        x = tl.where(x == 0.0, x, x * factor)
        tl.store(x_ptr + at, round_to(x, x_ptr.dtype.element_ty).to(x_ptr.dtype.element_ty), mask=at < size)


_LANES, _WARPS = 1024, 32
"""Lanes of a program, each with ``_VECTOR`` logits at a time: 16 bytes of 16-bit logits. On an H200 the kernel moves
2.7 TB/s, one read and one write counted."""

_VECTOR = 8

_REGISTERS = 32
"""Of a lane, so that a processor of NVIDIA's with 65536 of them runs two programs. 16-bit logits need no more, but for
capped ones; left alone, the compiler takes up to 53 for a gradient beside an entropy, and one program runs."""

_MULTIPLIED = 8192
"""Elements that one program multiplies."""


class Statistics(NamedTuple):
    """Outputs of a kernel for each row besides its loss, [M] float32 each, or None; ignored rows get 0."""

    entropies: Tensor | None = None
    are_largest: Tensor | None = None  # 1 if argmax of the row is its label, else 0
    means: Tensor | None = None  # of the logits
    log_squares: Tensor | None = None  # the log of the sum of squared probabilities


def launch_cross_entropy(
    call: Call,
    logits: Tensor,
    labels: Tensor,
    losses: Tensor,
    gradient: Tensor | None,
    *,
    ignored: int,
    scale: float | None = None,
    cap: float | None = None,
    temperature: float | None = None,
    smoothing: float | None = None,
    in_fp32: bool = False,
    statistics: Statistics | None = None,
    entropy_gradient: Tensor | None = None,
) -> None:
    """Write the losses [M] of rows of logits [M, V], and with ``gradient`` the gradient of logits over them.

    Args:
        call: the call that launches.
        logits: rows of one stride, elements side by side.
        labels: [M], int64, side by side.
        losses: [M], float32.
        gradient: float32, the gradient of the losses, [M] or, if it is the same for all, []; None leaves the logits as
            they are.
        ignored: the label of rows whose loss is 0, and has no gradient.
        scale: what logits are multiplied by; None is 1.
        cap: of the logits, after the scale: ``cap * tanh(logits / cap)``.
        temperature: what logits are divided by in the end; None is 1.
        smoothing: the share of the target that all labels have in common, in place of the row's own.
        in_fp32: scale, cap and temperature are not rounded to the dtype of the logits.
        statistics: what to write besides; None is nothing.
        entropy_gradient: [M], float32, that of the entropies, if ``gradient`` is given too; None is 0.
    """
    rows, vocabulary = logits.shape
    lanes, device = _LANES, device_props(logits.device)
    if INTERPRETED:  # which takes its time for a step, not for the numbers in it
        lanes = max(1, min(_LANES, next_power_of_2(-(-vocabulary // _VECTOR))))
    inverses = [None if number is None else 1 / number for number in (cap, temperature)]
    has_gradient, by_row = gradient is not None, gradient is not None and gradient.dim() > 0
    call.launch(
        _cross_entropy_kernel,
        (rows, 1),
        (logits, labels, losses, gradient, entropy_gradient, *(statistics or Statistics())),
        (vocabulary, logits.stride(0), ignored, scale, cap, *inverses, smoothing),
        {"GRAD": has_gradient, "BY_ROW": by_row, "IN_FP32": in_fp32, "LANES": lanes, "VECTOR": _VECTOR},
        warps=device.warps(_WARPS),
        registers=_REGISTERS if logits.element_size() == 2 and cap is None and device.limits_registers else None,
        fuse=cap is None,  # the square in the slope of tanh is rounded before 1 takes it away
    )


def launch_multiply(call: Call, x: Tensor, factor: Tensor) -> None:
    """``x *= factor``, a float32 tensor of one element on x's device, which the host never looks at."""
    blocks, warps = -(-x.numel() // _MULTIPLIED), device_props(x.device).warps(8)
    call.launch(_multiply_kernel, (blocks, 1), (x, factor), (x.numel(),), {"BLOCK": _MULTIPLIED}, warps=warps)


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


def head_logits(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: float | None,
    cap: float | None,
    temperature: float | None,
    in_fp32: bool,
) -> Tensor:
    """The logits of a head, [rows, V], at least in fp32."""
    logits = torch.nn.functional.linear(x, weight, bias)
    wide = wide_dtype(logits.dtype)
    logits = logits.to(wide) if in_fp32 else logits
    logits = logits if scale is None else logits * scale
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    logits = logits if temperature is None else logits / temperature
    return logits.to(wide).reshape(-1, len(weight))
