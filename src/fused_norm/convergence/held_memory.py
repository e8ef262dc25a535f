"""Measures the bytes that a step holds, and names the layers in which a level of ``recompute`` saves none."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from ..options import RecomputeLevel
from ..patcher.patch_report import PatchReport
from .report_claims import linears_of

LEVELS: tuple[RecomputeLevel, ...] = (False, True, "mlp", "attention")
"""The levels of ``recompute``, each of which holds less than the one before it."""

_MOMENT = "fused_norm moment"


class Allocations:
    """Counts the bytes that are allocated on a device at moments inside a ``with``.

    On a CPU it adds up the events of ``torch.profiler`` at the end; on a GPU it asks PyTorch's allocator.

    Attributes:
        held: the bytes at each moment, on a CPU since the ``with``; they are known after it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.held: list[int] = []
        self._profile: Any = None

    def __enter__(self) -> Allocations:
        gc.collect()
        gc.freeze()  # so that each later collection is quick
        if self._device.type == "cpu":
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler would write two lines for each use
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.__enter__()
        return self

    def moment(self) -> int:
        """Note how many bytes are allocated now, and return the place of this number in ``held``."""
        gc.collect()  # Triton's interpreter leaves cycles with tensors in them
        if self._profile is None:
            # Allocated bytes are rounded up, requested ones are not.
            self.held.append(torch.cuda.memory_stats(self._device)["requested_bytes.all.current"])
        else:
            with record_function(_MOMENT):
                self.held.append(0)
        return len(self.held) - 1

    def __exit__(self, *error: Any) -> None:
        gc.unfreeze()
        if self._profile is None:
            return
        self._profile.__exit__(*error)
        events = self._profile.profiler.kineto_results.events()
        in_use, moment = 0, 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                in_use += event.nbytes()
            elif event.name() == _MOMENT:
                self.held[moment] = in_use
                moment += 1


def held_memory(
    loss_of: Callable[[], Tensor], layers: Mapping[str, nn.Module], device: torch.device
) -> tuple[dict[str, int], int]:
    """Run a step, forward and backward, and measure the bytes that it holds for its backward.

    ``layers``: modules that the forward calls once each, by path.

    Returns:
        What is still allocated after each layer's forward and was not before it, by path; and what the graph holds
        after a backward that keeps it.
    """
    begins: dict[str, int] = {}
    ends: dict[str, int] = {}
    with contextlib.ExitStack() as hooks, Allocations(device) as allocations:

        def noting(path: str, moments: dict[str, int]) -> Callable[..., None]:
            return lambda *_: moments.__setitem__(path, allocations.moment())

        for path, layer in layers.items():
            hooks.callback(layer.register_forward_pre_hook(noting(path, begins)).remove)
            hooks.callback(layer.register_forward_hook(noting(path, ends)).remove)
        loss = loss_of()
        loss.backward(retain_graph=True)
        kept = allocations.moment()
        del loss
        freed = allocations.moment()
    layer_bytes = {path: allocations.held[end] - allocations.held[begins[path]] for path, end in ends.items()}
    return layer_bytes, allocations.held[kept] - allocations.held[freed]


def levels_not_kept(
    model: nn.Module,
    reports: Mapping[RecomputeLevel, PatchReport],
    held: Mapping[RecomputeLevel, tuple[Mapping[str, int], int]],
) -> dict[str, list[str]]:
    """The layers that hold as much for their backward as at the level of ``recompute`` below, by what is wrong.

    ``reports``: of each level but the first. ``held``: what ``held_memory`` returned for a step at each of ``LEVELS``.
    """
    layers_by_reason: dict[str, list[str]] = {}
    for below, level in pairwise(LEVELS):
        named = f"recompute={level!r}"
        (before, graph_before), (after, graph_after) = held[below], held[level]
        for path in _layers_with_less(model, reports[level], level):
            if after.get(path, 0) >= before.get(path, 0):
                message = f"with {named} it holds as many bytes for its backward as with recompute={below!r}"
                layers_by_reason.setdefault(message, []).append(path)
        saved = sum(before.values()) - sum(after.values())
        if saved > 0 and graph_before - graph_after < saved / 2:
            what = f"what {named} has computed again is never freed"
            layers_by_reason.setdefault(what, []).append(type(model).__name__)
    return layers_by_reason


def _layers_with_less(model: nn.Module, report: PatchReport, level: RecomputeLevel) -> Iterator[str]:
    """The layers that hold less at a level than at the one below if they do what the rows of the report say."""
    gates = {site.path for site in report.fused if site.kind == "mlp"}
    blocks = []
    for row in (row for row in report.consumers if row.reason is None):
        biases = [getattr(getattr(linear, "base_layer", linear), "bias", None) for linear in linears_of(model, row)]
        if all(bias is None or bias.requires_grad for bias in biases):  # the graph would keep a frozen one
            blocks.append(row)
    for layer in report.recompute or ():
        inside = [row for row in blocks if row.path.startswith(f"{layer.path}.")]
        if layer.reason is None and (level is True or any((row.path in gates) == (level == "mlp") for row in inside)):
            yield layer.path
