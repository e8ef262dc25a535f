"""A plugin for axolotl that patches the models it loads.

In a config of axolotl:

    plugins:
      - fused_norm.integrations.axolotl.FusedNormPlugin
    fused_norm:
      recompute: true
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin  # type: ignore[import-not-found]
from pydantic import BaseModel, field_validator
from torch import nn

from ..options import FuseOptions
from ..patcher import apply_fused_norm


class FusedNormArgs(BaseModel):
    """The keys that the plugin adds to a config.

    Attributes:
        fused_norm: options of ``apply_fused_norm`` by name; None takes the defaults.
    """

    fused_norm: dict[str, Any] | None = None

    @field_validator("fused_norm")
    @classmethod
    def _checked(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        try:
            FuseOptions(**value or {})
        except TypeError as error:  # pydantic reports a ValueError with the key's name
            raise ValueError(str(error)) from error
        return value


class FusedNormPlugin(BasePlugin):
    """Patches every model that axolotl has loaded, adapters included, with the options under ``fused_norm``.

    axolotl's own changes of classes and modules come first, so the report says what they leave to fuse.
    """

    def get_input_args(self) -> str:
        """The class with the keys that the plugin adds to a config."""
        return f"{FusedNormArgs.__module__}.{FusedNormArgs.__name__}"

    def post_model_load(self, cfg: Any, model: nn.Module) -> None:
        """Patch a model.

        Raises:
            FusedNormError: as ``apply_fused_norm``.
        """
        options = FuseOptions(**cfg.fused_norm or {})
        apply_fused_norm(model, **vars(options))
