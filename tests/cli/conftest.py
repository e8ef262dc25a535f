"""A fault for commands that compare: training that is wrong where it is fused, and nowhere else."""

import pytest
from transformers import LlamaModel

from ..patcher.models import is_fused


@pytest.fixture
def wrong_where_fused(monkeypatch):
    """Make a gradient of fused Llama models too large by a thousandth."""
    forward = LlamaModel.forward

    def wrong(self, *arguments, **named):
        weight = self.layers[0].input_layernorm.weight
        if is_fused(self.norm) and not weight._backward_hooks:
            weight.register_hook(lambda gradient: gradient * 1.001)
        return forward(self, *arguments, **named)

    monkeypatch.setattr(LlamaModel, "forward", wrong)
