"""Checks of the arguments of the public operators."""

from __future__ import annotations

import torch
from torch import Tensor

from .plans import forward_plan
from .triton.memory import against_heads

KERNEL_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
"""The dtypes that kernels take; float64 goes to the PyTorch reference."""

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
"""The activations of a gate: x times the logistic function of x, times the normal distribution's (by erf), and times
the approximation of the latter by tanh (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""

GATES = ("silu", "sigmoid")
"""The activations of the gate of a norm: x times the logistic function of x, and that function itself."""


def check_norm(
    name: str,
    x: Tensor,
    weight: Tensor | None,
    mode: str | None = None,
    *,
    x_name: str = "x",
    weight_name: str = "weight",
) -> None:
    """Raises TypeError or ValueError, naming the operator ``name``, for arguments that no norm can be made of.

    ``x_name`` and ``weight_name``: what the operator calls these.
    """
    _check_float(name, x_name, x)
    if x.dim() == 0:
        raise ValueError(f"{name}: {x_name} must have at least one dimension, the one that is normalised")
    if mode is not None:
        forward_plan(x.shape[-1], mode=mode)
    if weight is None:
        return
    _check_float(name, weight_name, weight)
    if weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        raise ValueError(
            f"{name}: {weight_name} must have shape ({x.shape[-1]},), the last dimension of {x_name}, not"
            f" {tuple(weight.shape)}"
        )
    if weight.device != x.device:
        raise ValueError(
            f"{name}: {weight_name} is on {weight.device} and {x_name} on {x.device}; move them to one device"
        )


def check_residual(name: str, x: Tensor, residual: Tensor) -> None:
    """Raises TypeError or ValueError where ``residual`` is not x's equal in shape and device."""
    _check_float(name, "residual", residual)
    if residual.shape != x.shape:
        raise ValueError(
            f"{name}: residual must have x's shape {tuple(x.shape)}, not {tuple(residual.shape)}; expand it first"
        )
    if residual.device != x.device:
        raise ValueError(f"{name}: residual is on {residual.device} and x on {x.device}; move them to one device")


def check_gated_norm(
    name: str, casting: str, x: Tensor, gate: Tensor, weight: Tensor | None, activation: str, groups: int
) -> None:
    """Raises TypeError or ValueError for arguments that no gated norm can be made of."""
    check_norm(name, x, weight)
    _check_float(name, "gate", gate)
    if casting not in ("llama", "gemma"):
        raise ValueError(
            f"{name}: casting must be llama or gemma, not {casting!r}, which has no rounding points for a gate"
        )
    if gate.shape != x.shape:
        raise ValueError(f"{name}: gate must have x's shape {tuple(x.shape)}, not {tuple(gate.shape)}; expand it first")
    if gate.device != x.device:
        raise ValueError(f"{name}: gate is on {gate.device} and x on {x.device}; move them to one device")
    if activation not in GATES:
        raise ValueError(f"{name}: activation must be one of {', '.join(GATES)}, not {activation!r}")
    if isinstance(groups, bool) or not isinstance(groups, int):
        raise TypeError(f"{name}: groups must be an int, not {type(groups).__name__}")
    if groups < 1 or x.shape[-1] % groups:
        raise ValueError(
            f"{name}: groups must divide x's last dimension, {x.shape[-1]}, into equal parts; {groups} does not"
        )


def check_scale(name: str, scale: object) -> None:
    """Raises TypeError where ``scale`` is not a Python number: a tensor would want a gradient of its own."""
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(
            f"{name}: scale must be a Python float or int, not {type(scale).__name__}; pass x multiplied by it instead"
        )


def check_heads(
    name: str,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
) -> None:
    """Raises TypeError or ValueError for q and k that cannot be normalised together."""
    if (q_weight is None) != (k_weight is None):
        missing, given = ("q_weight", "k_weight") if q_weight is None else ("k_weight", "q_weight")
        raise ValueError(f"{name}: {missing} is None and {given} is not; pass both or neither")
    for side, x, weight in (("q", q, q_weight), ("k", k, k_weight)):
        check_norm(name, x, weight, x_name=side, weight_name=f"{side}_weight")
    _check_pair(name, q, k, "rms_norm")


def _check_pair(name: str, q: Tensor, k: Tensor, single: str) -> None:
    """Raises ValueError for q and k of two widths or on two devices.

    ``single``: the operator that takes them one by one, which the message names.
    """
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"{name}: q and k must have heads of one size, not {q.shape[-1]} and {k.shape[-1]}; call {single} for each"
        )
    if q.device != k.device:
        raise ValueError(f"{name}: k is on {k.device} and q on {q.device}; move them to one device")


def check_rotated(name: str, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> None:
    """Raises TypeError or ValueError for q and k that cannot be rotated together by cos and sin."""
    for side, x in (("q", q), ("k", k)):
        if x is not None:
            _check_float(name, side, x)
    check_rope(name, q, k, cos, sin, unsqueeze_dim)
    if k is not None:
        _check_pair(name, q, k, name)


def check_glu(name: str, gate: Tensor, up: Tensor | None, activation: str) -> None:
    """Raises TypeError or ValueError for arguments that are no gate."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"{name}: activation must be one of {', '.join(ACTIVATIONS)}, not {activation!r}")
    _check_float(name, "gate", gate)
    if gate.dim() == 0:
        raise ValueError(f"{name}: gate must have at least one dimension")
    if up is None:
        if gate.shape[-1] % 2:
            raise ValueError(
                f"{name}: without up, gate must have an even last dimension, whose halves are gate and up,"
                f" not shape {tuple(gate.shape)}"
            )
        return
    _check_float(name, "up", up)
    if up.shape != gate.shape:
        raise ValueError(
            f"{name}: up must have gate's shape {tuple(gate.shape)}, not {tuple(up.shape)}; expand it first"
        )
    if up.device != gate.device:
        raise ValueError(f"{name}: up is on {up.device} and gate on {gate.device}; move them to one device")


def check_rope(name: str, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> None:
    """Raises TypeError or ValueError for cos and sin that do not fit q and k."""
    if unsqueeze_dim not in (1, 2):
        raise ValueError(f"{name}: unsqueeze_dim must be 1 for heads in front of tokens or 2, not {unsqueeze_dim!r}")
    sides = [(side, x) for side, x in (("q", q), ("k", k)) if x is not None]
    for side, x in sides:
        if x.dim() != 4:
            raise ValueError(
                f"{name}: {side} must have 4 dimensions, not shape {tuple(x.shape)}; unsqueeze what is missing"
            )
    _check_float(name, "cos", cos)
    _check_float(name, "sin", sin)
    if sin.shape != cos.shape or sin.dtype != cos.dtype:
        raise ValueError(
            f"{name}: sin must have cos's shape {tuple(cos.shape)} and dtype {cos.dtype},"
            f" not {tuple(sin.shape)} and {sin.dtype}"
        )
    for angles, tensor in (("cos", cos), ("sin", sin)):
        if tensor.device != q.device:
            raise ValueError(f"{name}: {angles} is on {tensor.device} and q on {q.device}; move them to one device")
    if not 2 <= cos.dim() <= 4:
        raise ValueError(f"{name}: cos must have 2 to 4 dimensions, not shape {tuple(cos.shape)}")
    rotary = cos.shape[-1]
    if rotary % 2 or not 2 <= rotary <= q.shape[-1]:
        raise ValueError(
            f"{name}: cos must have an even last dimension of at most q's {q.shape[-1]}, not {rotary};"
            " pass the angles of both halves"
        )
    shape, _ = against_heads(cos, unsqueeze_dim)
    for side, x in sides:
        if any(size not in (1, wanted) for size, wanted in zip(shape[:3], x.shape[:3], strict=True)):
            raise ValueError(
                f"{name}: cos of shape {tuple(cos.shape)}, unsqueezed at {unsqueeze_dim}, must broadcast"
                f" against {side} of shape {tuple(x.shape)}; unsqueeze_dim is the dimension of the heads"
            )


def _check_float(name: str, argument: str, tensor: Tensor) -> None:
    if tensor.dtype not in KERNEL_DTYPES and tensor.dtype != torch.float64:
        raise TypeError(f"{name}: {argument} must be float32, bfloat16, float16 or float64, not {tensor.dtype}")
