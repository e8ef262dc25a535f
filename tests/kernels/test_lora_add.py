"""lora_add: outputs and gradients, held against its formula rounding by rounding, the reference and float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_norm.kernels import lora_add, plans
from fused_norm.kernels.triton import lora_kernels

from ..conftest import slow, slow_rows
from .conftest import OPERATORS
from .numerics import BF16, FP16, FP32, Tensors, assert_same, drawn, floor, run

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


SHAPES: list[tuple[tuple[int, ...], int, int, int]] = [
    ((1,), 1, 1, 1),
    ((70,), 140, 129, 8),
    ((2, 9), 130, 65, 16),
    ((3, 2, 11), 48, 31, 24),
    ((3,), 20, 17, 256),
    *slow(((65,), 64, 200, 64), ((33,), 40, 66, 128)),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_where_sums_are_exact_every_shape_gives_the_bits_of_the_reference(
    shape: tuple[tuple[int, ...], int, int, int], launches: list[Any], device: str
) -> None:
    inputs = integers(draw_inputs(device, *shape))
    ours = run(by(lora_add, 0.7), inputs)
    assert launches
    assert_same(ours, formula(inputs, 0.7))
    assert_same(ours, run(by(LORA_ADD.reference, 0.7), inputs))


@pytest.mark.parametrize(
    ("x", "base", "weights", "scale"),
    [
        (BF16, FP32, FP32, 1),
        (BF16, None, FP32, 0.7),
        (BF16, None, None, -1),
        (FP16, FP32, None, 0.7),
        (FP16, BF16, FP32, 0.7),
        *slow_rows((FP16, None, FP32, 2), (BF16, FP32, None, 0.7)),
    ],
    ids=str,
)
def test_where_sums_are_exact_every_dtype_gives_the_bits_of_the_formula(
    x: torch.dtype, base: torch.dtype | None, weights: torch.dtype | None, scale: float, device: str
) -> None:
    inputs = integers(draw_inputs(device, *SMALL, x=x, base=base or x, weights=weights or x))
    assert_same(run(by(lora_add, scale), inputs), formula(inputs, scale))


def test_many_rows_are_cut_into_shares_and_larger_tiles(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "FEW_LORA_ROWS", 8)
    monkeypatch.setattr(lora_kernels, "_MAX_PARTIALS", 2)
    inputs = integers(draw_inputs(device, (300,), 40, 24, 8))
    assert_same(run(by(lora_add, 2), inputs), formula(inputs, 2))
    inputs = draw_inputs(device, (300,), 40, 24, 8)
    assert_same(run(by(lora_add, 0.7), inputs), run(by(lora_add, 0.7), inputs))


@pytest.mark.parametrize(
    ("few_rows", "rows_of_tile", "rank"),
    [(100, 128, 8), (200, 64, 48), (300, 32, 130), *slow_rows((100, 128, 130), (300, 32, 8))],
)
def test_tiles_of_a_large_gpu_give_the_same_bits(
    few_rows: int, rows_of_tile: int, rank: int, launches: list[Any], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    large = plans.Device(132, shared_memory=232_448)
    monkeypatch.setattr(lora_kernels, "device_props", lambda _: large)
    monkeypatch.setattr(plans, "FEW_LORA_ROWS", few_rows)
    inputs = integers(draw_inputs(device, (300,), 300, 140, rank))
    assert_same(run(by(lora_add, 0.7), inputs), formula(inputs, 0.7))
    tiles = {launch.constants["ROWS"] for launch in launches if launch.name == "_narrow_kernel"}
    assert tiles == {min(rows_of_tile, 64) if rank <= 32 else rows_of_tile}


@pytest.mark.parametrize(("weights", "base", "scale"), [(BF16, FP32, 0.7), (FP32, BF16, 1.0), (FP32, FP32, 0.7)])
def test_errors_are_those_of_the_reference(weights: torch.dtype, base: torch.dtype, scale: float, device: str) -> None:
    inputs = draw_inputs(device, (70,), 96, 80, 16, base=base, weights=weights)
    float64 = run(by(LORA_ADD.reference, scale), inputs.mapped(Tensor.double))
    ours, theirs = (run(by(function, scale), inputs) for function in (lora_add, LORA_ADD.reference))
    for name, value in ours.present().items():
        exact, stock_value = getattr(float64, name), getattr(theirs, name)
        error, allowed = ((tensor.double() - exact).norm() for tensor in (value, stock_value))
        assert error <= 1.1 * allowed + floor(FP32) * exact.norm(), name


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


BACKWARD_KERNELS = {
    "base": (),
    "x": ("narrow", "widen"),
    "base x": ("narrow", "widen"),
    "a": ("narrow", "partials", "sum"),
    "b": ("partials", "sum"),
    "a b": ("narrow", "partials", "sum"),
    "base x a b": ("narrow", "widen", "partials", "sum"),
}
"""The kernels of the backward, by the arguments that require a gradient."""


@pytest.mark.parametrize("trained", BACKWARD_KERNELS)
def test_only_arguments_that_require_a_gradient_get_one(
    trained: str, launched: Callable[[], list[str]], device: str
) -> None:
    inputs = draw_inputs(device, *SMALL)
    whole = run(by(lora_add, 0.7), inputs)
    launched()
    some = run(by(lora_add, 0.7), inputs, tuple({"base", "x", "a", "b"} - {*trained.split()}))
    assert some.present().keys() == {"y", *(f"d{name}" for name in trained.split())}
    assert_same(some, whole)
    assert launched() == ["_narrow_kernel", "_widen_kernel", *(f"_{name}_kernel" for name in BACKWARD_KERNELS[trained])]


def test_the_gradient_of_base_is_that_which_arrives(device: str) -> None:
    inputs = draw_inputs(device, *SMALL)
    leaves = [tensor.requires_grad_() for tensor in (inputs.base, inputs.x, inputs.a, inputs.b)]
    dbase, *_ = torch.autograd.grad(lora_add(*leaves, 0.7), leaves, inputs.dy)
    assert dbase.data_ptr() == inputs.dy.data_ptr()


@pytest.mark.parametrize("is_cast", [True, False])
def test_x_the_weights_as_they_are_multiplied_and_the_rows_between_the_products_are_kept(
    is_cast: bool, device: str
) -> None:
    """The saved factors are the casts that stock code makes, or the factors themselves."""
    inputs = draw_inputs(device, *SMALL, weights=FP32 if is_cast else BF16)
    leaves = [tensor.requires_grad_() for tensor in (inputs.base, inputs.x, inputs.a, inputs.b)]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        lora_add(*leaves)
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in saved[3:]] == [((5, 3, 4), BF16)]
    assert saved[0].data_ptr() == inputs.x.data_ptr()
    for tensor, factor in zip(saved[1:3], (inputs.a, inputs.b), strict=True):
        assert torch.equal(tensor, factor.bfloat16())
        assert (tensor.data_ptr() == factor.data_ptr()) == (not is_cast)


def turned(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


LAYOUTS: dict[str, dict[str, Callable[[Tensor], Tensor]]] = {
    "turned rows": dict.fromkeys(("base", "x", "dy"), turned),
    "turned base": {"base": turned},
    "columns first": {name: lambda tensor: tensor.mT.contiguous().mT for name in ("base", "x", "dy")},
    "wide rows": {
        name: lambda tensor: torch.cat((tensor, tensor), -1)[..., : tensor.shape[-1]] for name in ("base", "x", "dy")
    },
    "turned weights": dict.fromkeys(("a", "b"), turned),
    "every other number": {name: lambda tensor: tensor.repeat_interleave(2, -1)[..., ::2] for name in ("a", "b")},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_are_read_in_any_layout(layout: str, device: str) -> None:
    inputs = draw_inputs(device, *SMALL)
    spread = inputs.but(**{name: turn(getattr(inputs, name)) for name, turn in LAYOUTS[layout].items()})
    assert not any(getattr(spread, name).is_contiguous() for name in LAYOUTS[layout])
    actual = run(by(lora_add, 0.7), spread)
    assert_same(actual, run(by(lora_add, 0.7), inputs))
    assert all(result.is_contiguous() for name, result in actual.present().items() if name != "dbase")


@pytest.mark.parametrize(("k", "n", "rank"), [(0, 24, 4), (40, 0, 4), (40, 24, 0)])
def test_without_columns_or_a_rank_the_rest_is_as_by_the_formula(k: int, n: int, rank: int, device: str) -> None:
    inputs = draw_inputs(device, (6,), 40, n, rank)
    inputs = inputs.but(x=inputs.x[:, :k], a=inputs.a[:, :k])
    assert_same(run(by(lora_add, 0.7), inputs), formula(inputs, 0.7))


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
@pytest.mark.parametrize("strides", [None, (2**31, 1), (1, 2**31)], ids=str)
def test_factors_whose_elements_32_bits_do_not_count_are_left_to_the_reference(
    name: str, strides: tuple[int, int] | None
) -> None:
    size = 2**27 if strides is None else 3
    k, n = (size, 3) if name == "a" else (3, size)
    a, b = (torch.empty(shape, device="meta") for shape in ((16, k), (n, 16)))
    if strides is not None:
        a, b = (
            factor.as_strided(factor.shape, strides) if name == of else factor for of, factor in (("a", a), ("b", b))
        )
    base, x = (torch.empty(2, width, dtype=BF16, device="meta") for width in (n, k))
    refusal = LORA_ADD.unsupported(base, x, a, b, 1.0)
    assert refusal is not None
    assert refusal.reason == "a or b has more elements than 32 bits count"


def test_gradients_come_in_batches(device: str) -> None:
    inputs = draw_inputs(device, *SMALL)
    leaves = [tensor.requires_grad_() for tensor in (inputs.base, inputs.x, inputs.a, inputs.b)]
    y = lora_add(*leaves, 0.7)
    several = torch.stack((inputs.dy, inputs.dy.cos()))
    batched = torch.autograd.grad(y, leaves, several, is_grads_batched=True, retain_graph=True)
    separate = [torch.autograd.grad(y, leaves, dy, retain_graph=True) for dy in several]
    for batch, *grads in zip(batched, *separate, strict=True):
        expected = torch.stack(grads)
        assert batch.dtype == expected.dtype
        assert (batch.double() - expected.double()).norm() <= 0.02 * expected.double().norm()


@pytest.mark.usefixtures("large_graphs")
@pytest.mark.parametrize("frozen", [(), *slow(("a", "b"), ("base",))], ids=str)
def test_a_compiled_call_gives_the_same_bits(frozen: tuple[str, ...], device: str) -> None:
    inputs = draw_inputs(device, *SMALL)
    compiled = torch.compile(by(lora_add, 0.7), fullgraph=True, backend="aot_eager", dynamic=True)

    def traced(base: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return compiled(base, x, a, b)

    assert_same(run(traced, inputs, frozen), run(by(lora_add, 0.7), inputs, frozen))


def test_stock_code_that_would_give_another_result_is_not_replaced(device: str) -> None:
    inputs = draw_inputs(device, *SMALL)
    x, a, b = inputs.x, inputs.a, inputs.b
    assert LORA_ADD.differs_from_eager(inputs.base, x, a, b, 1.0) is None
    assert LORA_ADD.differs_from_eager(inputs.base.float(), x, a, b, 1.0) is None
    assert "float16" in str(LORA_ADD.differs_from_eager(inputs.base.half(), x, a, b, 1.0))
    assert LORA_ADD.differs_from_eager(turned(inputs.base), x, a, b, 1.0) == "base is not contiguous"
