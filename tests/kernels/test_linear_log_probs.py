"""Log-probabilities of labels and what goes with them, compared with stock code and float64, in all their options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fused_norm.kernels import LogProbs, linear_log_probs
from fused_norm.kernels.compiler_policy import force_fused_in_graphs
from fused_norm.kernels.plans import Device

from ..conftest import slow, slow_rows
from .calls import launches_of
from .conftest import ALL, HEAD
from .head_cases import FLOORS, IGNORED, Case, error, make_case, stock_logits
from .numerics import BF16, FP16, FP32, assert_same

LINEAR_LOG_PROBS: Any = ALL["linear_log_probs"]
FACTOR = 1.05
"""The largest error, relative to stock's, of few numbers. A second rounding of the gradients would make it 1.41."""
FACTORS = {BF16: 1.01, FP16: 1.01, FP32: 1.05}
"""Of many numbers; in float32 stock's own errors are those of sums, which the kernels add up in another order."""
STATISTICS = LogProbs._fields[1:]
EVERY = dict.fromkeys(STATISTICS, True)
OF_OURS = {"uniform_grad", "recompute", "max_labels", *STATISTICS}
"""The options that change nothing in what is computed."""

pytestmark = pytest.mark.usefixtures("sums_in_fp32")


def ours(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, **options: Any) -> LogProbs:
    return linear_log_probs(x, weight, target, linear_bias=bias, **options)


def stock(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, **options: Any) -> LogProbs:
    """Compute everything of whole logits; 0 if a row has no label."""
    logits, has_label = stock_logits(x, weight, bias, options), target != options.get("ignore_index", IGNORED)
    log_p, index = logits.log_softmax(-1), target.where(has_label, 0)[..., None]
    p = log_p.exp()
    outputs = (
        log_p.gather(-1, index)[..., 0],
        -(p * log_p).sum(-1),
        (logits.argmax(-1) == target).to(logits.dtype),
        logits.detach().mean(-1),
        p.detach().square().sum(-1).log(),
    )
    return LogProbs(*(output.masked_fill(~has_label, 0.0) for output in outputs))


def by_reference(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, **options: Any) -> LogProbs:
    """Compute by PyTorch's operators, as float64 and transforms do."""
    scalars = [options.get(name) for name in ("temperature", "logit_scale", "softcap")]
    wanted = [options.get(name, False) for name in STATISTICS]
    arguments = options.get("ignore_index", IGNORED), *scalars, options.get("logits_in_fp32", False), wanted
    return LogProbs(
        *LINEAR_LOG_PROBS.reference(x, weight, bias, target, *arguments, None, None, False, False, False, [True] * 3)
    )


def incoming(case: Case, *, uniform: bool = False) -> list[Tensor]:
    """Return random gradients of log-probabilities, or one for all of them, and random ones of entropies."""
    generator = torch.Generator().manual_seed(0)
    dlog_probs, dentropies = torch.randn(2, *case.target.shape, generator=generator).to(case.x.device)
    return [torch.full_like(dlog_probs, 0.3) if uniform else dlog_probs, dentropies]


def results(
    case: Case, function: Callable[..., LogProbs], dlog_probs: Tensor | None, dentropies: Tensor | None = None
) -> list[Tensor]:
    """Return what is not None of the outputs, and the gradients of x, weight and bias that are trained."""
    leaves = case.leaves(torch.clone)
    outputs = function(*leaves, case.target, **case.options)
    pairs = [(y, d) for y, d in zip(outputs, (dlog_probs, dentropies), strict=False) if y is not None and d is not None]
    ys, dys = zip(*((y, d.to(y.dtype)) for y, d in pairs), strict=True)
    inputs = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    return [*(y.detach() for y in outputs if y is not None), *torch.autograd.grad(ys, inputs, dys)]


def without_ours(case: Case) -> Case:
    return case._replace(options={name: value for name, value in case.options.items() if name not in OF_OURS})


def assert_as_near_as_stock(case: Case, *grads: Tensor | None, factor: float = FACTOR) -> None:
    case = case._replace(options=case.options | EVERY)
    plain = without_ours(case)
    actual, expected, exact = (
        results(case, ours, *grads),
        results(plain, stock, *grads),
        results(plain.exactly(), stock, *grads),
    )
    for name, a, b, c in zip((*LogProbs._fields, "dx", "dweight", "dbias"), actual, expected, exact, strict=False):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert error(a, c) <= max(factor * error(b, c), FLOORS[case.x.dtype]), name
    assert len(actual) == len(exact)
    assert torch.equal(actual[2], expected[2])


OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "temperature and softcap": {"temperature": 1.3, "softcap": 5.0, "recompute": True},
    "temperature, scale and softcap in fp32, bias": {
        "temperature": 0.6, "logit_scale": 2.5, "softcap": 4.0, "logits_in_fp32": True, "bias": True,
    },
    "temperature and scale, few labels": {"temperature": 2.0, "logit_scale": 0.3, "masked": 0.6, "max_labels": 30},
    "no label missing": {"masked": 0.0, "vocabulary": 512},
    "another label is none, frozen weight": {"ignore_index": 7, "frozen": "w", "temperature": 0.5, "width": 96},
    "frozen weight, few labels, softcap": {"frozen": "w", "masked": 0.6, "max_labels": 30, "softcap": 5.0},
    "frozen weight with a bias": {"frozen": "w", "bias": True},
    "frozen x, three labels": {"frozen": "x", "bias": True, "vocabulary": 3},
    "one row": {"rows": (1,), "masked": 0.0},
    "a chunk": {"rows": (16,), "masked": 0.0},
    "two chunks and a row": {"rows": (33,), "masked": 0.0, "frozen": "w"},
    "two blocks of a row": {"rows": (9,), "vocabulary": 16_385, "width": 16, "masked": 0.2, "softcap": 30.0},
    "many blocks of a row": {"rows": (9,), "vocabulary": 40_001, "width": 16, "masked": 0.2},
    "rows in three dimensions": {"rows": (2, 3, 4), "vocabulary": 513},
}  # fmt: skip
EVERY_DTYPE = list(OPTIONS)[:4]


@pytest.mark.parametrize(
    ("dtype", "name"),
    [*((BF16, name) for name in OPTIONS), *((dtype, name) for dtype in (FP32, FP16) for name in EVERY_DTYPE)],
    ids=str,
)
@pytest.mark.usefixtures("short_chunks")
def test_values_and_gradients_are_as_near_to_the_truth_as_stocks(dtype: torch.dtype, name: str, device: str) -> None:
    case = make_case(device, dtype, **OPTIONS[name])
    dlog_probs, dentropies = incoming(case)
    assert_as_near_as_stock(case, dlog_probs, dentropies)
    assert_as_near_as_stock(case, dlog_probs)


WAYS: dict[str, dict[str, Any]] = {
    "trained": {},
    "trained, recomputed": {"recompute": True},
    "trained, uniform": {"uniform_grad": True},
    "frozen": {"frozen": "w"},
    "frozen, recomputed": {"frozen": "w", "recompute": True},
    "frozen, uniform": {"frozen": "w", "uniform_grad": True},
    "x alone frozen, uniform": {"frozen": "x", "uniform_grad": True},
    "bias trained alone": {"frozen": "xw", "bias": True},
    "trained with a bias, uniform": {"bias": True, "uniform_grad": True},
}
"""Ways to the gradients."""
MOST_USED = ("trained", "frozen", "trained, uniform")
every_way = pytest.mark.parametrize("way", [*MOST_USED, *slow_rows(*((way,) for way in WAYS if way not in MOST_USED))])


@every_way
@pytest.mark.parametrize("dtype", [BF16, *slow_rows((FP16,), (FP32,))], ids=str)
@pytest.mark.usefixtures("short_chunks")
def test_every_way_to_the_gradients_rounds_no_more_than_stock(way: str, dtype: torch.dtype, device: str) -> None:
    case = make_case(device, dtype, rows=(4, 40), width=96, temperature=0.8, **WAYS[way])
    dlog_probs, dentropies = incoming(case, uniform="uniform_grad" in WAYS[way])
    for grads in ((dlog_probs,), (None, dentropies), (dlog_probs, dentropies)):
        assert_as_near_as_stock(case, *grads, factor=FACTORS[dtype])


PRODUCTS = {
    "trained": ((1, 3), (1, 3)),
    "trained, recomputed": ((1, 3), (1, 3)),
    "trained, uniform": ((3, 0), (3, 3)),
    "frozen": ((2, 0), (2, 2)),
    "frozen, recomputed": ((1, 2), (1, 2)),
    "frozen, uniform": ((2, 0), (2, 2)),
}
"""Products of the forward and of the backward, without a gradient of the entropies and with one."""


@pytest.mark.parametrize("way", PRODUCTS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_a_call_takes_no_more_products_than_it_needs(
    way: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply, products = HEAD._multiply, []
    monkeypatch.setattr(HEAD, "_multiply", lambda *args: [products.append(args), multiply(*args)])
    case = make_case(device, dtype, entropies=True, **WAYS[way])
    in_fp16 = "frozen, recomputed" if "frozen" in way else "trained"
    expected = PRODUCTS[in_fp16 if dtype == FP16 else way]
    dlog_probs, dentropies = incoming(case, uniform=True)
    for grads, counts in zip(((dlog_probs,), (dlog_probs, dentropies)), expected, strict=True):
        products.clear()
        leaves = case.leaves(torch.clone)
        outputs = ours(*leaves, case.target, **case.options)[: len(grads)]
        forward = len(products)
        torch.autograd.grad(outputs, [leaf for leaf in leaves if leaf is not None and leaf.requires_grad], grads)
        assert (forward, len(products) - forward) == counts
    products.clear()
    with torch.no_grad():
        ours(case.x, case.weight, case.bias, case.target, **case.options)
    assert len(products) == 1


@pytest.mark.usefixtures("short_chunks")
def test_a_statistic_has_the_same_bits_whatever_else_is_asked_for(device: str) -> None:
    case = make_case(device, softcap=5.0, temperature=0.7)
    leaves = case.x, case.weight, case.bias, case.target
    every = ours(*leaves, **case.options, **EVERY)
    for flags in product((False, True), repeat=len(STATISTICS)):
        asked = dict(zip(STATISTICS, flags, strict=True))
        some = ours(*leaves, **case.options, **asked)
        for name, value, whole in zip(LogProbs._fields, some, every, strict=True):
            assert value is None if not asked.get(name, True) else torch.equal(value, whole), (name, asked)
        assert [y is not None and y.requires_grad for y in some] == [True, flags[0], False, False, False]


@every_way
@pytest.mark.usefixtures("short_chunks")
def test_a_call_has_the_same_bits_again_and_changes_nothing(way: str, device: str) -> None:
    case = make_case(device, max_labels=40, **WAYS[way], **EVERY)
    grads = incoming(case, uniform=True)
    before = [tensor.clone() for tensor in (case.x, case.weight, case.target, *grads)]
    for given in (grads, grads[:1]):
        first, second = results(case, ours, *given), results(case, ours, *given)
        assert_same(first, second)
    assert_same(before, (case.x, case.weight, case.target, *grads))
    with torch.inference_mode():
        assert_same(first[: len(LogProbs._fields)], ours(case.x, case.weight, case.bias, case.target, **case.options))


@every_way
@pytest.mark.usefixtures("short_chunks")
def test_rows_without_a_label_are_zeros_and_change_nothing(way: str, device: str) -> None:
    """Whatever their gradient is."""
    case = make_case(device, masked=0.5, **WAYS[way], **EVERY)
    has_label = case.target != IGNORED
    dlog_probs, dentropies = incoming(case, uniform=True)
    for grads in ((dlog_probs,), (dlog_probs, dentropies)):
        whole = results(case, ours, *grads)
        odd = results(case, ours, *(grad.masked_fill(~has_label, torch.nan) for grad in grads))
        assert_same(odd, whole)
        for rows in whole[: len(LogProbs._fields) + case.x.requires_grad]:
            assert not rows[~has_label].any()
        number = int(has_label.sum())
        for most in (number, number + 3):
            left_out = results(case._replace(options=case.options | {"max_labels": most}), ours, *grads)
            rows, sums = len(LogProbs._fields) + case.x.requires_grad, 1e-2
            assert_same(left_out[:rows], whole[:rows])
            assert all(error(a, b) < sums for a, b in zip(left_out[rows:], whole[rows:], strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_without_any_label_all_is_zero(way: str, device: str) -> None:
    for options in ({}, {"max_labels": 0}):
        case = make_case(device, masked=1.1, **WAYS[way], **EVERY, **options)
        for number in (1.0, torch.nan):
            actual = results(case, ours, torch.full(case.target.shape, number, device=device))
            assert not any(tensor.any() for tensor in actual)
            assert not any(tensor.signbit().any() for tensor in actual[:1])


@pytest.mark.parametrize("way", MOST_USED)
@pytest.mark.parametrize(
    ("value", "options"),
    [(torch.nan, {}), (torch.inf, {"softcap": 2.0}), (torch.inf, {"logit_scale": 0.5}), (-torch.inf, {})],
    ids=str,
)
def test_nan_stays_in_its_row(way: str, value: float, options: dict[str, Any], device: str) -> None:
    case = make_case(device, FP32, masked=0.0, **options, **WAYS[way])
    with torch.no_grad():
        case.x[0, 3, 5] = value
    case = case._replace(options=case.options | EVERY)
    for grads in ((incoming(case, uniform=True)[0],), incoming(case, uniform=True)):
        actual, expected = results(case, ours, *grads), results(without_ours(case), stock, *grads)
        for name, a, b in zip((*LogProbs._fields, "dx", "dweight"), actual, expected, strict=False):
            if name != "are_largest":
                assert torch.equal(a.isnan(), b.isnan()), name
        assert actual[0].isnan().sum() <= 1
        is_number = ~expected[0].isnan()
        assert torch.equal(actual[2], torch.where(is_number, expected[2], 0.0))


def test_a_logit_of_minus_infinity_is_a_label_that_is_not_there(device: str) -> None:
    """A bias can rule labels out; the entropy of the formula that stock code has is not a number then."""
    case = make_case(device, FP32, bias=True, masked=0.0, vocabulary=40, **EVERY)
    case = case._replace(target=case.target.clamp(max=35))
    with torch.no_grad():
        case.bias[36:] = -torch.inf
    weight, bias = (tensor.detach()[:36].requires_grad_() for tensor in case[1:3])
    grads = incoming(case)
    expected = results(case._replace(weight=weight, bias=bias), ours, *grads)
    for function in (ours, by_reference):
        actual = results(case, function, *grads)
        for name, a, b in zip((*LogProbs._fields, "dx", "dweight", "dbias"), actual, expected, strict=True):
            if name == "mean_logits":
                assert (a == -torch.inf).all()
            elif name in ("dweight", "dbias"):
                assert error(a[:36], b) < 1e-6
                assert not a[36:].any()
            else:
                assert error(a, b) < 1e-6, name


@pytest.mark.parametrize("vocabulary", [5, 8193, 16_390])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_first_of_equal_logits_is_the_largest(vocabulary: int, softcap: float | None, device: str) -> None:
    """The weight is a column, so that logits are multiples of it; the largest ones are in several blocks of a row."""
    best = sorted({1, vocabulary // 2, vocabulary - 2})
    weight = torch.zeros(vocabulary, 1, device=device)
    weight[best], weight[0] = 1.0, 0.5
    labels = torch.tensor([0, *best, vocabulary - 1, IGNORED], device=device)
    x = torch.ones(len(labels), 1, device=device).requires_grad_()
    for function in (ours, by_reference):
        outputs = function(x, weight, None, labels, softcap=softcap, are_largest=True)
        assert outputs.are_largest.tolist() == [float(label == best[0]) for label in labels.tolist()]
        torch.autograd.grad(outputs.log_probs.sum(), x)


@pytest.mark.parametrize("frozen", ["", *slow("w", "x")])
@pytest.mark.usefixtures("short_chunks")
def test_an_expected_gradient_that_differs_from_row_to_row_is_computed_as_without(frozen: str, device: str) -> None:
    way = {"frozen": frozen} if frozen else {}
    case, plain = make_case(device, uniform_grad=True, check_grad=True, **way), make_case(device, **way)
    dlog_probs, _ = incoming(case)
    for a, b in zip(results(case, ours, dlog_probs), results(plain, ours, dlog_probs), strict=True):
        assert torch.equal(a, b)
    same = torch.full_like(dlog_probs, 0.3)
    case.target[0, 0] = IGNORED
    same[0, 0] = 2.0  # of a row without a label
    promised = make_case(device, uniform_grad=True, **way)
    promised.target[0, 0] = IGNORED
    for a, b in zip(results(case, ours, same), results(promised, ours, same), strict=True):
        assert torch.equal(a, b)


CASTS = {"weights": (FP32, BF16, BF16), "hidden states": (BF16, FP32, BF16), "all": (FP32, FP32, BF16)}


@pytest.mark.parametrize("way", ["trained", "trained, uniform", *slow("frozen", "trained, recomputed")])
@pytest.mark.parametrize("of", [*slow("weights"), "hidden states", *slow("all")])
@pytest.mark.usefixtures("short_chunks")
def test_gradients_of_tensors_that_are_cast_inside_are_rounded_to_their_own_dtypes_alone(
    of: str, way: str, device: str
) -> None:
    weight_dtype, x_dtype, dtype = CASTS[of]
    case = make_case(device, FP32, bias=True, **WAYS[way])
    dlog_probs, _ = incoming(case, uniform="uniform" in way)
    narrow = [t.detach().to(dtype).requires_grad_(t.requires_grad) for t in (case.x, case.weight, case.bias)]
    wide = [
        n.detach().to(kind).requires_grad_(n.requires_grad)
        for n, kind in zip(narrow, (x_dtype, weight_dtype, weight_dtype), strict=True)
    ]
    options = {name: True for name in ("uniform_grad", "recompute") if name in WAYS[way]}
    exact = [n.detach().double().requires_grad_(n.requires_grad) for n in narrow]
    found = []
    for tensors, how in ((wide, options | {"dtype": dtype}), (narrow, options), (exact, {})):
        x, weight, bias = tensors
        log_probs = linear_log_probs(x, weight, case.target, linear_bias=bias, **how).log_probs
        trained = [t for t in tensors if t.requires_grad]
        found.append([log_probs, *torch.autograd.grad(log_probs, trained, dlog_probs.to(log_probs.dtype))])
        assert [g.dtype for g in found[-1][1:]] == [t.dtype for t in trained]
    for ours_cast, of_narrow, truth in zip(*found, strict=True):
        assert (ours_cast - truth).norm() <= 1.001 * (of_narrow - truth).norm()
    assert torch.equal(found[0][0], found[1][0])
    for grad in found[0][1:]:
        assert grad.dtype == dtype or not torch.equal(grad, grad.to(dtype).float())


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device asserts, and takes nothing afterwards")
def test_labels_outside_of_the_vocabulary_and_broken_promises_are_errors(device: str) -> None:
    for wrong in (-1, 500, 10**12):
        case = make_case(device)
        case.target[1, 2] = wrong
        with pytest.raises(IndexError, match=f"linear_log_probs: target {wrong} is out of bounds for 500 classes"):
            results(case, ours, *incoming(case))
    case = make_case(device, masked=0.0, max_labels=47)
    with pytest.raises(ValueError, match="48 rows have a label, max_labels is 47"):
        results(case, ours, *incoming(case))
    case = make_case(device, uniform_grad=True)
    with pytest.raises(ValueError, match="differ from row to row, leave uniform_grad out"):
        results(case, ours, *incoming(case))
    same = torch.full(case.target.shape, torch.nan)
    assert all(grad.isnan().any() for grad in results(case, ours, same)[1:])
    one = torch.zeros(case.target.shape)
    one[tuple((case.target != IGNORED).nonzero()[-1])] = 1.0
    with pytest.raises(ValueError, match="differ from row to row"):
        results(case, ours, one)


@pytest.mark.parametrize("way", MOST_USED)
def test_a_second_backward_and_one_for_a_part_of_the_gradients_have_the_bits_of_the_first(
    way: str, device: str
) -> None:
    case = make_case(device, **WAYS[way], entropies=True)
    leaves = [leaf for leaf in (case.x, case.weight) if leaf.requires_grad]
    outputs = ours(case.x, case.weight, None, case.target, **case.options)
    dlog_probs, dentropies = incoming(case, uniform=True)
    for grads in ((dlog_probs,), (dlog_probs, dentropies)):
        _, _, *whole = results(case, ours, *grads)
        for places in ((0, 1), (0, 1), (0,), (1,)):
            some = [place for place in places if place < len(leaves)]
            if some:
                inputs = [leaves[place] for place in some]
                actual = torch.autograd.grad(outputs[: len(grads)], inputs, grads, retain_graph=True)
                assert all(torch.equal(grad, whole[place]) for grad, place in zip(actual, some, strict=True)), places


@pytest.mark.parametrize("way", MOST_USED)
def test_second_derivatives_are_stocks(way: str, device: str) -> None:
    case = make_case(device, FP32, bias=True, softcap=5.0, temperature=0.7, **WAYS[way])
    options = {name: True for name in ("uniform_grad", "recompute") if name in WAYS[way]}

    def second(function: Callable[..., LogProbs], **options: Any) -> tuple[Tensor, ...]:
        x, weight = case.x.detach().requires_grad_(), case.weight.detach().requires_grad_(case.weight.requires_grad)
        outputs = function(
            x + weight[:1], weight, case.bias.detach(), case.target, softcap=5.0, temperature=0.7, **options
        )
        leaves = [leaf for leaf in (x, weight) if leaf.requires_grad]
        total = (outputs.log_probs * 0.3).sum() + outputs.entropies.square().sum()
        grads = torch.autograd.grad(total, leaves, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves)

    for a, b in zip(second(ours, entropies=True, **options), second(stock), strict=True):
        assert error(a, b) < 1e-5


def test_transforms_take_the_formula(device: str) -> None:
    case = make_case(device, FP32)
    x, weight, target = case.x.detach(), case.weight.detach(), case.target

    def of(function: Callable[..., LogProbs], **options: Any) -> Callable[[Tensor], Tensor]:
        def total(x: Tensor) -> Tensor:
            outputs = function(x, weight, None, target, **options)
            return (outputs.log_probs * 0.3 + outputs.entropies).sum()

        return total

    both = of(ours, entropies=True), of(stock)
    assert error(*(torch.func.grad(function)(x) for function in both)) < 1e-6
    assert error(*(torch.func.jvp(function, (x,), (torch.ones_like(x),))[1] for function in both)) < 1e-5
    rows = torch.func.vmap(lambda x, t: ours(x, weight, None, t).log_probs)(x, target)
    assert error(rows, stock(x, weight, None, target).log_probs) < 1e-6


@pytest.fixture(params=[False, True], ids=["by the compiler", "by the operator"])
def _in_graphs(request: pytest.FixtureRequest) -> Iterator[None]:
    torch._dynamo.reset()
    if request.param:
        with force_fused_in_graphs():
            yield
    else:
        yield


@pytest.mark.parametrize("way", MOST_USED)
@pytest.mark.parametrize("asked", [EVERY, *slow_rows(({},))], ids=["with statistics", "alone"])
@pytest.mark.usefixtures("_in_graphs")
def test_compiled_it_is_one_graph_with_the_same_results(way: str, asked: dict[str, bool], device: str) -> None:
    case = make_case(device, FP32, bias=True, softcap=5.0, temperature=0.7, **WAYS[way], **asked)
    if "frozen" in way:
        case.bias.requires_grad_(False)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    grads = incoming(case, uniform="uniform" in way)[: 2 if asked else 1]
    expected = results(case, ours, *grads)
    for a, b in zip(results(case, compiled, *grads), expected, strict=True):
        assert error(a, b) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("uniform", [False, True])
def test_the_registered_operator_is_what_pytorch_asks_of_one(uniform: bool, device: str) -> None:
    case = make_case(device)
    options = (
        IGNORED,
        0.7,
        None,
        5.0,
        False,
        [True, False, True, False],
        40,
        None,
        uniform,
        False,
        False,
        [True, True, False],
    )
    arguments = case.x.detach(), case.weight.detach(), None, case.target, *options
    forward = LINEAR_LOG_PROBS._forward_op(*arguments, True)
    torch.library.opcheck(LINEAR_LOG_PROBS._forward_op, (*arguments, True))
    for dentropies in (None, torch.randn_like(forward[0])):
        incoming = torch.full_like(forward[0], 0.5), dentropies, None, None, None
        backward = (*incoming, *arguments[:4], *forward[5:8], *options, True, True, False)
        torch.library.opcheck(LINEAR_LOG_PROBS._backward_op, backward)
        again = (*incoming, *arguments[:4], None, None, None, *options, True, True, False)
        for a, b in zip(LINEAR_LOG_PROBS._backward_op(*backward), LINEAR_LOG_PROBS._backward_op(*again), strict=True):
            assert error(a, b) < 1e-2


def test_it_is_exported(device: str) -> None:
    case = make_case(device, FP32)

    class Log(nn.Module):
        def forward(self, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            return linear_log_probs(x, weight, target).log_probs

    args = (case.x.detach(), case.weight.detach(), case.target)
    exported = torch.export.export(Log(), args)
    assert error(exported.module()(*args), stock(*args[:2], None, args[2]).log_probs) < 1e-6


def test_autocast_casts_as_for_a_linear(device: str) -> None:
    case = make_case(device, FP32, bias=True)
    grads = incoming(case)[:1]
    with torch.autocast(device, BF16):
        actual, expected = results(case, ours, *grads), results(case, stock, *grads)
    for a, b in zip((actual[0], *actual[1:]), (expected[0], *expected[5:]), strict=True):
        assert a.dtype == b.dtype == FP32
        assert error(a, b) < 6e-3


def test_float64_and_other_dtypes_beside_each_other_are_pytorchs(device: str) -> None:
    case = make_case(device, FP32, temperature=0.7, **EVERY).exactly()
    grads = incoming(case)
    actual = results(case, ours, *grads)
    for a, b in zip(actual, results(without_ours(case), stock, *grads), strict=True):
        assert a.dtype == torch.float64
        assert error(a, b) < 1e-12
    outputs = ours(case.x, case.weight, None, case.target, **case.options)
    assert [y.requires_grad for y in outputs] == [True, True, False, False, False]
    mixed = make_case(device)
    with pytest.raises(RuntimeError):
        ours(mixed.x, mixed.weight.float(), None, mixed.target)


@pytest.mark.parametrize("layout", ["a transposed x", "a transposed weight", "rows apart", "labels apart"])
@pytest.mark.parametrize("way", ["trained", *slow_rows(("trained, uniform",))])
def test_strides_change_nothing(layout: str, way: str, device: str) -> None:
    case = make_case(device, **WAYS[way], entropies=True)
    grads = incoming(case, uniform=True)
    expected = results(case, ours, *grads)
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
    outputs = ours(*leaves, None, target, **case.options)[:2]
    for dlog_probs in (grads[0], grads[0][:1, :1].expand(grads[0].shape), torch.stack(grads[:1] * 2, -1)[..., 0]):
        actual = torch.autograd.grad(outputs, leaves, (dlog_probs, grads[1]), retain_graph=True)
        for a, b in zip((*outputs, *actual), expected, strict=True):
            assert error(a, b) < 1e-3


@pytest.mark.parametrize("way", MOST_USED)
@pytest.mark.usefixtures("short_chunks")
def test_all_logits_are_never_there(way: str, device: str) -> None:
    case = make_case(device, FP32, rows=(192,), vocabulary=1024, masked=0.0, **WAYS[way], **EVERY)
    with torch.profiler.profile(profile_memory=True) as profile:
        results(case, ours, incoming(case, uniform=True)[0])
    kind = "device_memory_usage" if device != "cpu" else "cpu_memory_usage"
    largest = max(getattr(event, kind) for event in profile.events())
    logits = 192 * 1024 * 4
    assert 0 < largest <= logits // 3


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_of_capped_logits_is_rounded_where_stock_rounds_it(temperature: float, device: str) -> None:
    """The weight is an identity, so logits and their gradient are x and its gradient."""
    generator = torch.Generator().manual_seed(0)
    logits = (8.0 * torch.randn(64, 300, generator=generator)).to(device, BF16).requires_grad_()
    labels = torch.randint(0, 300, (64,), generator=generator).to(device)
    dlog_probs = torch.randn(64, generator=generator).to(device)
    capped = torch.tanh(logits / 30.0) * 30.0
    if temperature != 1.0:
        capped = capped / temperature
    log_p = capped.float().log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    (expected,) = torch.autograd.grad(log_p, logits, dlog_probs)
    identity = torch.eye(300, device=device, dtype=BF16)
    options = {"softcap": 30.0, "temperature": temperature, "recompute": True}
    (actual,) = torch.autograd.grad(ours(logits, identity, None, labels, **options).log_probs, logits, dlog_probs)
    # A sum of exponentials in another order turns few roundings; a slope with one rounding less turns 4 % and more.
    assert (actual != expected).float().mean().item() < 0.01


def test_a_loss_of_log_probs_has_the_gradients_of_the_cross_entropy(device: str) -> None:
    """Of a mean over labels, whose gradient is the same for all of them; outputs are in the shape of the target."""
    case = make_case(device, FP32, uniform_grad=True)
    log_probs = ours(*case[:4], **case.options).log_probs
    loss = -log_probs.sum() / (case.target != IGNORED).sum()
    expected = functional.cross_entropy(functional.linear(case.x, case.weight).flatten(0, 1), case.target.flatten())
    assert log_probs.shape == case.target.shape
    assert error(loss, expected) < 1e-6
    grads = [torch.autograd.grad(total, (case.x, case.weight)) for total in (loss, expected)]
    assert all(error(a, b) < 1e-6 for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("way", MOST_USED)
def test_no_rows_give_empty_results_and_zero_gradients(way: str, device: str) -> None:
    case = make_case(device, **WAYS[way], **EVERY)
    empty = case._replace(x=case.x.detach()[:0].requires_grad_(), target=case.target[:0])
    count = len(LogProbs._fields)
    actual = results(empty, ours, torch.zeros(0, 24, device=device))
    assert [tuple(y.shape) for y in actual[:count]] == [(0, 24)] * count
    assert not any(grad.any() for grad in actual[count:])


@pytest.mark.parametrize("way", MOST_USED)
def test_a_weight_written_between_forward_and_backward_is_an_error_as_in_stock(way: str, device: str) -> None:
    case = make_case(device, **WAYS[way])
    log_probs = ours(case.x, case.weight, None, case.target, **case.options).log_probs
    with torch.no_grad():
        case.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_probs.sum().backward()


@pytest.mark.parametrize(
    ("dtype", "options", "device_limits", "most"),
    [(BF16, {}, True, 32), (BF16, {"softcap": 5.0}, True, None), (FP32, {}, True, None), (BF16, {}, False, None)],
    ids=str,
)
def test_two_programs_fit_on_a_processor_whose_registers_can_be_limited(
    dtype: torch.dtype,
    options: dict[str, Any],
    device_limits: bool,
    most: int | None,
    on: Callable[[Any], None],
    device,
) -> None:
    on(Device(limits_registers=device_limits))
    case = make_case(device, dtype, entropies=True, are_largest=True, **options)
    launches = launches_of(lambda: ours(*case[:4], **case.options))
    assert [launch.options.get("maxnreg") for launch in launches] == [most]
