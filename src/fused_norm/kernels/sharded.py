"""Tensors that PyTorch spreads over devices (DTensors), and calls of operators on the part that each device holds.

Rows are computed where they are, and nothing is sent. A replicated weight gets a Partial gradient, as from PyTorch's
own operators: each rank contributes the sum over its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PYTORCHS_FUNCTIONS: tuple[Any, ...] = (
    vars(Tensor)["__torch_function__"].__func__,
    torch._C._disabled_torch_function_impl,
)
"""The ``__torch_function__`` of tensors, and that of parameters."""


def is_plain(value: Any) -> bool:
    """Return whether a value is a tensor without behaviour of its own, as DTensors and quantised tensors have.

    A class with a ``__torch_function__`` of its own may compute anything in place of PyTorch's functions.
    """
    if type(value) is Tensor:
        return True
    if not isinstance(value, Tensor) or is_traceable_wrapper_subclass(value):
        return False
    functions = type(value).__torch_function__
    return getattr(functions, "__func__", functions) in _PYTORCHS_FUNCTIONS


def is_sharded(value: Any) -> bool:
    """Return whether a value is a DTensor, of whatever placement."""
    if not isinstance(value, Tensor) or is_plain(value) or not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor  # slow to import, and already imported if there are any

    return isinstance(value, DTensor)


def is_taken(value: Any) -> bool:
    """Return whether operators take tensors of this kind: plain ones, DTensors, and results of running collectives.

    Such a result waits for its collective when an operator reads it.
    """
    if is_plain(value) or is_sharded(value):
        return True
    if not isinstance(value, Tensor) or not torch.distributed.is_available():
        return False
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return isinstance(value, AsyncCollectiveTensor)


def why_not_on_parts(rows: Sequence[Any], weights: Sequence[Any] = (), *, elementwise: bool = False) -> str | None:
    """Return the reason that a device cannot compute its part of a call alone; None if all can, or without DTensors.

    An empty reason is not logged: in compiled graphs the compiler fuses what DTensor does.

    Args:
        rows: the tensors that are computed row by row, the first of which is present; None for absent ones.
        weights: the tensors that every row needs, or None.
        elementwise: the rows themselves may be sharded.
    """
    tensors = [t for t in (*rows, *weights) if t is not None]
    if not any(map(is_sharded, tensors)):
        return None
    if torch.compiler.is_compiling():
        return ""
    if not all(map(is_sharded, tensors)):
        return "DTensors and plain tensors meet in it"
    first = rows[0]
    if any(t.device_mesh != first.device_mesh for t in tensors):
        return "its DTensors are on several meshes"
    if any(t is not None and t.placements != first.placements for t in rows):
        return "its DTensors are placed in several ways"
    if not all(_is_replicated(t) for t in weights if t is not None):
        return "not every device has the weight as a whole"
    dims = range(first.dim() if elementwise else first.dim() - 1)
    for placement in first.placements:
        if not placement.is_replicate() and _shard_dim(first, placement) not in dims:
            return f"the input is placed as {placement!r}"
    return None


def are_angles_of(x: Any, angles: Sequence[Any], heads_dim: int) -> bool:
    """Return whether every device has the cos and sin of all its tokens; both are DTensors if x is one, and else not.

    ``heads_dim``: the only dimension that x may be sharded along.
    """
    if not is_sharded(x):
        return all(map(is_plain, angles))
    return all(is_sharded(t) and t.device_mesh == x.device_mesh and _is_replicated(t) for t in angles) and all(
        placement.is_replicate() or _shard_dim(x, placement) == heads_dim for placement in x.placements
    )


def call_on_parts(call: Callable[..., Any], tensors: Sequence[Any], shared: Sequence[bool]) -> Any:
    """The outputs of ``call(*tensors)`` for DTensors, as DTensors placed as the first; ``why_not_on_parts`` is None.

    Args:
        call: takes plain tensors, and returns one output or a tuple of them. An output has the shape of the tensor at
            its place; its rows may be shorter, if rows are not sharded.
        tensors: DTensors, or None.
        shared: which of them every row needs.
    """
    from torch.distributed.tensor import DTensor, Partial

    mesh, placements = tensors[0].device_mesh, tensors[0].placements
    sums = tuple(placement if placement.is_replicate() else Partial() for placement in placements)
    parts: list[Any] = [
        None if t is None else _Part.apply(t, sums if is_shared else placements)
        for t, is_shared in zip(tensors, shared, strict=True)
    ]
    for tensor, part, is_shared in zip(tensors, parts, shared, strict=True):
        if part is not None and part.requires_grad and tensor.is_leaf and not is_shared:
            # Two leaves may get one tensor as their gradient, which autograd cannot see through DTensors.
            part.register_hook(torch.clone)
    results = call(*parts)
    outputs: list[Any] = []
    for output, part, whole in zip(results if isinstance(results, tuple) else (results,), parts, tensors, strict=False):
        if output is not None:
            width = whole.shape[-1] - part.shape[-1] + output.shape[-1]
            like = torch.empty_strided(whole.shape, whole.stride(), device="meta")[..., :width]
            # Parts differ in length if devices do not divide a dimension, so the shape of the whole is an argument.
            output = DTensor.from_local(
                output, mesh, placements, run_check=False, shape=like.shape, stride=torch.empty_like(like).stride()
            )
        outputs.append(output)
    return tuple(outputs) if isinstance(results, tuple) else outputs[0]


class _Part(torch.autograd.Function):
    """The part of a DTensor that this device has; the gradient has the DTensor's shape.

    ``to_local`` of PyTorch 2.11 takes all parts to be as long as this one, and a gradient of the wrong shape is sent.
    """

    @staticmethod
    def forward(ctx: Any, whole: Any, grad_placements: tuple[Any, ...]) -> Tensor:
        """Return a new tensor on the part's memory."""
        ctx.mesh, ctx.grad_placements = whole.device_mesh, grad_placements
        ctx.shape, ctx.stride = whole.shape, whole.stride()
        part = whole.to_local()
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradient as a DTensor."""
        from torch.distributed.tensor import DTensor

        whole = DTensor.from_local(
            grad, ctx.mesh, ctx.grad_placements, run_check=False, shape=ctx.shape, stride=ctx.stride
        )
        return whole, None


def _is_replicated(tensor: Any) -> bool:
    return all(placement.is_replicate() for placement in tensor.placements)


def _shard_dim(tensor: Any, placement: Any) -> int | None:
    """The dimension that a placement shards into one piece for each device, or None."""
    from torch.distributed.tensor import Shard

    return placement.dim % tensor.dim() if type(placement) is Shard else None
