"""Every fused call of a micro-batch, watched as it runs in the model and then made again: fused, and by stock modules.

On equal inputs a fused call has the bits of the stock modules, whatever the model around it computes, and its gradients
differ from theirs by roundings alone. So each call is kept with what it was given and with the gradients that came back
to it. No module has a hook meanwhile, and blocks take the way that they take in training.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..kernels.operator import Operator
from ..patcher import Site, disabled
from ..patcher.fused_block import FusedBlock
from ..patcher.fused_norm_module import FusedNorm
from ..spec import Kind

_METHODS_OF: Mapping[str, frozenset[str]] = {
    "rope": frozenset({"fused_norm_rotated", "fused_norm_rope", "fused_norm_rope_one"}),
    "mlp": frozenset({"fused_norm_gate", "fused_norm_gate_packed"}),
}
"""The methods of blocks that stand for a site which is the block; sites of other kinds are norms."""

_BLOCK_METHODS = (
    "fused_norm_add",
    "fused_norm_onto",
    "fused_norm_pair",
    *sorted(frozenset().union(*_METHODS_OF.values())),
)

_LOSS_SCALE = 2.0**12

_BEGINNING, _LONG = 21, 32
"""Positions in the beginning of a sequence, and positions above which a sequence has one."""

FAR = 1 / 64
"""More than roundings make of a number, one in the rstd of its row among them; less than a row in another's place."""

_OPERATORS_OF: Mapping[Kind, frozenset[str]] = {
    "norm": frozenset({"rms_norm", "add_rms_norm", "norm_add", "norm_add_norm"}),
    "qk": frozenset({"rms_norm", "qk_norm", "qk_norm_rope"}),
    "residual": frozenset({"add_rms_norm", "norm_add_norm"}),
    "sandwich": frozenset({"norm_add", "norm_add_norm"}),
    "rope": frozenset({"qk_norm_rope", "rope"}),
    "mlp": frozenset({"glu"}),
}
"""The operators that make a site of each kind fused."""


@dataclass
class FusedCall:
    """A call of a fused norm, or of a block's fused method.

    Attributes:
        path: of the module that was called.
        method: that was called.
        norms: paths of the norms that took part.
        arguments: the method's, by its parameters' names; tensors are copies.
        operators: names of the operators that it ran.
        changed: share of the numbers among its arguments that it changed.
        gradients: of the tensors it returned, in order; None for one that nothing depends on.
    """

    path: str
    method: Callable[..., Any]
    norms: tuple[str, ...]
    arguments: inspect.BoundArguments
    operators: list[str] = field(default_factory=list)
    changed: float = 0.0
    gradients: list[Tensor | None] = field(default_factory=list)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for calls of one method that run the same operators on tensors of the same dtypes."""
        return self.method, *self.operators, *(one.dtype for one in _tensors(self.arguments.arguments))

    @property
    def name(self) -> str:
        """The path, and the method unless it is the module's forward."""
        return self.path if self.method.__name__ == "forward" else f"{self.path}.{self.method.__name__}"


@dataclass(frozen=True)
class CallRecord:
    """Distances of fused calls from the stock modules, by the call's name and what was special about it.

    Attributes:
        outputs: share of the numbers returned that are not the stock modules': that are another number in 16 bits, or
            two roundings off in fp32.
        rows: share of the numbers in the worst row that are far off, by ``FAR`` of the largest in the row; all of them
            where NaN is in other places.
        gradients: distance from the stock modules' gradients over the size of those, in last places of the coarsest
            dtype on their way.
        slopes: relative difference of the slope from one, of a line through the gradients over the stock modules', in
            the last places of the same dtype that chance would explain.
        changes: share of the numbers handed to the call, or to its backward, that it changed.
        not_seen: sites, with their kinds, that did not run fused.
    """

    outputs: Mapping[str, float] = field(default_factory=dict)
    rows: Mapping[str, float] = field(default_factory=dict)
    gradients: Mapping[str, float] = field(default_factory=dict)
    slopes: Mapping[str, float] = field(default_factory=dict)
    changes: Mapping[str, float] = field(default_factory=dict)
    not_seen: tuple[str, ...] = ()

    def joined(self, other: CallRecord, where: str) -> CallRecord:
        """This record and another one, whose names get ``where`` behind them."""
        both = {
            name: {**values, **{f"{call} ({where})": value for call, value in getattr(other, name).items()}}
            for name, values in vars(self).items()
            if name != "not_seen"
        }
        return CallRecord(**both, not_seen=tuple(dict.fromkeys((*self.not_seen, *other.not_seen))))


@contextlib.contextmanager
def watched_calls(model: nn.Module) -> Iterator[list[FusedCall]]:
    """Keep every fused call that ``model`` makes inside the ``with``, in order; inner calls are part of outer ones."""
    paths = {id(module): path for path, module in model.named_modules()}
    calls: list[FusedCall] = []
    under_way: list[FusedCall] = []
    run_operator = Operator.__call__

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(method)

        @functools.wraps(method)
        def watch(*positional: Any, **named: Any) -> Any:
            if under_way or id(positional[0]) not in paths:
                return method(*positional, **named)
            given = signature.bind(*positional, **named)
            norms = [one for one in given.arguments.values() if isinstance(one, FusedNorm)]
            kept = _with_arguments(given, _copied)
            call = FusedCall(paths[id(positional[0])], method, tuple(paths[id(one)] for one in norms), kept)
            under_way.append(call)
            try:
                outputs = method(*positional, **named)
            finally:
                under_way.pop()
            calls.append(call)
            call.changed = _share_changed(given, kept)
            _keep_gradients(call, _tensors(outputs))
            return outputs

        return watch

    def counted(operator: Operator, *arguments: Any) -> Any:
        if under_way:
            rotates = operator.name == "qk_norm" and arguments[5] is not None
            under_way[0].operators.append("qk_norm_rope" if rotates else operator.name)
        return run_operator(operator, *arguments)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(Operator, "__call__", counted))
        for owner, name in ((FusedNorm, "forward"), *((FusedBlock, name) for name in _BLOCK_METHODS)):
            stack.enter_context(_replaced(owner, name, watched(getattr(owner, name))))
        yield calls


def sites_not_seen(sites: Iterable[Site], calls: Sequence[FusedCall]) -> tuple[str, ...]:
    """The sites, with their kinds, of which not every call ran fused: by an operator that stands for their kind."""
    missing = []
    for site in sites:
        if site.kind in _METHODS_OF:
            mine = [c for c in calls if c.path == site.path and c.method.__name__ in _METHODS_OF[site.kind]]
        else:
            mine = [c for c in calls if site.path in c.norms]
        if not mine or any(_OPERATORS_OF[site.kind].isdisjoint(call.operators) for call in mine):
            missing.append(f"{site.path} ({site.kind})")
    return tuple(missing)


def first_of_each_kind(calls: Sequence[FusedCall]) -> list[FusedCall]:
    """The first call of each kind, in order."""
    return list({call.kind: call for call in reversed(calls)}.values())[::-1]


def sites_not_compiled(sites: Iterable[Site], called: Sequence[str]) -> tuple[str, ...]:
    """The sites, with their kinds, for which compiled code has no operator, from the names of what it calls."""
    names = {name.removeprefix("fused_norm.").removesuffix("_forward.default") for name in called}
    names |= {"qk_norm_rope"} if "qk_norm" in names else set()  # one operator, with and without
    return tuple(f"{site.path} ({site.kind})" for site in sites if _OPERATORS_OF[site.kind].isdisjoint(names))


def probe_calls(
    model: nn.Module,
    sites: Sequence[Site],
    tokens: Tensor,
    *,
    mixed: bool = False,
    calls_wanted: Callable[[Sequence[FusedCall]], Sequence[FusedCall]] = lambda calls: calls,
) -> CallRecord:
    """Hold every fused call of a micro-batch to the stock modules; the model is left without gradients.

    Every position has a gradient, the last one too, which no label has in training. The loss is scaled, as it is where
    fp16 is trained.

    Args:
        model: a causal language model, neither wrapped nor sharded.
        sites: that were fused in it.
        tokens: [batch, sequence] of token ids, on the model's device.
        mixed: under bf16 autocast.
        calls_wanted: picks those that are compared, from all.
    """
    with watched_calls(model) as calls:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=mixed):
            logits: Tensor = model(input_ids=tokens, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.roll(-1, 1).flatten())
        (_LOSS_SCALE * loss).backward()
    model.zero_grad(set_to_none=True)
    record = compare_calls(model, calls_wanted(calls), mixed=mixed)
    return replace(record, not_seen=sites_not_seen(sites, calls))


def compare_calls(model: nn.Module, calls: Sequence[FusedCall], *, mixed: bool = False) -> CallRecord:
    """Make fused calls again and hold them to the stock modules.

    Each is made as it was. The first of each kind is also made with its norms frozen, without gradients, of the
    beginning of the first sequence, which is another shape, and with a number that is none.

    Args:
        model: neither wrapped nor sharded; gradients that its parameters have are left as they are.
        calls: of ``watched_calls``, after the backward.
        mixed: under bf16 autocast.
    """
    outputs: dict[str, float] = {}
    rows: dict[str, float] = {}
    gradients: dict[str, float] = {}
    slopes: dict[str, float] = {}
    changes: dict[str, float] = {}
    kinds: set[tuple[Any, ...]] = set()
    for call in calls:
        changes[call.name] = call.changed
        ways = _ways(call)
        if call.kind in kinds:
            ways = {"": ways[""]}
        kinds.add(call.kind)
        for special, (again, frozen, differentiated) in ways.items():
            name = f"{call.name}{special}"
            fused = _Made(model, again, frozen=frozen, differentiated=differentiated, mixed=mixed)
            with disabled():
                stock = _Made(model, again, frozen=frozen, differentiated=differentiated, mixed=mixed)
            pairs = list(zip(fused.outputs, stock.outputs, strict=True))
            outputs[name] = max(share_apart(*pair) for pair in pairs)
            rows[name] = max(share_far_in_worst_row(*pair) for pair in pairs)
            changes[name] = max(changes.get(name, 0.0), fused.changed)
            for argument, one in fused.gradients.items():
                where, other = f"{name}: gradient of {argument}", stock.gradients[argument]
                rounding = fused.rounding_of(argument)
                gradients[where] = _distance(one, other) / rounding
                slopes[where] = slope_error(one, other) / _slope_by_chance(rounding, one.numel())
    return CallRecord(outputs, rows, gradients, slopes, changes)


def _ways(call: FusedCall) -> dict[str, tuple[FusedCall, bool, bool]]:
    """Calls to make in the place of one, by what is special: the call, whether norms are frozen, and whether
    it is differentiated."""
    beginning, spoilt = (_with_tensors(call, change) for change in (_beginning, _with_a_nan))
    return {
        "": (call, False, True),
        ", norms frozen": (call, True, True),
        ", no gradients": (call, False, False),
        ", its beginning": (beginning, False, True),
        ", one NaN": (spoilt, False, False),
    }


class _Made:
    """A call made once more: outputs, gradients by argument or weight, and what it changed."""

    def __init__(self, model: nn.Module, call: FusedCall, *, frozen: bool, differentiated: bool, mixed: bool) -> None:
        given = _with_arguments(call.arguments, _copied)
        weights = {f"{path}.weight": model.get_submodule(path)._parameters.get("weight") for path in call.norms}
        trained = {name: one for name, one in weights.items() if one is not None and one.requires_grad}
        leaves = {name: one for name, one in given.arguments.items() if _is_tensor(one) and one.requires_grad}
        device = _tensors(given.arguments)[0].device
        with contextlib.ExitStack() as stack:
            for weight in trained.values() if frozen else ():
                weight.requires_grad_(False)
                stack.callback(weight.requires_grad_)
            stack.enter_context(torch.set_grad_enabled(differentiated))
            stack.enter_context(torch.autocast(device.type, torch.bfloat16, enabled=mixed))
            outputs = _tensors(call.method(*given.args, **given.kwargs))
        self.outputs = [output.detach() for output in outputs]
        self.changed = _share_changed(given, call.arguments)
        self.gradients: dict[str, Tensor] = {}
        self._dtypes = [one.dtype for one in (*_tensors(given.arguments), *outputs)]
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
        self.changed = max(self.changed, _share_changed(given, call.arguments), *spoilt)

    def rounding_of(self, name: str) -> float:
        """The last place of a gradient; a weight's is summed from numbers in the coarsest dtype of the call."""
        dtypes = [self.gradients[name].dtype, *(self._dtypes if name.endswith(".weight") else ())]
        return max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)


def share_apart(one: Tensor, other: Tensor) -> float:
    """The share of the numbers that differ; in fp32, by more than two roundings of the largest in their row."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return 1.0
    roundings = 2 * torch.finfo(other.dtype).eps if other.dtype == torch.float32 else 0.0
    return _share(_apart(one, other, roundings))


def share_far_in_worst_row(one: Tensor, other: Tensor) -> float:
    """The share of the numbers in a row that are off by more than ``FAR`` of the largest, in the worst row."""
    if one.shape != other.shape or (one.isnan() != other.isnan()).any():
        return 1.0
    apart = _apart(one, other, FAR)
    return apart.double().mean(-1).max().item() if apart.numel() else 0.0


def _apart(one: Tensor, other: Tensor, share: float) -> Tensor:
    """A mask of the numbers that are further apart than a share of the largest in their row."""
    same = (one == other) | (one.isnan() & other.isnan())
    if not share or not other.numel():
        return ~same
    one, other = one.float(), other.float()
    largest = other.abs().nan_to_num(0.0, 0.0, 0.0).amax(-1, keepdim=True)
    return ~same & ~((one - other).abs() <= share * largest)


def _share(apart: Tensor) -> float:
    return apart.double().mean().item() if apart.numel() else 0.0


def share_different(one: Tensor, other: Tensor) -> float:
    """The share of the numbers that differ."""
    return _share((one != other) & ~(one.isnan() & other.isnan()))


def _distance(one: Tensor, other: Tensor) -> float:
    apart, size = (one.double() - other.double()).norm().item(), other.double().norm().item()
    distance = apart / size if size else apart
    return distance if math.isfinite(distance) else math.inf


def slope_error(one: Tensor, other: Tensor) -> float:
    """``|<one, other> / <other, other> - 1|``; 0 where ``other`` is zero, infinite where something is not finite."""
    square = other.double().square().sum().item()
    error = abs((one.double() * other.double()).sum().item() / square - 1) if square else 0.0
    return error if math.isfinite(error) else math.inf


def _slope_by_chance(rounding: float, count: int) -> float:
    """The error by chance of a slope over ``count`` numbers: a few do not average their roundings out.

    In fp32 a row has a rounding in common, that of its rstd.
    """
    in_common = 1 if rounding <= torch.finfo(torch.float32).eps else 1 / 8
    return rounding * (in_common + 2 / max(1, count) ** 0.5)


def _is_tensor(one: Any) -> bool:
    return isinstance(one, Tensor) and not isinstance(one, nn.Parameter)


def _tensors(tree: Any) -> list[Tensor]:
    return [one for one in tree_leaves(tree) if _is_tensor(one)]


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _beginning(tensor: Tensor) -> Tensor:
    """The first positions of the first sequence: a few rows make up a large part of them."""
    inner = [slice(_BEGINNING) if size > _LONG else slice(None) for size in tensor.shape[1:-1]]
    return tensor.detach()[(slice(1), *inner)].requires_grad_(tensor.requires_grad)


def _with_a_nan(tensor: Tensor) -> Tensor:
    spoilt = tensor.detach().clone()
    spoilt[tuple(size - 1 for size in spoilt.shape)] = torch.nan
    return spoilt


def _with_arguments(given: inspect.BoundArguments, change: Callable[[Tensor], Tensor]) -> inspect.BoundArguments:
    changed = inspect.BoundArguments(given.signature, type(given.arguments)(given.arguments))
    changed.arguments.update(tree_map(lambda one: change(one) if _is_tensor(one) else one, dict(given.arguments)))
    return changed


def _with_tensors(call: FusedCall, change: Callable[[Tensor], Tensor]) -> FusedCall:
    gradients = [None if one is None else change(one) for one in call.gradients]
    return FusedCall(call.path, call.method, call.norms, _with_arguments(call.arguments, change), gradients=gradients)


def _share_changed(given: inspect.BoundArguments, before: inspect.BoundArguments) -> float:
    pairs = zip(_tensors(given.arguments), _tensors(before.arguments), strict=True)
    return max((share_different(one, other) for one, other in pairs), default=0.0)


def _keep_gradients(call: FusedCall, outputs: Sequence[Tensor]) -> None:
    call.gradients = [None] * len(outputs)

    def keep(index: int, gradient: Tensor) -> None:
        call.gradients[index] = gradient.detach().clone()

    for index, output in enumerate(outputs):
        if output.requires_grad:
            output.register_hook(functools.partial(keep, index))


@contextlib.contextmanager
def _replaced(owner: type, name: str, new: Callable[..., Any]) -> Iterator[None]:
    old = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, old)
