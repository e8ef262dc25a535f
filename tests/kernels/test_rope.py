"""rope: outputs bit for bit those of transformers, gradients, strides, and what is kept for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from transformers.models.blt.modeling_blt import apply_rotary_pos_emb as rotate_neighbours
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as rotate_neighbours_in_fp32
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as rotate_first_neighbours_by_pair
from transformers.models.helium.modeling_helium import apply_rotary_pos_emb as rotate_neighbours_by_pair

from fused_norm.kernels import rope
from fused_norm.kernels.triton.launch import Launch
from fused_norm.kernels.triton.memory import empty_rows_like

from .numerics import BF16, FP16, FP32, Norm, Tensors, assert_near, run, slow
from .test_qk_norm import Heads as NormedHeads
from .test_qk_norm import _steps, rotate_whole


class Heads(NormedHeads):
    """q and k that are rotated alone."""

    def __init__(self, rotary: int = 16, x: torch.dtype = BF16, angles: torch.dtype = BF16) -> None:
        super().__init__(Norm("llama", x=x, w=None), rotary, angles)

    def fused(self, inputs: Tensors) -> tuple[Tensor, Tensor]:
        return rope(inputs.q, inputs.k, inputs.cos, inputs.sin, unsqueeze_dim=inputs.unsqueeze_dim)

    def stock(self, inputs: Tensors) -> tuple[Tensor, Tensor]:
        """transformers' own RoPE."""
        return self.rotated(inputs.q, inputs.k, inputs)


class RoundedOnce(Heads):
    """q and k that are rotated in fp32."""

    def fused(self, inputs: Tensors) -> tuple[Tensor, Tensor]:
        i = inputs
        return rope(i.q, i.k, i.cos, i.sin, unsqueeze_dim=i.unsqueeze_dim, single_rounding=True)

    def stock(self, inputs: Tensors) -> tuple[Tensor, Tensor]:
        """transformers' own RoPE of wide tensors, which in float64 is the truth."""
        rotated = super().stock(inputs.mapped(lambda one: one if one.dtype == torch.float64 else one.float()))
        return rotated[0].to(inputs.q.dtype), rotated[1].to(inputs.k.dtype)


def deinterleaved(x: Tensor) -> Tensor:
    """First the elements at even places, then those at odd ones, as DeepSeek-V3 has them before it rotates halves."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).reshape(x.shape)


def rotate_deinterleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> tuple[Tensor, Tensor]:
    return rotate_whole(deinterleaved(q), deinterleaved(k), cos, sin, unsqueeze_dim=unsqueeze_dim)


def rotate_deinterleaved_by_pair(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int
) -> tuple[Tensor, Tensor]:
    cos, sin = (torch.cat(2 * [angles.chunk(2, dim=-1)[0]], dim=-1) for angles in (cos, sin))
    return rotate_deinterleaved(q, k, cos, sin, unsqueeze_dim)


class Neighbours(Heads):
    """q and k whose neighbours are turned together, by one of these functions."""

    STOCK: ClassVar[dict[tuple[str, bool], Callable[..., tuple[Tensor, Tensor]]]] = {
        ("interleaved", False): rotate_neighbours,
        ("interleaved", True): rotate_neighbours_by_pair,
        ("deinterleaved", False): rotate_deinterleaved,
        ("deinterleaved", True): rotate_deinterleaved_by_pair,
    }

    def __init__(
        self, layout: str, by_pair: bool, rotary: int = 16, x: torch.dtype = BF16, angles: torch.dtype = BF16
    ) -> None:
        super().__init__(rotary, x, angles)
        vars(self).update(layout=layout, by_pair=by_pair)

    def fused(self, inputs: Tensors) -> tuple[Tensor, Tensor]:
        i, how = inputs, {"layout": self.layout, "angles_by_pair": self.by_pair}
        return rope(i.q, i.k, i.cos, i.sin, unsqueeze_dim=i.unsqueeze_dim, **how)

    def rotated(self, q: Tensor, k: Tensor, inputs: Tensors) -> tuple[Tensor, Tensor]:
        rotate = self.STOCK[self.layout, self.by_pair]
        if self.rotary < q.shape[-1]:
            assert (self.layout, self.by_pair) == ("interleaved", True)
            rotate = rotate_first_neighbours_by_pair
        return rotate(q, k, inputs.cos, inputs.sin, unsqueeze_dim=inputs.unsqueeze_dim)


class NeighboursInFP32(RoundedOnce):
    """Neighbours that are turned in fp32, as in Cohere."""

    def fused(self, inputs: Tensors) -> tuple[Tensor, Tensor]:
        i, how = inputs, {"layout": "interleaved", "single_rounding": True}
        return rope(i.q, i.k, i.cos, i.sin, unsqueeze_dim=i.unsqueeze_dim, **how)

    def stock(self, inputs: Tensors) -> tuple[Tensor, Tensor]:
        """Cohere's RoPE, which float64 tensors would leave in fp32."""
        i, wide = inputs, inputs.q.dtype == torch.float64
        rotate = rotate_neighbours if wide else rotate_neighbours_in_fp32
        return rotate(i.q, i.k, i.cos, i.sin, unsqueeze_dim=i.unsqueeze_dim)


def assert_right(heads: Heads, inputs: Tensors) -> Tensors:
    """Outputs have stock's bits and strides; gradients are as near to float64 as stock's, and lie as q and k do."""
    ours, stock = run(heads.fused, inputs), run(heads.stock, inputs)
    units = {f"d{side}": getattr(inputs, f"d{side}_out").double().abs().amax(-1, keepdim=True) for side in "qk"}
    assert_near(ours, stock, run(heads.stock, inputs.mapped(Tensor.double)), units)
    for name in ("q_out", "k_out"):
        assert torch.equal(getattr(ours, name), getattr(stock, name)), name
        assert _steps(getattr(ours, name)) == _steps(getattr(stock, name)), name
    for gradient, x in ((ours.dq, inputs.q), (ours.dk, inputs.k)):
        assert _steps(gradient) == _steps(empty_rows_like(x))
    return ours


@pytest.mark.parametrize("angles", ["its own", FP32], ids=str)
@pytest.mark.parametrize("x", [BF16, FP32, *slow(FP16)], ids=str)
def test_outputs_have_the_bits_of_stock_and_gradients_are_as_accurate(
    x: torch.dtype, angles: object, device: str
) -> None:
    angles = x if angles == "its own" else FP32
    for rotary in (16, 8):
        heads = Heads(rotary, x, angles)
        assert_right(heads, heads.inputs(16, device))


@pytest.mark.parametrize("angles", [FP32, *slow(BF16)], ids=str)
@pytest.mark.parametrize("x", [BF16, *slow(FP32, FP16)], ids=str)
def test_outputs_rounded_once_have_the_bits_of_the_rotation_of_wide_tensors(
    x: torch.dtype, angles: torch.dtype, device: str
) -> None:
    for rotary in (16, 8):
        heads = RoundedOnce(rotary, x, angles)
        inputs = heads.inputs(16, device)
        ours = assert_right(heads, inputs)
        other = run(Heads(rotary, x, angles).fused, inputs)
        assert ours.q_out.dtype == x
        assert torch.equal(ours.q_out, other.q_out) == (x == FP32)


@pytest.mark.parametrize(
    ("x", "angles"), [(BF16, BF16), (BF16, FP32), (FP32, FP32), (FP16, FP16), (FP32, BF16)], ids=str
)
@pytest.mark.parametrize(("layout", "by_pair"), Neighbours.STOCK)
def test_neighbours_have_the_bits_of_stock_and_gradients_are_as_accurate(
    layout: str, by_pair: bool, x: torch.dtype, angles: torch.dtype, device: str
) -> None:
    for rotary in (16, 8)[: 1 + (layout == "interleaved" and by_pair)]:
        heads = Neighbours(layout, by_pair, rotary, x, angles)
        assert_right(heads, heads.inputs(16, device))


@pytest.mark.parametrize("x", [BF16, *slow(FP32, FP16)], ids=str)
def test_neighbours_rounded_once_have_the_bits_of_stock(x: torch.dtype, device: str) -> None:
    for angles in (FP32, BF16):
        heads = NeighboursInFP32(16, x, angles)
        assert_right(heads, heads.inputs(16, device))


@pytest.mark.parametrize("width", [80, *slow(4, 6, 65, 130, 6000)])
def test_neighbours_of_every_width(width: int, device: str) -> None:
    """An odd element at the end is of no pair."""
    cases = [Neighbours("interleaved", True, max(2, width // 4 * 2 - 2))]
    if width % 2 == 0:
        cases += [Neighbours(*way, width) for way in Neighbours.STOCK]
    for heads in cases:
        tokens = 2 if width > 256 else 5
        assert_right(heads, heads.inputs(width, device, batch=1, q_heads=5, k_heads=1, tokens=tokens))


def test_neighbours_one_tensor_at_a_time_in_either_layout(device: str) -> None:
    for way in Neighbours.STOCK:
        heads = Neighbours(*way)
        inputs = heads.inputs(16, device)
        both = run(heads.fused, inputs)
        k = inputs.k.transpose(1, 2).detach().requires_grad_()
        y, nothing = rope(k, None, inputs.cos, inputs.sin, unsqueeze_dim=2, layout=way[0], angles_by_pair=way[1])
        assert nothing is None
        assert torch.equal(y.transpose(1, 2), both.k_out)
        assert torch.equal(torch.autograd.grad(y, k, inputs.dk_out.transpose(1, 2))[0].transpose(1, 2), both.dk)


def test_gradients_are_rounded_once(device: str) -> None:
    for heads in (Heads(16), Heads(8), *(Neighbours(*way) for way in Neighbours.STOCK)):
        inputs = heads.inputs(16, device, tokens=20)
        ours, truth = run(heads.fused, inputs), run(heads.stock, inputs.mapped(Tensor.double))
        for name in ("dq", "dk"):
            assert (getattr(ours, name) != getattr(truth, name).to(BF16)).double().mean() < 2e-3


@pytest.mark.parametrize("width", [80, *slow(2, 6, 64, 130, 256, 6000)])
def test_every_width(width: int, device: str) -> None:
    for rotary in {width, max(2, width // 4 * 2 - 2)}:
        heads = Heads(rotary)
        assert_right(heads, heads.inputs(width, device, batch=1, tokens=2 if width > 256 else 5))


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
        assert_right(case, case.inputs(16, device, 3, q_heads=heads, k_heads=1, tokens=tokens))


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("shape", ["table", "strided", *slow("one batch", "one token")])
def test_cos_of_any_shape_that_broadcasts(shape: str, unsqueeze_dim: int, device: str) -> None:
    heads = Heads(8)
    inputs = heads.inputs(16, device)
    if unsqueeze_dim == 2:
        inputs = inputs.mapped(lambda x: x.transpose(1, 2) if x.dim() == 4 else x)
    inputs.unsqueeze_dim = unsqueeze_dim
    shaped: Callable[[Tensor], Tensor] = {
        "one batch": lambda x: x[:1],
        "table": lambda x: x[0],
        "one token": lambda x: x.unsqueeze(unsqueeze_dim)[:, :1, :1],
        "strided": lambda x: x.new_full((2, 5, 16), float("nan"))[..., ::2].copy_(x),
    }[shape]
    inputs = inputs.but(cos=shaped(inputs.cos), sin=shaped(inputs.sin))
    ours = run(heads.fused, inputs)
    stock = inputs
    if inputs.cos.dim() == 2:
        stock = inputs.but(cos=inputs.cos[None], sin=inputs.sin[None])
    elif inputs.cos.dim() == 4:
        stock = inputs.but(cos=inputs.cos.squeeze(unsqueeze_dim), sin=inputs.sin.squeeze(unsqueeze_dim))
    expected = run(heads.stock, stock)
    for name in ("q_out", "k_out"):
        assert torch.equal(getattr(ours, name), getattr(expected, name))
    for name in ("dq", "dk"):
        torch.testing.assert_close(getattr(ours, name), getattr(expected, name), rtol=0, atol=2**-5)


@pytest.mark.parametrize("used", ["k", *slow("q")])
def test_a_side_that_is_unused_gets_no_work(used: str, launches: list[Launch], device: str) -> None:
    for rotary in (16, 8):
        heads = Heads(rotary)
        inputs = heads.inputs(16, device)
        both = run(heads.fused, inputs)
        launches.clear()
        alone = run(heads.fused, inputs, used=[f"{used}_out"])
        assert torch.equal(getattr(alone, f"d{used}"), getattr(both, f"d{used}"))
        forward, backward = launches
        assert sum(t is not None for t in backward.tensors) == 4  # cos, sin and one side's two
        assert backward.grid[0] < forward.grid[0]


def test_one_tensor_at_a_time(device: str) -> None:
    for rotary in (16, 8):
        heads = Heads(rotary)
        inputs = heads.inputs(16, device)
        both = run(heads.fused, inputs)
        for side, d in (("q", inputs.dq_out), ("k", inputs.dk_out)):
            x = getattr(inputs, side).detach().requires_grad_()
            y, nothing = rope(x, None, inputs.cos, inputs.sin)
            assert nothing is None
            assert torch.equal(y, getattr(both, f"{side}_out"))
            assert torch.equal(torch.autograd.grad(y, x, d)[0], getattr(both, f"d{side}"))
            with torch.no_grad():
                assert torch.equal(rope(x, None, inputs.cos, inputs.sin)[0], y)


def test_q_and_k_of_two_dtypes(device: str) -> None:
    inputs = Heads().inputs(16, device)
    inputs = inputs.but(k=inputs.k.float(), dk_out=inputs.dk_out.float())
    ours = assert_right(Heads(), inputs)
    assert (ours.q_out.dtype, ours.k_out.dtype) == (BF16, FP32)


def test_angles_that_are_learned_or_vary_by_head_go_to_the_reference(launches: list[Launch], device: str) -> None:
    heads = Heads(16, FP32, FP32)
    inputs = heads.inputs(16, device)
    cos, sin = (x.clone().requires_grad_() for x in (inputs.cos, inputs.sin))
    found = torch.autograd.grad(rope(inputs.q, inputs.k, cos, sin), (cos, sin), (inputs.dq_out, inputs.dk_out))
    expected = torch.autograd.grad(
        rotate_whole(inputs.q, inputs.k, cos, sin), (cos, sin), (inputs.dq_out, inputs.dk_out)
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    own = inputs.cos[:, None] * torch.tensor([1.0, 0.5, 0.25], device=device)[:, None, None]
    y, _ = rope(inputs.q, None, own, own)
    assert torch.equal(y[:, :1], rope(inputs.q[:, :1], None, inputs.cos, inputs.cos)[0])
    assert torch.equal(y[:, 1:2], rope(inputs.q[:, 1:2], None, inputs.cos / 2, inputs.cos / 2)[0])
    assert len(launches) == 2
