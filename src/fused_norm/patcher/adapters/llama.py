"""Llama: pre-norm layers."""

from .adapter import Adapter

LLAMA = Adapter(
    family="llama",
    model_types=("llama",),
    casting="llama",
    zero_centered=False,
    layer_norms=("input_layernorm", "post_attention_layernorm"),
    residual_norms=("post_attention_layernorm",),
)
