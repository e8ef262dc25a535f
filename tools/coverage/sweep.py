"""The sweep: a job for each model type, each in a process of its own, so that none can stop the others."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

SHOWN = 160
"""Characters of an error or a reason that are kept."""

Job = Callable[[str], Mapping[str, Any]]
"""A function that is run for a model type, and returns what can be written as JSON."""

_GIGABYTE = 2**30
_POLL = 0.05


def sweep(
    job: Job,
    model_types: Sequence[str],
    folder: Path,
    *,
    jobs: int = 2,
    seconds: float = 120,
    gigabytes: float = 12,
    done: Callable[[str, Mapping[str, Any]], None] = lambda name, result: None,
) -> dict[str, dict[str, Any]]:
    """Do a job for each model type.

    Args:
        job: what is done, in a fork of this process.
        model_types: their names.
        folder: where each result is written, to ``TYPE.json``; a type that has a result there is not done again.
        jobs: processes at the same time.
        seconds: after which a process is stopped.
        gigabytes: the most memory of a process, besides what this one has.
        done: is called with each type and its result.

    Returns:
        The results by type. Of a job that failed, ran too long or died it is ``{"failed": ...}``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    waiting = [name for name in model_types if not (folder / f"{name}.json").exists()]
    forks = multiprocessing.get_context("fork")
    running: dict[str, tuple[ForkProcess, float]] = {}
    waiting.reverse()
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop()
            process = forks.Process(target=_do, args=(job, name, folder, gigabytes))
            process.start()
            running[name] = process, time.monotonic()
        for name, (process, began) in list(running.items()):
            if process.is_alive() and time.monotonic() - began < seconds:
                continue
            late = process.is_alive()
            if late:
                process.kill()
            process.join()
            path = folder / f"{name}.json"
            if not path.exists():
                why = f"not done after {seconds:g} s" if late else f"the process ended with code {process.exitcode}"
                _write(path, {"failed": why})
            del running[name]
            done(name, _read(path))
        time.sleep(_POLL)
    return {name: _read(folder / f"{name}.json") for name in model_types}


def _do(job: Job, name: str, folder: Path, gigabytes: float) -> None:
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
    _write(folder / f"{name}.json", result)


def _write(path: Path, result: Mapping[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result), encoding="utf-8")
    part.replace(path)


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def in_a_line(error: BaseException) -> str:
    """Return the class and the message of an error, cut to a line and without the paths of this machine."""
    line = " ".join(f"{type(error).__name__}: {error}".split())
    return re.sub(r" from '/[^']*'?", "", line)[:SHOWN]
