from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

import fused_norm.kernels.fp8  # noqa: F401 -- registers an operator that no other file loads
from fused_norm.kernels import norm_kernels, qk_kernels, recording
from fused_norm.kernels.operator import OPERATORS as ALL
from fused_norm.kernels.plans import TABLES
from fused_norm.kernels.triton import devices
from fused_norm.kernels.triton.launch import Launch

OPERATORS: dict[str, Any] = {
    name: operator for name, operator in ALL.items() if operator.gradients and not operator.not_differentiable
}
"""The operators that every test of gradients covers; norms that write FP8 have tests of their own."""

HEAD = sys.modules[type(ALL["linear_cross_entropy"]).__base__.__module__]
"""The module of what the operators of a vocabulary head share."""


@pytest.fixture(autouse=True)
def _nothing_recorded() -> None:
    """Forget all recordings, so that a function that a test replaces is in no recording of the next test."""
    recording.forget_all()


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Fill fresh memory with NaN, so that unwritten elements and reads out of bounds show."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    assert torch.empty_strided((3, 1), (1, 1)).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Collect every launch of the test in order. Recordings launch through Triton, so their launches are seen too."""
    recorded: list[Launch] = []
    monkeypatch.setattr(recording, "launch_backend", lambda device: None)
    recording.forget_all()
    run = Launch.run

    def noted(launch: Launch) -> Any:
        recorded.append(launch)
        return run(launch)

    monkeypatch.setattr(Launch, "run", noted)
    yield recorded
    recording.forget_all()


@pytest.fixture
def launched(launches: list[Launch]) -> Callable[[], list[str]]:
    """Return the names of the kernels launched since the last call, in order."""

    def names() -> list[str]:
        kernel_names = [launch.name for launch in launches]
        launches.clear()
        return kernel_names

    return names


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Make every launcher plan for a device, by the rules alone."""
    with ExitStack() as stack:

        def use(device: Any) -> None:
            monkeypatch.setattr(devices, "_hardware_of", lambda _: device)
            stack.enter_context(devices.use_plans(TABLES[0]))

        yield use


def _module_of(operator: str) -> ModuleType:
    """The module of an operator; a public function hides it in its package."""
    return sys.modules[type(ALL[operator]).__module__]


Planned = Callable[..., None]
"""The type of ``planned``."""


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Planned:
    """Change fields of every plan of the "forward" or "backward" of norms, of "conv", or of the "device" of heads."""
    places = {"forward": (norm_kernels, "forward_plan"), "backward": (norm_kernels, "backward_plan")}
    places |= {"device": (qk_kernels, "device_props"), "conv": (_module_of("causal_conv1d"), "conv_plan")}

    def change(what: str, **fields: Any) -> None:
        module, name = places[what]
        plan = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **options: replace(plan(*args, **options), **fields))
        recording.forget_all()

    return change


IN_TWO_PIECES = {"rows": 2, "block": 32, "warps": 1, "stages": 2, "programs": 2, "reload": False, "tail": 16}
"""Rows of 33 to 48 elements in tiles of two rows; the last tile is half empty if the number of rows is odd."""
IN_CHUNKS = {"rows": 2, "block": 32, "warps": 1, "stages": 2, "programs": 8, "chunked": True, "tail": 0}


@pytest.fixture
def in_two_pieces(planned: Planned) -> None:
    """Make backwards of norms read rows in two pieces."""
    planned("backward", **IN_TWO_PIECES)


@pytest.fixture
def in_chunks(planned: Planned) -> None:
    """Make norms read rows of more than 64 elements in chunks, as rows that are too wide to hold."""
    planned("forward", mode="multi_wave_reload", rows=1, block=64, warps=1)
    planned("backward", **IN_CHUNKS)


@pytest.fixture
def sandwich_limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one kernel hold rows of up to 50 elements in the direction named: "forward", "backward", "both" or "none"."""
    named = getattr(request, "param", "both")
    for direction in ("forward", "backward"):
        if named in (direction, "both"):
            monkeypatch.setattr(norm_kernels, f"WIDEST_SANDWICH_{direction.upper()}", 50)


@pytest.fixture(params=["held", "in chunks"])
def held_or_in_chunks(request: pytest.FixtureRequest) -> None:
    """Run a test twice: with the usual way to read rows, and ``in_chunks``."""
    if request.param == "in chunks":
        request.getfixturevalue("in_chunks")


@pytest.fixture
def sums_in_fp32() -> Iterator[None]:
    """Keep cuBLAS from summing parts of a product in 16 bits, which it does for some shapes and strides."""
    matmul = torch.backends.cuda.matmul
    usual = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = False
    yield
    matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction = usual


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit chunks of logits to 16 rows, so that a few rows are several chunks."""
    monkeypatch.setattr(HEAD, "MOST_ROWS", 16)
    monkeypatch.setattr(HEAD, "_MULTIPLE", 8)
