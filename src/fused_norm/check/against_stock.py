"""The comparison of fused calls, one by one, with the stock modules that they replace.

Every fused call of a micro-batch is made again on its own inputs and gradients, fused and by the stock modules. On
equal inputs a fused call has the bits of the stock modules, whatever the model around it computes, and its gradients
differ from theirs by roundings alone.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.vocabulary_head import IGNORED
from ..patcher import Site, disabled
from .distances import (
    TURNED_ROWS,
    apart_by_roundings,
    distance,
    share_apart,
    share_different,
    share_far_in_worst_row,
    slope_error,
)
from .fused_calls import (
    CONVOLUTION_METHODS,
    FusedCall,
    computes,
    copied,
    is_tensor,
    named_leaves,
    returned,
    share_changed,
    sites_not_seen,
    tensors_in,
    watched_calls,
    with_arguments,
)

_LINEARS_WITH_ADAPTERS = ("lora_linear", "lora_linear_4bit")

_LOSS_SCALE = 2.0**12
_EPS_OF_FP32 = torch.finfo(torch.float32).eps

_ROWS_TO_A_TURNED_ONE = 64
"""Rows of which one may have the logit at its label rounded the other way, as sums in another order turn two in a
thousand."""

_BEGINNING, _LONG = 21, 32
"""Positions in the beginning of a sequence, and positions above which a sequence has one."""

_PACKED, _LARGE = 64, 8.0
"""Positions of the sequences that stand for packed ones, as kernels' tiles have them, and the factor by which their
numbers are larger, and gradients smaller: the gates of an untrained model are near zero, where all activations are
alike."""


@dataclass(frozen=True)
class CallRecord:
    """Distances of fused calls from the stock modules, by the call's name and what was special about it.

    Attributes:
        outputs: share of the returned numbers that differ from the stock modules': in 16 bits any other number counts,
            in fp32 one that is two roundings off. For LoRA layers, the 1/16 of rows that differ most is ignored.
        rows: share of the numbers in the worst row that are off by more than ``FAR`` of the largest in the row; 1 if
            NaN is in other places.
        gradients: distance from the stock modules' gradients over the size of those, in last places of the coarsest
            dtype on their way.
        losses: relative gap of the loss that a head's call returns, divided by what roundings explain of it.
        turned: share of the numbers in a 16-bit gradient of a head, or of the input of a linear of 4 bits, that are
            rounded to another number than stock's, whose products have the same factors and roundings. Of an input's
            gradient the row that differs most is ignored.
        slopes: ``|slope - 1|`` of a least-squares fit of fused gradients against stock gradients, in units of the
            deviation expected from rounding.
        changes: share of the numbers handed to the call, or to its backward, that it overwrote.
        bits: share of the numbers in a parameter's gradient that differ from a step without recomputation, with one
            output for all linears that read a norm, or with a head that returns its logits.
        not_seen: sites, with their kinds, that did not run fused, and layers that should have recomputed.
        not_done: by what the report or an option promises and a step did not do, in words: the places.
    """

    outputs: dict[str, float] = field(default_factory=dict)
    rows: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    turned: dict[str, float] = field(default_factory=dict)
    slopes: dict[str, float] = field(default_factory=dict)
    changes: dict[str, float] = field(default_factory=dict)
    bits: dict[str, float] = field(default_factory=dict)
    not_seen: tuple[str, ...] = ()
    not_done: dict[str, list[str]] = field(default_factory=dict)


class CallLimit(NamedTuple):
    """The largest values that a field of ``CallRecord`` may have, and its names in tables and charts.

    Attributes:
        head: of their column in tables, and of their row in charts.
        what: they are, in words.
        bar: what each may be.
        why: that much.
    """

    head: str
    what: str
    bar: float
    why: str = ""


_OUTPUTS = (
    "Calls: sums in another order turn fewer than two roundings in a thousand (3.5 if an fp32 stream takes up a "
    "16-bit branch), a cast in the wrong place one in four; a wrong row is far off in most places."
)
_GRADIENTS = (
    "Gradients of calls: if nothing was wrong they were 2.4 last places off at most, and slopes took .6 of what "
    "chance explains."
)

CALL_LIMITS: Mapping[str, CallLimit] = {
    "outputs": CallLimit(
        "call",
        "share of a fused call's outputs that are not the stock modules' on equal inputs",
        bar=0.01,
        why=_OUTPUTS,
    ),
    "rows": CallLimit(
        "row of a call",
        "share of a fused call's worst row that is far off",
        bar=0.05,
        why=_OUTPUTS,
    ),
    "losses": CallLimit(
        "call, loss",
        "gap of the loss of a head's call, over what its roundings explain",
        bar=1.0,
        why="Losses of calls: a last place of the logit in one row of 64, and four of an fp32.",
    ),
    "changes": CallLimit(
        "in place",
        "share of what a fused call was handed that it changed",
        bar=0.0,
    ),
    "bits": CallLimit(
        "same bits",
        "share of a parameter's gradient that is another if values of the forward are computed a second time, "
        "linears that read a norm have an output of it each, logits are computed when they are read, or layers are "
        "replayed as CUDA graphs, which must not change a loss or a weight either",
        bar=0.0,
    ),
    "gradients": CallLimit(
        "call, grad",
        "gradient of a fused call, last places from the stock modules' on equal inputs",
        bar=3.0,
        why=_GRADIENTS,
    ),
    "slopes": CallLimit(
        "call, slope",
        "slope of a fused call's gradient over the stock modules', off by as many chances",
        bar=2.0,
        why=_GRADIENTS,
    ),
    "turned": CallLimit(
        "call, turned",
        "share of the gradients of a head, or of a 4-bit linear's input, that are rounded otherwise than the stock "
        "modules' on equal inputs",
        bar=0.05,
        why="Turned: a logit that is rounded the other way, in a row of some hundreds, turns one in fifty of the row, "
        "and the gradient of the logit at the label most of it. One row is left out: in 3,000 draws of 21 rows stock's "
        "own sums in two orders were .042 apart at most, and .011 without the worst row.",
    ),
}
"""By the name of the field."""


def check_calls(
    model: nn.Module, tokens: Tensor, sites: Sequence[Site], *, mixed: bool = False, in_half: bool = False
) -> CallRecord:
    """Compare every fused call of a micro-batch with the stock modules, and name the sites that did not run fused.

    Args:
        model: fused; a causal language model, neither wrapped nor sharded. It is left without gradients.
        tokens: [batch, sequence] of token ids, on the model's device.
        sites: that are fused.
        mixed: under bf16 autocast.
        in_half: compare calls in fp16 as well, in which the model is left.
    """
    record, not_seen = CallRecord(), list[str]()
    for where in ("", " (fp16)") if in_half else ("",):
        calls = _calls_of_step(model.half() if where else model, tokens, mixed=mixed)
        _compare(record, model, calls, mixed=mixed, where=where)
        not_seen += sites_not_seen(sites, calls)
    return replace(record, not_seen=tuple(dict.fromkeys(not_seen)))


def _calls_of_step(model: nn.Module, tokens: Tensor, *, mixed: bool) -> list[FusedCall]:
    """The fused calls of a micro-batch; the model is left without gradients.

    Every position has a gradient, the last one too, which has no label in training. The second one has none here
    either, as a mean over a power of two has no roundings. The logits of positions without a label are read for a loss
    of their own. The loss is scaled, as it is if fp16 is trained.
    """
    with watched_calls(model) as calls:
        following = tokens.roll(-1, 1)
        labels, without = tokens.clone(), torch.zeros_like(tokens, dtype=torch.bool)
        labels[0, 2], without[0, 1], without[:, -1] = IGNORED, True, True
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=mixed):
            output = model(input_ids=tokens, labels=labels, use_cache=False)
            others = nn.functional.cross_entropy(output.logits[without].float(), following[without])
        # About as much for each position, by a power of two.
        share = 2.0 ** round(math.log2(int(without.sum()) / int((~without).sum())))
        (_LOSS_SCALE * (output.loss + share * others)).backward()
    model.zero_grad(set_to_none=True)
    return calls


def _compare(record: CallRecord, model: nn.Module, calls: Iterable[FusedCall], *, mixed: bool, where: str) -> None:
    """Repeat fused calls of a model, fused and by the stock modules, and add their distances to a record.

    The first call of each kind is also repeated with frozen norms, without gradients, on the beginning of the first
    sequence, on larger numbers in packed sequences, which are other shapes, and with one NaN. ``where`` is appended to
    all names. Of several calls with one name the worst counts.
    """
    kinds: set[tuple[Any, ...]] = set()

    def add(distances: dict[str, float], name: str, value: float) -> None:
        distances[name] = max(distances.get(name, 0.0), value)

    for call in filter(computes, calls):
        add(record.changes, f"{call.name}{where}", call.changed)
        ways = _ways(call)
        if call.kind in kinds:
            ways = {"": ways[""]}
        kinds.add(call.kind)
        for special, (again, frozen, differentiated) in ways.items():
            name = f"{call.name}{special}{where}"
            fused = _Repeated(model, again, frozen=frozen, differentiated=differentiated, mixed=mixed)
            with disabled():
                stock = _Repeated(model, again, frozen=frozen, differentiated=differentiated, mixed=mixed)
            pairs = list(zip(fused.outputs, stock.outputs, strict=True))
            if _is_of_head(call):
                loss, right = pairs[0]
                gap = 0.0 if loss.isnan() and right.isnan() else distance(loss, right)
                # Roundings explain a last place of the logit in one row of 64, and some of fp32, in a mean over rows.
                rounding = max(stock.last_place / min(stock.rows, _ROWS_TO_A_TURNED_ONE), 4 * _EPS_OF_FP32)
                add(record.losses, name, gap / rounding)
            else:
                left_out = TURNED_ROWS if _has_products(call) else 0.0
                add(record.outputs, name, max(share_apart(*pair, rows_left_out=left_out) for pair in pairs))
                add(record.rows, name, max(share_far_in_worst_row(*pair) for pair in pairs))
            add(record.changes, name, fused.changed)
            for argument, gradient in fused.gradients.items():
                place, right = f"{name}: gradient of {argument}", stock.gradients[argument]
                if stock.last_place > _EPS_OF_FP32:
                    gradient, right = _of_rows_alike(gradient, right, pairs)
                rounding = torch.finfo(right.dtype).eps
                if argument in stock.sums:  # of numbers in the coarsest dtype of the call
                    rounding = max(rounding, stock.last_place)
                if argument == "top_k_weights":
                    # Products of rows that are products cancel: two orders of stock's sums were 3 last places apart in
                    # the median, and up to 4.6, in 200 draws of 42 numbers.
                    rounding *= 2
                add(record.gradients, place, distance(gradient, right) / rounding)
                has_same_products = _is_of_head(call) or (
                    argument == "x" and not {*_LINEARS_WITH_ADAPTERS, "linear_4bit"}.isdisjoint(call.operators)
                )
                if has_same_products and stock.last_place > _EPS_OF_FP32:
                    # If the gradient of the logit at a label is rounded the other way, most of its row is.
                    left_out = 1 / stock.rows if argument == "x" else 0.0
                    add(record.turned, place, share_apart(gradient, right, rows_left_out=left_out))
                # A few numbers do not average their roundings out. In fp32 a row has one in common, that of its rstd.
                in_common = 1 if rounding <= _EPS_OF_FP32 else 1 / 8
                by_chance = rounding * (in_common + 2 / max(1, right.numel()) ** 0.5)
                add(record.slopes, place, slope_error(gradient, right) / by_chance)


def _of_rows_alike(gradient: Tensor, right: Tensor, outputs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """A gradient and stock's, of the rows whose outputs in fp32 are stock's; of all rows if there is no such row.

    If a number of 16 bits between an input and a sum in fp32 is rounded the other way, the sum shows it, and a gradient
    in fp32 is off by thousands of its own roundings.
    """
    of_rows = [pair for pair in outputs if {(y.dtype, y.shape) for y in pair} == {(torch.float32, right.shape)}]
    if not of_rows or right.dtype != torch.float32 or gradient.shape != right.shape:
        return gradient, right
    alike = ~torch.stack([apart_by_roundings(*pair) for pair in of_rows]).any(0).any(-1)
    return (gradient[alike], right[alike]) if alike.any() else (gradient, right)


def _ways(call: FusedCall) -> dict[str, tuple[FusedCall, bool, bool]]:
    """The calls that are made for one call, by what is special about each.

    Each with whether norms are frozen, and whether it is differentiated.
    """
    tensors = [tensor for tensor in tensors_in(call.arguments.arguments) if _has_rows(call, tensor)]
    sequences = 1 if _is_of_experts(call) else max(map(len, tensors))
    beginning = _with_tensors(call, _beginning)
    packed = _with_tensors(
        call,
        functools.partial(_packed, sequences=sequences, factor=_LARGE),
        # Larger gates make larger gradients, and a norm of little divides by little: in fp16 stock's would overflow.
        functools.partial(_packed, sequences=sequences, factor=1 / _LARGE),
    )
    # The last positions of a head's sequence have no label, and the one before the last is the last then.
    spoilt = _with_tensors(call, lambda tensor: _with_a_nan(tensor.roll(1, 0) if _is_of_head(call) else tensor))
    if _is_of_experts(call):  # NaN for a weight would hide what experts make of NaN
        spoilt.arguments.arguments["top_k_weights"] = call.arguments.arguments["top_k_weights"]
    return {
        "": (call, False, True),
        ", norms frozen": (call, True, True),
        ", no gradients": (call, False, False),
        ", its beginning": (beginning, False, True),
        ", packed": (packed, False, True),
        ", one NaN": (spoilt, False, False),
    }


class _Repeated:
    """A call that is repeated.

    Attributes:
        outputs, gradients: what it returned, and the gradients by argument or weight.
        changed: share of what it was handed that it overwrote.
        last_place: that of the coarsest dtype of the call.
        rows: of its first tensor.
        sums: arguments and weights whose gradients are sums over rows.
    """

    def __init__(self, model: nn.Module, call: FusedCall, *, frozen: bool, differentiated: bool, mixed: bool) -> None:
        bound = with_arguments(call.arguments, copied)
        trained = {
            f"{path}.{name}": parameter
            for path in call.weighted
            for name, parameter in model.get_submodule(path)._parameters.items()
            if parameter is not None and parameter.requires_grad
        }
        weights = frozenset(trained)
        leaves = {name: leaf for name, leaf in named_leaves(bound) if is_tensor(leaf) and leaf.requires_grad}
        parameters = {name: leaf for name, leaf in named_leaves(bound) if isinstance(leaf, nn.Parameter)}
        trained |= {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        tensors = tensors_in(bound.arguments)
        self.rows, device = tensors[0].shape[:-1].numel(), tensors[0].device
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "All-NaN slice", RuntimeWarning)  # Triton's interpreter, of a row of NaN
            for weight in trained.values() if frozen else ():
                weight.requires_grad_(False)
                stack.callback(weight.requires_grad_)
            stack.enter_context(torch.set_grad_enabled(differentiated))
            # Autocast would keep its cast of an argument, which is a leaf here and none in the model.
            stack.enter_context(torch.autocast(device.type, torch.bfloat16, enabled=mixed, cache_enabled=False))
            stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
            torch.manual_seed(0)  # dropout drops the same in both
            outputs = returned(call.method(*bound.args, **bound.kwargs))
            is_cast_by_autocast = _has_products(call) or _is_of_convolution(call)
            dtypes = [tensor.dtype for tensor in (*tensors, *outputs) if tensor.is_floating_point()]
            dtypes += [torch.bfloat16] if mixed and is_cast_by_autocast else []
            self.last_place = max(torch.finfo(dtype).eps for dtype in dtypes)
            # Stock code returns one norm, which each consumer reads, and autocast casts.
            consumers = 1 + len(call.dtypes) - len(outputs)
            outputs[:1] = [outputs[0].view_as(outputs[0]).to(dtype) for dtype in call.dtypes[:consumers]]
        self.outputs = [output.detach() for output in outputs]
        self.changed = share_changed(bound, call.arguments)
        self.gradients: dict[str, Tensor] = {}
        inputs = leaves if frozen else leaves | trained
        self.sums = frozenset(inputs) if is_cast_by_autocast else weights
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, call.gradients, strict=True)
            if output.requires_grad and gradient is not None
        ]
        if not differentiated or not inputs or not pairs:
            return
        used = [output for output, _ in pairs]
        incoming = [gradient.clone() for _, gradient in pairs]
        gradients = torch.autograd.grad(
            used, list(inputs.values()), incoming, allow_unused=True, materialize_grads=True
        )
        self.gradients = dict(zip(inputs, gradients, strict=True))
        spoilt = [share_different(dy, gradient) for dy, (_, gradient) in zip(incoming, pairs, strict=True)]
        self.changed = max(self.changed, share_changed(bound, call.arguments), *spoilt)


def _has_rows(call: FusedCall, tensor: Tensor) -> bool:
    """Return whether a tensor of a call has rows: no single number, and no weight of a convolution."""
    return tensor.dim() == 3 if _is_of_convolution(call) else tensor.dim() > 0


def _is_of_convolution(call: FusedCall) -> bool:
    """Return whether a call is that of a convolution, whose tensors are [batch, channels, positions]."""
    return call.method.__name__ in CONVOLUTION_METHODS


def _is_of_head(call: FusedCall) -> bool:
    """Return whether a call is that of a head with its loss."""
    return "linear_cross_entropy" in call.operators


def _is_of_experts(call: FusedCall) -> bool:
    """Return whether a call is that of experts, whose tensors are [positions of all sequences, columns]."""
    return "top_k_weights" in call.arguments.arguments


def _has_products(call: FusedCall) -> bool:
    """Return whether a call multiplies matrices, and sums in another order than stock code does."""
    return not {*_LINEARS_WITH_ADAPTERS, "lora_add"}.isdisjoint(call.operators) or _is_of_head(call)


def _beginning(tensor: Tensor) -> Tensor:
    """The first positions of the first sequence: a few rows make up a large part of them."""
    inner = [slice(_BEGINNING) if size > _LONG else slice(None) for size in tensor.shape[1:-1]]
    return tensor.detach()[(slice(1), *inner)].requires_grad_(tensor.requires_grad)


def _packed(tensor: Tensor, sequences: int, factor: float) -> Tensor:
    """Multiplied numbers in sequences of ``_PACKED`` positions; angles that they share become those of other ones."""
    longer = factor * tensor.detach() if tensor.is_floating_point() else tensor
    for dim, size in enumerate(tensor.shape[1:-1], start=1):
        if size > _LONG:
            longer = longer.index_select(dim, torch.arange(_PACKED, device=tensor.device) % size)
            if len(longer) < sequences:
                longer = torch.cat([longer.roll(7 * row, dim) for row in range(sequences)])
    return longer.requires_grad_(tensor.requires_grad)


def _with_a_nan(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    spoilt = tensor.detach().clone()
    spoilt[tuple(size - 1 for size in spoilt.shape)] = torch.nan
    return spoilt


def _with_tensors(
    call: FusedCall, change: Callable[[Tensor], Tensor], change_gradient: Callable[[Tensor], Tensor] | None = None
) -> FusedCall:
    """A call with other tensors of rows, which ``change`` makes; its labels, one for each row, are those of these rows.

    ``change_gradient``: makes those of its gradients, if ``change`` does not.
    """

    def changed(tensor: Tensor, change: Callable[[Tensor], Tensor] = change) -> Tensor:
        if not _has_rows(call, tensor):
            return tensor
        if _is_of_convolution(call):
            return change(tensor.transpose(1, 2)).transpose(1, 2)
        if _is_of_experts(call):
            return change(tensor[None])[0]
        return change(tensor) if tensor.is_floating_point() else change(tensor[..., None])[..., 0]

    arguments = with_arguments(call.arguments, changed)
    if "length" in arguments.arguments:  # a convolution's result is cut to it
        arguments.arguments["length"] = arguments.arguments["x"].shape[-1]
    of_gradient = change_gradient or change
    gradients = [None if gradient is None else changed(gradient, of_gradient) for gradient in call.gradients]
    return replace(call, arguments=arguments, gradients=gradients)
