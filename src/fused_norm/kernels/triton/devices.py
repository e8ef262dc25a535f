"""Devices: which ones run kernels, and their properties that launch plans use."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd import forward_ad
from triton import knobs

from ..plans import Device, PlanTable, table_of

logger = logging.getLogger("fused_norm")

INTERPRETED: bool = bool(knobs.runtime.interpret)
"""Triton interprets kernels on the CPU: TRITON_INTERPRET=1 was set before this import."""


def is_transformed() -> bool:
    """Return whether a transform is active that has to see the PyTorch operators inside of a call.

    These are transforms of ``torch.func``, forward-mode differentiation and ``torch.jit.trace``.
    """
    if forward_ad._current_level >= 0:
        return True
    if torch.compiler.is_compiling():  # Dynamo applies transforms itself
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or torch._C._is_tracing()


def runs_kernels_on(*tensors: Tensor | None) -> bool:
    """Return whether kernels take these tensors (meta tensors are traced); the PyTorch reference takes all others."""
    if is_transformed():
        return False
    for tensor in tensors:
        if tensor is not None and tensor.dtype == torch.float64:
            return False
    assert tensors[0] is not None
    device = tensors[0].device.type
    return device in ("cuda", "xpu", "meta") or (device == "cpu" and INTERPRETED)


@lru_cache(maxsize=64)
def device_props(device: torch.device) -> Device:
    """The properties of ``device`` that launch plans use, its table of plans among them."""
    table = _table_in_use[0] if _table_in_use else table_of(*name_of(device))[0]
    return replace(_hardware_of(device), table=table)


def name_of(device: torch.device) -> tuple[str, str]:
    """The name of ``device``, and the capability of its architecture, empty if it has none."""
    if device.type in ("cpu", "meta"):
        return device.type, ""
    properties = torch.get_device_module(device).get_device_properties(device)
    capability = f"{properties.major}.{properties.minor}" if hasattr(properties, "major") else ""
    return properties.name, getattr(properties, "gcnArchName", capability) if torch.version.hip else capability


def _hardware_of(device: torch.device) -> Device:
    if device.type in ("cpu", "meta"):
        return Device(processors=4)
    properties = torch.get_device_module(device).get_device_properties(device)
    processors = getattr(properties, "multi_processor_count", None) or properties.gpu_subslice_count
    shared_memory = getattr(properties, "shared_memory_per_block_optin", 0) or 65_536  # 64 KiB: AMD's and Intel's
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if is_nvidia and properties.major < 8:
        logger.warning("%s is not supported: Triton asks for compute capability 8.0 or newer", properties.name)
    overlaps = is_nvidia and properties.major >= 9
    return Device(processors, getattr(properties, "warp_size", 32), shared_memory, overlaps, is_nvidia)


when_plans_change: list[Callable[[], None]] = []
"""Functions to call when other plans come into use: each forgets what the old ones planned."""

_table_in_use: list[PlanTable] = []
"""The table that ``use_plans`` has chosen; empty outside of it."""


@contextlib.contextmanager
def use_plans(table: PlanTable) -> Iterator[None]:
    """A context in which every device plans by ``table``. For measurements: no other thread may launch meanwhile."""

    def use(tables: list[PlanTable]) -> None:
        _table_in_use[:] = tables
        device_props.cache_clear()
        for forget in when_plans_change:
            forget()

    before = list(_table_in_use)
    use([table])
    try:
        yield
    finally:
        use(before)


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make ``device`` current for a launch, if it is not already (Triton launches on the current device)."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    module = torch.get_device_module(device)
    if device.index is None or module.current_device() == device.index:
        return contextlib.nullcontext()
    return module.device(device)
