"""What tests of patched models watch."""

from __future__ import annotations

import pytest

from fused_norm.patcher import blocks, runtime


@pytest.fixture
def launches(monkeypatch) -> list[str]:
    """The names of the kernels' public operators, as patched modules call them."""
    calls: list[str] = []
    names = {runtime: ("rms_norm", "add_rms_norm"), blocks: ("norm_add", "norm_add_norm", "qk_norm", "qk_norm_rope")}
    for module, name in ((module, name) for module, its in names.items() for name in its):
        real = getattr(module, name)

        def counted(*args, _real=real, _name=name, **kwargs):
            calls.append(_name)
            return _real(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)
    return calls


@pytest.fixture
def taken(monkeypatch) -> list[bool]:
    """For every call of a norm of one tensor: whether a layer had left its result there already."""
    calls: list[bool] = []
    real = runtime.take

    def spy(norm, x):
        y = real(norm, x)
        calls.append(y is not None)
        return y

    monkeypatch.setattr(runtime, "take", spy)
    return calls
