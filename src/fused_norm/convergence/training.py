"""Trains one model on given sequences and measures the run; two runs with equal arguments see equal batches.

A run is kept as tensors while it is compared with the stock run, as numbers afterwards.
"""

from __future__ import annotations

import inspect
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import get_constant_schedule_with_warmup

from ..check.distances import distances, ratio, slope_errors
from ..kernels.vocabulary_head import IGNORED
from ..model_configs.layers import layers_of
from .tiers import TrainingOptions

LossOf = Callable[..., Tensor]
"""Computes the loss of a model, token ids and labels, in nats or otherwise."""


def own_loss(model: Any, tokens: Tensor, labels: Tensor | None = None, **how: Tensor) -> Tensor:
    """The loss that a model computes of labels, which are the tokens when None."""
    labels = tokens if labels is None else labels
    loss: Tensor = model(input_ids=tokens, labels=labels, use_cache=False, **how).loss
    return loss


@dataclass(frozen=True)
class TrainingResult:
    """The losses and the costs of a training run.

    Attributes:
        losses: of each step, before its update, in nats per token.
        gradient_norms: of each step, over all parameters, before clipping.
        seconds_per_step: median; the first step, which compiles kernels, is left out unless it is the only one.
        memory_bytes: the peak of allocated GPU memory; 0 on a CPU.
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
    loss_of: LossOf = own_loss,
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
        loss_of: computes the loss; another one than the model's is a mean over the sequences of a micro-batch.
        accelerator: made for ``options.accumulation`` when None: a GPU if there is one, else the CPU.
        cut_last: the sequences of the last of several steps lose a third, so that a second shape is seen.
        on_step: called after each step with its index and loss, the mean over all processes.
        on_gradients: called in each step, with its index and the prepared model, before gradients are clipped.
        on_end: called with the prepared model after the last step.
    """
    accelerator = accelerator or accelerator_for(accumulation=options.accumulation)
    step_size = options.batch_size * accelerator.num_processes
    all_labels = sequences if labels is None else labels

    def cut(batch: Tensor, step: int) -> Tensor:
        return batch[:, : -(batch.shape[1] // 3)] if cut_last and 0 < step == options.steps - 1 else batch

    # The number of labels in each step, of all processes, if the model is given it.
    is_counted = loss_of is own_loss and takes_number_of_labels(model)
    labels_by_step = enumerate(all_labels.split(step_size)) if is_counted else ()
    counts = [int((cut(batch, step)[:, 1:] != IGNORED).sum()) for step, batch in labels_by_step]
    # FSDP2 that was asked for on CPUs, for which accelerate would take DDP.
    shards_here = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    shards_here &= accelerator.distributed_type == DistributedType.MULTI_CPU
    if shards_here:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (accelerator.num_processes,))
        for module in (*layers_of(model).values(), model):
            fully_shard(module, mesh=mesh)
    optimizer: Any = torch.optim.AdamW(
        # With its initial rate given, the schedule can begin at its second value: the first one is zero.
        [{"params": [p for p in model.parameters() if p.requires_grad], "initial_lr": options.learning_rate}],
        lr=options.learning_rate,
        weight_decay=options.weight_decay,
    )
    count = options.steps * step_size
    batches: Any = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(sequences[:count], all_labels[:count]),
        batch_size=options.batch_size // options.accumulation,
    )
    trained: Any = model.train()
    if shards_here:
        # In this mode a model is given mixed precision and nothing else.
        trained = accelerator.prepare_model(model, evaluation_mode=True)
        optimizer, batches = accelerator.prepare(optimizer, batches)
    else:
        trained, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    schedule = get_constant_schedule_with_warmup(optimizer, options.warmup_steps, last_epoch=0)
    on_gpu = accelerator.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(accelerator.device)
    losses, norms, seconds = list[float](), list[float](), list[float]()
    parts, total, began = list[tuple[Tensor, ...]](), torch.zeros((), device=accelerator.device), 0.0
    for batch in batches:
        step = len(losses)
        if len(parts) == options.accumulation:
            parts, total = [], torch.zeros_like(total)
        if not parts:
            began = time.perf_counter()
        tokens, targets = (cut(part, step) for part in batch)
        parts.append((tokens, targets))
        how = {"num_items_in_batch": torch.tensor(counts[step], device=tokens.device)} if counts else {}
        with accelerator.accumulate(trained):
            loss = loss_of(trained, tokens, targets, **how)
            if counts:  # its share of the step's mean, which is divided once more by each of these
                loss = loss * (options.accumulation * accelerator.num_processes)
            accelerator.backward(loss)
            total += loss.detach().float() / options.accumulation
            if not accelerator.sync_gradients:
                continue
            if on_gradients is not None:
                on_gradients(step, trained)
            norm = accelerator.clip_grad_norm_(trained.parameters(), options.max_gradient_norm)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        # Reading the numbers waits for the device, so the clock stops when the step is done.
        losses.append(accelerator.reduce(total, "mean").item())
        norms.append(getattr(norm, "full_tensor", lambda norm=norm: norm)().item())
        seconds.append(time.perf_counter() - began)
        if on_step is not None:
            on_step(step, losses[-1])
        if not (math.isfinite(losses[-1]) and math.isfinite(norms[-1])):
            break
    tokens, targets = map(torch.cat, zip(*parts, strict=True))  # the same in any order and grouping
    with torch.no_grad():
        evaluated = loss_of(trained.eval(), tokens, targets)
    trained.train()
    if on_end is not None:
        on_end(trained)
    if accelerator.device.type != "cpu":  # it collects garbage, which takes longer than a tiny model's training
        accelerator.free_memory()
    return TrainingResult(
        losses=tuple(losses),
        gradient_norms=tuple(norms),
        seconds_per_step=statistics.median(seconds[1:] or seconds),
        memory_bytes=torch.cuda.max_memory_allocated(accelerator.device) if on_gpu else 0,
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


TRIM = 0.01
"""The share of the weights, those furthest apart, that is left out of a drift. AdamW moves a weight by the sign of its
gradient, more or less. If the gradient is all but zero the sign is luck, and a few such weights would be all that a
distance is made of. A wrong kernel moves more than a hundredth of them."""


@dataclass(frozen=True)
class RunTensors(TrainingResult):
    """One run with its tensors, which are on the CPU.

    Attributes:
        outputs: of each layer and of the model, for one micro-batch at the initial weights, in the order they run in.
        output_gradients: of the loss with respect to them.
        gradients: of each trained parameter in the first step, before clipping.
        initial: the trained parameters before the first step.
        final: the same after the last.
        rounding: half an eps of the parameters.
        norm_weights: names of the trained norm weights.
        sites: how many sites of each kind were fused, and how many blocks read norms by outputs of their own.
        not_seen: fused sites, with their kinds, that ran stock code in the first micro-batch, or that compiled code has
            no operator for.
    """

    outputs: Mapping[str, Tensor]
    output_gradients: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    initial: Mapping[str, Tensor]
    final: Mapping[str, Tensor]
    rounding: float
    norm_weights: tuple[str, ...]
    sites: Mapping[str, int]
    not_seen: tuple[str, ...]


@dataclass(frozen=True)
class RunRecord(TrainingResult):
    """One run as numbers: its losses and costs, and how far it was from the stock run.

    Attributes:
        sites: how many sites of each kind were fused, and how many blocks read norms by outputs of their own.
        moved: how far each norm weight went from its start, relative to its size; 0 for one that did not move.
        constant: norm weights that started as one number throughout, which hides a wrong cast.
        outputs, output_gradients, gradients: relative distances from the stock run's.
        output_gradient_slopes, gradient_slopes: how far from one the slope is of a line through them over the stock
            run's: what they have in common, which a distance does not see among roundings.
        drifts: distance of the final parameters from the stock run's, relative to how far those had moved, the share
            ``TRIM`` that is farthest apart, and ``TRIMMED`` numbers at least, left out.
        drift_roundings: how far a parameter drifts by one rounding of each weight: half an eps of its size over how far
            it moved.
        near_ties: how often a router was made to choose the stock run's experts, whose scores were equal to its own
            choice's but for a rounding.
    """

    sites: Mapping[str, int]
    moved: Mapping[str, float]
    constant: tuple[str, ...] = ()
    outputs: Mapping[str, float] = field(default_factory=dict)
    output_gradients: Mapping[str, float] = field(default_factory=dict)
    gradients: Mapping[str, float] = field(default_factory=dict)
    output_gradient_slopes: Mapping[str, float] = field(default_factory=dict)
    gradient_slopes: Mapping[str, float] = field(default_factory=dict)
    drifts: Mapping[str, float] = field(default_factory=dict)
    drift_roundings: Mapping[str, float] = field(default_factory=dict)
    near_ties: int = 0


def record_run(run: RunTensors, stock: RunTensors) -> RunRecord:
    """The numbers of a run, compared with those of the stock run, which may be the same."""
    stock_drifts = {name: value - stock.initial[name] for name, value in stock.final.items()}
    drifts = {name: value - stock.initial[name] for name, value in run.final.items()}
    return RunRecord(
        **{each.name: getattr(run, each.name) for each in fields(TrainingResult)},
        sites=run.sites,
        moved={
            name: ratio((run.final[name] - run.initial[name]).norm().item(), run.initial[name].norm().item())
            for name in run.norm_weights
        },
        constant=tuple(name for name in run.norm_weights if run.initial[name].unique().numel() == 1),
        outputs=distances(run.outputs, stock.outputs),
        output_gradients=distances(run.output_gradients, stock.output_gradients),
        gradients=distances(run.gradients, stock.gradients),
        output_gradient_slopes=slope_errors(run.output_gradients, stock.output_gradients),
        gradient_slopes=slope_errors(run.gradients, stock.gradients),
        drifts=distances(drifts, stock_drifts, trim=TRIM),
        drift_roundings={
            name: ratio(run.rounding * run.initial[name].norm().item(), way.norm().item())
            for name, way in drifts.items()
            if way.any()
        },
    )


def trained_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters that are trained, under the names they have without wrappers."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name.removeprefix("module."), parameter
