"""Compile what plan tables say for an H100, without one; a script, because tests run interpreted.

Prints a line for each kernel with its shared memory and the bytes that it spills; ends with 1 where one does not fit.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from compile_for_h100 import Noted, compiled

from fused_norm.kernels.add_rms_norm import ADD_RMS_NORM
from fused_norm.kernels.gated_rms_norm import GATED_RMS_NORM
from fused_norm.kernels.norm_add_norm import NORM_ADD_NORM
from fused_norm.kernels.operator import BackwardCall, Operator, norm_spec
from fused_norm.kernels.plans import TABLES, WIDEST_GATED, WIDEST_SANDWICH_BACKWARD, Device
from fused_norm.kernels.qk_norm import QK_NORM
from fused_norm.kernels.rms_norm import RMS_NORM
from fused_norm.kernels.rope import ROPE
from fused_norm.kernels.triton import devices
from fused_norm.kernels.triton.launch import launches

H100 = Device()
WIDTHS = (128, 1024, 2560, 4096, 5120, 8192, 16384)
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
SPILLED = 48
"""Bytes that a kernel may spill: that of a sandwich of 1024 does 44."""


def spilled_bytes(ptx: str) -> int:
    """What ptxas says of the registers that it spills."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [str(PTXAS), "-v", "--gpu-name=sm_90a", str(path), "-o", str(path.with_suffix(".cubin"))]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(int(count) for count in re.findall(r"(\d+) bytes spill stores", said))


def calls(width: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every operator that sums rows, forward and backward, on bf16 rows of a width, by name."""
    spec = norm_spec("llama", False, 1e-6)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, width, dtype=torch.bfloat16)

    def both(operator: Operator, *arguments: Any) -> Callable[[], Any]:
        def call() -> None:
            results = operator.forward(spec, *arguments, training=True)
            saved, facts = operator.save(arguments, results)
            outputs = tuple(results[: len(operator.outputs)])
            operator.backward(spec, BackwardCall(outputs, saved, facts, (True,) * len(operator.gradients)))

        return call

    x, w = empty(64), empty()
    yield "norm", both(RMS_NORM, x, w, None)
    yield "add", both(ADD_RMS_NORM, x, x, w, None, 1.0)
    if width <= WIDEST_SANDWICH_BACKWARD:
        yield "sandwich", both(NORM_ADD_NORM, x, x, w, w)
    if width <= WIDEST_GATED:
        yield "norm gated", both(GATED_RMS_NORM, x, x, w, "silu", True, 1)
        yield "gated norm", both(GATED_RMS_NORM, x, x, w, "silu", False, 1)
    if width <= 256:
        q, k, angle = empty(1, 64, 32), empty(1, 64, 8), empty(1, 64)
        yield "qk", both(QK_NORM, q, k, w, w, None, None, 2)
        yield "qk rope", both(QK_NORM, q, k, w, w, angle, angle, 2)
        yield "rope", both(ROPE, q, k, angle, angle, 2, False)
        yield "rope single rounding", both(ROPE, q, k, angle.float(), angle.float(), 2, True)


def main() -> int:
    """Compile the rules and the rows of all tables; return the exit status."""
    devices._hardware_of = lambda device: H100
    status = 0
    for table in TABLES:
        tuned = {rule.widest for rules in table.rows.values() for rule in rules}
        for width in sorted(tuned) or WIDTHS:
            for name, call in calls(width):
                with devices.use_plans(table), launches.by(noted := Noted()):
                    call()
                for launch in noted:
                    kernel = compiled(launch)
                    shared, spilled = kernel.metadata.shared, spilled_bytes(kernel.asm["ptx"])
                    fits = shared <= H100.shared_memory and spilled <= SPILLED
                    status |= not fits
                    line = f"{name} {width} {launch.name}: {shared} shared, {spilled} spilled"
                    sys.stdout.write(line + ("\n" if fits else " !\n"))
    return status


if __name__ == "__main__":
    sys.exit(main())
