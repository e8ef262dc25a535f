"""Rounding, the layout of rows, and where kernels run."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_norm.kernels import triton_utils
from fused_norm.kernels.plans import Device
from fused_norm.kernels.triton_utils import empty_rows_like, facts_of, round_to, runs_kernels_on, same_rows

from .numerics import BF16, DTYPES, FP16, FP32, ROW_LAYOUTS, in_layout

TL_DTYPES = {FP32: tl.float32, BF16: tl.bfloat16, FP16: tl.float16}
SIZE = 4096


@triton.jit
def _round_kernel(value_ptr, rounded_ptr, stored_ptr, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    rounded = round_to(tl.load(value_ptr + index), DTYPE)
    tl.store(rounded_ptr + index, rounded)
    tl.store(stored_ptr + index, rounded)


def _hard_values(dtype: torch.dtype) -> Tensor:
    """4096 fp32 values: ties and their neighbours, subnormals and limits of dtype, NaN, inf, and any bits at all."""
    generator = torch.Generator().manual_seed(0)
    info = torch.finfo(dtype)
    bits = torch.int32 if dtype == FP32 else torch.int16
    values = torch.randn(512, generator=generator).to(dtype)
    ties = (values.float() + (values.view(bits) + 1).view(dtype).float()) / 2
    limits = [0.0, -0.0, info.max, -info.max, info.tiny, info.smallest_normal / 4, float("inf"), -float("inf")]
    beyond = [65519.9, 65520.0, 3.39e38, 3.4e38, -3.4e38, 1e-45, float("nan")]
    parts = [
        values.float(),
        ties,
        torch.nextafter(ties, torch.tensor(float("inf"))),
        torch.nextafter(ties, torch.tensor(-float("inf"))),
        info.smallest_normal / 2 * torch.randn(512, generator=generator),
        torch.tensor(limits + beyond),
    ]
    rest = SIZE - sum(part.numel() for part in parts)
    parts.append(torch.randint(-(2**31), 2**31, (rest,), generator=generator).to(torch.int32).view(FP32))
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_round_to_is_the_cast_of_torch(dtype: torch.dtype, device: str) -> None:
    values = _hard_values(dtype).to(device)
    rounded, stored = torch.empty_like(values), torch.empty_like(values, dtype=dtype)
    _round_kernel[(1,)](values, rounded, stored, DTYPE=TL_DTYPES[dtype], SIZE=SIZE)
    expected = values.to(dtype)
    number = ~values.isnan()
    integer = torch.int32 if dtype == FP32 else torch.int16
    assert number.sum() > SIZE - 64
    assert torch.equal(rounded[number].view(torch.int32), expected[number].float().view(torch.int32))
    storable = number
    if triton_utils.INTERPRETED and dtype == BF16:  # the interpreter's own cast mangles the subnormal ones
        storable = number & ((expected == 0) | (expected.abs() >= torch.finfo(BF16).smallest_normal))
    assert torch.equal(stored[storable].view(integer), expected[storable].view(integer))
    assert stored[~number].isnan().all()
    assert rounded[~number].isnan().all()


@pytest.mark.parametrize("layout", ROW_LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (1, 3, 5, 8), (2, 1, 5, 8), (2, 3, 1, 8), (1, 1, 1, 8)], ids=str)
def test_same_rows_count_alike_in_every_tensor(shape: tuple[int, ...], layout: str) -> None:
    """Row i, ``stride`` elements after row i - 1, is the same row in each; results are written through to y."""
    lead = in_layout(layout, torch.randn(shape))
    other, rstd = torch.randn(shape), empty_rows_like(lead, width=1).copy_(torch.randn(*shape[:-1], 1))
    y = empty_rows_like(lead)
    (x, o, none, r, out), strides = same_rows(lead, other, None, rstd, y)
    assert none is None
    assert out is y, "a copy of the output would be lost"
    assert r is rstd
    rows = lead.numel() // shape[-1]

    def in_order(tensor: Tensor, stride: int) -> Tensor:
        return tensor.as_strided((rows, tensor.shape[-1]), (stride, 1))

    in_order(out, strides[4]).copy_(in_order(x, strides[0]) + in_order(o, strides[1]) * in_order(r, strides[3]))
    assert torch.equal(y, lead + other * rstd)


@pytest.mark.parametrize("layout", ROW_LAYOUTS)
def test_rows_are_copied_only_where_they_are_unevenly_spaced(layout: str) -> None:
    lead = in_layout(layout, torch.randn(2, 3, 5, 8))
    (x,), _ = same_rows(lead)
    assert (x is not lead) == (layout in ("a slice of tokens", "columns first"))
    assert torch.equal(x, lead)


def test_an_expanded_row_is_read_where_it_is() -> None:
    lead = torch.randn(8).expand(6, 8)
    (x,), (stride,) = same_rows(lead)
    assert x is lead
    assert stride == 0


@pytest.mark.parametrize("layout", ROW_LAYOUTS)
def test_empty_rows_like_is_dense_and_in_memory_order(layout: str) -> None:
    x = in_layout(layout, torch.randn(2, 3, 5, 8))
    for width in (8, 1):
        empty = empty_rows_like(x, FP16, width)
        assert empty.shape == (2, 3, 5, width)
        assert empty.dtype == FP16
        assert sorted(empty.stride()) == sorted(empty.contiguous().stride()) or layout == "transposed heads"
        assert empty.transpose(1, 2).is_contiguous() if layout == "transposed heads" else empty.is_contiguous()
        assert empty.untyped_storage().nbytes() == 30 * width * 2


def test_kernels_run_on_gpus_and_meta_and_interpreted_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, meta, double = torch.ones(1), torch.ones(1, device="meta"), torch.ones(1, dtype=torch.float64)
    for interpreted in (True, False):
        monkeypatch.setattr(triton_utils, "INTERPRETED", interpreted)
        assert runs_kernels_on(cpu) == interpreted
        assert runs_kernels_on(cpu, None, cpu) == interpreted
        assert runs_kernels_on(meta)
        assert not runs_kernels_on(double)
        assert not runs_kernels_on(cpu, double)


def test_facts_of_the_cpu() -> None:
    assert facts_of(torch.device("cpu")) == Device(processors=4)


@pytest.mark.gpu
def test_facts_of_the_gpu() -> None:
    facts = facts_of(torch.device("cuda", 0))
    properties = torch.cuda.get_device_properties(0)
    assert facts.processors == properties.multi_processor_count
    assert facts.warp_size == 32
    limit = triton.runtime.driver.active.utils.get_device_properties(0)["max_shared_mem"]
    assert facts.shared_memory == limit
    assert facts.clusters == (properties.major == 9 and torch.version.hip is None)
