"""The fused classes.

A fused class derives from the class of the instances that get it and keeps its names, so ``isinstance``, FSDP's
auto-wrap policies, device maps and weight initialisation, which all go by class or by name, see what they saw before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

from torch import nn

from ..options import RecomputeLevel
from ..spec import Casting, GatedNormSpec, NormSpec
from .adapters import FusedAdapter
from .fused_block import FusedBlock
from .fused_experts import FusedExperts, GateOfExperts
from .fused_linear_4bit import FusedLinear4bit
from .fused_norm_module import FusedGatedNorm, FusedNorm
from .guard import guarded_forward
from .hooks import are_plain_calls
from .losses import FusedHead, FusedLoss, fused_forward
from .patterns import functions_of, linears_of
from .recompute import call_recomputing
from .rewrite import Rewrite
from .running_code import RunningCode


class _NoHubKernel:
    """A descriptor that hides ``kernel_layer_name``: transformers would bind a kernel from the hub over the forward."""

    def __get__(self, instance: object, owner: type | None = None) -> str:
        raise AttributeError("kernel_layer_name: a fused module takes no kernel from the hub")


def fused_norm_class(origin: Any, spec: NormSpec, eps_name: str, replaced: Casting | None = None) -> type[nn.Module]:
    """The fused class for norms of class ``origin`` that compute ``spec``, with eps in the attribute ``eps_name``.

    ``replaced``: the casting of ``origin``, if that of ``spec`` is another one.
    """
    return _derive(
        FusedGatedNorm if isinstance(spec, GatedNormSpec) else FusedNorm,
        origin,
        (fused_norm_class, spec, eps_name, replaced),
        fused_norm_spec=spec,
        fused_norm_replaced=replaced,
        fused_norm_eps_name=eps_name,
    )


def fused_block_class(origin: Any, rewrites: tuple[Rewrite, ...], recompute: RecomputeLevel = False) -> type[nn.Module]:
    """The fused class for modules of class ``origin``, with these rewrites of their forward.

    ``recompute``: what fused operators return in its forward is recomputed in the backward, and from some levels on
    what linears return (``recompute.py``).

    Raises:
        SourceError: if the forward cannot be rewritten.
    """
    rotations, convolutions = functions_of(origin, rewrites) if rewrites else ((), ())
    return _derive(
        FusedBlock,
        origin,
        (fused_block_class, rewrites, recompute),
        partial(guarded_forward, origin, rewrites, partial(_recomputing, recompute)),
        fused_norm_rewrites=rewrites,
        fused_norm_rotations=rotations,
        fused_norm_convolutions=convolutions,
        fused_norm_recompute=recompute,
        fused_norm_linears=linears_of(rewrites),
    )


def _recomputing(level: RecomputeLevel, rewritten: Callable[..., Any]) -> Callable[..., Any]:
    """``rewritten``, which recomputes in the backward; itself if the level is False."""
    if not level:
        return rewritten

    @wraps(rewritten)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call_recomputing(rewritten, self, args, kwargs, level)

    return forward


def fused_adapter_class(origin: Any) -> type[nn.Module]:
    """The fused class for LoRA layers of class ``origin``."""
    is_quantised = origin.__module__.endswith(".bnb")
    return _derive(FusedAdapter, origin, (fused_adapter_class,), fused_norm_is_quantised=is_quantised)


def fused_linear_4bit_class(origin: Any) -> type[nn.Module]:
    """The fused class for 4-bit linears of class ``origin``."""
    return _derive(FusedLinear4bit, origin, (fused_linear_4bit_class,))


def fused_experts_class(origin: Any, gate: GateOfExperts) -> type[nn.Module]:
    """The fused class for modules of experts of class ``origin``, which have this gate."""
    return _derive(FusedExperts, origin, (fused_experts_class, gate), fused_norm_gate=gate)


def fused_loss_class(origin: Any) -> type[nn.Module]:
    """The fused class for language models of class ``origin``."""
    forward, head = partial(fused_forward, origin), fused_head_class(nn.Linear)
    return _derive(FusedLoss, origin, (fused_loss_class,), forward, fused_norm_head_class=head)


def fused_head_class(origin: Any) -> type[nn.Module]:
    """The fused class for heads of language models, which are linears of class ``origin``."""
    return _derive(FusedHead, origin, (fused_head_class,))


def _derive(
    base: type, origin: Any, made_by: tuple[Any, ...], forward: Callable[[], Any] | None = None, **members: Any
) -> Any:
    """A class of both with these members, the one that was made before, if an instance of it lives.

    ``made_by``: a function that makes it of ``origin``, and its arguments. ``forward``: makes its forward, if it is not
    that of ``base``.
    """
    members = {"fused_norm_made_by": made_by, **members}
    for subclass in origin.__subclasses__():  # this list does not hold them
        if all(vars(subclass).get(name) == value for name, value in members.items()) and are_plain_calls(
            inside=subclass
        ):
            return subclass
    make, *arguments = made_by

    def reduce_ex(self: nn.Module, protocol: int) -> Any:
        constructor, values, *state = origin.__reduce_ex__(self, protocol)
        if not values or values[0] is not derived:  # a subclass made by others (FSDP's) pickles in its own way
            return constructor, values, *state
        if not are_plain_calls(inside=derived):  # what runs is the forward that the class has now
            return constructor, (origin, *values[1:]), *state
        return _rebuild, (make, origin, arguments), *state

    members |= {name: getattr(origin, name) for name in ("__module__", "__qualname__", "__doc__")}
    members |= {
        "fused_norm_origin": origin,
        "fused_norm_origin_forward": origin.forward,
        "fused_norm_origin_code": RunningCode(origin.forward),
        "kernel_layer_name": _NoHubKernel(),
        "__reduce_ex__": reduce_ex,
    }
    if forward is not None:
        members["forward"] = forward()
    derived = type(origin)(origin.__name__, (base, origin), members)
    derived.fused_norm_forward = derived.forward
    return derived


def _rebuild(make: Callable[..., type], origin: type, arguments: Sequence[Any]) -> nn.Module:
    """An empty instance of a fused class, for pickle and deepcopy to fill."""
    return object.__new__(make(origin, *arguments))
