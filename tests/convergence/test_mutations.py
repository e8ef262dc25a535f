"""A planted fault changes what its operator computes while it is planted, and leaves nothing behind."""

import pytest
import torch

from fused_norm import apply_fused_norm
from fused_norm.convergence.mutations import MUTATIONS
from fused_norm.kernels.add_rms_norm import ADD_RMS_NORM
from fused_norm.kernels.operator import Operator, _operators
from fused_norm.model_configs import build


@pytest.fixture(scope="module")
def fused():
    """A fused model with a scaled branch, and the gradients that it has without a fault."""
    model = build("granite", seed=0, dtype=torch.bfloat16)
    apply_fused_norm(model)
    return model, gradients(model)


def gradients(model):
    tokens = torch.arange(4).view(1, 4)
    model.zero_grad()
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


SEEN = ("casting", "centering", "size", "unrounded", "residual", "scale", "dx-size", "dx-cut", "dw-size", "dw")


@pytest.mark.parametrize("fault", SEEN)
def test_a_fault_changes_gradients_while_it_is_planted_and_not_afterwards(fault, fused):
    model, before = fused
    own = dict(vars(ADD_RMS_NORM))
    with MUTATIONS[f"add_rms_norm-{fault}"].planted(model) as planted:
        during = gradients(model)
    assert planted.calls > 0
    assert planted.share > 0.01
    assert any(not torch.equal(during[key], before[key]) for key in before)
    after = gradients(model)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert dict(vars(ADD_RMS_NORM)) == own


def test_a_fault_that_nothing_calls_has_no_effect(fused):
    model, before = fused
    with MUTATIONS["qk_norm-casting"].planted(model) as planted:
        during = gradients(model)
    assert planted.calls == 0
    assert all(torch.equal(during[key], before[key]) for key in before)


def test_every_operator_has_every_fault_that_it_can_have():
    for operator in _operators:
        if not operator.gradients:  # makes again what another operator has made
            continue
        mine = {name.removeprefix(f"{operator.name}-") for name in MUTATIONS if name.startswith(f"{operator.name}-")}
        assert {"casting", "centering", "eps", "size", "last-row", "nan", "no-grad", "shape", "in-place"} <= mine
        if type(operator).backward is not Operator.backward:
            assert {"dx-size", "dx-cut", "dw-size", "dw", "dw-tile", "dw-share", "frozen", "ds-in-place"} <= mine
