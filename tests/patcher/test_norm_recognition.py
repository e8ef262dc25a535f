"""Norms are recognised by what they compute, and nothing else is taken for one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fused_norm
from fused_norm.model_configs import FAMILIES, build
from fused_norm.patcher.norm_recognition import looks_like_norm, recognise
from fused_norm.patcher.probe import UnrecognisedError
from fused_norm.spec import NormSpec


class Norm(nn.Module):
    """A norm to vary: subclasses override one step of it."""

    def __init__(self, width: int = 24, eps: float = 1e-5, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Gemma(Norm):
    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class GemmaByPower(Norm):
    def forward(self, x):
        wide = x.float()
        wide = wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + self.eps, -0.5)
        return (wide * self.weight.float()).type_as(x)


class GemmaByDivision(Norm):
    def forward(self, x):
        wide = x.float()
        wide = wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float()).type_as(x)


class Uncast(Norm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class UncastCentered(Norm):
    def forward(self, x):
        return (1 + self.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Weightless(Norm):
    def __init__(self) -> None:
        super().__init__()
        del self.weight

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class OffsetInWeightDtype(Norm):
    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight).float()).type_as(x)


class WeightDtype(Norm):
    def forward(self, x):
        x = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            x = x.to(self.weight.dtype)
        return self.weight * x


class RoundedRoot(Norm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps).to(x.dtype))


class WeightlessRoundedRoot(Weightless):
    def forward(self, x):
        return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).to(x.dtype)


class BufferAsWeight(Norm):
    def __init__(self) -> None:
        super().__init__()
        del self.weight
        self.register_buffer("weight", torch.ones(24), persistent=False)


class BufferForOthers(BufferAsWeight):
    """It hands its buffer to a kernel elsewhere, and does not use it."""

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


@pytest.mark.parametrize(
    ("module", "spec"),
    [
        (Norm(), NormSpec("llama", eps=1e-5)),
        (Norm(dtype=torch.bfloat16), NormSpec("llama", eps=1e-5)),
        (Norm(1), NormSpec("llama", eps=1e-5)),
        (Gemma(eps=1e-6), NormSpec("gemma", zero_centered=True, eps=1e-6)),
        (GemmaByPower(width=2560), NormSpec("gemma", eps=1e-5)),
        (GemmaByDivision(), NormSpec("gemma", eps=1e-5)),
        (Uncast(), NormSpec("none", eps=1e-5)),
        (UncastCentered(), NormSpec("none", zero_centered=True, eps=1e-5)),
        (Weightless(), NormSpec("llama", weighted=False, eps=1e-5)),
        (OffsetInWeightDtype(), NormSpec("rounded_gamma", zero_centered=True, eps=1e-5)),
        (WeightDtype(), NormSpec("weight_dtype", eps=1e-5)),
        (RoundedRoot(), NormSpec("rounded_rstd", eps=1e-5)),
        (WeightlessRoundedRoot(), NormSpec("rounded_rstd", weighted=False, eps=1e-5)),
        (BufferAsWeight(), NormSpec("llama", eps=1e-5)),
        (BufferForOthers(), NormSpec("llama", weighted=False, eps=1e-5)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_the_one_formula_that_fits_is_found(module: nn.Module, spec: NormSpec) -> None:
    found = recognise(module)
    assert found.spec == spec
    assert found.eps_name == "eps"


class WithGate(Norm):
    def forward(self, x, gate=None):
        return super().forward(x) if gate is None else super().forward(x * gate)


class BiasNorm(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(24))

    def forward(self, x):
        return super().forward(x) + self.bias


class EpsOutside(Norm):
    def forward(self, x):
        wide = x.float()
        return self.weight * (wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)).to(x.dtype)


class OtherwiseOnCuda(Norm):
    """On a CPU a plain norm; what it is elsewhere, as apex's is, cannot be seen there."""

    def forward(self, x):
        return super().forward(x) if not x.is_cuda else Gemma.forward(self, x)


class DividedByRoundedRoot(Norm):
    def forward(self, x):
        return self.weight * (x / torch.sqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps).to(x.dtype))


class UncastByDivision(Norm):
    def forward(self, x):
        return self.weight * (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class MultipliedByRoundedRoot(Norm):
    def forward(self, x):
        return self.weight * (x * torch.sqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps).to(x.dtype))


class FixedEps(Norm):
    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class Sum(Norm):
    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + self.eps)).to(x.dtype)


class NoisyInTraining(Norm):
    def forward(self, x):
        return super().forward(x) * (1.01 if self.training else 1.0)


class Clamped(Norm):
    def forward(self, x):
        return super().forward(x.clamp(-8, 8))


class ClampedFarOut(Norm):
    def forward(self, x):
        return super().forward(x.clamp(-100, 100))


class LeastVariance(Norm):
    def forward(self, x):
        wide = x.float()
        variance = wide.pow(2).mean(-1, keepdim=True).clamp(min=1e-8)
        return self.weight * (wide * torch.rsqrt(variance + self.eps)).to(x.dtype)


class Finite(Norm):
    def forward(self, x):
        return super().forward(torch.nan_to_num(x))


class OverTheBatch(Norm):
    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean((0, -1), keepdim=True) + self.eps)).to(x.dtype)


class OverHeads(Norm):
    def forward(self, x):
        return OverTheBatch.forward(self, x[:, None]).squeeze(1) if x.dim() == 4 else super().forward(x)


class Halves(Norm):
    def forward(self, x):
        y = super().forward(x)
        x.mul_(0.5)
        return y


class DetachedRoot(Norm):
    def forward(self, x):
        wide = x.float()
        with torch.no_grad():
            rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * rstd).to(x.dtype)


class DetachedWeight(Norm):
    def forward(self, x):
        wide = x.float()
        rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.detach() * (wide * rstd).to(x.dtype)


class OtherwiseForGradients(Norm):
    def forward(self, x):
        return super().forward(x * 2 + 1 if x.requires_grad else x)


class Tuple(Norm):
    def forward(self, x):
        return super().forward(x), None


class Matrix(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 24))


class Buffered(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))


class ParentNorm(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)


class Raises(Norm):
    def forward(self, x):
        raise ZeroDivisionError("no such luck")


class PlainTensorNorm(Norm):
    def __init__(self) -> None:
        super().__init__()
        del self.weight
        self.weight = torch.ones(24)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (WithGate(), "known formulas"),
        (BiasNorm(), "parameters besides a weight: bias"),
        (EpsOutside(), "none of the known formulas"),
        (OtherwiseOnCuda(), "asks whether it runs on CUDA"),
        (DividedByRoundedRoot(), "none of the known formulas"),
        (UncastByDivision(), "none of the known formulas"),
        (MultipliedByRoundedRoot(), "none of the known formulas"),
        (FixedEps(), "none of the known formulas"),
        (Sum(), "none of the known formulas"),
        (NoisyInTraining().train(), "none of the known formulas"),
        (NoisyInTraining().eval(), "none of the known formulas"),
        (Clamped(), "none of the known formulas"),
        (ClampedFarOut(), "none of the known formulas"),
        (LeastVariance(), "none of the known formulas"),
        (Finite(), "none of the known formulas"),
        (OverTheBatch(), "none of the known formulas"),
        (OverHeads(), "none of the known formulas"),
        (Halves(), "none of the known formulas"),
        (DetachedRoot(), "where gradients are needed"),
        (DetachedWeight(), "where gradients are needed"),
        (OtherwiseForGradients(), "where gradients are needed"),
        (Tuple(), "returns tuple"),
        (Matrix(), r"shape \(4, 24\)"),
        (Buffered(), "buffers: scale"),
        (ParentNorm(), "modules of its own: inner"),
        (Raises(), "ZeroDivisionError: no such luck"),
        (PlainTensorNorm(), "plain tensors"),
        (nn.LayerNorm(24), "subtracts a mean"),
        (nn.RMSNorm(24), "no eps"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_is_not_a_plain_rms_norm_is_refused_with_the_reason(module: nn.Module, why: str) -> None:
    assert looks_like_norm(module)
    with pytest.raises(UnrecognisedError, match=why):
        recognise(module)


@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_every_norm_of_the_families_has_the_spec_in_the_table(model_type: str) -> None:
    model = build(model_type, seed=0)
    norms = [module for module in model.modules() if looks_like_norm(module)]
    assert norms
    assert {recognise(norm).spec for norm in norms} == {FAMILIES[model_type].spec}


def test_nn_rms_norm_with_an_eps_is_an_uncentered_gemma_norm() -> None:
    assert recognise(nn.RMSNorm(64, eps=1e-5)).spec == NormSpec("gemma", eps=1e-5)
    weightless = nn.RMSNorm(40, eps=1e-5, elementwise_affine=False)
    assert recognise(weightless).spec == NormSpec("llama", weighted=False, eps=1e-5)


@pytest.mark.parametrize("norm", [BufferAsWeight, BufferForOthers])
def test_a_norm_whose_weight_is_a_buffer_is_fused_and_gives_that_no_gradient(
    norm: type[Norm], device: str, launches: list[str]
) -> None:
    stock = norm().to(device)
    stock.weight.copy_(torch.linspace(-1, 2, 24))
    fused = copy.deepcopy(stock)
    fused_norm.apply_fused_norm(nn.ModuleList([fused]))
    x = torch.randn(3, 24, device=device)
    results = []
    for module in (stock, fused):
        given = x.clone().requires_grad_()
        y = module(given)
        results.append((y, *torch.autograd.grad((y * x.cos()).sum(), given)))
    assert launches == ["rms_norm"]
    assert fused.weight.grad is None
    assert all(torch.allclose(*pair, rtol=1e-5, atol=1e-6) for pair in zip(*results, strict=True))


def test_the_real_weight_is_never_read() -> None:
    norm = Norm()
    norm.weight = nn.Parameter(torch.full((24,), float("nan")))
    assert recognise(norm).spec.casting == "llama"
    assert recognise(copy.deepcopy(norm).to("meta")).spec.casting == "llama"


def test_probing_leaves_no_trace() -> None:
    norm = Norm().eval()
    norm.register_forward_hook(lambda *_: pytest.fail("a hook saw the probe"))
    before = dict(vars(norm))
    state = torch.random.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert recognise(norm).spec.casting == "llama"
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(vars(norm)[name] is value for name, value in before.items())
    assert len(vars(norm)) == len(before)


def test_instances_of_one_class_are_told_apart_by_their_attributes() -> None:
    class Switched(Norm):
        def __init__(self, centered: bool) -> None:
            super().__init__()
            self.centered = centered

        def forward(self, x):
            wide = x.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
            return (wide * (self.weight.float() + (1.0 if self.centered else 0.0))).type_as(x)

    assert [recognise(Switched(centered)).spec.zero_centered for centered in (True, False, True)] == [True, False, True]
    class_patched = Switched(True)
    Switched.forward = Norm.forward
    assert recognise(class_patched).spec.casting == "llama"
