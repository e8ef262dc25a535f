"""Small models of any type are compared with stock, with the inputs that they take, and a wrong operator is told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fused_norm.kernels.operator import calls
from tools.coverage.stock_comparison import WithInputs, compare


class Tower(nn.Module):
    """It takes pictures and returns a dictionary with tensors somewhere inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pixels, size):
        y = self.linear(pixels)
        return {"states": (y, [y * size]), "size": torch.tensor(size), "copy": pixels}


def test_a_model_with_other_inputs_has_outputs_and_a_loss_in_its_dtype() -> None:
    model = WithInputs(Tower().bfloat16(), {"pixels": torch.randn(2, 4), "size": 3})
    output = model(input_ids=torch.zeros(2, 5), labels=torch.zeros(2, 5), use_cache=False)
    expected = model.model.linear(model.inputs["pixels"].bfloat16())
    assert torch.equal(output.logits, torch.cat([expected.flatten(), 3 * expected.flatten()]).float())
    output.loss.backward()
    assert model.model.linear.weight.grad.isfinite().all()
    again = model(input_ids=torch.zeros(2, 5), labels=torch.zeros(2, 5), use_cache=False)
    assert torch.equal(again.loss, output.loss)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["t5gemma", "lfm2", "qwen2_5_vl"])
def test_small_models_are_within_their_budgets(model_type: str) -> None:
    assert set(compare(model_type).values()) == {"ok"}


class OnePercentMore:
    """An observer that makes RMSNorms wrong, and nothing else."""

    def called(self, operator, spec, arguments):
        result = operator.results_of(spec, *arguments)
        return result * 1.01 if operator.name == "rms_norm" else result


@pytest.mark.slow
def test_a_wrong_operator_is_over_budget() -> None:
    with calls.by(OnePercentMore()):
        results = compare("llama", (torch.float32,))
    (outcome,) = results.values()
    assert outcome["over budget"] > 1
    assert outcome["worst"][0][2] > outcome["worst"][0][3]
