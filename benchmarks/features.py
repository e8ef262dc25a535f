"""``python -m benchmarks features``: the time that each option of ``apply_fused_norm`` saves, on whole models.

The times of one run drift by more than most options bring, so a variant is compared with ``fused`` of the same round.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import models
from .benchmark_run import BenchmarkRun
from .model_cases import FEATURES as CASES
from .model_cases import ModelCase
from .model_variants import FEATURES as VARIANTS

__all__ = ["CASES", "VARIANTS", "measure"]


def measure(run: BenchmarkRun, cases: Sequence[ModelCase], variants: Sequence[str], dtype: torch.dtype) -> None:
    """Compare the variants on every case, as far as time allows; the base is always among them."""
    models.measure(run, cases, [name for name in VARIANTS if name in (*variants, models.BASE)], dtype, "features")
