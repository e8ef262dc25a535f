"""Layers that are replayed as CUDA graphs give the bits of eager ones, whatever people do in between."""

from __future__ import annotations

from collections.abc import Iterator

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


@pytest.mark.parametrize("mode", ["full", "lora"])
@pytest.mark.parametrize("name", CASES)
def test_replays_give_the_bits_of_eager(name: str, mode: str) -> None:
    attention = "eager" if name.startswith(("padding", "packed")) else ATTENTION
    runs = {graphs: Run(mode, graphs=graphs, attention=attention) for graphs in (True, False)}
    for run in runs.values():
        CASES[name](run)
    assert differences(runs[True], runs[False]) == []
    replays = runs[True].replays
    assert replays.forwards > FEW_REPLAYS.get(name, len(runs[True].layers)), replays
    assert replays.backwards > FEW_REPLAYS.get(name, 0), replays


@pytest.mark.parametrize("level", [True, "mlp", "attention"])
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_recompute_levels_are_replayed(level, mode: str) -> None:
    runs = {graphs: Run(mode, graphs=graphs, recompute=level, modules=None) for graphs in (True, False)}
    for run in runs.values():
        run.warm_up(3)
        run.step(ONE, 5)
    assert differences(runs[True], runs[False]) == []
    assert runs[True].replays.backwards == 3 * len(runs[True].layers)
