"""qk_norm and qk_norm_rope: outputs, gradients and strides, held against the stock code and float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_whole
from transformers.models.qwen3_next.modeling_qwen3_next import apply_rotary_pos_emb as rotate_part

from fused_norm.kernels import qk_norm, qk_norm_rope
from fused_norm.kernels.plans import Device
from fused_norm.kernels.triton import qk_launch
from fused_norm.kernels.triton.devices import device_facts
from fused_norm.kernels.triton.launch import Launch
from fused_norm.kernels.triton.launch import launches as observed
from fused_norm.kernels.triton.memory import empty_rows_like
from fused_norm.spec import NormSpec

from .numerics import BF16, FP16, FP32, ROUND_RSTD, Norm, assert_same_row, floor, none_rounded_once


@dataclass(frozen=True)
class Heads:
    """The norms of q and k under test, and what RoPE does behind them."""

    norm: Norm
    rotary: int = 0
    angles: torch.dtype = BF16

    def __str__(self) -> str:
        rope = f"-rope{self.rotary}-{self.angles}".replace("torch.", "") if self.rotary else ""
        return f"{self.norm}{rope}"

    def fused(self, i: Inputs) -> tuple[Tensor, Tensor]:
        semantics = {"casting": self.norm.casting, "zero_centered": self.norm.zero_centered}
        if not self.rotary:
            return qk_norm(i.q, i.k, i.q_weight, i.k_weight, self.norm.eps, **semantics)
        return qk_norm_rope(
            i.q, i.k, i.q_weight, i.k_weight, i.cos, i.sin, self.norm.eps, unsqueeze_dim=i.unsqueeze_dim, **semantics
        )

    def _with(self, norm: Callable[[Tensor, Tensor | None], Tensor], i: Inputs) -> tuple[Tensor, Tensor]:
        n = norm(i.q, i.q_weight), norm(i.k, i.k_weight)
        if not self.rotary:
            return n
        rotate = rotate_whole if self.rotary == i.q.shape[-1] else rotate_part
        return rotate(*n, i.cos, i.sin, unsqueeze_dim=i.unsqueeze_dim)

    def stock(self, i: Inputs) -> tuple[Tensor, Tensor]:
        """Norms as modelling code writes them, and transformers' own RoPE."""
        return self._with(lambda x, w: self.norm.stock(x, None, w)[0], i)

    def rounded(self, i: Inputs) -> tuple[Tensor, Tensor]:
        """Stock with every rounding done once, see ``none_rounded_once``."""
        if self.norm.casting != "none":
            return self.stock(i)
        return self._with(lambda x, w: none_rounded_once(x, w, self.norm.eps, self.norm.zero_centered), i)

    def true(self, i: Inputs) -> tuple[Tensor, Tensor]:
        return self._with(lambda x, w: self.norm.true(x, None, w)[0], i)


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    dq: Tensor
    dk: Tensor
    unsqueeze_dim: int = 1

    def mapped(self, convert: Callable[[Tensor], Tensor]) -> Inputs:
        return Inputs(**{n: convert(v) if isinstance(v, Tensor) else v for n, v in vars(self).items()})


def make_inputs(
    heads: Heads,
    width: int,
    device: str,
    batch: int = 2,
    q_heads: int = 3,
    k_heads: int = 2,
    tokens: int = 5,
    seed: int = 0,
) -> Inputs:
    """q and k as [B, H, S, D], transposed views of [B, S, H, D]; cos and sin differ in their halves."""
    generator = torch.Generator().manual_seed(seed)
    norm = heads.norm

    def values(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator)).to(device, dtype)

    def side(count: int) -> tuple[Tensor, Tensor | None, Tensor]:
        x = values(batch, tokens, count, width, dtype=norm.x, scale=1.5).transpose(1, 2)
        weight = None if norm.w is None else values(width, dtype=norm.w, scale=1.5)
        dtype = norm.x if weight is None or norm.casting == "gemma" else torch.promote_types(norm.x, weight.dtype)
        if heads.rotary:
            dtype = torch.promote_types(dtype, heads.angles)
        return x, weight, values(batch, tokens, count, width, dtype=dtype).transpose(1, 2)

    (q, q_weight, dq), (k, k_weight, dk) = side(q_heads), side(k_heads)
    cos = sin = None
    if heads.rotary:
        angles = 3 * torch.randn(batch, tokens, heads.rotary, generator=generator)
        cos, sin = angles.cos().to(device, heads.angles), angles.sin().to(device, heads.angles)
    return Inputs(q, k, q_weight, k_weight, cos, sin, dq, dk)


LEAVES = ("q", "k", "q_weight", "k_weight")


def run(
    function: Callable[[Inputs], tuple[Tensor, Tensor]], inputs: Inputs, frozen: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """Outputs and gradients by name; of ``frozen`` ones leaves take no gradient and outputs no part."""
    leaves = {
        name: value.detach().requires_grad_(name not in frozen)
        for name in LEAVES
        if (value := getattr(inputs, name)) is not None
    }
    q_out, k_out = function(replace(inputs, **leaves))
    used = [(y, d) for n, y, d in (("q_out", q_out, inputs.dq), ("k_out", k_out, inputs.dk)) if n not in frozen]
    used = [(y, d) for y, d in used if y.requires_grad]
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    grads = torch.autograd.grad([y for y, _ in used], tuple(wanted.values()), [d for _, d in used], allow_unused=True)
    found = {f"d{name}": grad for name, grad in zip(wanted, grads, strict=True) if grad is not None}
    return {"q_out": q_out.detach(), "k_out": k_out.detach(), **found}


def scales(heads: Heads, inputs: Inputs) -> dict[str, Tensor]:
    """What errors are relative to: a row's largest normalised value, or the largest of the terms of a gradient."""
    wide, found = inputs.mapped(Tensor.double), {}
    for side, x, weight, d in (("q", wide.q, wide.q_weight, wide.dq), ("k", wide.k, wide.k_weight, wide.dk)):
        n = heads.norm.true(x, None, weight)[0].requires_grad_()
        rotated = heads._with(lambda x, _, n=n: n, wide)[0] if heads.rotary else n
        dn = torch.autograd.grad(rotated, n, d)[0].abs()
        rstd = (x.square().mean(-1, keepdim=True) + heads.norm.eps).rsqrt()
        gamma = torch.ones(()) if weight is None else (1 + weight if heads.norm.zero_centered else weight).abs()
        found[f"{side}_out"] = n.detach().abs().amax(-1, keepdim=True)
        found[f"d{side}"] = (dn * gamma * rstd).amax(-1, keepdim=True)
        found[f"d{side}_weight"] = (dn * (x * rstd).abs()).sum((0, 1, 2))
    return found


def assert_within_budget(heads: Heads, inputs: Inputs, frozen: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The rule of ``numerics`` for every result, stock's strides and its rounding points for the outputs."""
    ours, stock = run(heads.fused, inputs, frozen), run(heads.stock, inputs, frozen)
    truth = run(heads.true, inputs.mapped(Tensor.double), frozen)
    rounded = dict(zip(("q_out", "k_out"), heads.rounded(inputs), strict=True))
    scale = scales(heads, inputs)
    assert ours.keys() == stock.keys()
    for name, value in ours.items():
        expected, exact = stock[name], truth[name]
        assert (value.dtype, value.shape) == (expected.dtype, expected.shape), name
        unit = scale[name].clamp_min(torch.finfo(torch.float64).tiny)
        error, allowed = ((result.double() - exact).abs().div(unit).amax().item() for result in (value, expected))
        assert error <= allowed + floor(value.dtype), f"{name}: error {error:.3g}, the stock code's is {allowed:.3g}"
        if name in rounded:
            assert _steps(value) == _steps(expected), name
            moved = (value.double() - rounded[name].double()).abs().div(unit) > 16 * torch.finfo(FP32).eps
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
    assert_within_budget(Heads(norm), make_inputs(Heads(norm), 16, device))
    for heads in (Heads(norm, 16, BF16), Heads(norm, 8, BF16), Heads(norm, 8, FP32)):
        assert_within_budget(heads, make_inputs(heads, 16, device))


@pytest.mark.parametrize(
    "width", [1, 7, 80, *(pytest.param(width, marks=pytest.mark.slow) for width in (3, 64, 130, 256, 6000))]
)
def test_every_width_is_as_accurate_as_the_stock_code(width: int, device: str) -> None:
    tokens = 5 if width <= 256 else 2
    assert_within_budget(LLAMA, make_inputs(LLAMA, width, device, tokens=tokens))
    if width % 2 == 0:
        for heads in (replace(ROPE, rotary=width), replace(PARTIAL, rotary=width // 4 * 2 - 2)):
            assert_within_budget(heads, make_inputs(heads, width, device, batch=1, tokens=tokens))


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
        assert_within_budget(case, make_inputs(case, 16, device, 3, q_heads=heads, k_heads=1, tokens=tokens))


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
    "columns first": lambda x: _within(x, lambda b, h, s, d: (b, h, d, s), lambda t: t.transpose(2, 3)),
    "offset by one": lambda x: _within(x, lambda b, h, s, d: (b * h * s * d + 1,), lambda t: t[1:].view(x.shape)),
}


def _within(x: Tensor, shape: Callable[..., tuple[int, ...]], view: Callable[[Tensor], Tensor]) -> Tensor:
    """x inside of a larger tensor of NaN."""
    return view(x.new_full(shape(*x.shape), float("nan"))).copy_(x)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "columns first"])
def test_usual_layouts_are_not_copied_and_results_lie_as_in_stock(
    layout: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("copied")

    for heads in (LLAMA, ROPE):
        inputs = make_inputs(heads, 16, device)
        dense = run(heads.fused, inputs)
        for name in ("q", "k", "dq", "dk"):
            setattr(inputs, name, LAYOUTS[layout](getattr(inputs, name)))
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "copy_", refuse)
            patch.setattr(Tensor, "contiguous", refuse)
            ours = run(heads.fused, inputs)
        for name in ("q_out", "k_out", "dq", "dk"):
            assert_same_row(ours[name], dense[name])
        for name, expected in zip(("q_out", "k_out"), heads.stock(inputs), strict=True):
            assert _steps(ours[name]) == _steps(expected), "outputs lie in memory as stock's do"
        for name, x in (("dq", inputs.q), ("dk", inputs.k)):
            assert _steps(ours[name]) == _steps(empty_rows_like(x))


@pytest.mark.parametrize("shape", [(16,), (5, 16), (7, 3, 16), (2, 3, 2, 2, 16)], ids=str)
def test_qk_norm_takes_any_leading_dimensions(shape: tuple[int, ...], device: str) -> None:
    inputs = make_inputs(LLAMA, 16, device, 6, tokens=2)
    count = shape[:-1].numel() if isinstance(shape, torch.Size) else torch.Size(shape[:-1]).numel()
    x = inputs.q.flatten()[: count * 16].view(shape)
    q, k = qk_norm(x, inputs.k, inputs.q_weight, inputs.k_weight)
    expected_q, expected_k = LLAMA.stock(replace(inputs, q=x))
    assert torch.equal(q, expected_q)
    assert torch.equal(k, expected_k)
    deep = inputs.q.unflatten(0, (2, 3))[:, ::2, :, ::1].transpose(1, 3)
    assert torch.equal(
        qk_norm(deep, deep, inputs.q_weight, inputs.q_weight)[0], LLAMA.stock(replace(inputs, q=deep))[0]
    )


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize(
    "kind", ["per token", "one batch", "table", "four", "one token", "one batch of four", "strided"]
)
def test_cos_of_any_shape_that_broadcasts(kind: str, unsqueeze_dim: int, device: str) -> None:
    for heads in (EXACT, PARTIAL):
        inputs = make_inputs(heads, 16, device)
        if unsqueeze_dim == 2:
            for name in ("q", "k", "dq", "dk"):
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
        ours = run(heads.fused, replace(inputs, **angles))
        expected = assert_within_budget(heads, replace(inputs, **dense))
        assert all(torch.equal(ours[name], expected[name]) for name in ours)


def test_four_dimensional_cos_tells_the_heads_itself(device: str) -> None:
    """With the default unsqueeze_dim, which is of no use to a cos of four dimensions."""
    inputs = make_inputs(EXACT, 16, device)
    expected = EXACT.fused(inputs)
    turned = [x.transpose(1, 2) for x in (inputs.q, inputs.k)]
    weights = inputs.q_weight, inputs.k_weight
    ours = qk_norm_rope(
        *turned, *weights, inputs.cos[:, :, None], inputs.sin[:, :, None], casting="gemma", zero_centered=True
    )
    assert all(torch.equal(a.transpose(1, 2), b) for a, b in zip(ours, expected, strict=True))


def test_cos_that_varies_over_heads_takes_the_reference(device: str, launched: Callable[[], list[str]]) -> None:
    inputs = make_inputs(EXACT, 16, device, k_heads=3)
    cos, sin = (torch.randn(1, 3, 5, 16, device=device) for _ in range(2))
    ours = EXACT.fused(replace(inputs, cos=cos, sin=sin))
    for head in range(3):
        one = replace(inputs, q=inputs.q[:, head, None], k=inputs.k[:, head, None], cos=cos[:, head], sin=sin[:, head])
        for a, b in zip(ours, EXACT.stock(one), strict=True):
            torch.testing.assert_close(a[:, head, None], b)
    assert launched() == []


def test_learned_angles_get_their_gradient(device: str, launched: Callable[[], list[str]]) -> None:
    inputs = make_inputs(EXACT, 16, device)
    cos, sin = inputs.cos.requires_grad_(), inputs.sin.requires_grad_()
    grads = [torch.autograd.grad(f(inputs), (cos, sin), (inputs.dq, inputs.dk)) for f in (EXACT.fused, EXACT.stock)]
    for ours, expected in zip(*grads, strict=True):
        torch.testing.assert_close(ours, expected)
    assert launched() == []
    with torch.no_grad():
        EXACT.fused(inputs)
    assert launched() == ["qk_forward_kernel"]


def test_float64_and_forward_mode_take_the_reference() -> None:
    inputs = make_inputs(EXACT, 4, "cpu").mapped(Tensor.double)
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.q_weight, inputs.k_weight)]
    angles = inputs.cos[..., :4], inputs.sin[..., :4]
    assert torch.autograd.gradcheck(lambda *x: qk_norm_rope(*x, *angles), leaves)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(inputs.q.float(), inputs.dq.float())
        out, _ = qk_norm(dual, inputs.k.float(), None, None)
        assert torch.autograd.forward_ad.unpack_dual(out).tangent is not None


@pytest.mark.parametrize("heads", [LLAMA, ROPE, PARTIAL], ids=str)
@pytest.mark.parametrize(
    "frozen",
    [
        ("q_weight", "k_weight"),
        ("q_weight",),
        ("q", "k"),
        ("q", "q_weight"),
        ("k",),
        ("q_out",),
        ("k_out",),
        ("k_out", "q"),
    ],
    ids=" ".join,
)
def test_frozen_and_unused_ones_get_no_gradient_and_change_no_other(
    frozen: tuple[str, ...], heads: Heads, device: str
) -> None:
    inputs = make_inputs(heads, 16, device)
    whole, part = run(heads.fused, inputs), run(heads.fused, inputs, frozen)
    gone = {f"d{name}" for name in frozen if not name.endswith("_out")}
    gone |= {f"d{name[0]}{end}" for name in frozen if name.endswith("_out") for end in ("", "_weight")}
    assert part.keys() == whole.keys() - gone
    assert all(torch.equal(value, whole[name]) for name, value in part.items())


@pytest.mark.usefixtures("launches")  # programs then allocate by PyTorch's own function on a GPU as well
def test_what_is_not_needed_is_not_allocated(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(ROPE, 16, device)
    q = inputs.q.detach().requires_grad_()
    out, _ = ROPE.fused(replace(inputs, q=q))
    allocated = []
    empty_strided = torch.empty_strided
    monkeypatch.setattr(torch, "empty_strided", lambda *a, **k: allocated.append(a[0]) or empty_strided(*a, **k))
    (dq,) = torch.autograd.grad(out, q, inputs.dq, retain_graph=True)
    allocated.clear()
    torch.autograd.grad(out, q, inputs.dq)
    assert allocated == [dq.shape]


@pytest.mark.parametrize("heads", [LLAMA, ROPE, PARTIAL], ids=str)
def test_one_launch_each_way_and_one_more_for_both_sums(
    heads: Heads, device: str, launched: Callable[[], list[str]]
) -> None:
    inputs = make_inputs(heads, 16, device)
    wanted = ["qk_forward_kernel", "qk_backward_kernel", "_sum_shares_kernel"]
    for _ in range(2):
        run(heads.fused, inputs)
        assert launched() == wanted
    run(heads.fused, inputs, ("q_weight", "k_weight"))
    assert launched() == wanted[:2]


@pytest.mark.parametrize("heads", [LLAMA, pytest.param(replace(ROPE, rotary=256), marks=pytest.mark.slow)], ids=str)
def test_dw_is_summed_over_many_programs(heads: Heads, device: str) -> None:
    """More tiles than programs on both sides, and repeats that agree to the last bit."""
    tokens = 3 * device_facts(torch.device(device)).processors
    inputs = make_inputs(heads, 256, device, 1, q_heads=8, k_heads=3, tokens=tokens)
    first = assert_within_budget(heads, inputs)
    for frozen in ((), ("q_weight",), ("k_weight",)):
        again = run(heads.fused, inputs, frozen)
        assert all(torch.equal(value, first[name]) for name, value in again.items())


def test_empty_tensors(device: str) -> None:
    for shape in ({"tokens": 0}, {"batch": 0}, {"q_heads": 0}, {"k_heads": 0}):
        for heads in (LLAMA, ROPE):
            inputs = make_inputs(heads, 16, device, **shape)
            ours = run(heads.fused, inputs)
            assert ours["q_out"].shape == ours["dq"].shape == inputs.q.shape
            for side, x in (("q", inputs.q), ("k", inputs.k)):
                assert (x.numel() == 0) == (not ours[f"d{side}_weight"].any())


class Noted:
    """Notes launches instead of making them."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def launched(self, launch: Launch) -> None:
        self.launches.append(launch)


@pytest.mark.parametrize("far", ["q", "k", "cos", "sin", None])
def test_offsets_are_64_bits_wide_where_any_tensor_needs_it(far: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qk_launch, "device_facts", lambda _: Device())
    step = {name: 2**30 if name == far else 8 for name in ("q", "k", "cos", "sin")}
    q, k = (torch.empty_strided((1, 1, 3, 8), (0, 0, step[name], 1), device="meta") for name in ("q", "k"))
    cos, sin = (torch.empty_strided((3, 8), (step[name], 1), device="meta") for name in ("cos", "sin"))
    inputs, outputs = (q, k, None, None, cos, sin), (torch.empty_like(q), torch.empty_like(k))
    observer = Noted()
    with observed.by(observer):
        qk_launch.launch_qk_forward(NormSpec("llama"), inputs, outputs, 1)
        qk_launch.launch_qk_backward(NormSpec("llama"), inputs, outputs, outputs, (None, None), 1)
    assert [bool(one.constants["SHAPE"].LONG) for one in observer.launches] == [far is not None] * 2


def test_one_launch_serves_every_batch_and_length(device: str, launches: list[Launch]) -> None:
    for heads in (LLAMA, ROPE):
        launches.clear()
        for batch, tokens in ((1, 2), (2, 5), (3, 17)):
            run(heads.fused, make_inputs(heads, 16, device, batch, tokens=tokens))
        compiled = {(one.kernel, *one.constants.items()) for one in launches}
        assert len(compiled) == 3, "a forward, a backward and a sum"
