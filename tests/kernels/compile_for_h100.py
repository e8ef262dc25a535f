"""Compile for an H100 what a launch would launch, without a GPU; for scripts, because tests run interpreted."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fused_norm.kernels.triton.launch import Launch

_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}


class Noted(list[Launch]):
    """The launches of a context, none of which is made."""

    def launched(self, launch: Launch) -> None:
        self.append(launch)


def compiled(launch: Launch) -> Any:
    """The kernel of a launch, for tensors at multiples of 16 bytes."""
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
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch.options)
