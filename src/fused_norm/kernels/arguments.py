"""What the public operators accept, checked once, in front of everything else."""

from __future__ import annotations

import torch
from torch import Tensor

from ..spec import CASTINGS
from .plans import forward_plan

KERNEL_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
"""What kernels take; float64 goes to the PyTorch reference."""


def check_norm(
    name: str,
    x: Tensor,
    weight: Tensor | None,
    casting: str,
    zero_centered: bool,
    mode: str | None = None,
    *,
    called: str = "weight",
) -> None:
    """Raises TypeError or ValueError, naming the operator ``name``, for arguments that no norm can be made of.

    ``called``: the argument that ``weight`` is.
    """
    if casting not in CASTINGS:
        raise ValueError(f"{name}: casting must be one of {', '.join(CASTINGS)}, not {casting!r}")
    _check_float(name, "x", x)
    if x.dim() == 0:
        raise ValueError(f"{name}: x must have at least one dimension, the one that is normalised")
    if mode is not None:
        forward_plan(x.shape[-1], mode=mode)
    if weight is None:
        if zero_centered:
            raise ValueError(f"{name}: zero_centered needs a {called}; pass zero_centered=False for a norm without one")
        return
    _check_float(name, called, weight)
    if weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        raise ValueError(
            f"{name}: {called} must have shape ({x.shape[-1]},), the last dimension of x, not {tuple(weight.shape)}"
        )
    if weight.device != x.device:
        raise ValueError(f"{name}: {called} is on {weight.device} and x on {x.device}; move them to one device")


def check_residual(name: str, x: Tensor, residual: Tensor) -> None:
    """Raises TypeError or ValueError where ``residual`` is not x's equal in shape and device."""
    _check_float(name, "residual", residual)
    if residual.shape != x.shape:
        raise ValueError(
            f"{name}: residual must have x's shape {tuple(x.shape)}, not {tuple(residual.shape)}; expand it first"
        )
    if residual.device != x.device:
        raise ValueError(f"{name}: residual is on {residual.device} and x on {x.device}; move them to one device")


def check_scale(name: str, scale: object) -> None:
    """Raises TypeError where ``scale`` is not a Python number: a tensor would want a gradient of its own."""
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(
            f"{name}: scale must be a Python float or int, not {type(scale).__name__}; pass x multiplied by it instead"
        )


def _check_float(name: str, argument: str, tensor: Tensor) -> None:
    if tensor.dtype not in KERNEL_DTYPES and tensor.dtype != torch.float64:
        raise TypeError(f"{name}: {argument} must be float32, bfloat16, float16 or float64, not {tensor.dtype}")
