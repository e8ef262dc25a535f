"""``fused-norm env``: versions and devices."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess

_PACKAGES = ("torch", "triton", "transformers", "accelerate", "peft", "datasets")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Versions and devices, to paste into a bug report."


def run(args: argparse.Namespace) -> int:
    """Print one line for each fact."""
    facts = environment()
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")
    return 0


def environment() -> dict[str, str]:
    """The facts, in the order of printing."""
    import torch

    from .. import __version__
    from ..kernels import replay
    from .common import backend

    facts = {
        "fused_norm": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    facts |= {package: _version(package) for package in _PACKAGES}
    facts["CUDA of torch"] = torch.version.cuda or "none"
    facts["HIP of torch"] = torch.version.hip or "none"
    facts["driver"] = _driver()
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        facts[f"GPU {index}"] = f"{gpu.name}, capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
    if not torch.cuda.is_available():
        facts["GPU"] = "none that torch can use"
    facts["TRITON_INTERPRET"] = os.environ.get("TRITON_INTERPRET", "not set")
    facts["kernels run in"] = backend(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    facts["native code"] = replay.state()
    return facts


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def clocks() -> str:
    """The clocks, temperature and power of every GPU at this moment, as nvidia-smi gives them."""
    return _ask_nvidia_smi("clocks.sm,clocks.mem,temperature.gpu,power.draw").replace("\n", "; ")


def _driver() -> str:
    return _ask_nvidia_smi("driver_version").partition("\n")[0]


def _ask_nvidia_smi(query: str) -> str:
    """The values of a query, a line for each GPU, or why there are none."""
    if not shutil.which("nvidia-smi"):
        return "no nvidia-smi"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi failed: {error}"
    return found.stdout.strip() or f"nvidia-smi failed: {found.stderr.strip()}"
