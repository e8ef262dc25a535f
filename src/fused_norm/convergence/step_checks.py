"""What one step computes, holds and does: the outputs of layers and their gradients, gradients that an execution must
not change, the bytes that each level of ``recompute`` has to save, and what the rows of a report promise.

A loss tells late that something is wrong; these tell where. Some of it changes no number, and what fusing saves is
lost: a norm may write float32 for linears that read 16 bits, the gradient of a residual connection may be added outside
of the norm's backward, attention may have to cast queries.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile, record_function

from ..check.distances import share_different
from ..kernels.plans import PlanTable, Rule
from ..model_configs import FAMILIES
from ..options import RecomputeLevel
from ..patcher import apply_fused_norm, disabled
from ..patcher.adapters import FusedAdapter
from ..patcher.fused_block import FusedBlock
from ..patcher.hooks import is_idle_dropout
from ..patcher.patch_report import PatchReport, Site
from .fused_calls import FusedCall, is_call_of, watched_calls
from .model_source import layers_of
from .training import snapshot


def layer_tensors(
    model: nn.Module, tokens: Tensor, *, mixed: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Run a forward and backward pass and keep what it computes; the model is left without gradients.

    Args:
        model: a causal language model, neither wrapped nor sharded.
        tokens: [batch, sequence] of token ids, on the model's device.
        mixed: under bf16 autocast.

    Returns:
        The outputs of each layer, in order, and the logits; the gradients of the loss with respect to them, last first.
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
            result: Any = model(input_ids=tokens, labels=tokens, use_cache=False)
        keep("logits", model, tokens, result.logits)
        result.loss.backward()
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


def own_loss(model: Any, tokens: Tensor) -> Tensor:
    """The loss that a model computes of tokens."""
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


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


LEVELS: tuple[RecomputeLevel, ...] = (False, True, "mlp", "attention")
"""The levels of ``recompute``, each of which holds less than the one before it."""

_MOMENT = "fused_norm moment"


class Allocations:
    """Counts the bytes that are allocated on a device at moments inside a ``with``.

    On a CPU it adds up the events of ``torch.profiler`` at the end; on a GPU it asks PyTorch's allocator.

    Attributes:
        held: the bytes at each moment, on a CPU since the ``with``; they are known after it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.held: list[int] = []
        self._profile: Any = None

    def __enter__(self) -> Allocations:
        gc.collect()
        gc.freeze()  # so that each later collection is quick
        if self._device.type == "cpu":
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler would write two lines for each use
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.__enter__()
        return self

    def moment(self) -> int:
        """Note how many bytes are allocated now, and return the place of this number in ``held``."""
        gc.collect()  # Triton's interpreter leaves cycles with tensors in them
        if self._profile is None:
            # Allocated bytes are rounded up, requested ones are not.
            self.held.append(torch.cuda.memory_stats(self._device)["requested_bytes.all.current"])
        else:
            with record_function(_MOMENT):
                self.held.append(0)
        return len(self.held) - 1

    def __exit__(self, *error: Any) -> None:
        gc.unfreeze()
        if self._profile is None:
            return
        self._profile.__exit__(*error)
        events = self._profile.profiler.kineto_results.events()
        in_use, moment = 0, 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                in_use += event.nbytes()
            elif event.name() == _MOMENT:
                self.held[moment] = in_use
                moment += 1


def held_memory(
    loss_of: Callable[[], Tensor], layers: Mapping[str, nn.Module], device: torch.device
) -> tuple[dict[str, int], int]:
    """Run a step, forward and backward, and measure the bytes that it holds for its backward.

    ``layers``: modules that the forward calls once each, by path.

    Returns:
        What is still allocated after each layer's forward and was not before it, by path; and what the graph holds
        after a backward that keeps it.
    """
    begins: dict[str, int] = {}
    ends: dict[str, int] = {}
    with contextlib.ExitStack() as hooks, Allocations(device) as allocations:

        def noting(path: str, moments: dict[str, int]) -> Callable[..., None]:
            return lambda *_: moments.__setitem__(path, allocations.moment())

        for path, layer in layers.items():
            hooks.callback(layer.register_forward_pre_hook(noting(path, begins)).remove)
            hooks.callback(layer.register_forward_hook(noting(path, ends)).remove)
        loss = loss_of()
        loss.backward(retain_graph=True)
        kept = allocations.moment()
        del loss
        freed = allocations.moment()
    layer_bytes = {path: allocations.held[end] - allocations.held[begins[path]] for path, end in ends.items()}
    return layer_bytes, allocations.held[kept] - allocations.held[freed]


def levels_not_kept(
    model: nn.Module,
    reports: Mapping[RecomputeLevel, PatchReport],
    held: Mapping[RecomputeLevel, tuple[Mapping[str, int], int]],
) -> dict[str, list[str]]:
    """The layers that hold as much for their backward as at the level of ``recompute`` below, by what is wrong.

    ``reports``: of each level but the first. ``held``: what ``held_memory`` returned for a step at each of ``LEVELS``.
    """
    layers_by_reason: dict[str, list[str]] = {}
    for below, level in pairwise(LEVELS):
        named = f"recompute={level!r}"
        (before, graph_before), (after, graph_after) = held[below], held[level]
        for path in _layers_with_less(model, reports[level], level):
            if after.get(path, 0) >= before.get(path, 0):
                message = f"with {named} it holds as many bytes for its backward as with recompute={below!r}"
                layers_by_reason.setdefault(message, []).append(path)
        saved = sum(before.values()) - sum(after.values())
        if saved > 0 and graph_before - graph_after < saved / 2:
            what = f"what {named} has computed again is never freed"
            layers_by_reason.setdefault(what, []).append(type(model).__name__)
    return layers_by_reason


def _layers_with_less(model: nn.Module, report: PatchReport, level: RecomputeLevel) -> Iterator[str]:
    """The layers that hold less at a level than at the one below if they do what the rows of the report say."""
    gates = {site.path for site in report.fused if site.kind == "mlp"}
    blocks = []
    for row in (row for row in report.consumers if row.reason is None):
        biases = [getattr(getattr(linear, "base_layer", linear), "bias", None) for linear in _linears_of(model, row)]
        if all(bias is None or bias.requires_grad for bias in biases):  # the graph would keep a frozen one
            blocks.append(row)
    for layer in report.recompute or ():
        inside = [row for row in blocks if row.path.startswith(f"{layer.path}.")]
        if layer.reason is None and (level is True or any((row.path in gates) == (level == "mlp") for row in inside)):
            yield layer.path


def _linears_of(model: nn.Module, row: Site) -> list[Any]:
    """The linears of a block that consume its norms."""
    block = model.get_submodule(row.path)
    assert isinstance(block, FusedBlock)
    return [block.get_submodule(name) for name in block.fused_norm_linears]


_WIDE_OUTPUT = "a norm wrote float32 for its linears, which read 16 bits under autocast"
_WIDE_QUERIES = "queries and keys were written in float32, and attention reads 16 bits under autocast"
_NOT_JOINED = "the gradient of its residual connection did not join in the backward of the norm"


def claims_not_kept(
    model: nn.Module, sites: Sequence[Site], calls: Sequence[FusedCall], tokens: Tensor, *, mixed: bool
) -> dict[str, list[str]]:
    """Return the places in which a step has not done what rows of the report promise, by what it did instead.

    ``sites``: the rows of the report that were fused. ``calls``: those of a step with these tokens, with their
    gradients. ``mixed``: under bf16 autocast.
    """
    places_by_claim: dict[str, list[str]] = {}

    def add(what: str, path: str) -> None:
        places = places_by_claim.setdefault(what, [])
        if path not in places:
            places.append(path)

    family = FAMILIES.get(getattr(getattr(model, "config", None), "model_type", ""))
    rotated = [site.path for site in sites if site.kind == "rope"]
    casting = _attentions_that_cast(model, rotated, tokens) if mixed else set()
    if family is None or not family.attention_reads_rotated:
        casting = {path for path in casting if _asks_attention(model, path)}
    for site in sites if mixed else ():
        if not any(torch.float32 in call.dtypes for call in calls if is_call_of(site, call)):
            continue
        if site.kind == "consumers":
            # A LoRA layer that may drop some of its input reads it in float32.
            adapters = [linear for linear in _linears_of(model, site) if isinstance(linear, FusedAdapter)]
            dropouts = [dropout for adapter in adapters for dropout in cast(Any, adapter).lora_dropout.values()]
            if all(map(is_idle_dropout, dropouts)):
                add(_WIDE_OUTPUT, site.path)
        elif site.kind == "rope" and site.path in casting:
            add(_WIDE_QUERIES, site.path)
    for path, layer in layers_of(model).items():
        if not isinstance(layer, FusedBlock):
            continue
        consumed = [rewrite for rewrite in layer.fused_norm_rewrites if rewrite.pattern == "consumed_norms"]
        joins = family is not None and family.joins_residual
        if joins or any("input" in rewrite.parts for rewrite in consumed):
            mine = [call for call in calls if call.path == path and call.method.__name__ == "fused_norm_passthrough"]
            # The gradient of a norm's input, which the norm hands on, has to flow into the norm's backward.
            differentiated = [call for call in mine if call.arguments.arguments["x"].requires_grad]
            if not mine or any(not call.is_one_node or call.gradients[-1] is None for call in differentiated):
                add(_NOT_JOINED, path)
    return places_by_claim


def _asks_attention(model: nn.Module, path: str) -> bool:
    """Return whether the rewritten forward of an attention asks for the dtype that its attention function reads."""
    forward: Any = getattr(type(model.get_submodule(path)), "fused_norm_forward", None)
    return forward is not None and "fused_norm_read_dtype" in inspect.unwrap(forward).__code__.co_names


def _attentions_that_cast(model: nn.Module, paths: Sequence[str], tokens: Tensor) -> set[str]:
    """The modules at ``paths`` in whose stock forward PyTorch's attention casts float32 queries and keys to 16 bits.

    Keys that are repeated before are not among them: their gradients are summed in the dtype that they have.
    """
    casting: set[str] = set()
    running: list[str] = []
    attend = functional.scaled_dot_product_attention

    def noted(query: Tensor, key: Tensor, *arguments: Any, **named: Any) -> Tensor:
        if running and query.dtype == key.dtype == torch.float32:
            groups = getattr(model.get_submodule(running[-1]), "num_key_value_groups", 1)
            if groups == 1 or named.get("enable_gqa"):
                casting.add(running[-1])
        return attend(query, key, *arguments, **named)

    with contextlib.ExitStack() as stack:
        for path in paths:
            module = model.get_submodule(path)
            stack.callback(module.register_forward_pre_hook(lambda *_, path=path: running.append(path)).remove)
            stack.callback(module.register_forward_hook(lambda *_: running.clear()).remove)
        stack.enter_context(mock.patch.object(functional, "scaled_dot_product_attention", noted))
        stack.enter_context(torch.autocast(tokens.device.type, torch.bfloat16))
        stack.enter_context(torch.no_grad())
        stack.enter_context(disabled())
        model(input_ids=tokens, use_cache=False)
    return casting
