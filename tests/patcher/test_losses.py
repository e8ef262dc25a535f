"""Language models whose head and loss are fused into one operator: losses, logits, and trainers that call them."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig
from transformers.loss import loss_utils
from transformers.models.llama import modeling_llama

import fused_norm
from fused_norm.check.against_float64 import check_step
from fused_norm.model_configs import build, tiny_config
from fused_norm.patcher.lazy_logits import CrossEntropy

from .models import (
    Subclass,
    assert_gradients_near,
    gradients_of,
    losses_of,
    pair,
    relative,
    slow_but,
    tokens,
    trainer_of,
)
from .ranks import called_operators, on_two_ranks

SOFTCAP = {"final_logit_softcapping": 3.0}
MODELS: dict[str, dict[str, Any]] = {"qwen3": {}, "gemma2": SOFTCAP, "granite": {"logits_scaling": 4.0}}
"""Families, with the config of what they compute between head and loss."""


def some_ignored(device: str, count: int = 4, length: int = 9) -> Tensor:
    labels = tokens(device, length=length)
    labels[:, :count] = -100
    return labels


def run(model: nn.Module, labels: Tensor, **kwargs: Any) -> Any:
    """Run a step, add up its gradients, and return its output. Ignored labels stand for arbitrary tokens."""
    output = model(input_ids=labels.clamp(min=0), labels=labels, use_cache=False, **kwargs)
    output.loss.backward()
    return output


def assert_gradients_are_near(fused: nn.Module, own: nn.Module, tolerance: float = 1e-5) -> None:
    """The floor is for gradients that are 0 but for roundings, such as that of a bias that softmax cancels."""
    assert_gradients_near(gradients_of(fused), gradients_of(own), tolerance, floor=1e-10)


def assert_steps_alike(fused: nn.Module, own: nn.Module, labels: Tensor, **kwargs: Any) -> Any:
    """Compare losses and gradients of a step; return both outputs."""
    expected, actual = (run(model, labels, **kwargs) for model in (own, fused))
    assert relative(actual.loss, expected.loss) < 1e-6
    assert_gradients_are_near(fused, own)
    return actual, expected


def is_fused(model: nn.Module) -> bool:
    """Return whether a step runs the fused operator, whatever the report says."""
    with called_operators() as called:
        run(model, some_ignored(next(model.parameters()).device.type))
    return "linear_cross_entropy" in called


@pytest.mark.parametrize("name", slow_but(("gemma2",), MODELS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loss_and_gradients_are_as_near_to_the_truth_as_stocks(name: str, dtype: torch.dtype, device: str) -> None:
    model = build(tiny_config(name, **MODELS[name]), seed=0, dtype=dtype, device=device)
    result = check_step(model, tokens(device, length=12))
    assert result.report.counts["loss"] == 1
    assert result.ok, str(result)


@pytest.mark.parametrize("name", MODELS)
def test_steps_that_are_added_up_have_stocks_gradients_and_make_logits_if_they_are_read(
    name: str, device: str, reads: list[str]
) -> None:
    own, fused = pair(device, tiny_config(name, **MODELS[name]))
    batches = [some_ignored(device, 2), some_ignored(device, 6)]
    count = sum((labels[:, 1:] != -100).sum() for labels in batches)
    for labels in batches:
        actual, expected = assert_steps_alike(fused, own, labels, num_items_in_batch=count)
        assert type(actual.loss) is Tensor
        assert type(actual.logits) is not Tensor
    assert reads == []
    assert torch.equal(actual.logits + 0, expected.logits + 0)
    assert torch.equal(actual.logits.argmax(-1), expected.logits.argmax(-1))
    assert reads == ["read"]


@pytest.mark.parametrize(("count", "items"), [(0, None), (8, torch.tensor(7)), (9, None), (9, 7)], ids=str)
def test_any_number_of_labels(count: int, items: Any, device: str) -> None:
    kwargs = {} if items is None else {"num_items_in_batch": items}
    own, fused = pair(device)
    expected, actual = (run(model, some_ignored(device, count), **kwargs) for model in (own, fused))
    torch.testing.assert_close(actual.loss, expected.loss, equal_nan=True, rtol=1e-6, atol=0)
    for name, gradient in gradients_of(own).items():
        torch.testing.assert_close(gradients_of(fused)[name], gradient, equal_nan=True, rtol=1e-4, atol=1e-6)


def test_a_loss_on_top_of_it_goes_through_the_logits(device: str) -> None:
    """Distillation does so; the gradients of the hidden states are compared too."""
    own, fused = pair(device, "gemma2")
    hidden = []
    for model in (own, fused):
        output = model(input_ids=tokens(device), labels=tokens(device), output_hidden_states=True, use_cache=False)
        output.hidden_states[-1].retain_grad()
        (output.loss + output.logits.log_softmax(-1).square().mean()).backward()
        hidden.append(output.hidden_states[-1].grad)
    assert relative(hidden[1], hidden[0]) < 1e-5
    assert_gradients_are_near(fused, own)


def test_under_autocast_it_rounds_as_stock(device: str, reads: list[str]) -> None:
    own, fused = pair(device, "qwen3")
    with torch.autocast(device, torch.bfloat16):
        expected, actual = (run(model, tokens(device)) for model in (own, fused))
    assert actual.logits.dtype == expected.logits.dtype == torch.bfloat16
    assert reads == []
    assert torch.equal(actual.logits + 0, expected.logits + 0)
    assert relative(actual.loss, expected.loss) < 1e-6
    assert_gradients_are_near(fused, own, 6e-3)


def test_a_loss_that_is_kept_keeps_nothing_after_its_backward(device: str) -> None:
    _, fused = pair(device)
    hidden: list[weakref.ref[Tensor]] = []
    fused.model.register_forward_hook(lambda _, args, output: hidden.append(weakref.ref(output[0])))
    loss = run(fused, tokens(device)).loss
    gc.collect()
    assert loss.grad_fn is not None
    assert [reference() for reference in hidden] == [None]


LOSSES: dict[str, Callable[[Any, Tensor], Any]] = {
    "of some tokens": lambda model, ids: model(
        ids, labels=ids[:, ::2], logits_to_keep=torch.arange(0, ids.shape[1], 2)
    ),
    "of labels that are shifted already": lambda model, ids: model(
        ids, labels=ids, shift_labels=some_ignored(ids.device.type, length=ids.shape[1]).roll(-1, 1)
    ),
    "without a token": lambda model, ids: model(ids, labels=ids, ignore_index=5),
    "in a tuple": lambda model, ids: model(ids, None, None, None, None, ids, return_dict=False, reduction="sum"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_arguments_of_the_model_and_of_the_loss_function_reach_it(name: str, device: str) -> None:
    expected, actual = (LOSSES[name](model, tokens(device, length=9)) for model in pair(device))
    assert type(actual) is type(expected)
    assert type(actual[0]) is Tensor
    assert type(actual[1]) is not Tensor
    assert relative(actual[0], expected[0]) < 1e-6
    assert torch.equal(actual[1] + 0, expected[1] + 0)


def test_without_labels_and_in_generation_it_is_stock(device: str) -> None:
    models, ids = pair(device), tokens(device)
    with torch.no_grad():
        expected, actual = (model(input_ids=ids).logits for model in models)
        generated = [model.eval().generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0) for model in models]
    assert type(actual) is Tensor
    assert torch.equal(expected, actual)
    assert torch.equal(*generated)


SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ELSEWHERE: dict[str, tuple[Any, str, dict[str, Any], str]] = {
    "a masked language model, with a bias": (
        transformers.AutoModelForMaskedLM, "bert", {**SMALL, "vocab_size": 64, **UNDROPPED}, "cls.predictions.decoder",
    ),
    "a conditional generation": (
        transformers.AutoModelForImageTextToText, "gemma3", {
            "text_config": tiny_config("gemma3_text").to_dict(),
            "vision_config": {**SMALL, "image_size": 28, "patch_size": 14},
        }, "lm_head",
    ),
    "without RMSNorms": (
        transformers.AutoModelForCausalLM, "gpt2", {
            "vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "resid_pdrop": 0.0,
            "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        }, "lm_head",
    ),
}  # fmt: skip
"""A class of models, a type, its sizes, and the path of its head, by name."""


@pytest.mark.parametrize("name", ELSEWHERE)
def test_other_models_have_it_too(name: str, device: str, reads: list[str]) -> None:
    kind, model_type, sizes, path = ELSEWHERE[name]
    torch.manual_seed(0)
    own = kind.from_config(AutoConfig.for_model(model_type, **sizes)).to(device).train()
    fused = copy.deepcopy(own)
    report = fused_norm.apply_fused_norm(fused, modules=path, strict=False)
    assert [row.path for row in report.fused if row.kind == "loss"] == [path]
    labels = tokens(device, length=9) % 60 + 2
    mask = torch.ones_like(labels)
    mask[1, -3:] = 0
    types = {"token_type_ids": torch.zeros_like(labels)} if name == "a conditional generation" else {}
    expected, actual = (
        model(input_ids=labels, labels=labels, attention_mask=mask, **types).loss for model in (own, fused)
    )
    (expected + actual).backward()
    assert reads == []
    assert relative(actual, expected) < 1e-5
    assert_gradients_are_near(fused, own, 1e-4)


def test_an_auxiliary_loss_that_is_added_to_it_stays(device: str, reads: list[str]) -> None:
    own, fused = pair(device, tiny_config("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.5))
    for kwargs in ({}, {"num_items_in_batch": 7}):
        _, expected = assert_steps_alike(fused, own, some_ignored(device), **kwargs)
        assert expected.aux_loss > 0.1
    assert reads == []


def test_a_head_that_is_called_by_another_model_or_thread_meanwhile_has_real_logits(device: str) -> None:
    _, fused = pair(device)
    copied, kinds = copy.deepcopy(fused), {}

    def call(name: str, head: nn.Module, x: Tensor) -> None:
        kinds[name] = type(head(x)) is Tensor

    def meanwhile(model: nn.Module, inputs: Any, output: Any) -> None:
        x = output.last_hidden_state.detach()
        call("its own", fused.lm_head, x)
        call("another one", copied.lm_head, x)
        thread = threading.Thread(target=call, args=("in another thread", fused.lm_head, x))
        thread.start()
        thread.join()

    fused.model.register_forward_hook(meanwhile)
    run(fused, some_ignored(device))
    assert kinds == {"its own": False, "another one": True, "in another thread": True}


def _written(labels: Tensor, write: Callable[[Tensor], Any]) -> Tensor:
    labels = labels.clone()
    write(labels)
    return labels


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "padded with no label": lambda labels: functional.pad(labels, (0, 1), value=-100),
    "padded with zeros": lambda labels: functional.pad(labels, (0, 1)),
    "of a mask": lambda labels: labels[labels > 0],
    "of numbers": lambda labels: labels[:, torch.tensor([5, 5, 6])],
    "filled": lambda labels: labels.masked_fill(labels == -100, 3),
    "a written item": lambda labels: _written(labels, lambda own: own.__setitem__(own == -100, 2)),
    "an operator": lambda labels: _written(labels, lambda own: own.__imod__(7)),
    "a copy": copy.deepcopy,
}
"""Changes to labels, by name."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_loss_function_may_select_and_write_labels(name: str, device: str) -> None:
    (own, fused), kinds = pair(device), []

    def loss_of(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        changed = CHANGES[name](labels)
        kinds.extend((type(labels), type(changed)))
        rows = logits.view(-1, vocab_size).float()
        number = min(len(rows), changed.numel())
        return functional.cross_entropy(rows[:number], changed.reshape(-1)[:number])

    own.loss_function = fused.loss_function = loss_of
    assert_steps_alike(fused, own, some_ignored(device))
    assert set(kinds) == {Tensor}


@pytest.mark.parametrize("way", ["data of a head", "another dtype"])
def test_logits_that_are_read_late_are_those_of_the_forward_or_an_error(way: str, device: str) -> None:
    _, fused = pair(device)
    labels = some_ignored(device)
    output = fused(input_ids=labels.clamp(min=0), labels=labels, use_cache=False)
    if way.startswith("data"):
        fused.lm_head.weight.data.mul_(2)
    else:
        fused.half()
    with pytest.raises(RuntimeError, match="read them before"):
        _ = output.logits + 0


def test_labels_of_another_class_have_real_logits(device: str) -> None:
    losses = []
    for model in pair(device):
        output = model(input_ids=tokens(device), labels=tokens(device).as_subclass(Subclass))
        losses.append(output.loss)
        assert type(output.logits) in (Tensor, Subclass)
    assert type(losses[1]) is type(losses[0])
    assert float(losses[1]) == pytest.approx(float(losses[0]), rel=1e-5)


def test_a_loss_that_is_switched_off_on_its_way_has_the_same_roundings(device: str) -> None:
    _, fused = pair(device, dtype=torch.bfloat16)
    x = torch.randn(7, fused.config.hidden_size, device=device).bfloat16()
    target = torch.arange(7, device=device)
    for in_fp32 in (False, True):
        logits = fused.lm_head(x)
        logits = (logits.float() if in_fp32 else logits) * 0.7
        expected = functional.cross_entropy((torch.tanh(logits / 3) * 3).float(), target)
        with fused_norm.disabled():
            how = CrossEntropy(target, "mean", -100, 0.0, scale=0.7, cap=3.0, in_fp32=in_fp32)
            assert torch.equal(fused.lm_head.fused_norm_cross_entropy(x, how), expected)


def test_a_head_in_another_dtype_than_its_model_raises_as_in_stock(device: str) -> None:
    errors = []
    for model in pair(device, dtype=torch.bfloat16):
        model.lm_head.float()
        with pytest.raises(RuntimeError) as raised:
            model(input_ids=tokens(device), labels=tokens(device))
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


def test_only_the_model_that_is_asked_for_has_it(device: str) -> None:
    own, fused = pair(device)
    assert is_fused(fused)
    assert not is_fused(own)
    assert inspect.signature(fused.forward) == inspect.signature(own.forward)
    with fused_norm.disabled():
        assert not is_fused(fused)


def test_the_options_of_the_last_call_hold(device: str) -> None:
    model = build("llama", seed=0, device=device).train()
    report = fused_norm.apply_fused_norm(model)
    fused, head = type(model), type(model.lm_head)
    assert "fused LlamaForCausalLM: cross entropy without logits" in str(report)
    assert fused_norm.apply_fused_norm(model) == report
    assert (type(model), type(model.lm_head)) == (fused, head)
    off = fused_norm.apply_fused_norm(model, loss=False)
    assert [(row.path, row.reason) for row in off.kept] == [("lm_head", "switched off: loss=False")]
    assert (type(model), type(model.lm_head)) == (modeling_llama.LlamaForCausalLM, nn.Linear)
    fused_norm.apply_fused_norm(model)
    assert fused_norm.remove_fused_norm(model) > 2
    assert (type(model), type(model.lm_head)) == (modeling_llama.LlamaForCausalLM, nn.Linear)
    assert not is_fused(model)


def test_copies_have_it_and_checkpoints_are_stock(device: str, tmp_path: Path) -> None:
    _, fused = pair(device)
    for copied in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert is_fused(copied)
    fused.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).architectures == ["LlamaForCausalLM"]


def test_a_head_that_was_swapped_out_of_its_model_or_is_shared_computes_what_stocks_does(device: str) -> None:
    """``remove_fused_norm`` reaches only modules of the model: a head that was swapped out keeps its class."""
    own, fused = pair(device)
    second = build("llama", seed=1, device=device).train()
    left = second.lm_head = fused.lm_head
    fused.lm_head = copy.deepcopy(own.lm_head)
    assert is_fused(fused)
    fused_norm.remove_fused_norm(fused)
    assert type(left) is not nn.Linear
    results = []
    for head in (left, own.lm_head):
        second.lm_head = head
        second.zero_grad(), head.zero_grad()
        output = run(second, some_ignored(device))
        assert type(output.logits) is Tensor
        results.append([output.loss, output.logits, *(parameter.grad.clone() for parameter in second.parameters())])
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("options", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_a_head_in_a_wrapper_of_peft_is_called(options: dict[str, Any], device: str) -> None:
    _, model = pair(device, tiny_config("llama", tie_word_embeddings=True))
    adapted = peft.get_peft_model(model, peft.LoraConfig(**{"target_modules": ["q_proj"], **options})).train()
    assert not is_fused(adapted)
    (row,) = [row for row in fused_norm.apply_fused_norm(adapted).kept if row.kind == "loss"]
    assert "no plain linear" in str(row.reason)
    assert not is_fused(adapted)


def my_loss(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    """A user's loss."""
    return logits.float().square().mean()


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **named: 2 * function(*args, **named)


def with_twice_the_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
    output = _FORWARD(self, *args, **kwargs)
    assert type(kwargs["labels"]) is type(output.logits) is Tensor
    output.loss = output.loss * 2
    return output


def doubled_logits(module: nn.Module, args: Any, out: Any) -> Any:
    return out * 2 if getattr(module, "out_features", 0) == 256 else None


_FORWARD, _ENTROPY = modeling_llama.LlamaForCausalLM.forward, functional.cross_entropy
REPLACED: dict[str, tuple[tuple[Any, Any, Any], ...]] = {
    "the loss for causal models": ((loss_utils.LOSS_MAPPING, "ForCausalLM", doubled(loss_utils.ForCausalLMLoss)),),
    "the cross entropy of PyTorch": ((functional, "cross_entropy", doubled(_ENTROPY)),),
    "its defaults": ((_ENTROPY, "__defaults__", (*_ENTROPY.__defaults__[:-1], 0.5)),),
    "the linear of PyTorch": ((functional, "linear", doubled(functional.linear)),),
    "the forward of linears": ((nn.Linear, "forward", doubled(nn.Linear.forward)),),
    "the forward of the model": ((modeling_llama.LlamaForCausalLM, "forward", with_twice_the_loss),),
    "a hook on all modules": ((nn.modules.module._global_forward_hooks, 0, doubled_logits),),
}
"""Replacements by other code that affect all models: the owner, the name, and the replacement."""


def resized(model: Any) -> None:
    torch.manual_seed(0)
    model.resize_token_embeddings(300)


def adapted(model: nn.Module) -> None:
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(lora, model)


def dispatched(model: Any) -> None:
    names = ("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head")
    device = model.device.type
    accelerate.dispatch_model(model, dict.fromkeys(names, device), main_device=device, force_hooks=True)


OF_A_MODEL: dict[str, Callable[[Any], Any]] = {
    "the loss of the model": lambda model: setattr(model, "loss_function", my_loss),
    "a hook on the head": lambda model: model.lm_head.register_forward_hook(doubled_logits),
    "a forward on the head": lambda model: setattr(
        model.lm_head, "forward", types.MethodType(doubled(nn.Linear.forward), model.lm_head)
    ),
    "float64": nn.Module.double,
    "a compiled loss": lambda model: setattr(
        model, "loss_function", torch.compile(model.loss_function, fullgraph=True, backend="eager")
    ),
}
"""Changes by other code to a single model."""

STILL_FUSED: dict[str, Callable[[Any], Any]] = {
    "resized": resized,
    "adapted": adapted,
    "dispatched by accelerate": dispatched,
    "frozen head": lambda model: model.lm_head.requires_grad_(False),
    "trained head": lambda model: model.model.requires_grad_(False),
    "tied": lambda model: setattr(model.lm_head, "weight", model.model.embed_tokens.weight),
}
"""Those with which its head is fused."""


@pytest.mark.parametrize("order", ["patch, replace", "replace, patch"])
@pytest.mark.parametrize("what", [*REPLACED, *OF_A_MODEL, *STILL_FUSED])
def test_what_others_have_replaced_is_what_runs(what: str, order: str, device: str, monkeypatch: Any) -> None:
    own, fused = pair(device)
    if order == "replace, patch":
        fused_norm.remove_fused_norm(fused)
    for owner, name, value in REPLACED.get(what, ()):
        (monkeypatch.setitem if isinstance(owner, dict) else monkeypatch.setattr)(owner, name, value)
    for model in (own, fused):
        (OF_A_MODEL | STILL_FUSED).get(what, id)(model)
    if order == "replace, patch":
        fused_norm.apply_fused_norm(fused, strict=False)
    actual, expected = assert_steps_alike(fused, own, some_ignored(device))
    assert relative(actual.logits + 0, expected.logits + 0) < 1e-6
    assert what not in STILL_FUSED or is_fused(fused)


class PassesAllOn(modeling_llama.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_a_loss_that_is_not_fused_has_a_row_or_is_logged(device: str, caplog: pytest.LogCaptureFixture) -> None:
    of_users, compiled, later = (build("llama", seed=0, device=device) for _ in range(3))
    of_users.loss_function = my_loss
    compiled.loss_function = torch.compile(compiled.loss_function, backend="eager")
    for model, reason in (
        (of_users, "my_loss, is no cross entropy of its logits alone"),
        (compiled, "its loss function is compiled"),
        (PassesAllOn(tiny_config("llama")), "its forward has no argument of the name labels"),
    ):
        (row,) = [row for row in fused_norm.apply_fused_norm(model).kept if row.kind == "loss"]
        assert reason in str(row.reason)
    later.__class__ = type("Later", (modeling_llama.LlamaForCausalLM,), {})  # a reason is logged once for each class
    fused_norm.apply_fused_norm(later, modules="lm_head")
    later.loss_function = my_loss
    run(later, tokens(device))
    assert "its logits are read by square" in caplog.text


def test_a_mode_that_watches_sees_stock_code(device: str) -> None:
    flops = []
    for model in pair(device):
        with FlopCounterMode(display=False) as counter:
            model(input_ids=tokens(device), labels=tokens(device), use_cache=False)
        flops.append(counter.get_total_flops())
    assert flops[0] == flops[1] > 0


@pytest.mark.slow
def test_in_compiled_graphs_it_is_stock(device: str) -> None:
    own, fused = pair(device)
    torch._dynamo.reset()
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    actual = compiled(input_ids=tokens(device), labels=tokens(device), use_cache=False)
    assert type(actual.logits) is Tensor
    expected = own(input_ids=tokens(device), labels=tokens(device), use_cache=False)
    assert relative(actual.loss, expected.loss) < 1e-6


def test_accelerate_casts_outputs_without_reading_them(device: str, reads: list[str]) -> None:
    _, fused = pair(device)
    forward = accelerate.utils.convert_outputs_to_fp32(torch.autocast(device, torch.bfloat16)(fused.forward))
    output = forward(input_ids=tokens(device), labels=tokens(device))
    output["loss"].backward()
    assert output["logits"].dtype == torch.float32
    assert type(output["logits"]) is not Tensor
    assert reads == []


def test_an_offloaded_head_is_stock(device: str) -> None:
    own, fused = pair(device)
    accelerate.cpu_offload(fused, execution_device=torch.device(device))
    with torch.no_grad():
        actual, expected = (model(input_ids=tokens(device), labels=tokens(device)) for model in (fused, own))
    assert relative(actual.loss, expected.loss) < 1e-6
    assert type(actual.logits) is Tensor


IN_PAIRS = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "learning_rate": 5e-5, "max_steps": 3}


UNEQUAL = [
    {"input_ids": ids, "labels": torch.where(torch.arange(12) < index % 7, -100, ids)}
    for index, ids in enumerate(tokens(batch=12, length=12))
]
"""Sequences with unequal numbers of labels."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"gradient_accumulation_steps": 2, "gradient_checkpointing": True}, {"bf16": True}]
)
def test_the_trainer_trains_as_without_and_reads_logits_for_metrics_alone(
    options: dict[str, Any], device: str, tmp_path: Path, reads: list[str]
) -> None:
    losses = []
    for model in pair(device):
        trainer = trainer_of(model, tmp_path, UNEQUAL, **IN_PAIRS, **options)
        trainer.train()
        assert reads == []
        with_metrics = trainer_of(
            model, tmp_path, UNEQUAL, compute_metrics=lambda of: {"sum": float(of.predictions.sum())}, **IN_PAIRS
        ).evaluate()
        losses.append([*losses_of(trainer).tolist(), with_metrics["eval_loss"], with_metrics["eval_sum"]])
    assert len(reads) == 6
    assert losses[1] == pytest.approx(losses[0], rel=1e-3 if "bf16" in options else 1e-4)


def sharded(rank: int, world: int) -> list[dict[str, Any]]:
    """Run two steps of SGD by each way to shard; return losses, whether logits were lazy, and a late read's result."""
    results = []
    for unit in ("alone", "ddp", "static", "root, patch", "mixed", "head"):
        model: Any = build("llama", seed=0).train()
        if unit not in ("alone", "root, patch"):
            fused_norm.apply_fused_norm(model, modules="lm_head")
        if unit in ("ddp", "static"):
            model = nn.parallel.DistributedDataParallel(model, static_graph=unit == "static")
        elif unit != "alone":
            mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if unit == "mixed" else None)
            units = [*model.model.layers, *([model.lm_head] if unit == "head" else []), model]
            for module in units:
                fully_shard(module, mesh=mesh, mp_policy=policy)
            report = fused_norm.apply_fused_norm(model, modules="lm_head", strict=False)
            assert report.counts["loss"] == (unit != "head")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses, late = [], ""
        for _ in range(2):
            output = run(model, tokens())
            logits = output.logits
            optimizer.step()
            optimizer.zero_grad()
            losses.append(output.loss.item())
        is_lazy = type(logits) is not Tensor
        if is_lazy and unit != "static":
            run(model, tokens())  # gathers the weights again
            try:
                logits.sum()
            except RuntimeError as error:
                late = str(error)
        results.append({"unit": unit, "losses": losses, "lazy": is_lazy, "late": late})
    return results


@pytest.mark.slow
def test_two_ranks_of_ddp_and_fsdp2_train_as_one_device(tmp_path: Path) -> None:
    for results in on_two_ranks(sharded, tmp_path):
        alone = results[0]["losses"]
        assert alone[1] < alone[0]
        for result in results[1:]:
            unit = result["unit"]
            assert result["losses"] == pytest.approx(alone, rel=1e-2 if unit == "mixed" else 1e-5), unit
            if unit in ("ddp", "root, patch", "mixed"):
                assert result["lazy"], unit
                assert "written to or freed" in result["late"], unit
            assert not (unit == "head" and result["lazy"])


def test_a_model_without_a_head_has_no_row() -> None:
    report = fused_norm.apply_fused_norm(modeling_llama.LlamaForSequenceClassification(tiny_config("llama")))
    assert not [row for row in (*report.fused, *report.kept) if row.kind == "loss"]


class WithASumOfItsOwn(modeling_llama.LlamaForCausalLM):
    """A language model whose own forward has a residual add before a norm."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.outer = modeling_llama.LlamaRMSNorm(config.hidden_size)

    def forward(self, input_ids: Tensor, labels: Any = None) -> Any:
        x = self.model(input_ids).last_hidden_state
        h = self.model.norm(x)
        h = x + h
        h = self.outer(h)
        logits = self.lm_head(h)
        return self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)


def test_a_model_that_is_rewritten_for_other_sites_keeps_its_loss_each_time() -> None:
    model = WithASumOfItsOwn(tiny_config("llama"))
    for options in ({}, {}, {"norms": False, "shared_inputs": False}, {}, {"loss": False}, {}):
        report = fused_norm.apply_fused_norm(model, **options)
        is_rewritten = "outer" in {site.path for site in report.fused if site.kind == "residual"}
        assert report.counts["loss"] == (not is_rewritten), options
        assert (type(model.lm_head) is not nn.Linear) == report.counts["loss"], options
