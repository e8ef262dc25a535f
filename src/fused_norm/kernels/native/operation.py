"""An operator's way past Python: its ``autograd.Function``, recorded once and replayed natively."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .build import library
from .recording import NotRecordableError, recording

logger = logging.getLogger("fused_norm")


class _Context:
    """What a ``Function`` keeps of a forward for its backward; the tensors are kept apart from it."""

    zeros = True
    saved: Sequence[Tensor | None] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.zeros = value


class BackwardContext:
    """The context that a ``Function``'s backward is called with: that of its forward, and the tensors of one call."""

    def __init__(self, forward: Any, saved: Sequence[Tensor | None], needed: Sequence[bool]) -> None:
        self._forward = forward
        self.saved_tensors = saved
        self.needs_input_grad = needed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)


class Operation:
    """An operator that is tried natively first.

    ``operation.call(*tensors, *values)`` returns the operator's outputs, or NotImplemented where Python has to make
    them: without the native library, away from CUDA, for tensors that kernels cannot read in place, while anybody
    watches the dispatcher or launches. ``operation.known`` returns it as well for tensors that are not like any that
    ``call`` was given, and checked, before. Neither must be called by what ``torch.compile`` traces.
    """

    __slots__ = ("_function", "_plain", "_tensors", "_values", "call", "known")

    def __init__(
        self, function: type[torch.autograd.Function], plain: Callable[..., Any], *, tensors: int, values: int
    ) -> None:
        """``function`` and, where nothing is differentiated, ``plain`` take ``tensors`` tensors and then ``values``."""
        self._function = function
        self._plain = plain
        self._tensors = tensors
        self._values = values
        self.call: Callable[..., Any] = self._first
        self.known: Callable[..., Any] = _never

    @property
    def name(self) -> str:
        """The function's, without the underscore of what is private."""
        return self._function.__name__.lstrip("_")

    def connect(self, module: Any) -> None:
        """From now on ``call`` goes to the native library; None goes without."""
        if module is None:
            self.call = self.known = _never
            return
        native = module.Operation(
            name=self.name,
            tensors=self._tensors,
            values=self._values,
            record_forward=self._record_forward,
            record_backward=self._record_backward,
            backward=self._backward,
        )
        self.call, self.known = native, native.known

    def _first(self, lead: Any, *others: Any) -> Any:
        """The first call on a GPU loads the library, and builds it if need be."""
        if not isinstance(lead, Tensor) or not lead.is_cuda:
            return NotImplemented
        self.connect(library())
        return self.call(lead, *others)

    def _record_forward(self, arguments: Sequence[Any], differentiable: bool) -> tuple[Any, _Context, bool] | None:
        """The program, what its backward is to know, and whether that wants zeros for missing gradients."""
        context = _Context()
        try:
            # Outside of inference mode, because tensors made in it do not tell whether something wrote to them.
            with torch.inference_mode(False), torch.no_grad(), recording(arguments[: self._tensors]) as recorded:
                outputs = self._function.forward(context, *arguments) if differentiable else self._plain(*arguments)
                results = (outputs,) if isinstance(outputs, Tensor) else outputs
                program = recorded.program(results, context.saved)
        except NotRecordableError as reason:
            logger.debug("a forward of %s stays with Python: %s", self.name, reason)
            return None
        context.saved = ()
        return program, context, context.zeros

    def _record_backward(
        self, context: _Context, saved: Sequence[Any], gradients: Sequence[Any], needed: Sequence[bool]
    ) -> Any:
        try:
            with recording([*saved, *gradients]) as recorded:
                found = self._backward(context, saved, gradients, needed)
                return recorded.program(found[: len(needed)])
        except NotRecordableError as reason:
            logger.debug("a backward of %s stays with Python: %s", self.name, reason)
            return None

    def _backward(
        self, context: _Context, saved: Sequence[Any], gradients: Sequence[Any], needed: Sequence[bool]
    ) -> Sequence[Any]:
        return self._function.backward(BackwardContext(context, saved, needed), *gradients)


def _never(*_: Any) -> Any:
    return NotImplemented
