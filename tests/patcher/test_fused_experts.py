"""Experts of transformers: stock's bits by the formula, float64 by kernels, and stock code if other code has a say."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

import fused_norm

from .by_reference import by_reference
from .models import assert_same, random_model, relative
from .ranks import called_operators

moe = pytest.importorskip("transformers.integrations.moe", reason="experts are modules of their own in transformers 4")

_WIDTHS = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 64, "pad_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_WIDTHS, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 16},
    "gpt_oss": {**_WIDTHS, "num_local_experts": 4, "intermediate_size": 16, "head_dim": 16, "rope_scaling": None},
}  # fmt: skip
EACH = pytest.mark.parametrize("name", MODELS)
FP32, BF16 = torch.float32, torch.bfloat16
ONLY = dict.fromkeys(("norms", "qk", "rope", "residual", "mlp", "loss"), False)
OPERATORS = ["expert_permute", "expert_gate", "expert_unpermute"]
WITH_BIASES = ["expert_permute", "expert_bias", "expert_gate", "expert_bias", "expert_unpermute"]


def operators_for(experts: Any) -> list[str]:
    """Return the operators that a call of a module of experts runs."""
    return WITH_BIASES if experts.has_bias else OPERATORS


def model_of(name: str, device: str = "cpu", dtype: torch.dtype = FP32) -> Any:
    return random_model(AutoConfig.for_model(name, **MODELS[name]), device, dtype)


def fused_copy(model: nn.Module, **options: Any) -> tuple[Any, fused_norm.PatchReport]:
    fused = copy.deepcopy(model)
    return fused, fused_norm.apply_fused_norm(fused, **{**ONLY, **options})


def is_experts(module: nn.Module) -> bool:
    return isinstance(getattr(module, "down_proj", None), nn.Parameter)


def experts_of(model: nn.Module) -> Any:
    """Return the last module of experts in a model."""
    return [module for module in model.modules() if is_experts(module)][-1]


class Definition(nn.Module):
    """Experts by definition: every expert computes every row, and the rows are added by their weights."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.experts = copy.deepcopy(experts).double()

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        module, y = self.experts, torch.zeros_like(hidden)
        for number in range(module.num_experts):
            rows = hidden
            for name in ("gate_up_proj", "down_proj"):
                weight = getattr(module, name)[number]
                rows = rows @ (weight if module.is_transposed else weight.mT)
                rows = rows + getattr(module, f"{name}_bias")[number] if module.has_bias else rows
                rows = module._apply_gate(rows) if name == "gate_up_proj" else rows
            y = y + rows * (weights * (index == number)).sum(-1, keepdim=True)
        return y


def operators_of(call: Callable[[], Any]) -> list[str]:
    with called_operators() as called:
        call()
    return called


def inputs_of(
    module: Any, tokens: int = 6, dtype: torch.dtype = FP32, absent: int = 0, seed: int = 1
) -> tuple[Tensor, ...]:
    """Return hidden states, the experts of each, and their weights; ``absent``: how many experts other devices have."""
    generator, device = torch.Generator().manual_seed(seed), module.down_proj.device
    hidden = torch.randn(tokens, 32, generator=generator).to(device, dtype).requires_grad_()
    index = torch.rand(tokens, module.num_experts + absent, generator=generator).argsort(-1)[:, :2].to(device)
    weights = torch.rand(tokens, 2, generator=generator).to(device).requires_grad_()
    return hidden, index, weights


def results(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Return the output and all gradients of a call of experts."""
    y = module(hidden, index, weights)
    leaves = {"hidden": hidden, "weights": weights, **dict(module.named_parameters())}
    leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    dy = torch.linspace(-1, 2, y.numel(), device=y.device).view_as(y).to(y.dtype)
    return {"y": y.detach(), **dict(zip(leaves, torch.autograd.grad(y, leaves.values(), dy), strict=True))}


def step(model: nn.Module) -> dict[str, Tensor]:
    """Return the logits and the gradients of all parameters."""
    ids = torch.randint(2, 60, (2, 7), generator=torch.Generator().manual_seed(2)).to(next(model.parameters()).device)
    outputs = model(input_ids=ids, labels=ids)
    outputs.loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return {"logits": outputs.logits.detach(), **grads}


@EACH
def test_by_the_formula_a_model_has_stocks_bits(name: str) -> None:
    model = model_of(name, dtype=BF16)
    fused, report = fused_copy(model)
    count = sum(map(is_experts, model.modules()))
    assert report.counts["experts"] == count > 0
    assert not any(row.kind == "experts" for row in report.kept)
    with by_reference() as called:
        assert_same(step(fused), step(model))
    assert called == operators_for(experts_of(model)) * count


@EACH
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("absent", [0, 3])
def test_experts_are_as_near_float64_as_stock(name: str, dtype: torch.dtype, absent: int, device: str) -> None:
    module = experts_of(model_of(name, device, dtype))
    if absent and hasattr(module, "_is_expert_parallel"):
        module._is_expert_parallel = True
    fused = experts_of(fused_copy(nn.ModuleDict({"experts": module}))[0])
    squares: dict[str, list[list[float]]] = {}
    # Sums in another order make errors of another draw, up to 1.7 times those of stock: many draws are compared.
    for seed in range(8):
        inputs = inputs_of(module, dtype=dtype, absent=absent, seed=seed)
        wide = tuple(
            tensor.detach().double().requires_grad_() if tensor.is_floating_point() else tensor for tensor in inputs
        )
        outcomes: list[dict[str, Tensor]] = []
        assert operators_of(lambda: outcomes.append(results(fused, *inputs))) == operators_for(module)  # noqa: B023
        ours, stock, expected = *outcomes, results(module, *inputs), results(Definition(module), *wide)
        expected = {key.removeprefix("experts."): value for key, value in expected.items()}
        assert ours.keys() == expected.keys()
        for key, value in ours.items():
            assert value.dtype == stock[key].dtype
            pair = [relative(outcome[key], expected[key]) ** 2 for outcome in (ours, stock)]
            squares.setdefault(key, []).append(pair)
        if dtype == BF16:
            assert (ours["y"] != stock["y"]).double().mean() < 0.02, "the same rounding points"
    for key, pairs in squares.items():
        mine, theirs = torch.tensor(pairs, dtype=torch.float64).mean(0).sqrt().tolist()
        assert mine <= 1.1 * theirs + torch.finfo(dtype).eps / 2, (key, mine, theirs)


def rounded_later(self: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (self.act_fn(gate) * up).to(gate_up.dtype)


def detached(self: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return self.act_fn(gate) * up.detach()


@pytest.mark.parametrize(
    ("gate", "reason"),
    [
        (rounded_later, "what it computes between its products is no gate that is known here"),
        (detached, "its grouped_mm does not compute the formula bit for bit"),
    ],
)
def test_another_gate_is_not_fused(gate: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3_moe")
    monkeypatch.setattr(type(experts_of(model)), "_apply_gate", gate)
    fused, report = fused_copy(model, strict=False)
    assert {row.reason for row in report.kept if row.kind == "experts"} == {reason}
    assert_same(step(fused), step(model))


def next_weights(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    return _GROUPED(self, hidden, index, weights.roll(1, 0))


_GROUPED = moe.grouped_mm_experts_forward


def test_another_function_under_the_same_name_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3_moe")
    monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", next_weights)
    _, report = fused_copy(model, strict=False)
    (reason,) = {row.reason for row in report.kept if row.kind == "experts"}
    assert reason == f"the function of grouped_mm was replaced, by {__name__}.next_weights"


def test_other_implementations_run_as_they_are(device: str) -> None:
    model = model_of("qwen3_moe", device)
    fused, _ = fused_copy(model)
    module, inputs = experts_of(fused), inputs_of(experts_of(model))
    assert operators_of(lambda: module(*inputs)) == OPERATORS
    for chosen in ("eager", "batched_mm"):
        for variant in (model, fused):
            variant.set_experts_implementation(chosen)
        assert operators_of(lambda: module(*inputs)) == []
        assert_same(results(module, *inputs), results(experts_of(model), *inputs))
        _, report = fused_copy(model, strict=False)
        assert {(row.cause, row.reason) for row in report.kept if row.kind == "experts"} == {
            ("overridden", f"its config asks for experts by {chosen}, not by grouped_mm")
        }
    again = fused_norm.apply_fused_norm(fused, **ONLY, strict=False)
    assert again.counts["experts"] == 0
    assert type(module) is type(experts_of(model))


CHANGES: dict[str, Callable[[Any, pytest.MonkeyPatch], Any]] = {
    "another activation": lambda module, patch: setattr(module, "act_fn", nn.GELU()),
    "a hook on the activation": lambda module, patch: module.act_fn.register_forward_hook(lambda *_: None),
    "its own gate": lambda module, patch: setattr(module, "_apply_gate", lambda gate_up: gate_up.chunk(2, -1)[0]),
    "another function": lambda module, patch: patch.setitem(
        moe.ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", next_weights
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_other_code_changes_afterwards_runs(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fused, _ = fused_copy(model_of("qwen3_moe", device))
    module = experts_of(fused)
    inputs = inputs_of(module)
    assert operators_of(lambda: module(*inputs)) == OPERATORS
    CHANGES[name](module, monkeypatch)
    assert operators_of(lambda: module(*inputs)) == []
    actual = results(module, *inputs)
    with fused_norm.disabled():
        assert_same(actual, results(module, *inputs))


def test_calls_in_unusual_forms_run_as_in_stock(device: str) -> None:
    model = model_of("qwen3_moe", device)
    fused, _ = fused_copy(model)
    module, stock = experts_of(fused), experts_of(model)
    hidden, index, weights = inputs_of(stock)
    assert operators_of(lambda: module(hidden, top_k_weights=weights, top_k_index=index)) == OPERATORS
    with fused_norm.disabled():
        assert operators_of(lambda: module(hidden, index, weights)) == []
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(hidden, index, weights), stock(hidden, index, weights))
    with pytest.raises(TypeError):
        module(hidden, index)


def test_a_linear_of_others_is_called(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fused, _ = fused_copy(model_of("qwen3_moe", device))
    module, inputs, linear = experts_of(fused), inputs_of(experts_of(fused)), moe._grouped_linear
    expected = module(*inputs)
    monkeypatch.setattr(moe, "_grouped_linear", lambda *args, **kwargs: 2 * linear(*args, **kwargs))
    actual = module(*inputs)
    with fused_norm.disabled():
        torch.testing.assert_close(actual, module(*inputs))
    assert not torch.allclose(actual, expected)


def test_limit_and_alpha_are_those_of_the_moment(device: str) -> None:
    model = model_of("gpt_oss", device)
    fused, _ = fused_copy(model)
    for module in (experts_of(model), experts_of(fused)):
        module.alpha, module.limit = 1.25, 0.5
    inputs = inputs_of(module)
    actual, expected = (results(experts_of(variant), *inputs) for variant in (fused, model))
    assert operators_of(lambda: module(*inputs)) == WITH_BIASES
    for key, value in actual.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)
    module.limit = 2
    assert operators_of(lambda: module(*inputs)) == [], "an int is no float: it may be anything else tomorrow"


@EACH
@pytest.mark.parametrize("weights", [FP32, BF16], ids=str)
def test_autocast_rounds_as_in_stock(name: str, weights: torch.dtype, device: str) -> None:
    model = model_of(name, device, weights)
    fused, _ = fused_copy(model)
    inputs = inputs_of(experts_of(model))
    with torch.autocast(device, BF16):
        actual, expected = (results(experts_of(variant), *inputs) for variant in (fused, model))
    for key, value in actual.items():
        assert value.dtype == expected[key].dtype
        torch.testing.assert_close(value.float(), expected[key].float(), rtol=3e-2, atol=3e-2)
    assert (
        (actual["y"] != expected["y"]).double().mean() < 0.9
        if weights == FP32
        else torch.equal(actual["y"], expected["y"])
    )


def test_patching_ends_and_repeats_and_survives_copies() -> None:
    model = model_of("gpt_oss")
    fused, report = fused_copy(model)
    assert {row.what for row in report.fused} == {"silu, interleaved, clamped between grouped products"}
    before = step(fused)
    assert fused_norm.apply_fused_norm(fused, **ONLY) == report
    assert_same(step(pickle.loads(pickle.dumps(fused))), before)
    assert fused_norm.remove_fused_norm(fused) == report.counts["experts"]
    assert type(experts_of(fused)) is type(experts_of(model))
    _, report = fused_copy(model, modules="model.layers.1.*")
    assert [row.path for row in report.fused] == ["model.layers.1.mlp.experts"]
    assert {row.reason for row in report.kept if row.kind == "experts"} == {"not selected by modules"}


def test_adapters_on_parameters_are_trained(device: str) -> None:
    peft = pytest.importorskip("peft")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets, init_lora_weights=False)
    model = peft.get_peft_model(model_of("qwen3_moe", device), config)
    fused, report = fused_copy(model, lora=False)
    assert report.counts["experts"] == 2
    assert operators_of(lambda: step(fused)) == OPERATORS * 2
    actual, expected = step(fused), step(model)
    assert any("lora_A" in name and "experts" in name for name in actual)
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, rtol=1e-3, atol=1e-5)


def test_checkpointed_and_recomputing_layers_have_the_same_gradients() -> None:
    model = model_of("qwen3_moe")
    fused, _ = fused_copy(model)
    expected = step(fused)
    recomputing, report = fused_copy(model, recompute=True)
    assert [row.reason for row in report.recompute or ()] == [None, None]
    assert_same(step(recomputing), expected)
    fused.gradient_checkpointing_enable()
    assert_same(step(fused.train()), expected)
