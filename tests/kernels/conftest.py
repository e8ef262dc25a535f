from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fused_norm.kernels.launch import Launch
from fused_norm.kernels.native.operation import Operation


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Fresh memory is NaN, so that an element no kernel writes, or one read from outside a tensor, shows."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    assert torch.empty_strided((3, 1), (1, 1)).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _python_where_it_is_patched(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test puts into Python's launches is seen: nothing is replayed around it, unless that is what it tests."""
    if "native" in request.module.__name__ or "monkeypatch" not in request.fixturenames:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for way in ("call", "known"):
            patch.setattr(Operation, way, property(lambda _: lambda *_: NotImplemented))
        yield


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels, in the order in which they are launched."""
    names: list[str] = []
    launch = Launch.__call__

    def recorded(self: Launch, *args: object) -> None:
        names.append(self.name)
        launch(self, *args)

    monkeypatch.setattr(Launch, "__call__", recorded)
    return names
