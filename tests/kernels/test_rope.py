"""rope: outputs bit for bit those of transformers, gradients, strides, and what is kept for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fused_norm.kernels import rope
from fused_norm.kernels.triton.launch import Launch
from fused_norm.kernels.triton.memory import empty_rows_like

from .numerics import BF16, FP16, FP32, Norm, floor
from .test_qk_norm import Heads as NormedHeads
from .test_qk_norm import Inputs, _steps, make_inputs, rotate_part, rotate_whole


class Heads(NormedHeads):
    """q and k that are rotated alone."""

    def __init__(self, rotary: int = 16, x: torch.dtype = BF16, angles: torch.dtype = BF16) -> None:
        super().__init__(Norm("llama", x=x, w=None), rotary, angles)

    def fused(self, i: Inputs) -> tuple[Tensor, Tensor]:
        return rope(i.q, i.k, i.cos, i.sin, unsqueeze_dim=i.unsqueeze_dim)

    def stock(self, i: Inputs) -> tuple[Tensor, Tensor]:
        """transformers' own RoPE."""
        rotate = rotate_whole if i.cos.shape[-1] == i.q.shape[-1] else rotate_part
        return rotate(i.q, i.k, i.cos, i.sin, unsqueeze_dim=i.unsqueeze_dim)


class RoundedOnce(Heads):
    """q and k that are rotated in fp32."""

    def fused(self, i: Inputs) -> tuple[Tensor, Tensor]:
        return rope(i.q, i.k, i.cos, i.sin, unsqueeze_dim=i.unsqueeze_dim, single_rounding=True)

    def stock(self, i: Inputs) -> tuple[Tensor, Tensor]:
        """transformers' own RoPE of wide tensors, which in float64 is the truth."""
        rotated = super().stock(i.mapped(lambda one: one if one.dtype == torch.float64 else one.float()))
        return rotated[0].to(i.q.dtype), rotated[1].to(i.k.dtype)


def run(function: Callable[[Inputs], tuple[Tensor, Tensor]], inputs: Inputs, used: str = "qk") -> dict[str, Tensor]:
    """Outputs and, of those that are used, gradients."""
    leaves = {side: getattr(inputs, side).detach().requires_grad_() for side in "qk"}
    outputs = dict(zip("qk", function(replace(inputs, **leaves)), strict=True))
    incoming = {"q": inputs.dq, "k": inputs.dk}
    grads = torch.autograd.grad([outputs[s] for s in used], [leaves[s] for s in used], [incoming[s] for s in used])
    found = {f"{side}_out": output.detach() for side, output in outputs.items()}
    return found | {f"d{side}": grad for side, grad in zip(used, grads, strict=True)}


def assert_right(heads: Heads, inputs: Inputs) -> dict[str, Tensor]:
    """Outputs have stock's bits and strides; gradients are as near to float64 as stock's, and lie as q and k do."""
    ours, stock = run(heads.fused, inputs), run(heads.stock, inputs)
    truth = run(heads.stock, inputs.mapped(Tensor.double))
    for name in ("q_out", "k_out"):
        assert ours[name].dtype == stock[name].dtype
        assert torch.equal(ours[name], stock[name]), name
        assert _steps(ours[name]) == _steps(stock[name]), name
    for name, x, d in (("dq", inputs.q, inputs.dq), ("dk", inputs.k, inputs.dk)):
        assert ours[name].dtype == x.dtype
        assert _steps(ours[name]) == _steps(empty_rows_like(x)), name
        unit = d.double().abs().amax(-1, keepdim=True).clamp_min(1e-30)
        error, allowed = ((r[name].double() - truth[name]).abs().div(unit).amax().item() for r in (ours, stock))
        assert error <= allowed + floor(x.dtype), f"{name}: error {error:.3g}, the stock code's is {allowed:.3g}"
    return ours


def _slow(*values: object) -> list[object]:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize("angles", ["its own", FP32], ids=str)
@pytest.mark.parametrize("x", [BF16, FP32, *_slow(FP16)], ids=str)
def test_outputs_have_the_bits_of_stock_and_gradients_are_as_accurate(
    x: torch.dtype, angles: object, device: str
) -> None:
    angles = x if angles == "its own" else FP32
    for rotary in (16, 8):
        heads = Heads(rotary, x, angles)
        assert_right(heads, make_inputs(heads, 16, device))


@pytest.mark.parametrize("angles", [FP32, *_slow(BF16)], ids=str)
@pytest.mark.parametrize("x", [BF16, *_slow(FP32, FP16)], ids=str)
def test_outputs_rounded_once_have_the_bits_of_the_rotation_of_wide_tensors(
    x: torch.dtype, angles: torch.dtype, device: str
) -> None:
    for rotary in (16, 8):
        heads = RoundedOnce(rotary, x, angles)
        inputs = make_inputs(heads, 16, device)
        ours = assert_right(heads, inputs)
        other = run(Heads(rotary, x, angles).fused, inputs)
        assert ours["q_out"].dtype == x
        assert torch.equal(ours["q_out"], other["q_out"]) == (x == FP32)


def test_gradients_are_rounded_once(device: str) -> None:
    for rotary in (16, 8):
        heads = Heads(rotary)
        inputs = make_inputs(heads, 16, device, tokens=20)
        ours, truth = run(heads.fused, inputs), run(heads.stock, inputs.mapped(Tensor.double))
        for name in ("dq", "dk"):
            assert (ours[name] != truth[name].to(BF16)).double().mean() < 2e-3


@pytest.mark.parametrize("width", [80, *_slow(2, 6, 64, 130, 256, 6000)])
def test_every_width(width: int, device: str) -> None:
    for rotary in {width, max(2, width // 4 * 2 - 2)}:
        heads = Heads(rotary)
        assert_right(heads, make_inputs(heads, width, device, batch=1, tokens=2 if width > 256 else 5))


@pytest.mark.parametrize(
    ("tokens", "heads"),
    [
        (37, 1),
        (2, 5),
        *(pytest.param(*counts, marks=pytest.mark.slow) for counts in ((37, 1), (1, 40), (19, 5), (5, 14), (2, 40))),
    ],
)
def test_any_number_of_heads_and_tokens(tokens: int, heads: int, device: str) -> None:
    """Blocks of heads and of tokens end in the middle of a tile."""
    for case in (Heads(16), Heads(8)):
        assert_right(case, make_inputs(case, 16, device, 3, q_heads=heads, k_heads=1, tokens=tokens))


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("shape", ["table", "strided", *_slow("one batch", "one token")])
def test_cos_of_any_shape_that_broadcasts(shape: str, unsqueeze_dim: int, device: str) -> None:
    heads = Heads(8)
    inputs = make_inputs(heads, 16, device)
    if unsqueeze_dim == 2:
        inputs = inputs.mapped(lambda x: x.transpose(1, 2) if x.dim() == 4 else x)
    inputs.unsqueeze_dim = unsqueeze_dim
    shaped: Callable[[Tensor], Tensor] = {
        "one batch": lambda x: x[:1],
        "table": lambda x: x[0],
        "one token": lambda x: x.unsqueeze(unsqueeze_dim)[:, :1, :1],
        "strided": lambda x: x.new_full((2, 5, 16), float("nan"))[..., ::2].copy_(x),
    }[shape]
    inputs = replace(inputs, cos=shaped(inputs.cos), sin=shaped(inputs.sin))
    ours = run(heads.fused, inputs)
    stock = inputs
    if inputs.cos.dim() == 2:
        stock = replace(inputs, cos=inputs.cos[None], sin=inputs.sin[None])
    elif inputs.cos.dim() == 4:
        stock = replace(inputs, cos=inputs.cos.squeeze(unsqueeze_dim), sin=inputs.sin.squeeze(unsqueeze_dim))
    expected = run(heads.stock, stock)
    for name in ("q_out", "k_out"):
        assert torch.equal(ours[name], expected[name])
    for name in ("dq", "dk"):
        torch.testing.assert_close(ours[name], expected[name], rtol=0, atol=2**-5)


def test_one_launch_each_way_that_keeps_cos_and_sin_alone(launches: list[Launch], device: str) -> None:
    heads = Heads()
    inputs = make_inputs(heads, 16, device)
    kept: list[Tensor] = []
    q, k = (x.detach().requires_grad_() for x in (inputs.q, inputs.k))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        outputs = rope(q, k, inputs.cos, inputs.sin)
    assert [t.data_ptr() for t in kept] == [inputs.cos.data_ptr(), inputs.sin.data_ptr()]
    assert len(launches) == 1
    torch.autograd.grad(outputs, (q, k), (inputs.dq, inputs.dk))
    assert len(launches) == 2
    present = {t.data_ptr() for t in launches[1].tensors if t is not None}
    assert not present & {t.data_ptr() for t in (q, k, *outputs)}


@pytest.mark.parametrize("used", ["k", *_slow("q")])
def test_a_side_that_is_unused_gets_no_work(used: str, launches: list[Launch], device: str) -> None:
    for rotary in (16, 8):
        heads = Heads(rotary)
        inputs = make_inputs(heads, 16, device)
        both = run(heads.fused, inputs)
        launches.clear()
        alone = run(heads.fused, inputs, used)
        assert torch.equal(alone[f"d{used}"], both[f"d{used}"])
        forward, backward = launches
        assert sum(t is not None for t in backward.tensors) == 4  # cos, sin and one side's two
        assert backward.grid[0] < forward.grid[0]


def test_a_frozen_side_wants_no_gradient_and_gets_none(launches: list[Launch], device: str) -> None:
    inputs = make_inputs(Heads(), 16, device)
    k = inputs.k.detach().requires_grad_()
    q_out, k_out = rope(inputs.q, k, inputs.cos, inputs.sin)
    assert not q_out.requires_grad
    k_out.backward(inputs.dk)
    assert torch.equal(k.grad, run(Heads().fused, inputs)["dk"])
    assert sum(t is not None for t in launches[1].tensors) == 4


def test_one_tensor_at_a_time(device: str) -> None:
    for rotary in (16, 8):
        heads = Heads(rotary)
        inputs = make_inputs(heads, 16, device)
        both = run(heads.fused, inputs)
        for side, d in (("q", inputs.dq), ("k", inputs.dk)):
            x = getattr(inputs, side).detach().requires_grad_()
            y, nothing = rope(x, None, inputs.cos, inputs.sin)
            assert nothing is None
            assert torch.equal(y, both[f"{side}_out"])
            assert torch.equal(torch.autograd.grad(y, x, d)[0], both[f"d{side}"])
            with torch.no_grad():
                assert torch.equal(rope(x, None, inputs.cos, inputs.sin)[0], y)


def test_q_and_k_of_two_dtypes(device: str) -> None:
    inputs = make_inputs(Heads(), 16, device)
    inputs = replace(inputs, k=inputs.k.float(), dk=inputs.dk.float())
    ours = assert_right(Heads(), inputs)
    assert (ours["q_out"].dtype, ours["k_out"].dtype) == (BF16, FP32)


def test_angles_that_are_learned_or_vary_by_head_go_to_the_reference(launches: list[Launch], device: str) -> None:
    heads = Heads(16, FP32, FP32)
    inputs = make_inputs(heads, 16, device)
    cos, sin = (x.clone().requires_grad_() for x in (inputs.cos, inputs.sin))
    found = torch.autograd.grad(rope(inputs.q, inputs.k, cos, sin), (cos, sin), (inputs.dq, inputs.dk))
    expected = torch.autograd.grad(rotate_whole(inputs.q, inputs.k, cos, sin), (cos, sin), (inputs.dq, inputs.dk))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    own = inputs.cos[:, None] * torch.tensor([1.0, 0.5, 0.25], device=device)[:, None, None]
    y, _ = rope(inputs.q, None, own, own)
    assert torch.equal(y[:, :1], rope(inputs.q[:, :1], None, inputs.cos, inputs.cos)[0])
    assert torch.equal(y[:, 1:2], rope(inputs.q[:, 1:2], None, inputs.cos / 2, inputs.cos / 2)[0])
    assert len(launches) == 2


def test_float64_takes_the_formula(launches: list[Launch], device: str) -> None:
    inputs = make_inputs(Heads(), 16, device).mapped(Tensor.double)
    assert_right(Heads(), inputs)
    assert not launches
