"""What every kernel file shares: where kernels run, device facts, rounding, and rows in memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import forward_ad
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .launch import INTERPRETED
from .native.recording import allocated
from .plans import Device

interpreted = tl.constexpr(INTERPRETED)
_TRITON = tuple(int(number) for number in triton.__version__.split(".")[:2])


@triton.jit
def round_to(value, dtype: tl.constexpr):
    """fp32 values rounded to nearest even in ``dtype``, still as fp32.

    Triton's interpreter truncates fp32 to bf16; there the bits are rounded by hand, so a later store is exact (but for
    subnormal bf16, below 1.2e-38, which the interpreter's stores mangle).
    """
    if dtype == tl.float32:
        return value
    if interpreted and dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(value == value, bits.to(tl.float32, bitcast=True), value)
    return value.to(dtype).to(tl.float32)


@triton.jit
def let_next_begin(OVERLAPS: tl.constexpr):
    """A launch that is made to overlap with this one may begin when all programs have come here.

    Stands behind a loop: at the beginning the next launch would lie waiting beside all of this one, and profilers count
    its time.
    """
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def await_previous(OVERLAPS: tl.constexpr):
    """Waits until the launch that this one overlaps with has ended, and all that it wrote can be read."""
    if OVERLAPS:
        gdc_wait()


@triton.jit
def rows_of(tile, ROWS: tl.constexpr, LONG: tl.constexpr):
    """The row numbers of a tile; 64-bit where an offset made from them could pass 2^31."""
    row = tile * ROWS + tl.arange(0, ROWS)
    return row.to(tl.int64) if LONG else row


def runs_kernels_on(*tensors: Tensor | None) -> bool:
    """Whether kernels take these tensors (meta tensors are traced); the PyTorch reference takes all others.

    It also takes everything under forward-mode differentiation: a kernel would drop the tangents without a word.
    """
    if forward_ad._current_level >= 0:
        return False
    for tensor in tensors:
        if tensor is not None and tensor.dtype == torch.float64:
            return False
    assert tensors[0] is not None
    device = tensors[0].device.type
    return device in ("cuda", "xpu", "meta") or (device == "cpu" and INTERPRETED)


@lru_cache(maxsize=64)
def facts_of(device: torch.device) -> Device:
    """The facts about ``device`` that launch plans use."""
    if device.type == "cpu":
        return Device(processors=4)
    properties = torch.get_device_module(device).get_device_properties(device)
    processors = getattr(properties, "multi_processor_count", None) or properties.gpu_subslice_count
    shared_memory = getattr(properties, "shared_memory_per_block_optin", 0) or 65_536  # 64 KiB: AMD's and Intel's
    nvidia = device.type == "cuda" and torch.version.hip is None
    clusters = nvidia and properties.major == 9 and _TRITON >= (3, 6)
    overlaps = nvidia and properties.major >= 9
    return Device(processors, getattr(properties, "warp_size", 32), shared_memory, clusters, overlaps)


def empty_rows_like(x: Tensor, dtype: torch.dtype | None = None, width: int | None = None) -> Tensor:
    """An empty tensor of x's shape, dense and in x's memory order, with every row (the last dimension) contiguous.

    ``dtype`` and ``width``, the length of a row, are x's own unless given.
    """
    if width is None and x.is_contiguous():
        return allocated(torch.empty_like(x, dtype=dtype))
    dtype = x.dtype if dtype is None else dtype
    shape = x.shape if width is None else (*x.shape[:-1], width)
    if x.is_contiguous():
        return empty(shape, x, dtype)
    strides = [1] * x.dim()
    step = shape[-1]
    for dim in reversed(memory_order(x)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return allocated(torch.empty_strided(shape, strides, dtype=dtype, device=x.device))


def empty(shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty contiguous tensor on the device of ``like``, and of its dtype unless one is given."""
    return allocated(like.new_empty(shape, dtype=dtype))


def same_rows(lead: Tensor, *others: Tensor | None) -> tuple[list[Tensor | None], list[int]]:
    """The tensors with one row stride (in elements) each, counting the rows of all of them in one order.

    All have the leading dimensions of ``lead``; the length of a row may differ. Rows are independent of each other, so
    any order will do: it is the order of ``lead`` in memory, which makes transposed heads as good as contiguous ones. A
    tensor whose rows are not evenly spaced in that order is copied; one from ``empty_rows_like(lead)`` never is.
    """
    tensors = (lead, *others)
    if all(t is None or t.is_contiguous() for t in tensors):
        return list(tensors), [0 if t is None else t.shape[-1] for t in tensors]
    order = memory_order(lead)
    arranged: list[Tensor | None] = []
    strides: list[int] = []
    for tensor in tensors:
        stride = 0 if tensor is None else _row_stride(tensor, order)
        if tensor is not None and stride is None:
            tensor = empty_rows_like(lead, tensor.dtype, tensor.shape[-1]).copy_(tensor)
            stride = _row_stride(tensor, order)
        assert stride is not None, "a dense tensor in the lead's memory order has evenly spaced rows"
        arranged.append(tensor)
        strides.append(stride)
    return arranged, strides


def against_heads(angles: Tensor, unsqueeze_dim: int) -> tuple[list[int], list[int]]:
    """Shape and strides of cos or sin against q's four dimensions; the stride of what is broadcast is 0."""
    shape, strides = list(angles.shape), list(angles.stride())
    for dim in (0, unsqueeze_dim)[len(shape) - 2 :]:
        shape.insert(dim, 1)
        strides.insert(dim, 0)
    return shape, [0 if size == 1 else step for size, step in zip(shape, strides, strict=True)]


def memory_order(x: Tensor) -> list[int]:
    """The leading dimensions from the slowest to the fastest in memory."""
    return sorted(range(x.dim() - 1), key=x.stride, reverse=True)


def _row_stride(tensor: Tensor, order: list[int]) -> int | None:
    """Elements from one row to the next when rows are counted in ``order``, or None where that is not one number."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        return None
    innermost: int | None = None
    expected = 0
    for dim in reversed(order):
        size, stride = tensor.shape[dim], tensor.stride(dim)
        if size == 1:
            continue
        if innermost is None:
            innermost = stride
        elif stride != expected:
            return None
        expected = stride * size
    return tensor.shape[-1] if innermost is None else innermost
