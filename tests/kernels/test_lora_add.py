"""lora_add: outputs and gradients, held against its formula rounding by rounding, the reference and float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from fused_norm.kernels import lora_add, plans, reference
from fused_norm.kernels.lora_add import LORA_ADD
from fused_norm.kernels.plans import Device
from fused_norm.kernels.triton import lora_kernels
from fused_norm.kernels.triton.launch import Launch

from ..conftest import slow
from .numerics import BF16, FAR, FP16, FP32, Tensors, assert_same, drawn, far_apart, floor, run

Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ROUNDED = ("h", "u", "scaled", "dy", "du", "dh", "da", "db")
"""What is rounded to x's dtype before it is used or stored in its own."""
SMALL = ((5, 3), 40, 24, 4)
"""Rows, K, N and the rank of a small call."""


def by(function: Callable[..., Tensor], scale: float) -> Function:
    """``lora_add`` or its reference at one scale."""
    return lambda base, x, a, b: function(base, x, a, b, scale)


def inputs(
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
    """Normally distributed tensors of a call, and the gradient of y."""
    return drawn(
        device,
        base=((*rows, n), base, 1.0),
        x=((*rows, k), x, 1.0),
        a=((rank, k), weights, k**-0.5),
        b=((n, rank), weights, 1.0),
        dy=((*rows, n), torch.promote_types(base, x), 1.0),
    )


def integers(given: Tensors) -> Tensors:
    """-1, 0 and 1 in the place of all values, so that every sum is exact and its order is no matter."""
    return given.mapped(lambda one: (2 * one / one.abs().max()).round().clamp(-1, 1))


def formula(given: Tensors, scale: float, without: str = "") -> Tensors:
    """y and the gradients in float64, with every rounding but the one that is named ``without``."""
    dtype, (base, x, dy) = given.x.dtype, (given.base.double(), given.x.double(), given.dy.double())

    def rounded(name: str, value: Tensor) -> Tensor:
        return value if name == without else value.to(dtype).double()

    a, b = given.a.to(dtype).double(), given.b.to(dtype).double()
    h = rounded("h", x @ a.t())
    y = base + rounded("scaled", rounded("u", h @ b.t()) * scale)
    du = rounded("du", rounded("dy", dy) * scale)
    dh = rounded("dh", du @ b)
    da, db = (left.flatten(0, -2).t() @ right.flatten(0, -2) for left, right in ((dh, x), (du, h)))
    return Tensors(
        y=y.to(given.dy.dtype),
        dbase=given.dy.to(given.base.dtype),
        dx=(dh @ a).to(dtype),
        da=rounded("da", da).to(given.a.dtype),
        db=rounded("db", db).to(given.b.dtype),
    )


SHAPES: list[tuple[tuple[int, ...], int, int, int]] = [
    ((1,), 1, 1, 1),
    ((17,), 33, 70, 4),
    ((70,), 140, 129, 8),
    ((2, 9), 130, 65, 16),
    ((3, 2, 11), 48, 31, 24),
    ((65,), 64, 200, 64),
    ((3,), 20, 17, lora_kernels.HIGHEST_RANK),
    *slow(((33,), 40, 66, 128), ((2, 20), 70, 30, 256)),
]
DTYPES = [*itertools.product((BF16, FP16), (FP32, None), (FP32, None)), (FP16, BF16, FP32)]
"""Of x, of base and of the factors, of which None is x's."""


@pytest.mark.parametrize("scale", [0.7, *slow(1, 2, -1)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_where_sums_are_exact_every_shape_gives_the_bits_of_the_reference(
    shape: tuple[tuple[int, ...], int, int, int], scale: float, launches: list[Launch], device: str
) -> None:
    given = integers(inputs(device, *shape))
    ours = run(by(lora_add, scale), given)
    assert launches
    assert_same(ours, formula(given, scale))
    assert_same(ours, run(by(reference.lora_add, scale), given))


@pytest.mark.parametrize("scale", [1, 0.7, *slow(2, -1)])
@pytest.mark.parametrize(("x", "base", "weights"), DTYPES, ids=str)
def test_where_sums_are_exact_every_dtype_gives_the_bits_of_the_formula(
    x: torch.dtype, base: torch.dtype | None, weights: torch.dtype | None, scale: float, device: str
) -> None:
    given = integers(inputs(device, *SMALL, x=x, base=base or x, weights=weights or x))
    assert_same(run(by(lora_add, scale), given), formula(given, scale))


def test_many_rows_are_cut_into_shares_and_larger_tiles(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "FEW_LORA_ROWS", 8)
    monkeypatch.setattr(lora_kernels, "_MAX_PARTIALS", 2)
    given = integers(inputs(device, (300,), 40, 24, 8))
    assert_same(run(by(lora_add, 2), given), formula(given, 2))


@pytest.mark.parametrize(("few_rows", "rows_of_tile"), [(100, 128), (200, 64), (300, 32)])
@pytest.mark.parametrize("rank", [8, 48, 130])
def test_tiles_of_a_large_gpu_give_the_same_bits(
    rank: int, few_rows: int, rows_of_tile: int, launches: list[Launch], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    large = Device(132, shared_memory=232_448)
    monkeypatch.setattr(lora_kernels, "device_props", lambda _: large)
    monkeypatch.setattr(plans, "FEW_LORA_ROWS", few_rows)
    given = integers(inputs(device, (300,), 300, 140, rank))
    assert_same(run(by(lora_add, 0.7), given), formula(given, 0.7))
    tiles = {launch.constants["ROWS"] for launch in launches if launch.name == "_narrow_kernel"}
    assert tiles == {min(rows_of_tile, 64) if rank <= 32 else rows_of_tile}


@pytest.mark.parametrize("scale", [1.0, 0.7])
@pytest.mark.parametrize("base", [BF16, FP32], ids=str)
@pytest.mark.parametrize("weights", [BF16, FP32], ids=str)
def test_errors_are_those_of_the_reference(weights: torch.dtype, base: torch.dtype, scale: float, device: str) -> None:
    given = inputs(device, (70,), 96, 80, 16, base=base, weights=weights)
    truth = run(by(reference.lora_add, scale), given.mapped(Tensor.double))
    ours, theirs = (run(by(one, scale), given) for one in (lora_add, reference.lora_add))
    for name, value in ours.present().items():
        exact, other = getattr(truth, name), getattr(theirs, name)
        error, allowed = ((one.double() - exact).norm() for one in (value, other))
        assert error <= 1.1 * allowed + floor(FP32) * exact.norm(), name


def apart(ours: Tensors, expected: Tensors) -> float:
    """The share of elements that differ by more than sums in another order do, in the result that has most of them."""
    shares = []
    for name, value in ours.present().items():
        other = getattr(expected, name).double()
        shares.append(((value.double() - other).abs() > 1e-5 * other.abs() + 1e-6).double().mean().item())
    return max(shares)


@pytest.mark.parametrize(
    ("rows", "base", "names", "share"),
    [(6, FP32, ROUNDED, 0.1), (40, BF16, ("h", "u", "scaled"), 0.05)],
    ids=["of a float32 sum", "of a 16-bit sum, rounded behind the product"],
)
def test_every_rounding_of_the_formula_is_made(
    rows: int, base: torch.dtype, names: Sequence[str], share: float, device: str
) -> None:
    given = inputs(device, (rows,), 48, 64, 8, base=base)
    ours = run(by(lora_add, 0.7), given)
    assert apart(ours, formula(given, 0.7)) < 0.02
    for name in names:
        assert apart(ours, formula(given, 0.7, without=name)) > share, name


WANTED = {
    "base": (),
    "x": ("narrow", "widen"),
    "base x": ("narrow", "widen"),
    "a": ("narrow", "partials", "sum"),
    "b": ("partials", "sum"),
    "a b": ("narrow", "partials", "sum"),
    "base x a b": ("narrow", "widen", "partials", "sum"),
}
"""By the arguments that want a gradient: the kernels of the backward."""


@pytest.mark.parametrize("wanted", WANTED)
def test_gradients_are_those_that_are_wanted(wanted: str, launched: Callable[[], list[str]], device: str) -> None:
    given = inputs(device, *SMALL)
    whole = run(by(lora_add, 0.7), given)
    launched()
    some = run(by(lora_add, 0.7), given, tuple({"base", "x", "a", "b"} - {*wanted.split()}))
    assert some.present().keys() == {"y", *(f"d{name}" for name in wanted.split())}
    assert_same(some, whole)
    assert launched() == ["_narrow_kernel", "_widen_kernel", *(f"_{name}_kernel" for name in WANTED[wanted])]


def test_the_gradient_of_base_is_that_which_arrives(device: str) -> None:
    given = inputs(device, *SMALL)
    leaves = [one.requires_grad_() for one in (given.base, given.x, given.a, given.b)]
    dbase, *_ = torch.autograd.grad(lora_add(*leaves, 0.7), leaves, given.dy)
    assert dbase.data_ptr() == given.dy.data_ptr()


@pytest.mark.parametrize("is_cast", [True, False])
def test_x_the_weights_as_they_are_multiplied_and_the_rows_between_the_products_are_kept(
    is_cast: bool, device: str
) -> None:
    """Of the factors the casts that stock code makes, or they themselves."""
    given = inputs(device, *SMALL, weights=FP32 if is_cast else BF16)
    leaves = [one.requires_grad_() for one in (given.base, given.x, given.a, given.b)]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        lora_add(*leaves)
    assert [(tuple(one.shape), one.dtype) for one in kept[3:]] == [((5, 3, 4), BF16)]
    assert kept[0].data_ptr() == given.x.data_ptr()
    for one, factor in zip(kept[1:3], (given.a, given.b), strict=True):
        assert torch.equal(one, factor.bfloat16())
        assert (one.data_ptr() == factor.data_ptr()) == (not is_cast)


LAYOUTS: dict[str, dict[str, Callable[[Tensor], Tensor]]] = {
    "turned rows": {name: lambda one: one.transpose(0, 1).contiguous().transpose(0, 1) for name in ("base", "x", "dy")},
    "turned x": {"x": lambda one: one.transpose(0, 1).contiguous().transpose(0, 1)},
    "turned base": {"base": lambda one: one.transpose(0, 1).contiguous().transpose(0, 1)},
    "columns first": {name: lambda one: one.mT.contiguous().mT for name in ("base", "x", "dy")},
    "wide rows": {name: lambda one: torch.cat((one, one), -1)[..., : one.shape[-1]] for name in ("base", "x", "dy")},
    "turned weights": {name: lambda one: one.t().contiguous().t() for name in ("a", "b")},
    "every other number": {name: lambda one: one.repeat_interleave(2, -1)[..., ::2] for name in ("a", "b")},
    "every other row": {name: lambda one: one.repeat_interleave(2, 0)[::2] for name in ("a", "b")},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_are_read_in_any_layout(layout: str, device: str) -> None:
    given = inputs(device, *SMALL)
    spread = given.but(**{name: turn(getattr(given, name)) for name, turn in LAYOUTS[layout].items()})
    assert not any(getattr(spread, name).is_contiguous() for name in LAYOUTS[layout])
    found = run(by(lora_add, 0.7), spread)
    assert_same(found, run(by(lora_add, 0.7), given))
    assert all(one.is_contiguous() for name, one in found.present().items() if name != "dbase")


@pytest.mark.parametrize(("k", "n", "rank"), [(0, 24, 4), (40, 0, 4), (0, 0, 4), (40, 24, 0)])
def test_without_columns_or_a_rank_the_rest_is_as_by_the_formula(k: int, n: int, rank: int, device: str) -> None:
    given = inputs(device, (6,), 40, n, rank)
    given = given.but(x=given.x[:, :k], a=given.a[:, :k])
    assert_same(run(by(lora_add, 0.7), given), formula(given, 0.7))


@pytest.mark.parametrize("name", ["base", "x", "dy"])
def test_rows_lie_further_apart_than_32_bits_reach(name: str, launches: list[Launch], device: str) -> None:
    if device != "cpu":
        pytest.skip("a GPU's memory is not made of untouched pages")
    given = inputs(device, (3,), 40, 24, 4)
    expected = run(by(lora_add, 0.7), given)
    launches.clear()
    assert_same(run(by(lora_add, 0.7), given.but(**{name: far_apart(getattr(given, name))})), expected)
    assert {one.constants["INT64"] for one in launches if FAR in one.numbers} == {True}


BEYOND = {
    "x of float32": ({"x": FP32, "base": FP32}, 4),
    "x of float32 and base of bfloat16": ({"x": FP32}, 4),
    "float64": ({"x": torch.float64, "base": torch.float64, "weights": torch.float64}, 4),
    "weights of float64": ({"weights": torch.float64}, 4),
    "a rank of 257": ({}, 257),
    "a rank of 0": ({}, 0),
}


@pytest.mark.parametrize("case", BEYOND)
def test_what_kernels_do_not_take_is_left_to_the_reference(case: str, launches: list[Launch], device: str) -> None:
    dtypes, rank = BEYOND[case]
    given = inputs(device, (5, 3), 40, 24, rank, **dtypes)
    ours, expected = (run(by(one, 0.7), given) for one in (lora_add, reference.lora_add))
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
        a, b = (one.as_strided(one.shape, strides) if name == of else one for of, one in (("a", a), ("b", b)))
    base, x = (torch.empty(2, width, dtype=BF16, device="meta") for width in (n, k))
    refusal = LORA_ADD.unsupported(base, x, a, b, 1.0)
    assert refusal is not None
    assert refusal.reason == "a or b has more elements than 32 bits count"


def test_the_same_call_gives_the_same_bits_again(device: str) -> None:
    given = inputs(device, (300,), 40, 24, 8)
    first = run(by(lora_add, 0.7), given)
    for _ in range(2):
        assert_same(run(by(lora_add, 0.7), given), first)


def near(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(ours, expected, strict=True):
        assert one.dtype == other.dtype
        assert (one.double() - other.double()).norm() <= 0.02 * other.double().norm()


def test_gradients_come_in_batches(device: str) -> None:
    given = inputs(device, *SMALL)
    leaves = [one.requires_grad_() for one in (given.base, given.x, given.a, given.b)]
    y = lora_add(*leaves, 0.7)
    several = torch.stack((given.dy, given.dy.cos()))
    batched = torch.autograd.grad(y, leaves, several, is_grads_batched=True, retain_graph=True)
    apart = [torch.autograd.grad(y, leaves, one, retain_graph=True) for one in several]
    near(batched, [torch.stack(both) for both in zip(*apart, strict=True)])


@pytest.mark.usefixtures("large_graphs")
@pytest.mark.parametrize("frozen", [(), ("a", "b"), ("base",)], ids=str)
def test_a_compiled_call_gives_the_same_bits(frozen: tuple[str, ...], device: str) -> None:
    torch._dynamo.reset()
    given = inputs(device, *SMALL)
    compiled = torch.compile(by(lora_add, 0.7), fullgraph=True, backend="aot_eager", dynamic=True)

    def traced(base: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return compiled(base, x, a, b)

    assert_same(run(traced, given, frozen), run(by(lora_add, 0.7), given, frozen))


def test_stock_code_that_would_give_another_result_is_not_replaced(device: str) -> None:
    given = inputs(device, *SMALL)
    x, a, b = given.x, given.a, given.b
    assert LORA_ADD.differs_from_eager(given.base, x, a, b, 1.0) is None
    assert LORA_ADD.differs_from_eager(given.base.float(), x, a, b, 1.0) is None
    assert "float16" in str(LORA_ADD.differs_from_eager(given.base.half(), x, a, b, 1.0))
    turned = given.base.transpose(0, 1).contiguous().transpose(0, 1)
    assert LORA_ADD.differs_from_eager(turned, x, a, b, 1.0) == "base is not contiguous"
