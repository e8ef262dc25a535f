"""When patched modules run their stock code, whatever they are called with: the switch, and modes of PyTorch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

modes = torch._C._len_torch_function_stack


class _Switch:
    """The switch that turns all fusing off.

    Attributes:
        depth: the number of ``disabled`` blocks; fusing is off while it is not 0.
        latest_mode: the reason that the latest forward gave for a mode; of all threads, as a backward may run in
            another one.
    """

    def __init__(self) -> None:
        self.depth, self.lock = 0, threading.Lock()
        self.latest_mode: str | None = None


switch = _Switch()


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Run the stock code of every patched model inside the ``with``, in all threads of the process.

    The switch is the process's, not the thread's, because autograd runs backward, and recomputes checkpoints, on
    threads of its own. Enter and leave it between steps: a checkpoint that was saved fused and is recomputed stock, or
    the other way round, holds other tensors.
    """
    with switch.lock:
        switch.depth += 1
    try:
        yield
    finally:
        with switch.lock:
            switch.depth -= 1


def why_seen_by_mode() -> str | None:
    """Return the reason that a ``TorchFunctionMode`` is active; None without one, and for that of a default device.

    PyTorch takes a mode off while a backward runs. What a checkpoint then runs again has to save what it saved in the
    forward, so there the mode of the latest forward counts.
    """
    if modes():
        for mode in _get_current_function_mode_stack():
            if not isinstance(mode, DeviceContext):
                name = type(mode).__name__
                switch.latest_mode = f"a {name} is active, a mode that sees the functions that stock code calls"
                return switch.latest_mode
    if switch.latest_mode is not None and torch._C._current_graph_task_id() == -1:
        switch.latest_mode = None
    return switch.latest_mode
