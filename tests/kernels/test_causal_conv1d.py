"""causal_conv1d: outputs, gradients and strides, held against the stock code and float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fused_norm.kernels import causal_conv1d

from ..conftest import slow, slow_rows
from .conftest import OPERATORS, Planned
from .numerics import BF16, DTYPES, FP16, FP32, Tensors, assert_near, assert_same, drawn, run

ACTIVATIONS = pytest.mark.parametrize("activation", ["silu", None])

Convolution = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]


def by_stock(activation: str | None) -> Convolution:
    """Return the convolution of rows as modelling code has it."""

    def stock(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        padding, length = w.shape[-1] - 1, x.shape[1]
        y = functional.conv1d(x.transpose(1, 2), w.unsqueeze(1), b, padding=padding, groups=len(w))[:, :, :length]
        return (y if activation is None else functional.silu(y)).transpose(1, 2)

    return stock


def by_kernel(activation: str | None) -> Convolution:
    return lambda x, w, b: causal_conv1d(x, w, b, activation)  # type: ignore[arg-type]


def draw_inputs(device: str, *shape: int, taps: int = 4, bias: bool = True, dtype: torch.dtype = BF16) -> Tensors:
    """Draw x, weight and bias, and the gradient of the result."""
    channels = shape[-1]
    b = dtype if bias else None
    kinds = {"w": ((channels, taps), dtype, 0.7), "b": ((channels,), b, 0.5), "dy": (shape, dtype, 1.0)}
    return drawn(device, x=(shape, dtype, 1.5), **kinds)


def assert_right(inputs: Tensors, activation: str | None = "silu") -> Tensors:
    """Assert errors at most stock's plus one rounding; the unit of a sum is the sum of its absolute terms."""
    ours, stock = run(by_kernel(activation), inputs), run(by_stock(activation), inputs)
    float64 = run(by_stock(activation), inputs.mapped(Tensor.double))
    terms = inputs.mapped(lambda tensor: tensor.double().abs())
    sums = run(by_stock(None), terms)  # SiLU's derivative is at most 1.1
    units = {"dx": sums.dx.amax(-1, keepdim=True), "dw": sums.dw, "db": sums.db}
    assert_near(ours, stock, float64, units)
    return ours


@pytest.mark.parametrize(
    ("dtype", "taps", "bias", "activation"),
    [
        *((dtype, 4, True, "silu") for dtype in DTYPES),
        *((BF16, 3, bias, activation) for bias in (True, False) for activation in ("silu", None)),
        (FP16, 2, False, "silu"),
        (FP32, 2, True, None),
    ],
)
def test_every_dtype_and_width_is_as_accurate_as_the_stock_code(
    dtype: torch.dtype, taps: int, bias: bool, activation: str | None, device: str
) -> None:
    assert_right(draw_inputs(device, 2, 7, 10, taps=taps, bias=bias, dtype=dtype), activation)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_the_convolution_is_rounded_once_and_before_the_activation(dtype: torch.dtype, device: str) -> None:
    inputs = draw_inputs(device, 3, 40, 33, dtype=dtype)
    wide = by_stock(None)(inputs.x.double(), inputs.w.double(), inputs.b.double())
    y = causal_conv1d(inputs.x, inputs.w, inputs.b, "silu")
    rounded = functional.silu(wide.to(dtype).float()).to(dtype)
    assert (y != rounded).double().mean() < 5e-3
    assert (y != functional.silu(wide).to(dtype)).double().mean() > 0.02, "one rounding is told from two"
    without = by_stock(None)(inputs.x.double(), inputs.w.double(), None).to(dtype) + inputs.b
    assert (causal_conv1d(inputs.x, inputs.w, inputs.b) != without).double().mean() > 0.02, "so is a bias added later"
    assert (causal_conv1d(inputs.x, inputs.w, inputs.b) != wide.to(dtype)).double().mean() < 1e-3


@pytest.mark.parametrize(
    ("length", "taps"),
    [(1, 4), (2, 2), (3, 4), (61, 4), (62, 3), (64, 4), (65, 2), (65, 4), *slow_rows((63, 4), (66, 3), (129, 4))],
)
def test_any_length_is_cut_into_pieces_that_know_their_neighbours(length: int, taps: int, device: str) -> None:
    assert_right(draw_inputs(device, 2, length, 5, taps=taps, dtype=FP32))


@pytest.mark.parametrize("channels", [1, 127, 300, *slow(128, 257)])
def test_any_number_of_channels(channels: int, device: str) -> None:
    assert_right(draw_inputs(device, 2, 5, channels))


def test_programs_that_walk_through_several_pieces_sum_all_of_them(device: str, planned: Planned) -> None:
    planned("conv", programs=2)
    assert_right(draw_inputs(device, 2, 130, 2))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part of wider rows": lambda x: torch.cat((x * torch.nan, x, x * torch.nan), 2).narrow(2, x.shape[2], x.shape[2]),
    "sequences apart": lambda x: torch.stack((x, x * torch.nan), 1)[:, 0],
    "time first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every other row": lambda x: torch.stack((x, x * torch.nan), 2).flatten(1, 2)[:, ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_has_the_same_bits_and_results_have_rows_of_channels(layout: str, device: str) -> None:
    inputs = draw_inputs(device, 2, 6, 9)
    dense, turned = run(by_kernel("silu"), inputs), LAYOUTS[layout]
    for place in ("x", "dy"):
        ours = run(by_kernel("silu"), inputs.but(**{place: turned(getattr(inputs, place))}))
        assert_same(ours, dense)
    y = causal_conv1d(turned(inputs.x), inputs.w, inputs.b, "silu")
    assert y.stride(2) == 1
    assert (y.stride(0) < y.stride(1)) == (layout == "time first")


def test_a_row_that_is_not_finite_reaches_the_next_ones_alone(device: str) -> None:
    inputs = draw_inputs(device, 2, 70, 4)
    for value, activation in ((float("nan"), "silu"), (float("inf"), None)):
        x, dy = inputs.x.clone(), inputs.dy.clone()
        x[0, 3, 1], dy[1, 62, 2] = value, value
        ours, stock = (run(by(activation), inputs.but(x=x, dy=dy)) for by in (by_kernel, by_stock))
        for name, result in ours.present().items():
            assert torch.equal(result.isfinite(), getattr(stock, name).isfinite()), (name, value, activation)


def test_other_numbers_of_taps_take_the_reference(device: str) -> None:
    operator = OPERATORS["causal_conv1d"]
    for taps in (1, 5):
        inputs = draw_inputs(device, 2, 6, 3, taps=taps)
        refusal = operator.why_unsupported(inputs.x, inputs.w, inputs.b, "silu")
        assert refusal is not None
        assert f"{taps} taps" in refusal.reason
        assert torch.equal(
            by_kernel("silu")(inputs.x, inputs.w, inputs.b), by_stock("silu")(inputs.x, inputs.w, inputs.b)
        )


@ACTIVATIONS
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_the_reference_has_the_bits_of_stock_and_its_backward_is_near_float64(
    dtype: torch.dtype, activation: str | None, device: str
) -> None:
    operator = OPERATORS["causal_conv1d"]
    for taps, bias in ((4, True), (2, False)):
        inputs = draw_inputs(device, 2, 6, 5, taps=taps, bias=bias, dtype=dtype)
        ours = run(lambda x, w, b: operator.reference(x, w, b, activation), inputs)
        assert_same(run(by_stock(activation), inputs), ours)
        leaves = [tensor.requires_grad_() for tensor in (inputs.x.clone(), inputs.w.clone())]
        tensors = *leaves, inputs.b
        by_reference = torch.autograd.grad(
            causal_conv1d(*tensors, activation), leaves, inputs.dy, create_graph=True  # type: ignore[misc]
        )  # fmt: skip
        float64 = run(by_stock(activation), inputs.mapped(Tensor.double))
        for grad, exact in zip(by_reference, (float64.dx, float64.dw), strict=True):
            assert grad.requires_grad or activation is None
            torch.testing.assert_close(
                grad.double(), exact, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps
            )
