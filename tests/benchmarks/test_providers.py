"""Every provider computes what the case says, in forward and backward."""

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from benchmarks.kernels import operator_calls, repeatable_backwards
from benchmarks.operator_cases import OperatorCase, float64_results, tolerance, worst_error
from benchmarks.providers import EVERY, PROVIDERS
from benchmarks.results import RefusedError
from benchmarks.timing import own_stream

from ..conftest import slow
from .tiny_cases import OPERATOR_CASES

MEASURED = [
    pytest.param(name, case, marks=() if name == "fused" or not case.fp8_format else pytest.mark.slow)
    for name in EVERY
    for case in OPERATOR_CASES
    if name in PROVIDERS or case.operator == "rms_norm"
]
named = OperatorCase.named


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float16, torch.float32)], ids=str)
@pytest.mark.parametrize(("name", "case"), MEASURED, ids=lambda value: getattr(value, "name", value))
def test_results_are_right(name, case, dtype, device):
    provider, device = EVERY[name], torch.device(device)
    why = provider.missing(device)
    if why is not None:
        pytest.skip(why)
    inputs = case.inputs(dtype, device, seed=0)
    exact = float64_results(case, inputs)
    with own_stream(device), repeatable_backwards():
        try:
            function = provider.build(case)
        except RefusedError:
            assert name != "fused"
            return
        with torch.no_grad():
            (forward,) = operator_calls(function, "forward", [inputs])
            assert worst_error(forward(), exact[0]) <= tolerance(dtype, case)
        if case.fp8_format:
            return
        (backward,) = operator_calls(function, "backward", [inputs], copy_gradients=provider.overwrites_gradients)
        assert worst_error(backward(), exact[1]) <= tolerance(dtype)
        if not provider.overwrites_gradients:
            assert worst_error(backward(), exact[1]) <= tolerance(dtype), "a backward is timed again and again"


@pytest.mark.parametrize(("option", "module"), [("", LlamaRMSNorm), (" gemma", Gemma3RMSNorm)])
def test_stock_is_what_modelling_code_computes(option, module, device):
    case = named(f"rms_norm 8x64{option}")
    (x, w), eps = case.inputs(torch.bfloat16, torch.device(device), seed=0).detached(), case.spec.eps
    norm = module(case.width, eps=eps).to(device, torch.bfloat16)
    norm.weight.data.copy_(w)
    assert torch.equal(PROVIDERS["stock"].build(case)(x, w)[0], norm(x))


def test_stock_rotates_as_modelling_code_does(device):
    case = named("qk_norm_rope 6x(4+2)x64")
    inputs = case.inputs(torch.bfloat16, torch.device(device), seed=0)
    q, k, *weights = inputs.arguments
    normed = PROVIDERS["stock"].build(named("qk_norm 6x(4+2)x64"))(q, k, *weights)
    expected = apply_rotary_pos_emb(*(y.transpose(1, 2) for y in normed), *inputs.angles)
    actual = PROVIDERS["stock"].build(case)(*inputs.attached())
    for outputs in zip(actual, expected, strict=True):
        assert torch.equal(*outputs)
    gradients = [torch.autograd.grad(side, inputs.arguments, inputs.gradients) for side in (actual, expected)]
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
