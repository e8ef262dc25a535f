"""Facts about model families as data: tiny configs, expected specs and sites, real shapes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .families import FAMILIES, Family, Shape

if TYPE_CHECKING:
    from .tiny_models import build, families_here, tiny_config

__all__ = ["FAMILIES", "Family", "Shape", "build", "families_here", "tiny_config"]


def __getattr__(name: str) -> Any:
    if name in ("build", "families_here", "tiny_config"):  # they need torch; commands read the table for their help
        return getattr(importlib.import_module(".tiny_models", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
