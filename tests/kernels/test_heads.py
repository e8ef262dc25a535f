"""qk_norm, qk_norm_rope and rope: outputs, gradients and strides, held against the stock code and float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fused_norm.kernels import qk_norm
from fused_norm.kernels.triton.launch import Launch

from ..conftest import slow, slow_rows
from .calls import Call, every_call, launches_of, present
from .conftest import OPERATORS, Planned
from .heads import Heads, rotated
from .numerics import BF16, FP16, FP32, STOCK, Norm, assert_same, run, within

LLAMA = Heads(Norm("llama", x=BF16, w=BF16))
ROPE = Heads(Norm("llama", x=BF16, w=BF16), 16)
PARTIAL = Heads(Norm("gemma", True, x=BF16, w=BF16), 8)
EXACT = Heads(Norm("gemma", True, x=FP32, w=FP32), 16, FP32)
WAYS = [("half", False), *(itertools.product(("interleaved", "deinterleaved"), (False, True)))]
"""The rotations under test: a layout, and whether angles are given by pair."""
NORMS = [
    *(Norm(c, c == "gemma", x=BF16, w=BF16) for c in STOCK),
    *(Norm(c, c == "llama", x=BF16, w=FP32) for c in ("llama", "gemma", "none")),
    *(Norm(c, x=BF16, w=None) for c in ("llama", "gemma", "rounded_rstd")),
    Norm("llama", True, x=FP32, w=FP32),
]


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_every_meaning_is_as_accurate_as_the_stock_code(norm: Norm, device: str) -> None:
    for heads in (Heads(norm), Heads(norm, 16, BF16), Heads(norm, 8, FP32)):
        heads.assert_right(heads.inputs(16, device))


@pytest.mark.parametrize(
    ("x", "angles"),
    [(BF16, BF16), (BF16, FP32), (FP32, BF16), (FP16, FP16)],
    ids=str,
)
@pytest.mark.parametrize(("layout", "by_pair"), WAYS)
def test_rotated_alone_they_have_the_bits_of_stock(
    layout: str, by_pair: bool, x: torch.dtype, angles: torch.dtype, device: str
) -> None:
    """Rounded after each operation, or once in two of the layouts; rows are rotated whole or in part."""
    for rotary in (16, 8) if (layout, by_pair) in (("half", False), ("interleaved", True)) else (16,):
        heads = rotated(rotary, x, angles, layout=layout, by_pair=by_pair)
        inputs = heads.inputs(16, device)
        ours = heads.assert_right(inputs)
        if by_pair or layout == "deinterleaved":
            continue
        once = replace(heads, once=True).assert_right(inputs)
        assert once.q_out.dtype == x
        assert torch.equal(ours.q_out, once.q_out) == (x == FP32)


@pytest.mark.parametrize("width", [1, 7, 80, *slow(2, 3, 65, 130, 6000)])
def test_every_width_is_as_accurate_as_the_stock_code(width: int, device: str) -> None:
    """An odd last element belongs to no pair."""
    tokens, part = 5 if width <= 256 else 2, max(2, width // 4 * 2 - 2)
    cases: list[Heads] = [LLAMA]
    if width >= part:
        cases += [rotated(part), rotated(part, layout="interleaved", by_pair=True)]
    if width % 2 == 0:
        ways = [rotated(width, layout=layout, by_pair=by_pair) for layout, by_pair in WAYS[: None if width > 2 else 1]]
        cases += [replace(ROPE, rotary=width), replace(PARTIAL, rotary=part), *ways]
    for heads in cases:
        heads.assert_right(heads.inputs(width, device, batch=1, q_heads=5, k_heads=1, tokens=tokens))


@pytest.mark.parametrize(
    ("tokens", "heads"),
    [(1, 1), (37, 2), (5, 14), *slow_rows((1, 40), (19, 5))],
)
def test_any_number_of_heads_and_tokens(tokens: int, heads: int, device: str) -> None:
    """Blocks of heads and of tokens end in the middle of a tile."""
    for case in (ROPE, PARTIAL, rotated(16), rotated(8)):
        case.assert_right(case.inputs(16, device, 3, q_heads=heads, k_heads=1, tokens=tokens))


@pytest.mark.parametrize("shape", [(16,), (2, 3, 2, 2, 16)], ids=str)
def test_qk_norm_takes_any_leading_dimensions(shape: tuple[int, ...], device: str) -> None:
    inputs = LLAMA.inputs(16, device, 6, tokens=2)
    x = inputs.q.flatten()[: torch.Size(shape).numel()].view(shape)
    q, k = qk_norm(x, inputs.k, inputs.q_weight, inputs.k_weight)
    expected_q, expected_k = LLAMA.stock(inputs.but(q=x))
    assert torch.equal(q, expected_q)
    assert torch.equal(k, expected_k)
    deep = inputs.q.unflatten(0, (2, 3))[:, ::2, :, ::1].transpose(1, 3)
    assert torch.equal(qk_norm(deep, deep, inputs.q_weight, inputs.q_weight)[0], LLAMA.stock(inputs.but(q=deep))[0])


GIVEN: dict[str, Callable[[Tensor, int], Tensor]] = {
    "per token": lambda x, dim: x,
    "one batch": lambda x, dim: x[:1],
    "one token": lambda x, dim: x[:1, :1],
    "table": lambda x, dim: x[0],
    "four": lambda x, dim: x.unsqueeze(dim),
    "one batch of four": lambda x, dim: x[:1].unsqueeze(dim),
    "strided": lambda x, dim: within(
        x, (*x.shape[1::-1], 2 * x.shape[2]), lambda memory: memory.transpose(0, 1)[..., ::2]
    ),
}


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("kind", GIVEN)
def test_cos_of_any_shape_that_broadcasts(kind: str, unsqueeze_dim: int, device: str) -> None:
    for heads in (EXACT, rotated(8)):
        inputs = heads.inputs(16, device).but(unsqueeze_dim=unsqueeze_dim)
        if unsqueeze_dim == 2:
            inputs = inputs.mapped(lambda x: x.transpose(1, 2) if x.dim() == 4 else x)
        given = {name: GIVEN[kind](getattr(inputs, name), unsqueeze_dim) for name in ("cos", "sin")}
        dense = {
            name: (x.squeeze(unsqueeze_dim) if x.dim() == 4 else x).expand_as(inputs.cos).contiguous()
            for name, x in given.items()
        }
        # Angles of four dimensions tell the heads themselves, whatever unsqueeze_dim is.
        told = {"unsqueeze_dim": 3 - unsqueeze_dim} if "four" in kind else {}
        expected = run(heads.fused, inputs.but(**dense))
        assert_same(run(heads.fused, inputs.but(**given, **told)), expected, where=heads)


@pytest.mark.parametrize("heads", [EXACT, rotated(16, FP32, FP32)], ids=str)
def test_angles_that_are_learned_or_vary_by_head_go_to_the_reference(
    heads: Heads, device: str, launched: Callable[[], list[str]]
) -> None:
    inputs = heads.inputs(16, device, k_heads=3)
    cos, sin = (torch.randn(1, 3, 5, 16, device=device) for _ in range(2))
    outputs = heads.fused(inputs.but(cos=cos, sin=sin))
    for head in range(3):
        one_head = inputs.but(q=inputs.q[:, head, None], k=inputs.k[:, head, None], cos=cos[:, head], sin=sin[:, head])
        for ours, expected in zip(outputs, heads.stock(one_head), strict=True):
            torch.testing.assert_close(ours[:, head, None], expected)
    angles, incoming = (inputs.cos.requires_grad_(), inputs.sin.requires_grad_()), (inputs.dq_out, inputs.dk_out)
    grads = [torch.autograd.grad(call(inputs), angles, incoming) for call in (heads.fused, heads.stock)]
    for ours, expected in zip(*grads, strict=True):
        torch.testing.assert_close(ours, expected)
    assert launched() == []
    with torch.no_grad():
        heads.fused(inputs)
    assert launched() == ["qk_forward_kernel"]


def test_gradients_of_a_rotation_are_rounded_once(device: str) -> None:
    for heads in (rotated(8), *(rotated(layout=layout, by_pair=by_pair) for layout, by_pair in WAYS)):
        inputs = heads.inputs(16, device, tokens=20)
        ours, float64 = run(heads.fused, inputs), run(heads.stock, inputs.mapped(Tensor.double))
        for name in ("dq", "dk"):
            assert (getattr(ours, name) != getattr(float64, name).to(BF16)).double().mean() < 2e-3


def test_q_and_k_of_two_dtypes_are_rotated(device: str) -> None:
    inputs = rotated().inputs(16, device)
    ours = rotated().assert_right(inputs.but(k=inputs.k.float(), dk_out=inputs.dk_out.float()))
    assert (ours.q_out.dtype, ours.k_out.dtype) == (BF16, FP32)


@pytest.mark.parametrize(("q_heads", "k_heads"), [(8, 3), (40, 1), (1, 40)])
def test_dw_is_summed_over_many_programs(q_heads: int, k_heads: int, device: str, planned: Planned) -> None:
    """Both sides have more tiles than programs, at least one program each, and repeats agree to the last bit."""
    planned("device", processors=1)
    inputs = LLAMA.inputs(16, device, 1, q_heads, k_heads, tokens=64)
    first = LLAMA.assert_right(inputs)
    for frozen in ((), ("q_weight",), ("k_weight",)):
        assert_same(run(LLAMA.fused, inputs, frozen), first)


@pytest.mark.parametrize("rotary", [2, 6, 12, 24, 80, 96, 128])
def test_columns_said_to_be_together_are_swapped_together(rotary: int, device: str) -> None:
    """RoPE swaps halves: a vectorised read must lie in one of them."""
    heads = replace(ROPE, rotary=rotary)
    inputs = heads.inputs(160, device, 1, 2, 1, tokens=2)
    made = launches_of(lambda: run(heads.fused, inputs))[:2]
    assert [launch.name for launch in made] == ["qk_forward_kernel", "qk_backward_kernel"]
    for launch in made:
        grain = launch.constants["SHAPE"].GRAIN
        assert (rotary // 2) % grain == 0
        assert grain == 16 or (rotary // 2) % (2 * grain) == 1 or (rotary // 2) % (2 * grain) == grain


def test_one_launch_serves_every_batch_and_length(device: str, launches: list[Launch]) -> None:
    for heads in (LLAMA, ROPE):
        launches.clear()
        for batch, tokens in ((1, 2), (2, 5), (3, 17)):
            run(heads.fused, heads.inputs(16, device, batch, tokens=tokens))
        compiled = {(launch.kernel, *launch.constants.items()) for launch in launches}
        assert len(compiled) == 3, "a forward, a backward and a sum"


CAST = ("heads", "heads rotated", "heads rotated in part", "rotation cast", "rotation in part")
"""The calls that may write 16 bits instead of float32: one more rounding in the forward, and no other difference."""


def writing(dtype: torch.dtype | None, case: str, usual: torch.dtype | None, device: str) -> Call:
    """Return a call whose float32 outputs are written in another dtype."""
    torch.manual_seed(0)
    call = every_call(device, width=16, dtype=usual)[case]
    return call._replace(options=(*call.options[:-1], dtype))


@pytest.mark.parametrize("usual", [None, FP32, BF16], ids=str)
@pytest.mark.parametrize("case", CAST)
def test_only_float32_is_written_otherwise_and_rounded_once(case: str, usual: torch.dtype | None, device: str) -> None:
    def results(call: Call, dtype: torch.dtype) -> tuple[list[Tensor], Sequence[Tensor]]:
        leaves = call.leaves()
        outputs = call.outputs(leaves)
        back = [torch.randn(y.shape, device=device).to(dtype).to(y.dtype) for y in outputs]
        return outputs, torch.autograd.grad(outputs, present(leaves[: call.differentiated]), back)

    for dtype in (BF16, FP16):
        stock, expected = results(writing(None, case, usual, device), dtype)
        call = writing(dtype, case, usual, device)
        outputs, grads = results(call, dtype)
        by_formula = call.outputs(operator=OPERATORS[call.name].reference)
        for ours, theirs, formula in zip(outputs, stock, by_formula, strict=True):
            assert ours.dtype == formula.dtype == (dtype if theirs.dtype == FP32 else theirs.dtype)
            assert_same([ours], [theirs.to(ours.dtype)], exact=device == "cpu")
            assert ours.stride() == theirs.stride()
            if call.name == "rope":
                assert_same([ours], [formula], exact=device == "cpu")
        if all(y.dtype == FP32 for y in stock):  # otherwise their incoming gradients are rounded twice
            assert_same(grads, expected, exact=device == "cpu")


@pytest.mark.parametrize("case", ["heads rotated", "rotation cast"])
def test_gradients_of_16_bits_are_differentiated_in_turn(case: str, device: str) -> None:
    incoming, second = [torch.randn(2, 3, 2, 16, device=device).to(BF16) for _ in range(2)], []
    for dtype in (None, BF16):
        call = writing(dtype, case, FP32, device)
        leaves = call.leaves()
        outputs = call.outputs(leaves)
        back = [dy[:, : y.shape[1]].to(y.dtype).requires_grad_() for dy, y in zip(incoming, outputs, strict=True)]
        first = torch.autograd.grad(outputs, leaves[:2], back, create_graph=True)
        second.append(torch.autograd.grad(sum(grad.sin().sum() for grad in first), back))
    for wide, narrow in zip(*second, strict=True):
        assert torch.equal(wide.to(BF16), narrow)
