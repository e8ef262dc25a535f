"""Norms that quantise for the float8 linears which read them: the bits of separate casts, in every way of training."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fused_norm
from fused_norm import FusedNormError
from fused_norm.kernels.norm_add import NORM_ADD
from fused_norm.kernels.norm_add_norm import NORM_ADD_NORM
from fused_norm.kernels.operator import norm_spec
from fused_norm.kernels.rms_norm import RMS_NORM
from fused_norm.kernels.triton.devices import INTERPRETED
from fused_norm.model_configs import build, tiny_config
from fused_norm.patcher import float8_linears, float8_survey
from fused_norm.patcher.class_swap import float8_reader_class
from fused_norm.patcher.float8_linears import Float8Reader
from fused_norm.patcher.quantized_activation import NormResult, QuantizedActivation, Remake

from .models import assert_same_bits, snapshot, step, tokens
from .ranks import on_two_ranks

float8 = pytest.importorskip("torchao.float8")
from torchao.float8.config import CastConfig, Float8LinearConfig, ScalingGranularity, ScalingType  # noqa: E402
from torchao.float8.float8_linear import Float8Linear  # noqa: E402

slow = partial(pytest.param, marks=pytest.mark.slow)
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
PER_LAYER = ("input_layernorm", "post_attention_layernorm")
FEW = tokens("cuda" if torch.cuda.is_available() else "cpu", batch=1, length=16)  # products of FP8 want multiples of 16


def config_of(recipe: str, emulate: bool = False) -> Float8LinearConfig:
    return replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)


def converted(
    model_type: str,
    device: str,
    recipe: str = "tensorwise",
    *,
    emulate: bool = False,
    layers: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    **overrides: Any,
) -> Any:
    """A tiny model whose linears, all but the head, are torchao's; their sizes are multiples of 16, as GPUs want."""
    overrides |= {"num_hidden_layers": layers, "hidden_size": 64, "intermediate_size": 112, "head_dim": 16}
    if "layer_types" in tiny_config(model_type).to_dict():
        overrides["layer_types"] = tiny_config(model_type).layer_types[:layers]
    model = build(tiny_config(model_type, **overrides), seed=0, dtype=dtype, device=device)
    float8.convert_to_float8_training(model, config=config_of(recipe, emulate), module_filter_fn=but_for_the_head)
    return model


def but_for_the_head(module: nn.Module, path: str) -> bool:
    return "lm_head" not in path


def pair(*args: Any, **options: Any) -> tuple[Any, Any]:
    """Two models with fused norms and float8 linears: linears of the first cast, norms of the second quantise."""
    separate = converted(*args, **options)
    quantising = copy.deepcopy(separate)
    fused_norm.apply_fused_norm(separate, strict=False)
    fused_norm.apply_fused_norm(quantising, fp8="auto", strict=False)
    return separate, quantising


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> list[QuantizedActivation]:
    """What norms have quantised, none of which is held."""
    return count_quantised(monkeypatch.setattr)


def count_quantised(set_attribute: Callable[[Any, str, Any], object]) -> list[Any]:
    calls: list[Any] = []
    make = float8_linears.quantized_activation

    def counted(result: NormResult, *rest: Any) -> Tensor:
        calls.append(result.remake.spec)
        return make(result, *rest)

    set_attribute(float8_linears, "quantized_activation", counted)
    return calls


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The roles of the tensors that torchao casts."""
    from torchao.float8 import float8_linear

    calls: list[str] = []
    cast = float8_linear.hp_tensor_to_float8_dynamic

    def counted(*args: Any, **named: Any) -> Any:
        calls.append(named["gemm_input_role"].value)
        return cast(*args, **named)

    monkeypatch.setattr(float8_linear, "hp_tensor_to_float8_dynamic", counted)
    return calls


# ---- The same bits ----


@pytest.mark.parametrize(
    ("model_type", "recipe", "emulate"),
    [
        ("llama", "tensorwise", False),
        slow("llama", "rowwise_with_gw_hp", False),
        ("llama", "rowwise", False),
        slow("qwen3", "rowwise", True),
        slow("qwen3", "tensorwise", False),
        slow("qwen3", "rowwise", False),
        slow("qwen3", "rowwise_with_gw_hp", True),
        slow("granite", "tensorwise", False),
        slow("gemma", "rowwise", False),
    ],
)
def test_a_model_has_the_bits_of_one_whose_linears_cast(
    model_type: str, recipe: str, emulate: bool, device: str, quantised: list[Any]
) -> None:
    separate, quantising = pair(model_type, device, recipe, emulate=emulate)
    expected = step(separate, FEW)
    assert not quantised
    assert_same_bits(expected, step(quantising, FEW))
    assert len(quantised) == 2


def add_then_norm(norm: Any, residual: Any, x: Any, inner: Any) -> tuple[Tensor, Tensor]:
    s = NORM_ADD(norm_spec("gemma", True, 1e-6), x, residual, inner.weight)
    return RMS_NORM(norm_spec("gemma", True, 1e-6), s, norm.weight, None), s


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_behind_a_normed_branch_the_sum_is_made_first(
    recipe: str, device: str, quantised: list[Any], launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    separate, quantising = pair("gemma3_text", device, recipe)
    found = step(quantising, FEW)
    assert len(quantised) == 2
    assert NORM_ADD_NORM.name not in launches
    monkeypatch.setattr("fused_norm.patcher.fused_block._norm_add_norm", add_then_norm)
    assert_same_bits(step(separate, FEW), found)


@pytest.mark.parametrize("recipe", ["rowwise", slow("tensorwise"), slow("rowwise_with_gw_hp")])
def test_the_input_is_cast_by_the_norm_alone(recipe: str, device: str, casts: list[str]) -> None:
    separate, quantising = pair("llama", device, recipe)
    casts.clear()  # those of a trial, at the first patching
    loss = loss_of(separate, FEW)
    assert casts.count("input") == 7
    loss.backward()
    assert casts.count("input") == (7 if recipe == "rowwise_with_gw_hp" else 14)
    others = len(casts) - casts.count("input")
    casts.clear()
    loss = loss_of(quantising, FEW)
    assert casts.count("input") == 2  # o_proj and down_proj
    loss.backward()
    assert casts.count("input") == (2 if recipe == "rowwise_with_gw_hp" else 4)
    assert len(casts) - casts.count("input") == others


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_of_other_dtypes_give_the_same_bits(dtype: torch.dtype, device: str, quantised: list[Any]) -> None:
    separate, quantising = pair("llama", device, "rowwise", dtype=dtype, emulate=True)
    assert_same_bits(step(separate, FEW), step(quantising, FEW))
    assert len(quantised) == 2


@pytest.mark.slow
def test_biases_frozen_weights_and_rows_that_are_padded_give_the_same_bits(device: str, quantised: list[Any]) -> None:
    separate, quantising = pair("llama", device, "tensorwise", attention_bias=True, mlp_bias=True)
    for model in (separate, quantising):
        model.model.layers[0].input_layernorm.weight.requires_grad_(False)
        model.model.layers[0].self_attn.k_proj.weight.requires_grad_(False)
        for module in model.modules():
            if isinstance(module, Float8Linear):
                module.config = replace(module.config, pad_inner_dim=True)
                config = [one._replace(pad_inner_dim=True) for one in module.linear_mm_config]
                module.linear_mm_config = type(module.linear_mm_config)(*config)
    ids = FEW[:, :13]
    assert_same_bits(step(separate, ids), step(quantising, ids))
    assert len(quantised) == 2


# ---- Ways of training ----


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_give_the_same_bits(
    reentrant: bool, recipe: str, device: str, quantised: list[Any]
) -> None:
    separate, quantising = pair("llama", device, recipe)
    for model in (separate, quantising):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same_bits(step(separate, FEW), step(quantising, FEW))
    assert len(quantised) == (2 if reentrant else 4)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpointed_attention_gives_the_same_bits(recipe: str, device: str, quantised: list[Any]) -> None:
    results = []
    for model in pair("llama", device, recipe):
        attention = model.model.layers[0].self_attn
        layer = model.model.layers[0]

        class Checkpointed(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, hidden_states: Tensor, **named: Any) -> Any:
                return checkpoint(partial(self.inner, **named), hidden_states, use_reentrant=False)

        layer.self_attn = Checkpointed(attention)
        results.append(step(model, FEW))
    assert_same_bits(*results)
    assert len(quantised) == 2


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_accumulated_offloaded_and_recomputed_steps_give_the_same_bits(
    recipe: str, device: str, quantised: list[Any]
) -> None:
    separate, quantising = pair("qwen3", device, recipe)
    other = FEW.flip(1)
    sums = []
    for model in (separate, quantising):
        for ids in (FEW, other):
            loss_of(model, ids).backward()
        sums.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    assert all(torch.equal(sums[0][name], sums[1][name]) for name in sums[0])
    expected = step(separate, FEW)
    quantised.clear()
    with torch.autograd.graph.save_on_cpu():
        assert_same_bits(expected, step(quantising, FEW))
    fused_norm.apply_fused_norm(quantising, fp8="auto", recompute=True)
    assert_same_bits(expected, step(quantising, FEW))
    assert len(quantised) == 4


@pytest.mark.slow
def test_a_second_backward_of_a_kept_graph_gives_the_same_bits(device: str) -> None:
    for recipe in RECIPES:
        _, model = pair("llama", device, recipe)
        loss = loss_of(model, FEW)
        weight = model.model.layers[0].self_attn.k_proj.weight
        (first,) = torch.autograd.grad(loss, weight, retain_graph=True)  # k alone reads what is kept
        loss.backward(retain_graph=True)
        assert torch.equal(weight.grad, first)
        loss.backward()
        assert torch.equal(weight.grad, first * 2)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_models_have_one_graph_and_leave_the_casts_to_the_compiler(
    recipe: str, device: str, quantised: list[Any]
) -> None:
    results = []
    for model in pair("llama", device, recipe):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        compiled(input_ids=FEW, labels=FEW, use_cache=False).loss.backward()
        results.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(*both) for both in zip(*results, strict=True))
    assert not quantised


@pytest.mark.slow
def test_a_compiled_attention_gets_the_result_of_an_eager_norm(device: str) -> None:
    results = []
    for model in pair("llama", device, "rowwise"):
        torch._dynamo.reset()
        layer = model.model.layers[0]
        layer.self_attn = torch.compile(layer.self_attn, backend="aot_eager")
        loss_of(model, FEW).backward()
        results.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(*both) for both in zip(*results, strict=True))


# ---- Memory ----


def kept_bytes(graph: Any, besides: list[Tensor]) -> int:
    """The bytes of all memory that autograd keeps behind a node, parameters and those ``besides`` left out."""
    held: dict[int, int] = {}
    nodes, seen = [graph], {None}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        saved: list[Any] = [getattr(node, name) for name in dir(node) if name.startswith("_saved")]
        saved += getattr(node, "saved_tensors", ())
        for one in saved:
            if isinstance(one, Tensor) and not isinstance(one, nn.Parameter) and one.layout is torch.strided:
                held[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    for one in besides:
        held.pop(one.untyped_storage().data_ptr(), None)
    return sum(held.values())


@pytest.mark.parametrize(("recipe", "bytes_an_element"), [("rowwise", 0), ("tensorwise", 1)])
def test_linears_keep_no_16_bit_input(recipe: str, bytes_an_element: int, device: str) -> None:
    width = 256
    norm = fused_norm_of(width, device)
    x = torch.randn(64, width, dtype=torch.bfloat16, device=device, requires_grad=True)
    linears = [linear_of(width, 16, recipe, device) for _ in range(3)]
    attach(norm, linears)
    outputs = sum(linear(read) for read in [norm(x)] for linear in linears)
    held = kept_bytes(outputs.grad_fn, [linear.weight for linear in linears])
    expected = x.numel() * (x.element_size() + bytes_an_element)  # x is kept for the backward of the norm
    assert expected <= held <= expected + 64 * 16  # rstd and scales


def test_the_result_is_freed_with_its_last_reader_s_backward(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    columns = Remake.columns

    def noted(self: Remake, *given: Any) -> Any:
        codes = columns(self, *given)
        made.append(weakref.ref(codes.q.untyped_storage()))
        return codes

    monkeypatch.setattr(Remake, "columns", noted)
    norm = fused_norm_of(64, device)
    linears = [linear_of(64, 16, "rowwise", device) for _ in range(3)]
    attach(norm, linears)
    x = torch.randn(16, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    read = norm(x)
    result = weakref.ref(read)
    outputs = [linear(read) for linear in linears]
    del read
    total = sum(outputs)
    total.backward(torch.ones_like(total))
    gc.collect()
    assert len(made) == 1
    assert result() is None


@pytest.mark.parametrize("recipe", RECIPES)
def test_hooks_on_what_is_saved_see_plain_tensors_with_memory(recipe: str, device: str) -> None:
    norm = fused_norm_of(64, device)
    linears = [linear_of(64, 16, recipe, device) for _ in range(2)]
    attach(norm, linears)
    x = torch.randn(16, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    seen: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        assert type(tensor) in (Tensor, nn.Parameter)
        seen.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        read = norm(x)
        total = sum(linear(read) for linear in linears)
    assert type(read) is QuantizedActivation
    assert len(seen) > 4
    total.sum().backward()
    assert x.grad is not None


def fused_norm_of(width: int, device: str) -> Any:
    model = build(tiny_config("llama", hidden_size=width, num_hidden_layers=1), seed=0, dtype=torch.bfloat16)
    fused_norm.apply_fused_norm(model)
    return model.model.layers[0].input_layernorm.to(device)


def linear_of(width: int, outputs: int, recipe: str, device: str) -> Any:
    linear = nn.Linear(width, outputs, bias=False, dtype=torch.bfloat16, device=device)
    return Float8Linear.from_float(linear, config_of(recipe))


def attach(norm: Any, linears: list[Any]) -> nn.Module:
    """Let the norm quantise for these linears, as ``apply_fused_norm`` does for those that it finds."""
    holder = nn.Module()
    named = []
    for index, linear in enumerate(linears):
        cast = float8_survey.input_cast_of(linear)
        linear.__class__ = float8_reader_class(Float8Linear, cast)
        setattr(holder, f"linear_{index}", linear)
        named.append((holder, f"linear_{index}", linear))
    float8_survey.ReadersChange(norm, float8_linears.NormReaders(cast, tuple(named), ())).make()
    return holder


# ---- What keeps the casts apart ----


def hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda *_: None)


def replaced_forward(module: nn.Module) -> None:
    module.forward = partial(type(module).forward, module)


LATER: dict[str, Callable[[Any], Any]] = {
    "a hook on the norm": lambda layer: hook(layer.input_layernorm),
    "a hook on the attention": lambda layer: hook(layer.self_attn),
    "a hook on a linear": lambda layer: hook(layer.self_attn.k_proj),
    "a forward of others on a linear": lambda layer: replaced_forward(layer.self_attn.v_proj),
    "another linear": lambda layer: setattr(layer.self_attn, "q_proj", copy.deepcopy(layer.self_attn.q_proj)),
    "a compiled linear": lambda layer: layer.self_attn.q_proj.compile(backend="eager"),
}


@pytest.mark.parametrize("change", LATER)
def test_what_others_put_between_norm_and_linears_keeps_the_casts_apart(
    change: str, device: str, quantised: list[Any]
) -> None:
    _, model = pair("llama", device, "rowwise")
    layer = model.model.layers[0]
    LATER[change](layer)
    hidden = torch.randn(1, 16, model.config.hidden_size, dtype=torch.bfloat16, device=device, requires_grad=True)
    assert type(layer.input_layernorm(hidden)) is Tensor
    assert not quantised
    assert type(layer.post_attention_layernorm(hidden)) is QuantizedActivation


def test_calls_without_gradient_and_of_other_dtypes_keep_the_casts_apart(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, model = pair("llama", device, "rowwise")
    norm = model.model.layers[0].input_layernorm
    hidden = torch.randn(1, 16, model.config.hidden_size, dtype=torch.bfloat16, device=device, requires_grad=True)
    assert type(norm(hidden)) is QuantizedActivation
    with torch.no_grad():
        assert type(norm(hidden)) is Tensor
    float8_linears._explain_autocast.cache_clear()
    with torch.autocast("cuda", torch.float16) if torch.cuda.is_available() else cuda_autocast(torch.float16):
        assert type(norm(hidden)) is Tensor
        assert type(norm(hidden)) is Tensor
    assert [record.message for record in caplog.records if "autocast" in record.message] == [
        "fp8: under autocast norms of another dtype than autocast's leave the casts to their float8 linears"
    ]
    caplog.clear()
    with fused_norm.disabled():
        assert type(norm(hidden)) is Tensor
    strided = torch.randn(1, model.config.hidden_size, 16, dtype=torch.bfloat16, device=device).mT.requires_grad_()
    assert type(norm(strided)) is Tensor


class cuda_autocast:  # noqa: N801 - reads as a function
    """Autocast of a GPU, which torchao asks for, where there is none."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled("cuda", self.before[0])
        torch.set_autocast_dtype("cuda", self.before[1])


class AlsoElsewhere(nn.Module):
    """A linear, and a path round it that nobody was told of."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x.sum(-1, keepdim=True) + 2 * x[..., :1]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_reader_that_nobody_knows_of_gets_the_result_itself(
    recipe: str, device: str, quantised: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = pair("llama", device, recipe)
    monkeypatch.setattr(float8_linears, "why_not_read", lambda *_: None)
    for model in models:
        attention = model.model.layers[0].self_attn
        attention.v_proj = AlsoElsewhere(attention.v_proj)
    assert_same_bits(*(step(model, FEW) for model in models))
    assert quantised


@pytest.mark.parametrize("reads_another_norm", [False, True])
@pytest.mark.parametrize("other", ["tensorwise", "rowwise_with_gw_hp"])
def test_a_float8_linear_of_another_recipe_multiplies_what_it_would_have_cast(
    other: str, reads_another_norm: bool, device: str, quantised: list[Any]
) -> None:
    norm = fused_norm_of(64, device)
    stranger, reader = (linear_of(64, 32, recipe, device) for recipe in (other, "rowwise"))
    twin = copy.deepcopy(stranger)
    x = torch.randn(16, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    expected = twin(norm(x))
    expected.sum().backward()
    gradient, x.grad = x.grad, None
    attach(norm, [reader])
    if reads_another_norm:
        stranger.__class__ = float8_reader_class(Float8Linear, float8_survey.input_cast_of(stranger))
    found = stranger(norm(x))
    found.sum().backward()
    assert quantised
    assert torch.equal(found, expected)
    assert torch.equal(stranger.weight.grad, twin.weight.grad)
    assert torch.equal(x.grad, gradient)


# ---- Reports ----


def rows(report: fused_norm.PatchReport) -> dict[str, str | None]:
    """The reason of every row on FP8, by path."""
    assert report.fp8 is not None
    return {row.path: row.reason for row in report.fp8}


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_report_says_which_norms_quantise_for_whom(model_type: str, recipe: str) -> None:
    model = converted(model_type, "cpu", recipe)
    report = fused_norm.apply_fused_norm(model, fp8="auto", strict=False)
    before_mlp = "pre_feedforward_layernorm" if model_type == "gemma3_text" else "post_attention_layernorm"
    layer = "model.layers.0"
    assert report.fp8 is not None
    found = {row.path: row.readers for row in report.fp8}
    assert found == {
        f"{layer}.input_layernorm": tuple(f"{layer}.self_attn.{name}_proj" for name in "qkv"),
        f"{layer}.{before_mlp}": (f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"),
    }
    assert {row.recipe for row in report.fp8} == {recipe}
    assert {row.reason for row in report.fp8} == {None}
    assert "fp8 codes from 2 norms" in report.summary()
    assert f"{recipe} codes" in str(report)
    assert f'"recipe": "{recipe}"' in report.to_json()


def test_without_the_option_nothing_is_said_and_nothing_quantises() -> None:
    model = converted("llama", "cpu")
    report = fused_norm.apply_fused_norm(model)
    assert report.fp8 is None
    assert "fp8" not in str(report)
    assert "fp8" not in report.to_json()
    assert not any(isinstance(module, Float8Reader) for module in model.modules())


def put(path: str, make: Callable[[Any], Any]) -> Callable[[Any], None]:
    """A change of a layer: what is at ``path`` is replaced by ``make`` of it."""

    def change(layer: Any) -> None:
        holder, _, name = path.rpartition(".")
        setattr(layer.get_submodule(holder), name, make(layer.get_submodule(path)))

    return change


def with_config(**changes: Any) -> Callable[[Any], Any]:
    def make(linear: Any) -> Any:
        linear.config = replace(linear.config, **changes)
        return linear

    return make


class Owned(Float8Linear):
    """A float8 linear with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input) * 2


def owned(linear: Any) -> Any:
    linear.__class__ = Owned
    return linear


def hooked(module: nn.Module) -> nn.Module:
    hook(module)
    return module


WHOLE = CastConfig(scaling_granularity=ScalingGranularity.TENSORWISE)
BY_ROW = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE)
OFF = CastConfig(scaling_type=ScalingType.DISABLED)
KEPT = {
    "no float8 linear": (
        put("self_attn.k_proj", lambda linear: nn.Linear(linear.in_features, linear.out_features, bias=False)),
        "its reader k_proj is a Linear, no float8 linear",
    ),
    "several casts": (
        put("self_attn.q_proj", with_config(round_scales_to_power_of_2=True)),
        "its readers cast their inputs in several ways",
    ),
    "no cast": (
        put(
            "self_attn.q_proj",
            with_config(
                cast_config_input=OFF,
                cast_config_weight=OFF,
                cast_config_input_for_grad_weight=None,
                cast_config_weight_for_grad_input=None,
                cast_config_grad_output=OFF,
                cast_config_grad_output_for_grad_weight=None,
            ),
        ),
        "q_proj: its input is cast in an unknown way",
    ),
    "mixed casts": (
        put("self_attn.q_proj", with_config(cast_config_input_for_grad_weight=BY_ROW)),
        "q_proj: its input is cast in an unknown way for the gradient of the weight",
    ),
    "emulation": (
        put("self_attn.q_proj", with_config(emulate=True)),
        "q_proj: it emulates its products, and divides by scales that are no powers of two",
    ),
    "a forward of its own": (put("self_attn.v_proj", owned), "v_proj is a Owned with a forward of its own"),
    "a hook on a linear": (put("self_attn.v_proj", hooked), "hooks or other code stand on v_proj"),
    "a hook on the attention": (
        put("self_attn", hooked),
        "hooks or other code stand on the LlamaAttention that takes its result",
    ),
    "a hook on the norm": (put("input_layernorm", hooked), "hooks or other code stand on its norm"),
    "a foreign attention": (
        put("self_attn", lambda attention: nn.Sequential(attention)),
        "the source of its forward",
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_norm_that_does_not_quantise_says_why(name: str) -> None:
    change, reason = KEPT[name]
    model = converted("llama", "cpu")
    change(model.model.layers[0])
    report = fused_norm.apply_fused_norm(model, fp8="auto", strict=False)
    found = rows(report)
    if name == "a foreign attention":
        assert found["model.layers.0.input_layernorm"] is not None
    else:
        assert (found["model.layers.0.input_layernorm"] or "").startswith(reason)
    assert found["model.layers.0.post_attention_layernorm"] is None
    assert not any(isinstance(one, Float8Reader) for one in model.model.layers[0].self_attn.modules())


def test_a_norm_that_is_kept_does_not_quantise() -> None:
    model = converted("llama", "cpu")
    report = fused_norm.apply_fused_norm(model, fp8="auto", modules="*.post_attention_layernorm", strict=False)
    assert rows(report) == {
        "model.layers.0.input_layernorm": "the norm is kept: not selected by modules",
        "model.layers.0.post_attention_layernorm": None,
    }


@pytest.mark.slow
def test_experts_read_a_result_in_other_ways() -> None:
    model = converted("qwen3_moe", "cpu", layers=2)
    report = fused_norm.apply_fused_norm(model, fp8="auto", strict=False)
    found = {path.removeprefix("model.layers.") for path, reason in rows(report).items() if reason is None}
    assert found == {"0.input_layernorm", "0.post_attention_layernorm", "1.input_layernorm"}  # the first MLP is dense


def test_without_float8_linears_there_is_one_row_that_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = build(tiny_config("llama", num_hidden_layers=1), seed=0)
    with caplog.at_level(logging.WARNING, "fused_norm"):
        report = fused_norm.apply_fused_norm(model, fp8="auto", strict=False)
    reason = "the model has no float8 linears: convert it by torchao's convert_to_float8_training first"
    assert rows(report) == {"": reason}
    assert caplog.messages == [f"fp8: {reason}"]
    assert report.counts["norm"] == 3


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            ModuleNotFoundError("No module named 'torchao'", name="torchao"),
            "torchao is not installed, which has the float8 linears: pip install torchao",
        ),
        (ImportError("no such name"), "the installed torchao cannot be used: ImportError: no such name"),
    ],
)
def test_without_a_torchao_that_can_be_used_there_is_one_row_that_says_so(
    error: ImportError, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing() -> None:
        raise error

    monkeypatch.setattr(float8_survey, "_float8_linear", failing)
    model = build(tiny_config("llama", num_hidden_layers=1), seed=0)
    report = fused_norm.apply_fused_norm(model, fp8="auto", strict=False)
    assert rows(report) == {"": reason}
    assert report.counts["norm"] == 3


@pytest.mark.slow
def test_torchao_is_imported_for_the_option_alone_and_may_be_missing() -> None:
    code = """
import sys
import fused_norm
from fused_norm.model_configs import build
model = build("llama", seed=0)
for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:  # transformers may have asked for it
    del sys.modules[name]
fused_norm.apply_fused_norm(model)
fused_norm.remove_fused_norm(model)
assert not any(name.partition(".")[0] == "torchao" for name in sys.modules)

class Absent:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] == "torchao":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
(row,) = fused_norm.apply_fused_norm(model, fp8="auto").fp8
assert row.reason == "torchao is not installed, which has the float8 linears: pip install torchao", row
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_torchao_that_computes_something_else_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    backward = matmul_with_hp_or_float8_args.backward

    def other(ctx: Any, gradient: Tensor) -> Any:
        dx, dw, *rest = backward(ctx, gradient)
        return dx, dw if isinstance(ctx, torch.autograd.function.BackwardCFunction) else dw * 2, *rest

    float8_survey.computes_alike.cache_clear()
    monkeypatch.setattr(matmul_with_hp_or_float8_args, "backward", staticmethod(other))
    try:
        report = fused_norm.apply_fused_norm(converted("llama", "cpu"), fp8="auto", strict=False)
    finally:
        float8_survey.computes_alike.cache_clear()
    assert set(rows(report).values()) == {"its float8 linears do not compute the same from codes"}


@pytest.mark.parametrize("value", ["rowwise", True, 1])
def test_the_option_is_auto_or_none(value: Any) -> None:
    with pytest.raises(TypeError, match="fp8 must be 'auto' or None"):
        fused_norm.FuseOptions(fp8=value)


# ---- Applied, applied again, undone ----


def test_it_is_undone_by_removal_and_by_applying_without(device: str) -> None:
    model = converted("llama", device)
    before = snapshot(model)
    fused_norm.apply_fused_norm(model)
    without = snapshot(model)
    fused_norm.apply_fused_norm(model, fp8="auto")
    quantising = snapshot(model)
    assert quantising != without
    fused_norm.apply_fused_norm(model, fp8="auto")
    assert snapshot(model) == quantising
    fused_norm.apply_fused_norm(model)
    assert snapshot(model) == without
    fused_norm.apply_fused_norm(model, fp8="auto")
    assert fused_norm.remove_fused_norm(model) == 3 + 2 + 1 + 5  # norms, blocks, layer and linears
    assert snapshot(model) == before
    assert not any(isinstance(module, Float8Reader) for module in model.modules())


def test_a_model_that_was_patched_first_and_converted_then_is_patched_again(device: str, quantised: list[Any]) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 112, "head_dim": 16}
    model = build(tiny_config("llama", num_hidden_layers=1, **sizes), seed=0, dtype=torch.bfloat16, device=device)
    first = fused_norm.apply_fused_norm(model, fp8="auto", strict=False)
    assert list(rows(first)) == [""]
    float8.convert_to_float8_training(model, module_filter_fn=but_for_the_head)
    second = fused_norm.apply_fused_norm(model, fp8="auto")
    assert set(rows(second).values()) == {None}
    loss_of(model, FEW)
    assert len(quantised) == 2
    float8.convert_to_float8_training(model, config=config_of("rowwise"), module_filter_fn=but_for_the_head)
    third = fused_norm.apply_fused_norm(model, fp8="auto")
    assert {row.recipe for row in third.fp8 or ()} == {"rowwise"}


def test_a_failure_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted("llama", "cpu")
    before = snapshot(model)

    def failing(self: Any) -> Any:
        raise FusedNormError("refused")

    monkeypatch.setattr(float8_survey.ReadersChange, "make", failing)
    with pytest.raises(FusedNormError, match="refused"):
        fused_norm.apply_fused_norm(model, fp8="auto")
    assert snapshot(model) == before


def test_linears_keep_their_names_parameters_and_classes() -> None:
    model = converted("llama", "cpu")
    state = model.state_dict()
    fused_norm.apply_fused_norm(model, fp8="auto")
    linear = model.model.layers[0].self_attn.q_proj
    assert isinstance(linear, Float8Linear)
    assert isinstance(linear, Float8Reader)
    assert (type(linear).__name__, type(linear).__module__) == (Float8Linear.__name__, Float8Linear.__module__)
    assert "i:dyn_ten_e4m3" in repr(linear)
    assert model.state_dict().keys() == state.keys()


@pytest.mark.slow
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_quantise_for_their_own_linears(copied: Callable[[Any], Any], device: str, quantised: list[Any]) -> None:
    _, model = pair("llama", device, "rowwise")
    other = copied(model)
    for norm in PER_LAYER:
        kept = getattr(other.model.layers[0], norm)._fused_norm_readers
        assert all(getattr(holder, name) is linear for holder, name, linear in kept.linears)
        assert all(any(linear is one for one in other.modules()) for _, _, linear in kept.linears)
    expected = step(model, FEW)
    quantised.clear()
    assert_same_bits(expected, step(other, FEW))
    assert len(quantised) == 2


def test_a_model_is_freed_without_the_garbage_collector() -> None:
    _, model = pair("llama", "cpu", "rowwise")
    alive = weakref.ref(model.model.layers[0])
    gc.disable()
    try:
        del model
        gone = alive() is None
    finally:
        gc.enable()
    assert gone


# ---- Several processes ----


def train(model: Any, ids: Tensor) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        for part in ids.split(16, dim=1):  # accumulated
            loss = loss_of(model, part)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def sharded(fp8: Any, recipe: str, rank: int, ranks: int) -> list[Tensor]:
    """The losses, and at the end the parameters, of a rank of FSDP2 with its own batches."""
    mesh = init_device_mesh("cpu", (ranks,))
    model = converted("llama", "cpu", recipe, layers=2)
    fused_norm.apply_fused_norm(model, fp8=fp8)
    fully_shard(model.model.layers[0].post_attention_layernorm, mesh=mesh)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ids = torch.randint(0, 256, (1, 32), generator=torch.Generator().manual_seed(rank))
    losses = train(model, ids)
    return [*losses, *(parameter.full_tensor().detach() for parameter in model.parameters())]


def replicated(fp8: Any, recipe: str, rank: int, ranks: int) -> list[Tensor]:
    """The same of DDP."""
    model = converted("qwen3", "cpu", recipe)
    fused_norm.apply_fused_norm(model, fp8=fp8, strict=False)
    ids = torch.randint(0, 256, (1, 32), generator=torch.Generator().manual_seed(rank))
    losses = train(DistributedDataParallel(model), ids)
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


def assert_ranks_have_the_same_bits(rank: int, ranks: int) -> None:
    calls = count_quantised(setattr)
    for run, count, recipes in ((sharded, 3, ("tensorwise", "rowwise")), (replicated, 2, ("rowwise_with_gw_hp",))):
        for recipe in recipes:
            separate = run(None, recipe, rank, ranks)
            assert not calls
            quantising = run("auto", recipe, rank, ranks)
            assert len(calls) == 4 * count, (run.__name__, len(calls))
            assert all(torch.equal(*both) for both in zip(separate, quantising, strict=True)), (run.__name__, recipe)
            calls.clear()


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="ranks are on CPUs, where kernels run in the interpreter alone")
def test_two_ranks_of_fsdp2_and_ddp_have_the_bits_that_they_have_without(tmp_path: Path) -> None:
    on_two_ranks(assert_ranks_have_the_same_bits, tmp_path)
