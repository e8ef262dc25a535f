"""Facts about model families as data: tiny configs, expected specs and sites, real shapes."""

from fused_norm.model_configs.build import build, tiny_config
from fused_norm.model_configs.families import FAMILIES, Family, Shape

__all__ = ["FAMILIES", "Family", "Shape", "build", "tiny_config"]
