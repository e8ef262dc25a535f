"""A planted fault does what it says, in one norm, and leaves nothing behind."""

import pytest
import torch

from fused_norm import apply_fused_norm
from fused_norm.convergence.comparison import NORM_KINDS
from fused_norm.convergence.mutations import MUTATIONS, NormInput, path_for_fault, planted_fault
from fused_norm.model_configs import build


@pytest.fixture(scope="module")
def fused():
    """A fused model, its sites, and the gradients that it has without a fault."""
    model = build("gemma3_text", seed=0, dtype=torch.bfloat16)
    sites = apply_fused_norm(model).fused
    return model, sites, gradients(model)


def gradients(model):
    tokens = torch.arange(4).view(1, 4)
    model.zero_grad()
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


IN_THE_FAST_LANE = ("casting", "rotation")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_THE_FAST_LANE else pytest.mark.slow) for name in MUTATIONS]
)
def test_a_fault_changes_gradients_while_it_is_planted_and_not_afterwards(name, fused):
    model, sites, before = fused
    norms = {site.path for site in sites if site.kind in NORM_KINDS}
    inputs = dict.fromkeys(norms, NormInput(torch.bfloat16, mean_square=1e-4, eps=1e-6))
    path = path_for_fault(MUTATIONS[name], sites, inputs)
    expected = {"residual": "pre_feedforward_layernorm", "rotation": "self_attn"}
    assert path == f"model.layers.2.{expected.get(name, 'post_feedforward_layernorm')}"
    attributes = dict(vars(model.get_submodule(path)))
    with planted_fault(MUTATIONS[name], model, path) as fault:
        during = gradients(model)
    assert fault.runs > 0
    assert any(not torch.equal(during[key], before[key]) for key in before)
    after = gradients(model)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert vars(model.get_submodule(path)) == attributes


def test_a_fault_that_nothing_can_show_has_no_site(fused):
    _, sites, _ = fused
    paths = [site.path for site in sites]
    loud = dict.fromkeys(paths, NormInput(torch.bfloat16, mean_square=100.0, eps=1e-6))
    assert path_for_fault(MUTATIONS["eps"], sites, loud) is None
    exact = dict.fromkeys(paths, NormInput(torch.float32, mean_square=1e-4, eps=1e-6))
    assert path_for_fault(MUTATIONS["casting"], sites, exact) is None
    assert path_for_fault(MUTATIONS["eps"], sites, exact)
