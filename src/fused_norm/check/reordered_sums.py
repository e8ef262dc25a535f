"""Stock norms and adapters that add up in another order: the same mathematics, without any kernel.

Norms add up their rows in a random order, with the roundings of the stock forward; they differentiate the formula in a
wider dtype, and round the gradient they pass on at random, up or down. Products of adapters take the columns of their
factors in a random order, and round that gradient alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ..kernels import reference
from ..patcher import Site
from ..spec import NORM_KINDS, GatedNormSpec, NormSpec


@contextlib.contextmanager
def reordered_norms(model: nn.Module, sites: Iterable[Site], *, seed: int) -> Iterator[None]:
    """Let the stock norms at ``sites`` compute in another order for the length of a ``with``, on the instances.

    Args:
        model: not patched.
        sites: norms with their specs; residual adds and norms with a gate among them are passed over.
        seed: of the order.
    """
    generator = torch.Generator().manual_seed(seed)
    with contextlib.ExitStack() as stack:
        for site in sites:
            if site.kind in NORM_KINDS and site.spec is not None and not isinstance(site.spec, GatedNormSpec):
                norm = model.get_submodule(site.path)
                reordered = _ReorderedNorm(norm, site.spec, generator)
                stack.enter_context(mock.patch.object(norm, "forward", reordered))
        yield


@contextlib.contextmanager
def reordered_adapters(model: nn.Module, *, seed: int) -> Iterator[None]:
    """Let the products of a model's LoRA layers add up in another order for the length of a ``with``.

    Args:
        model: not patched.
        seed: of the order.
    """
    generator = torch.Generator().manual_seed(seed)
    with contextlib.ExitStack() as stack:
        for layer in model.modules():
            for factor in (*getattr(layer, "lora_A", {}).values(), *getattr(layer, "lora_B", {}).values()):
                stack.enter_context(mock.patch.object(factor, "forward", _ReorderedProduct(factor, generator)))
        yield


class _ReorderedProduct:
    """The product with a factor of an adapter, with the columns of the factor in another order."""

    def __init__(self, factor: nn.Linear, generator: torch.Generator) -> None:
        self._factor, device = factor, factor.weight.device
        self._order = torch.randperm(factor.in_features, generator=generator).to(device)
        self._roundings = torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=generator)))

    def __call__(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        rounded = _RoundedAtRandom.apply(x.to(dtype), torch.float32, self._roundings)
        return nn.functional.linear(rounded[..., self._order], self._factor.weight[:, self._order])


class _ReorderedNorm:
    """The stock forward of one norm, with the elements of each row in another order."""

    def __init__(self, norm: Any, spec: NormSpec, generator: torch.Generator) -> None:
        self._norm, self._spec = norm, spec
        self._seed = int(torch.randint(2**31, (), generator=generator))
        self._roundings: dict[torch.device, torch.Generator] = {}

    def __call__(self, x: Tensor) -> Tensor:
        weight: Tensor | None = self._norm.weight if self._spec.weighted else None
        order = torch.randperm(x.shape[-1], generator=torch.Generator().manual_seed(self._seed)).to(x.device)
        with torch.no_grad():
            shuffled = None if weight is None else weight[order]
            value = reference.rms_norm(self._spec, x[..., order], shuffled)[..., order.argsort()]
        if x.device not in self._roundings:  # the generator of torch is the model's, for dropout
            self._roundings[x.device] = torch.Generator(x.device).manual_seed(self._seed)
        wide = torch.float64 if x.dtype == torch.float32 else torch.float32
        widened = None if weight is None else weight.to(wide)
        rounded = _RoundedAtRandom.apply(x, wide, self._roundings[x.device])
        smooth = reference.rms_norm(self._spec, rounded, widened).to(value.dtype)
        # The difference of numbers this close is exact, and so is the sum: the value of one, the gradient of the other.
        return smooth + (value - smooth).detach()


class _RoundedAtRandom(torch.autograd.Function):
    """A cast to a wider dtype. Its gradient is off by up to half a rounding before it is rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wide: torch.dtype, generator: torch.Generator) -> Tensor:
        ctx.dtype, ctx.generator = x.dtype, generator
        return x.to(wide)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        drawn = torch.rand(gradient.shape, dtype=gradient.dtype, device=gradient.device, generator=ctx.generator)
        return (gradient * (1 + torch.finfo(ctx.dtype).eps * (drawn - 0.5))).to(ctx.dtype), None, None
