"""The check of a model's operators sees every one of them, and finds one whose rows depend on each other."""

from __future__ import annotations

import json

import pytest
import torch

from fused_norm.check.against_float64 import UncheckableError
from fused_norm.check.batch_invariance import check_rows
from fused_norm.cli import main
from fused_norm.kernels.glu import GLU
from fused_norm.kernels.operator import Operator
from fused_norm.kernels.program import forget_all
from fused_norm.kernels.qk_norm import QK_NORM
from fused_norm.kernels.rms_norm import RMS_NORM
from fused_norm.model_configs import build, tiny_config

TOKENS = torch.arange(10).view(2, 5)


def qwen3(device):
    """A model whose heads are as wide as rows must be where their bits shall not depend on others."""
    return build(tiny_config("qwen3", head_dim=32, num_hidden_layers=1), seed=0, device=device)


def damage(monkeypatch: pytest.MonkeyPatch, operator: Operator) -> None:
    """Let the operator's results depend on how many rows there are."""
    compute = operator.forward

    def damaged(spec, *arguments, **how):
        results = compute(spec, *arguments, **how)
        if arguments[0].numel() // arguments[0].shape[-1] < 10:
            results[0].view(torch.int32).flatten()[-1] += 1
        return results

    forget_all()  # programs, which would repeat an earlier call's launches
    monkeypatch.setattr(operator, "_recorded", lambda *_: None)
    monkeypatch.setattr(operator, "forward", damaged)


def test_every_operator_of_a_model_is_checked(device):
    model = qwen3(device).train()
    found = check_rows(model, TOKENS.to(device))
    assert found.ok
    assert {one.operator for one in found.operators} == {"rms_norm", "add_rms_norm", "qk_norm", "glu"}
    assert all(one.parts == 3 for one in found.operators)
    assert model.training
    assert "any batch, in all 5 operators" in str(found), "a norm that linears read is another one"


@pytest.mark.parametrize("operator", [RMS_NORM, QK_NORM], ids=lambda one: one.name)
def test_an_operator_whose_rows_depend_on_their_number_is_found(operator, monkeypatch, device):
    damage(monkeypatch, operator)
    found = check_rows(qwen3(device), TOKENS.to(device))
    assert [one.operator for one in found.operators if one.differing] == [operator.name]
    assert f"depend on the rows beside it in {operator.name} of " in str(found)


def test_an_operator_is_checked_in_each_dtype_that_it_is_called_in(device):
    model = build(tiny_config("llama", num_hidden_layers=1), seed=0, dtype=torch.bfloat16, device=device)
    # The last norm gets the rows in fp32, and the head what it gives in bf16.
    model.model.norm.register_forward_pre_hook(lambda _, given: (given[0].float(),))
    model.lm_head.register_forward_pre_hook(lambda _, given: (given[0].bfloat16(),))
    found = check_rows(model, TOKENS.to(device), {"strict": False})
    assert {one.dtype for one in found.operators if one.operator == "rms_norm"} == {"bfloat16", "float32"}


def test_a_model_that_calls_no_operator_cannot_be_checked(device):
    from fused_norm import disabled

    with disabled(), pytest.raises(UncheckableError, match="calls no fused operator"):
        check_rows(build("llama", seed=0, device=device), TOKENS.to(device))


def test_the_command_shows_it_and_exits_1_where_rows_depend_on_each_other(monkeypatch, capsys):
    damage(monkeypatch, GLU)
    line = ["check", "llama", "--batch", "2", "--seq", "5", "--dtype", "float32"]
    assert main([*line, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"], "the step itself is within its budget"
    rows = found["batch_invariance"]
    assert not rows["ok"]
    assert [one["operator"] for one in rows["operators"] if one["differing"]] == ["glu"]
