"""A job that fails, dies or takes too long is reported, and stops none of the others."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tools.coverage.sweep import sweep


def job(name: str) -> dict:
    if name == "raises":
        raise ValueError("of no use")
    if name == "dies":
        os._exit(3)
    if name == "sleeps":
        time.sleep(60)
    if name == "swells":
        bytearray(4 * 2**30)
    return {"name": name}


def test_each_job_has_a_result_whatever_another_one_does(tmp_path: Path) -> None:
    names = ["dies", "first", "raises", "sleeps", "swells", "last"]
    seen: list[str] = []
    results = sweep(job, names, tmp_path, jobs=3, seconds=1, gigabytes=2, done=lambda name, result: seen.append(name))
    assert list(results) == names
    assert sorted(seen) == sorted(names)
    assert results["first"] == {"name": "first"}
    assert results["last"] == {"name": "last"}
    assert results["raises"] == {"failed": "ValueError: of no use"}
    assert results["dies"] == {"failed": "the process ended with code 3"}
    assert results["sleeps"] == {"failed": "not done after 1 s"}
    assert results["swells"]["failed"].startswith("MemoryError")


def test_a_result_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    (tmp_path / "raises.json").write_text('{"name": "from before"}')
    assert sweep(job, ["raises"], tmp_path) == {"raises": {"name": "from before"}}


def test_no_more_processes_run_than_are_allowed(tmp_path: Path) -> None:
    def note(name: str) -> dict:
        began = time.time()
        time.sleep(0.1)
        return {"began": began, "ended": time.time()}

    results = sweep(note, [str(number) for number in range(4)], tmp_path, jobs=2).values()
    assert max(sum(other["began"] <= one["began"] < other["ended"] for other in results) for one in results) <= 2
