"""Autocast on the device of a tensor: its state, and a context that sets it; PyTorch raises if a device has none."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

is_any_autocast_on = torch._C._is_any_autocast_enabled
"""Return whether autocast is on for any device: without a Python frame, for those that ask at each call."""


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast casts to on the device of ``x``; None if it is off, or the device has no autocast.

    Linears on a device without autocast, such as meta, cast nothing, whatever autocast is on for other devices.
    """
    device = "cuda" if x.is_cuda else x.device.type  # which takes longer to tell
    try:
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    except RuntimeError:
        return None


def set_autocast(device: str, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    """Return a context in which autocast casts to ``dtype`` on devices of this type; for None it is off.

    The context does nothing if devices of this type have no autocast.
    """
    if not torch.amp.is_autocast_available(device):
        return contextlib.nullcontext()
    return torch.autocast(device, dtype, enabled=dtype is not None)
