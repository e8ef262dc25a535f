"""The cross entropy of a linear's output, which is never whole in memory: the vocabulary head of a model, and its loss.

The rows go through in chunks. A product computes the logits of a chunk, one kernel their losses and, over the logits,
their gradients, and two products the gradients of the rows and of the weight. So the forward computes what autograd
would compute in its backward; the backward multiplies it by the gradient of the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from . import reference
from .arguments import Unsupported, check_choice, check_tensor, why_other_dtype
from .autocast import autocast_dtype, set_autocast
from .operator import BackwardCall, Operator, Results, backward_impl, is_grad_needed, kernel_backward
from .triton.cross_entropy_kernels import launch_cross_entropy, launch_multiply
from .triton.memory import empty_weight_like

IGNORED = -100
"""The label of rows that have none, unless ``ignore_index`` says otherwise."""

MOST_ROWS, MOST_BYTES = 2048, 2**30
"""Rows of a chunk, and bytes of its logits, at most. On an H200 chunks of 4096 rows are up to 4 % faster and take twice
the memory; chunks of 1024 are 8 to 15 % slower."""

_MULTIPLE = 128
"""Rows of a chunk are a multiple of it, as tiles of products are."""

_ALIGNED = 64
"""Elements that rows of logits begin at multiples of: cuBLAS and kernels read 16 bytes at a time."""


class LinearCrossEntropy(Operator):
    """``linear_cross_entropy`` as an operator."""

    name = "linear_cross_entropy"
    tensors = "Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? num_items"
    options = (
        "str reduction, int ignore_index, float label_smoothing, float? logit_scale, float? softcap,"
        " bool in_fp32, int? max_labels, bool[] trained"
    )
    outputs = ("loss",)
    other_rules = ("weight", "bias", "target", "num_items")
    takes_dtensors = False
    extra_saved = ("x_grad", "weight_grad", "bias_grad")
    saved = f"{tensors}, Tensor? x_grad, Tensor? weight_grad, Tensor? bias_grad"
    saved_scalars = options
    has_products = True
    gradients = ("dx", "dweight", "dbias")

    def check_options(self, *arguments: Any) -> Unsupported | None:
        x, weight, bias, target, num_items, reduction, ignored, smoothing, scale, cap, _, most, _ = arguments
        for name, tensor in (("linear_weight", weight), ("linear_bias", bias)):
            if tensor is not None and (refusal := check_tensor(name, tensor, ("input", x))) is not None:
                return refusal
        refusal = _check_target(x, weight, bias, target) or check_choice("reduction", reduction, ("mean", "sum"))
        if refusal is not None:
            return refusal
        if num_items is not None:
            if not isinstance(num_items, Tensor) or num_items.numel() != 1 or num_items.requires_grad:
                return Unsupported("num_items must be a number, or a tensor of one that needs no gradient", TypeError)
            if reduction != "mean":
                return Unsupported("num_items is what a mean is taken over: reduction must be 'mean'", ValueError)
        for name, value in (("ignore_index", ignored), ("max_labels", 0 if most is None else most)):
            if isinstance(value, bool) or not isinstance(value, int):
                return Unsupported(f"{name} must be an int, not {value!r}", TypeError)
        for name, value in (("label_smoothing", smoothing), ("logit_scale", scale), ("softcap", cap)):
            if value is not None and (not isinstance(value, Real) or isinstance(value, bool)):
                return Unsupported(f"{name} must be a Python number, not {type(value).__name__}", TypeError)
        if not 0 <= smoothing <= 1:
            return Unsupported(f"label_smoothing must be between 0 and 1, not {smoothing}", ValueError)
        if cap is not None and not cap > 0:
            return Unsupported(f"softcap must be positive, not {cap}", ValueError)
        return None

    def why_reference_only(self, *arguments: Any) -> Unsupported | None:
        x, weight, bias, target, *_ = arguments
        if not all(t.numel() for t in (x, weight, target)):
            return Unsupported("")
        reason = why_other_dtype("weight", "x", weight, x) or why_other_dtype(
            "bias", "x", x if bias is None else bias, x
        )
        return None if reason is None else Unsupported(reason)

    def reference(self, *arguments: Any) -> Tensor:
        return reference.linear_cross_entropy(*arguments[:-2])

    def _recorded(self, arguments: tuple[Any, ...]) -> Any:
        return None  # products and checks of labels are steps that a recording cannot repeat

    def _launched(self, *arguments: Any) -> Any:
        is_trained = is_grad_needed(arguments[: self.tensor_count])
        return _apply_eager(*arguments) if is_trained else super()._launched(*arguments)

    def forward(self, *arguments: Any, training: bool, launch: bool = True) -> Results:
        x, weight, bias, target, num_items, reduction, ignored, *_, trained = arguments
        if not training or x.dtype == torch.float16:  # whose gradients need the scale that the backward brings
            trained = (False,) * 3
        if not launch:
            return (x.new_empty((), dtype=torch.float32), *map(empty_weight_like, (x, weight, bias), trained))
        divisor = _divisor(target, num_items, reduction, ignored)
        losses, *grads = _by_chunks(arguments, None if divisor is None else divisor.reciprocal(), trained)
        total = losses.sum()
        return (total if divisor is None else total / divisor, *grads)

    def backward(self, call: BackwardCall, *, launch: bool = True) -> tuple[Tensor | None, ...]:
        (dloss,), (x, weight, bias, target, num_items, *grads) = call.incoming, call.saved
        if not launch:
            return tuple(map(empty_weight_like, (x, weight, bias), call.needed))
        if all(grad is not None and grad.numel() for grad, need in zip(grads, call.needed, strict=True) if need):
            # Not in place: whoever has traced this may run it once more. 0 stays 0: rows without a label have no
            # gradient of a loss that is NaN or infinite.
            pairs = zip(grads, call.needed, strict=True)
            return tuple((grad * dloss).masked_fill(grad == 0, 0.0) if need else None for grad, need in pairs)
        return _gradients((x, weight, bias, target, num_items, *call.saved_scalars), dloss, call.needed)


class _Eager(torch.autograd.Function):
    """The autograd function of calls that are not traced: its backward scales the forward's gradients in place."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        loss, *ctx.grads = LINEAR_CROSS_ENTROPY.forward(*arguments, training=True)
        ctx.save_for_backward(*arguments[: LINEAR_CROSS_ENTROPY.tensor_count])
        ctx.set_materialize_grads(False)
        ctx.options = arguments[LINEAR_CROSS_ENTROPY.tensor_count :]
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        needed, others = ctx.needs_input_grad[:3], (None,) * 10
        if dloss is None:
            return None, None, None, *others
        tensors = ctx.saved_tensors
        call = BackwardCall((dloss,), (*tensors, None, None, None), ctx.options, needed)
        impl = backward_impl(call)
        if impl is not kernel_backward:
            ctx.grads = grads
            return *LINEAR_CROSS_ENTROPY.compute_grads(impl, call), *others
        if grads is None or any(grad is None for grad, need in zip(grads, needed, strict=True) if need):
            return *_gradients((*tensors, *ctx.options), dloss, needed), *others
        factor = dloss.float().reshape(1)
        for grad in grads:
            if grad is not None:
                launch_multiply(grad, factor)
        return *grads, *others


_apply_eager: Any = super(torch.autograd.Function, _Eager).apply
LINEAR_CROSS_ENTROPY = LinearCrossEntropy()


def _divisor(target: Tensor, num_items: Tensor | None, reduction: str, ignored: int) -> Tensor | None:
    """The divisor of the sum of losses, one float32; None for 1."""
    if num_items is not None:
        return num_items.to(target.device, torch.float32)
    return None if reduction == "sum" else (target != ignored).sum().float()


def _gradients(arguments: Sequence[Any], dloss: Tensor, needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight and bias, those ``needed``, for this gradient of the loss."""
    divisor = _divisor(*arguments[3:7])
    return tuple(_by_chunks(arguments, dloss.float() if divisor is None else dloss.float() / divisor, needed)[1:])


def chunk_rows(rows: int, vocabulary: int, itemsize: int) -> int:
    """The number of rows in a chunk: chunks are of one size, as few as the limits allow."""
    most = max(_MULTIPLE, min(MOST_ROWS, MOST_BYTES // (vocabulary * itemsize) // _MULTIPLE * _MULTIPLE))
    chunks = -(-rows // most)
    return min(rows, -(-rows // (chunks * _MULTIPLE)) * _MULTIPLE)


def _by_chunks(
    arguments: Sequence[Any], gradient: Tensor | None, trained: Sequence[bool]
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The losses of rows with a label, in float32, and the gradients of x, weight and bias that are ``trained``.

    ``gradient``: that of a row's loss, one float32; None for 1.
    """
    x, weight, bias, target, _, _, ignored, smoothing, scale, cap, in_fp32, most, _ = arguments
    train_x, train_weight, train_bias = trained
    vocabulary, width = weight.shape
    all_rows, labels = x.reshape(-1, width), target.reshape(-1).contiguous()
    _check_labels(labels, vocabulary, ignored, most)
    rows, order = all_rows, None
    if most is not None and most < len(labels):
        order = torch.argsort((labels == ignored).to(torch.uint8), stable=True)[: max(1, most)]
        rows, labels = all_rows[order], labels[order]
    count = len(rows)
    losses = x.new_empty(count, dtype=torch.float32)
    if gradient is None:
        gradient = losses.new_ones(1)
    dx = rows.new_empty(rows.shape) if train_x else None
    chunk = chunk_rows(count, vocabulary, x.element_size())
    sum_dtype = x.dtype if chunk >= count else torch.float32
    dweight = weight.new_empty(weight.shape, dtype=sum_dtype) if train_weight else None
    dbias = weight.new_zeros(vocabulary, dtype=torch.float32) if train_bias else None
    kernel_gradient = gradient.reshape(1) if any(trained) else None
    # A CPU's products in bf16 (PyTorch 2.13) read what lies between rows.
    columns = -(-vocabulary // _ALIGNED) * _ALIGNED if x.is_cuda else vocabulary
    with torch.no_grad(), set_autocast(x.device.type, None):
        buffer = x.new_empty((chunk, columns))[:, :vocabulary]
        for start in range(0, count, chunk):
            part = slice(start, min(start + chunk, count))
            inputs = rows[part]
            logits = buffer[: len(inputs)]
            _multiply(logits, inputs, weight.t(), bias)
            launch_cross_entropy(
                logits, labels[part], losses[part], kernel_gradient,
                ignored=ignored, scale=scale, cap=cap, smoothing=smoothing or None, in_fp32=in_fp32,
            )  # fmt: skip
            if dx is not None:
                _multiply(dx[part], logits, weight)
            if dweight is not None:
                _multiply(dweight, logits.t(), inputs, dweight if start else None)
            if dbias is not None:
                dbias += logits.sum(0, dtype=torch.float32)
        del buffer, logits
        if dx is not None:
            dx = dx if order is None else torch.zeros_like(all_rows).index_copy_(0, order, dx)
            dx = dx.view(x.shape)
        dweight = None if dweight is None else dweight.to(weight.dtype)
        dbias = None if dbias is None else dbias.to(weight.dtype)
    return losses, dx, dweight, dbias


def _check_labels(labels: Tensor, vocabulary: int, ignored: int, most: int | None) -> None:
    """Raise for labels outside of the vocabulary; on a GPU as PyTorch does, by an assertion that nobody waits for."""
    has_label = labels != ignored
    are_valid = ((labels >= 0) & (labels < vocabulary) | ~has_label).all()
    if labels.device.type == "cpu":
        if not are_valid:
            label = labels[has_label & ((labels < 0) | (labels >= vocabulary))][0]
            raise IndexError(f"linear_cross_entropy: target {int(label)} is out of bounds for {vocabulary} classes")
        if most is not None and has_label.sum() > most:
            raise ValueError(f"linear_cross_entropy: {int(has_label.sum())} rows have a label, max_labels is {most}")
        return
    torch._assert_async(are_valid, "linear_cross_entropy: a target is out of bounds")
    if most is not None:
        torch._assert_async(has_label.sum() <= most, "linear_cross_entropy: more than max_labels rows have a label")


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


def linear_cross_entropy(
    input: Tensor,  # noqa: A002 -- PyTorch's name for it
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    num_items: Tensor | float | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    logits_in_fp32: bool = False,
    max_labels: int | None = None,
) -> Tensor:
    """The cross entropy of ``linear(input, linear_weight, linear_bias)`` and ``target``, without holding these logits.

    It is the loss that language models of transformers compute: logits rounded to their dtype, then to float32, then
    ``torch.nn.functional.cross_entropy``. Arguments that ``torch.nn.functional.linear_cross_entropy`` has mean the same
    here. The forward computes the gradients, rounded as autograd rounds them; that of the weight is summed in float32.
    Calls repeat to the bit. In float16 the backward computes the gradients, as any second backward does.

    Args:
        input: [..., H], float32, bfloat16 or float16; the PyTorch reference computes float64, and DTensors. Under
            autocast it is cast as for a linear, and so are weight and bias.
        linear_weight: [V, H], of input's dtype.
        target: [...], int64, the label of each row.
        linear_bias: [V], of input's dtype, or None.
        reduction: ``"mean"`` over the rows with a label, or ``"sum"``.
        ignore_index: the label of rows that have none; it may be outside of the vocabulary.
        label_smoothing: from 0 to 1, as PyTorch's ``cross_entropy`` has it (Szegedy et al. 2015, arXiv 1512.00567).
        num_items: what the sum is divided by in place of the number of rows with a label: a number, or a tensor of one.
        logit_scale: what logits are multiplied by.
        softcap: ``softcap * tanh(logits / softcap)`` in place of logits, after their scale; None is without.
        logits_in_fp32: logits are cast to float32 before scale and softcap, and not after them.
        max_labels: at least the number of rows with a label, if the host knows one: the other rows are then left out of
            the products. None computes all rows.

    Returns:
        The loss, one float32 (float64 for an input of float64).

    Raises:
        TypeError: for anything but dense tensors of these dtypes, and for options that are not such numbers.
        ValueError: for wrong values, and incompatible shapes and devices.
        IndexError: for a target outside of the vocabulary, on a CPU; on a GPU the device asserts, as PyTorch's does.
    """
    x, weight, bias = input, linear_weight, linear_bias
    if isinstance(x, Tensor) and (dtype := autocast_dtype(x)) is not None and x.dtype != torch.float64:
        x, weight = x.to(dtype), weight.to(dtype) if isinstance(weight, Tensor) else weight
        bias = bias.to(dtype) if isinstance(bias, Tensor) else bias
    if isinstance(num_items, Real) and not isinstance(num_items, bool):
        num_items = torch.full((), float(num_items), dtype=torch.float32, device=getattr(target, "device", None))
    is_trained = torch.is_grad_enabled()
    trained = [is_trained and isinstance(t, Tensor) and t.requires_grad for t in (x, weight, bias)]
    scale = None if logit_scale == 1.0 else logit_scale
    options = reduction, ignore_index, label_smoothing, scale, softcap, logits_in_fp32, max_labels, trained
    loss: Tensor = LINEAR_CROSS_ENTROPY.checked(x, weight, bias, target, num_items, *options)
    return loss
