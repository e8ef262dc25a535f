"""Operators, heads with their loss, and models that are so small that measuring them takes no time."""

from benchmarks.loss_cases import LossCase
from benchmarks.model_cases import ModelCase
from benchmarks.operator_cases import OPERATORS, OperatorCase

OPERATOR_CASES = tuple(
    OperatorCase.named(f"{name} {shape} {option}".rstrip())
    for name, operator in OPERATORS.items()
    for shape in ["4x(4+2)x64" if "qk" in name or name == "rope" else "128x128" if "fp8" in name else "8x64"]
    for option in operator.options
)
"""Every operator with all of its options."""

LOSS_CASES = (
    *(
        LossCase.named(f"linear_cross_entropy 21x16x37{words}")
        for words in ("", " masked", " frozen", " softcap", " masked frozen softcap")
    ),
    *(
        LossCase.named(f"linear_log_probs 21x16x37 {words}")
        for words in ("weighted", "frozen weighted", "uniform", "masked frozen softcap uniform", "masked weighted")
    ),
)
"""Every option of losses, alone and combined with the others."""

MODEL_CASES = (
    ModelCase.named("tiny-gemma3_text 1x8"),
    *(
        ModelCase.named(f"tiny-qwen3 {step}")
        for step in (
            "loss masked 2x8", "autocast checkpointing 1x8", "lora dropout loss 1x8", "qlora 1x8", "packed 1x16",
            "fsdp2 1x16", "generate static 2x2",
        )
    ),
)  # fmt: skip
"""Every option of steps except ``image``."""
