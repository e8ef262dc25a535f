"""The forward of fused norms, and the switch that turns all fusing off.

Every call checks first that the kernels may take it. Where they may not, it runs the stock code of the norm's own
class, so a patched model can do all that it could before; or PyTorch's operators, where options replace its rounding.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from ..kernels import reference
from ..kernels.add_rms_norm import ADD_RMS_NORM
from ..kernels.arguments import KERNEL_DTYPES
from ..kernels.gated_rms_norm import GATED_RMS_NORM
from ..kernels.operator import is_left_to_the_compiler, norm_spec
from ..kernels.plans import WIDEST_GATED
from ..kernels.rms_norm import RMS_NORM
from ..kernels.sharded import is_plain, is_taken, placement_obstacle
from ..kernels.triton.devices import is_transformed, runs_kernels_on
from ..kernels.triton.memory import memory_order
from ..spec import Casting, GatedNormSpec, NormSpec

_KNOWN_TYPES = (Tensor, nn.Parameter, type(None))

logger = logging.getLogger("fused_norm")

_disabled_depth = 0
_disabled_lock = threading.Lock()
_explained: weakref.WeakKeyDictionary[type, set[str]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Run the stock code of every patched model inside the ``with``, in all threads of the process.

    The switch is the process's, not the thread's, because autograd runs backward, and recomputes checkpoints, on
    threads of its own. Enter and leave it between steps: a checkpoint that was saved fused and is recomputed stock, or
    the other way round, holds other tensors.
    """
    global _disabled_depth
    with _disabled_lock:
        _disabled_depth += 1
    try:
        yield
    finally:
        with _disabled_lock:
            _disabled_depth -= 1


def is_disabled() -> bool:
    """Return whether ``disabled`` is in force."""
    return _disabled_depth > 0


class FusedNorm(nn.Module):
    """Base of the classes put on norm instances; a subclass also derives from the instance's own class.

    Called with a tensor it is that norm. Called with a residual as well it returns the norm of their sum, and the sum;
    with a scale too, the tensor is multiplied by it first.
    """

    fused_norm_origin: ClassVar[type[nn.Module]]
    fused_norm_origin_forward: ClassVar[Any]
    fused_norm_spec: ClassVar[NormSpec]
    fused_norm_eps_name: ClassVar[str]
    fused_norm_replaced: ClassVar[Casting | None]
    weight: Tensor

    def forward(self, x: Any = None, residual: Any = None, scale: float = 1.0, **named: Any) -> Any:
        """``norm(x)``, or ``(norm(s), s)`` of ``s = residual + scale * x``.

        ``named``: x under the stock parameter's name.
        """
        if not has_origin_forward(type(self)):
            given = (x, residual) if residual is not None else (x,) if x is not None else ()
            return self.fused_norm_origin.forward(self, *given, **named)
        if named:
            (x,) = named.values()
        spec = spec_of(self)
        weight = weight_of(self)
        if may_be_known(spec):
            if residual is None:
                found = RMS_NORM.known(RMS_NORM.programs_as_stock, spec, x, weight, None)
            else:
                found = ADD_RMS_NORM.known(ADD_RMS_NORM.programs_as_stock, spec, x, residual, weight, None, scale)
            if found is not None:
                return found
        reason = obstacle(x, weight, residual, spec)
        if reason is None:
            if residual is None:
                return RMS_NORM.kept_among(RMS_NORM.programs_as_stock, spec, x, weight, None)
            known = ADD_RMS_NORM.programs_as_stock
            return ADD_RMS_NORM.kept_among(known, spec, x, residual, weight, None, scale)
        total = x if residual is None else residual + scaled(x, scale)
        if residual is not None and obstacle(total, weight, None, spec) is None:
            explain(self.fused_norm_origin, reason, "PyTorch's add")
            return self.forward(total), total
        replaced = self.fused_norm_replaced is not None and not is_disabled()
        if reason:
            explain(self.fused_norm_origin, reason, "PyTorch's operators" if replaced else "its stock code")
        y = reference.rms_norm(spec, total, weight) if replaced else self.fused_norm_origin.forward(self, total)
        return y if residual is None else (y, total)


class FusedGatedNorm(FusedNorm):
    """Base of the classes put on norms with a gate; called without the gate they run their stock code."""

    fused_norm_spec: ClassVar[GatedNormSpec]

    def forward(self, x: Any = None, gate: Any = None, **named: Any) -> Any:  # type: ignore[override]
        """The norm of x times the activation of the gate, in the order that the stock class has.

        ``named``: x under the stock parameter's name.
        """
        if not has_origin_forward(type(self)):
            given = {"gate": gate} if gate is not None else {}
            return self.fused_norm_origin.forward(self, *(() if x is None else (x,)), **given, **named)
        if named:
            (x,) = named.values()
        if gate is None:
            return self.fused_norm_origin.forward(self, x)
        spec = self.fused_norm_spec
        weight = weight_of(self)
        how = spec.activation, spec.norm_before_gate, spec.groups
        plain = norm_spec(spec.casting, spec.zero_centered, getattr(self, self.fused_norm_eps_name))
        known = GATED_RMS_NORM.programs_as_stock
        if not spec.width and may_be_known(plain):
            found = GATED_RMS_NORM.known(known, plain, x, gate, weight, *how)
            if found is not None:
                return found
        reason = gated_obstacle(x, gate, weight, spec)
        if reason is None:
            return GATED_RMS_NORM.kept_among(known, plain, x, gate, weight, *how)
        if reason:
            explain(self.fused_norm_origin, reason)
        return self.fused_norm_origin.forward(self, x, gate)


def has_origin_forward(fused: Any) -> bool:
    """Return whether a fused class stands for what runs in stock: no code has put another forward on its origin."""
    return fused.fused_norm_origin.forward is fused.fused_norm_origin_forward


def spec_of(norm: FusedNorm) -> NormSpec:
    """The norm's meaning, with its eps at the time of the call."""
    spec, eps = norm.fused_norm_spec, getattr(norm, norm.fused_norm_eps_name)
    if eps == spec.eps:
        return spec
    if isinstance(spec, GatedNormSpec):
        return replace(spec, eps=eps)
    return norm_spec(spec.casting, spec.zero_centered, eps)


def weight_of(norm: FusedNorm) -> Tensor | None:
    """The norm's weight at the time of the call, None for a norm without one."""
    if not norm.fused_norm_spec.weighted:
        return None
    weight = norm._parameters.get("weight")
    return norm.weight if weight is None else weight  # FSDP1 puts a view of its flat parameter there as an attribute


def scaled(branch: Any, scale: float) -> Any:
    """``scale * branch``; the branch itself where ``scale`` is 1."""
    return branch if scale == 1.0 else branch * scale


def may_be_bypassed(norm: nn.Module) -> bool:
    """Return whether the norm may be computed without calling its module: no hook or other code would be skipped."""
    return (
        isinstance(norm, FusedNorm)
        and "forward" not in norm.__dict__
        and type(norm).forward is FusedNorm.forward
        and has_origin_forward(type(norm))
        and not has_hooks(norm)
    )


def takes_residual(norm: Any) -> bool:
    """Return whether ``norm(x, residual)`` reaches the forward of a fused norm, and no hook would see the residual."""
    if not isinstance(norm, FusedNorm) or has_hooks(norm) or type(norm).forward is not FusedNorm.forward:
        return False
    if not has_origin_forward(type(norm)):
        return False
    own = norm.__dict__
    forward = own["_old_forward"] if "_old_forward" in own else own.get("forward")  # accelerate calls the former
    return forward is None or getattr(forward, "__func__", None) is FusedNorm.forward


def same_norms(one: FusedNorm, other: FusedNorm) -> bool:
    """Return whether two norms differ in nothing but their weights."""
    a, b = spec_of(one), spec_of(other)
    return a.casting == b.casting and a.zero_centered == b.zero_centered and a.eps == b.eps


def may_be_known(spec: NormSpec | None) -> bool:
    """Return whether a call may go by a program that has passed ``obstacle`` before; programs do not see autocast."""
    return not _disabled_depth and (spec is None or spec.casting != "none")


def obstacle(
    x: Any,
    weight: Any,
    residual: Any,
    spec: NormSpec | None,
    *,
    elementwise: bool = False,
    leads: bool = True,
) -> str | None:
    """The reason why kernels may not take a call; None where they may, an empty string for what is not worth a log.

    Args:
        x: the input.
        weight: the norm's, or None.
        residual: what is added, or None.
        spec: None where the call computes no norm.
        elementwise: rows may be cut into parts for several devices.
        leads: x is the operator's first tensor, the size of which decides in compiled graphs.
    """
    if _disabled_depth:
        return ""
    if not is_taken(x) or x.dim() == 0:
        return f"the input is a {type(x).__name__}"
    if x.dtype not in KERNEL_DTYPES:
        return f"the input is {x.dtype}"
    if not runs_kernels_on(x):
        if torch.jit.is_tracing():
            return ""
        return (
            "torch.func or forward AD transforms it" if is_transformed() else f"kernels do not run on {x.device.type}"
        )
    if weight is not None:
        if not is_taken(weight):
            return f"the weight is a {type(weight).__name__}"
        if weight.dtype not in KERNEL_DTYPES or weight.device != x.device:
            return f"the weight is {weight.dtype} on {weight.device}, the input {x.dtype} on {x.device}"
        if weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
            return f"the weight has shape {tuple(weight.shape)} and the input rows of {x.shape[-1]}"
    if residual is not None:
        if not is_taken(residual) or residual.dtype not in KERNEL_DTYPES:
            return f"the residual is a {type(residual).__name__}"
        if residual.shape != x.shape or residual.device != x.device:
            return "the residual has another shape or device than the input"
        if not (x.is_contiguous() and residual.is_contiguous()) and not _lie_alike(x, residual):
            return "the residual lies in another order in memory than the input"
    if spec is not None and spec.casting == "none" and torch.is_autocast_enabled(x.device.type):
        return "autocast changes what an uncast norm rounds to"
    if not (type(x) is Tensor and type(weight) in _KNOWN_TYPES and type(residual) in _KNOWN_TYPES):
        reason = placement_obstacle((x, residual), (weight,), elementwise=elementwise)
        if reason is not None:
            return reason
    # Not `is_exporting()`, which Dynamo of PyTorch 2.11 takes to be true in all that it traces.
    return "" if torch.compiler._is_exporting_flag or (leads and is_left_to_the_compiler(x)) else None


def _lie_alike(x: Tensor, residual: Tensor) -> bool:
    """Return whether a kernel lays out the sum of two tensors as PyTorch does: it follows x, and PyTorch the first."""
    return not (is_plain(x) and is_plain(residual)) or memory_order(x) == memory_order(residual)


def gated_obstacle(x: Any, gate: Any, weight: Any, spec: GatedNormSpec) -> str | None:
    """``obstacle`` for a norm with a gate."""
    reason = obstacle(x, weight, None, None)
    if reason is not None:
        return reason
    if not is_taken(gate):
        return f"the gate is a {type(gate).__name__}"
    if gate.dtype not in KERNEL_DTYPES:
        return f"the gate is {gate.dtype}"
    if gate.shape != x.shape or gate.device != x.device:
        return "the gate has another shape or device than the input"
    reason = placement_obstacle((x, gate), (weight,))
    if reason is not None:
        return reason
    if spec.width not in (0, x.shape[-1]):  # the stock code may keep their number, or their width
        return f"the input has rows of {x.shape[-1]}, and its groups are those of rows of {spec.width}"
    if x.shape[-1] > WIDEST_GATED * spec.groups:
        return f"rows of {x.shape[-1]} in {spec.groups} groups are more than a kernel holds"
    return None


def has_hooks(module: nn.Module) -> bool:
    """Return whether any hook, the module's own or a global one, would see a call of the module."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or nn_module._has_any_global_hook()
    )


def explain(origin: type[nn.Module], reason: str, what: str = "its stock code") -> None:
    """Log, once for each class and reason, why a norm runs ``what`` and no kernel."""
    if not torch.compiler.is_compiling() and reason not in _explained.setdefault(origin, set()):
        _explained[origin].add(reason)
        logger.warning("%s runs %s: %s", origin.__name__, what, reason)
