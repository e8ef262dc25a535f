"""The operators: fused Triton kernels, forward and backward, that any PyTorch code can call."""

from .causal_conv1d import causal_conv1d
from .experts import expert_bias, expert_gate, expert_permute, expert_unpermute
from .gated_rms_norm import gated_rms_norm
from .glu import glu
from .linear_cross_entropy import linear_cross_entropy
from .linear_log_probs import LogProbs, linear_log_probs
from .lora import lora_add
from .norm import add_rms_norm, norm_add, norm_add_norm, rms_norm
from .norm_kernels import MODES
from .qk_norm_rope import qk_norm, qk_norm_rope, rope

__all__ = [
    "MODES",
    "LogProbs",
    "add_rms_norm",
    "causal_conv1d",
    "expert_bias",
    "expert_gate",
    "expert_permute",
    "expert_unpermute",
    "gated_rms_norm",
    "glu",
    "linear_cross_entropy",
    "linear_log_probs",
    "lora_add",
    "norm_add",
    "norm_add_norm",
    "qk_norm",
    "qk_norm_rope",
    "rms_norm",
    "rope",
]
