"""A CUDA device as layers' graphs need it: capture into one memory pool, the pool's blocks, random numbers.

All graphs of a model have one pool. A graph that is never replayed keeps it, and the workspaces of cuBLAS and cuBLASLt:
these are allocated by the first product on a stream, one for each thread, so that products of the forward and of the
backward are captured before all else.
"""

from __future__ import annotations

import gc
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Replay = Callable[[], None]

_FILTERS = "mempool_id" in inspect.signature(torch.cuda.memory_snapshot).parameters
"""Whether this PyTorch lists the blocks of one pool."""


class CudaDevice:
    """The graphs' side of one CUDA device.

    Attributes:
        device: itself.
        workspaces: the blocks of the pool that no layer has allocated. If one of them is free again, as after
            torch.compile's own graphs, the pool's graphs are not to be replayed any more.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._latest = torch.cuda.current_stream(device)
        self._generator = torch.cuda.default_generators[device.index]
        self.renew()

    def renew(self) -> None:
        """Take a new pool; graphs of the old one must not be replayed any more."""
        self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(self._stream):
            self._products()
        torch.cuda.synchronize(self.device)
        self._keeper = self.capture(self._products)[1]
        self.workspaces = self.live_blocks()

    def _products(self) -> None:
        """Compute products with and without a bias, in this thread and in that of the backward."""
        with torch.enable_grad(), torch.autocast("cuda", enabled=False):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                x = torch.ones(32, 32, device=self.device, dtype=dtype, requires_grad=True)
                torch.autograd.grad(_Products.apply(x).sum(), x)

    def take_turn(self, stream: int) -> None:
        """Let the current stream, with this address, wait for the one on which graphs were launched or captured last.

        Graphs have memory in common, and must not run side by side.
        """
        if stream != self._latest.cuda_stream:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._latest)
            self._latest = current

    def capture(self, run: Callable[[], None]) -> tuple[Replay, Any]:
        """Capture what ``run`` launches; return a function that launches it again, and the graph, which is to be held.

        Before a capture begins, PyTorch clears the offset of random numbers on the capture's stream; in PyTorch 2.11
        all graphs read that offset. So the stream waits for the replays before it, and those after it wait for it.

        Raises:
            Exception: what ``run`` or the capture raises; the device and the generator of random numbers are sound.
        """
        graph = torch.cuda.CUDAGraph()
        self.take_turn(self.stream())
        self._stream.wait_stream(self._latest)
        try:
            with torch.cuda.stream(self._stream), _no_collection():
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    run()
                except BaseException:
                    _end_failed(graph)
                    raise
                graph.capture_end()
        except BaseException:
            torch.cuda.synchronize(self.device)
            # A failed capture leaves the generator's state as one that is captured: a fresh state has the same numbers.
            self._generator.graphsafe_set_state(self._generator.clone_state())
            raise
        self._latest.wait_stream(self._stream)
        self._let_autograd_go()
        return torch._C._CUDAGraph.replay.__get__(graph), graph

    def _let_autograd_go(self) -> None:
        """Give autograd's thread something else to do: until then it may hold the last tensors of what it ran."""
        with torch.enable_grad():
            x = torch.zeros((), device=self.device, requires_grad=True)
            torch.autograd.grad(x * 1, x)

    def live_blocks(self) -> frozenset[int]:
        """The addresses of the pool's blocks that are in use."""
        blocks = [block for segment in self._segments() for block in segment["blocks"]]
        return frozenset(block["address"] for block in blocks if block["state"] != "inactive")

    def release_memory(self) -> None:
        """Give memory that nobody uses back to the device: a capture cannot, and fails if there is too little.

        Eager steps have left as much as all activations take, which the graphs have in their pool from now on.
        """
        torch.cuda.empty_cache()

    def reserved(self) -> int:
        """The bytes of the pool."""
        return sum(segment["total_size"] for segment in self._segments())

    def _segments(self) -> list[dict[str, Any]]:
        if _FILTERS:
            return list(torch.cuda.memory_snapshot(self._pool))
        segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()
        return [segment for segment in segments if tuple(segment["segment_pool_id"]) == tuple(self._pool)]

    def random_state(self) -> Any:
        """The state of the generator of random numbers."""
        return self._generator.get_state()

    def set_random_state(self, state: Any) -> None:
        """Set the state of the generator of random numbers."""
        self._generator.set_state(state)

    def stream(self) -> int:
        """The current stream."""
        return torch._C._cuda_getCurrentRawStream(self.device.index)

    def is_capturing(self) -> bool:
        """Return whether somebody captures on the current stream."""
        return torch.cuda.is_current_stream_capturing()

    def without_owner(self, tensor: Tensor) -> Tensor:
        """The same memory as a tensor that does not own it; somebody else keeps it."""
        storage = tensor.untyped_storage()
        memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


class _Products(torch.autograd.Function):
    """Products with and without a bias, in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x @ x + functional.linear(x, x, x[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad @ grad + functional.linear(grad, grad, grad[0])


def _end_failed(graph: Any) -> None:
    """End a capture in which something was raised already."""
    try:
        graph.capture_end()
    except Exception:
        return


@contextmanager
def _no_collection() -> Iterator[None]:
    """Switch the garbage collector off: to destroy a graph or an event would break the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def random_states_of_host(device: torch.device) -> list[Any]:
    """The states of the generators on the host, of whose numbers a replay would have those of the capture.

    PyTorch's is left out if it is that of ``device``, on a CPU.
    """
    states: list[Any] = [random.getstate()]
    if (numpy := sys.modules.get("numpy")) is not None:
        _, numbers, *rest = numpy.random.get_state()
        states.append((numbers.tobytes(), *rest))
    if device.type != "cpu":
        states.append(torch.get_rng_state().numpy().tobytes())
    return states


def why_no_graphs(devices: Sequence[torch.device]) -> str | None:
    """The reason why layers with parameters on these devices cannot be replayed; or None."""
    if torch.version.hip:
        return "CUDA graphs on ROCm have not been tried"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    kinds = {device.type for device in devices}
    if kinds & {"mps", "xpu"}:
        return "its parameters are on no CUDA device"
    return f"its model is spread over {len(set(devices))} devices" if len(set(devices)) > 1 else None
