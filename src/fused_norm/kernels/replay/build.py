"""The native library: compiled once for each PyTorch by the system's C++ compiler, and kept in the user's cache."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from triton import knobs

logger = logging.getLogger("fused_norm")

SWITCH = "FUSED_NORM_NATIVE"
"""Environment variable; 0 goes without the native library."""

TESTED_TORCH, TESTED_TRITON = ("2.11", "2.13"), ("3.6", "3.7")
"""Releases that replays were tested with; the library uses parts of PyTorch and Triton that may change in others."""

_SOURCE = Path(__file__).with_name("replay.cpp")
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
_LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch_python")
_COMPILE_SECONDS = 600
_REFUSAL = re.compile(r":\d+:\d+: (fatal )?error: ")
"""An error that a compiler finds at a place in the source; one that was killed or found no room names none."""


class UnavailableError(Exception):
    """There is no native library; the message says why."""


@lru_cache(maxsize=1)
def library() -> ModuleType | None:
    """The library, connected to the CUDA driver; None where it cannot be had, which is said once.

    Without it everything works as it does with it, and each call costs the host more.
    """
    if knobs.runtime.interpret:
        return None
    try:
        module = load()
        own_allocator = torch.cuda.get_allocator_backend() != "pluggable"  # it cannot be replaced after its first use
        module.connect(*_cuda_addresses(), _launch_knobs(), own_allocator, False)
    except Exception as reason:  # whatever it is, operators work without
        level = logging.INFO if _switched_off() else logging.WARNING
        surprise = None if isinstance(reason, UnavailableError) else reason
        text = "operators go without native code, which costs the host time and nothing else: %s"
        logger.log(level, text, reason, exc_info=surprise)
        return None
    return module


def state() -> str:
    """Say in a few words what becomes of the library here, without compiling or loading it."""
    try:
        _check_wanted()
        if not torch.cuda.is_available():
            return "not used without a GPU"
        if knobs.runtime.interpret:
            return "not used by Triton's interpreter"
        path = _path()
        if path.exists():
            _check_trusted(path.parent, path)
            return "compiled"
        _check_refused(path, _named(_compiler()))
    except (UnavailableError, OSError) as reason:
        return f"not used: {reason}"
    return "compiled at the first call"


def load() -> ModuleType:
    """The library, not connected to anything; compiled first if it is not in the cache.

    Raises:
        UnavailableError: if it is switched off, or cannot be compiled, trusted or loaded.
    """
    _check_wanted()
    path = _path()
    try:
        if not path.exists():
            _compile(path)
        _check_trusted(path.parent, path)
    except OSError as error:
        raise UnavailableError(
            f"it cannot be made and kept in {path.parent} ({error}); XDG_CACHE_HOME names another place"
        ) from error
    loader = importlib.machinery.ExtensionFileLoader("_replay", str(path))
    spec = importlib.util.spec_from_file_location("_replay", path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise UnavailableError(f"{path} cannot be loaded: {error}") from error
    return module


def _switched_off() -> bool:
    return os.environ.get(SWITCH, "1").strip().lower() in ("0", "false", "off", "no")


def _check_wanted() -> None:
    if _switched_off():
        raise UnavailableError(f"{SWITCH} is {os.environ[SWITCH]}")
    if torch.version.hip is not None:
        raise UnavailableError("it is written for CUDA, and this PyTorch is for ROCm")
    for package, version, tested in (
        ("PyTorch", torch.__version__, TESTED_TORCH),
        ("Triton", triton.__version__, TESTED_TRITON),
    ):
        if ".".join(version.split(".")[:2]) not in tested:
            raise UnavailableError(f"it was tested with {package} {' and '.join(tested)}, and this is {version}")


def _path() -> Path:
    """The file of the library in the cache; its name is made of everything that the library depends on."""
    try:
        source = _SOURCE.read_text()
    except OSError as error:
        raise UnavailableError(f"its source cannot be read: {error}") from error
    parts = (
        source, *_FLAGS, torch.__version__, torch.version.git_version, sys.version, platform.machine(),
        str(torch._C._GLIBCXX_USE_CXX11_ABI),
    )  # fmt: skip
    fingerprint = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return _cache() / "fused_norm" / f"_replay-{fingerprint}{sysconfig.get_config_var('EXT_SUFFIX')}"


def _cache() -> Path:
    """The user's cache; a relative XDG_CACHE_HOME is invalid and ignored, as the specification of these names wants."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():
        return named
    try:
        home = Path.home()
    except RuntimeError as error:
        raise UnavailableError(f"{error} XDG_CACHE_HOME names a place to keep it") from error
    if not home.is_absolute():
        raise UnavailableError(f"HOME is {home}, which is relative; XDG_CACHE_HOME names a place to keep it")
    return home / ".cache"


def _check_trusted(*places: Path) -> None:
    """Raises UnavailableError where a file or directory could be the work of another user."""
    for place in places:
        found = place.stat()
        if found.st_uid not in (0, os.geteuid()):
            raise UnavailableError(
                f"{place} belongs to another user ({found.st_uid}); XDG_CACHE_HOME names another place"
            )
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UnavailableError(f"{place} can be written by others; `chmod go-w {place}` if they did not")


def _compile(path: Path) -> None:
    """Compiles the library; of several processes, one does and the others wait for it, and go without if it fails."""
    compiler = _compiler()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_trusted(path.parent)
    noted = _note(path)
    # Neither through a link nor with a change to what is there.
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return
        _check_refused(path, _named(compiler))
        if _note(path) != noted:
            raise UnavailableError(f"another process has just failed to compile it, see {_failed(path)}")
        _compile_alone(compiler, path)
    finally:
        os.close(lock)


def _compiler() -> str:
    compiler = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise UnavailableError("there is no C++ compiler (c++, g++, clang++; CXX names another)")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise UnavailableError("Python's headers are not installed")
    return compiler


def _named(compiler: str) -> str:
    """The compiler and its version, on a line."""
    try:
        done = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, errors="replace", timeout=60, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{compiler} does not tell its version") from error
    return f"{compiler}: {done.stdout.partition(chr(10))[0]}"


def _failed(path: Path) -> Path:
    """The file that tells of the last attempt to compile, if it failed."""
    return path.with_suffix(".failed")


def _note(path: Path) -> str:
    """The text of that file; its first line names the compiler if it refused the source."""
    failed = _failed(path)
    return failed.read_text(errors="replace") if failed.exists() else ""


def _check_refused(path: Path, compiler: str) -> None:
    """Raises UnavailableError where this very compiler is known to refuse the source."""
    if _note(path).startswith(f"{compiler}\n"):
        failed = _failed(path)
        raise UnavailableError(f"it could not be compiled, see {failed}; remove that file to try again")


def _compile_alone(compiler: str, path: Path) -> None:
    logger.warning(
        "compiling native code for PyTorch %s, once (some 12 s; %s=0 goes without)", torch.__version__, SWITCH
    )
    start = time.perf_counter()
    # As torch.utils.cpp_extension names them, which needs setuptools to be imported.
    torch_root = Path(torch.__file__).parent
    includes = torch_root / "include", torch_root / "include/torch/csrc/api/include", sysconfig.get_path("include")
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        out, told = Path(directory, "_replay.so"), Path(directory, "told")
        command = [
            compiler, *_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
            *(f"-I{include}" for include in includes), str(_SOURCE), "-o", str(out), f"-L{torch_root / 'lib'}",
            *_LIBRARIES,
        ]  # fmt: skip
        refused = False
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=_COMPILE_SECONDS, check=False,
                env=os.environ | {"LC_ALL": "C"},
            )  # fmt: skip
            failure = f"{compiler} failed" if done.returncode else None
            said = done.stdout + done.stderr
            refused = done.returncode > 0 and _REFUSAL.search(said) is not None
        except subprocess.TimeoutExpired:
            failure, said = f"{compiler} took more than {_COMPILE_SECONDS} s", ""
        if failure is not None:
            verdict = _named(compiler) if refused else "It may work another time."
            told.write_text(f"{verdict}\n{time.ctime()}, process {os.getpid()}: {failure}\n{' '.join(command)}\n{said}")
            os.replace(told, _failed(path))
            raise UnavailableError(f"{failure}, see {_failed(path)}")
        out.chmod(0o700)
        os.replace(out, path)
        _failed(path).unlink(missing_ok=True)
    logger.info("compiled %s in %.0f s", path, time.perf_counter() - start)


def _cuda_addresses() -> tuple[int, ...]:
    """The addresses of the functions that ``replay.cpp`` calls, in its order."""
    try:
        torch_cuda = ctypes.CDLL("libtorch_cuda.so")
        driver = ctypes.CDLL("libcuda.so.1")
        functions = [
            torch_cuda.aoti_torch_get_current_cuda_stream,
            driver.cuStreamIsCapturing,
            driver.cuCtxGetCurrent,
            driver.cuDevicePrimaryCtxRetain,
            driver.cuCtxSetCurrent,
            driver.cuLaunchKernelEx,
        ]
    except (OSError, AttributeError) as error:
        raise UnavailableError(str(error)) from error
    return tuple(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)


def _launch_knobs() -> Any:
    """The object whose ``launch_enter_hook`` and ``launch_exit_hook`` are chains of those who want to see launches."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if not all(isinstance(getattr(hook, "calls", None), list) for hook in hooks):
        raise UnavailableError("this Triton keeps its launch hooks in another way")
    return knobs.runtime
