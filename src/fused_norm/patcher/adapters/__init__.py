"""What families of models are known to have: data that the engine's result is checked against.

The engine finds and proves every site by itself, in models of any family. An adapter says what must be among them, so
that a release of transformers which renames a norm or changes a formula is noticed and not silently left unfused.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from .adapter import Adapter
from .gemma import GEMMA, GEMMA2, GEMMA3
from .llama import LLAMA
from .qwen3 import QWEN3

__all__ = ["ADAPTERS", "Adapter", "stacks"]

ADAPTERS: tuple[Adapter, ...] = (LLAMA, QWEN3, GEMMA, GEMMA2, GEMMA3)


def stacks(model: nn.Module) -> Iterator[tuple[str, nn.Module, Adapter]]:
    """The decoders of known families in ``model``, with their paths."""
    for path, module in model.named_modules():
        model_type = getattr(getattr(module, "config", None), "model_type", None)
        for adapter in ADAPTERS:
            layers = getattr(module, adapter.layers, None)
            if model_type in adapter.model_types and isinstance(layers, nn.ModuleList):
                yield path, module, adapter
