"""Every provider computes what the case says, in forward and backward."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from fused_norm.bench import providers
from fused_norm.bench.cases import QUICK, Case, tolerance, truth, worst_error
from fused_norm.bench.kernels import calls, differentiable_again
from fused_norm.bench.providers import FUSED_MODES, PROVIDERS, Provider
from fused_norm.bench.timing import own_stream

EVERY = PROVIDERS | {provider.name: provider for provider in FUSED_MODES}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
@pytest.mark.parametrize("name", EVERY)
def test_results_are_right(name, case, dtype, device):
    provider, device = EVERY[name], torch.device(device)
    why = provider.missing(device)
    if why is not None:
        pytest.skip(why)
    inputs = case.inputs(dtype, device, seed=0)
    exact = truth(case, inputs)
    with own_stream(device), differentiable_again():
        op = provider.build(case)
        with torch.no_grad():
            (forward,) = calls(op, "forward", [inputs])
            assert worst_error(forward(), exact[0]) <= tolerance(dtype)
        (backward,) = calls(op, "backward", [inputs], copy_gradients=provider.overwrites_gradients)
        assert worst_error(backward(), exact[1]) <= tolerance(dtype)
        if not provider.overwrites_gradients:
            assert worst_error(backward(), exact[1]) <= tolerance(dtype), "a backward is timed again and again"


@pytest.mark.parametrize(("case", "module"), [(QUICK[0], LlamaRMSNorm), (QUICK[1], Gemma3RMSNorm)])
def test_stock_is_what_modelling_code_computes(case, module, device):
    (x, w), eps = case.inputs(torch.bfloat16, torch.device(device), seed=0).detached(), case.spec.eps
    norm = module(case.width, eps=eps).to(device, torch.bfloat16)
    norm.weight.data.copy_(w)
    assert torch.equal(PROVIDERS["stock"].build(case)(x, w)[0], norm(x))


def test_a_mode_that_does_not_take_a_shape_refuses(device):
    provider = EVERY["multi_wave_cached"]
    case = Case("norm", 1, 65536)
    with pytest.raises(provider.refuses):
        provider.build(case)(*case.inputs(torch.float32, torch.device(device), seed=0).detached())


def test_what_is_missing_is_said():
    elsewhere = Provider("elsewhere", PROVIDERS["stock"].build, package="no_such_package")
    assert elsewhere.missing(torch.device("cpu")) == "no_such_package is not installed"
    assert PROVIDERS["compile"].missing(torch.device("cpu")) == "needs a GPU"
    assert PROVIDERS["fused"].missing(torch.device("cpu")) is None


def test_versions_name_the_peers():
    assert set(providers.versions()) == {"liger-kernel", "quack-kernels"}
