"""The comparison of steps that must have the same bits: one that runs otherwise, and the one that is known to be right.

Layers that recompute or are replayed, linears with an output of a norm each, and logits that are computed when they are
read change no number. What two steps that run alike do not have in common proves nothing, and is not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..kernels.plans import PlanTable, Rule
from .distances import share_different
from .fused_calls import FusedCall, watched_calls


def other_bits(
    tensors: Mapping[str, Tensor], right: Mapping[str, Tensor], again: Mapping[str, Tensor]
) -> dict[str, float]:
    """The share of the numbers that are not the right ones, in each tensor that is the same ``again``.

    A tensor that is missing counts as zeros.
    """
    return {
        name: share_different(tensors.get(name, torch.zeros_like(value)), value)
        for name, value in right.items()
        if not share_different(again[name], value)
    }


def changed_bits(
    model: nn.Module,
    tokens: Tensor,
    changes: Mapping[str, Callable[[nn.Module], object]],
    *,
    loss_of: Callable[[Any, Tensor], Tensor],
    mixed: bool = False,
    calls: list[FusedCall] | None = None,
) -> dict[str, float]:
    """Hold steps of a model that is changed to the bits of its step before.

    Args:
        model: a causal language model, neither wrapped nor sharded; left without gradients, and changed.
        tokens: [batch, sequence] of token ids, on the model's device.
        changes: how the model's steps run, one change after the other, by what is appended to the names.
        loss_of: computes the loss that is differentiated, of the model and the tokens.
        mixed: under bf16 autocast.
        calls: gets the fused calls of the changed steps.

    Returns:
        The share of the numbers in each parameter's gradient that are others.
    """
    gradients = partial(_repeatable_gradients, model, tokens, loss_of, mixed)
    kept, again = gradients(), gradients()
    bits: dict[str, float] = {}
    for what, change in changes.items():
        change(model)
        with watched_calls(model, calls, with_tensors=False):
            grads = gradients()
        bits |= {f"{name}{what}": share for name, share in other_bits(grads, kept, again).items()}
    return bits


def _repeatable_gradients(
    model: nn.Module, tokens: Tensor, loss_of: Callable[[Any, Tensor], Tensor], mixed: bool
) -> dict[str, Tensor]:
    """The gradients of a step that computes the same numbers each time, as far as PyTorch can."""
    # The backwards of PyTorch's other kernels for attention sum in any order on a GPU.
    attention = sdpa_kernel(SDPBackend.MATH) if tokens.is_cuda else nullcontext()
    with attention, torch.random.fork_rng([tokens.device] if tokens.is_cuda else []):
        torch.manual_seed(0)  # dropout drops the same in all
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=mixed):
            loss = loss_of(model, tokens)
        if loss.requires_grad:  # one that has lost its graph leaves no gradients
            loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads


def loss_of_read_logits(model: Any, tokens: Tensor) -> Tensor:
    """A loss that no operator has, of logits that are read after those of another batch.

    It is the cross entropy of the next tokens, squared in each position, which leaves none of them without a gradient.
    """
    logits = model(input_ids=tokens, labels=tokens, use_cache=False).logits
    other = tokens.flip(-1)
    _ = model(input_ids=other, labels=other, use_cache=False).logits
    log_probabilities = logits.float().log_softmax(-1)
    return log_probabilities.gather(-1, tokens.roll(-1, 1)[..., None]).square().mean()


def same_plans(model: nn.Module) -> PlanTable:
    """Plans by which the backwards of all norms of a model add up alike, whatever else they read."""
    widths = {weight.numel() for weight in model.parameters() if weight.dim() == 1}
    rules = [Rule(width, 4096, 4, 1) for width in widths]
    sections = "norm_backward", "add_backward", "sandwich_backward", "fp32_sandwich_backward"
    return PlanTable("", "", "", dict.fromkeys(sections, rules))
