"""A time is that of one call, whatever the number of calls in a graph, a series or a chain."""

import contextlib
import gc
import os
import types
from functools import partial
from unittest import mock

import pytest
import torch

from benchmarks import timing

REPLAY = 0.0024


@pytest.mark.parametrize(("sets", "in_graph"), [(5, 25), (64, 64)])
def test_a_replay_is_divided_by_its_calls(sets, in_graph):
    now, order = [0.0], []

    class Event:
        def __init__(self, enable_timing):
            self.synchronize = lambda: None

        def record(self):
            self.at = now[0]

        def elapsed_time(self, later):
            return (later.at - self.at) * 1e3

    class Graph:
        def replay(self):
            now[0] += REPLAY

    def call(index):
        order.append(index)
        now[0] += 1e-5

    fakes = {"graph": lambda graph, stream: contextlib.nullcontext(), "synchronize": lambda device=None: None}
    fakes |= {"Event": Event, "CUDAGraph": Graph, "current_stream": lambda device=None: None}
    with mock.patch.multiple(torch.cuda, **fakes):
        sampled = timing.sampler([partial(call, index) for index in range(sets)], types.SimpleNamespace(type="cuda"))
        assert sampled.method == "graph"
        assert sampled.take() == pytest.approx(REPLAY / in_graph)
    assert order[-in_graph:] == [*range(sets)] * (in_graph // sets), "the sets take turns"


def test_host_time_ends_when_the_last_call_has_returned(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def wait_for(kind):
        def wait(*device):
            now[0] += kind

        return wait

    monkeypatch.setattr(timing, "synchronize", wait_for(10.0))
    assert timing.host_and_step_time(wait_for(1.0), 4, "cpu") == (1.0, 3.5)
    collecting = []
    timing.host_and_step_time(lambda: collecting.append(gc.isenabled()), 1, "cpu")
    assert (collecting, gc.isenabled()) == ([False], True)


@pytest.mark.gpu
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="other tests would use the GPU at the same time")
def test_on_a_gpu_a_graph_is_replayed_at_a_speed_that_memory_has():
    moved = 2**28
    device = torch.device("cuda")
    with timing.own_stream(device):
        pairs = [[torch.randn(moved // 8, device=device) for _ in range(2)] for _ in range(3)]
        replayed = timing.sampler([partial(torch.neg, source, out=target) for source, target in pairs], device)
    assert replayed.method == "graph"
    assert 1e11 < moved / replayed.take() < 1e13
