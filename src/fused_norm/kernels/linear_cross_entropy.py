"""The cross entropy of a linear's output, which is never whole in memory: the vocabulary head of a model, and its loss.

The forward computes what autograd would compute in its backward, while it has the logits of a chunk; the backward
multiplies it by the gradient of the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .arguments import Unsupported, check_choice
from .backward import BackwardArguments, KernelBackward, backward_impl
from .operator import Results
from .plain_calls import is_grad_needed
from .triton.call import Call
from .vocabulary_head import (
    IGNORED,
    Head,
    HeadOperator,
    HeadResults,
    by_chunks,
    check_head,
    head_logits,
    head_tensors,
    launch_multiply,
    unless_one,
)


class LinearCrossEntropy(HeadOperator):
    """``linear_cross_entropy`` as an operator."""

    name = "linear_cross_entropy"
    tensors = "Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? num_items"
    options = (
        "str reduction, int ignore_index, float label_smoothing, float? logit_scale, float? softcap,"
        " bool in_fp32, int? max_labels, bool[] trained"
    )
    outputs = ("loss",)
    other_rules = ("weight", "bias", "target", "num_items")
    saved = f"{tensors}, Tensor? x_grad, Tensor? weight_grad, Tensor? bias_grad"
    saved_scalars = options

    def check_options(self, *arguments: Any) -> Unsupported | None:
        x, weight, bias, target, num_items, reduction, ignored, smoothing, scale, cap, _, most, _ = arguments
        tensors, numbers = (x, weight, bias, target), {"label_smoothing": smoothing, "logit_scale": scale}
        refusal = check_head(tensors, ignored, most, numbers=numbers, positive={"softcap": cap})
        refusal = refusal or check_choice("reduction", reduction, ("mean", "sum"))
        if refusal is not None:
            return refusal
        if num_items is not None:
            if not isinstance(num_items, Tensor) or num_items.numel() != 1 or num_items.requires_grad:
                return Unsupported("num_items must be a number, or a tensor of one that needs no gradient", TypeError)
            if reduction != "mean":
                return Unsupported("num_items is what a mean is taken over: reduction must be 'mean'", ValueError)
        if not 0 <= smoothing <= 1:
            return Unsupported(f"label_smoothing must be between 0 and 1, not {smoothing}", ValueError)
        return None

    def reference(self, *arguments: Any) -> Tensor:
        x, weight, bias, target, num_items, reduction, ignored, smoothing, scale, cap, in_fp32, *_ = arguments
        loss = torch.nn.functional.cross_entropy(
            head_logits(x, weight, bias, scale, cap, None, in_fp32),
            target.reshape(-1),
            ignore_index=ignored,
            reduction=reduction if num_items is None else "sum",
            label_smoothing=smoothing,
        )
        return loss if num_items is None else loss / num_items.to(loss.device)

    def _launched(self, *arguments: Any) -> Any:
        is_trained = is_grad_needed(arguments[: self.tensor_count])
        return _apply_eager(*arguments) if is_trained else super()._launched(*arguments)

    def empty_results(self, call: Call, *arguments: Any, training: bool) -> Results:
        x, weight, bias, *_ = arguments
        kept = _kept_gradients(arguments, training)
        return call.empty(x, (), torch.float32), *map(call.empty_weight_like, (x, weight, bias), kept)

    def forward(self, call: Call, *arguments: Any, training: bool) -> Results:
        _, _, _, target, num_items, reduction, ignored, *_ = arguments
        divisor = _divisor(target, num_items, reduction, ignored)
        gradient = None if divisor is None else divisor.reciprocal()
        results = _by_chunks(arguments, gradient, _kept_gradients(arguments, training))
        total = results.losses.sum()
        return (total if divisor is None else total / divisor, *results.grads)

    def backward(self, call: Call, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (dloss,), (x, weight, bias, target, num_items, *grads) = given.incoming, given.saved
        if all(grad is not None and grad.numel() for grad, need in zip(grads, given.needed, strict=True) if need):
            # Not in place: whoever has traced this may run it once more. 0 stays 0: rows without a label have no
            # gradient of a loss that is NaN or infinite.
            pairs = zip(grads, given.needed, strict=True)
            return tuple((grad * dloss).masked_fill(grad == 0, 0.0) if need else None for grad, need in pairs)
        return _gradients((x, weight, bias, target, num_items, *given.saved_scalars), dloss, given.needed)


class _Eager(torch.autograd.Function):
    """The autograd function of calls that are not traced: its backward scales the forward's gradients in place."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        loss, *ctx.grads = LINEAR_CROSS_ENTROPY.forward(Call(), *arguments, training=True)
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
        given = BackwardArguments((dloss,), (*tensors, None, None, None), ctx.options, needed)
        impl = backward_impl(given)
        if not isinstance(impl, KernelBackward):
            ctx.grads = grads
            return *LINEAR_CROSS_ENTROPY.compute_grads(impl, given), *others
        if grads is None or any(grad is None for grad, need in zip(grads, needed, strict=True) if need):
            return *_gradients((*tensors, *ctx.options), dloss, needed), *others
        factor = dloss.float().reshape(1)
        for grad in grads:
            if grad is not None:
                Call.at_once(launch_multiply, grad, factor)
        return *grads, *others


_apply_eager: Any = super(torch.autograd.Function, _Eager).apply
LINEAR_CROSS_ENTROPY = LinearCrossEntropy()


def _kept_gradients(arguments: Sequence[Any], training: bool) -> Sequence[bool]:
    """Which gradients the forward computes for the backward: of x, weight and bias."""
    x, *_, trained = arguments
    # In fp16 gradients need the scale that the backward brings.
    kept: Sequence[bool] = trained if training and x.dtype != torch.float16 else (False,) * 3
    return kept


def _divisor(target: Tensor, num_items: Tensor | None, reduction: str, ignored: int) -> Tensor | None:
    """The divisor of the sum of losses, one float32; None for 1."""
    if num_items is not None:
        return num_items.to(target.device, torch.float32)
    return None if reduction == "sum" else (target != ignored).sum().float()


def _gradients(arguments: Sequence[Any], dloss: Tensor, needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight and bias, those ``needed``, for this gradient of the loss."""
    divisor = _divisor(*arguments[3:7])
    return _by_chunks(arguments, dloss.float() if divisor is None else dloss.float() / divisor, needed).grads


def _by_chunks(arguments: Sequence[Any], gradient: Tensor | None, trained: Sequence[bool]) -> HeadResults:
    """``by_chunks`` of the operator's arguments; ``gradient``: that of a row's loss, one float32, None for 1."""
    x, weight, bias, target, _, _, ignored, smoothing, scale, cap, in_fp32, most, _ = arguments
    options = {"ignored": ignored, "scale": scale, "cap": cap, "smoothing": smoothing or None, "in_fp32": in_fp32}
    head = Head(LINEAR_CROSS_ENTROPY.name, x, weight, bias, target, most, options)
    return by_chunks(head, trained, None if gradient is None else gradient.reshape(()))


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
    (x, weight, bias), trained = head_tensors(input, linear_weight, linear_bias)
    if isinstance(num_items, Real) and not isinstance(num_items, bool):
        num_items = torch.full((), float(num_items), dtype=torch.float32, device=getattr(target, "device", None))
    scale = unless_one(logit_scale)
    options = reduction, ignore_index, label_smoothing, scale, softcap, logits_in_fp32, max_labels, trained
    loss: Tensor = LINEAR_CROSS_ENTROPY.checked(x, weight, bias, target, num_items, *options)
    return loss
