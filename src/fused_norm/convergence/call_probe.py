"""The comparison of fused calls, one by one, with the stock modules that they replace.

Every fused call of a micro-batch is made again on its own inputs and gradients, fused and by the stock modules. On
equal inputs a fused call has the bits of the stock modules, whatever the model around it computes, and its gradients
differ from theirs by roundings alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..patcher import disabled
from .distances import TURNED_ROWS, distance, share_apart, share_different, share_far_in_worst_row, slope_error
from .fused_calls import (
    FusedCall,
    computes,
    copied,
    is_tensor,
    paths_of,
    returned,
    share_changed,
    tensors_in,
    watched_calls,
    with_arguments,
)

_LOSS_SCALE = 2.0**12

_BEGINNING, _LONG = 21, 32
"""Positions in the beginning of a sequence, and positions above which a sequence has one."""

_PACKED, _LARGE = 64, 8.0
"""Positions of the sequences that stand for packed ones, as kernels' tiles have them, and how much larger their numbers
are made: the gates of an untrained model are near zero, where all activations are alike."""


@dataclass(frozen=True)
class CallRecord:
    """Distances of fused calls from the stock modules, by the call's name and what was special about it.

    Attributes:
        outputs: share of the numbers returned that are not the stock modules': that are another number in 16 bits, or
            two roundings off in fp32. Of a LoRA layer's the rows do not count that one rounding may have turned.
        rows: share of the numbers in the worst row that are far off, by ``FAR`` of the largest in the row; all of them
            where NaN is in other places.
        gradients: distance from the stock modules' gradients over the size of those, in last places of the coarsest
            dtype on their way.
        slopes: relative difference of the slope from one, of a line through the gradients over the stock modules', in
            the last places of the same dtype that chance would explain.
        changes: share of the numbers handed to the call, or to its backward, that it changed.
        bits: share of the numbers in a parameter's gradient that are others where values of the forward are computed
            a second time in the backward, or where each linear that reads a norm has an output of that of its own.
        not_seen: sites, with their kinds, that did not run fused, and layers that were to recompute and did not.
    """

    outputs: dict[str, float] = field(default_factory=dict)
    rows: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    slopes: dict[str, float] = field(default_factory=dict)
    changes: dict[str, float] = field(default_factory=dict)
    bits: dict[str, float] = field(default_factory=dict)
    not_seen: tuple[str, ...] = ()


def calls_of_step(model: nn.Module, tokens: Tensor, *, mixed: bool = False) -> list[FusedCall]:
    """The fused calls of a micro-batch; the model is left without gradients.

    Every position has a gradient, the last one too, which no label has in training. The loss is scaled, as it is where
    fp16 is trained.

    Args:
        model: a causal language model, neither wrapped nor sharded.
        tokens: [batch, sequence] of token ids, on the model's device.
        mixed: under bf16 autocast.
    """
    with watched_calls(paths_of(model)) as calls:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=mixed):
            logits: Tensor = model(input_ids=tokens, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.roll(-1, 1).flatten())
        (_LOSS_SCALE * loss).backward()
    model.zero_grad(set_to_none=True)
    return calls


def compare(
    found: CallRecord, model: nn.Module, calls: Iterable[FusedCall], *, mixed: bool = False, where: str = ""
) -> None:
    """Make fused calls of a model again, hold them to the stock modules, and add the distances to a record.

    Each is made as it was. The first of each kind is also made with its norms frozen, without gradients, of the
    beginning of the first sequence and of larger numbers in packed sequences, which are other shapes, and with a number
    that is none. ``where`` goes behind the names of all.
    """
    kinds: set[tuple[Any, ...]] = set()
    for call in filter(computes, calls):
        found.changes[f"{call.name}{where}"] = call.changed
        ways = _ways(call)
        if call.kind in kinds:
            ways = {"": ways[""]}
        kinds.add(call.kind)
        for special, (again, frozen, differentiated) in ways.items():
            name = f"{call.name}{special}{where}"
            fused = _Made(model, again, frozen=frozen, differentiated=differentiated, mixed=mixed)
            with disabled():
                stock = _Made(model, again, frozen=frozen, differentiated=differentiated, mixed=mixed)
            pairs = list(zip(fused.outputs, stock.outputs, strict=True))
            left_out = TURNED_ROWS if _has_products(call) else 0.0
            found.outputs[name] = max(share_apart(*pair, rows_left_out=left_out) for pair in pairs)
            found.rows[name] = max(share_far_in_worst_row(*pair) for pair in pairs)
            found.changes[name] = max(found.changes.get(name, 0.0), fused.changed)
            for argument, one in fused.gradients.items():
                place, other = f"{name}: gradient of {argument}", stock.gradients[argument]
                rounding = stock.rounding_of(argument)
                found.gradients[place] = distance(one, other) / rounding
                found.slopes[place] = slope_error(one, other) / _slope_by_chance(rounding, one.numel())


def _ways(call: FusedCall) -> dict[str, tuple[FusedCall, bool, bool]]:
    """The calls that are made for one call, by what is special about each.

    Each with whether norms are frozen, and whether it is differentiated.
    """
    sequences = max(len(one) for one in tensors_in(call.arguments.arguments))
    beginning = _with_tensors(call, _beginning)
    packed = _with_tensors(call, functools.partial(_packed, sequences=sequences))
    spoilt = _with_tensors(call, _with_a_nan)
    return {
        "": (call, False, True),
        ", norms frozen": (call, True, True),
        ", no gradients": (call, False, False),
        ", its beginning": (beginning, False, True),
        ", packed": (packed, False, True),
        ", one NaN": (spoilt, False, False),
    }


class _Made:
    """A call made once more: outputs, gradients by argument or weight, and what it changed."""

    def __init__(self, model: nn.Module, call: FusedCall, *, frozen: bool, differentiated: bool, mixed: bool) -> None:
        given = with_arguments(call.arguments, copied)
        weights = {f"{path}.weight": model.get_submodule(path)._parameters.get("weight") for path in call.weighted}
        trained = {name: one for name, one in weights.items() if one is not None and one.requires_grad}
        leaves = {name: one for name, one in given.arguments.items() if is_tensor(one) and one.requires_grad}
        device = tensors_in(given.arguments)[0].device
        with contextlib.ExitStack() as stack:
            for weight in trained.values() if frozen else ():
                weight.requires_grad_(False)
                stack.callback(weight.requires_grad_)
            stack.enter_context(torch.set_grad_enabled(differentiated))
            # Autocast would keep its cast of an argument, which is a leaf here and none in the model.
            stack.enter_context(torch.autocast(device.type, torch.bfloat16, enabled=mixed, cache_enabled=False))
            stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
            torch.manual_seed(0)  # dropout drops the same in both
            outputs = returned(call.method(*given.args, **given.kwargs))
            self._has_products = _has_products(call)
            self._dtypes = [one.dtype for one in (*tensors_in(given.arguments), *outputs)]
            # Stock code returns one norm, which each reader reads, and autocast casts.
            readers = 1 + len(call.dtypes) - len(outputs)
            outputs[:1] = [outputs[0].view_as(outputs[0]).to(dtype) for dtype in call.dtypes[:readers]]
        self.outputs = [output.detach() for output in outputs]
        self.changed = share_changed(given, call.arguments)
        self.gradients: dict[str, Tensor] = {}
        wanted = leaves if frozen else leaves | trained
        pairs = zip(outputs, call.gradients, strict=True)
        given_back = [(output, gradient) for output, gradient in pairs if output.requires_grad and gradient is not None]
        if not differentiated or not wanted or not given_back:
            return
        handed = [gradient.clone() for _, gradient in given_back]
        found = torch.autograd.grad(
            [output for output, _ in given_back],
            list(wanted.values()),
            handed,
            allow_unused=True,
            materialize_grads=True,
        )
        self.gradients = dict(zip(wanted, found, strict=True))
        spoilt = [share_different(one, gradient) for one, (_, gradient) in zip(handed, given_back, strict=True)]
        self.changed = max(self.changed, share_changed(given, call.arguments), *spoilt)

    def rounding_of(self, name: str) -> float:
        """The last place of a gradient; a sum, as a weight's, is of numbers in the coarsest dtype of the call."""
        is_sum = name.endswith(".weight") or self._has_products
        dtypes = [self.gradients[name].dtype, *(self._dtypes if is_sum else ())]
        return max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)


def _has_products(call: FusedCall) -> bool:
    """Return whether a call multiplies matrices, and sums in another order than stock code does."""
    return "lora_add" in call.operators


def _slope_by_chance(rounding: float, count: int) -> float:
    """The error by chance of a slope over ``count`` numbers: a few do not average their roundings out.

    In fp32 a row has a rounding in common, that of its rstd.
    """
    in_common = 1 if rounding <= torch.finfo(torch.float32).eps else 1 / 8
    return rounding * (in_common + 2 / max(1, count) ** 0.5)


def _beginning(tensor: Tensor) -> Tensor:
    """The first positions of the first sequence: a few rows make up a large part of them."""
    inner = [slice(_BEGINNING) if size > _LONG else slice(None) for size in tensor.shape[1:-1]]
    return tensor.detach()[(slice(1), *inner)].requires_grad_(tensor.requires_grad)


def _packed(tensor: Tensor, sequences: int) -> Tensor:
    """Larger numbers in sequences of ``_PACKED`` positions; angles that they share become those of other positions."""
    longer = _LARGE * tensor.detach()
    for dim, size in enumerate(tensor.shape[1:-1], start=1):
        if size > _LONG:
            longer = longer.index_select(dim, torch.arange(_PACKED, device=tensor.device) % size)
            if len(longer) < sequences:
                longer = torch.cat([longer.roll(7 * row, dim) for row in range(sequences)])
    return longer.requires_grad_(tensor.requires_grad)


def _with_a_nan(tensor: Tensor) -> Tensor:
    spoilt = tensor.detach().clone()
    spoilt[tuple(size - 1 for size in spoilt.shape)] = torch.nan
    return spoilt


def _with_tensors(call: FusedCall, change: Callable[[Tensor], Tensor]) -> FusedCall:
    gradients = [None if one is None else change(one) for one in call.gradients]
    return replace(call, arguments=with_arguments(call.arguments, change), gradients=gradients)
