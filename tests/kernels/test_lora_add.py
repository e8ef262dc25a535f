"""lora_add: outputs and gradients, held against its formula rounding by rounding, the reference and float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_norm.kernels import lora_add

from .conftest import OPERATORS
from .numerics import BF16, FP16, FP32, Tensors, assert_same, drawn, run

LORA_ADD = OPERATORS["lora_add"]
Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ROUNDED = ("h", "u", "scaled", "dy", "du", "dh", "da", "db")
"""The names of values that are rounded to x's dtype before they are used, or to their own before they are stored."""
SMALL = ((5, 3), 40, 24, 4)
"""The rows, K, N and rank of a small call."""


def by(function: Callable[..., Tensor], scale: float) -> Function:
    """Return ``lora_add`` or its reference with one scale."""
    return lambda base, x, a, b: function(base, x, a, b, scale)


def draw_inputs(
    device: str,
    rows: Sequence[int],
    k: int,
    n: int,
    rank: int,
    *,
    x: torch.dtype = BF16,
    base: torch.dtype = BF16,
    weights: torch.dtype = FP32,
) -> Tensors:
    """Draw the tensors of a call and the gradient of y."""
    return drawn(
        device,
        base=((*rows, n), base, 1.0),
        x=((*rows, k), x, 1.0),
        a=((rank, k), weights, k**-0.5),
        b=((n, rank), weights, 1.0),
        dy=((*rows, n), torch.promote_types(base, x), 1.0),
    )


def integers(inputs: Tensors) -> Tensors:
    """Replace all values by -1, 0 and 1, so that every sum is exact and its order does not matter."""
    return inputs.mapped(lambda tensor: (2 * tensor / tensor.abs().max()).round().clamp(-1, 1))


def formula(inputs: Tensors, scale: float, without: str = "") -> Tensors:
    """Compute y and the gradients in float64, with every rounding except the one named ``without``."""
    dtype, (base, x, dy) = inputs.x.dtype, (inputs.base.double(), inputs.x.double(), inputs.dy.double())

    def rounded(name: str, value: Tensor) -> Tensor:
        return value if name == without else value.to(dtype).double()

    a, b = inputs.a.to(dtype).double(), inputs.b.to(dtype).double()
    h = rounded("h", x @ a.t())
    y = base + rounded("scaled", rounded("u", h @ b.t()) * scale)
    du = rounded("du", rounded("dy", dy) * scale)
    dh = rounded("dh", du @ b)
    da, db = (left.flatten(0, -2).t() @ right.flatten(0, -2) for left, right in ((dh, x), (du, h)))
    return Tensors(
        y=y.to(inputs.dy.dtype),
        dbase=inputs.dy.to(inputs.base.dtype),
        dx=(dh @ a).to(dtype),
        da=rounded("da", da).to(inputs.a.dtype),
        db=rounded("db", db).to(inputs.b.dtype),
    )


@pytest.mark.parametrize(
    ("shape", "x", "base", "weights", "scale"),
    [
        (((1,), 1, 1, 1), BF16, None, None, -1),
        (((70,), 140, 129, 8), BF16, None, FP32, 0.7),
        (((3, 2, 11), 48, 31, 24), FP16, FP32, None, 0.7),
        (((3,), 20, 17, 256), FP16, BF16, FP32, 1),
        (((33,), 40, 66, 128), BF16, FP32, None, 0.7),
        (((8200,), 24, 16, 40), BF16, FP32, FP32, 2),  # in larger tiles
    ],
    ids=str,
)
def test_where_sums_are_exact_every_shape_and_dtype_gives_the_bits_of_the_formula(
    shape: tuple[tuple[int, ...], int, int, int],
    x: torch.dtype,
    base: torch.dtype | None,
    weights: torch.dtype | None,
    scale: float,
    launches: list[Any],
    device: str,
) -> None:
    inputs = integers(draw_inputs(device, *shape, x=x, base=base or x, weights=weights or x))
    ours = run(by(lora_add, scale), inputs)
    assert launches
    assert_same(ours, formula(inputs, scale))
    if base in (None, FP32):  # the reference's add promotes two types of 16 bits otherwise
        assert_same(ours, run(by(LORA_ADD.reference, scale), inputs))


def apart(ours: Tensors, expected: Tensors) -> float:
    """Return the largest share of elements of a result that differ by more than sums in another order do."""
    shares = []
    for name, value in ours.present().items():
        expected_value = getattr(expected, name).double()
        shares.append(
            ((value.double() - expected_value).abs() > 1e-5 * expected_value.abs() + 1e-6).double().mean().item()
        )
    return max(shares)


@pytest.mark.parametrize(
    ("rows", "base", "names", "share"),
    [(6, FP32, ROUNDED, 0.1), (40, BF16, ("h", "u", "scaled"), 0.05)],
    ids=["of a float32 sum", "of a 16-bit sum, rounded behind the product"],
)
def test_every_rounding_of_the_formula_is_made(
    rows: int, base: torch.dtype, names: Sequence[str], share: float, device: str
) -> None:
    inputs = draw_inputs(device, (rows,), 48, 64, 8, base=base)
    ours = run(by(lora_add, 0.7), inputs)
    assert apart(ours, formula(inputs, 0.7)) < 0.02
    for name in names:
        assert apart(ours, formula(inputs, 0.7, without=name)) > share, name


def turned(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("turn", [turned, lambda tensor: tensor.repeat_interleave(2, -1)[..., ::2]])
def test_weights_are_read_in_any_layout(turn: Callable[[Tensor], Tensor], device: str) -> None:
    inputs = draw_inputs(device, *SMALL)
    spread = inputs.but(a=turn(inputs.a), b=turn(inputs.b))
    assert not spread.a.is_contiguous()
    assert not spread.b.is_contiguous()
    actual = run(by(lora_add, 0.7), spread)
    assert_same(actual, run(by(lora_add, 0.7), inputs))
    assert all(result.is_contiguous() for name, result in actual.present().items() if name != "dbase")


BEYOND = {
    "x of float32 and base of bfloat16": ({"x": FP32}, 4),
    "weights of float64": ({"weights": torch.float64}, 4),
    "a rank of 257": ({}, 257),
    "a rank of 0": ({}, 0),
}


@pytest.mark.parametrize("case", BEYOND)
def test_what_kernels_do_not_take_is_left_to_the_reference(case: str, launches: list[Any], device: str) -> None:
    dtypes, rank = BEYOND[case]
    inputs = draw_inputs(device, (5, 3), 40, 24, rank, **dtypes)
    ours, expected = (run(by(function, 0.7), inputs) for function in (lora_add, LORA_ADD.reference))
    assert_same(ours, expected)
    assert not launches


@pytest.mark.parametrize("name", ["a", "b"])
def test_factors_whose_elements_32_bits_do_not_count_are_left_to_the_reference(name: str) -> None:
    for size, strides in ((2**27, None), (3, (2**31, 1))):
        k, n = (size, 3) if name == "a" else (3, size)
        shape = (16, k) if name == "a" else (n, 16)
        factors = {"a": torch.empty(16, k, device="meta"), "b": torch.empty(n, 16, device="meta")}
        if strides is not None:
            factors[name] = factors[name].as_strided(shape, strides)
        base, x = (torch.empty(2, width, dtype=BF16, device="meta") for width in (n, k))
        refusal = LORA_ADD.why_unsupported(base, x, *factors.values(), 1.0)
        assert refusal is not None
        assert refusal.reason == "a or b has more elements than 32 bits count"


def test_stock_code_that_would_give_another_result_is_not_replaced(device: str) -> None:
    inputs = draw_inputs(device, *SMALL)
    x, a, b = inputs.x, inputs.a, inputs.b
    assert LORA_ADD.why_unlike_eager(inputs.base, x, a, b, 1.0) is None
    assert LORA_ADD.why_unlike_eager(inputs.base.float(), x, a, b, 1.0) is None
    assert "float16" in str(LORA_ADD.why_unlike_eager(inputs.base.half(), x, a, b, 1.0))
    assert LORA_ADD.why_unlike_eager(turned(inputs.base), x, a, b, 1.0) == "base is not contiguous"
