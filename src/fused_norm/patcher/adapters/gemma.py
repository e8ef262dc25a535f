"""Gemma: zero-centered norms; from Gemma 2 on also after each sublayer, from Gemma 3 on also on queries and keys."""

from dataclasses import replace

from .llama import LLAMA

GEMMA = replace(LLAMA, family="gemma", model_types=("gemma",), casting="gemma", zero_centered=True)
GEMMA2 = replace(
    GEMMA,
    family="gemma2",
    model_types=("gemma2",),
    layer_norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    residual_norms=("pre_feedforward_layernorm",),
    sandwich_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
)
GEMMA3 = replace(GEMMA2, family="gemma3", model_types=("gemma3_text",), qk_norms=("q_norm", "k_norm"))
