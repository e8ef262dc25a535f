"""Trains one model on given sequences and measures the run; two runs with equal arguments see equal batches."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from transformers import get_constant_schedule_with_warmup

from ..kernels.linear_cross_entropy import IGNORED
from .model_source import layers_of
from .tiers import TrainingOptions


@dataclass(frozen=True)
class TrainingResult:
    """The losses and the costs of a training run.

    Attributes:
        losses: of each step, before its update, in nats per token.
        gradient_norms: of each step, over all parameters, before clipping.
        seconds_per_step: median; the first step, which compiles kernels, is left out unless it is the only one.
        memory_bytes: the peak of allocated GPU memory; on a CPU the tensors kept for the backward pass, 0 if layers
            recompute some: counting would keep them from it.
        evaluation_loss: after the last step, without gradients and dropout, in nats per token.
    """

    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    seconds_per_step: float
    memory_bytes: int
    evaluation_loss: float

    @property
    def finite(self) -> bool:
        """Every loss and gradient norm is a finite number."""
        return all(map(math.isfinite, self.losses + self.gradient_norms))


def accelerator_for(*, mixed: bool | None = None, accumulation: int = 1, cpu: bool = False) -> Accelerator:
    """An ``Accelerator`` whatever the one before it was set to; what the launcher asked for stays.

    Args:
        mixed: bf16 mixed precision; None is what the launcher asked for.
        accumulation: micro-batches in a step.
        cpu: stay on the CPU even if there is a GPU.
    """
    # The state is the process's, and refuses another precision until it is made anew.
    AcceleratorState._reset_state(reset_partial_state=True)
    precision = {True: "bf16", False: "no", None: None}[mixed]
    return Accelerator(mixed_precision=precision, gradient_accumulation_steps=accumulation, cpu=cpu)


def train(
    model: nn.Module,
    sequences: Tensor,
    options: TrainingOptions,
    *,
    labels: Tensor | None = None,
    accelerator: Accelerator | None = None,
    cut_last: bool = False,
    on_step: Callable[[int, float], object] | None = None,
    on_gradients: Callable[[int, nn.Module], object] | None = None,
    on_end: Callable[[nn.Module], object] | None = None,
) -> TrainingResult:
    """Train a causal language model in place, on the device that ``accelerator`` picks.

    A model whose forward takes it is given the number of labels in a step, by which it divides the sum of its losses,
    as transformers' Trainer does; of other models each micro-batch has its mean. Training ends early at a loss or
    gradient norm that is not finite, which is recorded.

    Args:
        model: trained in the dtype it has.
        sequences: token ids in training order, (steps * batch_size * processes or more, length), int64; nothing is
            shuffled here.
        options: how to train.
        labels: of the sequences, ``IGNORED`` for tokens without one; all tokens are labels when None.
        accelerator: made for ``options.accumulation`` when None: a GPU if there is one, else the CPU.
        cut_last: the sequences of the last of several steps lose a third, so that a second shape is seen.
        on_step: called after each step with its index and loss, the mean over all processes.
        on_gradients: called in each step, with its index and the prepared model, before gradients are clipped.
        on_end: called with the prepared model after the last step.
    """
    accelerator = accelerator or accelerator_for(accumulation=options.accumulation)
    step_size = options.batch_size * accelerator.num_processes
    labels = sequences if labels is None else labels
    is_counted = takes_number_of_labels(model)
    prepared = _prepare(model.train(), sequences, labels, options, accelerator)

    def cut(batch: Tensor, step: int) -> Tensor:
        return batch[:, : -(batch.shape[1] // 3)] if cut_last and 0 < step == options.steps - 1 else batch

    labels_by_step = enumerate(labels.split(step_size)) if is_counted else ()
    counts = [int((cut(batch, step)[:, 1:] != IGNORED).sum()) for step, batch in labels_by_step]
    saved = None
    if accelerator.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(accelerator.device)
    else:
        saved = SavedForBackward(prepared.model)
    metered = saved.forward if saved else contextlib.nullcontext
    steps: list[_Step] = []
    for step in _steps(prepared, options, accelerator, metered, cut, counts, on_gradients):
        steps.append(step)
        if on_step is not None:
            on_step(len(steps) - 1, step.loss)
        if not (math.isfinite(step.loss) and math.isfinite(step.gradient_norm)):
            break
    tokens, labels = steps[-1].batch
    with torch.no_grad():
        evaluated = prepared.model.eval()(input_ids=tokens, labels=labels, use_cache=False).loss
    prepared.model.train()
    if on_end is not None:
        on_end(prepared.model)
    if accelerator.device.type != "cpu":  # it collects garbage, which takes longer than a tiny model's training
        accelerator.free_memory()
    return TrainingResult(
        losses=tuple(step.loss for step in steps),
        gradient_norms=tuple(step.gradient_norm for step in steps),
        seconds_per_step=statistics.median([step.seconds for step in steps[1:] or steps]),
        memory_bytes=saved.bytes() if saved else torch.cuda.max_memory_allocated(accelerator.device),
        evaluation_loss=accelerator.reduce(evaluated.float(), "mean").item(),
    )


def takes_number_of_labels(model: nn.Module) -> bool:
    """Return whether a model's forward takes ``num_items_in_batch``, as transformers' Trainer asks."""
    accepts = getattr(model, "accepts_loss_kwargs", None)
    if accepts is not None:
        return bool(accepts)
    parameters = inspect.signature(model.forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def masked_labels(sequences: Tensor, step_size: int, *, few: bool = False) -> Tensor:
    """Labels of sequences, none for a beginning of each, up to a half, and none for one sequence of every other step.

    Which ones goes by their tokens: a step has the same labels in any order and grouping of its sequences.

    Args:
        sequences: token ids in training order, (sequences, length).
        step_size: sequences in a step, of all processes.
        few: of each sequence up to an eighth has no label, and of none all.
    """
    sums = sequences.sum(1)
    beginnings = sums % (1 + sequences.shape[1] // (8 if few else 2))
    for start in range(step_size, len(sums), 2 * step_size) if step_size > 1 and not few else ():
        beginnings[start + int(sums[start : start + step_size].argmin())] = sequences.shape[1]
    places = torch.arange(sequences.shape[1])
    return sequences.masked_fill(places < beginnings[:, None], IGNORED)


class _Prepared(NamedTuple):
    """The model, optimizer and batches that accelerate has prepared for a training loop."""

    model: Any
    optimizer: Any
    batches: Iterable[Sequence[Tensor]]
    schedule: Any


def _prepare(
    model: nn.Module, sequences: Tensor, labels: Tensor, options: TrainingOptions, accelerator: Accelerator
) -> _Prepared:
    count = options.steps * options.batch_size * accelerator.num_processes
    # FSDP2 that was asked for on CPUs, for which accelerate would take DDP.
    shards_here = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    shards_here &= accelerator.distributed_type == DistributedType.MULTI_CPU
    if shards_here:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (accelerator.num_processes,))
        for module in (*layers_of(model).values(), model):
            fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(
        # With its initial rate given, the schedule can begin at its second value: the first one is zero.
        [{"params": [p for p in model.parameters() if p.requires_grad], "initial_lr": options.learning_rate}],
        lr=options.learning_rate,
        weight_decay=options.weight_decay,
    )
    batches: Any = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(sequences[:count], labels[:count]),
        batch_size=options.batch_size // options.accumulation,
    )
    if shards_here:
        # In this mode a model is given mixed precision and nothing else.
        model = accelerator.prepare_model(model, evaluation_mode=True)
        optimizer, batches = accelerator.prepare(optimizer, batches)
    else:
        model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    schedule = get_constant_schedule_with_warmup(optimizer, options.warmup_steps, last_epoch=0)
    return _Prepared(model, optimizer, batches, schedule)


class _Step(NamedTuple):
    """An optimizer step: its numbers, and its sequences with labels, the same in any order and grouping."""

    loss: float
    gradient_norm: float
    seconds: float
    batch: tuple[Tensor, ...]


def _steps(
    prepared: _Prepared,
    options: TrainingOptions,
    accelerator: Accelerator,
    metered: Callable[[], contextlib.AbstractContextManager[None]],
    cut: Callable[[Tensor, int], Tensor],
    counts: Sequence[int],
    on_gradients: Callable[[int, nn.Module], object] | None,
) -> Iterator[_Step]:
    """Train, and give each step when it is done; forwards of the first one run ``metered``.

    ``counts``: the number of labels in each step, of all processes, if the model is given it.
    """
    model, done, began = prepared.model, 0, None
    total, batches = torch.zeros((), device=accelerator.device), []
    for batch in prepared.batches:
        began = time.perf_counter() if began is None else began
        tokens, labels = (cut(part, done) for part in batch)
        batches.append((tokens, labels))
        how = {"num_items_in_batch": torch.tensor(counts[done], device=tokens.device)} if counts else {}
        with accelerator.accumulate(model):
            # Counting costs time, so it is done in the step whose time is left out.
            with contextlib.nullcontext() if done else metered():
                loss = model(input_ids=tokens, labels=labels, use_cache=False, **how).loss
            if counts:  # its share of the step's mean, which is divided once more by each of these
                loss = loss * (options.accumulation * accelerator.num_processes)
            accelerator.backward(loss)
            total += loss.detach().float() / options.accumulation
            if not accelerator.sync_gradients:
                continue
            if on_gradients is not None:
                on_gradients(done, model)
            norm = accelerator.clip_grad_norm_(model.parameters(), options.max_gradient_norm)
            prepared.optimizer.step()
            prepared.optimizer.zero_grad()
            prepared.schedule.step()
        # Reading the numbers waits for the device, so the clock stops when the step is done.
        mean = accelerator.reduce(total, "mean").item()
        whole = getattr(norm, "full_tensor", lambda norm=norm: norm)().item()
        yield _Step(mean, whole, time.perf_counter() - began, tuple(map(torch.cat, zip(*batches, strict=True))))
        done, began, total, batches = done + 1, None, torch.zeros_like(total), []


class SavedForBackward:
    """Counts the bytes that autograd keeps for the backward pass in the first forward, without the parameters.

    Each storage counts once. Later forwards run without the hook, as they would in any other training, and so do all
    of a model that recomputes: its own hooks give way to others.
    """

    def __init__(self, model: nn.Module) -> None:
        # A sharded parameter has no storage of its own, only its shard has.
        shards = (getattr(parameter, "_local_tensor", parameter) for parameter in model.parameters())
        self._parameters = {shard.untyped_storage().data_ptr() for shard in shards}
        self._sizes: dict[int, int] = {}
        self._is_done = any(getattr(module, "fused_norm_recompute", False) for module in model.modules())

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        if self._is_done:
            yield
            return
        self._is_done = True
        # What is kept stays alive until the backward, so no two of these storages share an address.
        with torch.autograd.graph.saved_tensors_hooks(self._count, lambda tensor: tensor):
            yield

    def _count(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self._sizes[storage.data_ptr()] = storage.nbytes()
        # A saved output that is returned itself would keep its own graph alive for ever.
        return tensor.detach()

    def bytes(self) -> int:
        return sum(self._sizes.values())
