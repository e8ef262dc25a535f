"""The log-probabilities of labels under a linear's output, which is never whole in memory: a vocabulary head without a
loss of its own, as preference losses and policy gradients need it.

A gradient of log-probabilities is not known in the forward, so the logits are computed once more in the backward. There
are two exceptions: if the head is frozen, the forward computes each row's gradient for a gradient of 1, and the
backward multiplies it; and so it does for all gradients if the caller says that every row's gradient is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import KERNEL_DTYPES, Unsupported, check_flag
from .backward import BackwardArguments
from .operator import Results
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
    unless_one,
)


class LogProbs(NamedTuple):
    """The results of ``linear_log_probs``: float32, in the shape of the target, 0 for a row without a label.

    Attributes:
        log_probs: the log of the probability of each label.
        entropies: of each row's probabilities, in nats.
        are_largest: 1 if the label's logit is the row's largest, the first of several equal ones, else 0.
        mean_logits: the mean over the vocabulary of the logits that softmax takes.
        log_sums_of_squares: the log of the sum of squared probabilities.
    """

    log_probs: Tensor
    entropies: Tensor | None = None
    are_largest: Tensor | None = None
    mean_logits: Tensor | None = None
    log_sums_of_squares: Tensor | None = None


class LinearLogProbs(HeadOperator):
    """``linear_log_probs`` as an operator."""

    name = "linear_log_probs"
    tensors = "Tensor x, Tensor weight, Tensor? bias, Tensor target"
    options = (
        "int ignore_index, float? temperature, float? logit_scale, float? softcap, bool in_fp32, bool[] wanted,"
        " int? max_labels, ScalarType? dtype, bool uniform_grad, bool check_grad, bool recompute, bool[] trained"
    )
    outputs = LogProbs._fields
    not_differentiable = LogProbs._fields[2:]
    other_rules = ("weight", "bias", "target")
    saved = f"{tensors}, Tensor? x_grad, Tensor? weight_grad, Tensor? bias_grad"
    saved_scalars = options

    def check_options(self, *arguments: Any) -> Unsupported | None:
        *tensors, ignored, temperature, scale, cap, in_fp32, wanted, most, dtype, uniform, check, recompute, _ = (
            arguments
        )
        flags = "logits_in_fp32", *LogProbs._fields[1:], "uniform_grad", "check_grad", "recompute"
        for name, flag in zip(flags, (in_fp32, *wanted, uniform, check, recompute), strict=True):
            if (refusal := check_flag(name, flag)) is not None:
                return refusal
        if dtype is not None and dtype not in KERNEL_DTYPES:
            return Unsupported(f"dtype must be float32, bfloat16, float16 or None, not {dtype!r}", TypeError)
        positive = {"temperature": temperature, "softcap": cap}
        return check_head(tuple(tensors), ignored, most, numbers={"logit_scale": scale}, positive=positive)

    def why_reference_only(self, *arguments: Any) -> Unsupported | None:
        dtype = self.by_name(arguments)["dtype"]
        return super().why_reference_only(*(_cast(t, dtype, is_meta=True) for t in arguments[:3]), *arguments[3:])

    def reference(self, *arguments: Any) -> tuple[Tensor | None, ...]:
        """The log-probabilities; then entropies and three statistics without a gradient, None if not ``wanted``."""
        *tensors, target, ignored, temperature, scale, cap, in_fp32, wanted = arguments[:10]
        dtype = self.by_name(arguments)["dtype"]
        x, weight, bias = (_cast(t, dtype) for t in tensors)
        logits, labels = head_logits(x, weight, bias, scale, cap, temperature, in_fp32), target.reshape(-1)
        log_p, has_label = torch.log_softmax(logits, -1), labels != ignored
        log_probs = 0.0 - torch.nn.functional.nll_loss(log_p, labels, ignore_index=ignored, reduction="none")
        outputs: list[Tensor | None] = [log_probs.view(target.shape)]

        def entropies() -> Tensor:
            p = log_p.exp()
            return -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1)

        statistics = (
            entropies,
            lambda: ((logits.argmax(-1) == labels) & ~log_p.isnan().any(-1)).to(logits.dtype),
            lambda: logits.detach().mean(-1),
            lambda: torch.logsumexp(2 * log_p.detach(), -1),
        )
        for want, compute in zip(wanted, statistics, strict=True):
            outputs.append(compute().masked_fill(~has_label, 0.0).view(target.shape) if want else None)
        return tuple(outputs)

    def empty_results(self, call: Call, *arguments: Any, training: bool) -> Results:
        x, weight, bias, target, *_ = arguments
        wanted = self.by_name(arguments)["wanted"]
        kept = _kept_gradients(arguments) if training else (False,) * 3
        outputs = (call.empty(target, target.shape, torch.float32) if want else None for want in (True, *wanted))
        pairs = zip((x, weight, bias), kept, strict=True)
        return *outputs, *(call.empty_weight_like(tensor, keep, torch.float32) for tensor, keep in pairs)

    def forward(self, call: Call, *arguments: Any, training: bool) -> Results:
        x, _, _, target, *_ = arguments
        wanted = self.by_name(arguments)["wanted"]
        kept = _kept_gradients(arguments) if training else (False,) * 3
        gradient = x.new_full((), -1.0, dtype=torch.float32)  # of the loss, which is the negative log-probability
        losses, statistics, grads = _by_chunks(arguments, kept, gradient, wanted=wanted, grad_dtype=torch.float32)
        log_probs = 0.0 - losses  # a row without a label has 0, not -0
        return *(None if t is None else t.view(target.shape) for t in (log_probs, *statistics)), *grads

    def pack_outputs(self, arguments: Sequence[Any], results: Sequence[Any], *, trained: bool) -> tuple[Any, ...]:
        # A registered operator returns an empty tensor in place of one that nobody wants.
        wanted = self.by_name(arguments)["wanted"]
        return tuple([t if want else None for t, want in zip(results, (True, *wanted), strict=False)])

    def backward(self, call: Call, given: BackwardArguments) -> tuple[Tensor | None, ...]:
        (dlog_probs, dentropies, *_), (x, weight, bias, target, *grads) = given.incoming, given.saved
        arguments = x, weight, bias, target, *given.saved_scalars
        is_kept = all(grad is not None and grad.numel() for grad, need in zip(grads, given.needed, strict=True) if need)
        if is_kept and dentropies is None and not _is_other_than_expected(arguments, dlog_probs, given.needed):
            return _scaled(arguments, grads, dlog_probs, given.needed)
        rows = target.numel()
        dlosses = x.new_zeros(rows, dtype=torch.float32) if dlog_probs is None else -dlog_probs.reshape(-1).float()
        of_entropies = None if dentropies is None else dentropies.reshape(-1).float().contiguous()
        tensors, dtype = [x, weight, bias], self.by_name(arguments)["dtype"]
        is_cast = dtype is not None and any(t is not None and t.dtype != dtype for t in tensors)
        grad_dtype = torch.float32 if is_cast else None
        sums = _by_chunks(arguments, given.needed, dlosses, of_entropies, grad_dtype=grad_dtype).grads
        return tuple(None if grad is None else grad.to(t.dtype) for grad, t in zip(sums, tensors, strict=True))


LINEAR_LOG_PROBS = LinearLogProbs()


def _kept_gradients(arguments: Sequence[Any]) -> Sequence[bool]:
    """Which gradients the forward computes for the backward: of x, weight and bias."""
    x, *_, dtype, uniform, _, recompute, trained = arguments
    # In fp16 gradients need the scale that the backward brings.
    if recompute or (dtype or x.dtype) == torch.float16 or not (uniform or list(trained) == [True, False, False]):
        return (False,) * 3
    kept: Sequence[bool] = trained
    return kept


def _by_chunks(
    arguments: Sequence[Any],
    trained: Sequence[bool],
    gradient: Tensor,
    entropy_gradient: Tensor | None = None,
    **how: Any,
) -> HeadResults:
    """``by_chunks`` of the operator's arguments."""
    *tensors, target, ignored, temperature, scale, cap, in_fp32, _, most, dtype, _, _, _, _ = arguments
    x, weight, bias = (_cast(t, dtype) for t in tensors)
    options = {"ignored": ignored, "scale": scale, "cap": cap, "temperature": temperature, "in_fp32": in_fp32}
    head = Head(LINEAR_LOG_PROBS.name, x, weight, bias, target, most, options)
    return by_chunks(head, trained, gradient, entropy_gradient, **how)


def _cast(tensor: Any, dtype: torch.dtype | None, *, is_meta: bool = False) -> Any:
    """A tensor, or None, in this dtype; None leaves it as it is. ``is_meta``: its shape and dtype alone count."""
    if tensor is None or dtype is None or tensor.dtype == dtype:
        return tensor
    return torch.empty(tensor.shape, dtype=dtype, device="meta") if is_meta else tensor.to(dtype)


def _is_other_than_expected(arguments: Sequence[Any], dlog_probs: Tensor, needed: Sequence[bool]) -> bool:
    """Return whether ``check_grad`` is set, weight or bias needs a gradient, and that of rows is not uniform."""
    *_, check, _, _ = arguments
    if not check or not any(needed[1:]):
        return False
    factors, factor, has_label = _factors(arguments, dlog_probs)
    return not _are_uniform(factors, factor, has_label)  # the host waits here for the device


def _factors(arguments: Sequence[Any], dlog_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The factors of rows, 0 if a row has no label, the one of the first row that has one, and which rows have one."""
    target, ignored = arguments[3:5]
    has_label = (target != ignored).reshape(-1)
    # Nothing comes from rows without a label, whatever their gradient is.
    factors = dlog_probs.reshape(-1).float().masked_fill(~has_label, 0.0)
    return factors, factors.index_select(0, has_label.to(torch.uint8).argmax()), has_label


def _scaled(
    arguments: Sequence[Any], grads: Sequence[Tensor | None], dlog_probs: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight and bias from those for log-probabilities whose gradient is 1."""
    (x, weight, bias, *_), (dx, dweight, dbias) = arguments, grads
    factors, factor, has_label = _factors(arguments, dlog_probs)
    need_x, need_weight, need_bias = needed
    if need_x:
        assert dx is not None
        width = x.shape[-1]
        dx = torch.mul(dx.view(-1, width), factors[:, None], out=x.new_empty(len(factors), width)).view(x.shape)
    if need_weight or need_bias:
        _check_uniform(factors, factor, has_label)
        dweight, dbias = (
            torch.mul(grad, factor, out=tensor.new_empty(tensor.shape)) if need and grad is not None else None
            for grad, tensor, need in ((dweight, weight, need_weight), (dbias, bias, need_bias))
        )
    return dx, dweight, dbias


def _are_uniform(factors: Tensor, factor: Tensor, has_label: Tensor) -> Tensor:
    """Return, as a tensor, whether all rows with a label have the same gradient."""
    return ((factors == factor) | (factors.isnan() & factor.isnan()) | ~has_label).all()


def _check_uniform(factors: Tensor, factor: Tensor, has_label: Tensor) -> None:
    """Raise if rows with a label differ in their gradient; on a GPU by an assertion that nobody waits for."""
    is_uniform = _are_uniform(factors, factor, has_label)
    message = "linear_log_probs: gradients of log_probs differ from row to row, leave uniform_grad out"
    if factors.device.type == "cpu":
        if not is_uniform:
            raise ValueError(message)
    else:
        torch._assert_async(is_uniform, message)


def linear_log_probs(
    input: Tensor,  # noqa: A002 -- PyTorch's name for it
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int = IGNORED,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    logits_in_fp32: bool = False,
    max_labels: int | None = None,
    entropies: bool = False,
    are_largest: bool = False,
    mean_logits: bool = False,
    log_sums_of_squares: bool = False,
    dtype: torch.dtype | None = None,
    uniform_grad: bool = False,
    check_grad: bool = False,
    recompute: bool = False,
) -> LogProbs:
    """The log-probability of each target under ``linear(input, linear_weight, linear_bias)``, without holding logits.

    It is ``log_softmax(logits.float(), -1)`` at the target, of logits that are rounded to their dtype first. Gradients
    flow through log-probabilities and entropies, rounded as autograd rounds them; that of the weight is summed in
    float32. Calls repeat to the bit.

    A forward is one product of the size of the logits. How many a backward takes, and what is held until then:

    - the head is trained: three, because the logits are computed once more; nothing is held;
    - the head, weight and bias, is frozen: none, and the forward takes one more; a float32 for each element of input is
      held. A gradient of the entropies takes two after all;
    - ``uniform_grad``: none, and the forward takes one or two more; a float32 for each element of all that is trained
      is held. A gradient of the entropies is computed as without it;
    - ``recompute``, and any input in float16: two, or three if the head is trained; nothing is held.

    Args:
        input: [..., H], float32, bfloat16 or float16; the PyTorch reference computes float64, and DTensors. Under
            autocast it is cast as for a linear, and so are weight and bias.
        linear_weight: [V, H], of input's dtype.
        target: [...], int64, the label of each row.
        linear_bias: [V], of input's dtype, or None.
        ignore_index: the label of rows that have none; it may be outside of the vocabulary.
        temperature: what logits are divided by, after scale and softcap.
        logit_scale: what logits are multiplied by.
        softcap: ``softcap * tanh(logits / softcap)`` in place of logits, after their scale; None is without.
        logits_in_fp32: logits are cast to float32 before scale, softcap and temperature, and not after them.
        max_labels: at least the number of rows with a label, if the host knows one: the other rows are then left out of
            the products. None computes all rows.
        entropies: return them too.
        are_largest: return these too; they have no gradient.
        mean_logits: return these too; they have no gradient.
        log_sums_of_squares: return these too; they have no gradient.
        dtype: what input, weight and bias are cast to in here, autocast or not; each may have a dtype of its own then.
            Their gradients are rounded to their own dtypes alone.
        uniform_grad: the caller's promise that the gradient of the log-probabilities is one number for all rows with a
            label, as that of their sum, their mean or any multiple of these is.
        check_grad: ``uniform_grad`` is an expectation, and no promise: the host waits for the gradient, and one that
            differs from row to row is computed as without ``uniform_grad``.
        recompute: compute logits and gradients in the backward, for the least memory. If entropies have a gradient and
            the head is frozen, it saves a product too.

    Returns:
        A named tuple of float32 (float64 for an input of float64), [...] each; None for what was not asked for.

    Raises:
        TypeError: for anything but dense tensors of these dtypes, and for options that are not such numbers or flags.
        ValueError: for wrong values, and incompatible shapes and devices; in the backward, for gradients that break the
            promise of ``uniform_grad``, on a CPU; on a GPU the device asserts.
        IndexError: for a target outside of the vocabulary, on a CPU; on a GPU the device asserts, as PyTorch's does.
    """
    tensors, trained = head_tensors(input, linear_weight, linear_bias, casts=dtype is None)
    logits = ignore_index, unless_one(temperature), unless_one(logit_scale), softcap, logits_in_fp32
    wanted = [entropies, are_largest, mean_logits, log_sums_of_squares]
    options = *logits, wanted, max_labels, dtype, uniform_grad, check_grad, recompute, trained
    return LogProbs(*LINEAR_LOG_PROBS.checked(*tensors, target, *options))
