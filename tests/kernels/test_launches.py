"""Launches from several threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from fused_norm.kernels import rms_norm


@pytest.fixture
def _threads_switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_threads_switch_often")
def test_threads_compute_what_one_thread_does(device: str) -> None:
    inputs = [torch.randn(rows, 24, device=device).requires_grad_() for rows in (3, 70, 130, 260)]
    w = torch.randn(24, device=device)

    def results(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = rms_norm(x, w)
        return y, *torch.autograd.grad(y.square().sum(), x)

    expected = [results(x) for x in inputs]
    wrong: list[object] = []

    def work(index: int) -> None:
        try:
            for _ in range(6):
                if not all(map(torch.equal, results(inputs[index]), expected[index])):
                    wrong.append(index)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
