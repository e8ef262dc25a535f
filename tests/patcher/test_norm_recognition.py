"""Norms are recognised by their results, and nothing else is recognised as a norm."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fused_norm
from fused_norm.patcher.patch_report import Site
from fused_norm.spec import NormSpec


class Norm(nn.Module):
    """A norm to vary: subclasses override a single step."""

    def __init__(self, width: int = 24, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return self.weight * normed(self, x).to(x.dtype)


def row_of(norm: nn.Module) -> Site:
    """The row of a norm, of which a copy is patched."""
    (row,) = fused_norm.apply_fused_norm(nn.ModuleList([copy.deepcopy(norm)]), strict=False).rows
    return row


def variance(self: Norm, x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True) + self.eps


def normed(self: Norm, x: Tensor) -> Tensor:
    """In fp32."""
    return x.float() * torch.rsqrt(variance(self, x.float()))


class WeightlessNorm(Norm):
    def __init__(self) -> None:
        super().__init__()
        del self.weight

    def forward(self, x):
        return normed(self, x).to(x.dtype)


class BufferAsWeight(Norm):
    def __init__(self) -> None:
        super().__init__()
        del self.weight
        self.register_buffer("weight", torch.ones(24), persistent=False)


class BufferForOthers(BufferAsWeight):
    """It hands its buffer to a kernel elsewhere, and does not use it."""

    def forward(self, x):
        return normed(self, x).to(x.dtype)


def centred(self, x):
    x = x - x.mean(-1, keepdim=True)
    return self.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def weight_dtype(self, x):
    x = x * torch.rsqrt(variance(self, x.float()))
    return self.weight * (x.to(self.weight.dtype) if self.weight.dtype in (torch.float16, torch.bfloat16) else x)


def offset_by_flag_of_weight(self, x):
    return normed(self, x).to(x.dtype) * (self.weight + 1 if getattr(self.weight, "plus_one", False) else self.weight)


def scaled_by_input(self, x):
    return self.weight * normed(self, x).to(x.dtype) * (x.scale if hasattr(x, "scale") else 1)


def norm_by(forward: Callable[..., Any], base: type[Norm] = Norm, **options: Any) -> Norm:
    """A norm with this forward, which stands in its class as if it were written there."""
    forward.__qualname__ = "NormByAFunction.forward"
    forward.__code__ = forward.__code__.replace(co_qualname=forward.__qualname__)
    return type("NormByAFunction", (base,), {"forward": forward})(**options)


spec = partial(NormSpec, eps=1e-5)
KNOWN: dict[str, tuple[nn.Module, NormSpec]] = {
    "llama": (Norm(), spec("llama")),
    "llama of one element": (Norm(1), spec("llama")),
    "weightless": (WeightlessNorm(), spec("llama", weighted=False)),
    "a rounded root, weightless": (
        norm_by(lambda self, x: x * variance(self, x.float()).rsqrt().to(x.dtype), WeightlessNorm),
        spec("rounded_rstd", weighted=False),
    ),
    "PyTorch's": (nn.RMSNorm(64, eps=1e-5), spec("gemma", casts_weight=False)),
    "PyTorch's, weightless": (nn.RMSNorm(40, eps=1e-5, elementwise_affine=False), spec("llama", weighted=False)),
    "a buffer as weight": (BufferAsWeight(), spec("llama")),
    "a buffer for others": (BufferForOthers(), spec("llama", weighted=False)),
}
FORWARDS: list[tuple[Callable[..., Any], NormSpec]] = [
    (lambda self, x: (normed(self, x) * (1.0 + self.weight.float())).type_as(x), spec("gemma", zero_centered=True)),
    (lambda self, x: (x.float() * variance(self, x.float()).pow(-0.5) * self.weight.float()).type_as(x), spec("gemma")),
    (lambda self, x: self.weight * (x * variance(self, x).rsqrt()), spec("none")),
    (lambda self, x: (1 + self.weight) * (x * variance(self, x).rsqrt()), spec("none", zero_centered=True)),
    (
        lambda self, x: (normed(self, x) * (1.0 + self.weight).float()).type_as(x),
        spec("rounded_gamma", zero_centered=True),
    ),
    (weight_dtype, spec("weight_dtype")),
    (lambda self, x: self.weight * (x * variance(self, x.float()).rsqrt().to(x.dtype)), spec("rounded_rstd")),
]
KNOWN |= {str(formula): (norm_by(forward), formula) for forward, formula in FORWARDS}


@pytest.mark.parametrize("name", KNOWN)
def test_the_one_formula_that_fits_is_found(name: str) -> None:
    module, expected = KNOWN[name]
    row = row_of(module)
    assert (row.spec, row.reason) == (expected, None)


def with_member(name: str, member: object) -> Norm:
    norm = Norm()
    setattr(norm, name, member)
    return norm


def halves_its_input(self, x):
    y = Norm.forward(self, x)
    x.mul_(0.5)
    return y


def mean_square(x: Tensor, *dims: int) -> Tensor:
    return x.float().pow(2).mean(dims or -1, keepdim=True)


def scaled(self: Norm, x: Tensor, rstd: Tensor) -> Tensor:
    return self.weight * (x.float() * rstd).to(x.dtype)


def over_the_batch(self, x):
    return scaled(self, x, torch.rsqrt(mean_square(x, 0, -1) + self.eps))


class WithoutBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()


def noisy_in_training(self, x):
    return Norm.forward(self, x) * (1.01 if self.training else 1.0)


def otherwise_on_cuda(self, x):
    """A plain norm on a CPU, where its results on other devices, like those of apex's norm, cannot be seen."""
    return Norm.forward(self, x) if not x.is_cuda else (normed(self, x) * self.weight.float()).type_as(x)


OTHER_FORMULAS: dict[str, Callable[..., Any]] = {
    "with a gate": lambda self, x, gate=None: Norm.forward(self, x if gate is None else x * gate),
    "eps outside": lambda self, x: self.weight * (x.float() / (mean_square(x).sqrt() + self.eps)).to(x.dtype),
    "divided by a rounded root": lambda self, x: self.weight * (x / variance(self, x.float()).sqrt().to(x.dtype)),
    "a sum": lambda self, x: scaled(self, x, torch.rsqrt(x.float().pow(2).sum(-1, keepdim=True) + self.eps)),
    "clamped far out": lambda self, x: Norm.forward(self, x.clamp(-100, 100)),
    "a least variance": lambda self, x: scaled(self, x, torch.rsqrt(mean_square(x).clamp(min=1e-8) + self.eps)),
    "finite": lambda self, x: Norm.forward(self, torch.nan_to_num(x)),
    "over the batch": over_the_batch,
    "halves its input": halves_its_input,
}
OTHER_GRADIENTS: dict[str, Callable[..., Any]] = {
    "a detached root": lambda self, x: scaled(self, x, variance(self, x.float()).rsqrt().detach()),
    "a detached weight": lambda self, x: self.weight.detach() * normed(self, x).to(x.dtype),
    "no backward": lambda self, x: Norm.forward(self, WithoutBackward.apply(x)),
    "otherwise for gradients": lambda self, x: Norm.forward(self, x * 2 + 1 if x.requires_grad else x),
}
REFUSED: dict[str, tuple[nn.Module, str]] = {
    **{name: (norm_by(forward), "none of the known formulas") for name, forward in OTHER_FORMULAS.items()},
    **{name: (norm_by(forward), "where gradients are needed") for name, forward in OTHER_GRADIENTS.items()},
    "noisy in training": (norm_by(noisy_in_training).eval(), "none of the known formulas"),
    "otherwise on CUDA": (norm_by(otherwise_on_cuda), "asks whether it runs on CUDA"),
    "an attribute of its weight": (norm_by(offset_by_flag_of_weight), "reads `plus_one` of a tensor"),
    "an attribute of its buffer": (norm_by(offset_by_flag_of_weight, BufferAsWeight), "reads `plus_one` of a tensor"),
    "an attribute of its input": (norm_by(scaled_by_input), "reads `scale` of a tensor"),
    "a bias": (with_member("bias", nn.Parameter(torch.zeros(24))), "parameters besides a weight: bias"),
    "a tuple": (norm_by(lambda self, x: (Norm.forward(self, x), None)), "returns tuple"),
    "a matrix": (with_member("weight", nn.Parameter(torch.ones(4, 24))), r"shape \(4, 24\)"),
    "a buffer": (with_member("scale", nn.Buffer(torch.ones(()))), "buffers: scale"),
    "a module of its own": (with_member("inner", nn.Linear(2, 2)), "modules of its own: inner"),
    "raises": (norm_by(lambda self, x: 1 // 0), "ZeroDivisionError"),
    "a plain tensor": (with_member("other", torch.ones(24)), "plain tensors"),
    "LayerNorm": (nn.LayerNorm(24), "subtracts a mean"),
    "LayerNorms written out": (norm_by(centred), "subtracts a mean"),
    "RMSNorm without eps": (nn.RMSNorm(24), "no eps"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_a_plain_rms_norm_is_refused_with_the_reason(name: str) -> None:
    module, why = REFUSED[name]
    row = row_of(module)
    assert (row.kind, row.cause) == ("norm", "unrecognised")
    assert re.search(why, row.reason or "")


def test_a_norm_whose_weight_is_a_buffer_is_fused_and_gives_that_no_gradient(device: str, launches: list[str]) -> None:
    stock = BufferAsWeight().to(device)
    stock.weight.copy_(torch.linspace(-1, 2, 24))
    fused = copy.deepcopy(stock)
    fused_norm.apply_fused_norm(nn.ModuleList([fused]))
    x = torch.randn(3, 24, device=device)
    results = []
    for module in (stock, fused):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        results.append((y, *torch.autograd.grad((y * x.cos()).sum(), leaf)))
    assert launches == ["rms_norm"]
    assert fused.weight.grad is None
    assert all(torch.allclose(*pair, rtol=1e-5, atol=1e-6) for pair in zip(*results, strict=True))


def test_the_real_weight_is_never_read() -> None:
    norm = Norm()
    norm.weight = nn.Parameter(torch.full((24,), float("nan")))
    assert row_of(norm).spec == row_of(copy.deepcopy(norm).to("meta")).spec == spec("llama")


def test_probing_leaves_no_trace() -> None:
    norm = Norm().eval()
    norm.register_forward_hook(lambda *_: pytest.fail("a hook saw the probe"))
    before = dict(vars(norm))
    state = torch.random.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fused_norm.apply_fused_norm(norm).counts["norm"] == 1
    assert torch.equal(torch.random.get_rng_state(), state)
    fused_norm.remove_fused_norm(norm)
    assert all(vars(norm)[name] is value for name, value in before.items())
    assert len(vars(norm)) == len(before)


def test_a_norm_runs_once_for_each_sample_however_many_formulas_it_is_compared_with() -> None:
    ran: list[int] = []
    row = row_of(norm_by(lambda self, x: ran.append(1) or Norm.forward(self, x), eps=2e-5))
    assert row.spec == NormSpec("llama", eps=2e-5)
    dtype_pairs, shapes, modes = 6, 3, 3
    assert len(ran) <= dtype_pairs * shapes * modes + 1
