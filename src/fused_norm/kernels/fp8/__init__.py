"""Norms that write their result in FP8, for linears that read it, and norms that read FP8."""

from .cast import dequantize, quantize
from .columns_fp8 import rms_norm_columns_fp8
from .norm_fp8 import add_rms_norm_fp8, rms_norm_fp8
from .quantized import Quantized
from .recipe import RECIPES, FP8Recipe, recipe_of

__all__ = [
    "RECIPES",
    "FP8Recipe",
    "Quantized",
    "add_rms_norm_fp8",
    "dequantize",
    "quantize",
    "recipe_of",
    "rms_norm_columns_fp8",
    "rms_norm_fp8",
]
