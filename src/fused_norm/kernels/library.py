"""Registration of operators under ``torch.ops.fused_norm``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .native import BackwardContext

_library = torch.library.Library("fused_norm", "DEF")
_PLAIN = (Tensor, Parameter)


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Registers an operator by its schema and returns it: ``run`` launches it, ``fake`` only allocates its outputs.

    Operators carry no autograd rule: an ``autograd.Function`` outside of them is the cheapest on the host.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fused_norm::{name}", fake, lib=_library)
    return getattr(torch.ops.fused_norm, name).default


def is_direct(tensor: Tensor) -> bool:
    """Whether a call is plain eager execution: not traced, no dispatch mode, no transform, no tensor subclass.

    Then nobody watches the dispatcher, and going round it saves its time on the host.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or type(tensor) not in _PLAIN
        or tensor.is_meta
    )


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` for direct calls: without the Python around it, which looks after transforms."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def once_differentiable(gradients: Callable[..., Sequence[Tensor | None]]) -> Callable[..., Any]:
    """A backward whose results raise when they are differentiated, if they depend on anything that can be.

    PyTorch's own of this name looks at the incoming gradients alone: with a constant one, second derivatives with
    respect to what the forward saved would be missing without a word.
    """

    def once(ctx: Any, *incoming: Tensor | None) -> Sequence[Tensor | None]:
        saved = ctx.saved_tensors  # asked for once: checkpoints refuse a second time
        with torch.no_grad():
            found = gradients(BackwardContext(ctx, saved, ctx.needs_input_grad), *incoming)
        if not any(tensor is not None and tensor.requires_grad for tensor in (*incoming, *saved)):
            return found
        message = b"the gradient of a fused norm cannot be differentiated again"
        raising: Callable[..., Any] = torch._C._functions.DelayedError(message, len(found))
        return raising(*[None if tensor is None else tensor.detach().requires_grad_() for tensor in found])

    return once


def given(tensor: Tensor | None, like: Tensor) -> Tensor:
    """``tensor``, or the empty one that an operator returns where there is none: a schema has no optional results."""
    return like.new_empty(0, dtype=torch.float32) if tensor is None else tensor
