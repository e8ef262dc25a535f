"""Computes a step: the outputs of layers and their gradients, and gradients that an execution must not change.

A loss tells late that something is wrong; they tell where.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..check.distances import share_different
from ..check.fused_calls import FusedCall, watched_calls
from ..kernels.plans import PlanTable, Rule
from ..options import RecomputeLevel
from ..patcher import apply_fused_norm, disabled
from ..patcher.patch_report import PatchReport
from .held_memory import LEVELS, held_memory, levels_not_kept
from .model_source import layers_of
from .training import LossOf, own_loss, snapshot


def layer_tensors(
    model: nn.Module, tokens: Tensor, *, mixed: bool = False, loss_of: LossOf | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Run a forward and backward pass and keep what it computes; the model is left without gradients.

    Args:
        model: a causal language model, neither wrapped nor sharded.
        tokens: [batch, sequence] of token ids, on the model's device.
        mixed: under bf16 autocast.
        loss_of: computes the loss; that of the model when None.

    Returns:
        The outputs of each layer, in order, and the logits if the model computes the loss; the gradients of the loss
        with respect to them, last first.
    """
    outputs: dict[str, Tensor] = {}

    def keep(path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        outputs[path] = output[0] if isinstance(output, tuple) else output
        if outputs[path].requires_grad:
            outputs[path].retain_grad()

    with contextlib.ExitStack() as hooks:
        for path, layer in layers_of(model).items():
            hooks.callback(layer.register_forward_hook(partial(keep, path)).remove)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=mixed):
            if loss_of is None:
                result: Any = model(input_ids=tokens, labels=tokens, use_cache=False)
                keep("logits", model, tokens, result.logits)
            loss: Tensor = result.loss if loss_of is None else loss_of(model, tokens, tokens)
        loss.backward()
    model.zero_grad(set_to_none=True)
    backward = reversed(outputs.items())
    gradients = {path: torch.zeros_like(output) if output.grad is None else output.grad for path, output in backward}
    return (
        {path: snapshot(output) for path, output in outputs.items()},
        {path: snapshot(gradient) for path, gradient in gradients.items()},
    )


def other_dtypes(model: nn.Module, paths: Iterable[str], tokens: Tensor, *, mixed: bool) -> dict[str, list[str]]:
    """The modules at ``paths`` whose forward hooks see another dtype than in stock, by what they see."""
    runs: list[dict[str, torch.dtype]] = []

    def note(path: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        runs[-1][path] = output.dtype

    with contextlib.ExitStack() as hooks, torch.no_grad():
        for path in paths:
            hooks.callback(model.get_submodule(path).register_forward_hook(partial(note, path)).remove)
        for way in (contextlib.nullcontext(), disabled()):
            runs.append({})
            with way, torch.autocast(tokens.device.type, torch.bfloat16, enabled=mixed):
                model(input_ids=tokens, use_cache=False)
    places: dict[str, list[str]] = {}
    for path, dtype in runs[0].items():
        if dtype != (stock := runs[1][path]):
            places.setdefault(f"its hooks see {dtype}, and {stock} in stock", []).append(path)
    return places


def changed_bits(
    model: nn.Module,
    tokens: Tensor,
    change: Callable[[nn.Module], object],
    *,
    mixed: bool = False,
    loss_of: Callable[[Any, Tensor], Tensor] = own_loss,
    calls: list[FusedCall] | None = None,
) -> dict[str, float]:
    """Hold the step of a model that is changed to the bits of its step before.

    A gradient that differs from step to step all the same, as one that is summed by atomic adds does, is not compared.

    Args:
        model: a causal language model, neither wrapped nor sharded; left without gradients, and changed.
        tokens: [batch, sequence] of token ids, on the model's device.
        change: changes how the model's steps run.
        mixed: under bf16 autocast.
        loss_of: computes the loss that is differentiated, of the model and the tokens.
        calls: gets the fused calls of the changed step.

    Returns:
        The share of the numbers in each parameter's gradient that are others.
    """
    gradients = partial(_repeatable_gradients, model, tokens, loss_of, mixed)
    kept, again = gradients(), gradients()
    change(model)
    with watched_calls(model, calls, with_tensors=False):
        grads = gradients()
    return _shares_of_others(kept, again, grads)


def _repeatable_gradients(
    model: nn.Module, tokens: Tensor, loss_of: Callable[[Any, Tensor], Tensor], mixed: bool
) -> dict[str, Tensor]:
    """The gradients of a step that computes the same numbers each time, as far as PyTorch can."""
    # The backwards of PyTorch's other kernels for attention sum in any order on a GPU.
    with sdpa_kernel(SDPBackend.MATH), torch.random.fork_rng([tokens.device] if tokens.is_cuda else []):
        torch.manual_seed(0)  # dropout drops the same in all
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=mixed):
            loss = loss_of(model, tokens)
        if loss.requires_grad:  # one that has lost its graph leaves no gradients
            loss.backward()
    return _taken_gradients(model)


def _taken_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of a model's parameters, which are left without."""
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads


def _shares_of_others(
    kept: Mapping[str, Tensor], again: Mapping[str, Tensor], grads: Mapping[str, Tensor]
) -> dict[str, float]:
    """The share of the numbers in each gradient that are not those ``kept``, if those are the same ``again``."""
    return {
        name: 0.0
        if share_different(right, again[name])
        else share_different(grads.get(name, torch.zeros_like(right)), right)
        for name, right in kept.items()
    }


def check_levels(
    model: nn.Module, tokens: Tensor, options: Mapping[str, Any], *, calls: list[FusedCall], mixed: bool = False
) -> tuple[dict[str, float], dict[str, list[str]]]:
    """Hold a step at each level of ``recompute`` to the bits of one that keeps all, and to fewer bytes at each level.

    Args:
        model: patched, without ``recompute``; left without gradients, and at the last level.
        tokens: [batch, sequence] of token ids, on the model's device.
        options: of ``apply_fused_norm``, besides ``recompute``.
        calls: gets the fused calls of the steps that recompute.
        mixed: under bf16 autocast.

    Returns:
        The share of the numbers in each parameter's gradient that are others, by parameter and level; and the layers
        that a level changes nothing in, by what is wrong.
    """
    reports: dict[RecomputeLevel, PatchReport] = {}
    held: dict[RecomputeLevel, tuple[dict[str, int], int]] = {}

    def loss() -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=mixed):
            return own_loss(model, tokens)

    def gradients(level: RecomputeLevel) -> dict[str, Tensor]:
        with torch.random.fork_rng([tokens.device] if tokens.is_cuda else []):
            torch.manual_seed(0)  # dropout drops the same in all
            held[level] = held_memory(loss, layers_of(model), tokens.device)
        grads = _taken_gradients(model)
        # The attention that repeats its sums on a GPU keeps copies of queries and keys.
        return _repeatable_gradients(model, tokens, own_loss, mixed) if tokens.is_cuda else grads

    kept, again = gradients(False), gradients(False)  # what a first call keeps for later ones does not count
    bits: dict[str, float] = {}
    for level in LEVELS[1:]:
        reports[level] = apply_fused_norm(model, recompute=level, **options)
        with watched_calls(model, calls, with_tensors=False):
            grads = gradients(level)
        shares = _shares_of_others(kept, again, grads)
        bits |= {f"{name}, recompute={level!r}": share for name, share in shares.items()}
    return bits, levels_not_kept(model, reports, held)


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
