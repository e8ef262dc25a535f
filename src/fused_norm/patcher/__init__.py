"""Recognising the norms of a model by what they compute, and replacing their classes by fused ones."""

from ..kernels.switch import disabled
from ..options import FuseOptions
from .apply import apply_fused_norm, remove_fused_norm
from .load import from_pretrained, on_load
from .patch_report import PatchReport, Site

__all__ = [
    "FuseOptions",
    "PatchReport",
    "Site",
    "apply_fused_norm",
    "disabled",
    "from_pretrained",
    "on_load",
    "remove_fused_norm",
]
