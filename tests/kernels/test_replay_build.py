"""The native library's life: compiled once, kept, shared between processes, and done without."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fused_norm.kernels.replay import build, executor
from fused_norm.kernels.replay.build import SWITCH, UnavailableError, load
from fused_norm.kernels.replay.executor import ReplayExecutor
from fused_norm.kernels.rms_norm import RMS_NORM

BROKEN = "#error this cannot be compiled\n"
TINY = """
#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_replay", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit__replay() { return PyModule_Create(&module); }
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a source that compiles in no time."""
    source = tmp_path / "replay.cpp"
    source.write_text(TINY)
    monkeypatch.setattr(build, "_SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(SWITCH, raising=False)
    return tmp_path / "fused_norm"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], object]]:
    """The library as the first operator on a GPU asks for it."""
    monkeypatch.setattr(build.knobs.runtime, "interpret", False)
    build.library.cache_clear()
    yield build.library
    build.library.cache_clear()


def _built(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.so"))


def _needs_a_compiler() -> None:
    try:
        load()
    except UnavailableError as reason:
        if "compiler" in str(reason) or "headers" in str(reason):
            pytest.skip(str(reason))
        raise


def test_it_is_compiled_once_and_said_so(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    _needs_a_compiler()
    assert "compiling native code" in caplog.text
    (built,) = _built(cache)
    caplog.clear()
    assert load().__name__ == "_replay"
    assert not caplog.records
    assert _built(cache) == [built]
    assert [path.suffix for path in cache.iterdir() if path != built] == [".lock"]


def test_another_source_is_compiled_anew(cache: Path) -> None:
    _needs_a_compiler()
    build._SOURCE.write_text(TINY + "// changed")
    load()
    assert len(_built(cache)) == 2


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of all attempts to compile."""
    found: list[list[str]] = []
    run = subprocess.run

    def noted(command: list[str], **options: Any) -> Any:
        if "-shared" in command:
            found.append(command)
        return run(command, **options)

    monkeypatch.setattr(build.subprocess, "run", noted)
    return found


def _compiler_that(does: str, path: Path, version: str = "1.0") -> str:
    """A compiler that tells its version, and does as it is told otherwise."""
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "mine {version}" && exit\n{does}\n')
    path.chmod(0o755)
    return str(path)


REFUSES = "echo 'replay.cpp:7:1: error: no such thing' >&2; exit 1"


def test_a_source_that_a_compiler_refuses_is_not_compiled_again(cache: Path, attempts: list[list[str]]) -> None:
    _needs_a_compiler()
    build._SOURCE.write_text(BROKEN)
    with pytest.raises(UnavailableError, match="failed, see"):
        load()
    (told,) = cache.glob("*.failed")
    assert "this cannot be compiled" in told.read_text()
    attempts.clear()
    with pytest.raises(UnavailableError, match="remove that file"):
        load()
    assert not attempts
    told.unlink()
    with pytest.raises(UnavailableError, match="failed, see"):
        load()
    assert len(attempts) == 1


@pytest.mark.parametrize("other", ["path", "version"])
def test_what_one_compiler_refused_another_is_asked_for(
    other: str, cache: Path, attempts: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _needs_a_compiler()
    attempts.clear()
    build._SOURCE.write_text(TINY + "// changed")
    named = cache.parent / "mine"
    monkeypatch.setenv("CXX", _compiler_that(REFUSES, named))
    for _ in range(2):
        with pytest.raises(UnavailableError, match=r"see .*failed"):
            load()
    assert len(attempts) == 1
    if other == "version":
        _compiler_that('exec c++ "$@"', named, "2.0")
    else:
        monkeypatch.delenv("CXX")
    assert load().__name__ == "_replay"
    assert not list(cache.glob("*.failed"))


@pytest.mark.parametrize(
    "end",
    [
        "kill -9 $$",
        "echo 'c++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1",
        "echo 'replay.cpp:7:1: internal compiler error: Segmentation fault' >&2; exit 4",
        "exec sleep 60",
    ],
    ids=["killed", "its child killed", "crashed", "too slow"],
)
def test_a_compiler_that_did_not_finish_is_asked_again(
    end: str, cache: Path, attempts: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_COMPILE_SECONDS", 0.3)
    monkeypatch.setenv("CXX", _compiler_that(end, cache.parent / "mine"))
    for _ in range(2):
        with pytest.raises(UnavailableError, match=r"failed, see|more than"):
            load()
    assert len(attempts) == 2
    monkeypatch.setattr(build.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(build.knobs.runtime, "interpret", False)
    assert build.state() == "compiled at the first call"


def test_who_waited_for_an_attempt_that_failed_makes_none_of_its_own(
    cache: Path, attempts: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many processes that start together, one waits out the time limit and not each in turn; in a later run too."""
    waiting = threading.Semaphore(0)
    monkeypatch.setattr(build, "_COMPILE_SECONDS", 0.3)
    monkeypatch.setenv("CXX", _compiler_that("exec sleep 60", cache.parent / "mine"))
    flock = fcntl.flock

    def locking(*arguments: Any) -> None:
        waiting.release()
        flock(*arguments)

    def first(*arguments: Any) -> None:
        for _ in range(3):
            assert waiting.acquire(timeout=20)
        compile_alone(*arguments)

    compile_alone = build._compile_alone
    monkeypatch.setattr(build.fcntl, "flock", locking)
    monkeypatch.setattr(build, "_compile_alone", first)
    for run in (1, 2):
        said: list[str] = []

        def rank(said: list[str] = said) -> None:
            with pytest.raises(UnavailableError) as caught:
                load()
            said.append(str(caught.value))

        ranks = [threading.Thread(target=rank) for _ in range(3)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        assert len(said) == 3
        assert sum("another process has just failed" in one for one in said) == 2
        assert len(attempts) == run


def test_it_is_compiled_without_setuptools(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _needs_a_compiler()
    for path in cache.iterdir():
        path.unlink()
    monkeypatch.delitem(sys.modules, "torch.utils.cpp_extension", raising=False)
    monkeypatch.setitem(sys.modules, "setuptools", None)
    assert load().__name__ == "_replay"


def test_a_source_that_cannot_be_read_is_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build._SOURCE.unlink()
    with pytest.raises(UnavailableError, match="cannot be read"):
        load()
    monkeypatch.setattr(build.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(build.knobs.runtime, "interpret", False)
    assert re.match("not used: .* cannot be read", build.state())


def test_without_a_compiler_it_is_unavailable(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(cache))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UnavailableError, match=r"no C\+\+ compiler"):
        load()


@pytest.mark.parametrize("off", ["0", "false", "Off", "no"])
def test_it_can_be_switched_off(off: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, off)
    with pytest.raises(UnavailableError, match=SWITCH):
        load()
    assert not cache.exists()


def test_env_tells_what_becomes_of_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _needs_a_compiler()
    monkeypatch.setattr(build.torch.cuda, "is_available", lambda: False)
    assert build.state() == "not used without a GPU"
    monkeypatch.setattr(build.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(build.knobs.runtime, "interpret", True)
    assert build.state() == "not used by Triton's interpreter"
    monkeypatch.setattr(build.knobs.runtime, "interpret", False)
    assert build.state() == "compiled"
    build._SOURCE.write_text(BROKEN)
    assert build.state() == "compiled at the first call"
    with pytest.raises(UnavailableError):
        load()
    assert "could not be compiled" in build.state()
    build._SOURCE.write_text(TINY + "// changed")
    monkeypatch.setenv("PATH", str(cache))
    monkeypatch.setenv("CXX", "nothing")
    assert "no C++ compiler" in build.state()
    monkeypatch.setenv(SWITCH, "0")
    assert build.state() == f"not used: {SWITCH} is 0"


def test_a_cache_that_cannot_be_written_is_said(cache: Path) -> None:
    cache.write_text("a file where a directory should be")
    with pytest.raises(UnavailableError, match="cannot be made and kept"):
        load()


def test_without_a_home_it_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(build.Path, "home", homeless)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv(SWITCH, raising=False)
    with pytest.raises(UnavailableError, match="XDG_CACHE_HOME"):
        load()


def test_a_home_that_is_relative_is_no_place(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(cache.parent)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "here")
    with pytest.raises(UnavailableError, match="XDG_CACHE_HOME names"):
        load()
    assert not Path("here").exists()


def test_a_relative_cache_is_ignored(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(cache.parent)
    monkeypatch.setenv("HOME", str(cache.parent / "home"))
    for relative in ("", ".", "cache", "~/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert build._path().parent == cache.parent / "home/.cache/fused_norm"


def test_a_damaged_library_is_unavailable(cache: Path) -> None:
    cache.mkdir()
    build._path().write_bytes(b"not a library")
    with pytest.raises(UnavailableError, match="cannot be loaded"):
        load()


def _no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        pytest.fail("loaded")

    monkeypatch.setattr(build.importlib.machinery, "ExtensionFileLoader", fail)


@pytest.mark.parametrize("place", ["file", "directory"])
@pytest.mark.parametrize("mode", [0o020, 0o002], ids=["group", "all"])
def test_a_library_that_others_can_write_is_not_loaded(
    place: str, mode: int, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _needs_a_compiler()
    changed = cache if place == "directory" else build._path()
    before = changed.stat().st_mode
    changed.chmod(before | mode)
    with monkeypatch.context() as patch:
        _no_loading(patch)
        with pytest.raises(UnavailableError, match=re.escape(f"{changed} can be written by others")):
            load()
        patch.setattr(build.torch.cuda, "is_available", lambda: True)
        patch.setattr(build.knobs.runtime, "interpret", False)
        assert "can be written by others" in build.state()
    changed.chmod(before)
    assert load().__name__ == "_replay"


@pytest.mark.parametrize("place", ["file", "directory"])
def test_a_library_of_another_user_is_not_loaded(place: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _needs_a_compiler()
    owned = cache if place == "directory" else build._path()
    stat = Path.stat

    def owned_by_another(path: Path, **options: Any) -> os.stat_result:
        found = list(stat(path, **options))
        if path == owned:
            found[4] = os.geteuid() + 1
        return os.stat_result(found)

    monkeypatch.setattr(Path, "stat", owned_by_another)
    _no_loading(monkeypatch)
    with pytest.raises(UnavailableError, match=re.escape(f"{owned} belongs to another user")):
        load()


def test_nothing_is_compiled_where_others_can_write(cache: Path, attempts: list[list[str]]) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(UnavailableError, match="can be written by others"):
        load()
    assert not attempts
    assert not list(cache.iterdir())


def test_what_is_made_is_the_users_alone(cache: Path) -> None:
    before = os.umask(0o002)
    try:
        _needs_a_compiler()
    finally:
        os.umask(before)
    assert all(path.stat().st_mode & 0o077 == 0 for path in (cache, *_built(cache)))


@pytest.mark.parametrize("suffix", [".lock", ".failed"])
def test_a_link_in_the_cache_is_not_written_through(suffix: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _needs_a_compiler()
    build._SOURCE.write_text(BROKEN)
    target = cache.parent / "target"
    build._path().with_suffix(suffix).symlink_to(target)
    for precious in (None, "precious"):
        if precious is not None:
            target.write_text(precious)
        with pytest.raises(UnavailableError):
            load()
        assert (target.read_text() if target.exists() else None) == precious


@pytest.mark.slow
def test_of_several_processes_one_compiles(cache: Path) -> None:
    _needs_a_compiler()
    for path in list(cache.iterdir()):
        path.unlink()
    program = (
        "import logging, pathlib, sys; logging.basicConfig()\n"
        "from fused_norm.kernels.replay import build\n"
        "build._SOURCE = pathlib.Path(sys.argv[1]); build.load()\n"
    )
    command = [sys.executable, "-c", program, str(build._SOURCE)]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate()[1] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], said
    assert sum("compiling native code" in one for one in said) == 1
    assert len(_built(cache)) == 1


def test_the_interpreter_has_nothing_to_launch(
    library: Callable[[], object], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.knobs.runtime, "interpret", True)
    assert library() is None
    assert not cache.exists()


@pytest.mark.parametrize(("switch", "level"), [("1", logging.WARNING), ("0", logging.INFO)])
@pytest.mark.parametrize(
    "reason", [UnavailableError("nothing works here"), ModuleNotFoundError("nothing works here")], ids=repr
)
def test_operators_go_without_it_whatever_the_reason(
    reason: Exception,
    switch: str,
    level: int,
    library: Callable[[], object],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise reason

    monkeypatch.setattr(build, "load", fail)
    monkeypatch.setenv(SWITCH, switch)
    with caplog.at_level(logging.INFO, logger="fused_norm"):
        assert library() is None
        assert library() is None
    (record,) = caplog.records
    assert "nothing works here" in caplog.text
    assert record.levelno == level
    executor = ReplayExecutor(RMS_NORM)
    executor.connect(None)
    assert executor.run(1) is NotImplemented
    assert executor.run_known(1) is NotImplemented


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_releases_that_were_not_tested_go_without_it_which_is_said_once(
    package: str,
    cache: Path,
    library: Callable[[], object],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(getattr(build, package), "__version__", "9.9.1+cu990")
    assert library() is None
    assert library() is None
    (record,) = caplog.records
    assert re.search(r"was tested with .*, and this is 9\.9\.1", record.getMessage())
    assert record.levelno == logging.WARNING
    assert not cache.exists()


class _OnCuda(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


def test_a_failure_costs_nothing_from_the_second_call_on(
    library: Callable[[], object], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call on a GPU looks for the library; whatever comes of that, calls go on in Python."""
    asked: list[int] = []

    def fail() -> None:
        asked.append(1)
        raise OSError("a surprise")

    monkeypatch.setattr(build, "load", fail)
    tried, x = ReplayExecutor(RMS_NORM), torch.empty(2).as_subclass(_OnCuda)
    for _ in range(3):
        assert tried.run(None, x) is NotImplemented
        assert tried.run_known(None, x) is NotImplemented
    assert ReplayExecutor(RMS_NORM).run(None, x) is NotImplemented
    assert len(asked) == 1
    assert len(caplog.records) == 1
    assert tried.run is executor._decline


def test_of_several_threads_with_a_first_call_one_looks_for_it(
    library: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, made = [], []

    class Native:
        """Stands for the library."""

        def connect(self, *_: Any) -> None:
            time.sleep(0.05)
            loaded.append(self)

        def Operation(self, **_: Any) -> Any:  # noqa: N802
            half = lambda *_: "replayed"  # noqa: E731
            half.known = half.kept = half
            made.append(half)
            time.sleep(0.05)
            return half

    monkeypatch.setattr(build, "load", Native)
    monkeypatch.setattr(build, "_cuda_addresses", lambda: ())
    monkeypatch.setattr(build.torch.cuda, "get_allocator_backend", lambda: "native")
    tried, x = ReplayExecutor(RMS_NORM), torch.empty(2).as_subclass(_OnCuda)
    first, found, ready = tried.run, [], threading.Barrier(6)

    def call() -> None:
        ready.wait()
        found.append(first(None, x))

    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["replayed"] * 6
    assert (len(loaded), len(made)) == (1, 1)
