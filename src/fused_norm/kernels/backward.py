"""The backward of an operator's call: its arguments, the implementations of gradients, and the autograd functions.

Functions here take any ``Operator``; they annotate it as ``Any``, because ``operator`` imports this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import reference
from .plain_calls import dispatch_modes, is_grad_needed, is_plain_call
from .recording import Recording, appended, distinct, record
from .triton.call import Call
from .triton.devices import is_transformed

Tensors = Sequence[Tensor | None]
Grads = tuple[Tensor | None, ...]
Scalars = tuple[Any, ...]


class BackwardArguments(NamedTuple):
    """The arguments of one backward."""

    incoming: Sequence[Any]  # gradients of the returned tensors (``pack_outputs``); None if nothing depends on one
    saved: Sequence[Any]  # the tensors that the forward saved
    saved_scalars: Scalars  # what else it saved
    needed: Sequence[bool]  # which of the operator's ``gradients`` are needed


BackwardImpl = Callable[[Any, BackwardArguments], Grads]
"""Computes an operator's gradients: by kernels, by registered operators or by PyTorch's own."""


class BackwardState(NamedTuple):
    """The state that a recorded call keeps for its backward besides tensors."""

    scalars: Scalars  # ``saved_scalars``
    nondiff: Sequence[int]  # the indices of the outputs that no gradient flows into
    copied: Sequence[int]  # the indices, in ``saved``, of copies of weights


@dataclass(frozen=True)
class KernelBackward:
    """The implementation of backwards by kernels, through one call."""

    call: Call

    def __call__(self, operator: Any, given: BackwardArguments) -> Grads:
        """Build the backward of an operator; it runs with the call."""
        return operator.backward(self.call, given)


def backward_impl(given: BackwardArguments) -> BackwardImpl:
    """The implementation of the backward that fits the call.

    Kernels leave nothing to differentiate: gradients that are to be differentiated again, or come in batches or with
    tangents, are computed by PyTorch's own operators.
    """
    if all(gradient is None for gradient in given.incoming):
        return lambda operator, given: (None,) * len(operator.gradients)
    tensors = (*given.incoming, *given.saved)
    if not torch.compiler.is_compiling():
        batched = any(d is not None and torch._C._functorch.is_legacy_batchedtensor(d) for d in given.incoming)
        if is_grad_needed(tensors) or batched or is_transformed():
            return lambda operator, given: operator.reference_backward(given)
    return KernelBackward(Call()) if is_plain_call(tensors) else lambda operator, given: operator.run_backward(given)


def function_of_arguments(operator: Any) -> Any:
    """The autograd function of calls that are not plain; it takes the operator's arguments."""
    differentiated = len(operator.gradients)
    others = (None,) * (operator.tensor_count - differentiated + operator.option_count)

    def forward(ctx: Any, *arguments: Any) -> Any:
        nondiff = operator.without_gradient(ctx.needs_input_grad[:differentiated])
        results = operator.run(*arguments, training=True)
        outputs, saved, ctx.sources, ctx.state = operator.outputs_and_saved(arguments, results, nondiff)
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        outputs = distinct(outputs, arguments)
        _mark(ctx, outputs, nondiff)
        return outputs

    def backward(ctx: Any, *incoming: Tensor | None) -> Grads:
        scalars, _, copied = ctx.state
        saved = (*ctx.saved_tensors, *ctx.sources[len(copied) :])
        if copied and torch.is_grad_enabled():
            saved = _with_sources(saved, copied, ctx.sources)
        given = BackwardArguments(incoming, saved, scalars, ctx.needs_input_grad[:differentiated])
        return *_grads(operator, given), *others

    return _autograd_function(operator, forward, backward)


def function_of_recording(operator: Any) -> Any:
    """The autograd function of plain calls; it takes a recording, or a ``SingleCall``, and the tensors."""
    differentiated, unhooked = len(operator.gradients), len(operator.unhooked)
    others = (None,) * (operator.tensor_count - differentiated)

    def forward(ctx: Any, recording: Any, *tensors: Any) -> Any:
        ctx.recording, ctx.materialize_grads = recording, False  # what the method for the latter does
        outputs = recording.forward(ctx, *tensors)
        if recording.backward_state.nondiff:
            _mark(ctx, outputs, recording.backward_state.nondiff)
        return outputs

    def backward(ctx: Any, *incoming: Tensor | None) -> Grads:
        recording, saved = ctx.recording, ctx.saved_tensors
        if unhooked:
            saved = (*saved, *ctx.sources[-unhooked:])
        may_repeat = not (
            torch.is_grad_enabled()
            or forward_ad._current_level >= 0
            or dispatch_modes()
            or torch.compiler.is_compiling()
        )
        if may_repeat:
            for recorded_backward in recording.backwards:
                grads: Grads | None = recorded_backward.call(*saved, *incoming)
                if grads is not None:
                    return grads
        scalars, _, copied = recording.backward_state
        if copied and torch.is_grad_enabled():
            saved = _with_sources(saved, copied, ctx.sources)
        needed, count = ctx.needs_input_grad[1 : 1 + differentiated], len(saved)
        given = BackwardArguments(incoming, saved, scalars, needed)
        if may_repeat and isinstance(recording, Recording) and isinstance(backward_impl(given), KernelBackward):

            def build(call: Call, *tensors: Tensor | None) -> Grads:
                given = BackwardArguments(tensors[count:], tensors[:count], scalars, needed)
                return None, *operator.compute_grads(KernelBackward(call), given), *others

            recorded = record((*saved, *incoming), (), build, in_any_grad_mode=True)
            if recorded is not None:
                recording.backwards = appended(recording.backwards, recorded[0])
                return recorded[1]
        return None, *_grads(operator, given), *others

    function = _autograd_function(operator, forward, backward)
    if hasattr(function, "_backward_cls"):
        function._backward_cls.apply = backward  # spares PyTorch's frame around it
    return function


def _autograd_function(operator: Any, forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    """An autograd function by the name of the operator's class, which PyTorch gives the nodes of its graph."""
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    make: Any = type(torch.autograd.Function)
    return make(type(operator).__name__, (torch.autograd.Function,), methods)


def _grads(operator: Any, given: BackwardArguments) -> Grads:
    """The gradients by the implementation that fits."""
    impl = backward_impl(given)
    grads = operator.compute_grads(impl, given)
    if isinstance(impl, KernelBackward):
        impl.call.run()
    return grads


def _with_sources(saved: Tensors, copied: Sequence[int], sources: Sequence[Tensor]) -> Grads:
    """The saved tensors, with copies of weights, at indices ``copied``, as functions of the first ``sources``."""
    linked: list[Any] = list(saved)
    for at, source in zip(copied, sources, strict=False):
        linked[at] = reference.with_gradient_to(linked[at].to(source.dtype), source)
    return tuple(linked)


def _mark(ctx: Any, outputs: Any, nondiff: Sequence[int]) -> None:
    """Tell autograd which outputs, by their indices, no gradient flows into."""
    if nondiff:
        ctx.mark_non_differentiable(*(outputs[at] for at in nondiff if outputs[at] is not None))
