"""Norms that write their result in FP8, for linears that read it, and norms that read FP8."""

from .cast import dequantize, quantize
from .formats import FORMATS, FP8Format, format_of
from .operators import add_rms_norm_fp8, rms_norm_columns_fp8, rms_norm_fp8
from .quantized import Quantized

__all__ = [
    "FORMATS",
    "FP8Format",
    "Quantized",
    "add_rms_norm_fp8",
    "dequantize",
    "format_of",
    "quantize",
    "rms_norm_columns_fp8",
    "rms_norm_fp8",
]
