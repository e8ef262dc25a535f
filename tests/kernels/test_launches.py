"""Launch arguments that matter to compiled kernels only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import mul

import pytest
import torch

from fused_norm.kernels.backward import BackwardArguments, KernelBackward
from fused_norm.kernels.fp8 import add_rms_norm_fp8, rms_norm_fp8
from fused_norm.kernels.plans import Device
from fused_norm.kernels.triton.call import Call as BuiltCall
from fused_norm.kernels.triton.launch import Launch
from fused_norm.spec import NormSpec

from .calls import NAMES, SEQUENCES, Call, every_call, launches_of
from .conftest import ALL
from .numerics import BF16, FP16, FP32

LLAMA = NormSpec("llama")
FAR = 2**31
"""The first offset that 32 bits do not reach."""


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("width", [16, 20000])
def test_a_sum_of_shares_awaits_the_backward_that_lets_it_begin(
    overlaps: bool, width: int, device: str, on: Callable[[Device], None]
) -> None:
    on(Device(overlaps=overlaps))
    sums = 0
    for call in every_call(device, rows=1, width=width).values():
        if width > 16 and call.name not in ("rms_norm", "add_rms_norm", "norm_add_norm"):
            continue
        launched = launches_of(call.results)
        for launch, following in zip(launched, [*launched[1:], None], strict=True):
            sums += is_sum(launch)
            assert launch.options.get("launch_pdl", False) == (overlaps and is_sum(launch))
            assert launch.constants.get("OVERLAPS", False) == (overlaps and (is_sum(launch) or is_sum(following)))
    assert sums > 3


def is_sum(launch: Launch | None) -> bool:
    return launch is not None and launch.name == "_reduce_kernel"


def test_kernels_are_compiled_for_no_number_of_rows(device: str, on: Callable[[Device], None]) -> None:
    """The orders of their sums do not depend on it either."""
    on(Device(processors=1))
    few, many = (
        [
            [(launch.name, launch.constants, launch.options) for launch in launches_of(call.results)]
            for call in every_call(device, rows=rows).values()
            if call.name not in ("qk_norm", "rope")  # whose rows are heads here
        ]
        for rows in (3, 700)
    )
    assert few == many


def fused(launch: Launch) -> bool:
    """Return whether multiply-adds may be fused."""
    return bool(launch.options["enable_fp_fusion"])


def test_products_are_rounded_before_they_are_added_where_the_bits_depend_on_it(device: str) -> None:
    """It depends on it in squares of fp32 rows, two norms in one kernel, and products of angles and of gates."""
    for dtype in (FP32, BF16, FP16):
        for call in every_call(device, dtype=dtype).values():
            forward = launches_of(call.outputs)[0]
            rounded = call.name in ("glu", "expert_gate", "rope", "norm_add", "norm_add_norm")
            rounded = rounded or (dtype == FP32 and call.name in ("rms_norm", "add_rms_norm"))
            rounded = rounded or (call.name == "qk_norm" and call.tensors[4] is not None)
            assert fused(forward) == (not rounded), (call.name, dtype)
        x, w = (torch.randn(shape, device=device).to(dtype) for shape in ((3, 128), (128,)))
        for r, wide in ((None, dtype), (x, dtype), (x.float(), FP32)):
            norm = partial(rms_norm_fp8, x, w) if r is None else partial(add_rms_norm_fp8, x, r, w)
            (launch,) = launches_of(partial(norm, fp8_format="block128"))
            assert fused(launch) == (wide != FP32)


def test_a_grid_has_no_more_programs_along_its_second_axis_than_a_gpu_takes(on: Callable[[Device], None]) -> None:
    on(Device())
    norm, x = ALL["rms_norm"], torch.empty(2**18, 16_400, device="meta")
    arguments, results = (x, None, LLAMA, None), [None, torch.empty(2**18, 1, device="meta"), None]
    saved, facts = norm.save(arguments, results)
    launched = launches_of(
        lambda: BuiltCall.at_once(norm.backward, BackwardArguments((x,), saved, facts, [True, False]))
    )
    assert [launch.grid[1] for launch in launched] == [1, 65_535]


def expanded(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Return rows that are all one row in memory, so that offsets into them stay small."""
    return torch.empty(shape[-1], dtype=dtype, device="meta").expand(shape)


def is_far(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and sum(map(mul, tensor.shape, tensor.stride())) >= FAR


def offsets(call: Call) -> tuple[list[bool], list[bool]]:
    """Return whether offsets are 64 bits wide, of each launch with a tensor of 2^31 elements in both directions.

    Launches that read such a tensor once for all rows, or that always use 64 bits, are left out.
    """
    operator, arguments = ALL[call.name], (*call.tensors, *call.options)
    results: list[torch.Tensor] = []
    forward = launches_of(lambda: results.extend(BuiltCall.at_once(operator.forward, *arguments, training=True)))
    saved, facts = operator.save(arguments, results)
    outputs = results[: len(operator.outputs)]
    incoming = [None if output is None else expanded(*output.shape, dtype=output.dtype) for output in outputs]
    needed = [tensor is not None for tensor in call.tensors[: call.differentiated]]
    gradients = BackwardArguments(incoming, saved, facts, needed)
    backward = launches_of(
        lambda: operator.compute_grads(lambda own, given: BuiltCall.at_once(own.backward, given), gradients)
    )

    def has_wide_offsets(launched: list[Launch]) -> list[bool]:
        far = [launch for launch in launched if any(map(is_far, launch.tensors))]
        flags = [launch.constants.get("INT64", getattr(launch.constants.get("SHAPE"), "LONG", None)) for launch in far]
        return [bool(flag) for flag in flags if flag is not None]

    return has_wide_offsets(forward), has_wide_offsets(backward)


@pytest.mark.parametrize("case", [case for case in NAMES if case not in SEQUENCES])
def test_offsets_into_results_are_64_bits_wide_if_32_do_not_reach(case: str, on: Callable[[Device], None]) -> None:
    on(Device())
    call = every_call("cpu")[case]

    def large(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 4:
            return torch.empty_like(tensor, device="meta")
        return expanded(2, FAR // 64, 2, tensor.shape[-1], dtype=tensor.dtype)

    forward, backward = offsets(call.converted(large))
    assert forward
    assert backward
    assert all(forward + backward)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "block128", "mxfp8"])
def test_offsets_into_codes_are_64_bits_wide_if_32_do_not_reach(name: str, on: Callable[[Device], None]) -> None:
    on(Device())
    x, w = expanded(FAR // 128, 128), torch.empty(128, device="meta")
    forward = ALL["norm_fp8"].forward
    launched = launches_of(lambda: BuiltCall.at_once(forward, x, x, w, None, None, LLAMA, 1.0, name, training=True))
    far = [launch for launch in launched if any(map(is_far, launch.tensors))]
    assert far
    assert all(launch.constants["INT64"] for launch in far)


@pytest.mark.parametrize("width", [128, 16_400])
def test_offsets_into_codes_are_as_wide_in_their_backward(width: int, on: Callable[[Device], None]) -> None:
    on(Device())
    rows = FAR // width + 1
    codes, scales = expanded(rows, width, dtype=torch.float8_e4m3fn), expanded(rows, width // 16)
    saved = codes, scales, torch.empty(width, device="meta"), torch.empty(rows, 1, device="meta")
    incoming, facts = (None, None, expanded(rows, width), None, None), (LLAMA, BF16, BF16, 1.0, False)
    given = BackwardArguments(incoming, saved, facts, (True, False, True))
    norm = ALL["norm_fp8"]
    launched = launches_of(lambda: BuiltCall.at_once(lambda call: norm.compute_grads(KernelBackward(call), given)))
    far = [launch for launch in launched if any(map(is_far, launch.tensors))]
    assert far
    assert all(launch.constants.get("INT64", True) for launch in far)


@pytest.mark.parametrize(
    ("rows", "k", "n", "rank"), [(2**20, 16, 2**11, 4), (2**20, 2**11, 16, 4), (2**23, 16, 16, 256)], ids=str
)
def test_offsets_into_any_product_of_an_adapter_are_64_bits_wide_if_32_do_not_reach(
    rows: int, k: int, n: int, rank: int
) -> None:
    a, b = (torch.empty(shape, device="meta") for shape in ((rank, k), (n, rank)))
    forward, backward = offsets(Call("lora_add", (expanded(rows, n), expanded(rows, k), a, b), (0.7,)))
    assert all(forward + backward)
    assert len(forward + backward) == {4: 1, 256: 5}[rank]
