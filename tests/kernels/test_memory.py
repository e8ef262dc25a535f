"""Tensors as rows in memory: all in one order, copied only if necessary."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fused_norm.kernels.triton.memory import as_strided_rows, empty_rows_like

from .numerics import FP16, ROW_LAYOUTS, in_layout


@pytest.mark.parametrize("layout", ROW_LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (1, 3, 5, 8), (2, 1, 5, 8), (2, 3, 1, 8), (1, 1, 1, 8)], ids=str)
def test_same_rows_count_alike_in_every_tensor(shape: tuple[int, ...], layout: str) -> None:
    """Row i, ``stride`` elements after row i - 1, is the same row in each tensor; results are written to y itself."""
    lead = in_layout(layout, torch.randn(shape))
    offset, rstd = torch.randn(shape), empty_rows_like(lead, width=1).copy_(torch.randn(*shape[:-1], 1))
    y = empty_rows_like(lead)
    (x, o, none, r, out), strides = as_strided_rows(lead, offset, None, rstd, y)
    assert none is None
    assert out is y, "a copy of the output would be lost"
    assert r is rstd
    rows = lead.numel() // shape[-1]

    def in_order(tensor: Tensor, stride: int) -> Tensor:
        return tensor.as_strided((rows, tensor.shape[-1]), (stride, 1))

    in_order(out, strides[4]).copy_(in_order(x, strides[0]) + in_order(o, strides[1]) * in_order(r, strides[3]))
    assert torch.equal(y, lead + offset * rstd)


@pytest.mark.parametrize("layout", ROW_LAYOUTS)
def test_rows_are_copied_only_where_they_are_unevenly_spaced(layout: str) -> None:
    lead = in_layout(layout, torch.randn(2, 3, 5, 8))
    (x,), _ = as_strided_rows(lead)
    assert (x is not lead) == (layout in ("a slice of tokens", "columns first"))
    assert torch.equal(x, lead)


@pytest.mark.parametrize(
    ("lead", "step"),
    [(torch.randn(3, 4, 8)[:, :1], 32), (torch.randn(8).expand(6, 8), 0)],
    ids=["the stride of a dimension of one means nothing", "an expanded row"],
)
def test_rows_that_are_evenly_spaced_are_read_where_they_are(lead: Tensor, step: int) -> None:
    (x,), (stride,) = as_strided_rows(lead)
    assert x is lead
    assert stride == step


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


def test_what_is_made_like_an_expanded_tensor_is_contiguous() -> None:
    assert empty_rows_like(torch.randn(1, 5, 8).expand(3, 5, 8)).is_contiguous()
    assert empty_rows_like(torch.randn(3, 1, 8).expand(3, 5, 8)).is_contiguous()
