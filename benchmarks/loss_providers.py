"""The implementations of a vocabulary head with its loss that are measured, and what none of them can do without: the
products alone, and for losses of log-probabilities the fused cross entropy, which knows its gradient in the forward."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fused_norm import kernels
from fused_norm.kernels.vocabulary_head import IGNORED

from .loss_cases import CROSS_ENTROPY, LOG_PROBS, LossCase, LossInputs, capped
from .providers import FUSED, Provider
from .results import RefusedError

LossFunction = Callable[[LossInputs], Tensor]
LossCall = Callable[[LossInputs], tuple[Tensor, ...]]
"""A forward and a backward: the loss, and the gradients of what is trained."""

_LARGER_CHUNKS = 16  # times Liger's own
_CHUNK_ROWS = 4096
_ROWS_OF_TRL = 256  # of a release that has no name for them


def with_backward(loss_of: Callable[[LossCase], LossFunction]) -> Callable[[LossCase], LossCall]:
    """What builds the call of a case from what builds its loss."""

    def build(case: LossCase) -> LossCall:
        function = loss_of(case)

        def run(inputs: LossInputs) -> tuple[Tensor, ...]:
            loss = function(inputs)
            return loss.detach(), *torch.autograd.grad(loss, inputs.trained())

        return run

    return build


def _eager(x: Tensor, weight: Tensor, target: Tensor, softcap: float | None) -> Tensor:
    """Head and loss as models of transformers have them."""
    logits = capped(functional.linear(x, weight), softcap)
    return functional.cross_entropy(logits.float(), target)


def _eager_log_probs(x: Tensor, weight: Tensor, target: Tensor, softcap: float | None) -> Tensor:
    """Log-probabilities as own loops and trainers of preferences and policies compute them."""
    logits, has_label = capped(functional.linear(x, weight), softcap), target != IGNORED
    log_probs = logits.float().log_softmax(-1).gather(-1, target.where(has_label, 0)[:, None])
    return log_probs.squeeze(-1).where(has_label, 0.0)


def _stock(case: LossCase, *, is_compiled: bool = False) -> LossFunction:
    function = _eager_log_probs if case.operator == LOG_PROBS else _eager
    if is_compiled:
        torch.compiler.reset()  # Other cases would count as recompilations, of which there is a limit.
        function = torch.compile(function, dynamic=False)

    def loss(inputs: LossInputs) -> Tensor:
        result = function(inputs.x, inputs.weight, inputs.target, case.softcap)
        return inputs.loss_of(result) if case.operator == LOG_PROBS else result

    return loss


def _alone(build: Callable[..., LossFunction], **options: Any) -> Callable[[LossCase], LossCall]:
    """What builds the call of a case from what builds a cross entropy, and has no log-probabilities."""

    def loss_of(case: LossCase) -> LossFunction:
        if case.operator != CROSS_ENTROPY:
            raise RefusedError("it has no log-probabilities")
        return build(case, **options)

    return with_backward(loss_of)


def _liger(case: LossCase, *, in_fp32: bool = False) -> LossFunction:
    """Liger's function as it comes, or with the weight's gradient summed in fp32 and 16 times its chunk."""
    from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction as Function

    takes = list(inspect.signature(Function.forward).parameters.values())[1:]  # after ctx
    options: dict[str, Any] = {"softcap": case.softcap}
    if in_fp32:
        options |= {"accum_dtype": torch.float32, "chunk_mem_const": _LARGER_CHUNKS}
    if missing := options.keys() - {parameter.name for parameter in takes}:
        raise RefusedError(f"this release of Liger has no {' and '.join(sorted(missing))}")

    def loss(inputs: LossInputs) -> Tensor:
        arguments = options | {"_input": inputs.x, "weight": inputs.weight, "target": inputs.target}
        result: Tensor = Function.apply(*(arguments.get(parameter.name, parameter.default) for parameter in takes))[0]
        return result

    return loss


def _torch(case: LossCase, **options: Any) -> LossFunction:
    """PyTorch's function in chunks: of its own choice, or as ``options`` of ``LinearCrossEntropyOptions`` say."""
    chunking: Any = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    function: Any = getattr(functional, "linear_cross_entropy", None)
    if chunking is None or function is None:
        raise RefusedError("PyTorch has it in chunks from 2.13 on")
    if case.softcap is not None:
        raise RefusedError("it has no softcap")
    chosen = chunking(**options)
    return lambda inputs: function(inputs.x, inputs.weight, inputs.target, options=chosen)


def _trl(case: LossCase) -> LossFunction:
    trainer = importlib.import_module("trl.trainer.sft_trainer")
    function = getattr(trainer, "_chunked_cross_entropy_loss", None)
    if function is None:
        raise RefusedError("this release of TRL has no loss in chunks")
    rows = getattr(trainer, "_CHUNKED_LM_HEAD_CHUNK_SIZE", _ROWS_OF_TRL)

    def loss(inputs: LossInputs) -> Tensor:
        options = {"shift_labels": inputs.target, "final_logit_softcapping": case.softcap}
        result: Tensor = function(inputs.x, inputs.weight, rows, **options)[0]
        return result

    return loss


def _quack(case: LossCase) -> LossFunction:
    if case.softcap is not None:
        raise RefusedError("it has no softcap")
    function = importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
    return lambda inputs: function(inputs.x, inputs.weight, inputs.target, reduction="mean")


def _fused(case: LossCase, operator: str | None = None) -> LossFunction:
    """The operator of the case, unless another one is named."""

    def loss(inputs: LossInputs) -> Tensor:
        most = inputs.labels if "masked" in case.words else None
        tensors = inputs.x, inputs.weight, inputs.target
        options: dict[str, Any] = {"softcap": case.softcap, "max_labels": most}
        if (operator or case.operator) == CROSS_ENTROPY:
            return kernels.linear_cross_entropy(*tensors, **options)
        uniform = "uniform" in case.words
        return inputs.loss_of(kernels.linear_log_probs(*tensors, uniform_grad=uniform, **options).log_probs)

    return loss


def _loss_alone(case: LossCase) -> LossFunction:
    if case.operator == CROSS_ENTROPY:
        raise RefusedError("it is what is measured")
    return _fused(case, CROSS_ENTROPY)


def _products(case: LossCase) -> LossCall:
    """The products of rows with a label, whole: the logits, and as if these were their gradients, dX and dW."""

    def run(inputs: LossInputs) -> tuple[Tensor, ...]:
        x, weight = inputs.labelled, inputs.weight.detach()
        logits = x @ weight.t()
        return (logits @ weight, logits.t() @ x) if inputs.weight.requires_grad else (logits @ weight,)

    return run


PRODUCTS = Provider("products", _products)
"""The floor: it computes no loss."""
CROSS_ENTROPY_ALONE = Provider("cross-entropy", with_backward(_loss_alone))
"""The floor of losses of log-probabilities: a mean of these, whatever the weights of rows are."""
FLOORS = (PRODUCTS.name, CROSS_ENTROPY_ALONE.name)
"""The providers whose results are not those of the case."""

_ON_GPU = partial(Provider, on_cpu=False)
_SUMS_IN_FP32: dict[str, Any] = {
    "acc_policy": "accurate",
    "acc_dtype": torch.float32,
    "batch_chunk_size": _CHUNK_ROWS,
    "chunking_method": None,
}

LOSS_PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider("stock", with_backward(_stock)),
        _ON_GPU("compile", with_backward(partial(_stock, is_compiled=True))),
        _ON_GPU("liger", _alone(_liger), "liger_kernel"),
        _ON_GPU("liger-fp32", _alone(_liger, in_fp32=True), "liger_kernel"),
        Provider("torch", _alone(_torch)),
        Provider("torch-fp32", _alone(_torch, **_SUMS_IN_FP32)),
        Provider("trl", _alone(_trl), "trl"),
        _ON_GPU("quack", _alone(_quack), "quack"),
        Provider(FUSED.name, with_backward(_fused)),
        CROSS_ENTROPY_ALONE,
        PRODUCTS,
    )
}
"""In the order of tables. ``liger-fp32`` and ``torch-fp32`` sum the weight's gradient in fp32, over larger chunks."""
