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
    made_by = fused_norm_class, spec, eps_name, replaced
    return _known(origin, made_by) or _derive(
        FusedGatedNorm if isinstance(spec, GatedNormSpec) else FusedNorm,
        origin,
        made_by,
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
    made_by = fused_block_class, rewrites, recompute
    rotations, convolutions = functions_of(origin, rewrites) if rewrites else ((), ())
    if known := _known(origin, made_by, fused_norm_rotations=rotations, fused_norm_convolutions=convolutions):
        return known
    return _derive(
        FusedBlock,
        origin,
        made_by,
        fused_norm_rewrites=rewrites,
        fused_norm_rotations=rotations,
        fused_norm_convolutions=convolutions,
        fused_norm_recompute=recompute,
        fused_norm_linears=linears_of(rewrites),
        forward=guarded_forward(origin, rewrites, partial(_recomputing, recompute)),
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
    made_by = (fused_adapter_class,)
    is_quantised = origin.__module__.endswith(".bnb")
    return _known(origin, made_by) or _derive(FusedAdapter, origin, made_by, fused_norm_is_quantised=is_quantised)


def fused_linear_4bit_class(origin: Any) -> type[nn.Module]:
    """The fused class for 4-bit linears of class ``origin``."""
    made_by = (fused_linear_4bit_class,)
    return _known(origin, made_by) or _derive(FusedLinear4bit, origin, made_by)


def fused_experts_class(origin: Any, gate: GateOfExperts) -> type[nn.Module]:
    """The fused class for modules of experts of class ``origin``, which have this gate."""
    made_by = fused_experts_class, gate
    return _known(origin, made_by) or _derive(FusedExperts, origin, made_by, fused_norm_gate=gate)


def fused_loss_class(origin: Any) -> type[nn.Module]:
    """The fused class for language models of class ``origin``."""
    made_by = (fused_loss_class,)
    return _known(origin, made_by) or _derive(
        FusedLoss, origin, made_by, fused_norm_head_class=fused_head_class(nn.Linear), forward=fused_forward(origin)
    )


def fused_head_class(origin: Any) -> type[nn.Module]:
    """The fused class for heads of language models, which are linears of class ``origin``."""
    made_by = (fused_head_class,)
    return _known(origin, made_by) or _derive(FusedHead, origin, made_by)


def _known(origin: Any, made_by: tuple[Any, ...], **members: Any) -> Any:
    """The class that ``_derive`` made of these before, with these members; None without one.

    It lives as long as an instance does: the list of a class's subclasses does not hold them.
    """
    members = {"fused_norm_made_by": made_by, **members}
    for derived in origin.__subclasses__():
        if all(vars(derived).get(name) == value for name, value in members.items()) and are_plain_calls(inside=derived):
            return derived
    return None


def _derive(base: type, origin: Any, made_by: tuple[Any, ...], **members: Any) -> type[nn.Module]:
    """A class of both with these members; ``made_by``: a function that makes it of ``origin``, and its arguments."""
    make, *arguments = made_by

    def reduce_ex(self: nn.Module, protocol: int) -> Any:
        constructor, values, *state = origin.__reduce_ex__(self, protocol)
        if not values or values[0] is not derived:  # a subclass made by others (FSDP's) pickles in its own way
            return constructor, values, *state
        if not are_plain_calls(inside=derived):  # what runs is the forward that the class has now
            return constructor, (origin, *values[1:]), *state
        return _rebuild, (make, origin, arguments), *state

    names = {name: getattr(origin, name) for name in ("__module__", "__qualname__", "__doc__")}
    facts = {"origin": origin, "origin_forward": origin.forward, "origin_code": RunningCode(origin.forward)}
    facts["made_by"] = made_by
    members |= {
        **names,
        "kernel_layer_name": _NoHubKernel(),
        **{f"fused_norm_{name}": fact for name, fact in facts.items()},
        "__reduce_ex__": reduce_ex,
    }
    derived = type(origin)(origin.__name__, (base, origin), members)
    derived.fused_norm_forward = derived.forward
    return derived


def _rebuild(make: Callable[..., type], origin: type, arguments: Sequence[Any]) -> nn.Module:
    """An empty instance of a fused class, for pickle and deepcopy to fill."""
    return object.__new__(make(origin, *arguments))
