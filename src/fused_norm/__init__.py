"""Fused Triton kernels for norms, residual adds, rotary embeddings, gates, LoRA and losses of Hugging Face models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .spec import FusedNormError, NormSpec

if TYPE_CHECKING:
    from . import kernels
    from .patcher import (
        FuseOptions,
        PatchReport,
        Site,
        apply_fused_norm,
        disabled,
        from_pretrained,
        on_load,
        remove_fused_norm,
    )

    __version__: str

_FROM_PATCHER = (
    "FuseOptions",
    "PatchReport",
    "Site",
    "apply_fused_norm",
    "disabled",
    "from_pretrained",
    "on_load",
    "remove_fused_norm",
)

__all__ = [
    "FuseOptions",
    "FusedNormError",
    "NormSpec",
    "PatchReport",
    "Site",
    "apply_fused_norm",
    "disabled",
    "from_pretrained",
    "kernels",
    "on_load",
    "remove_fused_norm",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _FROM_PATCHER:
        return getattr(importlib.import_module(".patcher", __name__), name)
    if name == "kernels":
        return importlib.import_module(".kernels", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


def _version() -> str:
    """The version that was installed; builds take it from git's tags, so no file of this package has it."""
    from importlib import metadata

    try:
        return metadata.version("fused-norm")
    except metadata.PackageNotFoundError:  # a source tree on the path
        return "0.0"
