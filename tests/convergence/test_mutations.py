"""A planted fault does what it says, in one norm, and leaves nothing behind."""

import pytest
import torch

from fused_norm import apply_fused_norm
from fused_norm.convergence.mutations import MUTATIONS, Seen, planted, site_for
from fused_norm.convergence.plan import NORM_KINDS
from fused_norm.model_configs import build


def fused_gemma3():
    model = build("gemma3_text", seed=0, dtype=torch.bfloat16)
    return model, apply_fused_norm(model).fused


def outcome(model):
    tokens = torch.arange(6).view(1, 6)
    model.zero_grad()
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_changes_gradients_while_it_is_planted_and_not_afterwards(name):
    model, sites = fused_gemma3()
    norms = {site.path for site in sites if site.kind in NORM_KINDS}
    seen = dict.fromkeys(norms, Seen(torch.bfloat16, mean_square=1e-4, eps=1e-6))
    path = site_for(MUTATIONS[name], sites, seen)
    expected = {"residual": "pre_feedforward_layernorm", "rotation": "self_attn"}
    assert path == f"model.layers.2.{expected.get(name, 'post_feedforward_layernorm')}"
    before, attributes = outcome(model), dict(vars(model.get_submodule(path)))
    with planted(MUTATIONS[name], model, path) as fault:
        during = outcome(model)
    assert fault.runs > 0
    assert any(not torch.equal(during[key], before[key]) for key in before)
    after = outcome(model)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert vars(model.get_submodule(path)) == attributes


def test_a_fault_that_nothing_can_show_has_no_site():
    _, sites = fused_gemma3()
    paths = [site.path for site in sites]
    loud = dict.fromkeys(paths, Seen(torch.bfloat16, mean_square=100.0, eps=1e-6))
    assert site_for(MUTATIONS["eps"], sites, loud) is None
    exact = dict.fromkeys(paths, Seen(torch.float32, mean_square=1e-4, eps=1e-6))
    assert site_for(MUTATIONS["casting"], sites, exact) is None
    assert site_for(MUTATIONS["eps"], sites, exact)
