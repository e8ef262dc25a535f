"""A time is that of one call, whatever the number of calls in a graph, a series or a chain."""

from __future__ import annotations

import contextlib
import gc
import os
import types
from functools import partial

import pytest
import torch

from benchmarks import timing

CPU = torch.device("cpu")
GPU = types.SimpleNamespace(type="cuda")
"""A device with the properties that ``timing`` reads; the tensors of these tests are on the CPU."""

REPLAY = 0.0024


class Clock:
    """The time that the fake GPU events read."""

    def __init__(self) -> None:
        self.now = 0.0
        self.captured = 0


@pytest.fixture
def gpu(monkeypatch):
    """The parts of ``torch.cuda`` that ``timing`` uses; a replay takes ``REPLAY``, a call from Python 10 us."""
    clock = Clock()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock.now

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, later: Event) -> float:
            return (later.at - self.at) * 1e3

    class Graph:
        def replay(self) -> None:
            clock.now += REPLAY

    @contextlib.contextmanager
    def capture(graph: Graph, stream: object):
        clock.captured += 1
        yield

    properties = types.SimpleNamespace(L2_cache_size=60 * 2**20)
    for name, fake in {
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": capture,
        "current_stream": lambda device=None: None,
        "synchronize": lambda device=None: None,
        "get_device_properties": lambda device: properties,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return clock


@pytest.mark.parametrize(("sets", "in_graph"), [(5, 25), (64, 64)])
def test_a_replay_is_divided_by_its_calls(gpu, sets, in_graph):
    order = []

    def call(index):
        order.append(index)
        gpu.now += 1e-5

    sampled = timing.sampler([partial(call, index) for index in range(sets)], GPU)
    assert sampled.method == "graph"
    assert sampled.take() == pytest.approx(REPLAY / in_graph)
    assert gpu.captured == 1
    assert order[-in_graph:] == [*range(sets)] * (in_graph // sets), "the sets take turns"


def test_host_time_ends_when_the_last_call_has_returned(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def wait_for(kind):
        def wait(*device):
            now[0] += kind

        return wait

    monkeypatch.setattr(timing, "_synchronize", wait_for(10.0))
    assert timing.host_and_step_time(wait_for(1.0), 4, CPU) == (1.0, 3.5)
    collecting = []
    timing.host_and_step_time(lambda: collecting.append(gc.isenabled()), 1, CPU)
    assert (collecting, gc.isenabled()) == ([False], True)


@pytest.mark.gpu
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="other tests would use the GPU at the same time")
@pytest.mark.parametrize("moved", [2**28])
def test_on_a_gpu_a_graph_is_replayed_at_a_speed_that_memory_has(moved):
    device = torch.device("cuda")
    with timing.own_stream(device):
        pairs = [[torch.randn(moved // 8, device=device) for _ in range(2)] for _ in range(3)]
        replayed = timing.sampler([partial(torch.neg, source, out=target) for source, target in pairs], device)
    assert replayed.method == "graph"
    assert 1e11 < moved / replayed.take() < 1e13
