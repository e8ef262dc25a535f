"""The executor that replays an operator natively, and the switch for all of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..operator import BackwardCall, Operator, Spec, by_launches, differentiate, set_executor
from . import build
from .recorder import NotRecordableError, Program, Recorder

logger = logging.getLogger("fused_norm")

RECORDING_LIMIT = 4096
"""Recordings of an operator, and of the backwards behind each; a program that goes through more starts anew."""

_executors: dict[str, ReplayExecutor] = {}
_on = False
_connecting = threading.Lock()


def switch(on: bool) -> bool:
    """Turn native replay on or off for every operator, and return whether it was on; what was recorded is kept."""
    global _on
    before, _on = _on, on
    set_executor(_executor_of if on else None)
    return before


def state() -> str:
    """Say in a few words whether operators are replayed natively here, without compiling or loading anything."""
    found = build.state()
    return "switched off" if not _on and not found.startswith("not used") else found


def _executor_of(operator: Operator) -> ReplayExecutor:
    if operator.name not in _executors:
        _executors[operator.name] = ReplayExecutor(operator)
    return _executors[operator.name]


class ReplayExecutor:
    """Tries an operator natively.

    ``run``, ``run_known`` and ``kept`` are as in ``Executor``. The first two return NotImplemented without the native
    library, away from CUDA, for tensors that kernels cannot read in place, and while anybody watches the dispatcher or
    launches. Neither must be called by what ``torch.compile`` traces.
    """

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self.run: Callable[..., Any] = self._load_and_run
        self.run_known: Callable[..., Any] = _decline
        self.kept: Callable[[Tensor], tuple[Tensor, ...] | None] = _nothing_kept

    def connect(self, module: Any) -> None:
        """From now on run through a native library; None goes without."""
        if module is None:
            self.run, self.run_known, self.kept = _decline, _decline, _nothing_kept
            return
        native = module.Operation(
            name=type(self._operator).__name__,
            tensors=self._operator.tensor_count,
            values=self._operator.option_count,
            limit=RECORDING_LIMIT,
            record_forward=self._record_forward,
            record_backward=self._record_backward,
            backward=self._backward,
        )
        self.run, self.run_known, self.kept = native, native.known, native.kept

    def _load_and_run(self, spec: Spec, *arguments: Any) -> Any:
        """The first call on a GPU loads the library, and builds it if need be."""
        if not isinstance(arguments[0], Tensor) or not arguments[0].is_cuda:
            return NotImplemented
        with _connecting:
            if self.run == self._load_and_run:  # and no other thread was faster
                self.connect(build.library())
        return self.run(spec, *arguments)

    def _record_forward(self, call: Sequence[Any], differentiable: bool) -> tuple[Program, Any] | None:
        """The program of a forward, and what its backward is to know besides tensors; None leaves it to Python."""
        spec, *arguments = call

        def forward() -> tuple[Sequence[Any], Sequence[Any], Any]:
            results = self._operator.forward(spec, *arguments, training=differentiable)
            saved, facts = self._operator.save(arguments, results) if differentiable else ((), ())
            return results[: len(self._operator.outputs)], saved, (spec, facts)

        return self._record(arguments[: self._operator.tensor_count], forward)

    def _record_backward(
        self, known: Any, saved: Sequence[Any], incoming: Sequence[Any], needed: Sequence[bool]
    ) -> Program | None:
        if all(gradient is None for gradient in incoming):
            return None
        spec, facts = known
        count = len(self._operator.gradients)

        def backward() -> tuple[Sequence[Any], Sequence[Any], Any]:
            call = BackwardCall(incoming, saved, facts, needed[:count])
            found = self._operator.differentiate(spec, call, by_launches)
            return (*found, *[None] * (len(needed) - count)), (), None

        recorded = self._record([*saved, *incoming], backward)
        return None if recorded is None else recorded[0]

    def _record(
        self, inputs: Sequence[Any], run: Callable[[], tuple[Sequence[Any], Sequence[Any], Any]]
    ) -> tuple[Program, Any] | None:
        """The program of what ``run`` does, which returns results, what is saved, and something to hand on."""
        try:
            # Outside of inference mode, in which the dispatcher is passed over.
            with torch.inference_mode(False), torch.no_grad(), Recorder(inputs) as recorder:
                results, saved, known = run()
            return recorder.program(results, saved), known
        except NotRecordableError as reason:
            logger.debug("some calls of %s stay with Python: %s", self._operator.name, reason)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            logger.warning("some calls of %s stay with Python", self._operator.name, exc_info=True)
        return None

    def _backward(
        self, known: Any, saved: Sequence[Any], incoming: Sequence[Any], needed: Sequence[bool]
    ) -> Sequence[Any]:
        """The backward in Python, behind a forward that was replayed; a gradient for each of the tensors."""
        spec, facts = known
        count = len(self._operator.gradients)
        found = differentiate(self._operator, spec, BackwardCall(incoming, saved, facts, needed[:count]))
        return *found, *[None] * (len(needed) - count)


def _decline(*_: Any) -> Any:
    return NotImplemented


def _nothing_kept(_: Tensor) -> None:
    return None
