"""A job that fails, dies or takes too long is reported, and does not stop the others."""

import os
import time

from tools.coverage.sweep import sweep


def job(name):
    if name == "raises":
        raise ValueError("of no use")
    if name == "dies":
        os._exit(3)
    if name == "sleeps":
        time.sleep(60)
    if name == "swells":
        bytearray(4 * 2**30)
    return {"name": name}


def test_each_job_has_a_result_whatever_another_one_does():
    names = ["dies", "first", "raises", "sleeps", "swells", "last"]
    results = dict(sweep(job, names, jobs=3, seconds=1, gigabytes=2))
    assert results.pop("swells")["failed"].startswith("MemoryError")
    assert results == {
        "first": {"name": "first"},
        "last": {"name": "last"},
        "raises": {"failed": "ValueError: of no use"},
        "dies": {"failed": "the process ended with code 3"},
        "sleeps": {"failed": "not done after 1 s"},
    }
