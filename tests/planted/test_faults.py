"""A planted fault changes what its operator computes while it is planted, and leaves nothing behind."""

import pytest
import torch

from fused_norm import apply_fused_norm
from fused_norm.kernels import causal_conv1d, glu, rope
from fused_norm.kernels.fp8 import add_rms_norm_fp8, dequantize, rms_norm_fp8
from fused_norm.kernels.linear_4bit import LINEAR_4BIT
from fused_norm.kernels.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from fused_norm.kernels.norm import ADD_RMS_NORM
from fused_norm.kernels.operator import OPERATORS, Operator, Recompute
from fused_norm.model_configs import build
from fused_norm.patcher import (
    adapters,
    fused_block,
    fused_classes,
    fused_norm_module,
    linear_inputs,
    losses,
    recompute,
    recompute_linears,
)
from fused_norm.patcher.adapters import FusedAdapter
from fused_norm.patcher.fused_block import FusedBlock
from fused_norm.patcher.lazy_logits import LazyLogits, Projection
from fused_norm.patcher.losses import FusedHead

from .faults import FAULTS, OF_ADAPTERS, OF_ROWS
from .planting import linear_cross_entropy


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


@pytest.mark.parametrize(
    "fault", [SEEN[0], *(pytest.param(name, marks=pytest.mark.slow) for name in SEEN[1:-1]), SEEN[-1]]
)
def test_a_fault_changes_gradients_while_it_is_planted_and_not_afterwards(fault, fused):
    model, before = fused
    own = dict(vars(ADD_RMS_NORM))
    with FAULTS[f"add_rms_norm-{fault}"].planted(model) as planted:
        during = gradients(model)
    assert planted.calls > 0
    assert planted.share > 0.01
    assert any(not torch.equal(during[key], before[key]) for key in before)
    after = gradients(model)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert dict(vars(ADD_RMS_NORM)) == own


@pytest.mark.parametrize("name", FAULTS)
def test_what_a_fault_replaces_is_there_and_comes_back(name):
    fault, model = FAULTS[name], torch.nn.Module()
    modules = adapters, fused_block, fused_classes, fused_norm_module, linear_inputs, losses, recompute
    classes = FusedAdapter, FusedBlock, FusedHead, LazyLogits, Projection, Recompute, torch.nn.Dropout
    classes += recompute_linears, recompute_linears.LinearOutputs, recompute._Recomputable, losses.LossCall
    owners = (*OPERATORS.values(), *modules, linear_cross_entropy, *classes)
    before = [dict(vars(owner)) for owner in owners]
    with fault.planted(model):
        assert (name == "left-stock") == ([dict(vars(owner)) for owner in owners] == before)
    assert [dict(vars(owner)) for owner in owners] == before


def test_a_fault_that_nothing_calls_has_no_effect(fused):
    model, before = fused
    with FAULTS["qk_norm-casting"].planted(model) as planted:
        during = gradients(model)
    assert planted.calls == 0
    assert all(torch.equal(during[key], before[key]) for key in before)


def test_every_operator_has_every_fault_that_it_can_have():
    for operator in OPERATORS.values():
        if operator.plain_name and operator not in OF_ADAPTERS:  # a form of another operator, which gets its faults
            faults = OF_QLORA.get(operator.name, OF_CONSUMERS)
            assert {f"{operator.name}-{fault}" for fault in faults} <= set(FAULTS)
            continue
        if not operator.gradients:  # recomputes what another operator has computed
            continue
        if operator.outputs[0] == "q":  # the norm in it, and its backward, belong to another operator
            assert {f"{operator.name}-{fault}" for fault in OF_CODES} <= set(FAULTS)
            continue
        own_faults = {name.removeprefix(f"{operator.name}-") for name in FAULTS if name.startswith(f"{operator.name}-")}
        assert {"size", "no-grad", "in-place"} <= own_faults
        if operator is LINEAR_CROSS_ENTROPY:  # its output is one number, and its forward computes the gradients
            assert {"nan", "dx-size", "dw-size", "dw", "dbias", "frozen"} <= own_faults
            continue
        assert {"last-row", "even"} <= own_faults
        assert operator not in OF_ROWS or {"nan", "shape"} <= own_faults
        # No model is checkpointed with adapters.
        assert operator in (LINEAR_4BIT, *OF_ADAPTERS) or "checkpointed" in own_faults
        assert not operator.takes_spec or {"casting", "centering", "eps"} <= own_faults
        if type(operator).backward is not Operator.backward:
            assert {"ds-in-place", *(("dx-size", "dx-cut") if operator in OF_ROWS else ("dbias",))} <= own_faults
            has_weights = operator.takes_spec or operator in OF_ADAPTERS
            assert not has_weights or {"dw-size", "dw", "dw-tile", "dw-share", "frozen"} <= own_faults


OF_QLORA = {"glu_for_consumers": ("gate", "summands", "dropped"), "lora_summands_4bit": ("rank", "shifted")}
OF_CONSUMERS = ("dropped", "doubled", "order", "early", "late", "ds", "ds-twice", "copy")
OF_CODES = ("columns", "stale", "unsaturated")


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("fault", OF_CODES)
def test_faults_of_codes_show_while_they_are_planted(fault, added):
    fp8_format = "rowwise" if fault == "columns" else "tensorwise"
    x, residual = torch.randn(2, 3, 8, 32).bfloat16()
    weight = torch.rand(32).bfloat16()

    def results(scale):
        if added:
            return dequantize(add_rms_norm_fp8(x * scale, residual, weight, fp8_format=fp8_format)[0])
        return dequantize(rms_norm_fp8(x * scale, weight, fp8_format=fp8_format))

    before = [results(1.0), results(x.new_tensor(3.0))]
    with FAULTS[f"norm_fp8-{fault}"].planted(torch.nn.Module()) as planted:
        during = [results(1.0), results(x.new_tensor(3.0))]
    assert planted.calls == 2
    assert any(not torch.equal(*pair) for pair in zip(before, during, strict=True))
    assert torch.equal(results(1.0), before[0])


def _rotated(x):
    angles = torch.linspace(0, 3, x.numel(), device=x.device).view(-1, *x.shape[-2:])
    return torch.cat(rope(x, 2 * x, angles.cos().to(x.dtype), angles.sin().to(x.dtype)))


def _gated(x):
    packed = torch.cat((2 * x, x.flip(-1)), dim=-1)
    return torch.cat((glu(x, x.flip(-1)), glu(packed, None, "gelu"), glu(3 * x, x.flip(-1), "gelu_tanh")))


def _convolved(x):
    filters, bias = x[0, 0, :8, :4], x[0, 0, 8]  # so that their gradients are part of that of x
    return causal_conv1d(x[:, 0], filters, bias, "silu")


CALLS = {"rope": _rotated, "glu": _gated, "causal_conv1d": _convolved}
WITHOUT_NORMS = [name for name, fault in FAULTS.items() if name.partition("-")[0] in CALLS and fault.where == "eager"]
SOME = ("rope-back", "rope-half", "glu-swapped", "glu-unrounded", "causal_conv1d-tap", "causal_conv1d-unrounded")


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SOME else pytest.mark.slow) for n in WITHOUT_NORMS])
def test_faults_of_rotations_gates_and_convolutions_show_while_they_are_planted(name, dtype):
    call = CALLS[name.partition("-")[0]]
    x = torch.randn(2, 1, 64, 8).to(dtype)
    spoilt = x.clone()
    spoilt[-1, -1, -1, -1] = torch.nan

    def results():
        leaf = x.clone().requires_grad_()
        with torch.no_grad():
            silent = [call(leaf), call(leaf[:1]), call(spoilt.clone())]
        y = call(leaf)
        dy = y.detach().cos()
        handed = dy.clone()
        (dx,) = torch.autograd.grad(y, leaf, handed)
        return [tensor.nan_to_num(1e4) for tensor in (*silent, y.detach(), dx, leaf.detach(), handed)]

    before = results()
    with FAULTS[name].planted(torch.nn.Module()) as planted:
        during = results()
    assert planted.calls > 0
    changed = [not torch.equal(*pair) for pair in zip(before, during, strict=True)]
    hidden = dtype == torch.float32 and "fp32" in FAULTS[name].hidden
    assert any(changed) != hidden
    assert (planted.share > 0) != hidden
    assert all(map(torch.equal, results(), before))
