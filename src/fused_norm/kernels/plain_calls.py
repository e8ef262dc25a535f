"""Which calls are plain eager execution, and which ones autograd has to know of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

dispatch_modes = torch._C._len_torch_dispatch_stack

PLAIN = (Tensor, Parameter)
"""The classes of tensors that have no behaviour of their own."""


def is_plain_call(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether a call is plain eager execution: not traced, no dispatch mode, no transform, no unusual tensor.

    Then nothing sees the dispatcher, and to bypass it saves its time on the host. Unusual are subclasses, and tensors
    whose memory does not hold their values: it has none, or it holds them with the other sign.
    """
    if torch.compiler.is_compiling() or dispatch_modes() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    for t in tensors:
        if t is not None and (type(t) not in PLAIN or t.is_meta or t.is_neg() or t._is_zerotensor()):
            return False
    return True


def is_grad_needed(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether autograd has to know of a call of these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
