"""Operators of others that have the name of one of PyTorch's do to lazy logits and losses what they do to real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional

from fused_norm import apply_fused_norm

from .models import tokens

DEFINED = {
    "tanh(Tensor x) -> Tensor": lambda x: x.sin(),
    "mul(Tensor x, float number) -> Tensor": lambda x, number: x + number,
    "div(Tensor x, float number) -> Tensor": lambda x, number: x - number,
    "size(Tensor x) -> Tensor": lambda x: x.cos(),
}


@pytest.fixture
def ops() -> Iterator[Any]:
    """Operators that compute something else than their names say."""
    library = torch.library.Library("fused_norm_named_alike", "DEF")
    for schema, function in DEFINED.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CompositeImplicitAutograd")
    yield torch.ops.fused_norm_named_alike
    library._destroy()


LOSSES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "tanh": lambda ops, x, y: functional.cross_entropy(ops.tanh(x / 3.0) * 3.0, y),
    "tanh.default": lambda ops, x, y: functional.cross_entropy(ops.tanh.default(x / 3.0) * 3.0, y),
    "mul": lambda ops, x, y: functional.cross_entropy(ops.mul(x, 2.0), y),
    "div": lambda ops, x, y: functional.cross_entropy(ops.div(x, 2.0).relu(), y),
    "size": lambda ops, x, y: functional.cross_entropy(ops.size(x), y),
    "div of a sum": lambda ops, x, y: ops.div(functional.cross_entropy(x, y, reduction="sum"), 2.0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_another_operator_of_a_name_of_pytorch_is_called(name: str, ops: Any) -> None:
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48
    )
    results = []
    for is_fused in (False, True):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        if is_fused:
            apply_fused_norm(model)

        def loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
            return LOSSES[name](ops, logits.flatten(0, 1).float(), labels.flatten())

        model.loss_function = loss
        output = model(input_ids=tokens(), labels=tokens())
        output.loss.backward()
        results.append([output.loss, model.lm_head.weight.grad, model.model.embed_tokens.weight.grad])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
