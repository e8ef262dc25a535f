"""Adapters are added to every linear, trained, and what is frozen has the dtypes of people's own recipes."""

import warnings

import pytest
import torch
from transformers import LlamaConfig

from fused_norm.convergence.comparison import Comparison
from fused_norm.convergence.model_source import ModelSource, add_adapters
from fused_norm.model_configs import build, tiny_config

CPU = torch.device("cpu")


def test_a_model_is_the_same_every_time_and_has_no_dropout():
    source = ModelSource("mine", LlamaConfig(**tiny_config("llama").to_diff_dict() | {"attention_dropout": 0.5}))
    model, twin = (source.build(seed=3, dtype=torch.float32, device=CPU) for _ in range(2))
    tokens = torch.arange(12).view(1, 12)
    assert model.training
    assert torch.equal(model(tokens).logits, twin(tokens).logits)


@pytest.mark.parametrize(
    ("execution", "precision", "norms", "dropout"),
    [
        ("lora", "fp32", 5, 0),
        ("lora", "mixed", 5, 0),
        ("lora-alone", "mixed", 0, 0),
        ("lora-dropout", "mixed", 0, 0.05),
    ],
)
def test_adapters_are_trained_on_every_linear_and_what_is_frozen_has_a_dtype_of_its_own(
    execution, precision, norms, dropout
):
    model = build("llama", seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        add_adapters(model, Comparison("llama", precision, execution))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert sum("lora_" in name for name in trained) == 2 * 14
    assert sum("lora_" not in name for name in trained) == norms
    assert {parameter.dtype for parameter in trained.values()} == {torch.float32}
    frozen = {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad}
    assert frozen == {torch.float32 if precision == "fp32" else torch.bfloat16}
    assert not [name for name, parameter in trained.items() if not parameter.any()]
    layer = model.model.layers[0].mlp.up_proj
    assert layer.scaling["default"] != 1
    assert getattr(layer.lora_dropout["default"], "p", 0) == dropout


@pytest.mark.parametrize(("execution", "adapters"), [("qlora", 7), ("qlora-qv", 2)])
def test_linears_of_4_bits_have_adapters_and_all_else_is_frozen_in_fp32(execution, adapters):
    model = ModelSource.of_family("llama", {"num_hidden_layers": 1}).in_whole_blocks()
    model = model.build(seed=0, dtype=torch.float32, device=CPU)
    add_adapters(model, Comparison("llama", "mixed", execution))
    adapted = [module for module in model.modules() if hasattr(module, "lora_A")]
    states = [layer.base_layer.weight.quant_state for layer in adapted]
    assert len(states) == adapters
    assert all(state.nested and state.quant_type == "nf4" and state.shape[1] % state.blocksize == 0 for state in states)
    trained = {name.split(".")[-3] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"lora_A", "lora_B"}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32, torch.uint8}
