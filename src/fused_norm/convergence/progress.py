"""The base class of progress reports: it is told of every run and result of a plan. Commands derive from it, so it
imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .verdict import ComparisonResult


class Progress:
    """Is told of every run and every result while a plan runs; this one ignores them."""

    def run(self, name: str) -> Callable[[int, float], object]:
        """Called when a training run begins; returns what is to be called after each step with its index and loss."""
        return lambda step, loss: None

    def done(self, result: ComparisonResult, *, kept: bool) -> None:
        """Called when a comparison has its result: from this run, or ``kept`` from an earlier one."""
