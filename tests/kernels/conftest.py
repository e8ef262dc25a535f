from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fused_norm.kernels import replay
from fused_norm.kernels.add_rms_norm import ADD_RMS_NORM
from fused_norm.kernels.gated_rms_norm import GATED_RMS_NORM
from fused_norm.kernels.glu import GLU
from fused_norm.kernels.norm_add import NORM_ADD
from fused_norm.kernels.norm_add_norm import NORM_ADD_NORM
from fused_norm.kernels.norm_from_rstd import NORM_FROM_RSTD
from fused_norm.kernels.operator import Operator
from fused_norm.kernels.plans import BackwardPlan, ForwardPlan
from fused_norm.kernels.qk_norm import QK_NORM
from fused_norm.kernels.replay import build, executor
from fused_norm.kernels.rms_norm import RMS_NORM
from fused_norm.kernels.rope import ROPE
from fused_norm.kernels.triton.launch import Launch

from . import replay_on_cpu

OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (RMS_NORM, ADD_RMS_NORM, NORM_ADD, NORM_ADD_NORM, QK_NORM, ROPE, GLU, GATED_RMS_NORM)
}
Halves = dict[str, Any]
"""The native half of each operator, by name."""
_MODULES = tuple(sys.modules[type(operator).__module__] for operator in OPERATORS.values())


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Fresh memory is NaN, so that an element no kernel writes, or one read from outside a tensor, shows."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    assert torch.empty_strided((3, 1), (1, 1)).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def without_replay() -> Iterator[None]:
    """Python makes every launch."""
    replay.switch(False)
    yield
    replay.switch(True)


@contextmanager
def replayed_natively(device: str, limit: int = executor.RECORDING_LIMIT) -> Iterator[Halves]:
    """Operators replay natively inside, with nothing recorded yet, and keep ``limit`` recordings."""
    library = build.load() if device == "cpu" else build.library()
    if library is None:
        raise build.UnavailableError("no native library")
    replay.switch(True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "RECORDING_LIMIT", limit)
        for operator in (*OPERATORS.values(), NORM_FROM_RSTD):
            for method in ("run", "run_known", "kept"):  # put back afterwards
                patch.setattr(operator.executor, method, None)
            operator.executor.connect(library)
        halves = {name: operator.executor.run for name, operator in OPERATORS.items()}
        if device == "cpu":
            with replay_on_cpu.connected(library):
                yield halves
        else:
            yield halves


@pytest.fixture
def native(device: str) -> Iterator[Halves]:
    """Operators replay natively, with nothing recorded yet."""
    try:
        with replayed_natively(device) as halves:
            yield halves
    except build.UnavailableError as reason:
        pytest.skip(f"no native library: {reason}")


class Launched(NamedTuple):
    """One launch of a kernel."""

    launch: Launch
    grid: tuple[int, int]
    tensors: tuple[Tensor | None, ...]
    floats: tuple[float | None, ...]


@pytest.fixture
def launches(without_replay: None, monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    """Every launch of the test, in order."""
    found: list[Launched] = []
    launch = Launch.__call__

    def noted(self: Launch, grid: Any, tensors: Any, counts: Any, strides: Any = (), floats: Any = ()) -> None:
        found.append(Launched(self, grid, tensors, floats))
        launch(self, grid, tensors, counts, strides, floats)

    monkeypatch.setattr(Launch, "__call__", noted)
    return found


@pytest.fixture
def launched(launches: list[Launched]) -> Callable[[], list[str]]:
    """Return the names of the kernels launched since the last look, in order."""

    def names() -> list[str]:
        found = [one.launch.name for one in launches]
        launches.clear()
        return found

    return names


@pytest.fixture
def planned(without_replay: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[ForwardPlan | BackwardPlan], None]:
    """Makes every forward or backward of a norm take one plan, whatever its shape."""

    def force(plan: ForwardPlan | BackwardPlan) -> None:
        name = "launch_norm_forward" if isinstance(plan, ForwardPlan) else "launch_norm_backward"
        for module in _MODULES:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, partial(getattr(module, name), plan=plan))

    return force


@pytest.fixture
def in_chunks(planned: Callable[[ForwardPlan | BackwardPlan], None]) -> None:
    """Norms read a row of more than 64 elements in pieces, as one that is too wide to hold."""
    planned(ForwardPlan("multi_wave_reload", rows=1, block=64, warps=1))
    planned(BackwardPlan(2, 32, 1, stages=2, programs=8, chunked=True))


@pytest.fixture
def sandwich_limits(request: pytest.FixtureRequest, without_replay: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel holds rows of up to 50 elements in the directions named: "forward", "backward", "both" or "none"."""
    for direction in ("forward", "backward"):
        for module in _MODULES:
            limit = f"WIDEST_SANDWICH_{direction.upper()}"
            if request.param in (direction, "both") and hasattr(module, limit):
                monkeypatch.setattr(module, limit, 50)


@pytest.fixture(params=["held", "in chunks"])
def held_or_in_chunks(request: pytest.FixtureRequest) -> None:
    """Runs a test twice: with rows as their shape has them read, and ``in_chunks``."""
    if request.param == "in chunks":
        request.getfixturevalue("in_chunks")
