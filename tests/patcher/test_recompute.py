"""Recomputing layers get the same bits from fewer saved tensors, and save a tensor unless its bits are certain."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import re
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks
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
from fused_norm.patcher.recompute_linears import Recipe

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


def test_each_output_is_made_once_and_freed_when_all_have_it(device: str, recomputed_by: list[str]) -> None:
    _, recomputing = pair("qwen3", device)
    loss = loss_of(recomputing, FEW)
    recomputables = {id(recomputable): recomputable for recomputable in recomputed_in(loss.grad_fn)}
    *others, up, other_up, qkv, other_qkv = sorted(
        sum(recomputable._saved.values()) for recomputable in recomputables.values()
    )
    assert (up, other_up, qkv, other_qkv) == (2, 2, 3, 3)
    assert set(others) <= {1, 2}  # q and k, of which transformers 4 saves a copy of k
    loss.backward(retain_graph=True)
    assert len(recomputed_by) == len(recomputables)
    assert all(not recomputable._made for recomputable in recomputables.values())
    first = {name: parameter.grad.clone() for name, parameter in recomputing.named_parameters()}
    recomputing.zero_grad()
    loss.backward()
    assert len(recomputed_by) == 2 * len(recomputables)
    assert all(torch.equal(parameter.grad, first[name]) for name, parameter in recomputing.named_parameters())
    kind = type(recomputables.popitem()[1])
    del recomputables, loss
    gc.collect()
    assert not [item for item in gc.get_objects() if type(item) is kind]


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


def checkpointed_inside(around: str, device: str, recompute: bool) -> tuple[nn.Module, nn.Module]:
    """Return a fused model and its caller; their recomputing modules have a checkpoint inside of them."""
    model = build("gemma2", seed=0, device=device)
    caller = model
    if around == "wrapped layers":
        layers = model.model.layers
        for index, layer in enumerate(layers):
            layers[index] = checkpoint_wrapper(layer, preserve_rng_state=False)
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        caller = nn.ModuleDict({"models": nn.ModuleList([model])})
    report = fused_norm.apply_fused_norm(caller, recompute=recompute, loss=False)  # the caller's layer is the model
    assert report.counts["norm"] > 4
    assert not recompute or all(row.reason is None for row in report.recompute)
    return model, caller


@pytest.mark.parametrize("around", [slow("wrapped layers"), "a whole model"])
def test_a_checkpoint_inside_runs_as_often_and_keeps_as_little_as_without(
    around: str, device: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recompute, "_warned", set())
    results, said = [], []
    for recomputes in (False, True):
        model, caller = checkpointed_inside(around, device, recomputes)
        seen: list[StorageWeakRef] = []

        def dropped(module: nn.Module, _: Any, output: Tensor, seen: list[StorageWeakRef] = seen) -> Tensor:
            output = nn.functional.dropout(output, 0.5)  # another mask for each run
            seen.append(StorageWeakRef(output.untyped_storage()))
            return output

        for module in model.model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(dropped)
        torch.manual_seed(5)
        with caplog.at_level(logging.WARNING, logger="fused_norm"):
            loss = loss_of(model, FEW)
        said.append("other saved-tensor hooks are active" in caplog.text)
        gc.collect()
        runs, kept = len(seen), sum(not storage.expired() for storage in seen)
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        names = {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in gradients.items()}
        results.append((runs, kept, len(seen), (loss.detach(), names)))
        del caller
    assert results[0][:3] == results[1][:3]
    assert results[0][2] == 2 * results[0][0]
    assert_same_bits(results[0][3], results[1][3])
    assert said == [False, True]


def test_other_hooks_see_what_they_see_without(device: str) -> None:
    plain, recomputing = pair("qwen3", device)
    seen: list[list[Any]] = []
    for model in (plain, recomputing):
        seen.append([])

        def pack(tensor: Tensor, shapes: list[Any] = seen[-1]) -> Tensor:
            shapes.append(tuple(tensor.shape))
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss_of(model, FEW)
    assert seen[0] == seen[1]


def test_torch_func_is_taken_over_the_models_that_recompute(device: str) -> None:
    plain, recomputing = pair("llama", device)
    ids = FEW

    def gradients(model: Any) -> dict[str, Tensor]:
        def loss(parameters: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(model, parameters, (), {"input_ids": ids, "labels": ids}).loss

        return torch.func.grad(loss)({name: parameter.detach() for name, parameter in model.named_parameters()})

    actual, expected = gradients(recomputing), gradients(plain)
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


@pytest.mark.usefixtures("large_graphs")
@pytest.mark.slow
def test_a_layer_compiles_as_one_graph(device: str) -> None:
    plain, recomputing = pair("qwen3", device)
    compiled = torch.compile(recomputing.model, fullgraph=True, backend="aot_eager")
    ids = FEW
    assert torch.equal(compiled(ids, use_cache=False)[0], plain.model(ids, use_cache=False)[0])


@pytest.mark.usefixtures("large_graphs")
@pytest.mark.slow
def test_compiled_parts_of_a_layer_may_save_its_outputs(device: str) -> None:
    plain, recomputing = pair("qwen3", device)
    for layer in recomputing.model.layers:
        layer.mlp.compile(backend="aot_eager")
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
    expected, results = step(plain, FEW), []
    models = [copy.deepcopy(recomputing) for _ in range(3)]
    threads = [threading.Thread(target=lambda model=model: results.append(step(model, FEW))) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    for result in results:
        assert_same_bits(expected, result)


class Doubled(torch.autograd.Function):
    """Double the input in place without telling autograd, as Liger's rotary embedding does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.data.mul_(2)
        return x.transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient.transpose(0, 1)


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
    "copied by a cast": (scaled(lambda y: y.to(y.dtype, copy=True)), 1),
    "through views of a cast": (scaled(lambda y: y.double().transpose(0, 1)[1:, :, 3:5].unsqueeze(0)), 1),
    "cast twice": (scaled(lambda y: y.to(BF16).float()), 0),
    "a cast of a view": (scaled(lambda y: y.transpose(0, 1).to(BF16)), 0),
    "cast into another order": (scaled(lambda y: y.to(BF16, memory_format=torch.contiguous_format)), 0),
    "edited, then cast": (scaled(lambda y: edited(y).to(BF16)), 0),
    "cast, then edited": (scaled(lambda y: edited(y.to(BF16))), 0),
    "given other memory, then cast": (scaled(lambda y: replaced(y).to(BF16)), 0),
    "cast and forgotten": (lambda x, weight, factor: rms_norm(x, weight).to(BF16) * factor, 0),
    "given other memory": (scaled(replaced), 0),
    "its bits as integers": (scaled(lambda y: y.view(torch.int32)), 0),
    "negated as a view": (scaled(torch._neg_view), 0),
    "in complex numbers": (scaled(lambda y: torch.view_as_complex(y.unflatten(2, (8, 2))).conj().imag), 0),
    "of a class of its own": (scaled(lambda y: y.as_subclass(Subclass)), 0),
    "sparse": (lambda x, weight, factor: torch.sparse.mm(rms_norm(x, weight).to_sparse(), factor.t()), 0),
    "edited in place": (lambda x, weight, factor: rms_norm(x, weight).mul_(3) * factor, 0),
    "edited without gradient": (lambda x, weight, factor: edited(rms_norm(x, weight)) * factor, 0),
    "doubled unseen": (lambda x, weight, factor: Doubled.apply(rms_norm(x, weight)) * factor.t(), 0),
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


@pytest.mark.parametrize("read_in", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("replaced", [0, 1])
def test_what_the_forward_has_read_is_what_is_recomputed_from(replaced: int, read_in: torch.dtype, device: str) -> None:
    """Optimizers, and ``model.double()``, replace a parameter's ``data``, which does not change its version."""
    inputs = inputs_of(device)
    expected = rms_norm(*inputs[:2]).detach()
    result = call_recomputing(as_it_is, inputs[0], tuple(inputs[1:]), {})
    assert len(recomputed_in(result.grad_fn)) == 1
    inputs[replaced].data = torch.randn_like(inputs[replaced], dtype=read_in)
    assert torch.equal(torch.autograd.grad(result.sum(), inputs[2])[0], expected)


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "the output": lambda y, saved: y.add_(1),
    "a view": lambda y, saved: y.detach()[1:].add_(1),
    "a cast": lambda y, saved: saved.add_(1),
}


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_into_after_it_was_saved_is_noticed(write: str, device: str) -> None:
    def forward(x: Tensor, weight: Tensor, factor: Tensor) -> Tensor:
        y = rms_norm(x, weight)
        saved = y.to(BF16) if write == "a cast" else y[:, 1:]
        result = saved * factor[:, :1]
        WRITES[write](y, saved)
        return result

    inputs = inputs_of(device)
    for result in (forward(*inputs), call_recomputing(forward, inputs[0], tuple(inputs[1:]), {})):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(result.sum(), inputs[2])


def test_a_cast_on_another_device_is_saved_as_it_is(device: str) -> None:
    inputs = inputs_of(device)

    def forward(x: Tensor, weight: Tensor, factor: Tensor) -> Tensor:
        y = rms_norm(x, weight)
        return y.to("meta") * factor.to("meta")

    assert len(recomputed_in(call_recomputing(forward, inputs[0], tuple(inputs[1:]), {}).grad_fn)) == 0


@pytest.mark.parametrize(
    "around", [Watching, forward_ad.dual_level, partial(disable_saved_tensors_hooks, "not here"), called_operators]
)
def test_where_others_watch_or_hooks_are_not_allowed_nothing_is_recomputed(around: Callable, device: str) -> None:
    inputs = inputs_of(device)
    with around() as called:
        result = call_recomputing(as_it_is, inputs[0], tuple(inputs[1:]), {})
    assert around is not called_operators or called == ["rms_norm"]
    assert len(recomputed_in(result.grad_fn)) == 0


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
    with pytest.raises(RuntimeError, match=r"memory of a tensor of shape \(16,\) was freed"):
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


def test_graphs_hold_no_register_and_no_cycle(device: str) -> None:
    inputs = inputs_of(device)
    gc.collect()
    gc.disable()
    try:
        result = call_recomputing(through_views, inputs[0], tuple(inputs[1:]), {})
        storage = StorageWeakRef(result.untyped_storage())
        (recipe,) = (saved for saved in saved_in(result.grad_fn) if type(saved) is Recipe)
        *_, rstd = recipe.reads
        kept = weakref.ref(rstd)
        del recipe, result, rstd
        assert storage.expired()
        assert kept() is None
    finally:
        gc.enable()


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


def layers_of(model: Any) -> list[bool]:
    return [getattr(layer, "fused_norm_recompute", False) for layer in model.model.layers]


def test_the_report_counts_the_layers(device: str) -> None:
    model = build("qwen3", seed=0, device=device)
    stock = snapshot(model)
    report = fused_norm.apply_fused_norm(model)
    assert report.recompute is None
    assert "recompute" not in report.summary() + report.to_json()
    report = fused_norm.apply_fused_norm(model, recompute=True)
    assert [(row.path, row.module, row.reason) for row in report.recompute] == [
        ("model.layers.0", "Qwen3DecoderLayer", None),
        ("model.layers.1", "Qwen3DecoderLayer", None),
    ]
    assert report.summary().endswith("; recompute in 2 layers")
    assert '"path": "model.layers.1"' in report.to_json()
    before = snapshot(model)
    assert fused_norm.apply_fused_norm(model, recompute=True) == report
    assert snapshot(model) == before
    fused_norm.apply_fused_norm(model)
    assert layers_of(model) == [False, False]
    fused_norm.apply_fused_norm(model, recompute=True)
    fused_norm.remove_fused_norm(model)
    assert snapshot(model) == stock


@pytest.mark.slow
def test_layers_without_a_fused_add_recompute_too(device: str, recomputed_by: list[str]) -> None:
    plain, recomputing = (build("qwen3", seed=0, device=device) for _ in range(2))
    stock, stock_layer = snapshot(recomputing), type(recomputing.model.layers[0])
    fused_norm.apply_fused_norm(plain, residual=False)
    fused_norm.apply_fused_norm(recomputing, residual=False, recompute=True)
    assert_same_bits(step(plain, FEW), step(recomputing, FEW))
    assert recomputed_by.count("recomputed_norm") == 4
    fused_norm.apply_fused_norm(recomputing, residual=False)
    assert layers_of(recomputing) == [False, False]
    fused_norm.apply_fused_norm(recomputing, residual=False, consumers=False)
    assert {type(layer) for layer in recomputing.model.layers} == {stock_layer}
    fused_norm.apply_fused_norm(recomputing, residual=False, recompute=True)
    fused_norm.remove_fused_norm(recomputing)
    assert snapshot(recomputing) == stock


def test_only_layers_with_something_fused_recompute(device: str) -> None:
    model = build("qwen3", seed=0, device=device)
    report = fused_norm.apply_fused_norm(model, modules="model.layers.1.*", recompute=True)
    assert [row.path for row in report.recompute] == ["model.layers.1"]
    assert layers_of(model) == [False, True]
    fused_norm.apply_fused_norm(model, modules="model.layers.0.*", recompute=True)
    assert layers_of(model) == [True, False]


def test_a_layer_that_stands_in_two_places_is_one_and_a_norm_in_a_list_is_none(device: str) -> None:
    model = build("qwen3", seed=0, device=device)
    model.model.layers[1] = model.model.layers[0]
    model.norms = nn.ModuleList([copy.deepcopy(model.model.norm)])
    report = fused_norm.apply_fused_norm(model, recompute=True, strict=False)
    assert "norms.0" in [site.path for site in report.fused]
    assert [row.path for row in report.recompute] == ["model.layers.0"]


def test_a_layer_with_a_forward_of_its_own_keeps_its_outputs(device: str) -> None:
    model = build("qwen3", seed=0, device=device)
    model.model.layers[0].forward = partial(type(model.model.layers[0]).forward, model.model.layers[0])
    report = fused_norm.apply_fused_norm(model, recompute=True)
    assert layers_of(model) == [False, True]
    assert "its forward was replaced on the instance" in report.recompute[0].reason
    assert re.search(
        r"(?m)^no recompute in Qwen3DecoderLayer: (.|\n  )*\n     1 recompute  model\.layers\.0$", str(report)
    )
    assert report.summary().endswith("recompute in 1 layers")


def test_a_layer_that_other_code_has_built_on_stays_as_it_is(device: str) -> None:
    for before, after in ((False, True), (True, False)):
        model = build("qwen3", seed=0, device=device)
        fused_norm.apply_fused_norm(model, recompute=before)
        layer = model.model.layers[0]
        layer.__class__ = type("FSDPLayer", (type(layer),), {})
        if before:
            with pytest.raises(FusedNormError, match="remove_fused_norm before sharding"):
                fused_norm.apply_fused_norm(model, recompute=after)
            assert fused_norm.apply_fused_norm(model, recompute=True).recompute[0].reason is None
        else:
            report = fused_norm.apply_fused_norm(model, recompute=after)
            assert "other code has built on its class" in report.recompute[0].reason
        assert layers_of(model) == [before, True]


@pytest.mark.slow
def test_copies_and_pickles_recompute(device: str) -> None:
    _, recomputing = pair("qwen3", device)
    expected = step(recomputing, FEW)
    for copied in (copy.deepcopy(recomputing), pickle.loads(pickle.dumps(recomputing))):
        assert layers_of(copied) == [True, True]
        assert type(copied.model.layers[0]) is type(recomputing.model.layers[0])
        assert_same_bits(expected, step(copied, FEW))


@pytest.mark.parametrize("wrong", [1, "True", "mlps", None])
def test_the_option_is_one_of_its_levels(wrong: Any) -> None:
    with pytest.raises(TypeError, match=f'recompute must be True, False, "mlp" or "attention", not {wrong!r}'):
        fused_norm.FuseOptions(recompute=wrong)


def sharded(recompute: Any, rank: int, ranks: int) -> list[Tensor]:
    """Return the losses and the final parameters of a rank of FSDP2 with its own batches."""
    mesh = init_device_mesh("cpu", (ranks,))
    model = build("gemma3_text", seed=0, dtype=torch.bfloat16)
    fused_norm.apply_fused_norm(model, recompute=recompute)
    fully_shard(model.model.layers[1].pre_feedforward_layernorm, mesh=mesh)
    fully_shard(model.model.layers[1].self_attn.q_norm, mesh=mesh)
    for layer in model.model.layers[1:]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(layer.fused_norm_recompute == recompute for layer in model.model.layers)
    ids = torch.randint(0, 256, (2, 8 * ranks), generator=torch.Generator().manual_seed(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        for length in (5, 8):  # accumulated
            loss = loss_of(model, ids[:, :length])
            if recompute:
                assert len(recomputed_in(loss.grad_fn)) > 10
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(parameter.full_tensor().detach() for parameter in model.parameters())]


def replicated(recompute: Any, rank: int, ranks: int) -> list[Tensor]:
    """Return the losses and the final gradients of a rank of DDP with its own batches."""
    model = build("qwen3", seed=0, dtype=torch.bfloat16)
    fused_norm.apply_fused_norm(model, recompute=recompute)
    parallel = DistributedDataParallel(model)
    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(rank))
    losses = []
    for length in (9, 16):
        loss = loss_of(parallel, ids[:, :length])
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *(parameter.grad for parameter in model.parameters())]


def assert_recompute_changes_nothing(rank: int, ranks: int) -> None:
    for run in (sharded, replicated):
        plain, *others = (run(recompute, rank, ranks) for recompute in (False, True, "attention"))
        for recomputed in others:
            assert all(torch.equal(*pair) for pair in zip(plain, recomputed, strict=True)), run.__name__


@pytest.mark.slow
def test_two_ranks_of_fsdp2_and_ddp_have_the_bits_that_they_have_without(tmp_path: Path) -> None:
    on_two_ranks(assert_recompute_changes_nothing, tmp_path)
