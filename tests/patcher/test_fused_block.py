"""Several modules in a single call if that skips nothing, and otherwise one module after the other."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb as gpt_oss_rotation
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb as olmo2_rotation
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import VisionAttention as Qwen2VisionAttention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

import fused_norm

from .forwards import layer_of
from .models import (
    assert_all_near,
    assert_near,
    assert_same,
    assert_trains_as_stock,
    fused_copy,
    relative,
    sites,
    slow,
    step,
    tokens,
    twins,
)
from .rotary import of_a_table, of_sections, rotates, with_positions


@pytest.mark.parametrize(
    ("model_type", "path"),
    [
        ("qwen3", "model.layers.1.self_attn.q_norm"),
        ("llama", "model.layers.0.post_attention_layernorm"),
        slow("gemma2", "model.layers.0.post_attention_layernorm"),
        slow("qwen3", "model.norm"),
    ],
)
def test_hooks_on_norms_see_what_they_see_on_stock(model_type: str, path: str, device: str) -> None:
    models = twins(model_type, device)
    seen: list[list[torch.Tensor]] = [[], []]
    for model, tensors in zip(models, seen, strict=True):
        norm, keep = model.get_submodule(path), tensors.extend
        handles = [
            norm.register_forward_hook(lambda _, args, output, keep=keep: keep([*args, output.detach()])),
            norm.register_full_backward_pre_hook(lambda _, out, keep=keep: keep(out)),
            norm.register_full_backward_hook(lambda _, grads, out, keep=keep: keep([*grads, *out])),
        ]
        step(model, tokens(device))
        for handle in handles:
            handle.remove()
        norm.register_forward_hook(lambda _, args, output: output * 1.5)
    assert len(seen[1]) == 5
    assert_all_near(seen[1], seen[0], 1e-5)
    assert_trains_as_stock(*models, tokens(device))


def test_global_hooks_see_every_module(device: str, launches: list[str]) -> None:
    stock, fused = twins("gemma3_text", device)
    calls: dict[str, list[str]] = {"stock": [], "fused": []}
    for name, model in (("stock", stock), ("fused", fused)):
        paths = {module: path for path, module in model.named_modules()}
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, args, output, name=name, paths=paths: calls[name].append(paths.get(module, "a function"))
        )
        with torch.no_grad():
            model(tokens(device), use_cache=False)
        handle.remove()
    assert calls["fused"] == calls["stock"]
    assert set(launches) == {"rms_norm", "rope"}, "a rotation is no module"


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_a_rotation_replaced_in_its_module_is_called_and_not_tried(
    model_type: str, device: str, monkeypatch, launches: list[str]
) -> None:
    """Other patchers do so. The norms are still computed together, and the replacement is called."""
    stock, fused = twins(model_type, device)
    module = sys.modules[type(stock.model.layers[0].self_attn).__module__]
    real, calls = module.apply_rotary_pos_emb, []

    def theirs(q, k, cos, sin, *args, **kwargs):
        if q.shape[1] != 4:
            raise RuntimeError("no kernel for these heads")
        calls.append("rope")
        return real(q * 2, k, cos, sin, *args, **kwargs)

    monkeypatch.setattr(module, "apply_rotary_pos_emb", theirs)
    assert_trains_as_stock(stock, fused, tokens(device))
    assert launches.count("qk_norm") == sites(model_type)["qk"] / 2
    fresh = copy.deepcopy(stock)
    report = fused_norm.apply_fused_norm(fresh)
    assert report.counts == {**sites(model_type), "rope": 0}
    assert {(site.kind, site.cause) for site in report.kept} == {("rope", "overridden")}
    assert all("apply_rotary_pos_emb was replaced, by" in site.reason for site in report.kept)
    assert_trains_as_stock(stock, fresh, tokens(device))
    assert calls == ["rope"] * 8
    assert not {"qk_norm_rope", "rope"} & set(launches)


@pytest.mark.parametrize(("model_type", "launched"), [("qwen3", {"qk_norm"}), ("llama", set())])
def test_angles_that_are_trained_get_their_gradients(
    model_type: str, launched: set[str], device: str, launches: list[str]
) -> None:
    attentions = [model.model.layers[0].self_attn for model in twins(model_type, device)]
    x, angles = torch.randn(2, 5, 72, device=device), torch.randn(2, 1, 5, attentions[0].head_dim, device=device)
    angles.requires_grad_()
    results = []
    for attention in attentions:
        output = attention(x, position_embeddings=angles.unbind(), attention_mask=None)[0]
        results.append([output.detach(), *torch.autograd.grad(output.square().sum(), angles)])
    assert_all_near(*reversed(results), 1e-5)
    assert set(launches) == launched


def fused_attention(model_type: str, device: str) -> nn.Module:
    return twins(model_type, device)[1].model.layers[0].self_attn


def rotated(stock: nn.Module, fused: nn.Module, q, k, cos, sin) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs of the normed and rotated q and k: by the fused attention of the first layer, and by stock's."""
    a, b = (model.model.layers[0].self_attn for model in (stock, fused))
    rotate = sys.modules[type(a).__module__].apply_rotary_pos_emb
    expected = rotate(a.q_norm(q), a.k_norm(k), cos, sin)
    return zip(b.fused_norm_rotated(b.q_norm, b.k_norm, rotate, q, k, cos, sin), expected, strict=True)


@pytest.mark.parametrize("case", ["of all batches", "of each batch", "wider", "other dtype", "norms in fp32"])
def test_angles_and_norms_of_other_shapes_and_dtypes_rotate_as_in_stock(
    case: str, device: str, launches: list[str]
) -> None:
    dtype = torch.bfloat16 if case in ("other dtype", "norms in fp32") else torch.float32
    stock, fused = twins("qwen3", device, dtype=dtype)
    q, k = (torch.randn(2, 5, heads, 24, device=device, dtype=stock.dtype).transpose(1, 2) for heads in (4, 2))
    batch, width = (1 if case == "of all batches" else 2), (1 if case == "wider" else 24)
    cos, sin = (torch.randn(batch, 5, width, device=device) for _ in range(2))
    if case == "norms in fp32":
        cos, sin = cos.bfloat16(), sin.bfloat16()
        for model in (stock, fused):
            model.model.layers[0].self_attn.q_norm.float()
            model.model.layers[0].self_attn.k_norm.float()
    for mine, theirs in rotated(stock, fused, q, k, cos, sin):
        assert mine.dtype == theirs.dtype == torch.float32
        assert relative(mine, theirs) < (1e-6 if mine.dtype == torch.float32 else 2**-8)
    assert launches == (["qk_norm"] if case == "wider" else ["qk_norm_rope"])


def test_angles_of_a_part_of_the_head_are_the_error_that_they_are_in_stock(device: str) -> None:
    _, fused = twins("qwen3", device)
    x, angles = torch.randn(2, 5, 72, device=device), (torch.randn(1, 5, 12, device=device),) * 2
    with pytest.raises(RuntimeError, match="must match the size"):
        fused.model.layers[0].self_attn(x, position_embeddings=angles, attention_mask=None)


def plain(value: torch.Tensor) -> torch.Tensor:
    return value.a if isinstance(value, TwoTensor) else value


@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("case", ["k of another dtype", "a subclass as k", "a subclass as q", "k of another width"])
def test_q_and_k_that_one_launch_cannot_take_come_out_as_in_stock(
    case: str, rotates: bool, device: str, launches: list[str]
) -> None:
    stock, fused = twins("qwen3", device)
    a, b = (model.model.layers[0].self_attn for model in (stock, fused))
    q, k = (torch.randn(2, 5, heads, 24, device=device).transpose(1, 2) for heads in (4, 2))
    cos, sin = (torch.randn(1, 5, 24, device=device) for _ in range(2))
    if case == "k of another dtype":
        k = k.to(torch.bfloat16)
    elif case == "k of another width":
        rotates, k = False, k[..., :12]
        for attention in (a, b):
            attention.k_norm.weight = nn.Parameter(attention.k_norm.weight[:12].detach())
    elif case == "a subclass as q":
        q = TwoTensor(q, q)
    else:
        k = TwoTensor(k, k)
    together = b.fused_norm_pair(b.q_norm, b.k_norm, q, k)
    apart = zip(together, (a.q_norm(q), a.k_norm(k)), strict=True)
    for mine, theirs in rotated(stock, fused, q, k, cos, sin) if rotates else apart:
        assert (type(mine), mine.dtype, mine.shape) == (type(theirs), theirs.dtype, theirs.shape)
        assert relative(plain(mine), plain(theirs)) < (2**-8 if mine.dtype == torch.bfloat16 else 1e-6)
    assert not {"qk_norm", "qk_norm_rope"} & set(launches)


def test_norms_that_became_different_are_called_apart(device: str, launches: list[str]) -> None:
    stock, fused = twins("gemma3_text", device)
    for model in (stock, fused):
        for layer in model.model.layers:
            layer.self_attn.q_norm.eps = 0.5
            layer.pre_feedforward_layernorm.eps = 0.25
    bound = 1e-5 if device == "cpu" else 3e-5  # eps is large
    assert_near(step(fused, tokens(device)), step(stock, tokens(device)), gradients=bound)
    assert "qk_norm_rope" not in launches
    assert "norm_add_norm" not in launches


ANGLES = ("plain", "of each batch", "wider", "other dtype", "of another dimension")


@pytest.mark.parametrize("case", [*ANGLES, "k of another dtype", "a subclass as k", "other heads", "float64"])
def test_a_rotation_by_itself_gives_what_stock_gives(case: str, device: str, launches: list[str]) -> None:
    attention, rotate = fused_attention("llama", device), sys.modules[LlamaAttention.__module__].apply_rotary_pos_emb
    dtype = {"other dtype": torch.bfloat16, "float64": torch.float64}.get(case, torch.float32)
    q, k = (torch.randn(2, 5, heads, 18, device=device).to(dtype).transpose(1, 2) for heads in (4, 2))
    cos, sin = torch.randn(2, 2 if case == "of each batch" else 1, 5, 1 if case == "wider" else 18, device=device)
    named = {"unsqueeze_dim": 2} if case == "other heads" else {}
    if case == "other heads":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    elif case == "k of another dtype":
        k = k.to(torch.bfloat16)
    elif case == "a subclass as k":
        k = TwoTensor(k, k)
    elif case == "of another dimension":
        cos, sin = cos[None], sin[None]
        named = {"unsqueeze_dim": 0}
    actual = attention.fused_norm_rope(rotate, q, k, cos, sin, **named)
    for mine, theirs in zip(actual, rotate(q, k, cos, sin, **named), strict=True):
        assert (type(mine), mine.dtype, mine.shape) == (type(theirs), theirs.dtype, theirs.shape)
        assert relative(plain(mine), plain(theirs)) < 1e-6
        assert plain(mine).stride() == plain(theirs).stride()
    assert launches == (["rope"] if case in ("plain", "of each batch", "other dtype", "other heads") else [])


@pytest.mark.parametrize("case", ["no batch", "a batch", "angles of all"])
def test_a_rotation_of_a_vision_tower_gives_what_stock_gives(case: str, device: str, launches: list[str]) -> None:
    """It is computed in fp32 and rounded once to the dtype of the heads; the heads' dimension follows the tokens'."""
    attention = Qwen2VisionAttention(Qwen2VLVisionConfig(embed_dim=32, num_heads=2)).to(device, torch.bfloat16)
    fused_norm.apply_fused_norm(nn.ModuleList([attention]), strict=False)
    rotate = sys.modules[Qwen2VisionAttention.__module__].apply_rotary_pos_emb_vision
    shape = (5, 3, 2, 16) if case == "no batch" else (2, 5, 3, 2, 16)
    heads = torch.randn(shape, device=device).bfloat16().requires_grad_()
    q, k, _ = heads.unbind(-3)
    cos, sin = torch.randn(2, *(() if case in ("no batch", "angles of all") else (2,)), 5, 16, device=device)
    results = []
    compiled = torch.compile(attention.fused_norm_rope, backend="aot_eager", fullgraph=True)
    again = compiled(rotate, q, k, cos, sin) if case == "no batch" else ()
    launches.clear()
    for outputs in (attention.fused_norm_rope(rotate, q, k, cos, sin), rotate(q, k, cos, sin)):
        weighted = sum((rotated.float() * (1 + place)).sum() for place, rotated in enumerate(outputs))
        results.append((*outputs, *torch.autograd.grad(weighted, heads)))
    for mine, theirs in zip(*results, strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
    assert_same(*(tensors[:2] for tensors in results))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(again, results[1], strict=False))
    assert relative(results[0][2], results[1][2]) < 2**-8
    assert launches == ["rope"]


def rotating(rotation: Callable, more: str = "") -> type[nn.Module]:
    """Return a class whose forward calls this rotation."""
    body = f"q, k = rotate(q, k, cos, sin{more}); return q, k"
    return layer_of(body, "q, k, cos, sin, more=None", nn.Module, {"__name__": __name__, "rotate": rotation})


ROTATIONS = {
    gpt_oss_rotation: ("", (1, 5, 9), [None]),  # with the angles of half a head
    with_positions: (", more", (2, 5, 18), [None, torch.tensor(1)]),
    of_a_table: (", more", (9, 18), [torch.tensor([[3, 4, 0, 8, 1], [0, 1, 2, 3, 4]])]),
    of_sections: (", more", (3, 2, 5, 12), [[1, 2, 3], (4, 1, 1)]),
}
"""Rotations, their further argument, the shapes of their angles, and values of that argument."""


@pytest.mark.parametrize("heads_dim", [1, 2])
@pytest.mark.parametrize("rotation", ROTATIONS)
def test_a_rotation_with_other_angles_or_arguments_gives_what_stock_gives(
    rotation: Callable, heads_dim: int, device: str, launches: list[str]
) -> None:
    text, shape, values = ROTATIONS[rotation]
    stock = rotating(rotation, text + (", unsqueeze_dim=2" if heads_dim == 2 else ""))()
    fused = fused_copy(stock)
    q, k = (torch.randn(2, 5, heads, 18, device=device).bfloat16().transpose(1, 3 - heads_dim) for heads in (4, 2))
    q, k = q.requires_grad_(), k.requires_grad_()
    cos, sin = torch.randn(2, *shape, device=device).bfloat16()
    for value in values:
        more = value.to(device) if isinstance(value, torch.Tensor) else value
        actual, expected = (module(q, k, cos, sin, more) for module in (fused, stock))
        assert_same(actual, expected)
        dy = [torch.randn_like(y) for y in expected]
        assert_all_near(*(torch.autograd.grad(y, (q, k), dy) for y in (actual, expected)), 2**-7)
    assert launches == ["rope"] * len(values)
    if rotation is gpt_oss_rotation and heads_dim == 1:
        with torch.autocast(device, torch.float16):  # the other 16 bits
            halves = q.detach().half(), k.detach().half(), cos, sin
            assert_same(fused(*halves), stock(*halves))
        with pytest.raises(RuntimeError, match="must match the size"):
            fused(q, k, cos[..., :4], sin[..., :4])


@pytest.mark.parametrize("calls_it", [None, True])
def test_a_forward_that_may_call_its_parents_is_fused(calls_it: bool | None, device: str, launches: list[str]) -> None:
    parent = rotating(rotates)
    body = "if more: return super().forward(k, q, cos, sin)\nq, k = rotate(q, k, cos, sin); return q, k"
    names = {"__name__": __name__, "rotate": rotates}
    stock = layer_of(body, "q, k, cos, sin, more=None", parent, names)()
    fused = fused_copy(stock)
    tensors = [torch.randn(2, heads, 5, 18, device=device) for heads in (4, 2)] + [*torch.randn(2, 1, 5, 18)]
    tensors = [tensor.to(device) for tensor in tensors]
    assert_same(fused(*tensors, calls_it), stock(*tensors, calls_it))
    assert launches == ([] if calls_it else ["rope"])


def test_each_pair_of_norms_is_fused_with_its_own_rotation(device: str, launches: list[str]) -> None:
    body = """
        q = self.q_norm(q); k = self.k_norm(k); q, k = doubled(q, k, cos, sin)
        p = self.query_norm(p); m = self.key_norm(m); p, m = rotate(p, m, cos, sin); return q, k, p, m
    """
    names = {"__name__": __name__, "rotate": rotates, "doubled": lambda q, k, cos, sin: (q * 2, k)}
    stock = layer_of(body, "q, k, p, m, cos, sin", nn.Module, names)()
    for name in ("q_norm", "k_norm", "query_norm", "key_norm"):
        norm = nn.RMSNorm(18, eps=1e-5, device=device)
        nn.init.normal_(norm.weight, 1.0, 0.5)
        setattr(stock, name, norm)
    tensors = [torch.randn(2, heads, 5, 18, device=device) for heads in (4, 2, 4, 2)]
    angles = torch.randn(2, 1, 5, 18, device=device)
    assert_all_near(fused_copy(stock)(*tensors, *angles), stock(*tensors, *angles), 1e-6)
    assert launches == ["qk_norm", "qk_norm_rope"]


def of_an_old_table(q, k, cos, sin, positions, unsqueeze_dim=1):
    """A rotation that is recognised with a table of two dimensions; transformers once called it with four."""
    return of_a_table(q, k, cos.reshape(-1, cos.shape[-1]), sin.reshape(-1, sin.shape[-1]), positions, unsqueeze_dim)


def test_a_table_of_other_dimensions_is_left_to_the_function(device: str, launches: list[str]) -> None:
    fused = fused_copy(rotating(of_an_old_table, ", more")())
    q, k = (torch.randn(2, heads, 5, 18, device=device) for heads in (4, 2))
    cos, sin = torch.randn(2, 1, 1, 9, 18, device=device)
    positions = torch.arange(5, device=device)[None]
    actual = fused(q, k, cos, sin, positions)
    assert launches == []
    fused(q, k, cos[0, 0], sin[0, 0], positions.expand(2, -1))
    assert launches == ["rope"]
    assert_same(actual, of_an_old_table(q, k, cos, sin, positions))


def test_norms_before_a_rotation_that_rounds_once_are_made_together_and_then_rotated(
    device: str, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel that fuses norms and rotation rounds each step."""
    monkeypatch.setattr(sys.modules[Qwen3Attention.__module__], "apply_rotary_pos_emb", olmo2_rotation)
    stock, fused = twins("qwen3", device, dtype=torch.bfloat16)
    q, k = (torch.randn(2, 5, heads, 24, device=device).bfloat16().transpose(1, 2) for heads in (4, 2))
    for mine, theirs in rotated(stock, fused, q, k, *torch.randn(2, 1, 5, 24, device=device)):
        assert relative(mine, theirs) < 2**-8
    assert launches == ["qk_norm", "rope"]


FUSED_GATES = ("plain", "up of another dtype", "gate of another dtype")


@pytest.mark.parametrize("case", [*FUSED_GATES, "broadcast", "a subclass as up", "float64"])
def test_a_gate_gives_what_stock_gives(case: str, device: str, launches: list[str]) -> None:
    mlp = twins("gemma2", device)[1].model.layers[0].mlp
    gate, up = torch.randn(2, 2, 5, 12, device=device)
    if case == "up of another dtype":
        up = up.bfloat16()
    elif case == "gate of another dtype":  # as under autocast, if up comes from no linear
        gate = gate.bfloat16()
    elif case == "broadcast":
        up = up[:, :1]
    elif case == "a subclass as up":
        up = TwoTensor(up, up)
    elif case == "float64":
        gate, up = gate.double(), up.double()
    actual = mlp.fused_norm_gate("gelu_tanh", mlp.act_fn, gate=gate, up=up)
    expected = mlp.act_fn(gate) * up
    assert (type(actual), actual.dtype, actual.shape) == (type(expected), expected.dtype, expected.shape)
    assert relative(plain(actual), plain(expected)) < 1e-6
    assert launches == (["glu"] if case in FUSED_GATES else [])


def test_an_activation_replaced_after_patching_is_called(device: str, launches: list[str]) -> None:
    stock, fused = twins("llama", device)
    for model in (stock, fused):
        model.model.layers[0].mlp.act_fn = nn.ReLU()
        model.model.layers[1].mlp.act_fn = nn.GELU()
    assert_trains_as_stock(stock, fused, tokens(device))
    assert "glu" not in launches


class Gated(nn.Module):
    def __init__(self, act: Callable) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(6, 10), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) * self.act(self.up(-x))


class GatedByName(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.up(-x)) * self.up(x)


@pytest.mark.parametrize(
    ("kind", "act"),
    [(Gated, nn.functional.silu), (Gated, nn.functional.gelu), (GatedByName, nn.functional.silu)],
)
def test_an_activation_that_is_a_function_is_fused_while_it_is_the_same(
    kind: type[Gated], act: Callable, device: str, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = kind(act).to(device)
    fused = copy.deepcopy(stock)
    assert [site.activation for site in fused_norm.apply_fused_norm(fused).fused] == [act.__name__]
    x = torch.randn(3, 6, device=device)
    assert relative(fused(x), stock(x)) < 1e-6
    assert launches == ["glu"]
    fused.act = stock.act = torch.relu
    monkeypatch.setattr(nn.functional, "silu", torch.relu)
    assert torch.equal(fused(x), stock(x))
    assert launches == ["glu"]


def test_halves_of_one_tensor_that_are_no_halves_are_the_error_that_they_are_in_stock(device: str) -> None:
    fused = layer_of("gate, up = x.chunk(2, dim=-1); return self.act(gate) * up", "x", nn.Module)()
    fused.act = nn.SiLU()
    assert fused_norm.apply_fused_norm(fused).counts["mlp"] == 1
    gate, up = torch.randn(2, 3, 5, device=device)
    assert relative(fused(torch.cat((gate, up), -1)), nn.functional.silu(gate) * up) < 1e-6
    with pytest.raises(RuntimeError, match="must match the size"):
        fused(gate)


class SumsNorm(nn.RMSNorm):
    """Reasons are logged once for each class."""


class Sums(nn.Module):
    """A layer whose branches, and at last its residual, have other memory orders than the tensors they are added to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (SumsNorm(8, eps=1e-5) for _ in range(3))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        h = x + x.transpose(0, 1).exp().transpose(0, 1).mul(2)
        y = self.first(h)
        turned = self.second(y.transpose(0, 1).exp().contiguous().transpose(0, 1))
        s = h + turned
        z = self.third(s)
        onto = h + self.second(y.transpose(0, 1).contiguous().transpose(0, 1))
        return [h, y, s, z, onto, self.first(x[:1].expand_as(x))]


def test_sums_and_norms_lie_in_memory_as_in_stock(device: str, caplog: pytest.LogCaptureFixture) -> None:
    stock = Sums().to(device)
    for weight in stock.parameters():
        nn.init.normal_(weight, 1.0, 0.5)
    fused = fused_copy(nn.ModuleList([stock]))[0]
    x = torch.randn(2, 3, 8, device=device, requires_grad=True)
    results = []
    for module in (fused, stock):
        outputs = module(x)
        loss = sum((output * torch.linspace(-1, 2, 48, device=device).view_as(output)).sum() for output in outputs)
        results.append((outputs, torch.autograd.grad(loss, [x, *module.parameters()])))
    for actual, expected in zip(*(outputs for outputs, _ in results), strict=True):
        assert actual.stride() == expected.stride()
        assert relative(actual, expected) < 1e-6
    assert_all_near(*(gradients for _, gradients in results), 1e-5)
    assert "SumsNorm runs PyTorch's add: residual lies in another order in memory than x" in caplog.messages
