"""Qwen3, dense and mixture of experts: Llama's layers, and a norm on the heads of queries and keys."""

from dataclasses import replace

from .llama import LLAMA

QWEN3 = replace(LLAMA, family="qwen3", model_types=("qwen3", "qwen3_moe"), qk_norms=("q_norm", "k_norm"))
