"""Inputs of the operators of a vocabulary head, and how far their results are from the truth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .numerics import BF16, FP16, FP32

IGNORED = -100
FLOORS = {FP32: 5e-7, BF16: 1e-5, FP16: 1e-5}
"""Relative errors that always pass: those of float32 sums in another order."""


class Case(NamedTuple):
    """The arguments of a call."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    options: dict[str, Any]

    def results(self, loss_of: Callable[..., Tensor], dloss: float = 1.0) -> list[Tensor]:
        """Return the loss and the gradients of x, weight and bias."""
        leaves = self.leaves(torch.clone)
        loss = loss_of(*leaves, self.target, **self.options)
        inputs = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        return [loss.detach(), *torch.autograd.grad(loss * dloss, inputs)]

    def leaves(self, convert: Callable[[Tensor], Tensor]) -> list[Any]:
        """Return x, weight and bias, converted, as leaves that require a gradient if the original does."""
        return [
            None if tensor is None else convert(tensor.detach()).requires_grad_(tensor.requires_grad)
            for tensor in (self.x, self.weight, self.bias)
        ]

    def exactly(self) -> Case:
        """Return the case in float64."""
        return Case(*self.leaves(Tensor.double), *self[3:])


def stock_logits(x: Tensor, weight: Tensor, bias: Tensor | None, options: dict[str, Any]) -> Tensor:
    """Compute logits as models of transformers do, divide them by a temperature, and cast them for a softmax."""
    logits = functional.linear(x, weight, bias)
    wide = torch.promote_types(logits.dtype, FP32)
    if options.get("logits_in_fp32"):
        logits = logits.to(wide)
    if "logit_scale" in options:
        logits = logits * options["logit_scale"]
    if "softcap" in options:
        logits = torch.tanh(logits / options["softcap"]) * options["softcap"]
    if "temperature" in options:
        logits = logits / options["temperature"]
    return logits.to(wide)


def make_case(
    device: str,
    dtype: torch.dtype = BF16,
    *,
    rows: Sequence[int] = (2, 24),
    width: int = 32,
    vocabulary: int = 500,
    masked: float = 0.3,
    bias: bool = False,
    frozen: str = "",
    **options: Any,
) -> Case:
    """Draw a case; half of the labels are the likeliest ones, so that softmax and label both show in the gradient."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*rows, width, generator=generator).to(dtype)
    weight = (0.3 * torch.randn(vocabulary, width, generator=generator)).to(dtype)
    target = torch.randint(0, vocabulary, rows, generator=generator)
    likeliest = (x.float() @ weight.float().t()).argmax(-1)
    target = torch.where(torch.rand(rows, generator=generator) < 0.5, likeliest, target)
    target[torch.rand(rows, generator=generator) < masked] = options.get("ignore_index", IGNORED)
    added = torch.randn(vocabulary, generator=generator).to(dtype) if bias else None
    x, weight = x.to(device).requires_grad_("x" not in frozen), weight.to(device).requires_grad_("w" not in frozen)
    return Case(x, weight, None if added is None else added.to(device).requires_grad_(), target.to(device), options)


def error(actual: Tensor, expected: Tensor) -> float:
    size = expected.double().norm().item()
    return (actual.double() - expected.double()).norm().item() / (size or 1.0)
