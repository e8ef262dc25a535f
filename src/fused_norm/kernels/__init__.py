"""The operators: fused Triton kernels, forward and backward, that any PyTorch code can call."""

from .add_rms_norm import add_rms_norm
from .plans import MODES
from .rms_norm import rms_norm

__all__ = ["MODES", "add_rms_norm", "rms_norm"]
