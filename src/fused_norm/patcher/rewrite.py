"""What is to be changed in a forward."""

from __future__ import annotations

from dataclasses import dataclass

from .activation_recognition import Activation


@dataclass(frozen=True)
class Rewrite:
    """A match in a forward that is to be fused.

    Attributes:
        pattern: the matches it is one of: ``adds``, ``readings``, ``inputs``, ``heads``, ``rotations``, ``gates`` or
            ``convolutions``.
        index: its number among these.
        parts: what of it: of an add ``norm``, ``inner``, ``dropout`` and ``readers``, and ``called`` for a norm whose
            call other code sees; of a reading ``readers`` and ``input``; of norms of heads ``rotation``, or nothing; of
            inputs the attributes of the linears.
        activation: that of a gate, or of a module that convolves.
    """

    pattern: str
    index: int
    parts: tuple[str, ...] = ()
    activation: Activation | None = None
