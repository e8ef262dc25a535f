"""Layers that are replayed as CUDA graphs give the bits of eager ones, whatever people do in between."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch

from fused_norm.patcher import cuda_graphs, survey

from .graph_cases import ATTENTION, CASES, HAS_GPU, ONE, Run
from .graph_stand_in import StandIn

FEW_REPLAYS = {"many_lengths": 0, "padding_masks": 0, "packed_rows": 0}
"""Cases in which few calls or none are replayed."""


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replay by a stand-in if there is no GPU; on a GPU let eager give the same bits each time."""
    if not HAS_GPU:
        monkeypatch.setattr(cuda_graphs, "make_device", StandIn)
        monkeypatch.setattr(survey, "why_no_graphs", lambda devices: None)
        yield
        return
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def differences(replayed: Run, eager: Run) -> list[int]:
    """Return the places at which two runs' results differ in a bit."""
    assert len(replayed.results) == len(eager.results)
    return [
        place
        for place, (one, other) in enumerate(zip(replayed.results, eager.results, strict=True))
        if (one is None) != (other is None) or (one is not None and not torch.equal(one, other))
    ]


QUICK = (
    "full-equal_bits", "full-padding_masks", "full-two_forwards_before_a_backward", "full-two_shapes_in_flight",
    "full-evaluation_between", "full-generation_between", "full-hidden_states_returned", "full-checkpointing_switched",
    "lora-accumulation", "lora-adapters_scaled_and_switched",
    "lora-adapters_activated_in_turns", "lora-forwards_dropped", "lora-backward_from_within",
)  # fmt: skip
"""What the fast tests try; on a GPU all cases are fast."""


def cases() -> list[Any]:
    """Return modes and cases, most of them marked as slow on a CPU."""
    return [
        pytest.param(mode, name, marks=() if HAS_GPU or f"{mode}-{name}" in QUICK else pytest.mark.slow)
        for name in CASES
        for mode in ("full", "lora")
    ]


@pytest.mark.parametrize(("mode", "name"), cases())
def test_replays_give_the_bits_of_eager(mode: str, name: str) -> None:
    attention = "eager" if name.startswith(("padding", "packed")) else ATTENTION
    runs = {graphs: Run(mode, graphs=graphs, attention=attention) for graphs in (True, False)}
    for run in runs.values():
        CASES[name](run)
    assert differences(runs[True], runs[False]) == []
    replays = runs[True].replays
    assert replays.forwards > FEW_REPLAYS.get(name, len(runs[True].layers)), replays
    assert replays.backwards > FEW_REPLAYS.get(name, 0), replays


def test_a_layer_is_looked_at_once_if_its_adapters_are_activated_in_turns() -> None:
    run, looks = Run("lora", graphs=True), 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal looks
        looks += event == "call" and frame.f_code.co_qualname == "Snapshot.__init__"

    sys.setprofile(note)
    try:
        CASES["adapters_activated_in_turns"](run)
    finally:
        sys.setprofile(None)
    states = 3  # the one adapter, the other, and both
    assert looks == run.replays.captures == states * len(run.layers)


@pytest.mark.slow
@pytest.mark.parametrize("level", [True, "mlp", "attention"])
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_recompute_levels_are_replayed(level, mode: str) -> None:
    runs = {graphs: Run(mode, graphs=graphs, recompute=level, modules=None) for graphs in (True, False)}
    for run in runs.values():
        run.warm_up(3)
        run.step(ONE, 5)
    assert differences(runs[True], runs[False]) == []
    assert runs[True].replays.backwards == 3 * len(runs[True].layers)
