"""Finding the norms of a model, proving what they compute, and putting fused classes on them."""

from .apply import apply_fused_norm, remove_fused_norm
from .load import from_pretrained, on_load
from .options import FuseOptions
from .report import PatchReport, Site
from .runtime import disabled

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
