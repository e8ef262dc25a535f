"""A weight that is written into between a forward and its backward: gradients, or the error, are stock's.

Stock code keeps a weight for its backward, or something that it has made of the weight, or neither. Code that writes
through ``.data`` (averages of weights, weight sync, optimizers of 8 bits) goes unseen by autograd, an optimizer's step
does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fused_norm.kernels import reference
from fused_norm.kernels.operator import OPERATORS
from fused_norm.spec import CASTINGS, NormSpec

from .numerics import BF16, FP16, FP32, slow

Function = Callable[..., Any]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEEDED = {"all": lambda name: True, "weights": lambda name: name in WEIGHTS, "others": lambda name: name not in WEIGHTS}
WEIGHTS = ("weight", "inner_weight", "q_weight", "k_weight", "a", "b")


class Pair(NamedTuple):
    """A fused call and the stock code that it stands for, both of tensors by name."""

    fused: Function
    stock: Function
    tensors: dict[str, Tensor]


def drawn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def uncast_gemma(spec: NormSpec, x: Tensor, weight: Tensor) -> Tensor:
    """The norm of OLMo 2: a 16-bit weight meets the row in fp32, and the product casts it."""
    row = x.float()
    return (weight * (row * torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + spec.eps))).to(x.dtype)


def norm_of(spec: NormSpec) -> Function:
    return partial(reference.rms_norm if spec.casts_weight else uncast_gemma, spec)


def by(name: str, *options: Any) -> Function:
    return lambda *tensors: OPERATORS[name](*tensors, *options)


def rms(spec: NormSpec, x: torch.dtype, w: torch.dtype) -> Pair:
    tensors = {"x": drawn(5, 24, dtype=x), "weight": drawn(24, dtype=w)}
    return Pair(by("rms_norm", spec, None), norm_of(spec), tensors)


def rms_of_one_dimension(spec: NormSpec, x: torch.dtype, w: torch.dtype) -> Pair:
    pair = rms(spec, x, w)
    return pair._replace(tensors=pair.tensors | {"x": drawn(24, dtype=x)})


def add(spec: NormSpec, x: torch.dtype, w: torch.dtype) -> Pair:
    def stock(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + x * 0.5
        return norm_of(spec)(total, weight), total

    tensors = {"x": drawn(5, 24, dtype=x), "residual": drawn(5, 24, dtype=x), "weight": drawn(24, dtype=w)}
    return Pair(by("add_rms_norm", spec, None, 0.5), stock, tensors)


def then_add(spec: NormSpec, x: torch.dtype, w: torch.dtype) -> Pair:
    tensors = add(spec, x, w).tensors
    return Pair(by("norm_add", spec), lambda x, residual, weight: residual + norm_of(spec)(x, weight), tensors)


def sandwich(spec: NormSpec, x: torch.dtype, w: torch.dtype) -> Pair:
    def stock(x: Tensor, residual: Tensor, inner_weight: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + norm_of(spec)(x, inner_weight)
        return norm_of(spec)(total, weight), total

    rows = {"x": drawn(5, 24, dtype=x), "residual": drawn(5, 24, dtype=x)}
    return Pair(
        by("norm_add_norm", spec), stock, rows | {"inner_weight": drawn(24, dtype=w), "weight": drawn(24, dtype=w)}
    )


def three_consumers(spec: NormSpec, x: torch.dtype, w: torch.dtype) -> Pair:
    def stock(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y = norm_of(spec)(x, weight)
        return y, y, y, x * 1

    return Pair(by("rms_norm_for_consumers", spec, 3, None, 0), stock, rms(spec, x, w).tensors)


def heads(spec: NormSpec, x: torch.dtype, w: torch.dtype) -> Pair:
    def stock(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, Tensor]:
        return norm_of(spec)(q, q_weight), norm_of(spec)(k, k_weight)

    tensors = {"q": drawn(1, 2, 3, 16, dtype=x), "k": drawn(1, 1, 3, 16, dtype=x)}
    tensors |= {"q_weight": drawn(16, dtype=w), "k_weight": drawn(16, dtype=w)}
    return Pair(lambda *given: OPERATORS["qk_norm"](*given, None, None, spec, 1, None), stock, tensors)


def rotated(spec: NormSpec, x: torch.dtype, w: torch.dtype, *, rotary: int = 16) -> Pair:
    heads_alone = heads(spec, x, w)
    cos, sin = (drawn(1, 3, rotary, dtype=x)[:, None] for _ in range(2))

    def stock(*given: Tensor) -> list[Tensor]:
        return [reference.rope(one, cos, sin) for one in heads_alone.stock(*given)]

    fused = lambda *given: OPERATORS["qk_norm"](*given, cos[:, 0], sin[:, 0], spec, 1, None)  # noqa: E731
    return heads_alone._replace(fused=fused, stock=stock)


def gated(spec: NormSpec, x: torch.dtype, w: torch.dtype, *, norm_first: bool = True, groups: int = 2) -> Pair:
    options = "silu", norm_first, groups
    tensors = {"x": drawn(5, 24, dtype=x), "gate": drawn(5, 24, dtype=x), "weight": drawn(24, dtype=w)}
    stock = lambda *given: reference.gated_rms_norm(spec, *given, *options)  # noqa: E731
    return Pair(by("gated_rms_norm", spec, *options), stock, tensors)


def adapter(spec: None, x: torch.dtype, w: torch.dtype) -> Pair:
    tensors = {"base": drawn(3, 14, dtype=x), "x": drawn(3, 20, dtype=x)}
    tensors |= {"a": drawn(4, 20, dtype=w), "b": drawn(14, 4, dtype=w)}
    return Pair(by("lora_add", 0.7), lambda *given: reference.lora_add(*given, 0.7), tensors)


KINDS: dict[str, Callable[..., Pair]] = {
    "one dimension": rms_of_one_dimension,
    "add_rms_norm": add,
    "norm_add": then_add,
    "norm_add_norm": sandwich,
    "consumers": three_consumers,
    "qk_norm": heads,
    "rotated": rotated,
    "rotated in part": partial(rotated, rotary=8),
    "gate first": partial(gated, norm_first=False),
}
SPECS = [NormSpec(casting, zero_centered) for casting in CASTINGS for zero_centered in (False, True)]
SPECS.append(NormSpec("gemma", casts_weight=False))
DTYPES = [(BF16, BF16), *slow((FP32, FP32), (BF16, FP32), (FP32, BF16), (FP16, FP16))]


def through_data(weight: Tensor) -> None:
    weight.data.mul_(-3)


def counted(weight: Tensor) -> None:
    with torch.no_grad():
        weight.mul_(-3)


WRITES = (through_data, counted)


def outcome(function: Function, given: dict[str, Tensor], needed: str, write: Callable[[Tensor], None]) -> Any:
    """The gradients, with weights written before the backward; "error" if autograd sees the write."""
    leaves = {name: one.clone().requires_grad_(NEEDED[needed](name)) for name, one in given.items()}
    found = function(*leaves.values())
    outputs = [one for one in (found if isinstance(found, (tuple, list)) else (found,)) if one.requires_grad]
    for name, one in leaves.items():
        if name in WEIGHTS:
            write(one)
    dys = [torch.linspace(-1, 2, one.numel()).view_as(one).to(one) for one in outputs]
    wanted = [one for one in leaves.values() if one.requires_grad]
    try:
        return torch.autograd.grad(outputs, wanted, dys, allow_unused=True)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return "error"


def check(pair: Pair, needed: Sequence[str] = ("all",)) -> None:
    """Compare the results of writes of both kinds, of the call that is recorded and of one that repeats it."""
    roundoff = max(torch.finfo(one.dtype).eps for one in pair.tensors.values())
    for which, write in itertools.product(needed, WRITES):
        expected = outcome(pair.stock, pair.tensors, which, write)
        for _ in range(2):
            found = outcome(pair.fused, pair.tensors, which, write)
            assert (found == "error") == (expected == "error"), (which, write)
            for one, other in zip(found, expected, strict=True):
                if found != "error":
                    difference = (one.double() - other.double()).norm() / other.double().norm()
                    assert one.dtype == other.dtype
                    assert difference < 4 * roundoff


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec}, {spec.casts_weight}")
def test_with_any_rounding_a_norms_backward_reads_what_stocks_does(
    spec: NormSpec, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    check(rms(spec, *dtypes), tuple(NEEDED))


CENTERED, PLAIN = NormSpec("gemma", True), NormSpec("llama")


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("spec", [CENTERED, PLAIN, *slow(NormSpec("gemma"), NormSpec("llama", True))], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_operators_backward_reads_what_stocks_does(
    kind: str, spec: NormSpec, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    check(KINDS[kind](spec, *dtypes))


@pytest.mark.slow
@pytest.mark.parametrize("spec", [CENTERED, PLAIN], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_that_no_gradient_needs_is_not_missed(kind: str, spec: NormSpec) -> None:
    check(KINDS[kind](spec, BF16, BF16), ("weights", "others"))


@pytest.mark.parametrize("weights", [FP32, BF16])
@pytest.mark.parametrize("x", [BF16, *slow(FP16)])
def test_an_adapters_backward_reads_what_stocks_does(x: torch.dtype, weights: torch.dtype) -> None:
    if {x, weights} != {BF16, FP16}:
        check(adapter(None, x, weights), tuple(NEEDED))
