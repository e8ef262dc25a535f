"""A source builds the same model every time, ready to train, and its layers come in order."""

import warnings

import pytest
import torch
from transformers import LlamaConfig

from fused_norm.convergence.comparison import EXECUTIONS, FROZEN_NORMS, LORA, QLORA, Comparison
from fused_norm.convergence.model_source import ModelSource, add_adapters, layers_of, set_up_execution
from fused_norm.model_configs import build, tiny_config


def test_a_model_is_the_same_every_time_and_has_no_dropout():
    source = ModelSource("mine", LlamaConfig(**tiny_config("llama").to_diff_dict() | {"attention_dropout": 0.5}))
    model, twin = (source.build(seed=3, dtype=torch.float32, device=torch.device("cpu")) for _ in range(2))
    tokens = torch.arange(12).view(1, 12)
    assert model.training
    assert torch.equal(model(tokens).logits, twin(tokens).logits)


def test_a_checkpoint_is_built_with_its_own_weights(tmp_path):
    saved = build("gemma", seed=5)
    saved.save_pretrained(tmp_path)
    source = ModelSource("mine", saved.config, str(tmp_path))
    model = source.build(seed=0, dtype=torch.float32, device=torch.device("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), saved.parameters(), strict=True))


def test_layers_are_found_and_experts_are_not():
    assert list(layers_of(build("qwen3_moe", seed=0))) == ["model.layers.0", "model.layers.1"]


@pytest.mark.parametrize("execution", [execution for execution in EXECUTIONS if execution not in LORA])
def test_an_execution_is_set_up_without_a_warning(execution):
    model = build("llama", seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_up = set_up_execution(model, Comparison("llama", "fp32", execution), "eager")
    checkpointing = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert checkpointing == (execution == "checkpointing")
    assert set_up is model


DTYPES = {"fp32": (torch.float32, torch.float32), "mixed": (torch.float32, torch.bfloat16)}


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("execution", [name for name in LORA if name not in QLORA])
def test_adapters_are_trained_on_every_linear_and_what_is_frozen_has_a_dtype_of_its_own(execution, precision):
    model = build("llama", seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        add_adapters(model, Comparison("llama", precision, execution))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    norms = [name for name in trained if "lora_" not in name]
    assert len(trained) - len(norms) == 2 * 14
    assert len(norms) == (0 if execution in FROZEN_NORMS else 5)
    assert [{parameter.dtype for parameter in some} for some in (trained.values(), frozen)] == [
        {dtype} for dtype in DTYPES[precision]
    ]
    assert not [name for name, parameter in trained.items() if not parameter.any()]
    layer = model.model.layers[0].mlp.up_proj
    assert layer.scaling["default"] != 1
    assert getattr(layer.lora_dropout["default"], "p", 0) == (0.05 if execution == "lora-dropout" else 0)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("execution", QLORA)
def test_linears_of_4_bits_have_adapters_and_all_else_is_frozen_in_fp32(execution, family):
    source = ModelSource.of_family(family, {"num_hidden_layers": 1}).in_whole_blocks()
    model = source.build(seed=0, dtype=torch.float32, device=torch.device("cpu"))
    add_adapters(model, Comparison(family, "mixed", execution))
    adapted = [module for module in model.modules() if hasattr(module, "lora_A")]
    states = [layer.base_layer.weight.quant_state for layer in adapted]
    assert len(states) == (2 if execution == "qlora-qv" else 7)
    assert all(state.nested and state.quant_type == "nf4" and state.shape[1] % state.blocksize == 0 for state in states)
    assert {name.split(".")[-3] for name, parameter in model.named_parameters() if parameter.requires_grad} == {
        "lora_A",
        "lora_B",
    }
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32, torch.uint8}
    dropouts = {getattr(layer.lora_dropout["default"], "p", 0) for layer in adapted}
    assert dropouts == {0.05 if execution == "qlora-dropout" else 0}


def test_sizes_of_a_users_model_stay():
    source = ModelSource("mine", ModelSource.of_family("llama", {}).config)
    assert source.in_whole_blocks() is source
