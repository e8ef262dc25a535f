"""Estimates the time of a plan of eager steps on a CPU: a stock and a fused step are timed before it begins."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..patcher import apply_fused_norm
from .comparison import PRECISIONS, Comparison, by_baseline, options_for_feature

if TYPE_CHECKING:
    from .plan import Plan

_CHECKS = 8
"""The number of fused steps that take as long as all checks of a fused model."""


def seconds_of(plan: Plan, comparisons: Sequence[Comparison], jobs: int, loading: float) -> float:
    """Return about how many seconds these comparisons of a plan take, if their models are of one size.

    Args:
        plan: with text, models and settings.
        comparisons: one at least; all of them run eagerly, on a CPU.
        jobs: processes that share the groups of comparisons with a stock run in common.
        loading: the seconds that it took this process to load what others load once more.
    """
    settings, groups = plan.settings, list(by_baseline(comparisons).values())
    stock, fused = (_step(plan, groups[0][0], is_fused) for is_fused in (False, True))
    a_group = settings.steps * (1 + settings.controls) * stock + (settings.steps + _CHECKS) * len(groups[0]) * fused
    # Other programs that are running now are taken to go on.
    share = max(1.0, (os.getloadavg()[0] + jobs) / len(os.sched_getaffinity(0)))
    return -(-len(groups) // jobs) * a_group * share + (loading if jobs > 1 else 0.0)


def _step(plan: Plan, comparison: Comparison, is_fused: bool) -> float:
    """The seconds on a core of a forward and backward of the model of a comparison, the second time."""
    precision = PRECISIONS[comparison.precision]
    dtype = getattr(torch, precision.weights)
    model = plan.sources[comparison.model].build(seed=comparison.seed, dtype=dtype, device=torch.device("cpu"))
    if is_fused:
        apply_fused_norm(model, **options_for_feature(comparison.feature))
    tokens, began = plan.tokens[comparison.model][: plan.settings.batch_size], 0.0
    for _ in range(2):
        began = time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision.mixed):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
    return time.process_time() - began
