"""A launch is prepared once for tensors of certain dtypes, None among them, and must be given no others."""

from __future__ import annotations

import itertools

import torch

from fused_norm.kernels import add_rms_norm, norm_add_norm, qk_norm, qk_norm_rope, rms_norm

from .conftest import Launched
from .numerics import BF16, FP32


def test_a_launch_gets_tensors_of_the_same_dtypes_every_time(launches: list[Launched], device: str) -> None:
    """Norms, sandwiches and heads of one width sum their weights' gradients by the same kernel."""
    width = 64
    for x_dtype, w_dtype in ((BF16, BF16), (BF16, FP32), (FP32, FP32)):
        x, r = (torch.randn(2, 5, 3, width, device=device).to(x_dtype).requires_grad_() for _ in range(2))
        angles = torch.randn(1, 3, width, device=device, dtype=x_dtype)
        for needed in itertools.product((True, False), repeat=2):
            a, b = (torch.randn(width, device=device).to(w_dtype).requires_grad_(need) for need in needed)
            calls = (
                (rms_norm(x, a),),
                add_rms_norm(x, r, b),
                norm_add_norm(x, r, a, b),
                qk_norm(x, r, a, b),
                qk_norm_rope(x, r, a, b, angles, angles),
            )
            for outputs in calls:
                torch.autograd.backward(outputs, [torch.randn_like(output) for output in outputs])
    given: dict[int, set[tuple[torch.dtype | None, ...]]] = {}
    for one in launches:
        dtypes = tuple(None if tensor is None else tensor.dtype for tensor in one.tensors)
        given.setdefault(id(one.launch), set()).add(dtypes)
    assert len(given) > 20
    assert all(len(dtypes) == 1 for dtypes in given.values())
