"""A record of the fused operators that patched models call."""

from __future__ import annotations

import pytest

from fused_norm.patcher import fused_block, fused_norm_module

OPERATORS = {
    fused_norm_module: ("rms_norm", "add_rms_norm"),
    fused_block: ("norm_add", "norm_add_norm", "qk_norm", "qk_norm_rope"),
}


@pytest.fixture
def launches(monkeypatch) -> list[str]:
    """The names of the kernels' public operators, as patched modules call them."""
    calls: list[str] = []
    for module, name in ((module, name) for module, names in OPERATORS.items() for name in names):
        real = getattr(module, name)

        def counted(*args, _real=real, _name=name, **kwargs):
            calls.append(_name)
            return _real(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)
    return calls
