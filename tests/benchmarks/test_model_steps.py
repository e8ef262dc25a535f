"""Each kind of step does what its name says, and twins of a model share only its weights."""

import pytest
import torch

from benchmarks.model_cases import ModelCase
from benchmarks.model_steps import prepare, relative_error

CPU = torch.device("cpu")


def prepared(step="", model_type="qwen3", batch=1, length=16, dtype=torch.float32):
    return prepare(ModelCase(model_type, None, batch, length, tuple(step.split())), dtype, CPU)


def test_a_twin_shares_weights_and_can_be_changed_alone():
    step = prepared()
    twin = step.twin()
    assert [id(weight) for weight in twin.model.parameters()] == [id(weight) for weight in step.model.parameters()]
    assert [id(buffer) for buffer in twin.model.buffers()] == [id(buffer) for buffer in step.model.buffers()]
    assert set(map(id, twin.model.modules())).isdisjoint(map(id, step.model.modules()))
    stock = step.outputs_and_gradients()
    twin.model.norm.forward = lambda x: 2 * x
    assert relative_error(twin.outputs_and_gradients(), stock) > 0.1
    assert relative_error(step.outputs_and_gradients(), stock) == 0
    twin.forward_backward()
    step.drop_gradients()
    assert all(weight.grad is None for weight in twin.model.parameters())


def test_with_loss_a_step_begins_its_backward_from_the_loss_over_the_vocabulary():
    step = prepared("loss")
    loss, _ = step.outputs_and_gradients()
    logits = step.model(input_ids=step.tokens).logits[0, :-1]
    assert torch.allclose(loss, torch.nn.functional.cross_entropy(logits, step.tokens[0, 1:]))
    step.forward_backward()
    assert all(weight.grad.any() for weight in step.model.parameters())


def test_masked_prompts_take_the_labels_of_the_first_half_of_every_sequence():
    step = prepared("packed masked", batch=2, length=32)
    starts = [place for place, position in enumerate(step.inputs["position_ids"].flatten().tolist()) if position == 0]
    expected = step.tokens.flatten().clone()
    for start, end in zip(starts, [*starts[1:], step.tokens.numel()], strict=True):
        expected[start : start + (end - start) // 2] = -100
    assert torch.equal(step.inputs["labels"].flatten(), expected)


def test_under_autocast_weights_stay_in_fp32_and_with_checkpointing_layers_run_twice():
    dtypes, by_kind = [], {}
    step = prepared("autocast", dtype=torch.bfloat16)
    assert {weight.dtype for weight in step.model.parameters()} == {torch.float32}
    step.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    step.step()
    assert dtypes == [torch.bfloat16]
    for kind in ("", "checkpointing"):
        step, calls = prepared(kind), []
        step.model.layers[0].input_layernorm.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        by_kind[kind] = step.outputs_and_gradients(), len(calls)
    assert (by_kind[""][1], by_kind["checkpointing"][1]) == (1, 2)
    assert relative_error(by_kind["checkpointing"][0], by_kind[""][0]) < 1e-6


def test_adapters_alone_are_trained_and_watched_in_fp32_beside_a_bf16_model_under_autocast():
    pytest.importorskip("peft")
    step = prepared("lora", dtype=torch.bfloat16)
    step.forward_backward()
    trained = {name: weight.dtype for name, weight in step.model.named_parameters() if weight.grad is not None}
    assert trained == dict.fromkeys(step.watched, torch.float32)
    assert all("lora_" in name for name in trained)
    step.drop_gradients()
    assert all(weight.grad is None for weight in step.model.parameters())
    assert step.autocast == torch.bfloat16
    norms = [step.model.get_submodule(path).weight for path in step.norms]
    assert {(weight.dtype, weight.requires_grad) for weight in norms} == {(torch.bfloat16, False)}


def test_linears_of_layers_are_nf4_beside_fp32_norms_and_train_their_adapters():
    pytest.importorskip("bitsandbytes")
    step, plain = prepared("qlora", dtype=torch.bfloat16), prepared("lora", dtype=torch.bfloat16)
    linear = step.model.get_base_model().layers[0].mlp.up_proj
    weight = linear.base_layer.weight
    assert (type(linear).__name__, weight.dtype, weight.quant_type) == ("Linear4bit", torch.uint8, "nf4")
    assert {step.model.get_submodule(path).weight.dtype for path in step.norms} == {torch.float32}
    assert list(step.watched) == list(plain.watched)
    stock = step.outputs_and_gradients()
    assert relative_error(step.twin().outputs_and_gradients(), stock) == 0
    assert 0.01 < relative_error(stock, plain.outputs_and_gradients()) < 1, "four bits are not sixteen"


def test_as_trl_has_them_norms_and_head_of_a_model_in_4_bits_are_as_loaded_and_frozen():
    pytest.importorskip("bitsandbytes")
    case = ModelCase("qwen3", None, 1, 16, ("qlora", "loss"))
    model = prepare(case, torch.bfloat16, CPU, in_fp32=False).model
    others = {name: weight for name, weight in model.named_parameters() if "lora_" not in name}
    assert {weight.dtype for weight in others.values()} == {torch.bfloat16, torch.uint8}
    assert not any(weight.requires_grad for weight in others.values())


@pytest.mark.parametrize("kind", ["generate", "generate static"])
def test_a_generation_has_a_cache_of_its_kind_and_its_time_is_that_of_a_token(kind):
    step = prepared(kind, batch=2, length=3)
    caches = []

    def note(module, args, kwargs, output):  # transformers 5.24 renamed the argument
        caches.append(type(kwargs.get("cache", kwargs.get("past_key_values"))).__name__)

    step.model.model.register_forward_hook(note, with_kwargs=True)
    step.step()
    assert set(caches) == {"StaticCache" if kind.endswith("static") else "DynamicCache"}
    assert len(caches) == step.parts == 3
    (logits,) = step.outputs_and_gradients()
    with torch.no_grad():
        whole = step.model(input_ids=step.tokens).logits
    assert torch.allclose(logits[-2 * whole.shape[-1] :], whole[:, -1].flatten(), atol=1e-5)
