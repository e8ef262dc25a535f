"""glu: outputs, gradients and strides, held against the stock code and float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from fused_norm.kernels import glu
from fused_norm.kernels.arguments import GLU_ACTIVATIONS
from fused_norm.kernels.glu import GLU, GLU_FOR_CONSUMERS

from ..conftest import slow
from .numerics import ACTIVATIONS, BF16, DTYPES, FP16, FP32, Tensors, assert_near, assert_same, drawn, run

EVERY = pytest.mark.parametrize("activation", GLU_ACTIVATIONS)


def stock(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def inputs(device: str, *shape: int, gate: torch.dtype = BF16, up: torch.dtype | None = BF16) -> Tensors:
    """gate and up, and the gradient of the product; without up a gate of twice the width."""
    wide = (*shape[:-1], shape[-1] * (1 if up else 2))
    y_dtype = torch.promote_types(gate, up) if up else gate
    return drawn(device, gate=(wide, gate, 2.0), up=(shape, up, 1.0), dy=(shape, y_dtype, 1.0))


def by(function: Callable[..., Tensor], activation: str) -> Callable[[Tensor, Tensor | None], Tensor]:
    """``glu`` or ``stock`` of one activation."""
    return lambda gate, up: function(gate, up, activation)


def assert_right(given: Tensors, activation: str) -> None:
    """No further from float64 than stock code is, and one rounding; units are the largest of a row."""
    ours, theirs = run(by(glu, activation), given), run(by(stock, activation), given)
    assert_near(ours, theirs, run(by(stock, activation), given.mapped(Tensor.double)), {})


@EVERY
@pytest.mark.parametrize("up", [BF16, None, *slow(FP32)], ids=str)
@pytest.mark.parametrize("gate", DTYPES, ids=str)
def test_every_dtype_is_as_accurate_as_the_stock_code(
    gate: torch.dtype, up: torch.dtype | None, activation: str, device: str
) -> None:
    assert_right(inputs(device, 5, 3, 40, gate=gate, up=up), activation)


def _rounded(x: Tensor, activation: str) -> Tensor:
    """The activation, computed in fp32 and rounded.

    On a CPU the erf of torch's gelu is off by 18 roundings, and the last bit of fp32's erf depends on the processor.
    """
    if activation == "gelu":
        wide = x.float()
        erf = torch.erf((wide * 0.5**0.5).double()).float()
        return (wide * (0.5 * (1 + erf))).to(x.dtype)
    if activation == "gelu_new" and not x.is_cuda:  # pow of fp16 is rounded once there
        return 0.5 * x * (1.0 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * (x * x * x))))
    return ACTIVATIONS[activation](x)


@EVERY
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_the_activation_is_rounded_before_the_product(dtype: torch.dtype, activation: str, device: str) -> None:
    given = inputs(device, 20, 1024, gate=dtype, up=dtype)
    gate, up = given.gate, given.up
    apart = glu(gate, up, activation) != _rounded(gate, activation) * up
    # The last bit of erf is CUDA's or Triton's, and near -1 one is added to it.
    assert apart.double().mean() < (2e-2 if (activation, device) == ("gelu", "cuda") else 1e-3)
    unrounded = (ACTIVATIONS[activation](gate.float()) * up.float()).to(dtype)
    assert (glu(gate, up, activation) != unrounded).double().mean() > 0.05, "one rounding is told from two"


@EVERY
def test_activations_agree_with_torch_in_fp32_over_their_whole_range(activation: str, device: str) -> None:
    near = torch.logspace(-30, 2.5, 400, device=device)
    x = torch.cat((near, -near, torch.linspace(-12, 12, 1001, device=device), torch.zeros(3, device=device)))
    ones = torch.ones_like(x)
    given = Tensors(gate=x, up=ones, dy=ones)
    exact = run(by(stock, activation), given.mapped(Tensor.double)).present()
    for name, value in run(by(glu, activation), given).present().items():
        # Where the factor is small PyTorch adds one to what is rounded next to -1.
        truth = exact[name]
        assert ((value - truth).abs() <= 4e-7 * truth.abs() + 2e-7 * x.abs().clamp(max=10)).all()
    small = near[near < 1e-4]
    found = glu(small, torch.ones_like(small), activation)
    torch.testing.assert_close(found, ACTIVATIONS[activation](small), rtol=3e-7, atol=0)


@EVERY
def test_what_is_not_finite_stays_what_it_is_in_torch(activation: str, device: str) -> None:
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 1e38, -1e38, 200.0, -200.0], device=device)
    ones = torch.ones_like(x)
    torch.testing.assert_close(glu(x, ones, activation), _rounded(x, activation), equal_nan=True)
    one = torch.tensor([2.0], device=device)
    assert glu(one, one * float("nan"), activation).isnan()


@pytest.mark.parametrize("width", [1, 17, 2049, *slow(2, 3, 7, 16, 40, 130, 1023, 5000)])
def test_every_width(width: int, device: str) -> None:
    assert_right(inputs(device, 3, width), "silu")
    assert_right(inputs(device, 3, width, up=None), "gelu_tanh")


@pytest.mark.parametrize("rows", [1, 33, *slow(3, 700)])
def test_any_number_of_rows(rows: int, device: str) -> None:
    """One row after the other they are cut anywhere, halves of rows into tiles."""
    for width in (6, 40):
        assert_right(inputs(device, rows, width), "silu")
        assert_right(inputs(device, rows, width, up=None), "silu")


def test_one_row_for_all(device: str) -> None:
    given = inputs(device, 4, 16)
    one = given.up[:1].expand(4, 16)
    assert_same(*(run(by(glu, "gelu"), given.but(up=up)) for up in (one, one.contiguous())))


def summands(form: str, dtype: torch.dtype, device: str, width: int) -> tuple[Tensors, list[Tensor]]:
    """The gradient of a product, and gate and up as leaves: in float32, in the ``dtype``, or as two sums of such."""
    kind = (2, 5, width), FP32 if form == "float32" else dtype, 1.0
    given = drawn(device, **dict.fromkeys(("a", "b", "c", "d", "dy"), kind))
    leaves = [given.a, given.b, given.c, given.d][: 4 if form == "sums" else 2]
    return given, [one.requires_grad_() for one in leaves]


def wide_product(leaves: list[Tensor], activation: str) -> Tensor:
    """Their product in float32, by the operator that has one output."""
    if len(leaves) == 2:
        return GLU(*(one.float() for one in leaves), activation)
    a, b, c, d = leaves
    return GLU(a.float() + c, b.float() + d, activation)


def for_consumers(leaves: list[Tensor], activation: str, dtype: torch.dtype, wide: int = 0) -> tuple[Tensor, ...]:
    return GLU_FOR_CONSUMERS(*leaves, *[None] * (4 - len(leaves)), activation, 2, dtype, wide)


FORMS = pytest.mark.parametrize("form", ["float32", "16 bits", "sums"])


@EVERY
@FORMS
@pytest.mark.parametrize(("wide", "used"), [(0, "01"), (0, "1"), (1, "01"), (2, "01"), (3, "01")])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_for_consumers_it_has_the_bits_of_their_casts(
    dtype: torch.dtype, wide: int, used: str, form: str, activation: str, device: str
) -> None:
    """``wide``: a bit for each of two consumers, 1 if it reads float32; ``used``: those that anything depends on."""
    of_each = [FP32 if wide >> place & 1 else dtype for place in range(2)]
    for width in (40, 7):
        given, leaves = summands(form, dtype, device, width)
        dys = given.dy.to(of_each[0]), (given.dy * 3).sin().to(of_each[1])

        def results(ys: Sequence[Tensor], leaves: list[Tensor] = leaves, dys: Sequence[Tensor] = dys) -> list[Tensor]:
            assert [y.dtype for y in ys] == of_each
            outputs, incoming = zip(*[(ys[int(place)], dys[int(place)]) for place in used], strict=True)
            return [*ys, *torch.autograd.grad(outputs, leaves, incoming)]

        y = wide_product(leaves, activation)
        expected = results([y.to(one) for one in of_each])
        for _ in range(2):  # recorded, and repeated
            computed = results(for_consumers(leaves, activation, dtype, wide))
            assert (computed[0].data_ptr() == computed[1].data_ptr()) == (wide in (0, 3))
            assert_same(computed, expected, where=width)
        with torch.no_grad():
            found = for_consumers(leaves, activation, dtype, wide)
        # Without a gradient one output serves all consumers that read one dtype.
        for one, other in zip(found if wide else [found], expected, strict=False):
            assert torch.equal(one, other)
        assert len(found) == 2 or not wide


@FORMS
def test_for_consumers_its_gradients_are_differentiated_again(form: str, device: str) -> None:
    _, leaves = summands(form, BF16, device, 8)
    found = []
    for fused in (True, False):
        y, other = for_consumers(leaves, "silu", BF16) if fused else 2 * [wide_product(leaves, "silu").to(BF16)]
        first = torch.autograd.grad((y.float() * other.float()).sum(), leaves, create_graph=True)
        found.append([*first, *torch.autograd.grad(first[0].float().square().sum(), leaves[-1])])
    for one, other in zip(*found, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert (one - other).norm() < 1e-2 * other.norm()


def test_two_dtypes_are_left_to_glu(device: str) -> None:
    given = inputs(device, 3, 8)
    factors = given.gate.bfloat16(), given.up.float(), None, None
    assert GLU_FOR_CONSUMERS.differs_from_eager(*factors, "silu", 2, BF16, 0) is not None
