"""A stand-in for CUDA graphs on a CPU: it replays by running again, and leaves undefined what a real graph would.

A capture computes nothing, so that outputs are NaN after it. Gradients lie in memory that the next replay may use: they
are NaN from then on. A replay takes the activations of all pairs that did not hold theirs at its capture. On another
stream than the latest, whose turn it is not, it leaves NaN.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

NAN = float("nan")


class StandIn:
    """What ``CudaDevice`` is for a CUDA device.

    Attributes:
        blocks: the blocks of the pool that tests say are in use.
        fails: whether captures raise.
        released: how often memory that nobody uses was given back.
        current: the current stream.
    """

    current = 0

    def __init__(self, device: torch.device) -> None:
        self.device, self.workspaces = device, frozenset({0})
        self.blocks: set[int] = {0}
        self.fails, self.released = False, 0
        self._pairs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._given: list[Tensor] = []
        self._latest = self.current

    def renew(self) -> None:
        self.blocks = {0}

    def capture(self, run: Callable[[], None]) -> tuple[Callable[[], None], None]:
        if self.fails:
            raise RuntimeError("no capture today")
        state, pair = torch.get_rng_state(), run.__self__  # type: ignore[attr-defined]
        run()
        torch.set_rng_state(state)
        for output in pair.outputs:
            output.fill_(NAN)
        self._pairs.add(pair)
        self._latest = self.current
        return partial(self._replay, run, pair), None

    def _replay(self, run: Callable[[], None], pair: Any) -> None:
        for grad in self._given:
            grad.fill_(NAN)
        for other in self._pairs:
            if other.number not in pair.live:
                other.drop_activations()
        run()
        is_backward = run.__name__ == "_backward"
        written = [*pair._grads, *(flat.grads for flat in pair._flat_grads)] if is_backward else pair.outputs
        if self._latest != self.current:
            for tensor in filter(torch.is_tensor, written):
                tensor.fill_(NAN)
        self._given = []
        if is_backward:
            own = {buffer.data_ptr() for buffer in pair.output_grads if buffer is not None}
            self._given = [grad for grad in written if grad is not None and grad.data_ptr() not in own]

    def live_blocks(self) -> frozenset[int]:
        return frozenset(self.blocks)

    def release_memory(self) -> None:
        self.released += 1

    def reserved(self) -> int:
        return 1024

    def random_state(self) -> Tensor:
        return torch.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)

    def stream(self) -> int:
        return self.current

    def take_turn(self, stream: int) -> None:
        self._latest = stream

    def is_capturing(self) -> bool:
        return False

    def without_owner(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
        flat = torch.frombuffer(memory, dtype=tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).detach()
