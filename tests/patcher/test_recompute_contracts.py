"""A backward recomputes exactly the forward's tensors, with their dtypes, versions and memory; others are kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fused_norm.kernels.glu import GLU
from fused_norm.kernels.norm import RMS_NORM
from fused_norm.kernels.operator import norm_spec
from fused_norm.kernels.qk_norm_rope import ROPE
from fused_norm.patcher.recompute import call_recomputing

from .models import assert_same

BF16, FP16 = torch.bfloat16, torch.float16
SPEC = norm_spec("llama", False, 1e-6)
ROWS, WIDTH = 10, 16


def inputs_of(device: str, shape: tuple[int, ...] = (ROWS, WIDTH)) -> list[Tensor]:
    """Return x, the norm's weight, two weights of linears and two biases."""
    torch.manual_seed(3)
    shapes = [shape, (WIDTH,), (WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH,), (WIDTH,)]
    return [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]


def gated(x: Tensor, norm: Tensor, first: Tensor, second: Tensor, *biases: Tensor) -> Tensor:
    """Compute a norm, two linears of its output, and their gate."""
    y = RMS_NORM(x, norm, SPEC, None)
    gate, up = (nn.functional.linear(y, weight, bias) for weight, bias in zip((first, second), biases, strict=False))
    return GLU(gate, up, "silu")


def gradients(result: Tensor, inputs: list[Tensor], **how: Any) -> list[Tensor | None]:
    leaves = [leaf for leaf in inputs if leaf.requires_grad]
    return list(torch.autograd.grad(result.float().sin().sum(), leaves, allow_unused=True, **how))


def assert_levels_agree(
    forward: Callable[..., Tensor],
    device: str,
    count: int = 4,
    *,
    levels: tuple[Any, ...] = (False, "mlp"),
    with_gradients: int | None = None,
    shape: tuple[int, ...] = (ROWS, WIDTH),
) -> None:
    """Assert that a forward of the first ``count`` inputs has the same result and gradients at all levels.

    ``with_gradients``: how many of the inputs' gradients are compared, by default all.
    """
    results = []
    for level in levels:
        x, *rest = inputs_of(device, shape)[:count]
        result = call_recomputing(forward, x, tuple(rest), {}, level)
        results.append([result.detach(), *gradients(result, [x, *rest][:with_gradients])])
    for actual in results[1:]:
        assert_same(actual, results[0])


# ---- Dtypes ----


def autocast(device: str, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if dtype is None else torch.autocast(device, dtype)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("backward", [None, BF16, FP16], ids=str)
@pytest.mark.parametrize("forward", [None, BF16], ids=str)
def test_products_are_recomputed_as_in_the_forward_whatever_autocast_is_in_the_backward(
    forward: torch.dtype | None, backward: torch.dtype | None, biased: bool, device: str, products: list[Any]
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


def test_recomputed_rows_are_the_backwards_own_and_no_part_of_its_graph(device: str, products: list[Any]) -> None:
    inputs = inputs_of(device)
    result = call_recomputing(gated, inputs[0], tuple(inputs[1:]), {}, "mlp")
    (first, *_) = gradients(result, inputs, create_graph=True)
    (second, *_) = gradients(first, inputs, retain_graph=True)
    expected = gradients(gradients(gated(*inputs), inputs, create_graph=True)[0], inputs)[0]
    assert torch.allclose(second, expected, rtol=1e-4, atol=1e-5)


# ---- Versions ----

WRITTEN = {"x": 0, "the norm's weight": 1, "a linear's weight": 2}


@pytest.mark.parametrize("level", [True, "mlp"])
@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_into_between_two_backwards_is_noticed(name: str, level: Any, device: str) -> None:
    for recomputes in (False, level):
        inputs = inputs_of(device)
        result = call_recomputing(gated, inputs[0], tuple(inputs[1:]), {}, recomputes)
        first = gradients(result, inputs, retain_graph=True)
        assert_same(first, gradients(result, inputs, retain_graph=True))
        with torch.no_grad():
            inputs[WRITTEN[name]].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(result, inputs)


@pytest.mark.parametrize("name", ["a norm's output", "a linear's output"])
@pytest.mark.parametrize("level", [True, "mlp"])
def test_an_output_that_is_written_into_between_two_backwards_is_noticed(name: str, level: Any, device: str) -> None:
    def forward(x: Tensor, norm: Tensor, first: Tensor, second: Tensor) -> Tensor:
        y = RMS_NORM(x, norm, SPEC, None)
        gate = nn.functional.linear(y, first)
        outputs.append(y if name == "a norm's output" else gate)
        return GLU(gate, nn.functional.linear(y, second), "silu")

    for recomputes in (False, level):
        outputs: list[Tensor] = []
        x, *rest = inputs_of(device)[:4]
        result = call_recomputing(forward, x, tuple(rest), {}, recomputes)
        gradients(result, [x, *rest], retain_graph=True)
        with torch.no_grad():
            outputs[0].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(result, [x, *rest])


@pytest.mark.parametrize("twice", [False, True])
def test_a_weight_that_only_the_recomputation_reads_is_noticed_too(twice: bool, device: str) -> None:
    """A linear's weight gradient needs the other linear's output, so recomputing that needs the other's weight."""

    def forward(*inputs: Tensor) -> Tensor:
        return gated(*inputs).sin()  # keeps the gate's output

    inputs = inputs_of(device)
    result = call_recomputing(forward, inputs[0], tuple(inputs[1:]), {}, "mlp")
    if twice:
        gradients(result, inputs[3:4], retain_graph=True)
    with torch.no_grad():
        inputs[2].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(result, inputs[3:4])


def test_a_tensor_that_is_kept_as_it_is_and_written_into_between_two_backwards_is_noticed(device: str) -> None:
    def forward(x: Tensor, norm: Tensor, factor: Tensor) -> Tensor:
        return (RMS_NORM(x, norm, SPEC, None) + factor.sin()) * (y := factor.exp()) + y

    x, norm, _, _, factor, _ = inputs_of(device)
    result = call_recomputing(forward, x, (norm, factor), {}, "mlp")
    gradients(result, [x, factor], retain_graph=True)
    with torch.no_grad():
        factor.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(result, [x, factor])


# ---- Tensors that are no longer, or never were, the output of a linear ----

Change = Callable[[Tensor], Tensor]


def written_into(z: Tensor) -> Tensor:
    z.detach().mul_(3)
    return z


def written_into_a_view(z: Tensor) -> Tensor:
    z.detach()[1:, 3:].mul_(3)
    return z


def written_into_its_base(z: Tensor) -> Tensor:
    view = z[1:]
    z.detach().mul_(3)
    return torch.cat([view, view[:1]])


def in_part_of_a_storage(z: Tensor) -> Tensor:
    z.data = (z.detach() * 3).repeat(2, 1)[: len(z)]
    return z


def in_the_last_part_of_a_storage(z: Tensor) -> Tensor:
    z.data = (z.detach() * 3).repeat(2, 1)[len(z) :]
    return z


def in_another_order(z: Tensor) -> Tensor:
    z.data = (z.detach() * 3).t().contiguous().t()
    return z


CHANGED: dict[str, tuple[Change, int]] = {
    "as it is": (lambda z: z, 2),
    "through views": (lambda z: z.view(2, ROWS // 2, WIDTH).flatten(0, 1), 2),
    "its rows": (lambda z: z[2:], 2),
    "its columns": (lambda z: z[:, 1:5], 2),
    "transposed": (lambda z: z.t(), 2),
    "written into": (written_into, 1),
    "written into a view": (written_into_a_view, 1),
    "written into its base": (written_into_its_base, 1),
    "in part of a storage": (in_part_of_a_storage, 1),
    "in the last part of a storage": (in_the_last_part_of_a_storage, 1),
    "in another order": (in_another_order, 1),
    "negated": (lambda z: -z, 1),
}
"""A change of a linear's output before a gate reads it, and how many products are recomputed."""


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("name", CHANGED)
def test_an_output_of_a_linear_is_recomputed_only_if_it_is_whole_and_unchanged(
    name: str, place: int, device: str, products: list[Any]
) -> None:
    change, count = CHANGED[name]

    def forward(x: Tensor, norm: Tensor, first: Tensor, second: Tensor) -> Tensor:
        y = RMS_NORM(x, norm, SPEC, None)
        read = change(nn.functional.linear(y, first))
        rows, columns = read.shape
        up = nn.functional.linear(y, second)
        up = up[-rows:, :columns] if (rows, columns) != (WIDTH, ROWS) else up.t()
        return GLU(*((read, up) if place == 0 else (up, read)), "silu")

    assert_levels_agree(forward, device, with_gradients=3)
    assert len(products) == count


def packed(y: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return GLU(nn.functional.linear(y, torch.cat([first, second])), None, "silu")


def with_a_computed_bias(y: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return GLU(nn.functional.linear(y, first, second[0] * 2), nn.functional.linear(y, second), "silu")


def of_half_rows(y: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Let linears read rows of half the width: the norm's output in another shape."""
    halves = y.view(-1, WIDTH // 2)
    return GLU(*(nn.functional.linear(halves, weight[:, : WIDTH // 2]) for weight in (first, second)), "silu")


def of_some_rows(y: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return GLU(*(nn.functional.linear(y[3:], weight) for weight in (first, second)), "silu")


def of_some_columns(y: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return GLU(*(nn.functional.linear(y[:, :8], weight[:, :8]) for weight in (first, second)), "silu")


def of_another_linear(y: Tensor, first: Tensor, second: Tensor) -> Tensor:
    z = nn.functional.linear(y, first)
    return GLU(nn.functional.linear(z, second), nn.functional.linear(y, second), "silu")


def of_the_input(y: Tensor, first: Tensor, second: Tensor) -> Tensor:
    z = torch.ones_like(y.detach())
    return GLU(nn.functional.linear(z, first), nn.functional.linear(y, second), "silu")


def in_a_batch(y: Tensor, first: Tensor, second: Tensor) -> Tensor:
    y = y.view(2, -1, WIDTH)
    return GLU(*(nn.functional.linear(y, weight) for weight in (first, second)), "silu")


def with_one_twice(y: Tensor, first: Tensor, second: Tensor) -> Tensor:
    gate = nn.functional.linear(y, first)
    return GLU(gate, gate, "silu") + second[0] * nn.functional.linear(y, second)


READ: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], int]] = {
    "packed": (packed, 1),
    "a bias that was computed": (with_a_computed_bias, 1),
    "rows of half the width": (of_half_rows, 0),
    "some rows": (of_some_rows, 0),
    "some columns": (of_some_columns, 0),
    "a linear behind a linear": (of_another_linear, 1),
    "a linear of something else": (of_the_input, 1),
    "in a batch": (in_a_batch, 2),
    "one twice": (with_one_twice, 1),
}
"""A gate of a norm's output and two weights, and how many products are recomputed."""


@pytest.mark.parametrize("name", READ)
def test_products_are_recomputed_of_the_norm_that_they_have_read(name: str, device: str, products: list[Any]) -> None:
    read, count = READ[name]

    def forward(x: Tensor, norm: Tensor, *weights: Tensor) -> Tensor:
        return read(RMS_NORM(x, norm, SPEC, None), *weights)

    assert_levels_agree(forward, device)
    assert len(products) == count


def by_a_factor(y: Tensor, weight: Tensor, bias: Tensor, **factors: float) -> Tensor:
    return torch.addmm(bias, y, weight, **factors)


def behind_another(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return nn.functional.linear(nn.functional.linear(y, weight, bias), weight.detach())


def behind_another_in_another_shape(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    halves = nn.functional.linear(y, weight, bias).view(-1, WIDTH // 2)
    return nn.functional.linear(halves, weight.detach()[:8, :8]).view(-1, WIDTH)


def of_nothing_that_is_trained(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return nn.functional.linear(torch.ones_like(y.detach()), weight.detach(), bias)


BIASED: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], int]] = {
    "a factor of the product": (partial(by_a_factor, alpha=3), 1),
    "a factor of the bias": (partial(by_a_factor, beta=3), 1),
    "factors of one": (partial(by_a_factor, alpha=1, beta=1), 2),
    "a frozen linear behind another": (behind_another, 3),
    "a frozen linear behind another in another shape": (behind_another_in_another_shape, 1),
    "a linear of nothing that is trained": (of_nothing_that_is_trained, 1),
}
"""A function of a norm's output, a weight and a bias, whose result a gate reads, and how many products are computed."""


@pytest.mark.parametrize("name", BIASED)
def test_products_with_a_bias_or_frozen_weights_are_recomputed_as_they_were_made(
    name: str, device: str, products: list[Any]
) -> None:
    read, count = BIASED[name]

    def forward(x: Tensor, norm: Tensor, first: Tensor, second: Tensor, bias: Tensor) -> Tensor:
        y = RMS_NORM(x, norm, SPEC, None)
        return GLU(read(y, first, bias), nn.functional.linear(y, second), "silu")

    assert_levels_agree(forward, device, 5)
    assert len(products) == count


@pytest.mark.parametrize("recomputable", ["both", "q", "k", "neither"])
def test_a_rotation_that_keeps_nothing_is_recomputed_if_both_of_its_inputs_are(
    recomputable: str, device: str, products: list[Any]
) -> None:
    cos, sin = (function(torch.randn(1, ROWS // 2, 8, device=device)) for function in (torch.cos, torch.sin))

    def forward(x: Tensor, norm: Tensor, first: Tensor, second: Tensor) -> Tensor:
        y = RMS_NORM(x, norm, SPEC, None).view(2, ROWS // 2, WIDTH)
        heads = []
        for name, weight in zip("qk", (first, second), strict=True):
            z = nn.functional.linear(y, weight)
            z = z if recomputable in (name, "both") else z * 2
            heads.append(z.view(2, ROWS // 2, 2, 8).transpose(1, 2))
        q, k = ROPE(*heads, cos, sin, 1, False, "half", False, None)
        return q * k

    assert_levels_agree(forward, device, levels=(False, True, "mlp", "attention"))
    assert len(products) == (2 if recomputable == "both" else 0)


# ---- Rows in another order than the norm's ----


@pytest.mark.parametrize("order", ["contiguous", "transposed"])
def test_a_norms_output_in_another_order_of_memory_is_no_rows_of_a_product(
    order: str, device: str, products: list[Any]
) -> None:
    def forward(x: Tensor, norm: Tensor, *weights: Tensor) -> Tensor:
        y = RMS_NORM(x if order == "contiguous" else x.transpose(0, 1), norm, SPEC, None)
        return GLU(*(nn.functional.linear(y, weight) for weight in weights), "silu")

    assert_levels_agree(forward, device, shape=(2, 5, WIDTH))
