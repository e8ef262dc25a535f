"""Trains one model on given sequences and measures it; two runs with equal arguments see equal batches."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class TrainingOptions:
    """How to train.

    Attributes:
        steps: optimizer steps.
        batch_size: sequences in a step, on each process.
        learning_rate: AdamW's, after the warm-up.
        warmup_steps: steps over which the learning rate rises linearly from 0; it stays constant afterwards.
        weight_decay: AdamW's.
        max_gradient_norm: gradients are scaled down to this norm.
    """

    steps: int
    batch_size: int
    learning_rate: float = 1e-3
    warmup_steps: int = 5
    weight_decay: float = 0.01
    max_gradient_norm: float = 1.0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True)
class TrainingResult:
    """What a training run did and cost.

    Attributes:
        losses: of each step, before its update, in nats per token.
        gradient_norms: of each step, over all parameters, before clipping.
        seconds_per_step: median; the first step, which compiles kernels, is left out unless it is the only one.
        memory_bytes: see ``memory_measure``.
        memory_measure: what ``memory_bytes`` counts on the device the model was trained on.
    """

    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    seconds_per_step: float
    memory_bytes: int
    memory_measure: str


def train(
    model: PreTrainedModel,
    sequences: Tensor,
    options: TrainingOptions,
    *,
    accelerator: Accelerator | None = None,
    on_step: Callable[[int, float], object] | None = None,
) -> TrainingResult:
    """Trains a causal language model in place, on the device that ``accelerator`` picks.

    Args:
        model: trained in the dtype it has.
        sequences: token ids in training order, (steps * batch_size * processes or more, length), int64; nothing is
            shuffled here.
        options: how to train.
        accelerator: a plain ``Accelerator()`` when None: a GPU if there is one, else the CPU.
        on_step: called after each step with its index and loss.

    Raises:
        ValueError: there are fewer sequences than ``options`` ask for.
    """
    accelerator = accelerator or Accelerator()
    wanted = options.steps * options.batch_size * accelerator.num_processes
    if len(sequences) < wanted:
        raise ValueError(
            f"{options.steps} steps of {options.batch_size} sequences on {accelerator.num_processes} process(es) take "
            f"{wanted} sequences, and there are {len(sequences)}; draw them with data.schedule"
        )
    model, optimizer, batches = accelerator.prepare(
        model.train(),
        torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay),
        torch.utils.data.DataLoader(sequences[:wanted], batch_size=options.batch_size),  # type: ignore[arg-type]
    )
    warmup = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / max(1, options.warmup_steps))
    )
    meter = _GpuPeak(accelerator.device) if accelerator.device.type == "cuda" else _SavedForBackward(model)
    losses, gradient_norms, seconds = [], [], []
    for step, batch in enumerate(batches):
        began = time.perf_counter()
        # Counting costs time, so it is done in the step whose time is left out.
        with meter.forward() if step == 0 else contextlib.nullcontext():
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), options.max_gradient_norm)
        optimizer.step()
        optimizer.zero_grad()
        warmup.step()
        # Reading the numbers waits for the device, so the clock stops when the step is done.
        losses.append(loss.item())
        gradient_norms.append(norm.item())
        seconds.append(time.perf_counter() - began)
        if on_step is not None:
            on_step(step, losses[-1])
    accelerator.free_memory()
    return TrainingResult(
        losses=tuple(losses),
        gradient_norms=tuple(gradient_norms),
        seconds_per_step=statistics.median(seconds[1:] or seconds),
        memory_bytes=meter.bytes(),
        memory_measure=meter.measure,
    )


class _GpuPeak:
    """The most bytes allocated on a GPU at once since this was made."""

    measure = "peak of allocated GPU memory"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.reset_peak_memory_stats(device)

    def forward(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)


class _SavedForBackward:
    """The bytes that autograd keeps between forward and backward, parameters left out, each storage counted once."""

    measure = "tensors kept for the backward pass"

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._sizes: dict[int, int] = {}

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
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
