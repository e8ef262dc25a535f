"""The cross entropy of a linear's output, compared with stock code and float64 results, in all its options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fused_norm.kernels import linear_cross_entropy

from ..conftest import slow_rows
from .conftest import HEAD, OPERATORS
from .head_cases import FLOORS, IGNORED, Case, error, make_case, stock_logits
from .numerics import BF16, FP16, FP32, assert_same

LINEAR_CROSS_ENTROPY = OPERATORS["linear_cross_entropy"]

FACTOR = 1.05
"""The largest error, relative to stock's. A second rounding of the gradients would make it 1.41."""

pytestmark = pytest.mark.usefixtures("sums_in_fp32")


def ours(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, **options: Any) -> Tensor:
    return linear_cross_entropy(x, weight, target, linear_bias=bias, **options)


def stock(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, **options: Any) -> Tensor:
    """Compute the loss as a model of transformers does."""
    items = options.get("num_items")
    loss = functional.cross_entropy(
        stock_logits(x, weight, bias, options).flatten(0, -2),
        target.flatten(),
        ignore_index=options.get("ignore_index", IGNORED),
        reduction="sum" if items is not None else options.get("reduction", "mean"),
        label_smoothing=options.get("label_smoothing", 0.0),
    )
    return loss if items is None else loss / items


def assert_as_near_as_stock(case: Case, dloss: float = 1.0, factor: float = FACTOR) -> None:
    results = case.results(ours, dloss), case.results(stock, dloss), case.exactly().results(stock, dloss)
    for actual, expected, exact in zip(*results, strict=True):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert error(actual, exact) <= max(factor * error(expected, exact), FLOORS[case.x.dtype])


OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 5.0},
    "softcap in fp32": {"softcap": 5.0, "logits_in_fp32": True},
    "scale and softcap, bias and items": {"logit_scale": 2.5, "softcap": 4.0, "bias": True, "num_items": 37},
    "smoothing and scale, sum of few labels": {
        "label_smoothing": 0.1, "logit_scale": 0.3, "reduction": "sum", "masked": 0.6, "max_labels": 30,
    },
    "no label missing": {"masked": 0.0, "vocabulary": 512},
    "smoothing of all": {"label_smoothing": 1.0, "softcap": 5.0},
    "another label is none, frozen weight": {"ignore_index": 7, "frozen": "w"},
    "frozen x, three labels": {"frozen": "x", "bias": True, "vocabulary": 3},
    "one row": {"rows": (1,), "masked": 0.0},
    "less than a chunk": {"rows": (7,), "masked": 0.0},
    "a chunk": {"rows": (16,), "masked": 0.0},
    "two chunks and a row": {"rows": (33,), "masked": 0.0},
    "two blocks of a row": {"rows": (5,), "vocabulary": 16_385, "width": 16, "masked": 0.2, "softcap": 30.0},
    "many blocks of a row": {"rows": (5,), "vocabulary": 40_001, "width": 16, "masked": 0.2},
    "rows in three dimensions": {"rows": (2, 3, 4), "vocabulary": 513},
}  # fmt: skip
EVERY_DTYPE = list(OPTIONS)[:4]


@pytest.mark.parametrize(
    ("dtype", "name"),
    [*((BF16, name) for name in OPTIONS), *((dtype, name) for dtype in (FP32, FP16) for name in EVERY_DTYPE)],
    ids=str,
)
@pytest.mark.usefixtures("short_chunks")
def test_loss_and_gradients_are_as_near_to_the_truth_as_stocks(dtype: torch.dtype, name: str, device: str) -> None:
    assert_as_near_as_stock(make_case(device, dtype, **OPTIONS[name]))


@pytest.mark.parametrize(
    ("rows", "vocabulary", "itemsize", "chunk"),
    [
        *((16_384, 151_936, 4, 1664), (16_385, 151_936, 2, 1920)),
        *((100, 151_936, 2, 100), (1000, 8_000_000, 4, 128)),
    ],
)
def test_a_chunk_follows_from_sizes(rows: int, vocabulary: int, itemsize: int, chunk: int) -> None:
    assert HEAD.chunk_rows(rows, vocabulary, itemsize) == chunk


@pytest.mark.usefixtures("short_chunks")
def test_a_call_has_the_same_bits_again_and_changes_nothing(device: str) -> None:
    case = make_case(device, bias=True, max_labels=40)
    before = [tensor.clone() for tensor in (case.x, case.weight, case.target)]
    first, second = case.results(ours), case.results(ours)
    assert_same(first, second)
    assert_same(before, (case.x, case.weight, case.target))
    with torch.inference_mode():
        assert torch.equal(ours(case.x, case.weight, case.bias, case.target, **case.options), first[0])


@pytest.mark.usefixtures("short_chunks")
def test_rows_without_a_label_have_no_gradient_and_change_nothing(device: str) -> None:
    case = make_case(device, masked=0.5)
    number = int((case.target != IGNORED).sum())
    whole = case.results(ours)
    for most in (number, number + 3):
        loss, dx, dweight = case._replace(options={"max_labels": most}).results(ours)
        assert torch.equal(dx, whole[1])
        assert error(loss, whole[0]) < 1e-6
        assert error(dweight, whole[2]) < 1e-2
    assert not whole[1][case.target == IGNORED].any()


@pytest.mark.parametrize("options", [{}, {"num_items": 5}, {"reduction": "sum"}, {"max_labels": 0}])
def test_without_any_label_it_is_stocks_loss(options: dict[str, Any], device: str) -> None:
    case = make_case(device, masked=1.1, **options)
    stock_options = {name: value for name, value in options.items() if name != "max_labels"}
    for dloss in (1.0, torch.nan):
        actual, expected = case.results(ours, dloss), case._replace(options=stock_options).results(stock, dloss)
        for a, b in zip(actual, expected, strict=True):
            assert torch.equal(a.isnan(), b.isnan())
            assert torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize(
    ("value", "options"), [(torch.nan, {}), (torch.inf, {"softcap": 2.0}), (torch.inf, {"logit_scale": 0.5})], ids=str
)
def test_nan_stays_in_its_row(value: float, options: dict[str, Any], device: str) -> None:
    case = make_case(device, FP32, masked=0.0, **options)
    with torch.no_grad():
        case.x[0, 3, 5] = value
    for a, b in zip(case.results(ours), case.results(stock), strict=True):
        assert torch.equal(a.isnan(), b.isnan())


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device asserts, and takes nothing afterwards")
def test_labels_outside_of_the_vocabulary_and_more_than_were_promised_are_errors(device: str) -> None:
    for wrong in (-1, 500, 10**12):
        case = make_case(device)
        case.target[1, 2] = wrong
        with pytest.raises(IndexError, match=f"target {wrong} is out of bounds for 500 classes"):
            case.results(ours)
    with pytest.raises(ValueError, match="48 rows have a label, max_labels is 47"):
        make_case(device, masked=0.0, max_labels=47).results(ours)


@pytest.mark.parametrize(
    ("dtype", "options", "dloss", "factor"),
    [(BF16, {}, 1 / 3, 1.6), (FP16, {}, 1 / 3, 1.3), (FP16, {"num_items": 2**22}, 2.0**24, FACTOR)],
    ids=str,
)
def test_another_gradient_of_the_loss_rounds_once_more_and_underflows_no_more_than_stock(
    dtype: torch.dtype, options: dict[str, Any], dloss: float, factor: float, device: str
) -> None:
    assert_as_near_as_stock(make_case(device, dtype, **options), dloss, factor)


def test_a_second_backward_and_one_for_a_part_of_the_gradients_have_the_bits_of_the_first(device: str) -> None:
    case = make_case(device)
    _, *whole = case.results(ours)
    loss, leaves = ours(case.x, case.weight, None, case.target), (case.x, case.weight)
    for places in ((0, 1), (0, 1), (0,), (1,)):
        grads = torch.autograd.grad(loss, [leaves[place] for place in places], retain_graph=True)
        assert all(torch.equal(grad, whole[place]) for grad, place in zip(grads, places, strict=True)), places


def test_second_derivatives_are_stocks(device: str) -> None:
    case = make_case(device, FP32, bias=True, softcap=5.0)

    def second(loss_of: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        x, weight = case.x.detach().requires_grad_(), case.weight.detach().requires_grad_()
        rows = x + weight[:1]  # as after a tied embedding
        loss = loss_of(rows, weight, case.bias, case.target, **case.options)
        dx, dweight = torch.autograd.grad(loss, (x, weight), create_graph=True)
        return torch.autograd.grad(dx.square().sum() + dweight.square().sum(), (x, weight))

    for a, b in zip(second(ours), second(stock), strict=True):
        assert error(a, b) < 1e-5


def test_transforms_take_the_formula(device: str) -> None:
    case = make_case(device, FP32)
    x, weight, target = case.x.detach(), case.weight.detach(), case.target
    ours_of, stock_of = (lambda x, loss=loss: loss(x, weight, None, target) for loss in (ours, stock))
    assert error(torch.func.grad(ours_of)(x), torch.func.grad(stock_of)(x)) < 1e-6
    tangents = [torch.func.jvp(function, (x,), (torch.ones_like(x),))[1] for function in (ours_of, stock_of)]
    assert error(*tangents) < 1e-5
    losses = torch.func.vmap(lambda x, t: ours(x, weight, None, t))(x, target)
    assert losses.shape == (2,)


def test_compiled_it_is_one_graph_with_the_same_results(device: str) -> None:
    case = make_case(device, FP32, bias=True, softcap=5.0)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for a, b in zip(case.results(compiled), case.results(stock), strict=True):
        assert error(a, b) < 1e-6


@pytest.mark.slow
def test_the_registered_operator_is_what_pytorch_asks_of_one(device: str) -> None:
    case = make_case(device)
    options = ("mean", IGNORED, 0.0, None, 5.0, False, 40, [True, True, False])
    arguments = (case.x.detach(), case.weight.detach(), None, case.target, None, *options)
    loss, dx, dweight, _ = results = LINEAR_CROSS_ENTROPY._forward_op(*arguments, True)
    torch.library.opcheck(LINEAR_CROSS_ENTROPY._forward_op, (*arguments, True))
    dloss = torch.full_like(loss, 0.5)
    backward = (dloss, *arguments[:5], dx, dweight, results[3], *options, True, True, False)
    torch.library.opcheck(LINEAR_CROSS_ENTROPY._backward_op, backward)
    again = LINEAR_CROSS_ENTROPY._backward_op(dloss, *arguments[:5], None, None, None, *options, True, True, False)
    assert_same(LINEAR_CROSS_ENTROPY._backward_op(*backward)[:2], again[:2])


def test_it_is_exported(device: str) -> None:
    case = make_case(device, FP32)

    class Loss(nn.Module):
        def forward(self, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            return linear_cross_entropy(x, weight, target)

    args = (case.x.detach(), case.weight.detach(), case.target)
    exported = torch.export.export(Loss(), args)
    assert error(exported.module()(*args), stock(*args[:2], None, args[2])) < 1e-6


def test_autocast_casts_as_for_a_linear(device: str) -> None:
    case = make_case(device, FP32, bias=True)
    with torch.autocast(device, BF16):
        actual, expected = case.results(ours), case.results(stock)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype == FP32
        assert error(a, b) < 6e-3


def test_float64_and_other_dtypes_beside_each_other_are_pytorchs(device: str) -> None:
    case = make_case(device, FP32).exactly()
    assert_same(case.results(ours), case.results(stock))
    mixed = make_case(device)
    with pytest.raises(RuntimeError):
        ours(mixed.x, mixed.weight.float(), None, mixed.target)


@pytest.mark.parametrize("layout", ["a transposed x", "a transposed weight", "rows apart", "labels apart"])
def test_strides_change_nothing(layout: str, device: str) -> None:
    case = make_case(device)
    expected = case.results(ours)
    x, weight, target = case.x.detach(), case.weight.detach(), case.target
    if layout == "a transposed x":
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "a transposed weight":
        weight = weight.t().contiguous().t()
    elif layout == "rows apart":
        x = torch.cat([x, x], -1)[..., : x.shape[-1]]
    else:
        target = torch.stack([target, target.flip(0)], -1)[..., 0]
    leaves = x.requires_grad_(), weight.requires_grad_()
    loss = ours(*leaves, None, target)
    for a, b in zip((loss, *torch.autograd.grad(loss, leaves)), expected, strict=True):
        assert error(a, b) < 1e-3


@pytest.mark.usefixtures("short_chunks")
def test_all_logits_are_never_there(device: str) -> None:
    case = make_case(device, FP32, rows=(192,), vocabulary=1024, masked=0.0)
    with torch.profiler.profile(profile_memory=True) as profile:
        case.results(ours)
    kind = "device_memory_usage" if device != "cpu" else "cpu_memory_usage"
    largest = max(getattr(event, kind) for event in profile.events())
    logits = 192 * 1024 * 4
    assert 0 < largest <= logits // 3


@pytest.mark.parametrize(("size", "dtype"), [(8.0, BF16), (40.0, FP16), *slow_rows((1.0, BF16), (40.0, BF16))], ids=str)
def test_the_gradient_of_capped_logits_is_rounded_where_stock_rounds_it(
    size: float, dtype: torch.dtype, device: str
) -> None:
    """The weight is an identity, so logits and their gradient are x and its gradient."""
    generator = torch.Generator().manual_seed(0)
    logits = (size * torch.randn(64, 300, generator=generator)).to(device, dtype).requires_grad_()
    labels = torch.randint(0, 300, (64,), generator=generator).to(device)
    capped = torch.tanh(logits / 30.0) * 30.0
    (expected,) = torch.autograd.grad(functional.cross_entropy(capped.float(), labels, reduction="sum"), logits)
    identity = torch.eye(300, device=device, dtype=dtype)
    loss = linear_cross_entropy(logits, identity, labels, softcap=30.0, reduction="sum")
    (actual,) = torch.autograd.grad(loss, logits)
    # A sum of exponentials in another order turns few roundings; a slope with one rounding less turns 4 % and more.
    assert (actual != expected).float().mean().item() < 0.01
