"""``fused-norm env``: versions and devices."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess

from .common import UsageError, positive

_PACKAGES = (
    "torch", "triton", "transformers", "accelerate", "peft", "bitsandbytes", "trl", "liger-kernel", "datasets",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Versions and devices, to paste into a bug report."
    parser.add_argument("--plans", type=positive, metavar="WIDTH", help="launch plans for rows of this width instead")


def run(args: argparse.Namespace) -> int:
    """Print one line for each fact."""
    facts = environment() if args.plans is None else plans_of(args.plans)
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")
    return 0


def plans_of(width: int) -> dict[str, str]:
    """The launch plans of the first device for bf16 rows of a width, by operator; heads are 32 and 8.

    Raises:
        UsageError: there is no Triton.
    """
    if not importlib.util.find_spec("triton"):
        raise UsageError("--plans: kernels need Triton, which is not installed")
    import torch

    from ..kernels import norm_kernels as norms
    from ..kernels.qk_kernels import heads_backward_plan, heads_forward_plan
    from ..kernels.triton.devices import device_props

    device = device_props(torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))
    lines: dict[str, object] = {
        "(add +) norm": norms.forward_plan(width, device),
        "norm backward": norms.backward_plan(width, 6, device),
        "add + norm backward": norms.backward_plan(width, 8, device, "add_backward"),
    }
    if width <= norms.WIDEST_SANDWICH_FORWARD:
        lines["norm + add (+ norm)"] = norms.forward_plan(width, device, None, "sandwich_forward")
    if width <= norms.WIDEST_SANDWICH_BACKWARD:
        lines["norm + add + norm backward"] = norms.backward_plan(width, 12, device, "sandwich_backward")
    if width <= 512:  # of a head
        for name, rotary in (("qk norm", 0), ("qk norm + RoPE", width)):
            lines[name] = heads_forward_plan(32, 8, width, rotary, device)
            lines[f"{name} backward"] = heads_backward_plan(32, 8, width, rotary, 4, 4, device)
        lines["RoPE"] = heads_forward_plan(32, 8, width, width, device)
    return {name: str(plan) for name, plan in lines.items()} | plan_tables()


def plan_tables() -> dict[str, str]:
    """The table of launch plans that each GPU here takes, and why."""
    import torch

    if not (torch.cuda.is_available() and importlib.util.find_spec("triton")):
        return {}
    from ..kernels.plans import table_of
    from ..kernels.triton.devices import name_of

    tables = {}
    for device in (torch.device("cuda", index) for index in range(torch.cuda.device_count())):
        table, why = table_of(*name_of(device))
        tables[f"plans on {device}"] = f"{table.device}, {table.measured}; {why}"
    return tables


def environment() -> dict[str, str]:
    """The facts, in the order of printing."""
    import torch

    from .. import __version__
    from .common import backend

    facts = {"fused_norm": __version__, "python": platform.python_version(), "platform": platform.platform()}
    facts |= {package: _version(package) for package in _PACKAGES}
    facts["CUDA of torch"] = torch.version.cuda or "none"
    facts["HIP of torch"] = torch.version.hip or "none"
    facts["driver"] = _ask_nvidia_smi("driver_version").partition("\n")[0]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        facts[f"GPU {index}"] = f"{gpu.name}, capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
    if not torch.cuda.is_available():
        facts["GPU"] = "none that torch can use"
    facts["TRITON_INTERPRET"] = os.environ.get("TRITON_INTERPRET", "not set")
    words = backend(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    facts["patched models run"] = words or "stock code: no GPU that torch can use, and TRITON_INTERPRET=1 is not set"
    facts |= plan_tables()
    return facts


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def clocks() -> str:
    """The clocks, temperature and power of every GPU at this moment, as nvidia-smi gives them."""
    return _ask_nvidia_smi("clocks.sm,clocks.mem,temperature.gpu,power.draw").replace("\n", "; ")


def _ask_nvidia_smi(query: str) -> str:
    """The values of a query, a line for each GPU, or why there are none."""
    if not shutil.which("nvidia-smi"):
        return "no nvidia-smi"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi failed: {error}"
    return answer.stdout.strip() or f"nvidia-smi failed: {answer.stderr.strip()}"
