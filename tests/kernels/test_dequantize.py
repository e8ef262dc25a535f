"""Weights of 4 bits are dequantised to the bits that bitsandbytes gives."""

from __future__ import annotations

import itertools

import bitsandbytes.functional as bnb
import pytest
import torch
from torch import Tensor

from fused_norm.kernels.triton.dequantize_kernels import PackedWeight, launch_dequantize

from ..conftest import slow
from .numerics import BF16, FP16, FP32

SHAPES = [(64, 128), (7, 33), (3, 5), (1, 64), *slow((129, 257), (300, 64))]
"""Whole blocks, an incomplete last block, an odd number of weights, one block, more than 256 scales."""


def parts_of(codes: Tensor, state: bnb.QuantState) -> PackedWeight:
    outer = (state.state2.code, state.state2.absmax, state.offset) if state.nested else (None, None, None)
    return PackedWeight(state.code, codes, state.absmax, *outer)


def formula(weight: PackedWeight, block: int, like: Tensor) -> Tensor:
    """Dequantise the weight by PyTorch's operators."""
    scale = weight.scale
    if weight.scale_code is not None:
        outer = weight.outer_scale.repeat_interleave(256)[: len(scale)]
        scale = weight.scale_code[scale.long()] * outer + weight.offset
    packed = weight.packed.flatten().long()
    values = weight.code[torch.stack([packed >> 4, packed & 15], dim=1).flatten()[: like.numel()]]
    return (values * scale.repeat_interleave(block)[: like.numel()]).to(like.dtype).view_as(like)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_weight_has_the_bits_that_bitsandbytes_gives(
    shape: tuple[int, int], kind: str, double: bool, device: str
) -> None:
    for dtype, block in itertools.product((FP32, BF16, FP16), (64, 128, 4096)):
        weight = torch.randn(shape, device=device).to(dtype) * torch.linspace(0.1, 3, shape[1], device=device).to(dtype)
        codes, state = bnb.quantize_4bit(weight, blocksize=block, quant_type=kind, compress_statistics=double)
        w = torch.full(shape, torch.nan, dtype=dtype, device=device)
        launch_dequantize(parts_of(codes, state), block, w)
        references = [formula(parts_of(codes, state), block, weight)]
        if weight.is_cuda or shape[1] % block == 0:  # bitsandbytes is wrong on a CPU if a block has parts of two rows
            references.append(bnb.dequantize_4bit(codes, state))
        for reference in references:
            different = (w != reference).sum().item()
            assert different == 0, f"{dtype}, blocks of {block}: {different} of {w.numel()} differ"
