"""The faults that are planted by hand, one at a time, to see that the verdict turns red.

A mutated line of a kernel or of the patcher makes most faults that code can have (``CONTRIBUTING.md``). Here are those
that no mutated line makes: numbers that are stale or another call's, a rounding in another place, a fallback that the
report does not tell of, what is recomputed and yet held, and one for each way in which the suite repeats a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import fused_norm.kernels.fp8  # noqa: F401 -- registers an operator that no model calls
from fused_norm.check import log_prob_losses
from fused_norm.kernels.operator import OPERATORS, Recompute
from fused_norm.kernels.switch import switch
from fused_norm.patcher import fused_classes, linear_inputs, losses, recompute
from fused_norm.patcher.adapters import AdapterInput, FusedAdapter
from fused_norm.patcher.fused_block import FusedBlock
from fused_norm.patcher.lazy_logits import LazyLogits
from fused_norm.patcher.losses import LossCall
from fused_norm.patcher.recompute import _Recomputable
from fused_norm.patcher.recompute_linears import LinearOutputs

from .planting import (
    WEIGHTS,
    Backward,
    Forward,
    Planting,
    Results,
    falls_back,
    in_backward,
    in_compiled_backward,
    in_forward,
    in_head,
    left_stock,
    logits_of_the_latest_batch,
    never_answers,
    replaced_by,
    with_changed_table,
)


@dataclass(frozen=True)
class Fault:
    """A fault that can be planted.

    Attributes:
        name: its key in ``FAULTS``.
        planted: plants it for the length of a ``with``.
        where: what runs it: ``eager`` for single calls of operators, ``sites`` for whole models that run eagerly,
            ``consumers`` for a step of a model whose norms know their consumers, ``fp8`` for
            operators of FP8 codes, which no model calls, ``linear_log_probs`` for that operator, which ``log-probs``
            calls, too, ``unit`` for unit tests, as no number shows the fault, or the name of another execution of the
            suite.
    """

    name: str
    planted: Planting
    where: str = "eager"


def _scale_of_the_first_call(call: Forward) -> Results:
    results = call.results()
    q, scale = results[:2]
    assert q is not None
    assert scale is not None
    first, top = call.memory.setdefault("scale", scale.clone()), torch.finfo(q.dtype).max
    results[:2] = (q.float() * scale / first).clamp(-top, top).to(q.dtype), first.clone()
    return results


def _adapter_of_the_first_call(call: Forward) -> Results:
    stale = {name: call.memory.setdefault(call[name].data_ptr(), call[name].detach().clone()) for name in "ab"}
    return call.results(**stale)


def _rows_of_the_first_call(call: Forward) -> Results:
    first = call.memory.setdefault(call.arguments[0].shape[-1:], len(call.arguments[0]))
    if len(call.arguments[0]) >= first:
        return call.results()
    return call.edited(lambda y: torch.where(torch.arange(y.shape[-2], device=y.device)[:, None] > 0, y, 0.0))


def _writes_over_its_branch(call: Forward) -> Results:
    results, x = call.results(), call["x"]
    with torch.no_grad():
        (call.arguments[0] if x is None else x).detach().mul_(0.5)
    return results


def _too_large_in_a_backward(call: Forward) -> Results:
    return call.edited(lambda y: y * 1.003) if torch._C._current_graph_task_id() != -1 else call.results()


def _half_nearer_zero(x: Tensor) -> Tensor:
    """Return 16-bit numbers as if fp32 were truncated: half of them move to the neighbour nearer to zero."""
    if x.dtype == torch.float32:
        return x
    bits = x.contiguous().view(torch.int16)
    cut = (torch.arange(x.numel(), device=x.device) % 2).view(x.shape).to(torch.int16)
    return torch.where(x == 0, bits, bits - cut).view(x.dtype)


def _dx_where_the_weight_is_frozen(call: Backward) -> Results:
    is_trained = any(call[f"need_{name}"] for name in WEIGHTS)
    return call.edited(lambda dx: dx if is_trained else dx * 0.99, "dx")


_ANGLES = "cos", "sin"


def _of_consumers(change: Callable[[tuple[Tensor, ...]], Any]) -> Callable[[Backward], Results]:
    """Return a backward that changes the gradients of a norm's consumers, the last consumer's first."""

    def wrong(call: Backward) -> Results:
        dys = call.call.incoming[0]
        return call.results(dy=change(dys)) if isinstance(dys, tuple) else call.results()

    return wrong


def _last_reads_the_norm_before(
    right: Any, memory: dict[str, Tensor], outputs: Any, ys: list[Tensor], *others: Any
) -> None:
    before = memory.get("y", ys[-1])
    memory["y"] = ys[-1].detach()
    right(outputs, [*ys[:-1], before] if len(ys) > 1 and before.shape == ys[-1].shape else ys, *others)


def _detached_input(right: Any, memory: Any, *arguments: Any, **named: Any) -> Any:
    y, x = right(*arguments, **named)
    return y, x.detach()


def _adapter_shares_another_ones(right: Any, memory: dict[str, Tensor], layer: FusedAdapter, x: Any) -> Any:
    """Let an adapter read the output of the adapter before it in the block."""
    if isinstance(x, AdapterInput):
        before = memory.get("own", x.own)
        memory["own"] = x.own
        x = replace(x, own=before if before.grad_fn is x.own.grad_fn else x.own)
    return right(layer, x)


def _loss_of_real_logits(right: Any, memory: Any, call: LossCall, x: Tensor, request: Any) -> Tensor:
    """Compute the loss of real logits if the model is given the number of labels in a step."""
    if request.num_items is None:
        stock: Tensor = right(call, x, request)
        return stock
    head = call.head
    args = (
        request.target,
        torch.as_tensor(request.num_items),
        request.reduction,
        request.ignore_index,
        request.label_smoothing,
    )
    logits = request.scale, request.cap, request.in_fp32
    loss: Tensor = OPERATORS["linear_cross_entropy"].reference(x, head.weight, head.bias, *args, *logits, None, None)
    return loss


def _in_log_probs(name: str, wrong: Callable[..., Any]) -> Planting:
    return replaced_by(log_prob_losses, name, lambda right, _, *arguments: wrong(right, *arguments))


def _of_the_labels_before(right: Any, logits: Tensor, labels: Tensor) -> Any:
    return right(logits, labels.roll(1, 1))


def _of_any_label(right: Any, logits: Tensor, labels: Tensor) -> Any:
    return right(logits, labels.clamp(min=0))


def _temperature_without_gradient(right: Any, model: Any, ids: Tensor, temperature: float = 1.0) -> Tensor:
    logits: Tensor = right(model, ids)
    return logits + (logits / temperature - logits).detach()


def _with_the_gradient_of_the_row_before(right: Any, logits: Tensor) -> Tensor:
    entropies: Tensor = right(logits)
    if entropies.requires_grad:
        entropies.register_hook(lambda gradient: gradient.roll(1, 1))
    return entropies


def _at_the_temperature_of_the_policy(right: Any, *arguments: Any) -> Any:
    return right(*arguments, temperature=0.5)


def _times_1_003(right: Any, memory: Any, *arguments: Any) -> Any:
    return tree_map(lambda tensor: tensor * 1.003, right(*arguments))


def _not_in_the_first_layer(right: Any, memory: dict[str, Any], forward: Any, layer: Any, *others: Any) -> Any:
    first = memory.setdefault("first", layer)
    return forward(layer, *others[0], **others[1]) if layer is first else right(forward, layer, *others)


def _held_for_ever(right: Any, memory: dict[str, list[Any]], *arguments: Any) -> Any:
    memory.setdefault("held", []).append(arguments[-1])
    return right(*arguments)


def _nothing_dropped(right: Any, memory: Any, dropout: nn.Dropout, x: Tensor) -> Any:
    return right(dropout, x) if switch.depth else x


def _dropped_as_in_the_first(right: Any, memory: dict[str, Tensor], dropout: nn.Dropout, x: Tensor) -> Any:
    if switch.depth:
        return right(dropout, x)
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        state = memory.setdefault("state", torch.get_rng_state())
        torch.set_rng_state(state)
        return right(dropout, x)


_num_items_unheeded = in_head(
    lambda request: replace(request, num_items=(request.target != request.ignore_index).sum().clamp(min=1))
)


def _entropies_of_the_row_before(call: Backward) -> Results:
    gradient = call["dentropies"]
    return call.results() if gradient is None else call.results(dentropies=gradient.roll(1))


_OF_OPERATOR = "linear_log_probs"


def _in_operators() -> Iterator[Fault]:
    sum_of_norm = "add_rms_norm_for_consumers"
    for name, wrong, *others in (
        ("add_rms_norm-nan", lambda call: call.edited(lambda y: y.nan_to_num(0.0))),  # NaN becomes 0
        # Wrong if no gradient is needed.
        ("add_rms_norm-no-grad", lambda call: call.edited(lambda y: y if call.training else y * 1.01)),
        ("add_rms_norm-shape", _rows_of_the_first_call),  # a second, smaller shape loses a row
        ("add_rms_norm-in-place", _writes_over_its_branch),  # the input is overwritten
        # All sequences are rotated by the first one's angles.
        ("rope-packed", lambda call: call.results(**{a: call[a][:1].expand_as(call[a]).contiguous() for a in _ANGLES})),
        # A recomputed forward is .3 % too large.
        ("glu-checkpointed", _too_large_in_a_backward, "checkpointing"),
        ("norm_fp8-stale", _scale_of_the_first_call, "fp8"),  # the scale is that of the first call
        ("lora_linear-stale", _adapter_of_the_first_call, "lora"),  # its weights are those of the first step
        # Log-probabilities are those of the label of the row before.
        ("linear_log_probs-shifted", lambda call: call.results(target=call["target"].roll(1)), _OF_OPERATOR),
        # A row without a label counts as one whose label is the first.
        ("linear_log_probs-ignored", lambda call: call.results(target=call["target"].clamp(min=0)), _OF_OPERATOR),
        # Linears read the scales of the next block.
        ("linear_4bit-absmax", lambda call: call.results(scale=call["scale"].roll(-1)), "qlora-qv"),
    ):
        yield Fault(name, in_forward(OPERATORS[name.partition("-")[0]], wrong), *others)
    for name, wrong, *others in (
        ("add_rms_norm-frozen", _dx_where_the_weight_is_frozen),  # dx is wrong if the weight is frozen
        # The gradient of the input is truncated, not rounded.
        ("add_rms_norm-dx-cut", lambda call: call.edited(_half_nearer_zero, "dx")),
        # The gradient of a filter is that of the next tap.
        ("causal_conv1d-dw-tap", lambda call: call.edited(lambda dw: dw.roll(1, 1), "dweight")),
        # The temperature is left out of the gradients.
        ("linear_log_probs-temperature", lambda call: call.results(temperature=None), _OF_OPERATOR),
        # The gradient of an entropy is that of the row before.
        ("linear_log_probs-entropy", _entropies_of_the_row_before, _OF_OPERATOR),
        (f"{sum_of_norm}-dropped", _of_consumers(lambda dys: dys[:-1])),  # the first consumer's gradient is missing
        # Gradients are summed from the first consumer on.
        ("rms_norm_for_consumers-order", _of_consumers(lambda dys: dys[::-1])),
        # Sums of fp32 gradients are rounded to 16 bits.
        (f"{sum_of_norm}-early", _of_consumers(lambda dys: reduce(add, dys)), "consumers"),
    ):
        yield Fault(name, in_backward(OPERATORS[name.partition("-")[0]], wrong), *others)
    yield Fault("rms_norm-compiled-dw", in_compiled_backward(OPERATORS["rms_norm"]), "compile")


UNIT = "unit"
_PASSTHROUGH = FusedBlock, "fused_norm_passthrough"
_IN_ANY_MODEL = ("rms_norm", "add_rms_norm", "norm_add", "norm_add_norm", "qk_norm", "rope", "glu")
_ONE_ROW = falls_back(
    *(OPERATORS[name] for name in _IN_ANY_MODEL), where=lambda x: len(x) == 1 and torch.is_grad_enabled()
)
_OF_LORA = {"LoraLinearBackward": lambda *_: None}

_IN_MODELS: Mapping[str, tuple[tuple[Any, ...], ...]] = {
    "sites": (
        ("fallback-rotated", falls_back(*(OPERATORS[name] for name in ("qk_norm", "rope", "glu")))),  # silently
        ("fallback-head", replaced_by(losses, "_why_real", lambda *_: "")),  # logits are real, silently
        ("fallback-one-row", _ONE_ROW),  # runs stock code for one sequence with gradients
        # The loss of a step with counted labels reads logits.
        ("fallback-counted", replaced_by(LossCall, "_loss", _loss_of_real_logits)),
        ("num-items-unheeded", _num_items_unheeded),  # the number of labels in a step is ignored
        ("left-stock", left_stock),  # one block has its stock class, and the report says fused
    ),
    "consumers": (
        # A linear reads the norm before.
        ("consumers-neighbour", replaced_by(linear_inputs.ConsumerOutputs, "__init__", _last_reads_the_norm_before)),
        # The input that is passed on has no gradient.
        ("consumers-detached", replaced_by(*_PASSTHROUGH, _detached_input)),
    ),
    "loss": (
        ("linear_cross_entropy-unshifted", in_head(lambda how: replace(how, target=how.target.roll(1)))),
        ("lazy_logits-batch", logits_of_the_latest_batch),  # logits that are read are of the latest batch
        (
            "lazy_logits-graph",
            replaced_by(LazyLogits, "read", lambda right, _, *it: right(*it).detach()),
        ),
    ),
    "recompute": (
        ("recomputed-size", replaced_by(Recompute, "outputs", _times_1_003)),  # what is recomputed is .3 % too large
        ("recomputed-one-layer", replaced_by(fused_classes, "call_recomputing", _not_in_the_first_layer)),  # keeps all
    ),
    "log-probs": (
        # Log-probabilities are those of the labels before.
        ("log-probs-shifted", _in_log_probs("token_log_probs", _of_the_labels_before)),
        # A row without a label counts as one whose label is the first.
        ("log-probs-ignored", _in_log_probs("token_log_probs", _of_any_label)),
        # The temperature is left out of the gradients.
        ("log-probs-temperature", _in_log_probs("logits_of", _temperature_without_gradient)),
        # The gradient of an entropy is that of the row before.
        ("log-probs-entropy", _in_log_probs("token_entropies", _with_the_gradient_of_the_row_before)),
        # The log-probabilities of the reference are at the policy's temperature: if both are one model, the policy's.
        ("log-probs-reference", _in_log_probs("reference_log_probs", _at_the_temperature_of_the_policy)),
    ),
    UNIT: (
        # Norms write float32 for linears that read 16 bits.
        ("consumers-wide", never_answers(linear_inputs, "_wide_consumers")),
        ("attention-wide", never_answers(FusedBlock, "fused_norm_read_dtype")),  # queries are written in float32
        # Attention silently keeps the outputs of its linears.
        (
            "recomputed-attention",
            with_changed_table(recompute, "_CONSUMERS_OF_LINEARS", lambda right: right | {"attention": right["mlp"]}),
        ),
        # Outputs that are recomputed are held as well.
        ("recomputed-held", replaced_by(_Recomputable, "recipe_for_view", _held_for_ever)),
        # Outputs of adapters are kept, silently.
        ("recomputed-adapters", with_changed_table(LinearOutputs, "_READ", lambda nodes: nodes | _OF_LORA)),
    ),
    "lora-alone": (
        ("adapter-fallback", falls_back(OPERATORS["lora_add"], OPERATORS["lora_linear"])),  # runs stock code silently
        # An adapter reads another adapter's output of a norm.
        ("adapter-shared", replaced_by(FusedAdapter, "forward", _adapter_shares_another_ones)),
    ),
    "lora-dropout": (
        # The input is not cast if dropout is on.
        ("adapter-dropout-cast", replaced_by(FusedAdapter, "_cast_for_adapter", lambda right, _, layer, x, to: x)),
        ("adapter-dropout-none", replaced_by(nn.Dropout, "forward", _nothing_dropped)),  # nothing is dropped
        # All adapters drop the same elements.
        ("adapter-dropout-same", replaced_by(nn.Dropout, "forward", _dropped_as_in_the_first)),
    ),
}
"""Faults in modules, by what runs them."""


def _faults() -> Iterator[Fault]:
    yield from _in_operators()
    for where, faults in _IN_MODELS.items():
        for name, planted in faults:
            yield Fault(name, planted, where)


FAULTS: Mapping[str, Fault] = MappingProxyType({fault.name: fault for fault in _faults()})
