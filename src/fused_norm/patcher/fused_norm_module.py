"""The forward of fused norms.

Every call checks first that the kernels may take it. If they may not, it runs the stock code of the norm's own
class, so a patched model can do all that it could before; or PyTorch's operators, if options replace its rounding.
"""

from __future__ import annotations

import functools
import logging
import re
import weakref
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..kernels import reference
from ..kernels.arguments import check_eps
from ..kernels.gated_rms_norm import GATED_RMS_NORM
from ..kernels.norm import ADD_RMS_NORM, RMS_NORM
from ..kernels.norm_spec import norm_spec
from ..kernels.switch import switch
from ..spec import Casting, GatedNormSpec, NormSpec
from .hooks import Fused, are_plain_calls, has_hooks

logger = logging.getLogger("fused_norm")


_warned: weakref.WeakKeyDictionary[type, set[str]] = weakref.WeakKeyDictionary()


class FusedNorm(Fused):
    """Base of the classes put on norm instances; a subclass also derives from the instance's own class.

    Called with a tensor it is that norm. Called with a residual as well it returns the norm of their sum, and the sum;
    with a scale too, the tensor is multiplied by it first.
    """

    fused_norm_spec: ClassVar[NormSpec]
    fused_norm_eps_name: ClassVar[str]
    fused_norm_replaced: ClassVar[Casting | None]
    weight: Tensor

    @property
    def fused_norm_what(self) -> str:
        """``norm (llama)``, with the casting of the norm."""
        return f"norm ({self.fused_norm_spec.casting})"

    def forward(self, x: Any = None, residual: Any = None, scale: float = 1.0, **named: Any) -> Any:
        """``norm(x)``, or ``(norm(s), s)`` of ``s = residual + scale * x``.

        Args:
            x: the branch.
            residual: what it is added to.
            scale: what it is multiplied by before.
            named: x under the stock parameter's name.
        """
        if not are_plain_calls(inside=type(self)):
            args = (x, residual) if residual is not None else (x,) if x is not None else ()
            return self.fused_norm_origin.forward(self, *args, **named)
        if named:
            (x,) = named.values()
        spec, weight = spec_and_weights(self)
        if residual is not None:
            outputs, reason = ADD_RMS_NORM.try_fused(x, residual, weight, spec, None, scale)
            return outputs if reason is None else norm_after_add(self, x, residual, scale, reason)
        y, reason = RMS_NORM.try_fused(x, weight, spec, None)
        return y if reason is None else _without_kernel(self, spec, x, weight, reason)


def norm_after_add(norm: FusedNorm, x: Any, residual: Any, scale: float, reason: str) -> tuple[Any, Any]:
    """Return ``(norm(s), s)`` of ``s = residual + scale * x`` if no kernel adds, for this ``reason``."""
    spec, weight = spec_and_weights(norm)
    total = residual + (x if scale == 1.0 else x * scale)
    y, no_norm = RMS_NORM.try_fused(total, weight, spec, None)
    if no_norm is not None:
        y = _without_kernel(norm, spec, total, weight, no_norm)
    else:
        warn_once(norm.fused_norm_origin, reason, "PyTorch's add")
    return y, total


def takes_residual(norm: Any) -> bool:
    """Return whether ``norm(x, residual)`` reaches the forward of a fused norm, though other code may stand before it.

    That is accelerate, which calls the forward that it has kept; a hook would see the residual.
    """
    if not isinstance(norm, FusedNorm) or has_hooks(norm) or type(norm).forward is not FusedNorm.forward:
        return False
    own = norm.__dict__
    forward = own["_old_forward"] if "_old_forward" in own else own.get("forward")
    is_reached = forward is None or getattr(forward, "__func__", None) is FusedNorm.forward
    return is_reached and are_plain_calls(inside=type(norm))


class FusedGatedNorm(FusedNorm):
    """Base of the classes put on norms with a gate; called without the gate they run their stock code."""

    fused_norm_spec: ClassVar[GatedNormSpec]

    def forward(self, x: Any = None, gate: Any = None, **named: Any) -> Any:  # type: ignore[override]
        """The norm of x times the activation of the gate, in the order that the stock class has.

        ``named``: x under the stock parameter's name.
        """
        if not are_plain_calls(inside=type(self)):
            gates = {"gate": gate} if gate is not None else {}
            return self.fused_norm_origin.forward(self, *(() if x is None else (x,)), **gates, **named)
        if named:
            (x,) = named.values()
        if gate is None:
            return self.fused_norm_origin.forward(self, x)
        how = self.fused_norm_spec
        if how.width and isinstance(x, Tensor) and x.shape[-1:] != (how.width,):
            # The stock code may keep the number of groups, or their width.
            reason: str | None = f"its groups are those of rows of {how.width}, and x has shape {tuple(x.shape)}"
        else:
            options = how.activation, how.norm_before_gate, how.groups
            spec, weight = spec_and_weights(self)
            outputs, reason = GATED_RMS_NORM.try_fused(x, gate, weight, spec, *options)
            if reason is None:
                return outputs
        warn_once(self.fused_norm_origin, reason)
        return self.fused_norm_origin.forward(self, x, gate)


def _without_kernel(norm: FusedNorm, spec: NormSpec | None, x: Any, weight: Any, reason: str) -> Any:
    """The norm by its stock code, or by PyTorch's operators if options replace its rounding points."""
    if norm.fused_norm_replaced is None or spec is None or switch.depth:
        warn_once(norm.fused_norm_origin, reason)
        return norm.fused_norm_origin.forward(norm, x)
    warn_once(norm.fused_norm_origin, reason, "PyTorch's operators")
    return reference.rms_norm(spec, x, weight)


def spec_and_weights(*norms: FusedNorm) -> tuple[Any, ...]:
    """The meaning of a norm, or that two have in common, with eps at the time of the call; and weights, or None.

    The meaning is None if they differ in more than the weight, or eps is not a number that kernels take.
    """
    specs: list[NormSpec | None] = []
    weights: list[Tensor | None] = []
    for norm in norms:
        spec: Any = norm.fused_norm_spec
        eps = getattr(norm, norm.fused_norm_eps_name)
        weight: Tensor | None = norm._parameters.get("weight")
        if weight is None and spec.weighted:
            weight = norm.weight  # FSDP1 puts a view of its flat parameter there as an attribute
        weights.append(weight if spec.weighted else None)
        if type(spec) is not NormSpec or type(eps) is not float or eps != spec.eps:
            spec = None if check_eps(eps) else norm_spec(spec.casting, spec.zero_centered, eps, spec.casts_weight)
        specs.append(spec)
    first, last = specs[0], specs[-1]
    if first is not last and (
        first is None
        or last is None
        or (first.casting, first.zero_centered, first.eps) != (last.casting, last.zero_centered, last.eps)
    ):
        first = None
    return first, *weights


@functools.lru_cache(maxsize=256)
def _without_numbers(reason: str) -> str:
    """A reason whatever the shapes in it."""
    return re.sub(r"\([\d, ]*\)|\d+", "", reason)


def warn_once(origin: type[nn.Module], reason: str | None, what: str = "its stock code") -> None:
    """Log, once for each class and sort of reason, why a norm runs ``what`` and no kernel; nothing for no reason."""
    if not reason or torch.compiler.is_compiling():
        return
    sort = _without_numbers(reason)
    if sort not in _warned.setdefault(origin, set()):
        _warned[origin].add(sort)
        logger.warning("%s runs %s: %s", origin.__name__, what, reason)
