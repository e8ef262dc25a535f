"""``apply_fused_norm``: the right sites, the same model, and everything back again."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import json
import pickle
import re
import types

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, LlamaModel

import fused_norm
from fused_norm import FusedNormError, FuseOptions
from fused_norm.check.against_float64 import check_step
from fused_norm.model_configs import FAMILIES, build, tiny_config

from .models import (
    MODEL_TYPES,
    SLOW_BUT_FOR_A_FEW,
    assert_same_bits,
    assert_trains_as_stock,
    counts,
    experts,
    fused_copy,
    is_fused,
    relative,
    sites,
    slow,
    slow_but,
    snapshot,
    step,
    tokens,
    twins,
)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_site_of_a_family_is_fused(model_type: str) -> None:
    model = build(model_type, seed=0)
    report = fused_norm.apply_fused_norm(model)
    assert report.counts == sites(model_type)
    assert report.kept == ()
    assert {site.path for site in report.fused if site.kind == "experts"} == experts(model_type)
    with_norms = [site for site in report.fused if site.kind not in ("rope", "mlp", "experts", "loss")]
    assert {site.spec for site in with_norms} == {FAMILIES[model_type].spec}
    # Norms of single heads are computed with the rotation, those over all heads before it.
    widths = {model.get_submodule(site.path).weight.numel() for site in report.fused if site.kind == "qk"}
    of_heads = widths == {getattr(model.config, "head_dim", None)}
    assert {site.spec for site in report.fused if site.kind == "rope"} == {
        FAMILIES[model_type].spec if of_heads else None
    }
    (activation,) = {getattr(model.config, name, None) for name in ("hidden_act", "hidden_activation")} - {None}
    gates = {site.activation for site in report.fused if site.kind == "mlp"}
    assert gates == {{"gelu_pytorch_tanh": "gelu_tanh"}.get(activation, activation)}
    assert len({(site.path, site.kind) for site in report.fused}) == len(report.fused)
    assert report.model_type == model_type


@pytest.mark.parametrize("model_type", SLOW_BUT_FOR_A_FEW)
def test_fp32_logits_and_gradients_are_stock_to_1e_5(model_type: str, device: str) -> None:
    assert_trains_as_stock(*twins(model_type, device), tokens(device, length=19))


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [
        ("llama", torch.bfloat16),
        *(slow(model_type, torch.bfloat16) for model_type in MODEL_TYPES if model_type != "llama"),
        slow("qwen3", torch.float16),
        slow("gemma2", torch.float16),
    ],
)
def test_16_bit_errors_stay_within_the_stock_errors_budget(model_type: str, dtype: torch.dtype, device: str) -> None:
    result = check_step(build(model_type, seed=0, dtype=dtype, device=device), tokens(device, length=48))
    assert result.ok, str(result)
    assert result.report.counts == sites(model_type)


@pytest.mark.parametrize("model_type", SLOW_BUT_FOR_A_FEW)
def test_bf16_forward_has_the_stock_rounding_points(model_type: str, device: str) -> None:
    model = build(model_type, seed=0, dtype=torch.bfloat16, device=device).eval()
    ids = tokens(device)
    with torch.no_grad():
        stock = model(ids, use_cache=False).logits
        fused_norm.apply_fused_norm(model)
        fused = model(ids, use_cache=False).logits
    # A wrong cast in a single norm changes about a quarter of its outputs, and with them nearly all logits.
    assert relative(fused, stock) < 2**-8


@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text"])
def test_twice_changes_nothing_and_undo_restores_every_class_and_attribute(model_type: str) -> None:
    model = build(model_type, seed=0)
    before = snapshot(model)
    report = fused_norm.apply_fused_norm(model)
    fused = snapshot(model)
    assert [kind for kind, _ in fused] != [kind for kind, _ in before]
    assert fused_norm.apply_fused_norm(model) == report
    assert snapshot(model) == fused
    counts = sites(model_type)
    layers = len(model.model.layers)
    # Every norm, every layer, every attention and every MLP.
    assert fused_norm.remove_fused_norm(model) == counts["norm"] + counts["qk"] + 3 * layers + 2
    assert snapshot(model) == before
    assert fused_norm.remove_fused_norm(model) == 0


FEWER = (
    {"residual": False},
    {"norms": False},
    {"qk": False},
    {"qk": False, "rope": True},
    {"mlp": False, "rope": False},
    {"modules": "model.layers.1.*"},
    {"residual": False, "post_norm": True},
)


@pytest.mark.parametrize("options", slow_but((FEWER[3], FEWER[5]), FEWER), ids=str)
def test_a_patched_model_becomes_what_other_options_make_of_a_stock_one(options: dict) -> None:
    """It is patched with all options first, then with others."""
    stock = build("gemma3_text", seed=0)
    before = snapshot(stock)
    fresh, model = copy.deepcopy(stock), copy.deepcopy(stock)
    expected = fused_norm.apply_fused_norm(fresh, **options)
    for earlier in ({}, FEWER[FEWER.index(options) - 1]):
        fused_norm.apply_fused_norm(model, **earlier)
    assert fused_norm.apply_fused_norm(model, **options) == expected
    assert [type(module) for module in model.modules()] == [type(module) for module in fresh.modules()]
    assert relative(step(model, tokens())[0], step(stock, tokens())[0]) < 1e-5
    fused_norm.remove_fused_norm(model)
    assert [kind for kind, _ in snapshot(model)] == [kind for kind, _ in before]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rope": False}, counts(loss=1, norm=5, qk=4, residual=2, mlp=2)),
        ({"qk": False}, counts(loss=1, norm=5, residual=2, mlp=2)),
        ({"qk": False, "rope": True}, counts(loss=1, norm=5, rope=2, residual=2, mlp=2)),
        ({"loss": False}, counts(norm=5, qk=4, rope=2, residual=2, mlp=2)),
        ({"modules": "lm_head"}, counts(loss=1)),
        ({"mlp": False}, counts(loss=1, norm=5, qk=4, rope=2, residual=2)),
        ({"norms": False, "qk": False, "mlp": False, "rope": True}, counts(loss=1, rope=2)),
        ({"modules": "model.layers.0.*"}, counts(norm=2, qk=2, rope=1, residual=1, mlp=1)),
        ({"modules": ["*.q_norm", "model.norm"]}, counts(norm=1, qk=2)),
        ({"modules": lambda path, module: "layers.1" in path}, counts(norm=2, qk=2, rope=1, residual=1, mlp=1)),
        ({"modules": "*.post_attention_layernorm", "qk": False}, counts(norm=2, residual=2)),
    ],
)
def test_options_choose_kinds_and_modules(options: dict, expected: dict) -> None:
    model = build("qwen3", seed=0)
    report = fused_norm.apply_fused_norm(model, **options)
    assert report.counts == expected
    assert len(report.fused) + len(report.kept) == 16
    norms = {path for path, module in model.named_modules() if is_fused(module) and "norm" in path.split(".")[-1]}
    assert norms == {site.path for site in report.fused if site.kind in ("norm", "qk")}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"norm": True}, TypeError, "norm"),
        ({"norms": "yes"}, TypeError, "norms must be True, False or None, not 'yes'"),
        ({"strict": 1}, TypeError, "strict must be"),
        ({"norms": False, "residual": True}, ValueError, "residual=True contradicts norms=False"),
        ({"norms": False, "post_norm": True}, ValueError, "post_norm=True contradicts norms=False"),
        (
            dict.fromkeys(("norms", "qk", "mlp", "conv", "experts", "lora", "loss"), False),
            ValueError,
            "loss=False leave nothing to fuse",
        ),
        ({"modules": 3}, TypeError, "modules must be"),
        ({"modules": []}, TypeError, "modules must be"),
        ({"modules": "model.layer.*"}, FusedNormError, "LoRA layer or head; one of their paths is model.layers.0"),
        ({"modules": lambda path, module: False}, FusedNormError, "nothing to fuse"),
        ({"modules": lambda path, module: "no"}, TypeError, "modules must return True or False, not 'no'"),
    ],
)
def test_bad_options_are_errors_and_change_neither_a_stock_model_nor_a_patched_one(
    options: dict, error: type, message: str
) -> None:
    stock = build("qwen3", seed=0)
    for model in (stock, fused_copy(stock)):
        before = snapshot(model)
        with pytest.raises(error) as caught:
            fused_norm.apply_fused_norm(model, **options)
        assert message in str(caught.value)
        assert snapshot(model) == before


def test_what_is_no_module_is_an_error_that_says_what_is_expected() -> None:
    for call in (fused_norm.apply_fused_norm, fused_norm.remove_fused_norm):
        for value, kind in ((None, "NoneType"), ("qwen3", "str")):
            with pytest.raises(TypeError, match=rf"model must be a torch\.nn\.Module, not {kind}"):
                call(value)


def test_a_scripted_module_inside_is_left_alone() -> None:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.rand(16)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x

    model = nn.Sequential(nn.RMSNorm(16), nn.RMSNorm(16, eps=1e-6), torch.jit.script(Scripted()))
    report = fused_norm.apply_fused_norm(model)
    assert [site.path for site in report.fused] == ["1"]
    assert model(torch.randn(2, 16)).shape == (2, 16)
    assert fused_norm.remove_fused_norm(model) == 1


def test_a_model_without_norms_is_an_error_unless_not_strict() -> None:
    with pytest.raises(FusedNormError, match="nothing to fuse in Linear"):
        fused_norm.apply_fused_norm(nn.Linear(2, 2))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    bert = BertModel(BertConfig(**sizes, vocab_size=32))
    with pytest.raises(FusedNormError, match="subtracts a mean"):
        fused_norm.apply_fused_norm(bert)
    report = fused_norm.apply_fused_norm(bert, strict=False)
    assert report.fused == ()
    assert all("subtracts a mean" in site.reason for site in report.kept if site.module == "LayerNorm")


def test_the_report_is_a_value_that_can_be_read_and_stored() -> None:
    model = build("qwen3", seed=0)
    report = fused_norm.apply_fused_norm(model, modules=["model.layers.*"])
    stored = json.loads(report.to_json())
    assert stored["counts"] == report.counts
    assert len(stored["fused"]) == len(report.fused)
    assert stored["kept"][0] == {
        "path": "model.norm",
        "kind": "norm",
        "module": "Qwen3RMSNorm",
        "spec": {"casting": "llama", "zero_centered": False, "weighted": True, "eps": 1e-6, "casts_weight": True},
        "reason": "not selected by modules",
        "cause": "option",
        "activation": None,
        "replaced": None,
        "trainer": None,
    }
    table = str(report).splitlines()
    assert table[0] == "Qwen3ForCausalLM (qwen3): fused 4 norm, 4 qk, 2 rope, 2 residual, 2 mlp; kept 2"
    below = table.index("fused Qwen3RMSNorm: llama, weight, eps 1e-06")
    assert table[below + 1] == "     2 qk        model.layers.*.self_attn.q_norm"
    assert table[-4:] == [
        "kept Qwen3RMSNorm: not selected by modules",
        "     1 norm      model.norm",
        "kept Qwen3ForCausalLM: not selected by modules",
        "     1 loss      lm_head",
    ]
    assert max(map(len, table)) <= 80
    assert hash(report) == hash(copy.deepcopy(report))


@pytest.mark.parametrize("model_type", ["qwen3", slow("gemma2")])
def test_copies_pickles_and_checkpoints_keep_working(model_type: str, device: str, tmp_path) -> None:
    model = build(tiny_config(model_type, num_hidden_layers=1), seed=0, device=device)
    stock_keys = list(model.state_dict())
    fused_norm.apply_fused_norm(model)
    assert list(model.state_dict()) == stock_keys
    ids = tokens(device)
    expected = step(model, ids)

    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    twins = {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.load": torch.load(buffer, weights_only=False),
    }
    model.save_pretrained(tmp_path)
    for twin in twins.values():
        assert [type(module) for module in twin.modules()] == [type(module) for module in model.modules()]
        assert_same_bits(step(twin, ids), expected)
    fused_norm.remove_fused_norm(twins["deepcopy"])
    assert is_fused(model.model.norm)
    loaded = type(model).from_pretrained(tmp_path).to(device)
    assert not is_fused(loaded.model.norm)
    assert relative(step(loaded, ids)[0], expected[0]) < 1e-5


def test_fused_classes_keep_what_others_go_by() -> None:
    model = build("llama", seed=0)
    stock = {path: type(module) for path, module in model.named_modules()}
    fused_norm.apply_fused_norm(model)
    for path, module in model.named_modules():
        kind, origin = type(module), stock[path]
        assert isinstance(module, origin)
        assert all(getattr(kind, n) == getattr(origin, n) for n in ("__name__", "__qualname__", "__module__"))
    assert not hasattr(model.model.norm, "kernel_layer_name")
    assert type(model.model.layers[0]) is type(model.model.layers[1])
    later = build("llama", seed=1)
    assert not any(is_fused(module) for module in later.modules())


def test_models_on_meta_and_without_a_head_are_fused() -> None:
    with torch.device("meta"):
        model = LlamaModel(tiny_config("llama"))
    assert fused_norm.apply_fused_norm(model).counts == {**sites("llama"), "loss": 0}
    assert model.norm.weight.is_meta


SHARED = {
    "norms": (
        {f"1.{path}": f"0.{path}" for path in ("self_attn.k_norm", "input_layernorm", "post_attention_layernorm")},
        counts(loss=1, norm=3, qk=3, rope=2, residual=2, mlp=2),
    ),
    "a layer": ({"1": "0"}, counts(loss=1, norm=3, qk=2, rope=1, residual=1, mlp=1)),
}
"""Paths of modules that share another module, relative to the layers, and the sites of a Qwen3 with these."""


@pytest.mark.parametrize("name", SHARED)
def test_shared_modules_have_one_row_and_are_fused_wherever_they_are(
    name: str, launches: list[str], device: str
) -> None:
    replaced, expected = SHARED[name]
    model = build("qwen3", seed=0, device=device)
    for path, shared in replaced.items():
        model.model.layers.set_submodule(path, model.model.layers.get_submodule(shared))
    stock = copy.deepcopy(model)
    before = snapshot(model)
    report = fused_norm.apply_fused_norm(model)
    assert report.counts == expected
    assert report.kept == ()
    assert_trains_as_stock(stock, model, tokens(device))
    assert (launches.count("qk_norm_rope"), launches.count("add_rms_norm")) == (2, 2)
    assert fused_norm.apply_fused_norm(model) == report
    fused_norm.remove_fused_norm(model)
    assert snapshot(model) == before


def test_layers_may_be_moved_after_patching() -> None:
    stock = build(tiny_config("gemma2", num_hidden_layers=3, layer_types=["full_attention"] * 3), seed=0)
    fused = fused_copy(stock)
    for model in (stock, fused):
        layers = model.model.layers
        layers.insert(0, layers.pop(2))
        layers.insert(1, copy.deepcopy(layers[0]))
        layers.append(layers[1])
        model.config.num_hidden_layers = 5
        model.config.layer_types = ["full_attention"] * 5
    assert_trains_as_stock(stock, fused, tokens(batch=1))
    report = fused_norm.apply_fused_norm(fused)
    assert report == fused_norm.apply_fused_norm(copy.deepcopy(stock))
    assert report.kept == ()
    assert_trains_as_stock(stock, fused, tokens(batch=1))


def test_norms_that_differ_are_not_computed_together(device: str) -> None:
    model = build(tiny_config("gemma3_text", num_hidden_layers=2), seed=0, device=device)
    first, second = model.model.layers
    first.post_attention_layernorm.eps = 0.5  # the norm of a branch, in front of pre_feedforward_layernorm
    second.post_feedforward_layernorm.eps = 0.5  # the norm of a branch that no norm follows
    second.self_attn.q_norm.eps = 0.5
    stock = copy.deepcopy(model)
    report = fused_norm.apply_fused_norm(model, strict=False)
    assert {(site.path, site.kind, site.reason, site.cause) for site in report.kept} == {
        (
            "model.layers.0.post_attention_layernorm",
            "post_norm",
            "it differs from the norm after the add in more than the weight",
            "unrecognised",
        ),
    }
    assert report.counts["rope"] == 2  # in the second layer without its norms
    assert_trains_as_stock(stock, model, tokens(device))


def test_rows_alike_but_for_an_index_at_the_end_of_their_paths_are_one_line() -> None:
    norms = nn.ModuleDict({"norms": nn.ModuleList([nn.RMSNorm(24, eps=1e-5) for _ in range(11)])})
    assert str(fused_norm.apply_fused_norm(norms)).splitlines()[-1].split() == ["11", "norm", "norms.*"]


def test_a_module_with_weight_bias_and_eps_is_no_norm() -> None:
    class Affine(nn.Module):
        def __init__(self, *, bias: bool) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(24)), 1e-5
            if bias:
                self.bias = nn.Parameter(torch.zeros(24))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    report = fused_norm.apply_fused_norm(nn.Sequential(Affine(bias=True), Affine(bias=False)), strict=False)
    assert [site.path for site in report.kept] == ["1"]


def test_an_unknown_norm_in_a_known_family_is_an_error_that_changes_nothing() -> None:
    model = build("llama", seed=0)

    class Odd(type(model.model.norm)):
        def forward(self, hidden_states):
            return super().forward(hidden_states) * 1.001

    model.model.layers[1].post_attention_layernorm.__class__ = Odd
    before = snapshot(model)
    with pytest.raises(
        FusedNormError, match=r"layers\.1\.post_attention_layernorm \(norm\): computes none of the known"
    ):
        fused_norm.apply_fused_norm(model)
    assert snapshot(model) == before
    report = fused_norm.apply_fused_norm(model, strict=False)
    assert report.counts == counts(norm=4, residual=1, rope=2, mlp=2, loss=1)
    assert {(kept.path, kept.cause) for kept in report.kept} == {
        ("model.layers.1.post_attention_layernorm", "unrecognised")
    }
    assert [kept.kind for kept in report.kept] == ["norm", "residual"]


def test_a_family_that_lost_a_site_is_an_error() -> None:
    model = build("llama", seed=0)
    del model.model.layers[0].post_attention_layernorm
    with pytest.raises(FusedNormError, match=r"model\.layers\.0 \(norm\): 1 of 2 found"):
        fused_norm.apply_fused_norm(model)
    assert not any(is_fused(module) for module in model.modules())
    assert fused_norm.apply_fused_norm(model, strict=False).counts["norm"] == 4


def test_a_norm_that_layers_share_is_lost_by_none_of_them() -> None:
    model = build("llama", seed=0)
    model.model.layers[1].input_layernorm = model.model.layers[0].input_layernorm
    assert fused_norm.apply_fused_norm(model).counts["norm"] == 4


def test_a_site_in_a_wrapper_is_found() -> None:
    model = build("llama", seed=0)
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp)
    assert fused_norm.apply_fused_norm(model).counts["mlp"] == 2


def test_a_layer_whose_source_cannot_be_read_is_an_error_or_kept() -> None:
    model = build("llama", seed=0)
    layer = model.model.layers[0]
    forward = inspect.unwrap(type(layer).forward)
    hidden = types.FunctionType(forward.__code__.replace(co_filename="<nowhere>"), forward.__globals__)
    sourceless = type("LlamaDecoderLayer", (type(layer),), {"forward": hidden})
    for each in model.model.layers:
        each.__class__ = sourceless
    with pytest.raises(FusedNormError, match="the source of its forward cannot be read"):
        fused_norm.apply_fused_norm(model)
    report = fused_norm.apply_fused_norm(model, strict=False)
    assert report.counts == counts(norm=5, rope=2, mlp=2, loss=1)
    assert [(site.path, site.kind) for site in report.kept] == [
        ("model.layers.0", "residual"),
        ("model.layers.1", "residual"),
    ]


def test_a_failure_in_the_middle_leaves_the_model_as_it_was() -> None:
    model = build("llama", seed=0)

    class Stubborn(type(model.model.norm)):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "__class__":
                raise RuntimeError("it stays what it is")
            super().__setattr__(name, value)

    model.model.norm.__class__ = Stubborn  # the last norm, before the layers
    for norm in (model.model.layers[0].input_layernorm, model.model.layers[1].post_attention_layernorm):
        norm.forward = norm.forward  # as transformers 4 leaves it
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="it stays what it is"):
        fused_norm.apply_fused_norm(model)
    assert snapshot(model) == before


def test_the_arguments_are_the_fields_of_the_options() -> None:
    _, *arguments = inspect.signature(fused_norm.apply_fused_norm).parameters.values()
    assert all(argument.kind is inspect.Parameter.KEYWORD_ONLY for argument in arguments)
    fields = dataclasses.fields(FuseOptions)
    assert [(argument.name, argument.default, argument.annotation) for argument in arguments] == [
        (field.name, field.default, field.type) for field in fields
    ]


@pytest.mark.parametrize(
    ("options", "left_out", "reason"),
    [
        ({"norms": False}, {"norm", "residual", "post_norm"}, "norms=False"),
        ({"residual": False}, {"residual", "post_norm"}, "residual=False"),
        ({"residual": False, "post_norm": True}, {"residual"}, "residual=False"),
        ({"post_norm": False}, {"post_norm"}, "post_norm=False"),
        ({"norms": False, "qk": False}, {"norm", "residual", "post_norm", "qk", "rope"}, None),
    ],
)
def test_an_option_leaves_out_what_depends_on_it(options: dict, left_out: set[str], reason: str | None) -> None:
    report = fused_norm.apply_fused_norm(build("gemma3_text", seed=0), **options)
    assert report.counts == sites("gemma3_text") | dict.fromkeys(left_out, 0)
    if reason is not None:
        assert {site.reason.removeprefix("its norm is kept: ") for site in report.kept} == {f"switched off: {reason}"}


def test_a_class_that_others_derived_from_a_fused_one_is_not_replaced() -> None:
    model = build(tiny_config("gemma3_text", num_hidden_layers=1), seed=0)
    assert fused_norm.apply_fused_norm(model, post_norm=False).counts["residual"] == 1
    (layer,) = model.model.layers
    sharded = type("FSDPLayer", (type(layer),), {})  # as fully_shard does
    layer.__class__ = sharded
    report = fused_norm.apply_fused_norm(model)
    assert type(layer) is sharded
    assert report.counts["residual"] == 1
    assert [(site.kind, site.cause) for site in report.kept] == [("post_norm", "overridden")] * 2
    assert all("built on its layer" in site.reason for site in report.kept)
    before = snapshot(model)
    with pytest.raises(FusedNormError, match="derived from a fused class afterwards"):
        fused_norm.apply_fused_norm(model, residual=False)
    assert snapshot(model) == before


@pytest.mark.parametrize("place", ["norm", "layers.0.self_attn"])
def test_a_forward_put_on_a_class_runs_below_what_others_derived_from_the_fused_one(place: str, monkeypatch) -> None:
    stock = build("qwen3", seed=0)
    fused = copy.deepcopy(stock)
    fused_norm.apply_fused_norm(fused)
    module = fused.model.get_submodule(place)
    module.__class__ = type("FSDPModule", (type(module),), {})
    replaced = type(stock.model.get_submodule(place))
    original = replaced.forward

    def theirs(self: nn.Module, hidden_states: torch.Tensor, **kwargs: object) -> object:
        return original(self, hidden_states * 1.5, **kwargs)

    monkeypatch.setattr(replaced, "forward", theirs)
    assert_trains_as_stock(stock, fused, tokens())
    before = type(module)
    report = fused_norm.apply_fused_norm(fused, strict=False)
    assert type(module) is before
    assert {site.cause for site in report.kept} == {"overridden"}
    assert f"model.{place}" in {site.path for site in report.kept}
    assert_trains_as_stock(stock, fused, tokens())


PRINTED = {
    "llama": {
        "LlamaForCausalLM": "head+loss",
        "LlamaDecoderLayer": "add+norm, shared_inputs",
        "LlamaAttention": "rope, shared_inputs",
        "LlamaMLP": "gate (silu), shared_inputs",
        "LlamaRMSNorm": "(72,), eps=1e-05, fused: norm (llama)",
        "Linear": "in_features=72, out_features=264, bias=False, fused: head of a fused loss",
    },
    "gemma2": {
        "Gemma2ForCausalLM": "head+loss",
        "Gemma2DecoderLayer": "norm+add+norm, norm+add, shared_inputs, recompute",
        "Gemma2Attention": "rope, shared_inputs",
        "Gemma2MLP": "gate (gelu_tanh), shared_inputs",
        "Gemma2RMSNorm": "(72,), eps=1e-06, fused: norm (gemma)",
        "Linear": "in_features=72, out_features=264, bias=False, fused: head of a fused loss",
    },
}
"""What a printed model shows of each class that has something fused; ``Linear`` is the head."""


@pytest.mark.parametrize("model_type", PRINTED)
def test_a_printed_model_shows_what_each_fused_module_is_after_what_stock_shows(model_type: str) -> None:
    model = build(model_type, seed=0)
    stock = str(model)
    fused_norm.apply_fused_norm(model, recompute=model_type == "gemma2")
    lines = [line.strip() for line in str(model).splitlines()]
    shown = {}
    for before, line in zip(["", *lines], lines, strict=False):
        if line.startswith("fused: "):
            shown[before.split()[-1].rstrip("(")] = line.removeprefix("fused: ")
        elif "fused: " in line:
            name, _, what = line.split(": ", 1)[1].removesuffix(")").partition("(")
            shown[name] = what
    assert shown == PRINTED[model_type]
    assert re.sub(r"^ *fused: .*\n|, fused: [^()]*(\([^()]*\))?(?=\)$)", "", str(model), flags=re.MULTILINE) == stock
    fused_norm.remove_fused_norm(model)
    assert str(model) == stock
