"""Compile norms for an H100 and compare how their rows lie when they are summed, which decides the order of the sum.

A script, because tests run interpreted. Norms with an add and FP8 norms are held against the norm by itself; each that
agrees prints a line, and the first that does not ends with 1.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from compiled_launches import TARGETS, Noted, compiled

import fused_norm.kernels.fp8  # noqa: F401 -- registers its operators
from fused_norm.kernels.operator import OPERATORS
from fused_norm.kernels.triton import devices
from fused_norm.kernels.triton.launch import launches
from fused_norm.spec import NormSpec

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def layout_of_the_sum(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the shape and layout of the fp32 values that the first kernel of a call sums."""
    with launches.by(noted := Noted()):
        call()
    text = compiled(noted[0]).asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.blocked<.*>)$", text, re.MULTILINE))
    shape, name = re.findall(r"\(tensor<([\dx]+xf32), (#\w+)>\) -> tensor<[\dx]*xf32", text)[0]
    return shape, layouts[name]


def main() -> int:
    """Compare the layouts and return the exit status."""
    devices._hardware_of = lambda device: TARGETS["sm_90"].device
    spec, rows = NormSpec("llama"), 4096

    def forward(name: str, *arguments: Any) -> tuple[str, str]:
        return layout_of_the_sum(lambda: OPERATORS[name].forward(*arguments, training=True))

    for width in (256, 1024, 4096, 5120, 32768):
        for x_dtype, r_dtype in ((BF16, None), (BF16, BF16), (FP32, FP32), (BF16, FP32), (BF16, FP16)):
            x, w = torch.empty(rows, width, dtype=x_dtype), torch.empty(width, dtype=BF16)
            r = None if r_dtype is None else torch.empty(rows, width, dtype=r_dtype)
            total = x if r is None else torch.empty(rows, width, dtype=torch.promote_types(x.dtype, r.dtype))
            expected = forward("rms_norm", total, w, spec, None)
            actual = {} if r is None else {"add": forward("add_rms_norm", x, r, w, spec, None, 1.0)}
            for name in ("tensorwise", "rowwise", "block128", "mxfp8") if width == 4096 else ("block128",):
                actual[name] = forward("norm_fp8", x, r, w, None, None, spec, 1.0, name)
            for name, layout in actual.items():
                if layout != expected:
                    sys.stdout.write(f"{name} {width} {x_dtype} {r_dtype}: {layout} instead of {expected}\n")
                    return 1
                sys.stdout.write(f"{name}-{width}-{x_dtype}-{r_dtype}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
