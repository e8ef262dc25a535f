"""Which calls in compiled graphs are left to the compiler, as PyTorch's own operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .autocast import autocast_dtype

min_numel_in_graphs = 2**23
"""Elements of the first tensor below which a call in a compiled graph is left to the compiler, as PyTorch's operators.

A registered operator takes the host longer than a kernel that Inductor wrote. On an H200, with compiled layers, a step
of Qwen3-0.6B took 58 ms with operators and 38 without for 512 tokens; for 16384 it is 1 to 5 % faster with them.
"""

_in_all_graphs = False


@contextmanager
def force_fused_in_graphs() -> Iterator[None]:
    """Keep operators in compiled graphs even if the compiler is faster."""
    global _in_all_graphs
    before, _in_all_graphs = _in_all_graphs, True
    try:
        yield
    finally:
        _in_all_graphs = before


def inductor_is_faster(first: Tensor) -> bool:
    """Return whether a call is traced and faster as PyTorch's operators: on small tensors, and under autocast.

    Under autocast linears cast the results of norms and gates, which Inductor does in one kernel with the formula: a
    step of 16384 tokens took 3 % longer with operators on an H200 (Qwen3-0.6B, Llama-3.2-1B).

    ``first`` is the operator's first tensor. In a patched model the stock code itself is left to the compiler.
    """
    if _in_all_graphs or not torch.compiler.is_compiling():
        return False
    return first.numel() < min_numel_in_graphs or autocast_dtype(first) is not None
