"""The sweep: a job for each model type, each in a process of its own, so that none can stop the others."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

SHOWN = 160
"""Characters of an error or a reason that are kept."""

_GIGABYTE = 2**30
_POLL = 0.05


def sweep(
    job: Callable[[str], Mapping[str, Any]],
    model_types: Sequence[str],
    *,
    jobs: int = 2,
    seconds: float = 120,
    gigabytes: float = 12,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Do a job for each model type.

    Args:
        job: what is done, in a fork of this process; it returns what can be written as JSON.
        model_types: their names.
        jobs: processes at the same time.
        seconds: after which a process is stopped.
        gigabytes: the most memory of a process, besides what this one has.

    Yields:
        Each type with its result, as they end. Of a job that failed, ran too long or died it is ``{"failed": ...}``.
    """
    forks = multiprocessing.get_context("fork")
    running: dict[str, tuple[ForkProcess, float]] = {}
    waiting = list(reversed(model_types))
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop()
                process = forks.Process(target=_do, args=(job, name, Path(folder, name), gigabytes))
                process.start()
                running[name] = process, time.monotonic()
            for name, (process, began) in list(running.items()):
                late = time.monotonic() - began >= seconds
                if process.is_alive() and not late:
                    continue
                process.kill()
                process.join()
                path = Path(folder, name)
                why = f"not done after {seconds:g} s" if late else f"the process ended with code {process.exitcode}"
                del running[name]
                yield name, json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"failed": why}
            time.sleep(_POLL)


def _do(job: Callable[[str], Mapping[str, Any]], name: str, path: Path, gigabytes: float) -> None:
    """Do a job with a limit of memory, saying nothing, and write its result to ``path``."""
    import torch

    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + int(gigabytes * _GIGABYTE)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        result = job(name)
    except Exception as error:  # of whatever kind a foreign model raises
        result = {"failed": in_a_line(error)}
    part = path.with_name(f"{name}.part")
    part.write_text(json.dumps(result), encoding="utf-8")
    part.replace(path)


def in_a_line(error: BaseException) -> str:
    """Return the class and the message of an error, cut to a line and without the paths of this machine."""
    line = " ".join(f"{type(error).__name__}: {error}".split())
    return re.sub(r" from '/[^']*'?", "", line)[:SHOWN]
