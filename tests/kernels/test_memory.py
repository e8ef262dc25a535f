"""Tensors as rows in memory: results lie as their inputs do, and are copied only if necessary."""

from __future__ import annotations

import pytest
import torch

from fused_norm.kernels import add_rms_norm, rms_norm

from .calls import launches_of
from .numerics import ROW_LAYOUTS, in_layout


@pytest.mark.parametrize("layout", ROW_LAYOUTS)
def test_rows_are_copied_only_where_they_are_unevenly_spaced(layout: str, device: str) -> None:
    x = in_layout(layout, torch.randn(2, 3, 5, 8, device=device))
    (launch,) = launches_of(lambda: rms_norm(x, None))
    is_copied = all(tensor is None or tensor.data_ptr() != x.data_ptr() for tensor in launch.tensors)
    assert is_copied == (layout in ("a slice of tokens", "columns first"))


def test_rows_that_are_evenly_spaced_are_read_where_they_are(device: str) -> None:
    """The stride of a dimension of one means nothing, and an expanded row is one in memory.

    Strides are multiples of 16, as Triton compiles others apart, and then a sum has another order.
    """
    for x in (torch.randn(3, 4, 16, device=device)[:, :1], torch.randn(16, device=device).expand(6, 16)):
        (launch,) = launches_of(lambda x=x: rms_norm(x, None))
        assert x.data_ptr() in [tensor.data_ptr() for tensor in launch.tensors if tensor is not None]
        assert torch.equal(rms_norm(x, None), rms_norm(x.contiguous(), None))


@pytest.mark.parametrize("layout", ROW_LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (1, 3, 5, 8), (2, 1, 5, 8), (2, 3, 1, 8), (1, 1, 1, 8)], ids=str)
def test_rows_count_alike_in_every_tensor_and_results_are_dense(
    shape: tuple[int, ...], layout: str, device: str
) -> None:
    x, r = in_layout(layout, torch.randn(shape, device=device)), torch.randn(shape, device=device)
    outputs = add_rms_norm(x, r, None)
    for output, expected in zip(outputs, add_rms_norm(x.contiguous(), r, None), strict=True):
        assert torch.equal(output, expected)
        in_memory = output.transpose(1, 2) if layout == "transposed heads" else output
        assert in_memory.is_contiguous()
    assert torch.equal(outputs[1], x + r)


def test_what_is_made_like_an_expanded_tensor_is_contiguous(device: str) -> None:
    for x in (torch.randn(1, 5, 8, device=device), torch.randn(3, 1, 8, device=device)):
        assert rms_norm(x.expand(3, 5, 8), None).is_contiguous()
