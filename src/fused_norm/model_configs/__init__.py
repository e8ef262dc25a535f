"""Facts about model families as data: tiny configs, expected specs and sites, real shapes."""

from .families import FAMILIES, Family, Shape
from .tiny_models import build, tiny_config

__all__ = ["FAMILIES", "Family", "Shape", "build", "tiny_config"]
