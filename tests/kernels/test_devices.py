"""Where kernels run, and what plans are told of a device."""

from __future__ import annotations

import pytest
import torch
import triton

from fused_norm.kernels.plans import Device
from fused_norm.kernels.triton.devices import INTERPRETED, device_facts, runs_kernels_on


def test_kernels_run_on_gpus_and_meta_and_interpreted_cpu_tensors() -> None:
    cpu, meta, double = torch.ones(1), torch.ones(1, device="meta"), torch.ones(1, dtype=torch.float64)
    assert runs_kernels_on(cpu) == runs_kernels_on(cpu, None, cpu) == INTERPRETED
    assert runs_kernels_on(meta)
    assert not runs_kernels_on(double)
    assert not runs_kernels_on(meta, double)
    with torch.autograd.forward_ad.dual_level():
        assert not runs_kernels_on(meta)


def test_facts_of_the_cpu() -> None:
    assert device_facts(torch.device("cpu")) == Device(processors=4)


@pytest.mark.gpu
def test_facts_of_the_gpu() -> None:
    facts = device_facts(torch.device("cuda", 0))
    properties = torch.cuda.get_device_properties(0)
    assert facts.processors == properties.multi_processor_count
    assert facts.warp_size == 32
    assert facts.shared_memory == triton.runtime.driver.active.utils.get_device_properties(0)["max_shared_mem"]
    assert facts.overlaps == (properties.major >= 9 and torch.version.hip is None)
