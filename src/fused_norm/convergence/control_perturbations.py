"""Harmless perturbations of the stock run: the same mathematics in another order, which is what sets the noise floor.

A fused norm may differ from the stock one in the order of its sums and in what it rounds on the way back. A control
does both to a stock model without any kernel, by ``reordered_norms``. Its steps also take their sequences in another
order and in micro-batches of another size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .tiers import TrainingOptions


def regroup(
    sequences: Tensor, options: TrainingOptions, *, processes: int, seed: int
) -> tuple[Tensor, TrainingOptions]:
    """Put the same sequences in each step, in another order and in twice or half as many micro-batches.

    Args:
        sequences: (steps * batch_size * processes or more, length), in training order.
        options: of the stock run.
        processes: that share a step.
        seed: of the order within a step.

    Returns:
        The sequences and the options of the control run.
    """
    step = options.batch_size * processes
    generator = torch.Generator().manual_seed(seed)
    orders = [start + torch.randperm(step, generator=generator) for start in range(0, options.steps * step, step)]
    finer, coarser = 2 * options.accumulation, max(1, options.accumulation // 2)
    accumulation = coarser if options.batch_size % finer else finer
    return sequences[torch.cat(orders)], replace(options, accumulation=accumulation)
