"""Run a test's function in two processes of a group, and record the operators that models call."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.autograd import set_multithreading_enabled

from fused_norm.kernels.operator import Operator, calls

_WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}


def on_two_ranks(run: Callable[[int, int], Any], folder: Path, backend: str = "gloo") -> list[Any]:
    """Run ``run(rank, 2)`` on each rank and return the results, which are passed as files in ``folder``.

    ``backend``: with ``nccl`` each rank has a GPU; with any other backend a rank sees no GPU, and kernels are
    interpreted.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with mock.patch.dict(os.environ, {} if backend == "nccl" else _WITHOUT_GPUS):
        mp.spawn(_rank, args=(port, run, folder, backend), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def _rank(rank: int, port: int, run: Callable[[int, int], Any], folder: Path, backend: str) -> None:
    # transformers does not shard a model without these variables, which a launcher would set.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.save(run(rank, 2), folder / f"{rank}.pt")
    dist.destroy_process_group()


class _Called(list[str]):
    """The plain names of the called operators that did not fall back to the formula."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        """The calls by name, and how many of them write an output in two dtypes."""

    def called(self, operator: Operator, arguments: tuple[Any, ...]) -> Any:
        self.append(operator.plain_name or operator.name)
        self.counts[operator.name] += 1
        if operator.by_name(arguments).get("wide"):
            self.counts["written in two dtypes"] += 1
        return operator.results_of(*arguments)


@contextmanager
def called_operators() -> Iterator[list[str]]:
    """Yield a list of the operators that are called in the block, including those of a backward that runs in it.

    A thread sees only its own calls, and on a GPU PyTorch would run the backward in another thread.
    """
    with calls.by(called := _Called()), set_multithreading_enabled(False):
        yield called
