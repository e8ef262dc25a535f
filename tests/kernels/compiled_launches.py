"""Compile launches for GPUs that are not present. Scripts use this, because tests run Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fused_norm.kernels.plans import Device
from fused_norm.kernels.triton.call import Call
from fused_norm.kernels.triton.launch import Launch

_TYPES = {
    torch.bool: "*i1",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}


class Target(NamedTuple):
    """An architecture and the properties of a device that has it."""

    architecture: GPUTarget
    device: Device


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), Device(108, shared_memory=166_912, limits_registers=True)),
    "sm_86": Target(GPUTarget("cuda", 86, 32), Device(84, shared_memory=101_376, limits_registers=True)),
    "sm_89": Target(GPUTarget("cuda", 89, 32), Device(128, shared_memory=101_376, limits_registers=True)),
    "sm_90": Target(
        GPUTarget("cuda", 90, 32), Device(132, shared_memory=232_448, overlaps=True, limits_registers=True)
    ),
    "sm_100": Target(
        GPUTarget("cuda", 100, 32), Device(148, shared_memory=232_448, overlaps=True, limits_registers=True)
    ),
    "sm_120": Target(
        GPUTarget("cuda", 120, 32), Device(170, shared_memory=101_376, overlaps=True, limits_registers=True)
    ),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), Device(304, warp_size=64, shared_memory=65_536)),
}
"""One target for an A100, RTX A6000, RTX 4090, H100, B200, RTX 5090 and MI300X each."""


@contextmanager
def noted() -> Iterator[list[Launch]]:
    """Collect the launches of a context, and make none of them; nor does PyTorch compute between them."""
    launched: list[Launch] = []

    def run(call: Call) -> list[Any]:
        launched.extend(step for step in call.steps() if isinstance(step, Launch))
        return []

    with mock.patch.object(Call, "run", run):
        yield launched


def compiled(launch: Launch, target: Target = TARGETS["sm_90"]) -> Any:
    """Return the compiled kernel of a launch whose tensors are 16-byte aligned."""
    kernel, arguments = launch.kernel, (*launch.tensors, *launch.numbers)
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[index] if index < len(arguments) else launch.constants[parameter.name]
        if index >= len(arguments) or value is None:
            signature[parameter.name], constants[index,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], attributes[index,] = _TYPES[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target.architecture, options=launch.options)
