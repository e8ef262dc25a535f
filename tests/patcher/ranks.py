"""Runs a test's function in two processes of one gloo group."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_two_ranks(run: Callable[[int, int], Any], folder: Path) -> list[Any]:
    """What ``run(rank, 2)`` returns on each rank; ``folder`` is for the way back."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, args=(port, run, folder), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def _rank(rank: int, port: int, run: Callable[[int, int], Any], folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.save(run(rank, 2), folder / f"{rank}.pt")
    dist.destroy_process_group()
