"""Fixtures that record the fused operators that patched models call, and the products that they recompute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_norm.kernels.operator import Operator
from fused_norm.patcher import recompute_linears
from fused_norm.patcher.lazy_logits import Projection


@pytest.fixture
def launches(monkeypatch) -> list[str]:
    """Return a list of the names of the public operators that patched modules call."""
    calls: list[str] = []
    call, try_fused = Operator.__call__, Operator.try_fused

    def note(operator, arguments):
        calls.append(operator.public_name(*arguments))

    def counted(operator, *arguments):
        note(operator, arguments)
        return call(operator, *arguments)

    def counted_if_repeated(operator, *arguments, **how):
        before = len(calls)
        outputs, reason = try_fused(operator, *arguments, **how)
        if outputs is not None and len(calls) == before:  # a new call is one of the operator
            note(operator, arguments)
        return outputs, reason

    monkeypatch.setattr(Operator, "__call__", counted)
    monkeypatch.setattr(Operator, "try_fused", counted_if_repeated)
    return calls


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the functions that recompute the products of linears, one for each call."""
    called: list[str] = []

    def noted(compute: Callable[..., Any], *operands: Any, **how: Any) -> Any:
        called.append(compute.__name__)
        return compute(*operands, **how)

    for name in ("_linear", "_with_adapter", "_linear_in_4_bits"):
        monkeypatch.setattr(recompute_linears, name, partial(noted, getattr(recompute_linears, name)))
    return called


@pytest.fixture
def recomputed_by(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the names of the operators that recompute outputs in a backward."""
    names: list[str] = []
    call = Operator.results_of

    def noted(operator: Operator, *arguments: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:
            names.append(operator.name)
        return call(operator, *arguments)

    monkeypatch.setattr(Operator, "results_of", noted)
    return names


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows by one item whenever logits are computed because somebody reads them."""
    calls: list[str] = []
    compute = Projection.compute

    def noted(projection: Projection) -> Tensor:
        calls.append("read")
        return compute(projection)

    monkeypatch.setattr(Projection, "compute", noted)
    return calls
