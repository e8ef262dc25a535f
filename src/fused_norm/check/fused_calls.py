"""The fused calls of a model, watched as they run in it, with what they were given and the gradients that came back.

No module has a hook meanwhile, and blocks take the way that they take in training.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map

from ..kernels.autocast import autocast_dtype
from ..kernels.operator import Operator, Recompute
from ..patcher.adapters import FusedAdapter
from ..patcher.four_bit import FusedLinear4bit
from ..patcher.fused_block import FusedBlock
from ..patcher.fused_experts import FusedExperts
from ..patcher.fused_norm_module import FusedGatedNorm, FusedNorm
from ..patcher.lazy_logits import CrossEntropy
from ..patcher.linear_inputs import tensors_of
from ..patcher.losses import FusedHead
from ..patcher.patch_report import Site
from .distances import share_different

_IN_FLOAT32 = "float32"
"""Stands among operators for a LoRA layer that multiplies in float32, which is left to PyTorch."""

_OWN_INPUTS = "own inputs"
"""Stands among operators for linears each of which has an input of its own, or one without a gradient."""


class _Kind(NamedTuple):
    """A kind of site: the operators and methods by which its sites are told among calls.

    Attributes:
        operators: one of them makes it fused.
        methods: of the block, LoRA layer or head that the site is; none if it is a norm, which is an argument of calls.
    """

    operators: Set[str]
    methods: Set[str] = frozenset()


_KINDS: Mapping[str, _Kind] = {
    "norm": _Kind({"rms_norm", "add_rms_norm", "norm_add", "norm_add_norm", "gated_rms_norm"}),
    "qk": _Kind({"rms_norm", "qk_norm", "qk_norm_rope"}),
    "residual": _Kind({"add_rms_norm", "norm_add_norm"}),
    "post_norm": _Kind({"norm_add", "norm_add_norm"}),
    "rope": _Kind({"qk_norm_rope", "rope"}, {"fused_norm_rotated", "fused_norm_rope", "fused_norm_rope_one"}),
    "mlp": _Kind({"glu", "glu_for_consumers"}, {"fused_norm_gate", "fused_norm_gate_packed", "fused_norm_product"}),
    "conv": _Kind({"causal_conv1d"}, {"fused_norm_conv", "fused_norm_conv_module"}),
    "experts": _Kind({"expert_gate"}, {"forward"}),
    "linear_4bit": _Kind({"linear_4bit"}, {"forward"}),
    "lora": _Kind({"lora_add", "lora_linear", "lora_linear_4bit", "lora_summands_4bit", _IN_FLOAT32}, {"forward"}),
    "loss": _Kind({"linear_cross_entropy"}, {"fused_norm_cross_entropy"}),
    "shared_inputs": _Kind({_OWN_INPUTS}, {"fused_norm_inputs"}),
}

CONVOLUTION_METHODS = _KINDS["conv"].methods

_SITES_OF_CALL: Mapping[tuple[str, str], int] = {("norm", "norm_add_norm"): 2, ("qk", "qk_norm"): 2}
"""The number of sites of a kind that one call of an operator fuses, if it is more than one."""

# A call of a head has its labels in the dataclass that says what its loss is.
register_pytree_node(CrossEntropy, lambda how: ([*vars(how).values()], None), lambda values, _: CrossEntropy(*values))

_METHODS: Mapping[type, Sequence[str]] = {
    **dict.fromkeys((FusedNorm, FusedGatedNorm, FusedExperts, FusedLinear4bit, FusedAdapter), ("forward",)),
    FusedBlock: (
        *("fused_norm_add", "fused_norm_passthrough", "fused_norm_then_add", "fused_norm_pair"),
        *sorted(set[str]().union(*(_KINDS[kind].methods for kind in ("rope", "mlp", "conv", "shared_inputs")))),
    ),
    FusedHead: tuple(_KINDS["loss"].methods),
}
"""The methods that are watched, by their class."""


@dataclass
class FusedCall:
    """A call of a fused norm, of a block's fused method, of a fused LoRA layer, or of a head with its loss.

    Attributes:
        path: of the module that was called.
        method: that was called.
        weighted: paths of the modules whose weights took part: norms, convolutions, experts, the products of adapters,
            or the head.
        arguments: the method's, by its parameters' names; tensors are copies, or empty ones.
        operators: names of the operators that it ran, and what else makes a site fused.
        changed: share of the numbers among its arguments that it changed.
        gradients: of the tensors it returned, in order; None for one that nothing depends on.
        dtypes: of these tensors.
    """

    path: str
    method: Callable[..., Any]
    weighted: tuple[str, ...]
    arguments: inspect.BoundArguments
    operators: list[str] = field(default_factory=list)
    changed: float = 0.0
    gradients: list[Tensor | None] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for calls of one method that run the same operators on tensors of the same dtypes, and return such."""
        dtypes = [tensor.dtype for tensor in tensors_in(self.arguments.arguments)]
        return self.method, *self.operators, *dtypes, *self.dtypes

    @property
    def name(self) -> str:
        """The path, and the method unless it is the module's forward."""
        return self.path if self.method.__name__ == "forward" else f"{self.path}.{self.method.__name__}"


@contextlib.contextmanager
def watched_calls(
    model: nn.Module, calls: list[FusedCall] | None = None, *, with_tensors: bool = True
) -> Iterator[list[FusedCall]]:
    """Keep every fused call of a model's modules inside the ``with``, in order; inner calls are part of outer ones.

    Calls of all threads are kept: a GPU's backward, which runs checkpointed layers again, has one of its own. Nothing
    observes operators meanwhile, so that layers recompute what they would recompute otherwise; but no model can be
    patched then, because classes have other methods.

    Args:
        model: its modules are watched.
        calls: a list that gets the calls; a new one when None.
        with_tensors: keep their arguments and gradients, too.
    """
    watch = _Watch(model, with_tensors, [] if calls is None else calls)
    with contextlib.ExitStack() as stack:
        for owner, name in ((owner, name) for owner, names in _METHODS.items() for name in names):
            stack.enter_context(mock.patch.object(owner, name, watch.watched(getattr(owner, name))))
        try_fused, called = Operator.try_fused, Operator.__call__
        new = 0

        def noted_repeated(operator: Operator, *arguments: Any, **how: Any) -> tuple[Any, str | None]:
            before = new
            outputs, reason = try_fused(operator, *arguments, **how)
            if outputs is not None and new == before:
                watch.ran(operator, arguments)
            return outputs, reason

        def noted_new(operator: Operator, *arguments: Any) -> Any:
            nonlocal new
            new += 1
            watch.ran(operator, arguments)
            return called(operator, *arguments)

        stack.enter_context(mock.patch.multiple(Operator, try_fused=noted_repeated, __call__=noted_new))
        yield watch.calls


@contextlib.contextmanager
def observed(model: nn.Module, *, is_compiled: bool = False) -> Iterator[tuple[list[FusedCall], list[str]]]:
    """Observe the next forward of a model, and what is recomputed inside the ``with``.

    Returns:
        The fused calls of the forward, without tensors; none if it is compiled. The names of the operators whose
        outputs were recomputed, once for each time.
    """
    calls, recomputed, outputs = list[FusedCall](), list[str](), Recompute.outputs

    def noted(recompute: Recompute) -> tuple[Tensor, ...]:
        recomputed.append(recompute.operator.name)
        return outputs(recompute)

    with contextlib.ExitStack() as stack, contextlib.ExitStack() as forward:

        def begin(*_: Any) -> None:
            forward.enter_context(watched_calls(model, calls, with_tensors=False))

        stack.enter_context(mock.patch.object(Recompute, "outputs", noted))
        if not is_compiled:
            forward.callback(model.register_forward_pre_hook(begin).remove)
            forward.callback(model.register_forward_hook(lambda *_: forward.close(), always_call=True).remove)
        yield calls, recomputed


class _Watch:
    """Keeps the calls of methods of a model's modules, and the operators that they run."""

    def __init__(self, model: nn.Module, with_tensors: bool, calls: list[FusedCall]) -> None:
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._with_tensors, self.calls = with_tensors, calls
        self._outermost: FusedCall | None = None

    def watched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(method)

        @functools.wraps(method)
        def watch(*positional: Any, **named: Any) -> Any:
            path = self._paths.get(id(positional[0]))
            if self._outermost is not None or path is None:
                return method(*positional, **named)
            bound = signature.bind(*positional, **named)
            # The modules whose weights take part; for a LoRA layer those of its adapters.
            weighted: list[nn.Module] = []
            for argument in bound.arguments.values():
                if isinstance(argument, FusedNorm | FusedExperts | FusedHead | nn.Conv1d):
                    weighted.append(argument)
                elif isinstance(argument, FusedAdapter):
                    adapter: Any = argument
                    weighted += (*adapter.lora_A.values(), *adapter.lora_B.values())
            kept = with_arguments(bound, copied if self._with_tensors else lambda tensor: tensor.new_empty(0))
            call = FusedCall(path, method, tuple(self._paths[id(module)] for module in weighted), kept)
            self._outermost = call
            try:
                outputs = method(*positional, **named)
            finally:
                self._outermost = None
            self.calls.append(call)
            tensors = returned(outputs if computes(call) else outputs[1])
            if not computes(call) and (len(tensors) == len(set(map(id, tensors))) or not tensors[0].requires_grad):
                call.operators.append(_OWN_INPUTS)
            if isinstance(positional[0], FusedAdapter) and autocast_dtype(tensors_of(positional[1])[0]) is None:
                layer: Any = positional[0]
                is_wide = any(weight.dtype == torch.float32 for weight in layer.lora_A.parameters())
                call.operators += [_IN_FLOAT32] if is_wide else []
            call.dtypes = [tensor.dtype for tensor in tensors]
            if self._with_tensors:
                call.changed = share_changed(bound, kept)
                call.gradients = [None] * len(tensors)
                for index, tensor in enumerate(tensors):
                    if tensor.requires_grad:
                        tensor.register_hook(functools.partial(_keep, call.gradients, index))
            return outputs

        return watch

    def ran(self, operator: Operator, arguments: tuple[Any, ...]) -> None:
        """Note that the call which is running now has run an operator."""
        if self._outermost is not None:
            self._outermost.operators.append(operator.public_name(*arguments))


def sites_not_seen(sites: Iterable[Site], calls: Sequence[FusedCall], *, may_be_idle: bool = False) -> tuple[str, ...]:
    """The sites, with their kinds, of which not every call ran fused: by an operator that stands for their kind.

    Those without a call are among them; if they ``may_be_idle``, as experts are without tokens, only if no site of
    their kind has one.
    """
    calls_of = [(site, [c for c in calls if _is_call_of(site, c)]) for site in sites]
    idle_kinds = {site.kind for site, mine in calls_of if mine} if may_be_idle else set()
    return tuple(
        f"{site.path} ({site.kind})"
        for site, mine in calls_of
        if any(_KINDS[site.kind].operators.isdisjoint(call.operators) for call in mine)
        or (not mine and site.kind not in idle_kinds)
    )


def _is_call_of(site: Site, call: FusedCall) -> bool:
    """Return whether a call is one of a site's."""
    methods = _KINDS[site.kind].methods
    return site.path in call.weighted if not methods else call.path == site.path and call.method.__name__ in methods


def sites_not_compiled(sites: Iterable[Site], graphs: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The sites, with their kinds, for which compiled code has no operator, from the names of what its graphs call.

    A single graph has a call for each site. One of several graphs may run for many layers, so then one call is enough
    for all sites of a kind. Graphs do not say which call is of which site: the last sites of a kind are named.
    """
    numbers: Counter[str] = Counter()
    for name in (name for graph in graphs for name in graph):
        operator = name.removeprefix("fused_norm.").removesuffix("_forward.default")
        for kind, of_kind in _KINDS.items():
            # The operator of heads also rotates without a norm.
            if operator in of_kind.operators or (operator, kind) == ("qk_norm", "rope"):
                numbers[kind] += _SITES_OF_CALL.get((kind, operator), 1)
    missing = []
    for site in sites:
        if numbers[site.kind] <= 0:
            missing.append(f"{site.path} ({site.kind})")
        if len(graphs) == 1:
            numbers[site.kind] -= 1
    return tuple(missing)


def computes(call: FusedCall) -> bool:
    """Return whether a call computes something, and does not just hand tensors to linears."""
    return call.method.__name__ not in _KINDS["shared_inputs"].methods


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor that is no parameter."""
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter)


def named_leaves(bound: inspect.BoundArguments) -> Iterator[tuple[str, Any]]:
    """The arguments of a call by name; those that a method passes on are named by their place or keyword."""
    for name, value in bound.arguments.items():
        if isinstance(value, tuple):
            yield from ((f"{name}[{index}]", leaf) for index, leaf in enumerate(value))
        elif isinstance(value, dict):
            yield from value.items()
        else:
            yield name, value


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in a tree, without parameters; the first one of a norm's for its consumers."""
    return [tensor for leaf in tree_leaves(tree) if is_tensor(tensor := tensors_of(leaf)[0])]


def returned(outputs: Any) -> list[Tensor]:
    """The tensors that a call returned, a norm's for all of its consumers among them."""
    return [tensor for leaf in tree_leaves(outputs) for tensor in tensors_of(leaf) if is_tensor(tensor)]


def copied(tensor: Tensor) -> Tensor:
    """A copy that is a leaf of autograd, and requires a gradient if the tensor does."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def with_arguments(bound: inspect.BoundArguments, change: Callable[[Tensor], Tensor]) -> inspect.BoundArguments:
    """The arguments of a call, their tensors changed."""

    def changed(leaf: Any) -> Any:
        tensor = tensors_of(leaf)[0]
        return change(tensor) if is_tensor(tensor) else leaf

    arguments = type(bound.arguments)(tree_map(changed, dict(bound.arguments)))
    return inspect.BoundArguments(bound.signature, arguments)


def share_changed(bound: inspect.BoundArguments, before: inspect.BoundArguments) -> float:
    """The share of the numbers that a call changed, of the tensor of which it changed most."""
    pairs = zip(tensors_in(bound.arguments), tensors_in(before.arguments), strict=True)
    return max((share_different(tensor, other) for tensor, other in pairs), default=0.0)


def _keep(gradients: list[Tensor | None], index: int, gradient: Tensor | None) -> None:
    gradients[index] = None if gradient is None else gradient.detach().clone()  # None if no consumer has read it
