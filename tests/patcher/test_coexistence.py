"""Other code on the same model: its modules are left alone, and modules with its hooks are never skipped."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.overrides import TorchFunctionMode
from transformers.models.llama.modeling_llama import LlamaMLP

import fused_norm
from fused_norm import FusedNormError
from fused_norm.model_configs import build

from .models import (
    assert_gradients_near,
    assert_near,
    assert_same,
    assert_trains_as_stock,
    counts,
    fused_copy,
    gradients_of,
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
from .ranks import on_two_ranks


def scaled(original: Callable) -> Callable:
    """Return a forward that other code could replace ``original`` by; it takes an additional argument."""

    def theirs(self, hidden_states, *args, factor=1.5, **kwargs):
        output = original(self, hidden_states, *args, **kwargs)
        return (output[0] * factor, *output[1:]) if isinstance(output, tuple) else output * factor

    return theirs


REPLACED = {
    "input_layernorm": counts(rope=2, mlp=2, loss=1),
    "self_attn": counts(norm=5, qk=4, residual=2, mlp=2, loss=1),
    "mlp": counts(norm=5, qk=4, rope=2, residual=2, loss=1),
    "": counts(norm=5, qk=4, rope=2, mlp=2, loss=1),
}
"""The sites that stay fused in a Qwen3 if the forward of a class was replaced, by the place of the class in a layer."""


@pytest.mark.parametrize("order", ["patch, replace", slow("replace, patch")])
@pytest.mark.parametrize("place", slow_but(("self_attn", "mlp"), REPLACED))
def test_a_forward_put_on_a_class_runs_and_is_reported(place: str, order: str, device: str, monkeypatch) -> None:
    stock = build("qwen3", seed=0, device=device)
    fused, ids = copy.deepcopy(stock), tokens(device)
    before = snapshot(fused)
    if order == "patch, replace":
        fused_norm.apply_fused_norm(fused)
    replaced = type(stock.model.layers[0].get_submodule(place))
    monkeypatch.setattr(replaced, "forward", scaled(replaced.forward))
    if order == "patch, replace":
        assert_trains_as_stock(stock, fused, ids)
        assert_trains_as_stock(stock, copy.deepcopy(fused), ids)
    report = fused_norm.apply_fused_norm(fused)
    assert report.counts == REPLACED[place]
    assert {site.cause for site in report.kept} == {"overridden"}
    assert all("class's forward was replaced, by" in site.reason for site in report.kept)
    assert_trains_as_stock(stock, fused, ids)
    assert set(fused_norm.apply_fused_norm(fused, strict=False).kept) == set(report.kept)
    monkeypatch.undo()
    assert fused_norm.apply_fused_norm(fused).counts == sites("qwen3")
    assert_trains_as_stock(stock, fused, ids)
    fused_norm.remove_fused_norm(fused)
    assert snapshot(fused) == before


def test_arguments_that_only_a_replaced_forward_takes_reach_it(device: str, monkeypatch) -> None:
    stock, fused = twins("llama", device)
    x = torch.randn(2, 3, 72, device=device)
    for module in (stock.model.norm, stock.model.layers[0].mlp):
        monkeypatch.setattr(type(module), "forward", scaled(type(module).forward))
    layer = type(stock.model.layers[0])
    monkeypatch.setattr(
        layer, "forward", lambda self, *, states, factor: self.mlp(self.input_layernorm(states), factor)
    )
    monkeypatch.setattr(type(stock.model.layers[0].mlp), "forward", lambda self, x, factor: x * factor)
    assert torch.equal(fused.model.norm(x, factor=3.0), stock.model.norm(x, factor=3.0))
    assert torch.equal(fused.model.norm(hidden_states=x), stock.model.norm(x))
    assert torch.equal(fused.model.layers[0](states=x, factor=3.0), stock.model.layers[0].input_layernorm(x) * 3.0)


@pytest.mark.slow
def test_compiled_code_runs_a_forward_put_on_a_class(device: str, monkeypatch) -> None:
    torch._dynamo.reset()
    stock, fused = twins("qwen3", device)
    ids = tokens(device, length=5)
    compiled = torch.compile(fused, backend="eager", fullgraph=True)
    with torch.no_grad():
        compiled(ids, use_cache=False)
        for place in ("self_attn", "self_attn.q_norm", ""):
            replaced = type(stock.model.layers[0].get_submodule(place))
            monkeypatch.setattr(replaced, "forward", scaled(replaced.forward))
            assert relative(compiled(ids, use_cache=False).logits, stock(ids, use_cache=False).logits) < 2e-6


def test_checkpointing_goes_on_around_a_forward_put_on_a_layers_class(device: str, monkeypatch) -> None:
    stock, fused = twins("qwen3", device)
    layer = type(stock.model.layers[0])
    monkeypatch.setattr(layer, "forward", scaled(layer.forward))
    fused.gradient_checkpointing_enable({"use_reentrant": False})
    calls: list[int] = []
    fused.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    assert_trains_as_stock(stock, fused, tokens(device))
    assert len(calls) == 2


def test_a_forward_put_on_a_fused_class_is_reported_and_no_other_model_gets_it(device: str, monkeypatch) -> None:
    stock, fused = twins("qwen3", device)
    later, ids = copy.deepcopy(stock), tokens(device)
    changed = type(fused.model.layers[0].self_attn)
    monkeypatch.setattr(changed, "forward", scaled(changed.forward))
    assert relative(fused(ids, use_cache=False).logits, stock(ids, use_cache=False).logits) > 1e-2
    for model in (fused, later):
        report = fused_norm.apply_fused_norm(model)
        assert report.counts == counts(norm=5, qk=4, residual=2, mlp=2, loss=1)
        assert all("the forward of its fused class was replaced, by" in site.reason for site in report.kept)
    assert_trains_as_stock(stock, later, ids)


FEWER = {
    "mlp": {"mlp": 1},
    "": {"residual": 1},
    "post_attention_layernorm": {"norm": 4, "residual": 1},
    "self_attn.k_norm": {"qk": 3},
}
"""The site counts of a Qwen3 that shrink if a module of a layer has its own forward, by its place in the layer."""


@pytest.mark.parametrize("order", ["patch, bind", "bind, patch"])
@pytest.mark.parametrize("place", slow_but(("mlp", "post_attention_layernorm", "self_attn.k_norm"), FEWER))
def test_a_forward_bound_to_one_instance_is_reported_there_alone(place: str, order: str, device: str) -> None:
    stock = build("qwen3", seed=0, device=device)
    fused = fused_copy(stock) if order == "patch, bind" else copy.deepcopy(stock)
    for model in (stock, fused):
        module = model.model.layers[1].get_submodule(place)
        module.forward = types.MethodType(scaled(type(module).forward), module)
    if order == "patch, bind":
        assert_trains_as_stock(stock, fused, tokens(device))
    report = fused_norm.apply_fused_norm(fused)
    assert report.counts == {**sites("qwen3"), **FEWER[place]}
    assert len(report.kept) >= len(FEWER[place])
    assert {(site.path.split(".")[2], site.cause) for site in report.kept} == {("1", "overridden")}
    assert all("forward was replaced on the instance, by" in site.reason for site in report.kept)
    if order == "bind, patch" and place.endswith("norm"):
        assert not is_fused(fused.model.layers[1].get_submodule(place))
    assert_trains_as_stock(stock, fused, tokens(device))
    for model in (stock, fused):
        del model.model.layers[1].get_submodule(place).forward
    assert fused_norm.apply_fused_norm(fused).counts == sites("qwen3")
    assert_trains_as_stock(stock, fused, tokens(device))


class TheirMLP(LlamaMLP):
    """An MLP of another library, with its own product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.addcmul(x, x, x))


def test_a_class_of_others_in_the_place_of_an_mlp_has_a_row(monkeypatch) -> None:
    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaMLP", TheirMLP)
    report = fused_norm.apply_fused_norm(build("llama", seed=0))
    assert report.counts == {**sites("llama"), "mlp": 0}
    assert [(site.path, site.kind, site.cause) for site in report.kept] == [
        (f"model.layers.{layer}.mlp", "mlp", "overridden") for layer in range(2)
    ]
    assert all("its class was replaced, by tests.patcher.test_coexistence" in site.reason for site in report.kept)


@pytest.mark.parametrize("order", ["hook, patch", "patch, hook"])
def test_a_hook_on_an_activation_is_heard(order: str, device: str, launches: list[str]) -> None:
    stock, fused = build("llama", seed=0, device=device), build("llama", seed=0, device=device)
    if order == "patch, hook":
        fused_norm.apply_fused_norm(fused)
    for model in (stock, fused):
        activation = model.model.layers[1].mlp.act_fn
        activation.register_forward_hook(lambda module, args, output: output * 1.5)
        activation.all_parameters = activation.parameters  # as DeepSpeed leaves one there
    if order == "hook, patch":
        report = fused_norm.apply_fused_norm(fused)
        assert report.counts == {**sites("llama"), "mlp": 1}
        assert [site.reason for site in report.kept] == ["hooks or other code stand on its activation"]
    assert_trains_as_stock(stock, fused, tokens(device))
    assert launches.count("glu") == 1


def test_what_is_compiled_by_itself_is_called() -> None:
    model = build("gemma3_text", seed=0)
    layer = model.model.layers[1]
    for module in (layer.mlp.act_fn, layer.post_feedforward_layernorm):
        module.compile(backend="eager")
    report = fused_norm.apply_fused_norm(model)
    expected = sites("gemma3_text")
    assert report.counts == {**expected, "mlp": expected["mlp"] - 1, "post_norm": expected["post_norm"] - 1}
    assert {(site.kind, site.reason) for site in report.kept} == {
        ("mlp", "hooks or other code stand on its activation"),
        ("post_norm", "hooks or other code stand on its norm"),
    }


@pytest.mark.parametrize("order", ["hook, patch", "patch, hook"])
def test_a_hook_on_a_norm_keeps_what_takes_the_norm_in(order: str, device: str, launches: list[str]) -> None:
    model = build("gemma3_text", seed=0, device=device)
    if order == "patch, hook":
        fused_norm.apply_fused_norm(model)
    layer = model.model.layers[1]
    norms = (layer.pre_feedforward_layernorm, layer.post_feedforward_layernorm, layer.self_attn.q_norm)
    handles = [norm.register_full_backward_pre_hook(lambda module, gradients: None) for norm in norms]
    report = fused_norm.apply_fused_norm(model)
    expected = sites("gemma3_text")
    assert report.counts == {**expected, "residual": 2, "post_norm": 5}
    assert [site.path for site in report.fused if site.kind == "rope" and site.spec is None] == [
        "model.layers.1.self_attn"
    ]
    assert {site.reason for site in report.kept} == {"hooks or other code stand on its norm"}
    model(tokens(device), use_cache=False)
    assert (launches.count("norm_add_norm"), launches.count("norm_add")) == (2, 3)
    assert (launches.count("qk_norm_rope"), launches.count("rope")) == (2, 1)
    for handle in handles:
        handle.remove()
    assert fused_norm.apply_fused_norm(model).counts == expected


class Names(TorchFunctionMode):
    """A mode that notes the names of called functions, as modes that count or quantise see them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "__get__" not in getattr(func, "__name__", "__get__"):  # of attributes
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text", "gemma2"])
def test_a_function_mode_sees_the_products_norms_and_sums_of_stock(
    model_type: str, autocast: bool, device: str, launches: list[str]
) -> None:
    stock, fused = twins(model_type, device)
    launches.clear()
    counted = []
    for model in (stock, fused):
        with torch.autocast(device, torch.bfloat16, enabled=autocast), Names() as mode:
            model(input_ids=tokens(device), labels=tokens(device), use_cache=False)
        counted.append({name: mode.seen.count(name) for name in ("linear", "rsqrt", "mul", "add", "silu", "cat", "to")})
    assert counted[0]["linear"] > 10
    assert counted[1] == counted[0]
    assert not launches
    with torch.device(device):  # the mode of a default device
        fused(input_ids=tokens(device), labels=tokens(device), use_cache=False)
    assert launches


@pytest.mark.parametrize("is_around_backward", [False, True])
def test_a_layer_that_a_mode_has_seen_is_run_again_by_the_same_code(is_around_backward: bool, device: str) -> None:
    stock, fused = twins("llama", device)
    gradients = []
    for model in (stock, fused):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        mode = Names()
        with mode:
            loss = model(input_ids=tokens(device), labels=tokens(device), use_cache=False).loss
            if is_around_backward:
                loss.backward()
        if not is_around_backward:
            loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert_same(*gradients)


@pytest.mark.parametrize("part", ["norm", "layers.0.mlp", "layers.0.self_attn", "layers.0"])
def test_the_hub_binds_nothing_over_what_is_fused(part: str, monkeypatch) -> None:
    """``kernelize`` of the package ``kernels`` binds forwards to instances whose class has a ``kernel_layer_name``."""
    model = build("llama", seed=0)
    monkeypatch.setattr(type(model.model.get_submodule(part)), "kernel_layer_name", "OfTheHub", raising=False)
    fused_norm.apply_fused_norm(model)
    assert not any(hasattr(type(module), "kernel_layer_name") for module in model.modules())
    fused_norm.remove_fused_norm(model)
    assert hasattr(type(model.model.get_submodule(part)), "kernel_layer_name")


@pytest.mark.parametrize(
    "config",
    [
        peft.LNTuningConfig(target_modules=["post_attention_layernorm", "norm"]),
        peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["post_attention_layernorm", "norm"]),
    ],
    ids=["ln_tuning", "modules_to_save"],
)
def test_norms_wrapped_by_peft_are_called_through_their_wrappers(config, device: str) -> None:
    stock = peft.get_peft_model(build("llama", seed=0, device=device), config)
    with torch.no_grad():
        for parameter in stock.parameters():
            if parameter.requires_grad:  # the wrapper's copy now differs from the original norm
                parameter.add_(torch.randn_like(parameter) * 0.3)
    fused = copy.deepcopy(stock)
    report = fused_norm.apply_fused_norm(fused)
    residual = [site for site in report.kept if site.kind == "residual"]
    assert len(residual) == 2
    assert all("is wrapped in a" in site.reason for site in residual)
    ids = tokens(device)
    expected = step(stock, ids)
    assert any("norm" in name for name in expected[1])
    assert_near(step(fused, ids), expected)
    with fused.disable_adapter(), stock.disable_adapter():
        assert relative(fused(ids, use_cache=False).logits, stock(ids, use_cache=False).logits) < 1e-5


def test_wrapping_a_fused_norm_later_falls_back_to_separate_calls(device: str) -> None:
    stock, fused = twins("llama", device)
    for model in (stock, fused):
        layer = model.model.layers[0]
        layer.post_attention_layernorm = nn.Sequential(layer.post_attention_layernorm, nn.Tanh())
    assert_trains_as_stock(stock, fused, tokens(device))


@pytest.mark.parametrize("order", ["patch, offload", "offload, patch"])
def test_offloaded_norms_are_materialised_by_their_hooks(order: str, device: str, launches: list[str]) -> None:
    stock = build("qwen3", seed=0, device=device)
    ids = tokens(device)
    expected = stock(ids, use_cache=False).logits
    fused = copy.deepcopy(stock)
    if order == "patch, offload":
        fused_norm.apply_fused_norm(fused)
    accelerate.cpu_offload(fused, execution_device=torch.device(device))
    assert fused.model.norm.weight.is_meta
    if order == "offload, patch":
        report = fused_norm.apply_fused_norm(fused)
        assert report.counts == sites("qwen3")
        assert {site.spec for site in report.fused if site.kind == "rope"} == {None}
    assert is_fused(fused.model.norm)
    with torch.no_grad():
        assert relative(fused(ids, use_cache=False).logits, expected) < 1e-5
    assert (launches.count("rms_norm"), launches.count("add_rms_norm")) == (7, 2)
    accelerate.hooks.remove_hook_from_submodules(fused)
    with torch.no_grad():
        assert relative(fused(ids, use_cache=False).logits, expected) < 1e-5


SHARDINGS = ("stock", "patch, shard", "shard, patch")


def sharded_losses(order: str, rank: int, ranks: int, steps: int) -> list[float]:
    """Return losses of a rank of FSDP2 with its own batch; the model is stock, or patched before or after sharding."""
    mesh = init_device_mesh("cpu", (ranks,))
    model = build("gemma3_text", seed=0)  # with every kind of site
    if order == "patch, shard":
        fused_norm.apply_fused_norm(model)
    # Norms that are FSDP units have hooks that must run before each of them, so a joint call would not do.
    fully_shard(model.model.layers[1].pre_feedforward_layernorm, mesh=mesh)
    fully_shard(model.model.layers[1].post_feedforward_layernorm, mesh=mesh)
    fully_shard(model.model.layers[1].self_attn.q_norm, mesh=mesh)
    # This layer is a unit; the others belong to the unit of the whole model.
    fully_shard(model.model.layers[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    if order == "shard, patch":
        units = {"residual": 2, "post_norm": 5}  # but for those that would span a unit
        assert fused_norm.apply_fused_norm(model).counts == {**sites("gemma3_text"), **units}
    if order == "patch, shard":
        with pytest.raises(FusedNormError, match="remove_fused_norm before sharding"):
            fused_norm.remove_fused_norm(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(0, 256, (1, 5 * ranks), generator=torch.Generator().manual_seed(rank))
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def losses_of_every_order(rank: int, ranks: int) -> dict[str, list[float]]:
    return {order: sharded_losses(order, rank, ranks, steps=2) for order in SHARDINGS}


def assert_all_train_as_stock(losses: dict[str, list[float]]) -> None:
    assert losses["stock"][-1] < losses["stock"][0]
    for order in SHARDINGS[1:]:
        assert losses[order] == pytest.approx(losses["stock"], rel=1e-5), order


def test_one_rank_of_fsdp2_trains_a_patched_model_as_it_trains_stock() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert_all_train_as_stock(losses_of_every_order(0, 1))
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_of_fsdp2_train_a_patched_model_as_they_train_stock(tmp_path: Path) -> None:
    assert_all_train_as_stock(on_two_ranks(losses_of_every_order, tmp_path)[0])


@pytest.mark.gpu(2)
@pytest.mark.parametrize("options", [{}, {"cuda_graphs": True}], ids=str)
def test_replicas_of_data_parallel_train_as_stocks(options: dict[str, Any]) -> None:
    """The Trainer makes them in each step, in one process with several GPUs; their weights are no parameters."""
    stock = build("qwen3", seed=0, device="cuda")
    fused = fused_copy(stock, **options)
    ids = tokens().to("cuda")
    gradients = []
    for model in (stock, fused):
        for _ in range(3):
            model.zero_grad()
            nn.DataParallel(model)(input_ids=ids, labels=ids, use_cache=False).loss.sum().backward()
        gradients.append(gradients_of(model))
    assert_gradients_near(gradients[1], gradients[0])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_beside_float8_linears_of_torchao_a_step_is_as_near_to_bf16_as_stocks(recipe: str, launches: list[str]) -> None:
    float8 = pytest.importorskip("torchao.float8", reason="needs torchao")
    exact = build("llama", seed=0, dtype=torch.bfloat16)
    stock = copy.deepcopy(exact)
    float8.convert_to_float8_training(stock.model, config=float8.Float8LinearConfig.from_recipe_name(recipe))
    fused = copy.deepcopy(stock)
    assert fused_norm.apply_fused_norm(fused).counts == sites("llama")
    exact_step, stock_step, fused_step = (step(model, tokens()) for model in (exact, stock, fused))
    assert {"rms_norm", "add_rms_norm", "rope", "glu"} <= set(launches)
    assert relative(fused_step[0], stock_step[0]) < 0.01
    for name, gradient in exact_step[1].items():
        assert relative(fused_step[1][name], gradient) < 1.2 * relative(stock_step[1][name], gradient) + 0.01, name
