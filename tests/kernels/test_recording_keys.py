"""Calls of many kinds on tensors of one shape are each recorded once, however many kinds there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch

from fused_norm import NormSpec
from fused_norm.kernels import recording

from .conftest import ALL
from .numerics import BF16

import_module("fused_norm.patcher")  # which has the operators of LoRA layers

Call = Callable[[], torch.Tensor]


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets an item for each call that is recorded."""
    recorded, real = list[int](), recording.Recording

    def counted(*args: Any, **kwargs: Any) -> Any:
        recorded.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(recording, "Recording", counted)
    return recorded


def lora(rank: int, factor: float, device: str) -> Call:
    x = torch.randn(4, 32, device=device).to(BF16).requires_grad_()
    a, b = torch.randn(rank, 32, device=device).to(BF16), torch.randn(32, rank, device=device).to(BF16)
    w = torch.randn(32, 32, device=device).to(BF16)
    arguments = x, x, a.requires_grad_(), b.requires_grad_(), w, None, None, factor, 1.0, 1.0, BF16
    return lambda: ALL["lora_linear"](*arguments)


def norm(eps: float, device: str) -> Call:
    x, weight = torch.randn(4, 32, device=device).requires_grad_(), torch.ones(32, device=device)
    return lambda: ALL["rms_norm"](x, weight, NormSpec("llama", eps=eps), None)


def norm_of(dtype: int, needs: int, device: str) -> Call:
    dtypes = torch.float32, BF16, torch.float16
    x = torch.randn(4, 32, device=device).to(dtypes[dtype % 3]).requires_grad_(needs != 1)
    weight = torch.ones(32, device=device, dtype=dtypes[dtype // 3]).requires_grad_(needs != 2)
    return lambda: ALL["rms_norm"](x, weight, NormSpec("llama"), None)


KINDS: dict[str, Callable[[int, str], Call]] = {
    "ranks": lambda kind, device: lora(1 + kind, 2.0, device),
    "scalings of one rank": lambda kind, device: lora(4, 1.0 + kind, device),
    "eps": lambda kind, device: norm(1e-6 * (1 + kind), device),
    "dtypes and gradients": lambda kind, device: norm_of(kind % 7, kind // 7, device),
}


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    recording.forget_all()
    yield
    recording.forget_all()


@pytest.mark.parametrize("what", KINDS)
@pytest.mark.parametrize("kinds", [9, 20])
def test_nothing_is_recorded_in_the_third_step(kinds: int, what: str, device: str, records: list[int]) -> None:
    calls = [KINDS[what](kind, device) for kind in range(kinds)]
    counts = []
    for _ in range(3):
        records.clear()
        for call in calls:
            call().float().sum().backward()
        counts.append(len(records))
    assert counts[0] >= kinds
    assert counts[1:] == [0, 0], f"{counts} calls are recorded in the steps"


@pytest.mark.parametrize("most", ["KEYS", "EACH"])
def test_the_oldest_recording_alone_makes_room(
    most: str, device: str, records: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, most, 3)
    if most == "KEYS":
        calls = [norm(1e-6 * (1 + kind), device) for kind in range(4)]
    else:  # they differ in strides alone
        weight, spec = torch.ones(32, device=device), NormSpec("llama")
        rows = [torch.randn(4, 32 * (1 + kind), device=device)[:, :32] for kind in range(4)]
        calls = [lambda x=x: ALL["rms_norm"](x, weight, spec, None) for x in rows]  # type: ignore[misc]
    for call in calls:
        call()
    records.clear()
    for call in calls[1:]:
        call()
    assert not records, "they are the latest ones"
    calls[0]()
    assert records == [1]
