"""What runs inside layers and attentions whose forward was rewritten: several modules' work in one call.

A call that would pass over a module is made only where nobody could tell: no hook, wrapper, sharding or offloading
stands on the module (``is_free``), and kernels take its input. Elsewhere the modules are called one after the other, as
in the stock code.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..kernels.norm_add import norm_add_unchecked as norm_add
from ..kernels.norm_add_norm import norm_add_norm_unchecked as norm_add_norm
from ..kernels.qk_norm import qk_norm_rope_unchecked as qk_norm_rope
from ..kernels.qk_norm import qk_norm_unchecked as qk_norm
from ..spec import NormSpec
from .ahead import leave, saved_tensors_are_hooked
from .rewrite import Rewrite
from .rotation import Rotation
from .runtime import FusedNorm, explain, is_free, obstacle, same_norms, scaled, takes_residual, weight_of

_CAPTURING = "transformers.utils.output_capturing"


class FusedBlock(nn.Module):
    """Base of the classes put on modules whose forward was rewritten; each derives from the module's own class."""

    fused_norm_origin: ClassVar[type[nn.Module]]
    fused_norm_rewrites: ClassVar[tuple[Rewrite, ...]]
    fused_norm_rotations: ClassVar[tuple[Rotation, ...]]

    def fused_norm_add(
        self, norm: Any, residual: Any, branch: Any, *, inner: Any = None, scale: Any = 1.0
    ) -> tuple[Any, Any]:
        """``(norm(s), s)`` of ``s = residual + scale * inner(branch)``."""
        if inner is not None:
            together = _norm_add_norm(norm, residual, branch, inner)
            if together is not None:
                return together
            branch = inner(branch)
        if type(scale) not in (float, int):
            branch, scale = branch * scale, 1.0
        if takes_residual(norm):
            return norm(branch, residual) if scale == 1.0 else norm(branch, residual, scale)
        # A wrapper around the norm, or a hook on it, expects to see the norm of one tensor and gets just that.
        total = residual + scaled(branch, scale)
        return norm(total), total

    def fused_norm_onto(self, inner: Any, residual: Any, branch: Any) -> Any:
        """``residual + inner(branch)``."""
        if is_free(inner):
            weight, spec = weight_of(inner), inner.fused_norm_spec
            if obstacle(branch, weight, residual, spec) is None:
                eps = getattr(inner, inner.fused_norm_eps_name)
                return norm_add(branch, residual, weight, eps, spec.casting, spec.zero_centered)
        return residual + inner(branch)

    def fused_norm_last(self, residual: Any, branch: Any, *, inner: Any = None, scale: Any = 1.0) -> Any:
        """``residual + scale * inner(branch)``, which the layer returns; the norm after it is made along with it."""
        norm = self._norm_after(branch, residual)
        if norm is not None:
            y, total = self.fused_norm_add(norm, residual, branch, inner=inner, scale=scale)
            leave(norm, total, y)
            return total
        if inner is not None:
            return self.fused_norm_onto(inner, residual, branch)
        return residual + (branch if type(scale) is float and scale == 1.0 else branch * scale)

    def fused_norm_free(self, q_norm: Any, k_norm: Any) -> bool:
        """Whether the two norms may be made in one call; one module for both is called twice."""
        return q_norm is not k_norm and is_free(q_norm) and is_free(k_norm) and same_norms(q_norm, k_norm)

    def fused_norm_unless(self, free: bool, norm: Any, x: Any) -> Any:
        """``norm(x)``, or x for later where ``free``."""
        return x if free else norm(x)

    def fused_norm_heads(self, free: bool, q_norm: Any, k_norm: Any, q: Any, k: Any) -> tuple[Any, Any]:
        """The norms of q and k, where they wait for it."""
        if not free:
            return q, k
        weights, spec = (weight_of(q_norm), weight_of(k_norm)), q_norm.fused_norm_spec
        if _heads_obstacle(q, k, *weights, spec) is not None:
            return q_norm(q), k_norm(k)
        eps = getattr(q_norm, q_norm.fused_norm_eps_name)
        return qk_norm(q, k, *weights, eps, spec.casting, spec.zero_centered)

    def fused_norm_rotated(
        self, free: bool, q_norm: Any, k_norm: Any, rotate: Any, q: Any, k: Any, cos: Any, sin: Any, **named: Any
    ) -> tuple[Any, Any]:
        """``rotate(q_norm(q), k_norm(k), cos, sin)``; where not ``free``, q and k are normed already."""
        if not free:
            return rotate(q, k, cos, sin, **named)
        weights, spec = (weight_of(q_norm), weight_of(k_norm)), q_norm.fused_norm_spec
        if _heads_obstacle(q, k, *weights, spec) is not None:
            return rotate(q_norm(q), k_norm(k), cos, sin, **named)
        eps = getattr(q_norm, q_norm.fused_norm_eps_name)
        heads_dim = named.get("unsqueeze_dim", 1)
        for rotation in self.fused_norm_rotations:
            if rotation.function is rotate and _rotates(rotation, q, k, *weights, cos, sin, heads_dim):
                return qk_norm_rope(q, k, *weights, cos, sin, eps, spec.casting, spec.zero_centered, heads_dim)
        return rotate(*qk_norm(q, k, *weights, eps, spec.casting, spec.zero_centered), cos, sin, **named)

    def _norm_after(self, branch: Any, residual: Any) -> FusedNorm | None:
        """The norm that takes this layer's output, where it can be made here."""
        successor = self.__dict__.get("fused_norm_successor")
        if successor is None or torch.compiler.is_compiling():
            return None
        following = successor.of(self)
        if following is None:
            return None
        layer, norm = following
        reason = _keeps_apart(self, layer)
        if reason is None:
            if not is_free(norm):
                reason = "hooks or other code stand on the norm of the next layer"
            else:
                reason = obstacle(branch, weight_of(norm), residual, norm.fused_norm_spec)
        if reason is None and torch.is_inference_mode_enabled():
            reason = "inference mode does not tell versions of a tensor apart"
        if reason is None:
            return norm
        if reason:
            explain(self.fused_norm_origin, reason, "makes the add at its end apart from the next norm")
        return None


def _norm_add_norm(norm: Any, residual: Any, x: Any, inner: Any) -> tuple[Tensor, Tensor] | None:
    if not (is_free(norm) and is_free(inner) and same_norms(norm, inner)):
        return None
    weight, inner_weight, spec = weight_of(norm), weight_of(inner), norm.fused_norm_spec
    if obstacle(x, weight, residual, spec) is not None or obstacle(x, inner_weight, None, spec) is not None:
        return None
    eps = getattr(norm, norm.fused_norm_eps_name)
    return norm_add_norm(x, residual, inner_weight, weight, eps, spec.casting, spec.zero_centered)


def _heads_obstacle(q: Any, k: Any, q_weight: Tensor | None, k_weight: Tensor | None, spec: NormSpec) -> str | None:
    reason = obstacle(q, q_weight, None, spec)
    if reason is None:
        reason = obstacle(k, k_weight, None, spec)
    if reason is None and (q.dtype != k.dtype or q.shape[-1] != k.shape[-1] or q.device != k.device):
        reason = "q and k differ in dtype, width or device"
    return reason


def _rotates(
    rotation: Rotation,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Any,
    sin: Any,
    heads_dim: Any,
) -> bool:
    """Whether the kernel makes of these what the rotation would, in the dtype of q or what a weight makes of it."""
    if not (isinstance(cos, Tensor) and isinstance(sin, Tensor)):
        return False
    shape, k_shape, cos_shape, dtype, cos_dtype = q.shape, k.shape, cos.shape, q.dtype, cos.dtype
    if len(shape) != 4 or len(k_shape) != 4 or len(cos_shape) != 3 or heads_dim not in (1, 2):
        return False
    batch, tokens, width = shape[0], shape[3 - heads_dim], shape[3]
    angles, length, rotary = cos_shape
    return (
        (k_shape[0], k_shape[3 - heads_dim]) == (batch, tokens)
        and sin.shape == cos_shape
        and angles in (1, batch)
        and length == tokens
        and (rotary == width or (rotation.partial and rotary < width))
        and rotary % 2 == 0
        and cos.device == q.device
        and cos_dtype == sin.dtype
        and (dtype, cos_dtype) in rotation.dtypes
        and all(
            weight is None
            or weight.dtype == dtype
            or (torch.promote_types(dtype, weight.dtype), cos_dtype) in rotation.dtypes
            for weight in (q_weight, k_weight)
        )
        and not (cos.requires_grad or sin.requires_grad)
    )


def _keeps_apart(layer: nn.Module, following: nn.Module | None) -> str | None:
    """Why a layer's add and the norm after it are to be two calls, None where they may be one."""
    if saved_tensors_are_hooked():
        return "saved tensors are hooked, as in gradient checkpointing"
    for one in (layer, following):
        if one is None:
            continue
        if one.training and getattr(one, "gradient_checkpointing", False):
            return "gradient checkpointing is on"
        if "forward" in one.__dict__:
            return "its forward was replaced on the instance"
        if layer_is_hooked(one):
            return "hooks stand on its layer"
    return None


def layer_is_hooked(layer: nn.Module) -> bool:
    """Whether anybody but transformers, which records outputs and changes none, listens to a layer."""
    return bool(
        layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or any(getattr(hook, "__module__", None) != _CAPTURING for hook in layer._forward_hooks.values())
    )
