"""Recomputing layers get the same bits from fewer saved tensors, and save a tensor unless its bits are certain."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

import fused_norm
from fused_norm import FusedNormError
from fused_norm.kernels import rms_norm
from fused_norm.model_configs import build
from fused_norm.patcher import recompute
from fused_norm.patcher.recompute import call_recomputing

from .models import Subclass, Watching, assert_same, assert_same_bits, loss_of, slow, snapshot, step, tokens
from .ranks import called_operators, on_two_ranks
from .saved_tensors import recomputed_in, saved_in

FEW = tokens("cuda" if torch.cuda.is_available() else "cpu", batch=1, length=4)


def pair(model_type: str, device: str, **options: Any) -> tuple[Any, Any]:
    """Return two equal fused models, of which the second recomputes."""
    plain = build(model_type, seed=0, device=device, **options)
    recomputing = copy.deepcopy(plain)
    fused_norm.apply_fused_norm(plain)
    fused_norm.apply_fused_norm(recomputing, recompute=True)
    return plain, recomputing


def test_each_output_is_made_once_for_all_that_read_it(device: str, recomputed_by: list[str]) -> None:
    _, recomputing = pair("qwen3", device)
    loss = loss_of(recomputing, FEW)
    recomputables = {id(recomputable) for recomputable in recomputed_in(loss.grad_fn)}
    for times in (1, 2):
        loss.backward(retain_graph=True)
        assert len(recomputed_by) == times * len(recomputables) > 0


def test_evaluation_without_gradients_and_disabled_recompute_nothing(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, recomputing = pair("qwen3", device)
    assert len(recomputed_in(loss_of(recomputing.eval(), FEW).grad_fn)) > 0
    monkeypatch.setattr(recompute, "_SavedTensorHook", None)
    for mode in (torch.no_grad, torch.inference_mode, fused_norm.disabled):
        with mode():
            logits = recomputing(FEW, use_cache=False).logits
            assert torch.equal(logits, plain.eval()(FEW, use_cache=False).logits)
    assert len(recomputed_in(logits.grad_fn)) == 0


@pytest.mark.parametrize("reentrant", [False, slow(True)])
def test_under_gradient_checkpointing_it_is_off_and_says_so(
    reentrant: bool, device: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recompute, "_warned", set())
    plain, recomputing = pair("qwen3", device, dtype=torch.bfloat16)
    expected = step(plain, FEW)
    recomputing.gradient_checkpointing_enable({"use_reentrant": reentrant})
    monkeypatch.setattr(recompute, "_SavedTensorHook", None)
    with caplog.at_level(logging.WARNING, logger="fused_norm"):
        assert_same_bits(expected, step(recomputing, FEW))
    messages = [record.getMessage() for record in caplog.records if "recompute is off" in record.getMessage()]
    assert len(messages) == 1
    assert "checkpointing" in messages[0]


@pytest.mark.parametrize("around", [slow("each layer"), "all of it"])
def test_a_checkpoint_inside_runs_as_often_and_keeps_as_little_as_without(
    around: str, device: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recompute, "_warned", set())
    results = []
    for recomputes in (False, True):
        caller = model = build("gemma2", seed=0, device=device)
        if around == "each layer":
            model.model.layers = nn.ModuleList(checkpoint_wrapper(layer) for layer in model.model.layers)
        else:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            caller = nn.ModuleDict({"models": nn.ModuleList([model])})  # whose layer is the model
        fused_norm.apply_fused_norm(caller, recompute=recomputes, loss=False)
        seen: list[StorageWeakRef] = []
        for module in model.model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(
                    lambda _, __, y, seen=seen: seen.append(StorageWeakRef(y.untyped_storage()))
                )
        loss = loss_of(model, FEW)
        gc.collect()
        runs, kept = len(seen), sum(not storage.expired() for storage in seen)
        loss.backward()
        assert len(seen) == 2 * runs
        results.append((runs, kept, [parameter.grad for parameter in model.parameters()]))
    assert results[0][:2] == results[1][:2]
    assert_same(results[0][2], results[1][2])
    assert "other saved-tensor hooks are active" in caplog.text


@pytest.mark.usefixtures("large_graphs")
@pytest.mark.slow
@pytest.mark.parametrize("part", ["model", "mlps"])
def test_a_compiled_model_and_compiled_parts_of_layers_have_the_same_bits(part: str, device: str) -> None:
    plain, recomputing = pair("qwen3", device)
    modules = [recomputing.model] if part == "model" else [layer.mlp for layer in recomputing.model.layers]
    for module in modules:
        module.compile(fullgraph=True, backend="aot_eager")
    assert_same_bits(step(plain, FEW), step(recomputing, FEW))


def test_an_error_in_a_layer_leaves_no_hooks(device: str) -> None:
    _, recomputing = pair("qwen3", device)

    def fail(*_: Any) -> None:
        raise KeyError

    handle = recomputing.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(KeyError):
        loss_of(recomputing, FEW)
    assert len(recomputed_in(rms_norm(*inputs_of(device)[:2]).grad_fn)) == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    handle.remove()
    assert len(recomputed_in(loss_of(recomputing, FEW).grad_fn)) > 0


@pytest.mark.slow
def test_threads_recompute_at_once(device: str) -> None:
    plain, recomputing = pair("qwen3", device, dtype=torch.bfloat16)
    expected, models = step(plain, FEW), [copy.deepcopy(recomputing) for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:
        for result in threads.map(lambda model: step(model, FEW), models):
            assert_same_bits(expected, result)


def as_it_is(x: Tensor, weight: Tensor, factor: Tensor) -> Tensor:
    return rms_norm(x, weight) * factor


def through_views(x: Tensor, weight: Tensor, factor: Tensor) -> Tensor:
    y = rms_norm(x, weight).view(2, 2, 16)
    return y.transpose(0, 1)[1:, :, 3:5].unsqueeze(0) * factor.view(2, 2, 16)[1:, :, 3:5]


def scaled(change: Callable[[Tensor], Tensor]) -> Callable:
    """Return a forward that saves ``change`` of a norm's output in another memory order."""

    def forward(x: Tensor, weight: Tensor, factor: Tensor) -> Tensor:
        y = rms_norm(x.view(2, 2, 16).transpose(0, 1), weight)
        return change(y) * factor.view(2, 2, 16)[..., :1] + y.sum()

    return forward


BF16 = torch.bfloat16


def edited(y: Tensor) -> Tensor:
    with torch.no_grad():
        y.mul_(3)
    return y


def replaced(y: Tensor) -> Tensor:
    y.data = y.detach() * 3
    return y


SAVED: dict[str, tuple[Callable, int]] = {
    "as it is": (as_it_is, 1),
    "through views": (through_views, 1),
    "cast": (scaled(lambda y: y.to(BF16)), 1),
    "through views of a cast": (scaled(lambda y: y.double().transpose(0, 1)[1:, :, 3:5].unsqueeze(0)), 1),
    "cast into another order": (scaled(lambda y: y.to(BF16, memory_format=torch.contiguous_format)), 0),
    "edited, then cast": (scaled(lambda y: edited(y).to(BF16)), 0),
    "cast, then edited": (scaled(lambda y: edited(y.to(BF16))), 0),
    "given other memory": (scaled(replaced), 0),
    "negated as a view": (scaled(torch._neg_view), 0),
    "of a class of its own": (scaled(lambda y: y.as_subclass(Subclass)), 0),
    "edited in place": (lambda x, weight, factor: rms_norm(x, weight).mul_(3) * factor, 0),
    "copied": (lambda x, weight, factor: rms_norm(x, weight).clone() * factor, 0),
    "of another output": (lambda x, weight, factor: rms_norm(rms_norm(x, weight), factor[0]) * factor, 1),
}
"""A change of a norm's output before it is saved, and how many outputs are recomputed."""


def inputs_of(device: str) -> list[Tensor]:
    """Return rows, a weight and a factor."""
    return [torch.randn(shape, device=device, requires_grad=True) for shape in ((4, 16), (16,), (4, 16))]


@pytest.mark.parametrize("name", SAVED)
def test_an_output_is_recomputed_where_it_is_what_is_saved(name: str, device: str) -> None:
    forward, recomputed = SAVED[name]
    inputs = inputs_of(device)
    gradients = []
    for result in (forward(*inputs), call_recomputing(forward, inputs[0], tuple(inputs[1:]), {})):
        gradients.append((len(recomputed_in(result.grad_fn)), torch.autograd.grad(result.square().sum(), inputs)))
    assert [count for count, _ in gradients] == [0, recomputed]
    assert_same(gradients[0][1], gradients[1][1])


@pytest.mark.parametrize(
    "around",
    [
        Watching,
        forward_ad.dual_level,
        partial(disable_saved_tensors_hooks, "not here"),
        partial(saved_tensors_hooks, lambda tensor: tensor, lambda tensor: tensor),
        called_operators,
    ],
)
def test_where_others_watch_or_hooks_are_not_allowed_nothing_is_recomputed(around: Callable, device: str) -> None:
    inputs = inputs_of(device)
    with around() as called:
        result = call_recomputing(as_it_is, inputs[0], tuple(inputs[1:]), {})
    assert around is not called_operators or called == ["rms_norm"]
    assert len(recomputed_in(result.grad_fn)) == 0


def test_torch_func_transforms_what_recomputes(device: str) -> None:
    x, *others = inputs_of(device)
    plain = torch.func.grad(lambda x: as_it_is(x, *others).sum())(x)
    assert torch.equal(torch.func.grad(lambda x: call_recomputing(as_it_is, x, tuple(others), {}).sum())(x), plain)


def test_what_was_changed_before_an_output_is_saved_is_saved_as_it_is(device: str) -> None:
    def forward(x: Tensor, weight: Tensor, factor: Tensor) -> Tensor:
        y = rms_norm(x, weight)
        weight.data = weight.detach() + 1  # the new tensor has its own version and memory
        with torch.no_grad():
            x.add_(1)
        return y * factor

    x, weight, factor = inputs_of(device)
    expected = rms_norm(x, weight).detach()
    result = call_recomputing(forward, x, (weight, factor), {})
    assert len(recomputed_in(result.grad_fn)) == 0
    assert torch.equal(torch.autograd.grad(result.sum(), factor)[0], expected)


def test_a_weight_whose_memory_is_gone_is_not_needed_or_else_asked_for(device: str) -> None:
    def forward(x: Tensor, weight: Tensor, factor: Tensor, free: bool) -> Tensor:
        y = rms_norm(x, weight)
        if free:
            weight.untyped_storage().resize_(0)
        return y * factor

    x, factor = (torch.randn(4, 16, device=device, requires_grad=True) for _ in range(2))
    for free in (True, False):
        weight = torch.randn(16, device=device, requires_grad=True)
        result = call_recomputing(forward, x, (weight, factor, free), {})
        assert len(recomputed_in(result.grad_fn)) == (not free)
        if free:
            torch.autograd.grad(result.sum(), factor)
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"memory of a tensor of shape \(16,\) was freed before the backward"):
        torch.autograd.grad(result.sum(), factor)


def test_a_weight_that_zero_3_has_taken_apart_is_not_needed_for_a_recompute(device: str) -> None:
    x, weight, factor = inputs_of(device)
    weight = nn.Parameter(weight.detach())
    weight.ds_id = 7
    assert len(recomputed_in(call_recomputing(as_it_is, x, (weight, factor), {}).grad_fn)) == 0


def test_a_leaf_is_saved_as_the_object_it_is(device: str) -> None:
    leaf = torch.randn(4, 16, device=device, requires_grad=True)
    result = call_recomputing(lambda x: x * x.detach(), leaf, (), {})
    assert any(saved[0] is leaf for saved in saved_in(result.grad_fn)) is False  # x.detach() is another tensor
    result = call_recomputing(lambda x: x.sin(), leaf, (), {})
    assert [saved[0] is leaf for saved in saved_in(result.grad_fn)] == [True]


def test_an_output_is_made_anew_for_another_stream(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(x: Tensor, weight: Tensor, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = rms_norm(x, weight)
        return y * factor, y * factor.sin(), y * factor.cos()

    inputs = inputs_of(device)
    results = call_recomputing(forward, inputs[0], tuple(inputs[1:]), {})
    (recomputable,) = {recomputable for result in results for recomputable in recomputed_in(result.grad_fn)}
    streams = iter([1, 2, 2])
    monkeypatch.setattr(recompute, "_current_stream", lambda: next(streams))
    first, second, third = (recomputable.materialize((0, torch.float32)) for _ in range(3))
    assert first is not second
    assert second is third


def test_a_dropped_graph_leaves_nothing_to_the_collector(device: str) -> None:
    inputs = inputs_of(device)
    gc.collect()
    gc.disable()
    try:
        result = call_recomputing(through_views, inputs[0], tuple(inputs[1:]), {})
        (recomputable,) = recomputed_in(result.grad_fn)
        kept = StorageWeakRef(result.untyped_storage()), weakref.ref(recomputable._reads[-1])
        del recomputable, result
        assert kept[0].expired()
        assert kept[1]() is None
    finally:
        gc.enable()


def layers_of(model: Any) -> list[bool]:
    return [getattr(layer, "fused_norm_recompute", False) for layer in model.model.layers]


@pytest.mark.parametrize("residual", [True, slow(False)])
def test_the_report_counts_the_layers_and_undoing_leaves_nothing(residual: bool, device: str) -> None:
    model = build("qwen3", seed=0, device=device)
    stock = snapshot(model)
    report = fused_norm.apply_fused_norm(model, residual=residual)
    assert report.recompute is None
    assert "recompute" not in report.summary() + report.to_json()
    report = fused_norm.apply_fused_norm(model, residual=residual, recompute=True)
    layers = [f"model.layers.{number}" for number in range(2)]
    assert [(row.path, row.reason) for row in report.recompute] == [(layer, None) for layer in layers]
    assert report.summary().endswith("; recompute in 2 layers")
    assert '"path": "model.layers.1"' in report.to_json()
    assert len(recomputed_in(loss_of(model, FEW).grad_fn)) > 4
    fused_norm.apply_fused_norm(model, residual=residual)
    assert layers_of(model) == [False, False]
    fused_norm.apply_fused_norm(model, residual=residual, recompute=True)
    fused_norm.remove_fused_norm(model)
    assert snapshot(model) == stock


def test_only_layers_with_something_fused_recompute(device: str) -> None:
    model = build("qwen3", seed=0, device=device)
    for layer, other in ((1, 0), (0, 1)):
        report = fused_norm.apply_fused_norm(model, modules=f"model.layers.{layer}.*", recompute=True)
        assert [row.path for row in report.recompute] == [f"model.layers.{layer}"]
        assert (layers_of(model)[layer], layers_of(model)[other]) == (True, False)


@pytest.mark.parametrize("before", [True, False])
def test_a_layer_that_other_code_has_built_on_stays_as_it_is(before: bool, device: str) -> None:
    model = build("qwen3", seed=0, device=device)
    fused_norm.apply_fused_norm(model, recompute=before)
    layer = model.model.layers[0]
    layer.__class__ = type("FSDPLayer", (type(layer),), {})
    if before:
        with pytest.raises(FusedNormError, match="remove_fused_norm before sharding"):
            fused_norm.apply_fused_norm(model)
    reason = fused_norm.apply_fused_norm(model, recompute=True).recompute[0].reason
    assert reason is None if before else "other code has built on its class" in reason
    assert layers_of(model) == [before, True]


def test_a_layer_with_a_forward_of_its_own_keeps_its_outputs(device: str) -> None:
    model = build("qwen3", seed=0, device=device)
    model.model.layers[0].forward = partial(type(model.model.layers[0]).forward, model.model.layers[0])
    report = fused_norm.apply_fused_norm(model, recompute=True)
    assert layers_of(model) == [False, True]
    assert "its forward was replaced on the instance" in report.recompute[0].reason
    assert "no recompute in Qwen3DecoderLayer: " in str(report)
    assert report.summary().endswith("recompute in 1 layers")


@pytest.mark.parametrize("wrong", [1, "True", "mlps", None])
def test_the_option_is_one_of_its_levels(wrong: Any) -> None:
    with pytest.raises(TypeError, match=f'recompute must be True, False, "mlp" or "attention", not {wrong!r}'):
        fused_norm.FuseOptions(recompute=wrong)


def trained(recompute: Any, sharded: bool, rank: int, ranks: int) -> list[Tensor]:
    """Return the losses, and the parameters or gradients, of a rank of FSDP2 or DDP with its own batches."""
    model = wrapped = build("gemma3_text" if sharded else "qwen3", seed=0, dtype=BF16)
    fused_norm.apply_fused_norm(model, recompute=recompute)
    if sharded:
        mesh, layer = init_device_mesh("cpu", (ranks,)), model.model.layers[1]
        for module in (layer.pre_feedforward_layernorm, layer.self_attn.q_norm, *model.model.layers[1:], model):
            fully_shard(module, mesh=mesh)
    else:
        wrapped = DistributedDataParallel(model)
    assert all(layer.fused_norm_recompute == recompute for layer in model.model.layers)
    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(rank))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-2), []
    for length in (5, 8):
        loss = loss_of(wrapped, ids[:, :length])
        assert (len(recomputed_in(loss.grad_fn)) > 10) == bool(recompute)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    parameters = [parameter.detach() for parameter in model.parameters()]
    return [*losses, *(parameter.full_tensor() if sharded else parameter for parameter in parameters)]


def assert_recompute_changes_nothing(rank: int, ranks: int) -> None:
    for sharded in (True, False):
        plain, *others = (trained(recompute, sharded, rank, ranks) for recompute in (False, True, "attention"))
        for recomputed in others:
            assert_same(recomputed, plain)


@pytest.mark.slow
def test_two_ranks_of_fsdp2_and_ddp_have_the_bits_that_they_have_without(tmp_path: Path) -> None:
    on_two_ranks(assert_recompute_changes_nothing, tmp_path)
