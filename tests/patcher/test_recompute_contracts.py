"""A backward recomputes exactly the forward's tensors, with their dtypes, versions and memory; others are kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import linear

from fused_norm.kernels import glu, lora_add, rms_norm, rope
from fused_norm.patcher.recompute import call_recomputing

from .models import assert_same

BF16, FP16 = torch.bfloat16, torch.float16
ROWS, WIDTH = 10, 16


def inputs_of(device: str, shape: tuple[int, ...] = (ROWS, WIDTH)) -> list[Tensor]:
    """Return x, the norm's weight, two weights of linears and two biases."""
    torch.manual_seed(3)
    shapes = [shape, (WIDTH,), (WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH,), (WIDTH,)]
    return [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]


def gated(x: Tensor, norm: Tensor, first: Tensor, second: Tensor, *biases: Tensor) -> Tensor:
    """Compute a norm, two linears of its output, and their gate."""
    y = rms_norm(x, norm)
    gate, up = (linear(y, weight, bias) for weight, bias in zip((first, second), biases, strict=False))
    return glu(gate, up, "silu")


def gradients(result: Tensor, inputs: list[Tensor], **how: Any) -> list[Tensor | None]:
    leaves = [leaf for leaf in inputs if leaf.requires_grad]
    return list(torch.autograd.grad(result.float().sin().sum(), leaves, allow_unused=True, **how))


def autocast(device: str, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if dtype is None else torch.autocast(device, dtype)


@pytest.mark.parametrize(
    ("forward", "backward", "biased"),
    [(None, BF16, True), (BF16, None, False), (BF16, FP16, True)],
    ids=str,
)
def test_products_are_recomputed_as_in_the_forward_whatever_autocast_is_in_the_backward(
    forward: torch.dtype | None, backward: torch.dtype | None, biased: bool, device: str, products: list[str]
) -> None:
    grads = []
    for level in (False, "mlp"):
        inputs = inputs_of(device)
        with autocast(device, forward):
            args = inputs[1:] if biased else [*inputs[1:4], None, None]
            result = call_recomputing(gated, inputs[0], tuple(args), {}, level)
        with autocast(device, backward):
            grads.append(gradients(result, inputs))
    assert_same(*grads)
    assert len(products) == 2


WRITTEN = ("x", "a norm's weight", "a linear's weight", "a norm", "a cast of it", "a linear's output", "another tensor")


@pytest.mark.parametrize(("level", "between"), [(True, "forward and backward"), ("mlp", "two backwards")])
@pytest.mark.parametrize("number", range(len(WRITTEN)), ids=WRITTEN)
def test_what_is_written_into_is_noticed(number: int, level: Any, between: str, device: str) -> None:
    def forward(x: Tensor, norm: Tensor, first: Tensor, second: Tensor, factor: Tensor) -> Tensor:
        y = rms_norm(x, norm)
        cast, gate, kept = y.to(BF16), linear(y, first), factor.exp()
        tensors.extend((x, norm, first, y, cast, gate, kept))
        return glu(gate, linear(y, second), "silu") * kept + cast * factor

    for recomputes in (False, level):
        inputs, tensors = inputs_of(device)[:5], list[Tensor]()
        result = call_recomputing(forward, inputs[0], tuple(inputs[1:]), {}, recomputes)
        if between == "two backwards":
            first = gradients(result, inputs, retain_graph=True)
            assert_same(first, gradients(result, inputs, retain_graph=True))
        with torch.no_grad():
            tensors[number].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(result, inputs)


def test_a_weight_that_only_the_recomputation_reads_is_noticed_too(device: str) -> None:
    """A linear's weight gradient needs the other linear's output, so recomputing that needs the other's weight."""
    inputs = inputs_of(device)
    result = call_recomputing(lambda *inputs: gated(*inputs).sin(), inputs[0], tuple(inputs[1:]), {}, "mlp")
    gradients(result, inputs[3:4], retain_graph=True)
    with torch.no_grad():
        inputs[2].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(result, inputs[3:4])


def tripled(z: Tensor, part: Tensor) -> Tensor:
    """Write into a part of ``z`` without telling autograd."""
    part.detach().mul_(3)
    return z


def in_other_memory(z: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    z.data = change(z.detach() * 3)
    return z


def with_a_cast_written_into(y: Tensor, weight: Tensor, *_: Tensor) -> Tensor:
    cast = y.to(BF16)
    return linear(tripled(cast, cast), weight.to(BF16)).float()


def adapted(y: Tensor, weight: Tensor, b: Tensor, *_: Tensor) -> Tensor:
    x = y.to(BF16)
    return lora_add(linear(x, weight.to(BF16)), x, b.T[:4].to(BF16).contiguous(), b[:, :4], 0.5)


def with_an_adapter_written_into(y: Tensor, weight: Tensor, b: Tensor, _: Tensor) -> Tensor:
    own = b.detach().to(BF16)
    return tripled(adapted(y, weight, own), own).float()


def under_hooks_of_its_own(y: Tensor, weight: Tensor, *_: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda tensor: (tensor.half(), tensor), lambda packed: packed[1]):
        return linear(y, weight)


GATES: dict[str, tuple[Callable[..., Tensor], int]] = {
    "it is as it was": (lambda y, weight, *_: linear(y, weight), 2),
    "views": (lambda y, weight, *_: linear(y, weight).view(2, -1, WIDTH).flatten(0, 1), 2),
    "it was written into": (lambda y, weight, *_: tripled(z := linear(y, weight), z), 1),
    "its base was written into": (lambda y, weight, *_: tripled((z := linear(y, weight)).view_as(z), z), 1),
    "it is part of a storage": (
        lambda y, weight, *_: in_other_memory(linear(y, weight), lambda z: z.repeat(2, 1)[:WIDTH]),
        1,
    ),
    "it is in another order": (
        lambda y, weight, *_: in_other_memory(linear(y, weight), lambda z: z.t().contiguous().t()),
        1,
    ),
    "packed": (lambda y, weight, other, _: glu(linear(y, torch.cat((weight, other))), None, "silu"), 2),
    "a bias that was computed": (lambda y, weight, _, bias: linear(y, weight, bias * 2), 1),
    "rows of half the width": (lambda y, weight, *_: linear(y.view(-1, 8), weight[:, :8])[:WIDTH], 1),
    "a linear behind a linear": (lambda y, weight, other, _: linear(linear(y, weight), other), 1),
    "a norm that was written into": (lambda y, weight, *_: linear(tripled(y, y), weight.detach()), 0),
    "a norm in another order": (lambda y, weight, _, bias: linear(rms_norm(y.t().contiguous().t(), bias), weight), 2),
    "a factor of the product": (lambda y, weight, _, bias: torch.addmm(bias, y, weight, alpha=3), 1),
    "a factor of the bias": (lambda y, weight, _, bias: torch.addmm(bias, y, weight, beta=3), 1),
    "a frozen linear behind another": (
        lambda y, weight, _, bias: linear(linear(y, weight, bias), weight.detach()),
        3,
    ),
    "a linear of nothing that is trained": (
        lambda y, weight, _, bias: linear(torch.ones_like(y.detach()), weight.detach(), bias),
        1,
    ),
    "a cast was written into": (with_a_cast_written_into, 1),
    "a weight was written into": (lambda y, weight, *_: tripled(linear(y, weight), weight), 1),
    "the sum of a LoRA layer": (lambda *inputs: adapted(*inputs).float(), 2),
    "an adapter was written into": (with_an_adapter_written_into, 1),
    "other hooks have saved its operands": (under_hooks_of_its_own, 1),
    "x transposed": (lambda y, weight, *_: y.T @ weight, 1),
}
"""What a gate reads, a function of a norm's output, two weights and a bias, and how many products are computed."""


@pytest.mark.parametrize("name", GATES)
def test_what_a_gate_reads_is_recomputed_as_it_was_made_or_kept(name: str, device: str, products: list[str]) -> None:
    read, count = GATES[name]

    def forward(x: Tensor, norm: Tensor, up: Tensor, first: Tensor, second: Tensor, bias: Tensor) -> Tensor:
        y = rms_norm(x, norm)
        return glu(read(y, first, second, bias), linear(y, up), "silu")

    results = []
    for level in (False, "mlp"):
        x, norm, up, first, bias, _ = inputs_of(device, (WIDTH, WIDTH))
        second = torch.linspace(-1, 1, WIDTH * WIDTH, device=device).view(WIDTH, WIDTH).requires_grad_()
        result = call_recomputing(forward, x, (norm, up, first, second, bias), {}, level)
        results.append([result.detach(), *gradients(result, [up])])
    assert_same(*results)
    assert len(products) == count


@pytest.mark.parametrize("recomputable", ["both", "q", "k"])
def test_a_rotation_that_keeps_nothing_is_recomputed_if_both_of_its_inputs_are(
    recomputable: str, device: str, products: list[str]
) -> None:
    cos, sin = (function(torch.randn(1, ROWS // 2, 8, device=device)) for function in (torch.cos, torch.sin))

    def forward(x: Tensor, norm: Tensor, first: Tensor, second: Tensor) -> Tensor:
        y = rms_norm(x, norm).view(2, ROWS // 2, WIDTH)
        heads = []
        for name, weight in zip("qk", (first, second), strict=True):
            z = linear(y, weight)
            z = z if recomputable in (name, "both") else z * 2
            heads.append(z.view(2, ROWS // 2, 2, 8).transpose(1, 2))
        q, k = rope(*heads, cos, sin)
        return q * k

    results = []
    for level in (False, True, "mlp", "attention"):
        inputs = inputs_of(device)[:4]
        results.append(gradients(call_recomputing(forward, inputs[0], tuple(inputs[1:]), {}, level), inputs))
        assert_same(results[-1], results[0])
    assert len(products) == (2 if recomputable == "both" else 0)
