"""Compile norms for an H100 and hold the FP8 ones against the 16-bit ones; a script, because tests run interpreted.

Prints a line for each FP8 norm whose rows lie, when they are summed, as in the 16-bit norm; ends with 1 at another.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from compile_for_h100 import compiled

from fused_norm.kernels.fp8 import RECIPES, forward_kernels
from fused_norm.kernels.operator import norm_spec
from fused_norm.kernels.plans import Device
from fused_norm.kernels.triton import norm_forward
from fused_norm.kernels.triton.launch import Launch, launches

BF16, FP32 = torch.bfloat16, torch.float32


class _First:
    """Keeps the first launch, and makes none."""

    def __init__(self) -> None:
        self.found: tuple[Launch, tuple[Any, ...]] | None = None

    def launched(self, launch: Launch, grid: tuple[int, int], arguments: tuple[Any, ...], strides: Any) -> None:
        self.found = self.found or (launch, arguments)


def layout_of_the_sum(call: Callable[[], None]) -> tuple[str, str]:
    """Shape and layout of what the first kernel that a call launches sums in fp32."""
    first = _First()
    with launches.by(first):
        call()
    assert first.found is not None
    launch, arguments = first.found
    text = compiled(launch, arguments).asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.blocked<.*>)$", text, re.MULTILINE))
    shape, name = re.findall(r"\(tensor<([\dx]+xf32), (#\w+)>\) -> tensor<[\dx]*xf32", text)[0]
    return shape, layouts[name]


def main() -> int:
    """Compare; return the exit status."""
    for module in (norm_forward, forward_kernels):
        module.facts_of = lambda device: Device()  # type: ignore[attr-defined]
    spec, rows = norm_spec("llama", False, 1e-6), 4096
    for width in (256, 1024, 4096, 5120):
        for dtype, summed in ((BF16, False), (BF16, True), (FP32, True)):
            x, w = torch.empty(rows, width, dtype=dtype), torch.empty(width, dtype=dtype)
            r = torch.empty_like(x) if summed else None

            def plain(x: Any = x, r: Any = r, w: Any = w) -> None:
                outputs = norm_forward.empty_norm(spec, x, r, w, True)
                norm_forward.launch_norm_forward(spec, x, r, w, outputs)

            expected = layout_of_the_sum(plain)
            for name in ("tensorwise", "rowwise", "block128", "mxfp8") if width == 4096 else ("block128",):

                def fp8(x: Any = x, r: Any = r, w: Any = w, recipe: Any = RECIPES[name]) -> None:
                    outputs = forward_kernels.empty_fp8_norm(spec, x, r, w, recipe, False)
                    forward_kernels.launch_fp8_norm(spec, x, None, r, w, recipe, outputs)

                found = layout_of_the_sum(fp8)
                if found != expected:
                    sys.stdout.write(f"{name} {width} {dtype}: {found} instead of {expected}\n")
                    return 1
                sys.stdout.write(f"{name}-{width}-{dtype}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
