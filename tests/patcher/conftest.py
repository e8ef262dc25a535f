"""A record of the fused operators that patched models call."""

from __future__ import annotations

import pytest

from fused_norm.kernels.operator import Operator


@pytest.fixture
def launches(monkeypatch) -> list[str]:
    """The names of the public operators, as patched modules call them."""
    calls: list[str] = []
    call = Operator.__call__

    def counted(operator, spec, *arguments):
        rotated = operator.name == "qk_norm" and arguments[4] is not None
        calls.append("qk_norm_rope" if rotated else operator.name)
        return call(operator, spec, *arguments)

    monkeypatch.setattr(Operator, "__call__", counted)
    return calls
