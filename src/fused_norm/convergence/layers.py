"""A model's layers, in the order they run in."""

from __future__ import annotations

from torch import nn


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The members of the outermost ``ModuleList`` of each branch of ``model``, by path, in order."""
    found: dict[str, nn.Module] = {}

    def search(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            below = f"{path}.{name}" if path else name
            if isinstance(module, nn.ModuleList):
                found[below] = child
            else:
                search(child, below)

    search(model, "")
    return found
