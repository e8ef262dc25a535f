"""A source builds the same model every time, ready to train, and its layers are found in order."""

import warnings

import pytest
import torch
from transformers import LlamaConfig

from fused_norm.convergence.comparison import EXECUTIONS, Comparison
from fused_norm.convergence.model_source import ModelSource, layers_of, set_up_execution
from fused_norm.model_configs import build, tiny_config


def test_a_model_is_the_same_every_time_and_has_no_dropout():
    source = ModelSource("mine", LlamaConfig(**tiny_config("llama").to_diff_dict() | {"attention_dropout": 0.5}))
    one, other = (source.build(seed=3, dtype=torch.float32, device=torch.device("cpu")) for _ in range(2))
    tokens = torch.arange(12).view(1, 12)
    assert one.training
    assert torch.equal(one(tokens).logits, other(tokens).logits)


def test_a_checkpoint_is_built_with_its_own_weights(tmp_path):
    saved = build("gemma", seed=5)
    saved.save_pretrained(tmp_path)
    source = ModelSource("mine", saved.config, str(tmp_path))
    model = source.build(seed=0, dtype=torch.float32, device=torch.device("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), saved.parameters(), strict=True))


def test_layers_are_found_and_experts_are_not():
    assert list(layers_of(build("qwen3_moe", seed=0))) == ["model.layers.0", "model.layers.1"]


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_an_execution_is_set_up_without_a_warning(execution):
    model = build("llama", seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_up = set_up_execution(model, Comparison("llama", "fp32", execution), "eager")
    checkpointing = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert checkpointing == (execution == "checkpointing")
    assert hasattr(set_up, "peft_config") == execution.startswith("lora")
