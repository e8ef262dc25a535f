"""Records of the fused operators that patched models call, and of the products that they recompute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fused_norm.kernels.operator import Operator
from fused_norm.patcher import recompute_linears


@pytest.fixture
def launches(monkeypatch) -> list[str]:
    """The names of the public operators, as patched modules call them."""
    calls: list[str] = []
    call, run_cached = Operator.__call__, Operator.run_cached

    def note(operator, arguments):
        calls.append(operator.public_name(*arguments))

    def counted(operator, *arguments):
        note(operator, arguments)
        return call(operator, *arguments)

    def counted_if_cached(operator, replaces, *arguments):
        found = run_cached(operator, replaces, *arguments)
        if found is not None:
            note(operator, arguments)
        return found

    monkeypatch.setattr(Operator, "__call__", counted)
    monkeypatch.setattr(Operator, "run_cached", counted_if_cached)
    return calls


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the weights, ``[K, N]``, that products are recomputed with."""
    shapes: list[tuple[int, ...]] = []
    compute = recompute_linears._linear

    def noted(x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        shapes.append(tuple(weight.shape))
        return compute(x, weight, *bias)

    monkeypatch.setattr(recompute_linears, "_linear", noted)
    return shapes


@pytest.fixture
def recomputed_by(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the operators that make outputs again."""
    names: list[str] = []
    call = Operator.results_of

    def noted(operator: Operator, *arguments: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:
            names.append(operator.name)
        return call(operator, *arguments)

    monkeypatch.setattr(Operator, "results_of", noted)
    return names
