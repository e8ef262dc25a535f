"""The time of a call on the GPU and on the host, and its peak of GPU memory.

GPU times are those of replays of a CUDA graph that holds nothing but the calls (launch gaps included, as in a captured
training step). They go through several sets of inputs in turn, so that a call does not find its inputs in the L2 cache.

On a CPU it is the wall clock, which shows that the code runs, and nothing else.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from .samples import Method

logger = logging.getLogger(__name__)

Call = Callable[[], object]
T = TypeVar("T")

ROTATED_BYTES = 256 * 2**20
"""The least size of all sets of inputs and outputs together; four times the L2 cache if that is more."""

_FEWEST_SETS, _MOST_SETS = 3, 64
_GRAPH_CALLS = 24  # So many in one graph that the gap to the next replay, a microsecond or two, does not count.
_GRAPH_SECONDS = 0.01  # Slow calls need no such care.


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """A context with a stream of its own, because calls on the default stream cannot be captured in a CUDA graph.

    The forward belongs inside too: autograd runs a backward on the stream of its forward.
    """
    if device.type == "cpu":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


def input_sets(call_bytes: int, device: torch.device) -> int:
    """The number of sets of inputs to go through when a call moves ``call_bytes``, inputs and outputs."""
    if device.type == "cpu":
        return 1
    count = math.ceil(_beyond_cache(device) / max(call_bytes, 1))
    return min(max(count, _FEWEST_SETS), _MOST_SETS)


def leaves_cache(total_bytes: int, device: torch.device) -> bool:
    """Return whether sets of ``total_bytes`` together are too large to be found in the L2 cache again."""
    return device.type != "cpu" and total_bytes >= _beyond_cache(device) // 2


def _beyond_cache(device: torch.device) -> int:
    return max(ROTATED_BYTES, 4 * torch.cuda.get_device_properties(device).L2_cache_size)


@dataclass(frozen=True)
class Sampler:
    """Takes samples of the time of a call.

    Attributes:
        take: measures once, and returns the seconds of one call.
        method: how; see ``samples.Timing``.
    """

    take: Callable[[], float]
    method: Method


def sampler(calls: Sequence[Call], device: torch.device) -> Sampler:
    """Make what times one of ``calls`` on the GPU, by replays of a CUDA graph of all of them; by events if it must.

    What a call returns keeps its memory until its set's next turn: outputs that took turns in one buffer would stay in
    the cache.

    ``calls``: the same call on each set of inputs. To be called inside ``own_stream``, as what made the inputs was.
    """
    if device.type == "cpu":
        return Sampler(lambda: _wall(calls) / len(calls), "wall")
    for call in calls:  # What is compiled or loaded at the first call cannot be captured.
        call()
    estimate = _between_events(partial(_run, calls))
    rounds = max(1, min(math.ceil(_GRAPH_CALLS / len(calls)), int(_GRAPH_SECONDS / estimate)))
    graph = torch.cuda.CUDAGraph()
    outputs: list[object] = [None] * len(calls)
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for index in [*range(len(calls))] * rounds:
                outputs[index] = None
                outputs[index] = calls[index]()
    except RuntimeError as error:
        logger.warning("not capturable, timed by events instead: %s", str(error).partition("\n")[0])
        torch.cuda.synchronize(device)
        return Sampler(lambda: _between_events(partial(_run, calls)) / len(calls), "events")
    return Sampler(lambda: _between_events(graph.replay) / (rounds * len(calls)), "graph")


def long_call_sampler(call: Call, device: torch.device) -> Sampler:
    """Make what times a call of many milliseconds by events, without a CUDA graph, which would keep its memory.

    The host is ahead of the GPU in such a call, unless the call itself waits for the GPU: then that wait counts.
    """
    if device.type == "cpu":
        return Sampler(lambda: _wall([call]), "wall")
    call()
    return Sampler(lambda: _between_events(call), "events")


def copy_sampler(moved_bytes: int, device: torch.device) -> Sampler:
    """Make what times a copy that moves ``moved_bytes``, half of them read and half written, as all else is timed."""
    shape = max(moved_bytes // 4, 1)
    sets = input_sets(moved_bytes, device)
    pairs = [(torch.randn(shape, device=device).bfloat16(), torch.empty(shape, device=device).bfloat16())]
    pairs += [(source.clone(), target.clone()) for source, target in pairs * (sets - 1)]
    return sampler([partial(target.copy_, source) for source, target in pairs], device)


def host_and_step_time(call: Call, calls: int, device: torch.device) -> tuple[float, float]:
    """Seconds of one of ``calls`` calls in a row, from an idle device.

    Returns:
        The time until the last call has returned, which is the host's, and the time until the device is idle again.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        synchronize(device)
        began = time.perf_counter()
        for _ in range(calls):
            call()
        returned = time.perf_counter()
        synchronize(device)
        return (returned - began) / calls, (time.perf_counter() - began) / calls
    finally:
        if collecting:
            gc.enable()


def memory_now(device: torch.device) -> tuple[int, int]:
    """The GPU memory that tensors have, and that PyTorch's allocator holds for them, in bytes; none on a CPU."""
    return (0, 0) if device.type == "cpu" else (torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))


def peak_memory(call: Call, device: torch.device) -> tuple[int, int] | None:
    """The peak of GPU memory during a call in bytes, by tensors and by PyTorch's allocator for them; None on a CPU.

    The call runs once before: memory that only the first call needs, such as that of compiling, does not count. What
    was reserved for it and for others is given back before the call that counts.
    """
    if device.type == "cpu":
        return None
    call()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    call()
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def memory_over(call: Callable[[], T], device: torch.device) -> tuple[int, T]:
    """The peak of memory during a call beyond what there was before, in bytes, and what the call returns.

    The call runs once before. On a CPU the events of torch.profiler are added up, elsewhere the allocator says.
    """
    call()
    gc.collect()  # What is freed during the call must not be of before.
    if device.type == "cpu":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            result = call()
        assert profiler.profiler is not None
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        return max(itertools.accumulate((event.nbytes() for event in events), initial=0)), result
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]  # what is allocated is rounded up
    result = call()
    return torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - before, result


def _run(calls: Sequence[Call]) -> list[object]:
    return [call() for call in calls]


def _between_events(call: Call) -> float:
    """Seconds from the end of one call to the end of the next on the GPU."""
    call()  # So that the GPU is busy while the one that counts is enqueued.
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    call()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) * 1e-3


def _wall(calls: Sequence[Call]) -> float:
    began = time.perf_counter()
    _run(calls)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    """Wait until a device is idle."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)
