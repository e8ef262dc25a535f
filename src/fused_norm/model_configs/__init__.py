"""Facts about model families as data: tiny configs, expected specs and sites, real shapes."""

from .build import build, tiny_config
from .families import FAMILIES, Family, Shape

__all__ = ["FAMILIES", "Family", "Shape", "build", "tiny_config"]
