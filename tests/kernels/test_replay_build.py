"""The native library's life: compiled once, kept, shared between processes, and done without."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fused_norm.kernels.replay import build
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


def test_a_compiler_that_fails_is_not_asked_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _needs_a_compiler()
    build._SOURCE.write_text(BROKEN)
    with pytest.raises(UnavailableError, match="failed, see"):
        load()
    (told,) = cache.glob("*.failed")
    assert "this cannot be compiled" in told.read_text()
    monkeypatch.setattr(build.subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    with pytest.raises(UnavailableError, match="remove that file"):
        load()


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
    with pytest.raises(UnavailableError, match="cannot be kept"):
        load()


def test_without_a_home_it_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(build.Path, "home", homeless)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv(SWITCH, raising=False)
    with pytest.raises(UnavailableError, match="XDG_CACHE_HOME"):
        load()


def test_a_damaged_library_is_unavailable(cache: Path) -> None:
    cache.mkdir()
    build._path().write_bytes(b"not a library")
    with pytest.raises(UnavailableError, match="cannot be loaded"):
        load()


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
