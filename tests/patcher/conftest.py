"""A record of the fused operators that patched models call."""

from __future__ import annotations

import pytest

from fused_norm.kernels.operator import Operator


@pytest.fixture
def launches(monkeypatch) -> list[str]:
    """The names of the public operators, as patched modules call them."""
    calls: list[str] = []
    call, known = Operator.__call__, Operator.known

    def note(operator, arguments):
        calls.append(operator.public_name(*arguments))

    def counted(operator, spec, *arguments):
        note(operator, arguments)
        return call(operator, spec, *arguments)

    def counted_if_known(operator, among, spec, *arguments):
        found = known(operator, among, spec, *arguments)
        if found is not None:
            note(operator, arguments)
        return found

    monkeypatch.setattr(Operator, "__call__", counted)
    monkeypatch.setattr(Operator, "known", counted_if_known)
    return calls
