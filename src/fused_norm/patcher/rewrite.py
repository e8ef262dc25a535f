"""What is to be changed in a forward."""

from __future__ import annotations

from dataclasses import dataclass

from .activation_recognition import Activation


@dataclass(frozen=True)
class Rewrite:
    """A match of a pattern in a forward that is to be fused.

    Attributes:
        pattern: the list in ``Patterns`` that has the match, such as ``adds``.
        index: the match's index in that list.
        parts: what of it is fused. Of an add: ``norm``, ``inner``, ``dropout``, ``consumers``, and ``called`` for a
            norm whose call other code sees; of a consumed norm: ``consumers``, ``input``; of heads: ``rotation``; of
            inputs: the attributes of the linears.
        activation: that of a gate.
    """

    pattern: str
    index: int
    parts: tuple[str, ...] = ()
    activation: Activation | None = None
