"""Launch plans: what launches of every width guarantee on every device, and the table of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fused_norm.kernels import MODES, causal_conv1d, rms_norm
from fused_norm.kernels.plans import TABLES, table_of

from .calls import every_call, launches_of
from .compiled_launches import TARGETS
from .numerics import WIDE, WIDTHS

TOO_WIDE = WIDE[-1]
"""A row that no program holds."""
HOLD = ("_forward_kernel", "_backward_kernel", "_gated_forward_kernel", "_gated_backward_kernel")


def is_power_of_2(value: int) -> bool:
    return value.bit_count() == 1


@pytest.mark.parametrize("target", ["sm_90", "sm_120", "gfx942"])
def test_tiles_hold_their_rows_and_fit_their_device(target: str, device: str, on: Callable[[Any], None]) -> None:
    gpu = TARGETS[target].device
    on(gpu)
    for width in (*WIDTHS, *WIDE):
        calls = every_call(device, rows=1, width=width)
        gated = ["gate first"] if width <= 8192 else []
        for case in ("norm", "add", "norm and add", "sandwich", *gated):
            for launch in launches_of(calls[case].results):
                constants = launch.constants
                assert 1 <= launch.options["num_warps"] * gpu.warp_size <= 1024
                assert is_power_of_2(constants["BLOCK"])
                assert is_power_of_2(constants.get("ROWS", 1))
                if launch.name == "_reduce_kernel":
                    continue
                columns = constants["BLOCK"] + constants.get("TAIL", 0)
                reads_chunks = launch.name not in HOLD
                assert reads_chunks == (width > (32768 if "forward" in launch.name else 16384)), (launch.name, width)
                assert columns >= width or reads_chunks
                tile_bytes = constants.get("ROWS", 1) * columns * 4  # at least two tensors of 16 bits
                assert 0 <= (constants.get("STAGES", 1) - 1) * tile_bytes < gpu.shared_memory


@pytest.mark.parametrize("target", ["sm_90", "sm_120", "gfx942"])
def test_tiles_of_heads_waste_little_and_fit_their_device(target: str, device: str, on: Callable[[Any], None]) -> None:
    gpu = TARGETS[target].device
    on(gpu)
    for width in (1, 64, 80, 96, 256):
        calls = every_call(device, rows=1, width=width)
        for case in ("heads", "heads rotated", "heads rotated in part"):
            for launch in launches_of(calls[case].results)[:2]:
                shape = launch.constants["SHAPE"]
                assert 1 <= launch.options["num_warps"] * gpu.warp_size <= 1024
                assert is_power_of_2(shape.BLOCK)
                assert shape.BLOCK * (2 if width == shape.R else 1) >= width
                for side, heads in zip("QK", (calls[case].tensors[0].shape[1], 1), strict=True):
                    assert is_power_of_2(launch.constants[f"{side}_TOKENS"])
                    assert is_power_of_2(launch.constants[f"{side}_HEADS"])
                    assert launch.constants[f"{side}_HEADS"] < 2 * heads
                assert launch.constants.get("STAGES", 1) >= 1


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_asked_for_is_the_mode_planned_or_a_clear_error(mode: str, device: str) -> None:
    (launch,) = launches_of(lambda: rms_norm(torch.zeros(3, 80, device=device), None, mode=mode))
    assert launch.constants.get("PERSISTENT") == {"multi_wave_reload": None}.get(mode, mode == "static_persistent")
    wide = torch.zeros(1, TOO_WIDE, device=device)
    if mode == "multi_wave_reload":
        assert len(launches_of(lambda: rms_norm(wide, None, mode=mode))) == 1
    else:
        with pytest.raises(ValueError, match=f"holds rows of up to 32768 elements, not {TOO_WIDE}; use multi_wave_rel"):
            rms_norm(wide, None, mode=mode)


def test_a_device_takes_its_own_table_or_the_rules() -> None:
    for table in TABLES:
        assert table_of(table.device, table.capability) == (table, "measured on this device")
    assert table_of("NVIDIA GH200 480GB", "9.0")[0] is TABLES[0]
    assert "same architecture (9.0)" in table_of("NVIDIA GH200 480GB", "9.0")[1]
    assert "nothing was measured" in table_of("cpu", "")[1]


@pytest.mark.parametrize("taps", [2, 3, 4])
def test_pieces_of_a_convolution_and_the_rows_behind_them_are_walked_through_in_fours(taps: int, device: str) -> None:
    x, weight = (torch.randn(shape, device=device).requires_grad_() for shape in ((1, 9, 200), (200, taps)))
    launches = launches_of(lambda: causal_conv1d(x, weight, None, "silu").sum().backward())
    forward, backward = (launch.constants["ROWS"] for launch in launches if "conv" in launch.name)
    assert forward % 4 == (backward + taps - 1) % 4 == 0
