"""Norms that write their result in FP8, for linears that read it, and norms that read FP8."""

from .formats import FORMATS, FP8Format, Quantized, dequantize, quantize
from .operators import add_rms_norm_fp8, rms_norm_fp8

__all__ = ["FORMATS", "FP8Format", "Quantized", "add_rms_norm_fp8", "dequantize", "quantize", "rms_norm_fp8"]
