"""A forward and backward of a user's own Trainer, stock and fused, both compared with the same in float64.

The loss is the Trainer's own, of the first batch of its own data. All steps are taken on a copy of its model, by a
shallow copy of the Trainer, of which everything is copied that its methods write to.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy
import torch
from accelerate.utils import DynamoBackend
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..kernels.vocabulary_head import IGNORED
from ..patcher import FuseOptions, remove_fused_norm
from ..patcher.survey import compiled_modules
from .against_float64 import StepCheck, UncheckableError, compare_steps, training_without_dropout
from .model_copies import deep_copy

_PREPARED = "forward", "_original_forward", "_is_accelerate_prepared"
"""The attributes that accelerate sets on a model whose forward runs under autocast."""

_AUTOCAST = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_trainer(
    trainer: Any,
    *,
    truth: torch.dtype | None = None,
    options: FuseOptions | Mapping[str, Any] | None = None,
    progress: Callable[[Iterable[str]], Iterable[str]] = iter,
) -> StepCheck:
    """Run a forward and backward pass of a Trainer's first batch: the truth, stock, fused; all as in ``check_step``.

    The loss is that of the Trainer's ``compute_loss``, in training mode, under its mixed precision. Dropout is off, and
    so is gradient checkpointing that training would switch on. The Trainer stays as it is: its model, random
    numbers, the order of its data, metrics, logs and callbacks. Nothing is optimized. A trainer that generates, such as
    TRL's GRPO, generates once and calls its reward functions, with the stock model; all steps have these completions.

    Args:
        trainer: a transformers Trainer or one derived from it, such as TRL's, before ``train()``.
        truth: as in ``check_step``. The Trainer's other models, such as a reference, are copied to its dtype as well.
        options: of ``apply_fused_norm``; those of the Trainer's ``FusedNormCallback``, if it has one, when None.
        progress: as in ``check_step``.

    Returns:
        The errors of the loss and the gradients, and the verdict.

    Raises:
        FusedNormError: as ``apply_fused_norm``, or the truth is not finite.
        UncheckableError: as ``check_step``; for a Trainer without data, a model that is compiled, sharded, on several
            devices or prepared for mixed precision already; or if the loss cannot be computed in the truth's dtype.
    """
    if (reason := why_uncheckable(trainer)) is not None:
        raise UncheckableError(reason)
    if options is None:
        of_callbacks = [getattr(each, "options", None) for each in trainer.callback_handler.callbacks]
        options = next((each for each in of_callbacks if isinstance(each, FuseOptions)), FuseOptions())
    options = options if isinstance(options, FuseOptions) else FuseOptions(**options)
    model: nn.Module = deep_copy(trainer.model)
    remove_fused_norm(model)
    model.zero_grad(set_to_none=True)
    twin = _twin(trainer, model)
    is_mixed = twin.accelerator.native_amp
    others = {name: each for name, each in vars(twin).items() if isinstance(each, nn.Module) and each is not model}

    def outputs_of(model_of_step: nn.Module) -> dict[str, Tensor]:
        is_truth = model_of_step is not model
        twin.model = twin.model_wrapped = model_of_step
        twin.accelerator.native_amp = is_mixed and not is_truth
        batch = copy.deepcopy(inputs)
        if is_truth:
            dtype = next(parameter.dtype for parameter in model_of_step.parameters())
            batch = tree_map_only(Tensor, lambda it: it.to(dtype) if it.is_floating_point() else it, batch)
        for name, other in others.items():
            setattr(twin, name, deep_copy(other).to(dtype) if is_truth else other)
        _seed()
        # In transformers 4 this is autocast on a CPU.
        around = nullcontext() if is_truth else twin.compute_loss_context_manager()
        try:
            with _prepared(twin.accelerator, model_of_step), around:
                loss: Tensor = twin.compute_loss(model_of_step, batch, num_items_in_batch=count)
        except RuntimeError as error:
            if not is_truth:
                raise
            raise UncheckableError(
                f"{type(trainer).__name__} computes no loss in {str(dtype).removeprefix('torch.')}: {error}"
            ) from error
        return {"loss": loss}

    with _random_numbers_kept(model), training_without_dropout(model):
        inputs, count = _first_batch(twin)
        return compare_steps(
            model,
            outputs_of,
            predictions=_predictions(inputs),
            truth=truth,
            options=options,
            autocast=_AUTOCAST[trainer.accelerator.mixed_precision],
            least_loss=1.0,
            progress=progress,
        )


def why_uncheckable(trainer: Any) -> str | None:
    """The reason why a step of a Trainer cannot be checked, in words, or None."""
    model, accelerator = trainer.model, trainer.accelerator
    is_sharded = accelerator.num_processes > 1 or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if is_sharded or any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        return "its model is shared by several processes, or sharded: check the Trainer in one process, without FSDP"
    if trainer.args.n_gpu > 1 or len({parameter.device for parameter in model.parameters()}) > 1:
        return "its model is on several devices: show one to this process, as by CUDA_VISIBLE_DEVICES=0"
    if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO or compiled_modules(model):
        return "its model is compiled, or is to be: check the Trainer without torch.compile"
    if "_original_forward" in vars(model):
        return "its model is prepared for mixed precision already: check the Trainer before train()"
    if accelerator.mixed_precision not in _AUTOCAST:
        return f"mixed precision is {accelerator.mixed_precision}, and it may be {', '.join(_AUTOCAST)}"
    return None


def _twin(trainer: Any, model: nn.Module) -> Any:
    """A Trainer that computes the same losses, of another model, and writes to nothing that ``trainer`` has."""
    twin = _with_copied_containers(trainer)
    twin.accelerator = _with_copied_containers(trainer.accelerator)
    twin.state, twin.control = copy.deepcopy((trainer.state, trainer.control))
    twin.data_collator = copy.deepcopy(trainer.data_collator)  # it may have a generator
    twin.model = twin.model_wrapped = model
    twin.current_gradient_accumulation_steps = 1  # as training sets it
    twin.log = lambda *_, **__: None
    return twin


def _with_copied_containers(owner: Any) -> Any:
    """A shallow copy whose dictionaries, lists, sets and queues are copied, those in them too."""

    def copied(value: Any) -> Any:
        if isinstance(value, dict):
            new = copy.copy(value)
            new.update((key, copied(each)) for key, each in value.items())
            return new
        if type(value) is list:
            return [copied(each) for each in value]
        return copy.copy(value) if isinstance(value, set | deque) else value

    new = copy.copy(owner)
    vars(new).update({name: copied(value) for name, value in vars(owner).items()})
    return new


def _first_batch(twin: Any) -> tuple[Any, Any]:
    """The first batch of a Trainer's data, as ``compute_loss`` takes it, and the number of its labels or None."""
    try:
        batches = twin.get_train_dataloader()
    except ValueError as error:
        raise UncheckableError(f"the Trainer has no data to take a batch of: {error}") from error
    try:
        taken, count = twin.get_batch_samples(iter(batches), 1, twin.args.device)
    finally:
        if hasattr(batches, "end"):  # accelerate's: it would stay the loader that is read now
            batches.end()
    if not taken:
        raise UncheckableError("the Trainer has no data to take a batch of: its data set is empty")
    with _prepared(twin.accelerator, twin.model):
        inputs = twin._prepare_inputs(taken[0])
    return dict(inputs) if isinstance(inputs, Mapping) else inputs, count


@contextmanager
def _prepared(accelerator: Any, model: nn.Module) -> Iterator[None]:
    """Let a model's forward run under the mixed precision of ``accelerator``, as training does, inside a ``with``."""
    if not accelerator.native_amp:
        yield
        return
    own = {name: vars(model)[name] for name in _PREPARED if name in vars(model)}
    accelerator.prepare_model(model, evaluation_mode=True)  # else it may wrap it, too
    try:
        yield
    finally:
        for name in _PREPARED:
            vars(model).pop(name, None)
        vars(model).update(own)


def _predictions(inputs: Any) -> int:
    """Return the number of tokens that the loss of a batch is computed of, as far as its tensors tell."""
    named = inputs if isinstance(inputs, Mapping) else {}
    labels = named.get("labels")
    if isinstance(labels, Tensor) and labels.dim() > 1 and not labels.is_floating_point():
        return int((labels[..., 1:] != IGNORED).sum())
    for name in ("completion_mask", "attention_mask"):
        if isinstance(mask := named.get(name), Tensor):
            return int(mask.sum())
    return max((it.numel() for it in tree_leaves(inputs) if isinstance(it, Tensor)), default=0)


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


@contextmanager
def _random_numbers_kept(model: nn.Module) -> Iterator[None]:
    """Put back the states of all generators of random numbers after a ``with``."""
    device = next(model.parameters()).device
    states = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
