"""On which devices kernels run, and which device properties the plans get."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from fused_norm.kernels.plans import Device
from fused_norm.kernels.triton import devices


def _nvidia(major: int, optin: int) -> dict[str, Any]:
    return {"multi_processor_count": 7, "warp_size": 32, "shared_memory_per_block_optin": optin, "major": major}


@pytest.mark.parametrize(
    ("kind", "hip", "properties", "expected"),
    [
        ("cuda", None, _nvidia(9, 232_448), Device(7, 32, 232_448, True, True)),
        ("cuda", None, _nvidia(8, 101_376), Device(7, 32, 101_376, False, True)),
        ("cuda", None, _nvidia(7, 65_536), Device(7, 32, 65_536, False, True)),
        ("cuda", "6.4", {"multi_processor_count": 304, "warp_size": 64, "major": 9}, Device(304, 64, 65_536, False)),
        ("xpu", None, {"gpu_subslice_count": 64}, Device(64, 32, 65_536, False)),
    ],
    ids=["H100", "sm_86", "T4", "MI300", "Max 1550"],
)
def test_facts_of_gpus(
    kind: str,
    hip: str | None,
    properties: dict[str, Any],
    expected: Device,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = SimpleNamespace(get_device_properties=lambda _: SimpleNamespace(name="none known", **properties))
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(torch.version, "hip", hip)
    with caplog.at_level("WARNING", logger="fused_norm"):
        assert devices._hardware_of(torch.device(kind, 0)) == expected
    unsupported = "none known is not supported: Triton asks for compute capability 8.0 or newer"
    assert caplog.messages == [unsupported] * (hip is None and properties.get("major") == 7)


@pytest.mark.gpu
def test_facts_of_the_gpu() -> None:
    facts = devices._hardware_of(torch.device("cuda", 0))
    properties = torch.cuda.get_device_properties(0)
    assert facts.processors == properties.multi_processor_count
    assert facts.warp_size == 32
    assert facts.shared_memory == triton.runtime.driver.active.utils.get_device_properties(0)["max_shared_mem"]
    assert facts.overlaps == (properties.major >= 9 and torch.version.hip is None)
