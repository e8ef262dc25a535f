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
import shutil
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
        module.connect(*_cuda_addresses(), _launch_hooks(), own_allocator, False)
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
        if _path().exists():
            return "compiled"
        _compiler()
    except UnavailableError as reason:
        return f"not used: {reason}"
    failed = _failed(_path())
    return f"not used: it could not be compiled, see {failed}" if failed.exists() else "compiled at the first call"


def load() -> ModuleType:
    """The library, not connected to anything; compiled first if it is not in the cache.

    Raises:
        UnavailableError: if it is switched off, or cannot be compiled or loaded.
    """
    _check_wanted()
    path = _path()
    if not path.exists():
        _compile(path)
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
    parts = (
        _SOURCE.read_text(), *_FLAGS, torch.__version__, torch.version.git_version, sys.version, platform.machine(),
        str(torch._C._GLIBCXX_USE_CXX11_ABI),
    )  # fmt: skip
    fingerprint = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise UnavailableError(f"{error} XDG_CACHE_HOME names a place to keep it") from error
    return Path(root, "fused_norm", f"_replay-{fingerprint}{sysconfig.get_config_var('EXT_SUFFIX')}")


def _compile(path: Path) -> None:
    """Compiles the library; of several processes, one does and the others wait for it."""
    compiler = _compiler()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _compile_alone(compiler, path)
    except OSError as error:
        raise UnavailableError(
            f"it cannot be kept in {path.parent} ({error}); XDG_CACHE_HOME names another place"
        ) from error


def _compiler() -> str:
    compiler = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise UnavailableError("there is no C++ compiler (c++, g++, clang++; CXX names another)")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise UnavailableError("Python's headers are not installed")
    return compiler


def _failed(path: Path) -> Path:
    """The file that holds what the compiler said when it failed."""
    return path.with_suffix(".failed")


def _compile_alone(compiler: str, path: Path) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    failed = _failed(path)
    if failed.exists():
        raise UnavailableError(f"it could not be compiled, see {failed}; remove that file to try again")
    logger.warning(
        "compiling native code for PyTorch %s, once (some 12 s; %s=0 goes without)", torch.__version__, SWITCH
    )
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        out = Path(directory, "_replay.so")
        command = [
            compiler, *_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
            *(f"-I{include}" for include in (*include_paths(), sysconfig.get_path("include"))),
            str(_SOURCE), "-o", str(out), *(f"-L{lib}" for lib in library_paths()), *_LIBRARIES,
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=_COMPILE_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(f"{compiler} took more than {_COMPILE_SECONDS} s") from error
        if done.returncode:
            failed.write_text(" ".join(command) + "\n" + done.stdout + done.stderr)
            raise UnavailableError(f"{compiler} failed, see {failed}")
        os.replace(out, path)
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


def _launch_hooks() -> tuple[Any, ...]:
    """The lists of those who want to see every launch."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    try:
        return tuple(hook.calls for hook in hooks)
    except AttributeError as error:
        raise UnavailableError("this Triton keeps its launch hooks in another way") from error
