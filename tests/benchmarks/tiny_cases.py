"""Operators and models so small that measuring them takes no time."""

from __future__ import annotations

from typing import get_args

from benchmarks.model_cases import ModelCase, StepKind
from benchmarks.operator_cases import OPERATORS, OperatorCase

OPERATOR_CASES = tuple(
    OperatorCase.named(f"{name} {shape} {option}".rstrip())
    for name, operator in OPERATORS.items()
    for shape in ["4x(4+2)x64" if "qk" in name or name == "rope" else "128x128" if "fp8" in name else "8x64"]
    for option in operator.options
)
"""Every operator with all of its options."""

MODEL_CASES = (
    ModelCase.named("tiny-gemma3_text 1x16"),
    *(
        ModelCase.named(f"tiny-qwen3 {step} {2 if step == 'generate static' else 1}x{2 if 'generate' in step else 16}")
        for step in get_args(StepKind)
        if step not in ("body", "image")
    ),
)
"""Every kind of step but that with an image."""
