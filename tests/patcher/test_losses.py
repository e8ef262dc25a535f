"""Language models that train with Liger's loss, and are stock in all else."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import logging
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers.models.llama import modeling_llama

import fused_norm
from fused_norm import FusedNormError
from fused_norm.check.against_float64 import check_step
from fused_norm.model_configs import build
from fused_norm.patcher.losses import _LIGERS_ARGUMENTS, FusedLoss

from .models import relative, tokens
from .ranks import on_two_ranks

functional = pytest.importorskip("liger_kernel.transformers.functional")


def pair(device: str, family: str = "llama") -> tuple[Any, Any]:
    """A model that is fused with its own loss, and its twin with Liger's, both in training."""
    own = build(family, seed=0, device=device).train()
    liger = copy.deepcopy(own)
    fused_norm.apply_fused_norm(own)
    fused_norm.apply_fused_norm(liger, loss="liger")
    return own, liger


def run(model: nn.Module, labels: torch.Tensor, **asked: Any) -> Any:
    """The output of a step on tokens of which those that are no label are any; gradients are added up."""
    output = model(input_ids=labels.clamp(min=0), labels=labels, use_cache=False, **asked)
    output.loss.backward()
    return output


def assert_gradients_are_near(one: nn.Module, other: nn.Module) -> None:
    expected = {name: parameter.grad for name, parameter in other.named_parameters() if parameter.requires_grad}
    assert all(gradient is not None for gradient in expected.values())
    for name, parameter in one.named_parameters():
        if name in expected:
            assert relative(parameter.grad, expected[name]) < 1e-5, name


def some_ignored(device: str, count: int) -> torch.Tensor:
    labels = tokens(device, length=9)
    labels[:, :count] = -100
    return labels


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_are_as_near_to_the_truth_as_stocks(family: str, dtype: torch.dtype, device: str) -> None:
    model = build(family, seed=0, dtype=dtype, device=device)
    result = check_step(model, tokens(device, length=12), options={"loss": "liger"})
    assert result.report.loss is not None
    assert [row.reason for row in result.report.loss] == [None]
    assert result.ok, str(result)


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma"])
def test_steps_that_are_added_up_have_stocks_gradients_and_no_logits(family: str, device: str) -> None:
    own, liger = pair(device, family)
    batches = [some_ignored(device, 2), some_ignored(device, 6)]
    count = sum((one[:, 1:] != -100).sum() for one in batches)
    for labels in batches:
        expected, found = (run(model, labels, num_items_in_batch=count) for model in (own, liger))
        assert relative(found.loss, expected.loss) < 1e-6
        assert expected.logits is not None
        assert found.logits is None
    assert_gradients_are_near(liger, own)


def test_evaluation_and_generation_have_the_bits_of_stock(device: str) -> None:
    own, liger = pair(device)
    ids = tokens(device)
    with torch.no_grad():
        for model in (own, liger):
            assert model(input_ids=ids).logits is not None, "without labels, in training too"
            model.eval()
        expected, found = (model(input_ids=ids, labels=ids) for model in (own, liger))
        assert torch.equal(found.logits, expected.logits)
        assert torch.equal(found.loss, expected.loss)
        skipped = liger(input_ids=ids, labels=ids, skip_logits=True)
        assert skipped.logits is None
        assert relative(skipped.loss, expected.loss) < 1e-6
        generated = [model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0) for model in (own, liger)]
    assert torch.equal(*generated)


def test_labels_may_be_positional_and_logits_asked_for(device: str) -> None:
    own, liger = pair(device)
    ids = tokens(device)
    expected, found = (model(ids, None, None, None, None, ids) for model in (own, liger))
    assert found.logits is None
    assert relative(found.loss, expected.loss) < 1e-6
    assert torch.equal(liger(ids, labels=ids, skip_logits=False).logits, expected.logits)


def test_only_the_model_that_is_asked_for_has_it(device: str) -> None:
    forward = modeling_llama.LlamaForCausalLM.forward
    own, liger = pair(device)
    ids = tokens(device)
    assert run(liger, ids).logits is None
    assert run(own, ids).logits is not None
    assert modeling_llama.LlamaForCausalLM.forward is forward
    assert type(own) is modeling_llama.LlamaForCausalLM
    assert inspect.signature(liger.forward) == inspect.signature(own.forward)
    with fused_norm.disabled():
        assert run(liger, ids).logits is not None


def test_the_options_of_the_last_call_hold(device: str) -> None:
    model = build("llama", seed=0, device=device).train()
    labels = tokens(device)
    report = fused_norm.apply_fused_norm(model, loss="liger")
    with_loss = type(model)
    assert fused_norm.apply_fused_norm(model, loss="liger") == report
    assert type(model) is with_loss
    assert run(model, labels).logits is None
    assert fused_norm.apply_fused_norm(model).loss is None
    assert type(model) is modeling_llama.LlamaForCausalLM
    fused_norm.apply_fused_norm(model, loss="liger")
    assert fused_norm.remove_fused_norm(model) > 1
    assert run(model, labels).logits is not None
    assert not any(isinstance(module, FusedLoss) for module in model.modules())


def test_the_report_has_a_row() -> None:
    report = fused_norm.apply_fused_norm(build("llama", seed=0), loss="liger")
    row = {"path": "", "module": "LlamaForCausalLM", "loss": "liger", "reason": None, "cause": None}
    assert json.loads(report.to_json())["loss"] == [row]
    assert report.summary().endswith("; loss by liger")
    assert "fused LlamaForCausalLM: loss by liger" in str(report)
    assert "loss" not in json.loads(fused_norm.apply_fused_norm(build("llama", seed=0)).to_json())


def test_copies_have_it_and_checkpoints_are_stock(device: str, tmp_path: Path) -> None:
    _, liger = pair(device)
    labels = tokens(device)
    for one in (copy.deepcopy(liger), pickle.loads(pickle.dumps(liger))):
        assert type(one) is type(liger)
        assert run(one, labels).logits is None
    liger.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert type(loaded) is modeling_llama.LlamaForCausalLM


@pytest.mark.parametrize("first", ["peft", "fused"])
def test_adapters_train_as_with_the_own_loss(first: str, device: str) -> None:
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = build("qwen3", seed=0, device=device)
    if first == "fused":
        fused_norm.apply_fused_norm(model, loss="liger")
    liger = peft.get_peft_model(model, lora).train()
    if first == "peft":
        report = fused_norm.apply_fused_norm(liger, loss="liger")
        assert [(row.path, row.reason) for row in report.loss or ()] == [("base_model.model", None)]
    own = copy.deepcopy(liger)
    fused_norm.apply_fused_norm(own)
    labels = tokens(device)
    assert run(liger, labels).logits is None
    assert run(own, labels).logits is not None
    assert_gradients_are_near(liger, own)


@pytest.mark.parametrize("options", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_a_head_in_a_wrapper_of_peft_is_called(options: dict[str, Any], device: str, caplog) -> None:
    model = build("llama", seed=0, device=device)
    fused_norm.apply_fused_norm(model, loss="liger")
    lora = peft.LoraConfig(**{"target_modules": ["q_proj"], **options})
    adapted = peft.get_peft_model(model, lora).train()
    with caplog.at_level(logging.WARNING, "fused_norm"):
        assert run(adapted, tokens(device)).logits is not None
    assert "its lm_head is no plain linear" in caplog.text
    report = fused_norm.apply_fused_norm(adapted, loss="liger")
    assert [row.cause for row in report.loss or ()] == ["overridden"]
    assert "kept LlamaForCausalLM: its lm_head is no plain linear" in str(report)


def scale_loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **kwargs: Any) -> torch.Tensor:
    """A loss of the user's own."""
    return logits.float().square().mean()


@pytest.mark.parametrize("embedded", [False, True])
def test_a_head_that_is_trained_alone_gets_stocks_gradient(embedded: bool, device: str) -> None:
    own, liger = pair(device)
    labels = tokens(device)
    for model in (own, liger):
        model.requires_grad_(False)
        model.lm_head.requires_grad_(True)
        given = {"inputs_embeds": model.get_input_embeddings()(labels)} if embedded else {"input_ids": labels}
        model(**given, labels=labels, use_cache=False).loss.backward()
    assert torch.equal(liger.lm_head.weight.grad, own.lm_head.weight.grad)


@pytest.mark.parametrize("kept", [3, torch.tensor([0, 2, 4])])
def test_a_loss_of_the_tokens_whose_logits_are_kept_is_stocks(kept: Any, device: str) -> None:
    ids = tokens(device)
    wanted = slice(-kept, None) if isinstance(kept, int) else kept
    losses = [model(ids, labels=ids[:, wanted], logits_to_keep=kept).loss for model in pair(device)]
    assert torch.equal(*losses)


@pytest.mark.parametrize(
    "given", [{"label_smoothing": 0.3}, {"reduction": "sum"}, {"lse_square_scale": 0.5}, {"use_token_scaling": True}]
)
def test_what_only_ligers_loss_heeds_is_passed_over_as_in_stock(given: dict[str, Any], device: str) -> None:
    ids = tokens(device)
    assert torch.equal(*(model(ids, labels=ids, **given).loss for model in pair(device)))


def test_every_argument_of_ligers_loss_is_known() -> None:
    further = {"accum_dtype", "chunk_mem_const", "return_z_loss", "return_token_accuracy", "return_predicted_tokens"}
    assert {*inspect.signature(functional.liger_fused_linear_cross_entropy).parameters} == {
        *("input", "weight", "target", "ignore_index"),
        *further,
        *_LIGERS_ARGUMENTS,
    }


def test_inputs_that_are_not_contiguous_train_as_in_stock(device: str) -> None:
    ids = tokens(device)
    own, liger = pair(device)
    embedded = own.get_input_embeddings()(ids.T).detach().transpose(0, 1)
    assert torch.equal(*(model(inputs_embeds=embedded, labels=ids).loss for model in (own, liger)))


def test_a_second_backward_and_derivatives_of_gradients_are_errors(device: str) -> None:
    _, liger = pair(device)
    ids = tokens(device)
    loss = liger(ids, labels=ids, num_items_in_batch=7).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="allows one backward of a step"):
        loss.backward()
    loss = liger(ids, labels=ids).loss
    with pytest.raises(RuntimeError, match="no derivatives of its gradients"):
        torch.autograd.grad(loss, [liger.lm_head.weight], create_graph=True)


@pytest.mark.parametrize("change", ["hook", "loss", "float64"])
def test_where_the_loss_would_be_another_the_model_computes_its_own(change: str, device: str) -> None:
    _, liger = pair(device)
    calls = []
    if change == "hook":
        liger.lm_head.register_forward_hook(lambda *_: calls.append(1))
    elif change == "loss":
        liger.loss_function = scale_loss
    else:
        liger.double()
    expected = copy.deepcopy(liger)
    fused_norm.remove_fused_norm(expected)
    labels = tokens(device)
    found = run(liger, labels)
    assert found.logits is not None
    assert relative(found.loss, run(expected, labels).loss) < 1e-6
    assert len(calls) == (2 if change == "hook" else 0)


@pytest.mark.parametrize("where", ["on the instance", "its class's forward"])
def test_what_liger_has_put_there_is_kept(where: str, monkeypatch) -> None:
    lce_forward = importlib.import_module("liger_kernel.transformers.model.llama").lce_forward
    model = build("llama", seed=0)
    if where == "on the instance":
        model.forward = types.MethodType(lce_forward, model)
    else:
        monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "forward", lce_forward)
    (row,) = fused_norm.apply_fused_norm(model, loss="liger").loss or ()
    assert row.cause == "overridden"
    assert where in str(row.reason)
    assert "liger_kernel.transformers.model.llama.lce_forward" in str(row.reason)
    assert type(model) is modeling_llama.LlamaForCausalLM


class OwnForward(modeling_llama.LlamaForCausalLM):
    """A model of the user's own, whose forward does something else."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def own_forward() -> nn.Module:
    return OwnForward(build("llama", seed=0).config)


def classifier() -> nn.Module:
    return modeling_llama.LlamaForSequenceClassification(build("llama", seed=0).config)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: build("granite", seed=0), "liger has no loss for it"),
        (own_forward, "liger has no loss for it"),
        (classifier, "it has no lm_head"),
    ],
)
def test_a_model_without_such_a_loss_is_an_error(make: Any, reason: str) -> None:
    model = make()
    before = type(model)
    with pytest.raises(FusedNormError, match=f"loss='liger': {before.__name__} keeps its own, for {reason}"):
        fused_norm.apply_fused_norm(model, loss="liger")
    report = fused_norm.apply_fused_norm(model, loss="liger", strict=False)
    assert [row.reason for row in report.loss or ()] == [reason]
    assert report.fused
    assert type(model) is before


def test_without_the_package_the_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.model", None)
    model = build("llama", seed=0)
    with pytest.raises(FusedNormError, match=r"needs the package liger-kernel .*pip install 'fused-norm\[liger\]'"):
        fused_norm.apply_fused_norm(model, loss="liger", strict=False)
    assert type(model.model.norm) is modeling_llama.LlamaRMSNorm


def test_an_unknown_loss_is_an_error() -> None:
    with pytest.raises(ValueError, match="loss must be 'liger' or None, not 'cce'"):
        fused_norm.FuseOptions(loss="cce")  # type: ignore[arg-type]


def losses_of_sharded_models(rank: int, world: int) -> list[float]:
    """The losses of two steps of SGD: of the own loss alone; of Liger's in DDP, and sharded, the head by itself too."""
    losses = []
    for loss, unit in ((None, None), ("liger", "ddp"), ("liger", "root"), ("liger", "head")):
        model = build("llama", seed=0).train()
        fused_norm.apply_fused_norm(model, loss=loss)
        if unit == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        elif unit is not None:
            mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            if unit == "head":
                fully_shard(model.lm_head, mesh=mesh)
            fully_shard(model, mesh=mesh)
            report = fused_norm.apply_fused_norm(model, loss=loss, strict=False)
            assert [row.reason is None for row in report.loss or ()] == [unit == "root"]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            output = run(model, tokens())
            assert (output.logits is None) is (unit in ("ddp", "root"))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(output.loss.item())
    return losses


@pytest.mark.slow
def test_two_ranks_of_ddp_and_fsdp2_train_as_one_device(tmp_path: Path) -> None:
    for losses in on_two_ranks(losses_of_sharded_models, tmp_path):
        alone, *wrapped = losses[:2], losses[2:4], losses[4:6], losses[6:]
        for found in wrapped:
            assert found == pytest.approx(alone, rel=1e-5)
        assert alone[1] < alone[0]
