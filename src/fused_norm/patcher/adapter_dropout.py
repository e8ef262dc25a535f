"""The mask of the dropout before an adapter, drawn as PyTorch draws it, without numbers that are dropped in memory."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..kernels.operator import dispatch_modes
from ..kernels.triton.devices import is_transformed
from .hooks import are_plain_calls, is_genuine

_DROPOUT = functional.dropout


def mask_of_dropout(dropout: Any, x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Draw the mask of ``dropout(x.to(dtype))`` of an x on a GPU; it depends on the dtype, but not on the numbers.

    None, and nothing is drawn, if PyTorch would draw it in another way, or if something sees the call.
    """
    if type(dropout) is not nn.Dropout or not (dropout.training and 0 < dropout.p < 1 and not dropout.inplace):
        return None
    if not x.is_cuda or not x.is_contiguous() or not x.numel() or dispatch_modes() or is_transformed():
        return None
    if not are_plain_calls(dropout) or not is_genuine(nn.Dropout) or functional.dropout is not _DROPOUT:
        return None
    # PyTorch draws by the dtype of what it drops, and by how far that is aligned in memory.
    dropped = x.detach() if x.dtype == dtype else torch.empty(x.shape, dtype=dtype, device=x.device)
    _, mask = torch.native_dropout(dropped, dropout.p, True)
    return mask


@lru_cache
def dropout_factors(p: float) -> tuple[float, float]:
    """Return the factors of numbers and of gradients in PyTorch's dropout on a GPU.

    For the first one PyTorch rounds the share that it keeps to float32.
    """
    kept = torch.tensor(1.0 - p, dtype=torch.float32, device="cpu").item()
    return 1.0 / kept, 1.0 / (1.0 - p)
