"""qk_norm and qk_norm_rope: outputs, gradients and strides, held against the stock code and float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_whole
from transformers.models.qwen3_next.modeling_qwen3_next import apply_rotary_pos_emb as rotate_part

from fused_norm.kernels import qk_norm, qk_norm_rope
from fused_norm.kernels.plans import Device, heads_backward_plan
from fused_norm.kernels.triton import qk_launch
from fused_norm.kernels.triton.devices import device_props
from fused_norm.kernels.triton.launch import Launch
from fused_norm.kernels.triton.memory import empty_rows_like
from fused_norm.spec import NormSpec

from .calls import launches_of
from .numerics import (
    BF16,
    FP16,
    FP32,
    ROUND_RSTD,
    Norm,
    Scales,
    Tensors,
    assert_near,
    assert_same_row,
    called,
    drawn,
    none_rounded_once,
    run,
    slow,
)


@dataclass(frozen=True)
class Heads:
    """The norms of q and k under test, and what RoPE does behind them."""

    norm: Norm
    rotary: int = 0
    angles: torch.dtype = BF16

    def __str__(self) -> str:
        rope = f"-rope{self.rotary}-{self.angles}".replace("torch.", "") if self.rotary else ""
        return f"{self.norm}{rope}"

    def inputs(
        self, width: int, device: str, batch: int = 2, q_heads: int = 3, k_heads: int = 2, tokens: int = 5
    ) -> Tensors:
        """q and k as [B, H, S, D], transposed views of [B, S, H, D]; cos and sin differ in their halves."""
        norm = self.norm
        dtype = norm.x if norm.w is None or norm.casting == "gemma" else torch.promote_types(norm.x, norm.w)
        if self.rotary:
            dtype = torch.promote_types(dtype, self.angles)
        q, k = ((batch, tokens, count, width) for count in (q_heads, k_heads))
        found = drawn(
            device,
            q=(q, norm.x, 1.5),
            k=(k, norm.x, 1.5),
            q_weight=((width,), norm.w, 1.5),
            k_weight=((width,), norm.w, 1.5),
            cos=((batch, tokens, self.rotary), FP32 if self.rotary else None, 3.0),
            dq_out=(q, dtype, 1.0),
            dk_out=(k, dtype, 1.0),
        )
        found = found.mapped(lambda one: one.transpose(1, 2) if one.dim() == 4 else one).but(unsqueeze_dim=1)
        if not self.rotary:
            return found
        return found.but(cos=found.cos.cos().to(self.angles), sin=found.cos.sin().to(self.angles))

    def fused(self, inputs: Tensors) -> tuple[Tensor, Tensor]:
        i, semantics = inputs, {"casting": self.norm.casting, "zero_centered": self.norm.zero_centered}
        if not self.rotary:
            return qk_norm(i.q, i.k, i.q_weight, i.k_weight, self.norm.eps, **semantics)
        return qk_norm_rope(
            i.q, i.k, i.q_weight, i.k_weight, i.cos, i.sin, self.norm.eps, unsqueeze_dim=i.unsqueeze_dim, **semantics
        )

    def rotated(self, q: Tensor, k: Tensor, inputs: Tensors) -> tuple[Tensor, Tensor]:
        """q and k by transformers' own RoPE, where there is one."""
        if not self.rotary:
            return q, k
        rotate = rotate_whole if self.rotary == q.shape[-1] else rotate_part
        return rotate(q, k, inputs.cos, inputs.sin, unsqueeze_dim=inputs.unsqueeze_dim)

    def _by(self, norm: Callable[[Tensor, Tensor | None], Tensor], i: Tensors) -> tuple[Tensor, Tensor]:
        return self.rotated(norm(i.q, i.q_weight), norm(i.k, i.k_weight), i)

    def stock(self, inputs: Tensors) -> tuple[Tensor, Tensor]:
        """Norms as modelling code writes them, and transformers' own RoPE."""
        return self._by(lambda x, w: self.norm.stock(x, None, w)[0], inputs)

    def rounded(self, inputs: Tensors) -> tuple[Tensor, Tensor]:
        """Stock with every rounding done once, see ``none_rounded_once``."""
        if self.norm.casting != "none":
            return self.stock(inputs)
        return self._by(lambda x, w: none_rounded_once(x, w, self.norm.eps, self.norm.zero_centered), inputs)

    def true(self, inputs: Tensors) -> tuple[Tensor, Tensor]:
        return self._by(lambda x, w: self.norm.true(x, None, w)[0], inputs)


def scales(heads: Heads, inputs: Tensors) -> Scales:
    """What errors are relative to: a row's largest normalised value, or the largest of the terms of a gradient."""
    wide, found = inputs.mapped(Tensor.double), {}
    for side in "qk":
        x, weight, d = (getattr(wide, name) for name in (side, f"{side}_weight", f"d{side}_out"))
        n = heads.norm.true(x, None, weight)[0].requires_grad_()
        dn = torch.autograd.grad(heads.rotated(n, n, wide)[0], n, d)[0].abs()
        rstd = (x.square().mean(-1, keepdim=True) + heads.norm.eps).rsqrt()
        gamma = torch.ones(()) if weight is None else (1 + weight if heads.norm.zero_centered else weight).abs()
        found[f"{side}_out"] = n.detach().abs().amax(-1, keepdim=True)
        found[f"d{side}"] = (dn * gamma * rstd).amax(-1, keepdim=True)
        found[f"d{side}_weight"] = (dn * (x * rstd).abs()).sum((0, 1, 2))
    return found


def assert_within_budget(heads: Heads, inputs: Tensors) -> Tensors:
    """The rule of ``numerics`` for every result, stock's strides and its rounding points for the outputs."""
    ours, stock = run(heads.fused, inputs), run(heads.stock, inputs)
    scale = scales(heads, inputs)
    assert_near(ours, stock, run(heads.true, inputs.mapped(Tensor.double)), scale)
    for name, rounded in called(heads.rounded, inputs).present().items():
        value = getattr(ours, name)
        assert _steps(value) == _steps(getattr(stock, name)), name
        moved = (value.double() - rounded.double()).abs().div(scale[name]) > 16 * torch.finfo(FP32).eps
        share = 0.01 + 2 / value.numel()
        if heads.norm.casting in ROUND_RSTD:
            share += 2 * value.shape[-1] / value.numel()
        assert moved.double().mean() <= share, f"{name}: {moved.double().mean():.2%} were rounded elsewhere"
    return ours


def _steps(tensor: Tensor) -> list[int]:
    """The strides that say anything."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


LLAMA = Heads(Norm("llama", x=BF16, w=BF16))
ROPE = Heads(Norm("llama", x=BF16, w=BF16), 16)
PARTIAL = Heads(Norm("gemma", True, x=BF16, w=BF16), 8)
EXACT = Heads(Norm("gemma", True, x=FP32, w=FP32), 16, FP32)
NORMS = [
    *(Norm(c, z, x=BF16, w=BF16) for c in ("llama", "gemma", "none") for z in (False, True)),
    *(Norm(c, x=BF16, w=FP32) for c in ("llama", "gemma", "none")),
    *(Norm(c, x=BF16, w=None) for c in ("llama", "gemma")),
    Norm("llama", x=FP32, w=FP32),
    Norm("llama", True, x=FP16, w=BF16),
    Norm("rounded_gamma", True, x=FP32, w=BF16),
    Norm("weight_dtype", x=FP32, w=BF16),
    Norm("rounded_rstd", x=BF16, w=None),
]


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_every_meaning_is_as_accurate_as_the_stock_code(norm: Norm, device: str) -> None:
    for heads in (Heads(norm), Heads(norm, 16, BF16), Heads(norm, 8, FP32)):
        assert_within_budget(heads, heads.inputs(16, device))


@pytest.mark.parametrize("width", [1, 7, 80, *slow(3, 64, 130, 256, 6000)])
def test_every_width_is_as_accurate_as_the_stock_code(width: int, device: str) -> None:
    tokens = 5 if width <= 256 else 2
    assert_within_budget(LLAMA, LLAMA.inputs(width, device, tokens=tokens))
    if width % 2 == 0:
        for heads in (replace(ROPE, rotary=width), replace(PARTIAL, rotary=width // 4 * 2 - 2)):
            assert_within_budget(heads, heads.inputs(width, device, batch=1, tokens=tokens))


@pytest.mark.parametrize(
    ("tokens", "heads"),
    [
        *((1, heads) for heads in (1, 5)),
        *(pytest.param(1, heads, marks=pytest.mark.slow) for heads in (2, 14, 40)),
        *((37, 2), (5, 14)),
        *(pytest.param(*both, marks=pytest.mark.slow) for both in ((37, 1), (19, 5), (2, 40))),
    ],
)
def test_any_number_of_heads_and_tokens(tokens: int, heads: int, device: str) -> None:
    """Blocks of heads and of tokens end in the middle of a tile."""
    for case in (ROPE, PARTIAL):
        assert_within_budget(case, case.inputs(16, device, 3, q_heads=heads, k_heads=1, tokens=tokens))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "heads first": lambda x: x.contiguous(),
    "half of a chunk": lambda x: _within(
        x, lambda b, h, s, d: (b, s, h, 2 * d), lambda t: t.chunk(2, -1)[1].transpose(1, 2)
    ),
    "slice of a fused projection": lambda x: _within(
        x, lambda b, h, s, d: (b, s, h + 3, d), lambda t: t[:, :, 2:-1].transpose(1, 2)
    ),
    "slice of tokens": lambda x: _within(x, lambda b, h, s, d: (b, h, s + 2, d), lambda t: t[:, :, 1:-1]),
    "slice of all": lambda x: _within(
        x, lambda b, h, s, d: (b + 1, s + 2, h + 3, d + 4), lambda t: t[1:, 1:-1, 1:-2, 3:-1].transpose(1, 2)
    ),
    "offset by one": lambda x: _within(x, lambda b, h, s, d: (b * h * s * d + 1,), lambda t: t[1:].view(x.shape)),
}


def _within(x: Tensor, shape: Callable[..., tuple[int, ...]], view: Callable[[Tensor], Tensor]) -> Tensor:
    """x inside of a larger tensor of NaN."""
    return view(x.new_full(shape(*x.shape), float("nan"))).copy_(x)


@pytest.mark.parametrize("heads", [LLAMA, ROPE], ids=str)
def test_usual_layouts_are_not_copied_and_results_lie_as_in_stock(
    heads: Heads, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("copied")

    dense = run(heads.fused, heads.inputs(16, device))
    for in_layout in LAYOUTS.values():
        inputs = heads.inputs(16, device)
        for name in ("q", "k", "dq_out", "dk_out"):
            setattr(inputs, name, in_layout(getattr(inputs, name)))
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "copy_", refuse)
            patch.setattr(Tensor, "contiguous", refuse)
            ours = run(heads.fused, inputs)
        for name in ("q_out", "k_out", "dq", "dk"):
            assert_same_row(getattr(ours, name), getattr(dense, name))
        for name, expected in zip(("q_out", "k_out"), heads.stock(inputs), strict=True):
            assert _steps(getattr(ours, name)) == _steps(expected), "outputs lie in memory as stock's do"
        for name, x in (("dq", inputs.q), ("dk", inputs.k)):
            assert _steps(getattr(ours, name)) == _steps(empty_rows_like(x))


@pytest.mark.parametrize("shape", [(16,), (5, 16), (7, 3, 16), (2, 3, 2, 2, 16)], ids=str)
def test_qk_norm_takes_any_leading_dimensions(shape: tuple[int, ...], device: str) -> None:
    inputs = LLAMA.inputs(16, device, 6, tokens=2)
    count = shape[:-1].numel() if isinstance(shape, torch.Size) else torch.Size(shape[:-1]).numel()
    x = inputs.q.flatten()[: count * 16].view(shape)
    q, k = qk_norm(x, inputs.k, inputs.q_weight, inputs.k_weight)
    expected_q, expected_k = LLAMA.stock(inputs.but(q=x))
    assert torch.equal(q, expected_q)
    assert torch.equal(k, expected_k)
    deep = inputs.q.unflatten(0, (2, 3))[:, ::2, :, ::1].transpose(1, 3)
    assert torch.equal(qk_norm(deep, deep, inputs.q_weight, inputs.q_weight)[0], LLAMA.stock(inputs.but(q=deep))[0])


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize(
    "kind", ["per token", "one batch", "table", "four", "one token", "one batch of four", "strided"]
)
def test_cos_of_any_shape_that_broadcasts(kind: str, unsqueeze_dim: int, device: str) -> None:
    for heads in (EXACT, PARTIAL):
        inputs = heads.inputs(16, device)
        if unsqueeze_dim == 2:
            for name in ("q", "k", "dq_out", "dk_out"):
                setattr(inputs, name, getattr(inputs, name).transpose(1, 2))
        inputs.unsqueeze_dim = unsqueeze_dim

        def shaped(x: Tensor) -> Tensor:
            four = x.unsqueeze(unsqueeze_dim)
            return {
                "per token": x,
                "one batch": x[:1],
                "table": x[0],
                "four": four,
                "one token": four[:, :1, :1],
                "one batch of four": four[:1],
                "strided": _within(
                    x[None], lambda _, b, s, r: (s, b, 2 * r), lambda t: t.transpose(0, 1)[None, ..., ::2]
                )[0],
            }[kind]

        angles = {"cos": shaped(inputs.cos), "sin": shaped(inputs.sin)}
        spread = {
            name: value if value.dim() == 4 else value.unsqueeze(-3 if value.dim() == 2 else unsqueeze_dim)
            for name, value in angles.items()
        }
        if kind == "table":
            spread = {name: value[None].unsqueeze(unsqueeze_dim) for name, value in angles.items()}
        shape = inputs.q[:, :1] if unsqueeze_dim == 1 else inputs.q[:, :, :1]
        dense = {
            name: value.expand(*shape.shape[:-1], -1).squeeze(unsqueeze_dim).contiguous()
            for name, value in spread.items()
        }
        ours = run(heads.fused, inputs.but(**angles))
        expected = run(heads.fused, inputs.but(**dense))
        if kind == "per token":
            assert_within_budget(heads, inputs)
        assert all(torch.equal(getattr(ours, name), value) for name, value in expected.present().items())


def test_four_dimensional_cos_tells_the_heads_itself(device: str) -> None:
    """With the default unsqueeze_dim, which is of no use to a cos of four dimensions."""
    inputs = EXACT.inputs(16, device)
    expected = EXACT.fused(inputs)
    turned = [x.transpose(1, 2) for x in (inputs.q, inputs.k)]
    weights = inputs.q_weight, inputs.k_weight
    ours = qk_norm_rope(
        *turned, *weights, inputs.cos[:, :, None], inputs.sin[:, :, None], casting="gemma", zero_centered=True
    )
    assert all(torch.equal(a.transpose(1, 2), b) for a, b in zip(ours, expected, strict=True))


def test_cos_that_varies_over_heads_takes_the_reference(device: str, launched: Callable[[], list[str]]) -> None:
    inputs = EXACT.inputs(16, device, k_heads=3)
    cos, sin = (torch.randn(1, 3, 5, 16, device=device) for _ in range(2))
    ours = EXACT.fused(inputs.but(cos=cos, sin=sin))
    for head in range(3):
        one = inputs.but(q=inputs.q[:, head, None], k=inputs.k[:, head, None], cos=cos[:, head], sin=sin[:, head])
        for a, b in zip(ours, EXACT.stock(one), strict=True):
            torch.testing.assert_close(a[:, head, None], b)
    assert launched() == []


def test_learned_angles_get_their_gradient(device: str, launched: Callable[[], list[str]]) -> None:
    inputs = EXACT.inputs(16, device)
    cos, sin = inputs.cos.requires_grad_(), inputs.sin.requires_grad_()
    grads = [
        torch.autograd.grad(f(inputs), (cos, sin), (inputs.dq_out, inputs.dk_out)) for f in (EXACT.fused, EXACT.stock)
    ]
    for ours, expected in zip(*grads, strict=True):
        torch.testing.assert_close(ours, expected)
    assert launched() == []
    with torch.no_grad():
        EXACT.fused(inputs)
    assert launched() == ["qk_forward_kernel"]


@pytest.mark.parametrize("heads", [LLAMA, ROPE, PARTIAL], ids=str)
def test_frozen_and_unused_ones_get_no_gradient_and_change_no_other(heads: Heads, device: str) -> None:
    inputs = heads.inputs(16, device)
    whole = run(heads.fused, inputs).present()
    for frozen, gone in {
        ("q_weight", "k_weight"): {"dq_weight", "dk_weight"},
        ("q", "k"): {"dq", "dk"},
        ("q", "q_weight"): {"dq", "dq_weight"},
        ("q_out",): {"dq", "dq_weight"},
        ("k_out",): {"dk", "dk_weight"},
        ("k_out", "q"): {"dk", "dk_weight", "dq"},
    }.items():
        used = [name for name in ("q_out", "k_out") if name not in frozen]
        part = run(heads.fused, inputs, frozen, used).present()
        assert part.keys() == whole.keys() - gone
        assert all(torch.equal(value, whole[name]) for name, value in part.items())


@pytest.mark.usefixtures("launches")  # programs then allocate by PyTorch's own function on a GPU as well
def test_what_is_not_needed_is_not_allocated(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = ROPE.inputs(16, device)
    q = inputs.q.detach().requires_grad_()
    out, _ = ROPE.fused(inputs.but(q=q))
    allocated = []
    empty_strided = torch.empty_strided
    monkeypatch.setattr(torch, "empty_strided", lambda *a, **k: allocated.append(a[0]) or empty_strided(*a, **k))
    (dq,) = torch.autograd.grad(out, q, inputs.dq_out, retain_graph=True)
    allocated.clear()
    torch.autograd.grad(out, q, inputs.dq_out)
    assert allocated == [dq.shape]


@pytest.mark.parametrize("heads", [LLAMA, pytest.param(replace(ROPE, rotary=256), marks=pytest.mark.slow)], ids=str)
def test_dw_is_summed_over_many_programs(heads: Heads, device: str) -> None:
    """More tiles than programs on both sides, and repeats that agree to the last bit."""
    tokens = 3 * device_props(torch.device(device)).processors
    inputs = heads.inputs(256, device, 1, q_heads=8, k_heads=3, tokens=tokens)
    first = assert_within_budget(heads, inputs)
    for frozen in ((), ("q_weight",), ("k_weight",)):
        again = run(heads.fused, inputs, frozen)
        assert all(torch.equal(value, getattr(first, name)) for name, value in again.present().items())


def test_empty_tensors(device: str) -> None:
    for shape in ({"tokens": 0}, {"batch": 0}, {"q_heads": 0}, {"k_heads": 0}):
        for heads in (LLAMA, ROPE):
            inputs = heads.inputs(16, device, **shape)
            ours = run(heads.fused, inputs)
            assert ours.q_out.shape == ours.dq.shape == inputs.q.shape
            for side, x in (("q", inputs.q), ("k", inputs.k)):
                assert (x.numel() == 0) == (not getattr(ours, f"d{side}_weight").any())


@pytest.mark.parametrize("far", ["q", "k", "cos", "sin", None])
def test_offsets_are_64_bits_wide_where_any_tensor_needs_it(far: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qk_launch, "device_props", lambda _: Device())
    step = {name: 2**30 if name == far else 8 for name in ("q", "k", "cos", "sin")}
    q, k = (torch.empty_strided((1, 1, 3, 8), (0, 0, step[name], 1), device="meta") for name in ("q", "k"))
    cos, sin = (torch.empty_strided((3, 8), (step[name], 1), device="meta") for name in ("cos", "sin"))
    inputs, outputs = (q, k, None, None, cos, sin), (torch.empty_like(q), torch.empty_like(k))
    assert [bool(one.constants["SHAPE"].LONG) for one in _both_ways(inputs, outputs)] == [far is not None] * 2


def _both_ways(inputs: qk_launch.NormedInputs, outputs: qk_launch.Sides) -> list[Launch]:
    """The launches of a forward and of a backward without gradients of weights."""
    forward = partial(qk_launch.launch_qk_forward, NormSpec("llama"), inputs, outputs, 1)
    backward = partial(qk_launch.launch_qk_backward, NormSpec("llama"), inputs, outputs, outputs, (None, None), 1)
    return [*launches_of(forward), *launches_of(backward)]


def _on_meta(heads: int, width: int, rotary: int, dtype: torch.dtype = BF16) -> tuple[Any, Any]:
    """Arguments and outputs of a rotation that nobody computes."""
    q, k = (torch.empty(1, count, 9, width, dtype=dtype, device="meta") for count in (heads, 1))
    cos, sin = (torch.empty(9, rotary, dtype=FP32, device="meta") for _ in range(2))
    return (q, k, None, None, cos, sin), (torch.empty_like(q), torch.empty_like(k))


@pytest.mark.parametrize("rotary", [2, 4, 6, 12, 24, 32, 80, 96, 128])
def test_columns_said_to_be_together_are_swapped_together(rotary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """RoPE swaps halves: what the compiler reads in one piece lies in one of them."""
    monkeypatch.setattr(qk_launch, "device_props", lambda _: Device())
    for launch in _both_ways(*_on_meta(2, 160, rotary)):
        grain = launch.constants["SHAPE"].GRAIN
        assert (rotary // 2) % grain == 0
        assert grain == 16 or (rotary // 2) % (2 * grain) == 1 or (rotary // 2) % (2 * grain) == grain


@pytest.mark.parametrize(("rotary", "loads"), [(64, 2), (128, 1)])
def test_tiles_in_flight_fit_in_shared_memory(rotary: int, loads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has x, the gradient (of a row that is turned in part twice), cos and sin, these in fp32."""
    inputs, outputs = _on_meta(32, 128, rotary)
    tile = heads_backward_plan(32, 1, 128, rotary)
    tile_bytes = max(side.tokens * side.heads for side in (tile.q, tile.k)) * 128 * (2 + loads * 2 + 2 * 4)
    for memory, stages in ((2 * tile_bytes, 3), (2 * tile_bytes - 1, 2)):
        device = Device(shared_memory=memory + 10_240)
        monkeypatch.setattr(qk_launch, "device_props", lambda _, device=device: device)
        assert _both_ways(inputs, outputs)[1].constants["STAGES"] == stages


@pytest.mark.parametrize(("q_heads", "k_heads"), [(40, 1), (1, 40)])
def test_few_programs_are_split_between_many_heads_and_one(
    q_heads: int, k_heads: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each side has one at least, however few tiles it has."""
    monkeypatch.setattr(qk_launch, "device_props", lambda _: Device(processors=1))
    assert_within_budget(LLAMA, LLAMA.inputs(16, device, 1, q_heads, k_heads, tokens=64))


def test_one_launch_serves_every_batch_and_length(device: str, launches: list[Launch]) -> None:
    for heads in (LLAMA, ROPE):
        launches.clear()
        for batch, tokens in ((1, 2), (2, 5), (3, 17)):
            run(heads.fused, heads.inputs(16, device, batch, tokens=tokens))
        compiled = {(one.kernel, *one.constants.items()) for one in launches}
        assert len(compiled) == 3, "a forward, a backward and a sum"
