"""PEFT's LoRA on the weights of experts: PEFT's bits, and no sum of weight and adapter lives until the backward."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoConfig

import fused_norm

from ..conftest import slow
from .models import assert_same, random_model
from .ranks import on_two_ranks
from .saved_tensors import recomputed_in, saved_in

pytest.importorskip("transformers.integrations.moe", reason="experts are modules of their own in transformers 4")
peft = pytest.importorskip("peft")
if not hasattr(peft.tuners.lora.layer, "_LoraFactorsProxy"):
    pytest.skip("this PEFT adds adapters to parameters in another way", allow_module_level=True)

_WIDTHS = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 64,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": 4, "n_routed_experts": 4,
    "num_local_experts": 4, "rope_scaling": None,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "gpt_oss": {"intermediate_size": 16},
    "mixtral": {},
    "qwen3_5_moe_text": {"shared_expert_intermediate_size": 16, "layer_types": ["full_attention"] * 2},
    "glm4_moe": {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
    "deepseek_v3": {
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "q_lora_rank": None, "kv_lora_rank": 8,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    },
}  # fmt: skip
FP32, BF16 = torch.float32, torch.bfloat16
ONLY: dict[str, Any] = dict.fromkeys(("norms", "qk", "rope", "residual", "mlp", "conv", "loss", "experts"), False)
ONLY["modules"] = "*.experts*"
"""Options that fuse adapters on experts alone."""
PARAMETERS = 4
"""The number of parameters with an adapter in a model: two in each layer."""


def adapted(
    name: str = "qwen3_moe", dtype: torch.dtype = FP32, experts: str = "grouped_mm", cast: bool = False, **config: Any
) -> Any:
    """Return a tiny model with random adapters on experts and queries; ``cast``: in float32, as is PEFT's default."""
    model = random_model(AutoConfig.for_model(name, **{**_WIDTHS, **MODELS[name]}), "cpu", dtype)
    model.set_experts_implementation(experts)
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    torch.manual_seed(3)
    config = {"target_modules": ["q_proj"], "target_parameters": targets, "r": 2, "init_lora_weights": False, **config}
    return peft.get_peft_model(model, peft.LoraConfig(**config), autocast_adapter_dtype=cast)


def fused_copy(model: nn.Module, **options: Any) -> tuple[Any, fused_norm.PatchReport]:
    fused = copy.deepcopy(model)
    return fused, fused_norm.apply_fused_norm(fused, **{**ONLY, **options})


def rows_of(report: fused_norm.PatchReport) -> list[fused_norm.Site]:
    """Return the rows of adapters on experts."""
    return [row for row in report.rows if row.module == "lora.ParamWrapper" and ".experts" in row.path]


def loss_of(model: nn.Module, length: int = 7) -> Tensor:
    ids = torch.randint(2, 60, (2, length), generator=torch.Generator().manual_seed(2))
    ids = ids.to(next(model.parameters()).device)
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def gradients(model: nn.Module) -> dict[str, Tensor]:
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return grads


def step(model: nn.Module) -> dict[str, Tensor]:
    """Return the loss and the gradients of a step."""
    loss = loss_of(model)
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


class Sums:
    """The sums of weights and adapters that are computed while the fixture is in use.

    Attributes:
        alive_before: for each of them, how many others live when it is computed.
        made_in_backward: how many are computed in a backward.
    """

    def __init__(self) -> None:
        self._references: list[StorageWeakRef] = []
        self.alive_before: list[int] = []
        self.made_in_backward = 0

    def note(self, summed: Tensor) -> None:
        self.alive_before.append(self.alive)
        self._references.append(StorageWeakRef(summed.untyped_storage()))
        self.made_in_backward += torch._C._current_graph_task_id() != -1

    @property
    def made(self) -> int:
        return len(self.alive_before)

    @property
    def alive(self) -> int:
        return sum(not reference.expired() for reference in self._references)


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Sums:
    """Return a record of the sums that PEFT's code computes."""
    noted, baddbmm = Sums(), torch.baddbmm

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        summed = baddbmm(*args, **kwargs)
        noted.note(summed)
        return summed

    monkeypatch.setattr(torch, "baddbmm", watched)
    return noted


def kept_bytes(loss: Tensor, model: nn.Module) -> int:
    """Return the bytes that autograd keeps for a backward, without those of the model's parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes = {}
    for packed in saved_in(loss.grad_fn):
        for tensor in getattr(packed, "reads", (getattr(packed, "tensor", packed),)):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(size for address, size in sizes.items() if address not in parameters)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("experts", ["grouped_mm", "eager", *slow("batched_mm")])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", *slow(*list(MODELS)[2:])])
def test_a_step_has_pefts_bits_and_keeps_no_sum(name: str, experts: str, dtype: torch.dtype, sums: Sums) -> None:
    model = adapted(name, dtype, experts)
    fused, report = fused_copy(model)
    assert [row.reason for row in rows_of(report)] == [None] * PARAMETERS
    assert "lora.ParamWrapper: sum with the adapter" in str(report)
    before, loss = sums.made, loss_of(fused)
    assert sums.made - before == PARAMETERS, "PEFT computes each twice"
    assert sums.alive == 0, "each is gone after the forward"
    loss.backward()
    assert sums.made_in_backward == (0 if experts == "batched_mm" else PARAMETERS), "once for all that read it"
    assert max(sums.alive_before[before:]) <= 1, "that of a layer is gone before another layer's is computed"
    assert sums.alive == 0
    expected = step(model)
    assert len(expected) == 1 + 2 * (PARAMETERS + 2)
    assert_same({"loss": loss.detach(), **gradients(fused)}, expected)


@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
def test_what_is_kept_is_what_full_fine_tuning_keeps_and_the_factors(experts: str, sums: Sums) -> None:
    model = adapted(dtype=BF16, experts=experts)
    fused, _ = fused_copy(model)
    full = adapted(dtype=BF16, experts=experts, target_parameters=None)
    weights = [parameter for name, parameter in full.named_parameters() if "experts" in name]
    for weight in weights:
        weight.requires_grad_()
    of_full = kept_bytes(loss_of(full), full)
    of_weights = sum(weight.nbytes for weight in weights)
    stock_loss = loss_of(model)
    assert sums.alive == PARAMETERS, "PEFT keeps them"
    assert kept_bytes(stock_loss, model) == of_full + of_weights
    assert kept_bytes(loss_of(fused), fused) == of_full


def test_experts_that_are_fused_too_have_the_bits_that_they_have_with_pefts_sums(sums: Sums) -> None:
    model = adapted(dtype=BF16)
    with_pefts, report = fused_copy(model, lora=False, experts=True)
    assert report.counts["lora"] == 0
    both, report = fused_copy(model, experts=True)
    assert (report.counts["lora"], report.counts["experts"]) == (PARAMETERS, 2)
    loss = loss_of(both)
    assert sums.alive == 0
    loss.backward()
    assert_same({"loss": loss.detach(), **gradients(both)}, step(with_pefts))


def by_definition(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """The sums of weights and adapters, expert by expert: its rows of a, and its columns of b."""
    count = len(weight)
    rank = len(a) // count
    return torch.stack([weight[e] + scaling * b[:, e::count] @ a[e * rank : (e + 1) * rank] for e in range(count)])


def assert_each_expert_has_its_adapter() -> None:
    model = adapted(dtype=torch.float64, experts="eager")
    fused, _ = fused_copy(model)
    wrapper = fused.base_model.model.model.layers[1].mlp.experts
    inner, experts = wrapper.base_layer, wrapper.get_base_layer()
    with torch.no_grad():
        for layer in (wrapper, inner):  # adapters of neighbours differ in size and sign
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            a.view(experts.num_experts, -1, a.shape[-1]).mul_(torch.tensor([1.0, -3.0, 9.0, -27.0]).view(-1, 1, 1))
            b.view(len(b), -1, experts.num_experts).mul_(torch.tensor([-2.0, 0.5, 4.0, -8.0]))
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(9, 32, generator=generator, dtype=torch.float64).requires_grad_()
    index = torch.rand(9, experts.num_experts, generator=generator).argsort(-1)[:, :2]
    weights = torch.rand(9, 2, generator=generator, dtype=torch.float64)
    leaves = [hidden, *(layer.lora_A["default"].weight for layer in (wrapper, inner))]
    leaves += [layer.lora_B["default"].weight for layer in (wrapper, inner)]
    dy = torch.randn(9, 32, generator=generator, dtype=torch.float64)

    y = wrapper(hidden, index, weights)
    actual = [y, *torch.autograd.grad(y, leaves, dy)]
    by_name = {
        layer.parameter_name: by_definition(
            getattr(experts, layer.parameter_name),
            layer.lora_A["default"].weight,
            layer.lora_B["default"].weight,
            layer.scaling["default"],
        )
        for layer in (wrapper, inner)
    }
    y = torch.zeros_like(hidden)
    for e in range(experts.num_experts):
        rows = experts._apply_gate(hidden @ by_name["gate_up_proj"][e].T) @ by_name["down_proj"][e].T
        y = y + rows * (weights * (index == e)).sum(-1, keepdim=True)
    for value, expected in zip(actual, [y, *torch.autograd.grad(y, leaves, dy)], strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)


def test_each_expert_has_its_own_rows_and_columns_of_the_adapter() -> None:
    assert_each_expert_has_its_adapter()


@pytest.mark.parametrize("factor", [1, 2])
def test_the_factor_of_a_neighbour_in_the_backward_is_seen(factor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    baddbmm = torch.baddbmm

    def of_neighbour(*operands: Tensor, **kwargs: Any) -> Tensor:
        in_backward = torch._C._current_graph_task_id() != -1
        moved = [t.roll(1, 0) if in_backward and place == factor else t for place, t in enumerate(operands)]
        return baddbmm(*moved, **kwargs)

    monkeypatch.setattr(torch, "baddbmm", of_neighbour)
    with pytest.raises(AssertionError, match="not close"):
        assert_each_expert_has_its_adapter()


@pytest.mark.parametrize("part", ["experts.lora_A", "experts.lora_B"])
def test_a_write_into_an_adapter_before_the_backward_raises_as_in_stock(part: str) -> None:
    for model in (adapted(), fused_copy(adapted())[0]):
        written = next(parameter for name, parameter in model.named_parameters() if part in name)
        loss = loss_of(model)
        with torch.no_grad():
            written.mul_(1.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_write_into_the_weight_before_the_backward_raises() -> None:
    model, _ = fused_copy(adapted())
    loss = loss_of(model)
    with torch.no_grad():
        model.base_model.model.model.layers[1].mlp.experts.get_base_layer().down_proj.mul_(1.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def assert_same_steps(fused: nn.Module, model: nn.Module) -> None:
    assert_same(step(fused), step(model))


def test_a_graph_that_is_kept_is_computed_from_again(sums: Sums) -> None:
    model = adapted()
    fused, _ = fused_copy(model)
    results = []
    for each in (model, fused):
        loss = loss_of(each)
        loss.backward(retain_graph=True)
        first = gradients(each)
        alive = sums.alive
        loss.backward()
        results.append((first, gradients(each), alive))
        del loss
    assert_same(results[1][0], results[0][0])
    assert_same(results[1][1], results[0][1])
    assert (results[0][2], results[1][2]) == (PARAMETERS, 0)
    assert sums.made_in_backward == 2 * PARAMETERS


def test_second_derivatives_are_pefts() -> None:
    model = adapted(experts="eager")
    model.set_attn_implementation("eager")
    results = []
    for each in (model, fused_copy(model)[0]):
        leaves = [parameter for name, parameter in each.named_parameters() if "lora" in name]
        first = torch.autograd.grad(loss_of(each), leaves, create_graph=True)
        square = torch.stack([grad.square().sum() for grad in first]).sum()
        results.append([*first, *torch.autograd.grad(square, leaves)])
    assert_same(results[1], results[0])
    assert any(value.abs().max() > 0 for value in results[0][-4:])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_have_pefts_bits_and_keep_no_sum(reentrant: bool, sums: Sums) -> None:
    model = adapted()
    expected = step(model)
    fused, _ = fused_copy(model)
    fused.train()
    fused.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        fused.enable_input_require_grads()
    loss = loss_of(fused)
    assert sums.alive == 0
    loss.backward()
    assert_same({"loss": loss.detach(), **gradients(fused)}, expected)
    assert sums.alive == 0


@pytest.mark.parametrize("level", [True, *slow("mlp", "attention")])
def test_layers_that_recompute_keep_no_sum_either(level: Any, sums: Sums) -> None:
    model = adapted(dtype=BF16)
    options = {**dict.fromkeys(ONLY), "modules": None}
    plain, _ = fused_copy(model, **options)
    recomputing, report = fused_copy(model, **options, recompute=level)
    assert [row.reason for row in report.recompute or ()] == [None, None]
    before, loss = sums.made_in_backward, loss_of(recomputing)
    assert sums.alive == 0
    loss.backward()
    assert sums.made_in_backward - before == PARAMETERS
    assert_same({"loss": loss.detach(), **gradients(recomputing)}, step(plain))


CONFIGS: dict[str, dict[str, Any]] = {
    "rank_pattern": {"rank_pattern": {"experts.down_proj": 3}, "alpha_pattern": {"experts.down_proj": 5}},
    "rslora": {"use_rslora": True},
    "all-linear": {"target_modules": "all-linear", "target_parameters": None},
    "one parameter": {"target_parameters": ["experts.down_proj"]},
}


@pytest.mark.parametrize("config", CONFIGS)
def test_other_configs_have_pefts_bits(config: str, sums: Sums) -> None:
    model = adapted(**CONFIGS[config])
    fused, report = fused_copy(model)
    count = 2 if config == "one parameter" else PARAMETERS
    assert [row.reason for row in rows_of(report)] == [None] * count
    loss = loss_of(fused)
    assert sums.alive == 0
    loss.backward()
    assert_same({"loss": loss.detach(), **gradients(fused)}, step(model))


@pytest.mark.parametrize("weights", [FP32, BF16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
def test_adapters_in_float32_and_autocast_have_pefts_bits(
    experts: str, autocast: bool, weights: torch.dtype, sums: Sums
) -> None:
    model = adapted(dtype=weights, experts=experts, cast=True)
    assert {parameter.dtype for name, parameter in model.named_parameters() if "lora" in name} == {FP32}
    fused, report = fused_copy(model)
    assert [row.reason for row in rows_of(report)] == [None] * PARAMETERS
    with torch.autocast("cpu", BF16, enabled=autocast):
        loss, expected = loss_of(fused), loss_of(model)
    loss.backward()
    expected.backward()
    assert_same({"loss": loss.detach(), **gradients(fused)}, {"loss": expected.detach(), **gradients(model)})


def test_a_trained_weight_gets_pefts_gradient() -> None:
    model = adapted()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name or "experts" in name)
    fused, _ = fused_copy(model)
    expected = step(model)
    assert any(name.endswith("down_proj") for name in expected)
    assert_same(step(fused), expected)


def test_adapters_that_are_off_merged_switched_or_several_are_pefts(sums: Sums) -> None:
    model = adapted()
    with torch.random.fork_rng():
        config = peft.LoraConfig(
            r=3,
            target_modules=["q_proj"],
            target_parameters=["experts.gate_up_proj", "experts.down_proj"],
            init_lora_weights=False,
        )
        model.add_adapter("other", config)
    fused, report = fused_copy(model)
    assert [row.reason for row in rows_of(report)] == [None] * PARAMETERS
    with fused.disable_adapter(), model.disable_adapter(), torch.no_grad():
        assert torch.equal(loss_of(fused), loss_of(model))
    for each in (fused, model):
        each.set_adapter("other")
    before, loss = sums.made, loss_of(fused)
    assert (sums.made - before, sums.alive) == (PARAMETERS, 0)
    loss.backward()
    gradients(fused)
    assert_same_steps(fused, model)
    for each in (fused, model):
        each.base_model.set_adapter(["default", "other"])
    assert_same_steps(fused, model)
    _, report = fused_copy(model, strict=False)
    assert {row.reason for row in rows_of(report)} == {"it has 2 active adapters"}
    for each in (fused, model):
        each.set_adapter("default")
        each.merge_adapter()
    with torch.no_grad():
        assert torch.equal(loss_of(fused), loss_of(model))
    _, report = fused_copy(model, strict=False)
    assert {row.reason for row in rows_of(report)} == {"its adapter is merged, or switched off"}
    for each in (fused, model):
        each.unmerge_adapter()
    assert_same_steps(fused, model)
    assert not any("lora" in name for name, _ in fused.merge_and_unload().named_parameters())


def test_patching_ends_and_repeats_and_survives_copies(sums: Sums) -> None:
    model = adapted()
    expected = step(model)
    fused, report = fused_copy(model)
    assert fused_norm.apply_fused_norm(fused, **ONLY) == report
    for each in (pickle.loads(pickle.dumps(fused)), copy.deepcopy(fused)):
        loss = loss_of(each)
        assert sums.alive == 0
        loss.backward()
        assert_same({"loss": loss.detach(), **gradients(each)}, expected)
    with fused_norm.disabled():
        before, loss = sums.made, loss_of(fused)
        assert (sums.made - before, sums.alive) == (2 * PARAMETERS, PARAMETERS)
    del loss
    wrapper = fused.base_model.model.model.layers[0].mlp.experts
    assert "fused: weight+lora" in repr(wrapper)
    assert list(fused.state_dict()) == list(model.state_dict())
    assert fused_norm.remove_fused_norm(fused) == PARAMETERS
    assert type(wrapper) is peft.tuners.lora.layer.ParamWrapper
    _, report = fused_copy(model, lora=False, norms=True, strict=False)
    assert {row.reason for row in rows_of(report)} == {"switched off: lora=False"}


def test_without_gradients_each_sum_is_computed_once_and_the_parameter_is_put_back(sums: Sums) -> None:
    model = adapted()
    fused, _ = fused_copy(model)
    before = dict(fused.named_parameters())
    count = sums.made
    with torch.no_grad():
        y = loss_of(fused)
        assert sums.made - count == PARAMETERS
        assert torch.equal(y, loss_of(model))
    experts = fused.base_model.model.model.layers[0].mlp.experts.get_base_layer()
    experts.act_fn = None  # raises inside of the experts
    with pytest.raises(TypeError):
        loss_of(fused)
    assert all(before[name] is parameter for name, parameter in fused.named_parameters())
    assert type(experts.down_proj) is nn.Parameter


def test_other_hooks_on_saved_tensors_see_what_they_saw(sums: Sums) -> None:
    model = adapted()
    expected = step(model)
    fused, _ = fused_copy(model)
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(fused)
    loss.backward()
    assert_same({"loss": loss.detach(), **gradients(fused)}, expected)


def test_code_of_pefts_that_was_replaced_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = adapted()
    fused, _ = fused_copy(model)
    layers = peft.tuners.lora.layer
    forward = layers._LoraFactorsProxy.forward
    monkeypatch.setattr(layers._LoraFactorsProxy, "forward", lambda proxy, weight: 2 * forward(proxy, weight))
    with torch.no_grad():
        assert torch.equal(loss_of(fused), loss_of(model))
    assert "PEFT's code has changed since the model was patched" in caplog.text
    monkeypatch.undo()
    monkeypatch.delattr(layers, "_LoraFactorsProxy")
    _, report = fused_copy(model, strict=False)
    assert {row.reason for row in rows_of(report)} == {
        "this release of PEFT adds adapters to parameters in another way"
    }


def test_what_sees_modules_called_sees_pefts_calls() -> None:
    model = adapted()
    fused, _ = fused_copy(model)
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        with torch.no_grad():
            loss_of(model)
            in_stock, seen[:] = list(seen), []
            loss_of(fused)
    finally:
        handle.remove()
    assert seen == in_stock
    assert "ParametrizationList" in seen


def with_attribute(model: Any) -> None:
    model.base_model.model.model.layers[0].mlp.experts.get_base_layer().down_proj.ds_id = 3


def with_a_tensor_scale(model: Any) -> None:
    model.base_model.model.model.layers[0].mlp.experts.scaling["default"] = torch.tensor(0.5)


def with_a_parametrisation(model: Any) -> None:
    experts = model.base_model.model.model.layers[0].mlp.experts.get_base_layer()
    nn.utils.parametrize.register_parametrization(experts, "down_proj", nn.Identity())


REASONS: dict[Callable[[Any], None], str] = {
    with_attribute: "its parameter or its adapter is sharded, or not plain",
    with_a_tensor_scale: "its scale is a tensor, as prepare_model_for_compiled_hotswap leaves it",
    with_a_parametrisation: "its parameter is computed, or no parameter of its module by now",
}


@pytest.mark.filterwarnings("ignore:Could not find any LoRA parametrization")
@pytest.mark.parametrize("change", REASONS)
def test_what_is_left_to_peft_has_a_reason_and_runs(change: Callable[[Any], None]) -> None:
    model = adapted()
    fused, _ = fused_copy(model)
    for each in (fused, model):
        change(each)
    if change is not with_a_tensor_scale:  # of which PEFT's code computes nothing
        assert_same_steps(fused, model)
    kept = [row.reason for row in rows_of(fused_norm.apply_fused_norm(model, **ONLY)) if row.reason is not None]
    assert kept == [REASONS[change]] * (2 if change is with_a_parametrisation else 1), "of a module, or of a parameter"


def test_a_matrix_is_left_to_peft() -> None:
    model = adapted(target_parameters=["k_proj.weight"])
    _, report = fused_copy(model, modules=None)
    assert [row.reason for row in report.rows if row.path.endswith("k_proj")] == [
        "its parameter is one matrix, of no experts"
    ] * 2


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_sharded_before_the_patch_it_is_pefts_and_afterwards_it_has_its_bits(mesh: Any, sums: Sums) -> None:
    model = adapted()
    fused, _ = fused_copy(model)
    for each in (fused, model):
        for layer in each.base_model.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(each, mesh=mesh)
    expected = step(model)
    loss = loss_of(fused)
    assert sums.alive == 0
    loss.backward()
    actual = {"loss": loss.detach(), **gradients(fused)}
    assert_same(
        *({key: getattr(value, "_local_tensor", value) for key, value in each.items()} for each in (actual, expected))
    )
    report = fused_norm.apply_fused_norm(model, **{**ONLY, "strict": False})
    assert {row.reason for row in rows_of(report)} == {"its parameter or its adapter is sharded, or not plain"}


def assert_sharding_changes_nothing(rank: int, ranks: int) -> None:
    mesh, results = init_device_mesh("cpu", (ranks,)), []
    for is_fused in (False, True):
        model = adapted(dtype=BF16)
        if is_fused:
            fused_norm.apply_fused_norm(model, **ONLY)
        for layer in (*model.base_model.model.model.layers, model):
            fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for length in (5, 8):
            ids = torch.randint(2, 60, (2, length), generator=torch.Generator().manual_seed(rank))
            loss = model(input_ids=ids, labels=ids).loss
            recomputed = recomputed_in(loss.grad_fn)
            assert len(recomputed) == PARAMETERS * is_fused
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([loss.detach(), *(parameter.full_tensor() for parameter in model.parameters())])
    assert_same(*results)


@pytest.mark.slow
def test_two_ranks_of_fsdp2_have_pefts_bits(tmp_path: Path) -> None:
    on_two_ranks(assert_sharding_changes_nothing, tmp_path)


@pytest.mark.slow
def test_compiled_it_is_pefts() -> None:
    model = adapted()
    fused, _ = fused_copy(model)
    torch._dynamo.reset()
    results = step(torch.compile(fused, backend="eager"))
    assert_same({name.removeprefix("_orig_mod."): value for name, value in results.items()}, step(model))


def test_replayed_layers_have_the_bits_of_eager_ones(replays_anywhere: None, device: str) -> None:
    model = adapted(dtype=BF16).to(device)
    model.config.use_cache = False
    options = {**dict.fromkeys(ONLY), "modules": None}
    eager, _ = fused_copy(model, **options)
    replayed, report = fused_copy(model, **options, cuda_graphs=True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (replayed, eager)]
    for _ in range(4):
        losses = [loss_of(each) for each in (replayed, eager)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*losses)
    assert_same(dict(replayed.named_parameters()), dict(eager.named_parameters()))
    assert report.why_not_replayed() is None
