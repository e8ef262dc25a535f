"""Norms whose readers are known: each reader gets an output of its own, and all of these are one tensor in memory.

The linears behind a norm read the same tensor. Autograd adds up their gradients in kernels of its own, and under
autocast each of them casts the tensor for itself, and its gradient back. Here the tensor is written once, in the dtype
that the readers cast it to, and the norm's backward takes the gradients of all readers as they are. It adds them as
autograd does: in the norm's own dtype, the last reader's first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

from torch import Tensor

from ..spec import NormSpec
from . import reference
from .add_rms_norm import AddRMSNorm
from .norm_add_norm import NormAddNorm
from .operator import BackwardCall, Route, by_kernels
from .rms_norm import NormOperator
from .triton.memory import norm_dtype, written_dtype

_READERS = "int readers, ScalarType? dtype"


class NormForReaders(NormOperator):
    """A norm with a number of readers, and the dtype that they cast it to where its own is float32, or None.

    A call that is trained returns y for each reader and then s; one that is not, y and s.
    """

    def handed_out(self, arguments: Sequence[Any], results: Sequence[Any], *, trained: bool) -> tuple[Tensor, ...]:
        y, s, *_ = results
        readers = arguments[-2] if trained else 1
        return (y, *(y.detach() for _ in range(readers - 1)), s)

    def by_output(self, found: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        return [found[:-1], found[-1:]]

    def gradients_by(self, route: Route, spec: NormSpec, call: BackwardCall) -> tuple[Tensor | None, ...]:
        *dys, ds = call.incoming
        present = tuple([dy for dy in reversed(dys) if dy is not None])
        dy: Any = present
        if len(present) < 2:
            dy = present[0] if present else None
        elif route is not by_kernels:
            given = self.backward_by_name(call._replace(incoming=(None, ds)))
            dtype = norm_dtype(spec, self._normalised(given)[0].dtype, given["weight"])
            dy = reduce(add, [one.to(dtype) for one in present])
        return super().gradients_by(route, spec, call._replace(incoming=(dy, ds)))


class RMSNormForReaders(NormForReaders):
    """The norm of x, and x again for the residual connection: the gradients of both meet in the norm's backward."""

    name = "rms_norm_for_readers"
    plain_name = "rms_norm"
    tensors = "Tensor x, Tensor? weight"
    options = _READERS
    outputs = ("y", "s")
    kept = ("rstd",)
    saved = "Tensor x, Tensor? weight, Tensor rstd"
    gradients = ("dx", "dw")

    def reference(self, spec: NormSpec, *arguments: Any) -> tuple[Tensor, Tensor]:
        x, weight, _, dtype = arguments
        return _cast(reference.rms_norm(spec, x, weight), dtype), x

    def handed_out(self, arguments: Sequence[Any], results: Sequence[Any], *, trained: bool) -> tuple[Tensor, ...]:
        *ys, _ = super().handed_out(arguments, results, trained=trained)
        x = arguments[0]
        return (*ys, x.detach() if trained else x)


class AddRMSNormForReaders(NormForReaders, AddRMSNorm):
    """``add_rms_norm`` with its readers known."""

    name = "add_rms_norm_for_readers"
    plain_name = "add_rms_norm"
    options = f"float scale, {_READERS}"

    def reference(self, spec: NormSpec, *arguments: Any) -> tuple[Tensor, Tensor]:
        x, residual, weight, scale, _, dtype = arguments
        y, s = reference.add_rms_norm(spec, x, residual, weight, scale)
        return _cast(y, dtype), s


class NormAddNormForReaders(NormForReaders, NormAddNorm):
    """``norm_add_norm`` with its readers known."""

    name = "norm_add_norm_for_readers"
    plain_name = "norm_add_norm"
    options = _READERS

    def reference(self, spec: NormSpec, *arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, _, dtype = arguments
        y, s = reference.norm_add_norm(spec, *tensors)
        return _cast(y, dtype), s


def _cast(y: Tensor, dtype: Any) -> Tensor:
    return y.to(written_dtype(y.dtype, dtype))


RMS_NORM_FOR_READERS = RMSNormForReaders()
ADD_RMS_NORM_FOR_READERS = AddRMSNormForReaders()
NORM_ADD_NORM_FOR_READERS = NormAddNormForReaders()
