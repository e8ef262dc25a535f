"""What runs inside a patched model: the forward of fused norms, the residual add, and the switch that turns both off.

Every call checks first that kernels may take it; where not, it runs the stock code of the module's own class, so a
patched model is never less able than it was.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..kernels.add_rms_norm import add_rms_norm_unchecked as add_rms_norm
from ..kernels.arguments import KERNEL_DTYPES
from ..kernels.rms_norm import rms_norm_unchecked as rms_norm
from ..kernels.triton_utils import runs_kernels_on
from ..spec import NormSpec

logger = logging.getLogger("fused_norm")

_disabled_depth = 0
_disabled_lock = threading.Lock()
_explained: set[tuple[type, str]] = set()


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Every patched model runs its stock code inside the ``with``, in all threads of the process.

    The switch is the process's, not the thread's, because autograd runs backward, and recomputes checkpoints, on
    threads of its own. Leave and enter it between steps: a step that is half stock recomputes other tensors than it
    saved.
    """
    global _disabled_depth
    with _disabled_lock:
        _disabled_depth += 1
    try:
        yield
    finally:
        with _disabled_lock:
            _disabled_depth -= 1


class FusedNorm(nn.Module):
    """Base of the classes put on norm instances; a subclass also derives from the instance's own class.

    Called with a tensor it is that norm. Called with a residual as well it returns the norm of their sum, and the sum.
    """

    fused_norm_origin: ClassVar[type[nn.Module]]
    fused_norm_spec: ClassVar[NormSpec]
    fused_norm_eps_name: ClassVar[str]
    weight: Tensor

    def forward(self, x: Any = None, residual: Any = None, **named: Any) -> Any:
        """``norm(x)``, or ``(norm(residual + x), residual + x)``. ``named``: x under the stock parameter's name."""
        if named:
            (x,) = named.values()
        spec = self.fused_norm_spec
        weight: Tensor | None = self._parameters.get("weight") if spec.weighted else None
        if weight is None and spec.weighted:  # FSDP1 puts a view of its flat parameter there as a plain attribute
            weight = self.weight
        obstacle = _obstacle(x, weight, residual, spec)
        if obstacle is None:
            eps = getattr(self, self.fused_norm_eps_name)
            if residual is None:
                return rms_norm(x, weight, eps, spec.casting, spec.zero_centered)
            return add_rms_norm(x, residual, weight, eps, spec.casting, spec.zero_centered)
        if obstacle and not torch.compiler.is_compiling():
            _explain(self.fused_norm_origin, obstacle)
        if residual is None:
            return self.fused_norm_origin.forward(self, x)
        total = residual + x
        return self.fused_norm_origin.forward(self, total), total


class FusedBlock(nn.Module):
    """Base of the classes put on layers whose forward was rewritten; a subclass derives from the layer's own class."""

    fused_norm_origin: ClassVar[type[nn.Module]]
    fused_norm_names: ClassVar[tuple[str, ...]]

    def fused_norm_add(self, norm: nn.Module, residual: Any, branch: Any) -> tuple[Any, Any]:
        """``(norm(residual + branch), residual + branch)``: in one call of the norm where nothing would be skipped.

        A wrapper around the norm, or a hook on it, expects to see the norm of one tensor and gets just that.
        """
        if isinstance(norm, FusedNorm) and not _has_hooks(norm):
            return norm(branch, residual)
        total = residual + branch
        return norm(total), total


def _obstacle(x: Any, weight: Any, residual: Any, spec: NormSpec) -> str | None:
    """Why kernels may not take a call: None where they may, an empty string where there is nothing to explain."""
    if _disabled_depth:
        return ""
    if not _is_plain(x) or x.dim() == 0:
        return f"the input is a {type(x).__name__}"
    if x.dtype not in KERNEL_DTYPES:
        return f"the input is {x.dtype}"
    if not runs_kernels_on(x):
        return f"kernels do not run on {x.device.type}"
    if weight is not None:
        if not _is_plain(weight):
            return f"the weight is a {type(weight).__name__}"
        if weight.dtype not in KERNEL_DTYPES or weight.device != x.device:
            return f"the weight is {weight.dtype} on {weight.device}, the input {x.dtype} on {x.device}"
        if weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
            return f"the weight has shape {tuple(weight.shape)} and the input rows of {x.shape[-1]}"
    if residual is not None:
        if not _is_plain(residual) or residual.dtype not in KERNEL_DTYPES:
            return f"the residual is a {type(residual).__name__}"
        if residual.shape != x.shape or residual.device != x.device:
            return "the residual has another shape or device than the input"
    if spec.casting == "none" and torch.is_autocast_enabled(x.device.type):
        return "autocast changes what an uncast norm rounds to"
    if torch.compiler.is_exporting() or torch.jit.is_tracing():
        return ""
    return None


def _is_plain(value: Any) -> bool:
    """A tensor without a subclass's behaviour of its own (DTensor, quantised or nested tensors have one)."""
    kind = type(value)
    return kind is Tensor or (isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value))


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or nn_module._has_any_global_hook()
    )


def _explain(origin: type[nn.Module], obstacle: str) -> None:
    """Says once per class and reason that stock code ran in place of kernels."""
    if (origin, obstacle) not in _explained:
        _explained.add((origin, obstacle))
        logger.warning("%s runs its stock code: %s", origin.__name__, obstacle)
