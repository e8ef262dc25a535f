"""The dropout before an adapter, between a cast to float32 and a cast back, without float32 numbers in memory."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..kernels.dropout import MASKED_SCALE
from ..kernels.operator import dispatch_modes
from ..kernels.triton.devices import is_transformed
from .fused_norm_module import run_fused
from .hooks import are_plain_calls, is_genuine

_DROPOUT = functional.dropout


def dropped_between_casts(dropout: Any, x: Tensor) -> Any:
    """``dropout(x.float()).to(x.dtype)`` of an x in 16 bits on a GPU, without float32 in memory but for the mask.

    The mask is that of PyTorch's own dropout of a float32 tensor of this shape: it does not depend on the numbers. None
    if PyTorch would draw it in another way, or if something sees the call.
    """
    if type(dropout) is not nn.Dropout or not (dropout.training and 0 < dropout.p < 1 and not dropout.inplace):
        return None
    if not x.is_cuda or not x.is_contiguous() or not x.numel() or dispatch_modes() or is_transformed():
        return None
    if not are_plain_calls(dropout) or not is_genuine(nn.Dropout) or functional.dropout is not _DROPOUT:
        return None
    with torch.no_grad():
        _, mask = torch.native_dropout(torch.empty(x.shape, dtype=torch.float32, device=x.device), dropout.p, True)
    scales = _scales(dropout.p)
    y, reason = run_fused(MASKED_SCALE, x, mask, *scales, x.dtype)
    return y if reason is None else (x.float() * mask * scales[0]).to(x.dtype)


@lru_cache
def _scales(p: float) -> tuple[float, float]:
    """Return the factors of numbers and of gradients in PyTorch's dropout on a GPU.

    For the first one PyTorch rounds the share that it keeps to float32.
    """
    kept = torch.tensor(1.0 - p, dtype=torch.float32, device="cpu").item()
    return 1.0 / kept, 1.0 / (1.0 - p)
