"""Every provider computes what the case says, in forward and backward."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from benchmarks import providers
from benchmarks.operator_cases import QUICK, OperatorCase, float64_results, tolerance, worst_error
from benchmarks.operator_timings import operator_calls, repeatable_backwards
from benchmarks.providers import FUSED_MODES, PROVIDERS, Provider
from benchmarks.timing import own_stream

EVERY = PROVIDERS | {provider.name: provider for provider in FUSED_MODES}
MEASURED = [(name, case) for name in EVERY for case in QUICK if name in PROVIDERS or case.operator == "norm"]


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float16, torch.float32))],
    ids=str,
)
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
        except provider.refuses as reason:
            assert isinstance(reason, NotImplementedError)  # noqa: PT017 what is refused is no failure
            return
        with torch.no_grad():
            (forward,) = operator_calls(function, "forward", [inputs])
            assert worst_error(forward(), exact[0]) <= tolerance(dtype, case)
        if case.recipe:
            return
        (backward,) = operator_calls(function, "backward", [inputs], copy_gradients=provider.overwrites_gradients)
        assert worst_error(backward(), exact[1]) <= tolerance(dtype)
        if not provider.overwrites_gradients:
            assert worst_error(backward(), exact[1]) <= tolerance(dtype), "a backward is timed again and again"


@pytest.mark.parametrize(("case", "module"), [(QUICK[0], LlamaRMSNorm), (QUICK[1], Gemma3RMSNorm)])
def test_stock_is_what_modelling_code_computes(case, module, device):
    (x, w), eps = case.inputs(torch.bfloat16, torch.device(device), seed=0).detached(), case.spec.eps
    norm = module(case.width, eps=eps).to(device, torch.bfloat16)
    norm.weight.data.copy_(w)
    assert torch.equal(PROVIDERS["stock"].build(case)(x, w)[0], norm(x))


def test_stock_rotates_as_modelling_code_does(device):
    case = OperatorCase("rope", 6, 64, heads=(4, 2))
    inputs = case.inputs(torch.bfloat16, torch.device(device), seed=0)
    q, k, *weights = inputs.arguments
    normed = PROVIDERS["stock"].build(OperatorCase("qk", 6, 64, heads=(4, 2)))(q, k, *weights)
    expected = apply_rotary_pos_emb(*(y.transpose(1, 2) for y in normed), *inputs.angles)
    found = PROVIDERS["stock"].build(case)(*inputs.attached())
    for outputs in zip(found, expected, strict=True):
        assert torch.equal(*outputs)
    gradients = [torch.autograd.grad(side, inputs.arguments, inputs.gradients) for side in (found, expected)]
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("operator", "function"),
    [
        ("post", "norm_add"),
        ("sandwich", "norm_add_norm"),
        ("qk", "qk_norm"),
        ("rope", "qk_norm_rope"),
        ("rotate", "rope"),
        ("swiglu", "glu"),
        ("geglu", "glu"),
        ("gated", "gated_rms_norm"),
        ("gate-first", "gated_rms_norm"),
        ("fp8", "rms_norm_fp8"),
        ("fp8-add", "add_rms_norm_fp8"),
    ],
)
def test_fused_makes_one_call(operator, function, monkeypatch, device):
    called = []

    def recorded(name, inner):
        return lambda *given, **options: (called.append(name), inner(*given, **options))[1]

    fp8 = providers.kernels.fp8
    for module in (providers.kernels, fp8):
        for name in module.__all__:
            if callable(getattr(module, name)) and name[0].islower():
                monkeypatch.setattr(module, name, recorded(name, getattr(module, name)))
    case = next(case for case in QUICK if case.operator == operator)
    PROVIDERS["fused"].build(case)(*case.inputs(torch.float32, torch.device(device), seed=0).attached())
    assert called == [function]


@pytest.mark.parametrize("case", [case for case in QUICK if case.recipe], ids=lambda case: case.name)
def test_fused_writes_the_codes_of_the_norm_and_its_cast(case, device):
    inputs = case.inputs(torch.bfloat16, torch.device(device), seed=0).detached()
    ours, *rest = PROVIDERS["fused"].build(case)(*inputs)
    if case.recipe == "coat":
        with pytest.raises(NotImplementedError, match="torchao has no cast coat"):
            PROVIDERS["stock"].build(case)
        return
    pytest.importorskip("torchao")
    stock, *theirs = PROVIDERS["stock"].build(case)(*inputs)
    # Stock's norm is not fused_norm's: a sum in another order may end one place beside it.
    same = ours.q.view(torch.uint8) == stock.q.view(torch.uint8)
    assert same.float().mean() > 0.99
    assert ours.fp8_format == stock.fp8_format
    assert ours.scale.shape == stock.scale.shape
    if min(ours.scale.shape, default=0) > 1:  # other strides mean nothing
        assert ours.scale.stride() == stock.scale.stride()
    assert all(torch.equal(*pair) for pair in zip(rest, theirs, strict=True))


@pytest.mark.parametrize(
    "operator", ["rotate", "swiglu", "geglu", "gated", "gate-first", "fp8", "fp8-add", "fp8-columns"]
)
def test_pytorch_is_not_measured_twice_where_stock_has_its_operators(operator):
    with pytest.raises(NotImplementedError, match="torch has no operator of its own"):
        PROVIDERS["torch"].build(OperatorCase(operator, 4, 64))


def test_a_mode_that_does_not_take_a_shape_refuses(device):
    provider = EVERY["multi_wave_cached"]
    case = OperatorCase("norm", 1, 65536)
    with pytest.raises(provider.refuses):
        provider.build(case)(*case.inputs(torch.float32, torch.device(device), seed=0).detached())


def test_what_is_missing_is_said():
    elsewhere = Provider("elsewhere", PROVIDERS["stock"].build, package="no_such_package")
    assert elsewhere.missing(torch.device("cpu")) == "no_such_package is not installed"
    assert PROVIDERS["compile"].missing(torch.device("cpu")) == "needs a GPU"
    assert PROVIDERS["fused"].missing(torch.device("cpu")) is None


def test_versions_name_the_peers():
    assert set(providers.peer_versions()) == {"liger-kernel", "quack-kernels", "torchao", "LIGER_KERNEL_IMPL"}
