"""What an adapter says of a family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from ...spec import Casting, Kind


@dataclass(frozen=True)
class Adapter:
    """The sites of one family of decoder models.

    Attributes:
        family: its name.
        model_types: the ``config.model_type`` of the stacks it describes.
        casting, zero_centered: what all its norms compute.
        layer_norms: the norms of a decoder layer, in the order of their use.
        residual_norms: those of them that take the sum of a residual add within the layer.
        sandwich_norms: those of them whose result is added to the residual.
        qk_norms: the norms of queries and keys, in ``attention``, which rotates what they give.
        attention: where a decoder layer keeps its attention.
        layers: where a stack keeps its decoder layers.
        final_norm: the norm after the last layer.
    """

    family: str
    model_types: tuple[str, ...]
    casting: Casting
    zero_centered: bool
    layer_norms: tuple[str, ...]
    residual_norms: tuple[str, ...]
    sandwich_norms: tuple[str, ...] = ()
    qk_norms: tuple[str, ...] = ()
    attention: str = "self_attn"
    layers: str = "layers"
    final_norm: str = "norm"

    def sites(self, path: str, stack: nn.Module) -> Iterator[tuple[str, Kind]]:
        """The path and kind of every site in ``stack``, a decoder of this family found at ``path``."""
        prefix = f"{path}." if path else ""
        for index in range(len(getattr(stack, self.layers))):
            layer = f"{prefix}{self.layers}.{index}"
            yield from ((f"{layer}.{name}", "norm") for name in self.layer_norms)
            yield from ((f"{layer}.{self.attention}.{name}", "qk") for name in self.qk_norms)
            yield from ((f"{layer}.{name}", "residual") for name in self.residual_norms)
            yield from ((f"{layer}.{name}", "sandwich") for name in self.sandwich_norms)
            if self.qk_norms:
                yield f"{layer}.{self.attention}", "rope"
        yield f"{prefix}{self.final_norm}", "norm"
